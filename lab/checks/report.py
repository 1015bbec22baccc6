"""The judge's findings as data, as text and as JSON: the answer first, where it is wrong, how to see it, then the table."""

import functools
import json
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.checks.check_summary import SHOWN_DECLINES, CheckSummary, row_of
from lab.checks.explain.diagnosis import Diagnosis, Smallest, diagnose
from lab.checks.explain.failure_rules import Literal
from lab.checks.properties.check import Level
from lab.checks.run.verdicts import BROKEN, Judged, Outcome
from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lab.checks.parameters.coverage import Coverage

OVER_E4M3 = str(Literal("kv_dtype", "==", "e4m3"))  # in the rule of a region
SHOWN_EXAMPLES = 3  # regions whose smallest case is shown
SHOWN_CHARACTERS = 160  # of a refusal
STYLES = {"right": "green", "wrong": "bold red", "failed": "bold red", "known": "yellow", "declined": "dim"}


@dataclass(frozen=True)
class CaseVerdict:
    """The judge's verdict on one case.

    Attributes:
        implementation, check, interface, case, device: what was judged, by which check, of which function, on what, where.
        judged: what was found.
        ranges: the axes within which the check varied the case.
        drawn: the case is random; a wrong one is the smallest that was found.
        finding: of a KNOWN case, where it is written down.
        number: of the case in its report, from 1; a run that takes up an older report keeps its numbers. 0: in no report yet.
        recorded_in: the report's file; empty if it is in none.
    """

    implementation: str
    check: str
    interface: Interface
    case: Any
    device: str
    judged: Judged
    ranges: Ranges = field(default_factory=Ranges)
    drawn: bool = False
    finding: str = ""
    number: int = 0
    recorded_in: str = ""

    @property
    def outcome(self) -> Outcome:
        return self.judged.outcome

    @property
    def exit_status(self) -> ExitStatus:
        """Return a command's: 0 right, 1 wrong or failed, 3 dishonest, 125 nothing of it could be judged."""
        if self.outcome is Outcome.DISHONEST:
            return ExitStatus.REFUSED
        if self.judged.wrongs:
            return ExitStatus.WRONG
        return ExitStatus.DONE if self.judged.judged else ExitStatus.NOT_JUDGED

    @property
    def reason(self) -> str:
        """Return what was wrong or, if nothing was, what was refused."""
        return "; ".join(self.judged.wrongs or self.judged.declines)

    @property
    def reproduce(self) -> str:
        """Return a shell line that judges the case again: by its number in the report's file, or else with the case in it."""
        if self.recorded_in:
            return f"lab judge --case {shlex.quote(self.recorded_in)}#{self.number}"
        return self.reproduce_without_file

    @property
    def reproduce_without_file(self) -> str:
        """Return a shell line, the case in it, that judges the case again."""
        arguments = [self.implementation, self.check, self.case, self.device]
        if self.ranges != Ranges():
            arguments.append(self.ranges)
        program = f"import torch; from lab.checks import *; print(judge_case({', '.join(map(repr, arguments))}))"
        interpreted = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
        return f"{interpreted}python -c {_quoted(program)}"

    def __str__(self) -> str:
        lines = [f"{self.check} of {self.interface.value} is {self.outcome.value}: {self.case!r}"]
        lines += [f"  {wrong}" for wrong in self.judged.wrongs]
        lines += [f"  declined: {reason}" for reason in self.judged.declines]
        if self.finding:
            lines.append(f"  known: {self.finding}")
        return "\n".join(lines)

    def as_record(self) -> dict[str, Any]:
        """Return the verdict as JSON data; what is empty is left out."""
        record = {
            "number": self.number,
            "check": self.check,
            "interface": self.interface.value,
            "outcome": self.outcome.value,
            "case": repr(self.case),
            "wrongs": list(self.judged.wrongs),
            "declines": list(self.judged.declines),
            "worst_ratio": _number(self.judged.worst_ratio),
            "judged": self.judged.judged,
            "drawn": self.drawn,
            "finding": self.finding,
            "reproduce": self.reproduce_without_file if self.outcome in (*BROKEN, Outcome.KNOWN) else "",
        }
        return {name: value for name, value in record.items() if value or name == "outcome"}


@dataclass(frozen=True)
class Report:
    """The findings of one run of the judge.

    Attributes:
        implementation: its name.
        level: how much was judged.
        environment: of the run, `lab.provenance.environment`.
        device: where.
        verdicts: of every case.
        left_out: cases that were not judged.
        ended: why they were not.
        ranges: the axes that were judged.
        interrupted: by the user; cases that were not begun are in left_out.
        narrowed: functions that declined most cases, and the axes that they take and were then judged on too.
        refusals: names of the exceptions that were refusals; () for the usual ones.
        run: a digest of all that its verdicts depend on; "" where that cannot be told.
        num_random: random cases that were judged after those of the level.
        audited: right cases that were judged again by a process that the kernel's code never entered (`lab.checks.run.audit`).
    """

    implementation: str
    level: Level
    environment: dict[str, Any]
    device: str
    verdicts: tuple[CaseVerdict, ...]
    left_out: int = 0
    ranges: Ranges = field(default_factory=Ranges)
    ended: str = "the time was over"
    interrupted: bool = False
    narrowed: tuple[tuple[Interface, Ranges], ...] = ()
    refusals: tuple[str, ...] = ()
    run: str = ""
    num_random: int = 0
    audited: int = 0

    @property
    def rows(self) -> list[CheckSummary]:
        """Return one row per check and function."""
        grouped: dict[tuple[str, Interface], list[CaseVerdict]] = {}
        for verdict in self.verdicts:
            grouped.setdefault((verdict.check, verdict.interface), []).append(verdict)
        return [row_of(check, interface, verdicts) for (check, interface), verdicts in grouped.items()]

    @property
    def wrong(self) -> Iterator[CaseVerdict]:
        """Cases that are wrong or failed, and not known to be."""
        return (verdict for verdict in self.verdicts if verdict.outcome in BROKEN)

    @property
    def is_right(self) -> bool:
        """Something of every function was judged, no case was left out, and nothing is wrong but known failures."""
        judged = {verdict.interface for verdict in self.verdicts if verdict.judged.judged}
        everything = judged == {verdict.interface for verdict in self.verdicts} and self.left_out == 0
        return everything and bool(judged) and not any(self.wrong)

    @property
    def exit_status(self) -> ExitStatus:
        """Return a command's: 0 right, 1 wrong or failed, 3 dishonest, 125 it could not be judged, 130 interrupted."""
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        if any(verdict.outcome is Outcome.DISHONEST for verdict in self.verdicts):
            return ExitStatus.REFUSED
        if any(self.wrong):
            return ExitStatus.WRONG
        return ExitStatus.DONE if self.is_right else ExitStatus.NOT_JUDGED

    def write(self, path: Path, *, is_diagnosed: bool = True) -> None:
        """Write the report as JSON; without a diagnosis, which takes a second, while a run goes on."""
        record = {
            "implementation": self.implementation,
            "level": self.level.value,
            "device": self.device,
            "is_right": self.is_right,
            "left_out": self.left_out,
            "interrupted": self.interrupted,
            "seed": self.ranges.seed,
            "num_random": self.num_random,
            "audited": self.audited,
            "ranges": repr(self.ranges),
            "narrowed": {interface.value: repr(ranges) for interface, ranges in self.narrowed},
            "refusals": list(self.refusals),
            "run": self.run,
            "environment": self.environment,
            "diagnosis": self.diagnosis.as_record() if is_diagnosed else None,
            "checks": [
                {
                    "check": row.check,
                    "interface": row.interface.value,
                    "outcome": row.outcome.value,
                    "counts": {outcome.value: count for outcome, count in row.counts.items()},
                    "judged": row.judged,
                    "worst_ratio": _number(row.worst.judged.worst_ratio),
                }
                for row in self.rows
            ],
            "coverage": {each.interface.value: each.as_record() for each in self.coverages} if is_diagnosed else {},
            "cases": [self._record_of(verdict) for verdict in self.verdicts],
        }
        write_text(path, json.dumps(record, indent=1) + "\n")

    def _record_of(self, verdict: CaseVerdict) -> dict[str, Any]:
        return verdict.as_record() | ({} if verdict.ranges == self.ranges else {"ranges": repr(verdict.ranges)})

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        """Return what the verdicts say together: what is broken and where, or what could not be judged."""
        found = diagnose(self.verdicts, is_whole=not self.left_out)
        missing = list(self._not_judged())
        if found.regions or not missing or self.exit_status is ExitStatus.REFUSED:
            return found
        said = found.sentence.removeprefix("Right: ")
        return replace(found, sentence=f"It could not be judged as a whole: {'; '.join(missing)}. {said}")

    @functools.cached_property
    def coverages(self) -> "tuple[Coverage, ...]":
        """Return how much of each function's model check K18 covered; empty where it did not run."""
        from lab.checks.parameters.coverage import coverages

        return coverages(self.verdicts, self.ranges)

    def _not_judged(self) -> Iterator[str]:
        if self.left_out:
            yield f"{self.left_out} cases were left out, {self.ended}"
        judged = {verdict.interface for verdict in self.verdicts if verdict.judged.judged}
        several = dict.fromkeys(verdict.interface for verdict in self.verdicts) if judged else ()
        yield from (f"nothing of {each.value}" for each in several if each not in judged)

    def table(self) -> "Table":
        """Return the rows for a terminal; "worst" is the largest error, as a share or a multiple of its bound."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        from lab.checks.properties import checks

        names = {check.key: check.name for check in checks()}
        seed = f", seed {self.ranges.seed}" if self.ranges.seed else ""
        table = Table(
            title=f"{self.implementation} on {self.environment.get('gpu') or self.device}, {self.level.value}{seed}",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for column in ("check", "function", "verdict"):
            table.add_column(column, no_wrap=True)
        for column in ("cases", "declined", "results", "worst"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                f"{row.check} {names.get(row.check, '')}",
                row.interface.name.lower(),  # its whole name leaves a narrow terminal no room
                Text(row.verdict, STYLES[row.outcome.value]),
                str(sum(row.counts.values())),
                str(row.counts.get(Outcome.DECLINED, 0)),
                str(row.judged),
                _worst(row.worst.judged.worst_ratio) if row.worst.judged.judged else "–",
            )
        return table

    def summary(self) -> Iterator[str]:
        """Yield the answer, and of what is wrong where it is, the smallest case of each region, and how to see it again."""
        found = self.diagnosis
        yield found.sentence
        for number, (region, smallest) in enumerate(zip(found.regions, found.smallest, strict=True)):
            yield f"  {region.counts}"
            yield from _example(smallest) if number < SHOWN_EXAMPLES else ()
        if any(OVER_E4M3 in region.rule for region in found.regions) and not self.ranges.e4m3_arithmetic:
            yield "  a kernel that computes in e4m3 over such a cache is judged by that arithmetic: --e4m3-arithmetic"

    def notes(self) -> Iterator[str]:
        """Yield what follows from the answer, the known findings and the most frequent refusals."""
        yield from self.diagnosis.follows
        if self.coverages:
            yield f"K18 judged {'; '.join(each.counts for each in self.coverages)}"
        findings = Counter(verdict.finding for verdict in self.verdicts if verdict.finding)
        for finding, count in findings.items():
            yield f"known: {finding} ({count} cases)"
        declines = Counter(reason for verdict in self.verdicts for reason in verdict.judged.declines)
        for reason, count in declines.most_common(SHOWN_DECLINES):
            yield f"declined {'once' if count == 1 else f'{count} times'}: {_shortened(reason)}"
        if len(declines) > SHOWN_DECLINES:
            yield f"and {len(declines) - SHOWN_DECLINES} more kinds of refusal, which the report's file lists"
        if self.num_random:
            yield f"{self.num_random:,} random cases of K18 were judged after those of the level"
        if self.left_out:
            yield f"{self.left_out} cases were left out: {self.ended}"

    def details(self) -> Iterator[str]:
        """Yield all that is told without the table."""
        yield from self.summary()
        yield from self.notes()

    def print(self, console: "Console") -> None:
        """Print the answer, where it is wrong, how to see it again, the table, and notes."""
        from rich.text import Text

        answer, *others = self.summary()
        style = STYLES["wrong"] if any(self.wrong) else STYLES["right"] if self.is_right else STYLES["known"]
        console.print(Text(answer, style), soft_wrap=True)
        for line in others:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(self.table())
        for line in self.notes():
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _repr_html_(self) -> str:
        """Return the report as a notebook shows it."""
        import io

        from rich.console import Console

        console = Console(file=io.StringIO(), record=True, width=100)
        self.print(console)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _example(smallest: Smallest) -> Iterator[str]:
    """Yield the lines of a smallest case: itself, the vector that is wrong, and its reproduction."""
    verdict, result, example = smallest
    yield f"    smallest case: {verdict.check} of {verdict.interface.name.lower()}, “{result}”: {verdict.case!r}"
    if example is not None:
        values = {"expected": example.expected, "got": example.got}
        shown = "; ".join(f"{name} {' '.join(f'{value:.4g}' for value in side)}" for name, side in values.items())
        yield f"    {example.where}: {shown}"
    else:
        named = (sentence for sentence in verdict.judged.wrongs if sentence.startswith(result))
        yield f"    {_shortened(next(named, verdict.reason))}"
    yield f"    see it: {verdict.reproduce}"


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= SHOWN_CHARACTERS else f"{sentence[: SHOWN_CHARACTERS - 1]}…"


def _quoted(program: str) -> str:
    """For a shell; in double quotes where nothing in it means anything there, which leaves a program legible."""
    return shlex.quote(program) if set('"$`\\!') & set(program) else f'"{program}"'


def _worst(ratio: float) -> str:
    """Return an error over its bound in at most five characters: poison that reaches a result makes it 1e+30."""
    if not math.isfinite(ratio):
        return "inf"
    return ">999x" if ratio >= 999.5 else f"{ratio:.0%}" if ratio < 9.995 else f"{ratio:.0f}x"


def _number(ratio: float) -> float | str:
    """JSON has no infinity, which is what an output that is not finite has."""
    return round(ratio, 4) if math.isfinite(ratio) else str(ratio)
