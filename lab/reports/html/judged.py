"""Tables of the judge's reports: runs, checks, faults, refusals."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.checks.catalogue import checks
from lab.checks.verdicts import Outcome
from lab.reports.html.findings import Finding, findings_in
from lab.reports.pictures.judging import VerdictCell
from lab.reports.recorded import RecordedFile
from lab.reports.tables import ABSENT, Cell, Columns, Link, Table, make_table, number, words
from lab.reports.timing_tables import MODULE_PREFIX
from lab.workloads.interfaces import Interface

RIGHT, KNOWN, DECLINED = Outcome.RIGHT.value, Outcome.KNOWN.value, Outcome.DECLINED.value
FAULTS = (Outcome.WRONG.value, Outcome.FAILED.value, KNOWN)
# The order of rows and of columns: what is broken stands first.
COUNTED = (*FAULTS, DECLINED, RIGHT)
CHECKS = {check.key: check for check in checks()}


@dataclass(frozen=True)
class CheckRow:
    """One check of one function in one run of the judge; `cases` are those that the file holds of it."""

    record: RecordedFile
    check: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]

    @property
    def key(self) -> str:
        return str(self.check["check"])

    @property
    def function(self) -> str:
        """The name that the judge's own table has; the recorded one if this version of the lab does not know it."""
        name = self.check["interface"]
        return next((interface.name.lower() for interface in Interface if interface.value == name), name)

    @property
    def catches(self) -> str:
        """Return what the check catches; "" if this version of the lab does not have it."""
        return CHECKS[self.key].catches if self.key in CHECKS else ""

    @property
    def worst_right(self) -> float | None:
        """The largest error of a right result over its bound; None if nothing was right, or the cases were not kept."""
        return _largest(case.get("worst_ratio", 0.0) for case in self.cases if case["outcome"] == RIGHT)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Cited by its cases, each once."""
        cited = dict.fromkeys(case["finding"] for case in self.cases if case.get("finding"))
        return tuple(dict.fromkeys(finding for cites in cited for finding in findings_in(cites)))


def check_rows(records: Sequence[RecordedFile]) -> list[CheckRow]:
    """Return the checks of all files, run by run."""
    rows = []
    for record in records:
        cases: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for case in record.content.get("cases") or ():
            cases.setdefault((case["check"], case["interface"]), []).append(case)
        rows += [
            CheckRow(record, check, cases.get((check["check"], check["interface"]), ()))
            for check in record.content["checks"]
        ]
    return rows


def check_name(key: str) -> str:
    """Return a check's key and name, such as "K5 guards"; the key alone if this version of the lab does not have it."""
    return f"{key} {CHECKS[key].name}" if key in CHECKS else key


def verdict_of(record: RecordedFile) -> str:
    """Return the worst outcome of a run's cases; "declined" only if nothing was judged."""
    met = {outcome for check in record.content["checks"] for outcome, count in check["counts"].items() if count}
    return next(outcome for outcome in (*FAULTS, RIGHT, DECLINED) if outcome in met or outcome == DECLINED)


def _whole_verdict(record: RecordedFile) -> str:
    verdict = verdict_of(record)
    return f"{verdict}, but not all judged" if verdict == RIGHT and record.content.get("is_right") is False else verdict


def _worst_first(outcome: str) -> int:
    return COUNTED.index(outcome)


def summary_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run of the judge, the worst first."""
    records = sorted(records, key=lambda record: _worst_first(verdict_of(record)))
    rows = check_rows(records)

    def counted(record: RecordedFile, outcome: str) -> int:
        return sum(row.check["counts"].get(outcome, 0) for row in rows if row.record is record)

    columns: Columns = {
        "run": lambda record: words(record.name),
        "implementation": lambda record: words(implementation_of(record)),
        "verdict": lambda record: words(_whole_verdict(record), style=verdict_of(record)),
        "worst right, % of bound": lambda record: _percent(
            _largest(row.worst_right for row in rows if row.record is record)
        ),
        "checks": lambda record: number(len({row.key for row in rows if row.record is record})),
        "cases": lambda record: number(sum(counted(record, outcome) for outcome in COUNTED)),
        "results": lambda record: number(sum(row.check["judged"] for row in rows if row.record is record)),
        **_counts(lambda record: {outcome: counted(record, outcome) for outcome in COUNTED}),
        "not begun": lambda record: number(record.content.get("left_out")),
        "level": lambda record: words(record.content.get("level")),
        "commit": lambda record: words(record.environment.get("commit")),
    }
    return make_table(columns, records, name="judge-runs", caption="Runs of the judge")


def verdict_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run, check and function, the worst first."""
    rows = sorted(check_rows(records), key=lambda row: _worst_first(row.check["outcome"]))
    columns: Columns = {
        "run": lambda row: words(row.record.name),
        "implementation": lambda row: words(implementation_of(row.record)),
        "check": lambda row: words(check_name(row.key)),
        "function": lambda row: words(row.function),
        "verdict": lambda row: words(row.check["outcome"], style=row.check["outcome"]),
        "worst right, % of bound": lambda row: _percent(row.worst_right),
        "worst of verdict, % of bound": lambda row: _percent(row.check.get("worst_ratio")),
        "findings": lambda row: _cited(row.findings),
        "cases": lambda row: number(sum(row.check["counts"].values())),
        "results": lambda row: number(row.check["judged"]),
        **_counts(lambda row: row.check["counts"]),
        "the check catches": lambda row: words(row.catches),
    }
    return make_table(columns, rows, name="verdicts", caption="Verdicts per implementation and check")


def fault_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of faults: one row per run, check, function, verdict and citation, with its worst case."""
    grouped: dict[tuple[str, ...], list[tuple[CheckRow, Mapping[str, Any]]]] = {}
    for row in check_rows(records):
        for case in row.cases:
            if case["outcome"] in FAULTS:
                key = (row.record.name, row.key, case["interface"], case["outcome"], case.get("finding", ""))
                grouped.setdefault(key, []).append((row, case))
    worst = [
        (len(cases), *max(cases, key=lambda pair: float(pair[1].get("worst_ratio", 0.0)))) for cases in grouped.values()
    ]
    worst.sort(key=lambda fault: _worst_first(fault[2]["outcome"]))
    columns: Columns = {
        "run": lambda fault: words(fault[1].record.name),
        "check": lambda fault: words(check_name(fault[1].key)),
        "function": lambda fault: words(fault[1].function),
        "verdict": lambda fault: words(fault[2]["outcome"], style=fault[2]["outcome"]),
        "cases": lambda fault: number(fault[0]),
        "findings": lambda fault: _cited(findings_in(fault[2].get("finding", ""))),
        "of the worst case": lambda fault: words("; ".join(fault[2].get("wrongs", ())), style="long"),
        "to show it again": lambda fault: words(fault[2].get("reproduce"), style="long code"),
    }
    return make_table(columns, worst, name="faults", caption="What was wrong, and one case of each")


def decline_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of what was refused, with its reason, most frequent first."""
    refused = [
        (record, reason, count)
        for record in records
        for reason, count in Counter(
            reason for case in record.content.get("cases") or () for reason in case.get("declines", ())
        ).most_common()
    ]
    columns: Columns = {
        "run": lambda refusal: words(refusal[0].name),
        "cases": lambda refusal: number(refusal[2]),
        "reason": lambda refusal: words(refusal[1], style="long"),
    }
    return make_table(columns, refused, name="declines", caption="What was refused, and why")


def survey_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of recorded surveys: verdicts of forward passes by mode, and of graphs by story."""
    counted = [
        (record, what, counts)
        for record in records
        for what, counts in (record.content["summary"].get("modes") or record.content["summary"]).items()
        if isinstance(counts, Mapping)
    ]
    columns: Columns = {
        "run": lambda line: words(line[0].name),
        "implementation": lambda line: words(implementation_of(line[0])),
        "commit": lambda line: words(line[0].environment.get("commit")),
        "mode or story": lambda line: words(line[1].lower().replace("_", " ")),
        "cases": lambda line: number(sum(line[2].values())),
        **_counts(lambda line: line[2]),
    }
    return make_table(columns, counted, name="surveys", caption="Forward passes and graph replays judged")


def cited_findings(records: Sequence[RecordedFile]) -> list[Finding]:
    """Return every finding that a case cites, in the order of its number."""
    cited = {finding for row in check_rows(records) for finding in row.findings}
    return sorted(cited, key=lambda finding: (finding.path, finding.order))


def verdict_cells(records: Sequence[RecordedFile]) -> Iterator[VerdictCell]:
    """Yield the picture's cells: one per run and function, and check."""
    for row in check_rows(records):
        yield VerdictCell(
            f"{row.record.name.rpartition('/')[2]}: {row.function}",
            check_name(row.key),
            row.check["outcome"],
            row.worst_right,
        )


def _counts(counts_of: Callable[[Any], Mapping[str, int]]) -> Columns:
    """Return a column per outcome, of a record's counts."""
    return {outcome: partial(_count, outcome, counts_of) for outcome in COUNTED}


def _count(outcome: str, counts_of: Callable[[Any], Mapping[str, int]], record: Any) -> Cell:
    return number(counts_of(record).get(outcome, 0))


def implementation_of(record: RecordedFile) -> str:
    """Return the implementation's name without the package of kernels."""
    return str(record.content.get("implementation", "")).removeprefix(MODULE_PREFIX)


def _cited(findings: Sequence[Finding]) -> Cell:
    text = ", ".join(finding.short for finding in findings)
    return Cell(text or ABSENT, links=tuple(Link(finding.short, finding.target) for finding in findings))


def _percent(ratio: float | str | None) -> Cell:
    """JSON has no infinity: the judge writes it as a word, and it means that an output was not finite."""
    if ratio is None:
        return Cell(ABSENT)
    value = 100 * float(ratio)
    return Cell(f"{value:,.0f}", value) if math.isfinite(value) else Cell("not finite", math.inf)


def _largest(ratios: Any) -> float | None:
    return max((float(ratio) for ratio in ratios if ratio is not None), default=None)
