"""Print a report of the judge: the answer, the wrong cases with commands that reproduce them, a table and notes."""

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.checks.explain.answer import SHOWN_CHARACTERS as SHOWN_REASON
from lab.checks.explain.call_features import features_of_case
from lab.checks.explain.diagnosis import CaseResult
from lab.checks.explain.literal import Literal
from lab.checks.parameters.attention import is_mostly_declined
from lab.checks.parameters.coverage import Coverage, Reach
from lab.checks.properties import checks_by_key
from lab.checks.properties.check import Level
from lab.checks.report import Report
from lab.checks.run.verdicts import CaseVerdict, Outcome, fate_of
from lab.ranges import Ranges, options_of
from lab.recorded.case import NAME_OF_OUTPUTS, RecordedCase
from lab.reports.tables import (
    TERMINAL_STYLES,
    Cell,
    Columns,
    Table,
    grouped,
    make_table,
    number,
    print_lines,
    terminal_of,
    words,
)
from lab.wording import counted, shortened
from lab.workloads.interfaces import PAGED_CALLS

POISON = 1e20  # outputs above it come from memory that the lab filled with 1e30: no right output is so large
OVER_E4M3 = str(Literal("kv_dtype", "==", "e4m3"))  # condition in the rule of a region
SHOWN_EXAMPLES = 3  # number of regions whose smallest case is shown in full
SHOWN_CHARACTERS = 160  # longest text of a refusal
SHOWN_DECLINES = 5
SHOWN_REMARKS = 8
SHOWN_BLIND_SPOTS = 10


def summary(report: Report) -> Iterator[str]:
    """Yield the first lines of a report: the answer, what is broken, what was compared, and the groups of wrong cases."""
    found = report.diagnosis
    yield from filter(None, (found.answer, found.broken, found.reach and f"  {found.reach}"))
    for place, region in enumerate(found.regions):
        yield f"  {region.counts}"
        yield from _example(region.smallest) if place < SHOWN_EXAMPLES else ()
        yield f"    reproduce with: {reproduction(region.smallest.verdict)}"
    yield from (f"  {hint}" for hint in _hints(report))
    caches = {features_of_case(verdict.case).features.get("kv_dtype") for verdict in report.wrong}
    is_of_e4m3 = caches == {"e4m3"} or any(OVER_E4M3 in region.rule for region in found.regions)
    if is_of_e4m3 and not report.ranges.e4m3_arithmetic:
        yield "  if the kernel computes in e4m3 over an e4m3 cache, judge it by that arithmetic: --e4m3-arithmetic"


def _hints(report: Report) -> list[str]:
    remarks = [verdict.judged.remarks for verdict in report.wrong if verdict.outcome is Outcome.FAILED]
    return [each for each in remarks[0] if all(each in others for others in remarks)] if remarks else []


def notes(report: Report) -> Iterator[str]:
    """Yield the lines below the table of checks, such as known failures and the most frequent refusals."""
    if report.is_overwritten:
        yield "another run wrote the report's file during this run, and the file has one run's verdicts: use two --out"
    yield from _of_recorded_calls(report)
    yield from report.diagnosis.follows
    if report.coverages:
        yield f"K18 judged {'; '.join(each.counts for each in report.coverages)}"
    findings = Counter(verdict.finding for verdict in report.verdicts if verdict.finding)
    for finding, count in findings.items():
        yield f"known: {finding} ({counted(count, 'case')})"
    by_kernel = (verdict.judged for verdict in report.verdicts if not verdict.judged.by_lab)
    declines = Counter(reason for judged in by_kernel for reason in judged.declines)
    for reason, count in declines.most_common(SHOWN_DECLINES):
        often = "once" if count == 1 else f"{count} times"
        yield f"{fate_of(reason)} {often}: {shortened(reason, SHOWN_CHARACTERS)}"
    if len(declines) > SHOWN_DECLINES:
        yield f"the report's file lists {counted(len(declines) - SHOWN_DECLINES, 'further reason')} of refusals"
    if report.num_random:
        yield f"{report.num_random:,} random cases of K18 were judged after those of the level"
    refusals = f"--refusals {shlex.quote(','.join(report.refusals))} " if report.refusals else ""
    command = f"lab judge {shlex.quote(report.implementation)} {refusals}"
    by_function = grouped((verdict.interface, verdict) for verdict in report.verdicts)
    for function, verdicts in by_function.items() if report.level is Level.QUICK else ():
        if function in PAGED_CALLS and is_mostly_declined(verdicts) and function not in dict(report.narrowed):
            yield (
                f"{function.value} refuses most cases. This finds the options that choose what it supports: "
                f"{command}--functions {function.value} --only K1 --drawn 0"
            )
    for interface, ranges in report.narrowed:
        only = f"--functions {interface.value} " if len(by_function) > 1 else ""
        yield (
            f"{interface.value} declines most cases. These options choose what it supports: "
            f"{command}{only}{options_of(ranges)}"
        )


def show(report: Report, console: Any) -> None:
    """Print a report to a console of the package rich: the answer, groups of wrong cases, the table of checks, notes."""
    answer, *details = summary(report)
    is_plain = report.is_right and not any(verdict.judged.suspicions for verdict in report.verdicts)
    outcome = Outcome.WRONG if any(report.wrong) else Outcome.RIGHT if is_plain else Outcome.KNOWN
    print_lines(console, [answer], TERMINAL_STYLES[outcome.value])
    print_lines(console, details)
    console.print(terminal_of(check_table(report)))
    print_lines(console, notes(report))


def details(report: Report) -> list[str]:
    return [*summary(report), *notes(report)]


def check_table(report: Report) -> Table:
    """Return a table with one row per check and function. The column "worst" has the largest ratio of an error to its bound."""
    names = {key: check.name for key, check in checks_by_key().items()}
    seed = f", seed {report.ranges.seed}" if report.ranges.seed else ""
    where = report.environment.get("gpu") or report.device
    columns: Columns = {
        "check": lambda row: words(f"{row.check} {names.get(row.check, '')}"),
        "function": lambda row: words(row.interface.name.lower()),  # the full name is too wide for a narrow terminal
        "verdict": lambda row: words(_verdict(row.counts, row.outcome), row.outcome.value),
        "cases": lambda row: number(len(row.verdicts)),
        "declined": lambda row: number(row.counts.get(Outcome.DECLINED, 0)),
        "results": lambda row: number(row.judged),
        "worst": lambda row: _worst(row.worst.judged.worst_ratio) if row.worst.judged.judged else words(None),
    }
    caption = f"{report.implementation} on {where}, {report.level.value}{seed}"
    if report.implementation == NAME_OF_OUTPUTS:
        caption = f"recorded outputs, judged on {where}"
    return make_table(columns, report.rows, caption=caption, say_once=())


def coverage_table(coverage: Coverage) -> Table:
    """Return a table of a function's parameter values: judged, declined (the kernel refused them), left out or impossible."""
    columns: Columns = {"parameter": lambda row: words(row[0])} | {
        reach.value: lambda row, reach=reach: words("; ".join(row[1].get(reach.value, ()))) for reach in Reach
    }
    rows = list(coverage.as_record()["values"].items())
    return make_table(columns, rows, caption=f"K18's model of {coverage.interface.value}", say_once=())


def coverage_notes(coverage: Coverage) -> Iterator[str]:
    """Yield lines with the numbers of judged pairs and triples of parameter values, and the first pairs not judged together."""
    record = coverage.as_record()
    for name, counts in (("pairs", coverage.pairs), ("triples", coverage.triples)):
        yield f"{name}: " + ", ".join(f"{counts[reach]:,} {reach.value}" for reach in Reach)
    yield from (f"impossible {count:,} times: {why}" for why, count in coverage.impossible.items())
    if coverage.blind:
        yield f"blind spots, pairs of judged values that were not judged together: {len(coverage.blind):,}"
    for spot in record["blind_spots"][:SHOWN_BLIND_SPOTS]:
        yield f"  {' with '.join(f'{name}={value}' for name, value in spot['values'].items())}: {spot['reach']}"
    if len(coverage.blind) > SHOWN_BLIND_SPOTS:
        listed = len(record["blind_spots"])
        yield f"  and {len(coverage.blind) - SHOWN_BLIND_SPOTS:,} more; the report's file lists {listed:,} of all"


def reproduction(verdict: CaseVerdict) -> str:
    """Return a shell command that judges a case again."""
    if isinstance(verdict.case, RecordedCase):
        implementation = "" if verdict.implementation == NAME_OF_OUTPUTS else f" {shlex.quote(verdict.implementation)}"
        return f"lab judge{implementation} --calls {shlex.quote(verdict.case.address)}"
    if verdict.recorded_in:
        return f"lab judge --case {shlex.quote(verdict.recorded_in)}#{verdict.number}"
    arguments = [verdict.implementation, verdict.check, verdict.case, verdict.device]
    if verdict.ranges != Ranges():
        arguments.append(verdict.ranges)
    program = f"import torch; from lab.checks import *; print(judge_case({', '.join(map(repr, arguments))}))"
    interpreted = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
    quoted = shlex.quote(program) if set('"$`\\!') & set(program) else f'"{program}"'
    return f"{interpreted}python -c {quoted}"


def _example(smallest: CaseResult) -> Iterator[str]:
    verdict, result = smallest
    case = verdict.case.address if isinstance(verdict.case, RecordedCase) else repr(verdict.case)
    yield f"    smallest case: {verdict.check} of {verdict.interface.name.lower()}, “{result.name}”: {case}"
    if (example := result.example) is not None:
        values = {"expected": example.expected, "got": example.got}
        shown = "; ".join(f"{name} {' '.join(f'{value:.4g}' for value in side)}" for name, side in values.items())
        is_nan = result.features.get("dead") == "nan" and any(map(math.isnan, example.got))
        largest = max(map(abs, example.got), default=0.0)
        poison = "NaN" if is_nan else f"{largest:.0e}" if POISON < largest < math.inf else ""
        also = f" ({poison} is the lab's poison, in memory that no row may read)" if poison else ""
        yield f"    {example.where}: {shown}{also}"
    else:
        named = (sentence for sentence in verdict.judged.wrongs if sentence.startswith(result.name))
        sentence = next(named, verdict.reason)
        yield f"    {sentence if isinstance(verdict.case, RecordedCase) else shortened(sentence, SHOWN_CHARACTERS)}"


def _of_recorded_calls(report: Report) -> Iterator[str]:
    wrong = grouped((each.interface.value, each.case) for each in report.wrong if isinstance(each.case, RecordedCase))
    for function, cases in wrong.items():
        case = min(cases, key=lambda each: each.number)
        replay = f", replay {case.replay}" if case.replay else ""
        yield f"first wrong call of {function}: {case.address}, called at {case.time}{replay}, in {Path(case.path).name}"
    recorded = [verdict for verdict in report.verdicts if isinstance(verdict.case, RecordedCase)]
    for verdict in recorded:
        if verdict.judged.by_lab and len(verdict.reason) > SHOWN_REASON:
            yield f"not judged: {verdict.reason}"
    notes = [(*verdict.judged.suspicions, *verdict.judged.remarks) for verdict in report.verdicts]
    shown = _hints(report)
    remarks = list(dict.fromkeys(note for of_case in notes for note in of_case if note not in shown))
    yield from remarks[:SHOWN_REMARKS]
    if len(remarks) > SHOWN_REMARKS:
        yield f"{len(remarks) - SHOWN_REMARKS:,} more remarks: judge a call alone to see its own"
    if recorded:
        yield "recorded calls are judged by their own page tables and lengths: a wrong table is judged as it stands"


def _verdict(counts: Mapping[Outcome, int], outcome: Outcome) -> str:
    wrong, failed = counts.get(Outcome.WRONG, 0), counts.get(Outcome.FAILED, 0)
    return f"{wrong} wrong, {failed} failed" if wrong and failed else outcome.value


def _worst(ratio: float) -> Cell:
    if not math.isfinite(ratio):
        return Cell("inf", math.inf)
    return Cell(">999x" if ratio >= 999.5 else f"{ratio:.0%}" if ratio < 9.995 else f"{ratio:.0f}x", ratio)
