"""Tables of the judge's recorded reports: runs, checks, faults, refusals."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from lab.checks.properties import checks
from lab.checks.run import verdicts
from lab.checks.run.verdicts import Outcome
from lab.reports.html.findings import Finding, findings_in
from lab.reports.recorded import RecordedFile, grouped
from lab.reports.tables import ABSENT, Cell, Columns, Link, Table, make_table, number, words
from lab.reports.timing_tables import MODULE_PREFIX
from lab.workloads.interfaces import Interface

RIGHT, KNOWN, DECLINED = Outcome.RIGHT.value, Outcome.KNOWN.value, Outcome.DECLINED.value
BROKEN = tuple(outcome.value for outcome in verdicts.BROKEN)
FAULTS = (*BROKEN, KNOWN)
# The order of rows and of columns.
WORST_FIRST = (*FAULTS, DECLINED, RIGHT)
CHECKS = {check.key: check for check in checks()}


@dataclass(frozen=True)
class CheckRow:
    """One check of one function in one run of the judge.

    Attributes:
        record: the run's file.
        check: the check's row of the recorded report: its key, function, outcome and counts.
        cases: the check's recorded cases; () if the file holds none.
    """

    record: RecordedFile
    check: Mapping[str, Any]
    cases: Sequence[Mapping[str, Any]]

    @property
    def key(self) -> str:
        """Return the check's key, such as "K5"."""
        return str(self.check["check"])

    @property
    def function(self) -> str:
        """Return the function's short name, such as "decode"; the recorded name if this version of the lab does not know it."""
        name = self.check["interface"]
        return next((interface.name.lower() for interface in Interface if interface.value == name), name)

    @property
    def catches(self) -> str:
        """Return the defects that the check catches; "" if this version of the lab does not have the check."""
        return CHECKS[self.key].catches if self.key in CHECKS else ""

    @property
    def worst_right(self) -> float | None:
        """Return the largest error of a right case over its bound; None if no case was right, or the file holds no cases."""
        return _largest(case.get("worst_ratio", 0.0) for case in self.cases if case["outcome"] == RIGHT)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the findings that the cases cite, each once."""
        cited = dict.fromkeys(case["finding"] for case in self.cases if case.get("finding"))
        return tuple(dict.fromkeys(finding for cites in cited for finding in findings_in(cites)))


def check_rows(records: Sequence[RecordedFile]) -> list[CheckRow]:
    """Return a row for each check and function of each recorded report, in the order of the files."""
    rows = []
    for record in records:
        cases = grouped(((case["check"], case["interface"]), case) for case in record.content.get("cases") or ())
        rows += [
            CheckRow(record, check, cases.get((check["check"], check["interface"]), ()))
            for check in record.content["checks"]
        ]
    return rows


def check_name(key: str) -> str:
    """Return a check's key and name, such as "K5 guards"; the key alone if this version of the lab does not have the check."""
    return f"{key} {CHECKS[key].name}" if key in CHECKS else key


def verdict_of(record: RecordedFile) -> str:
    """Return the worst outcome of a run's cases; "declined" only if every case was declined, or there is none."""
    met = {outcome for check in record.content["checks"] for outcome, count in check["counts"].items() if count}
    return next(outcome for outcome in (*FAULTS, RIGHT, DECLINED) if outcome in met or outcome == DECLINED)


def _verdict_text(record: RecordedFile) -> str:
    """Return a run's verdict; where the judged cases are right but not all cases were judged, it adds this."""
    verdict = verdict_of(record)
    return f"{verdict}, but not all judged" if verdict == RIGHT and record.content.get("is_right") is False else verdict


def summary_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run of the judge, the worst first."""
    records = sorted(records, key=lambda record: WORST_FIRST.index(verdict_of(record)))
    rows = check_rows(records)

    def num_cases(record: RecordedFile, outcome: str) -> int:
        return sum(row.check["counts"].get(outcome, 0) for row in rows if row.record is record)

    columns: Columns = {
        "run": lambda record: words(record.name),
        "implementation": lambda record: words(implementation_name(record)),
        "verdict": lambda record: words(_verdict_text(record), style=verdict_of(record)),
        "largest error of a right case, % of bound": lambda record: _percent(
            _largest(row.worst_right for row in rows if row.record is record)
        ),
        "checks": lambda record: number(len({row.key for row in rows if row.record is record})),
        "cases": lambda record: number(sum(num_cases(record, outcome) for outcome in WORST_FIRST)),
        "results": lambda record: number(sum(row.check["judged"] for row in rows if row.record is record)),
        **_outcome_columns(lambda record: {outcome: num_cases(record, outcome) for outcome in WORST_FIRST}),
        "not begun": lambda record: number(record.content.get("left_out")),
        "level": lambda record: words(record.content.get("level")),
        "commit": lambda record: words(record.environment.get("commit")),
    }
    return make_table(columns, records, name="judge-runs", caption="Runs of the judge")


def verdict_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run, check and function, the worst first."""
    rows = sorted(check_rows(records), key=lambda row: WORST_FIRST.index(row.check["outcome"]))
    columns: Columns = {
        "run": lambda row: words(row.record.name),
        "implementation": lambda row: words(implementation_name(row.record)),
        "check": lambda row: words(check_name(row.key)),
        "function": lambda row: words(row.function),
        "verdict": lambda row: words(row.check["outcome"], style=row.check["outcome"]),
        "largest error of a right case, % of bound": lambda row: _percent(row.worst_right),
        "largest error with this verdict, % of bound": lambda row: _percent(row.check.get("worst_ratio")),
        "findings": lambda row: _links_to(row.findings),
        "cases": lambda row: number(sum(row.check["counts"].values())),
        "results": lambda row: number(row.check["judged"]),
        **_outcome_columns(lambda row: row.check["counts"]),
        "the check catches": lambda row: words(row.catches),
    }
    return make_table(columns, rows, name="verdicts", caption="Verdicts per implementation and check")


class _FaultGroup(NamedTuple):
    """Faulty cases of one run, check, function, verdict and citation: how many, their check's row, and the worst of them."""

    num_cases: int
    row: CheckRow
    worst_case: Mapping[str, Any]


def _reproduction(group: _FaultGroup) -> str | None:
    """Return the command that judges the worst case again; None for a case of a report that has no numbers yet."""
    number = group.worst_case.get("number")
    return None if number is None else f"lab judge --case {group.row.record.name}.json#{number}"


def _fault_groups(records: Sequence[RecordedFile]) -> list[_FaultGroup]:
    """Return the groups of faulty cases, the worst verdict first."""
    faults = grouped(
        ((row.record.name, row.key, case["interface"], case["outcome"], case.get("finding", "")), (row, case))
        for row in check_rows(records)
        for case in row.cases
        if case["outcome"] in FAULTS
    )
    groups = [
        _FaultGroup(len(cases), *max(cases, key=lambda pair: float(pair[1].get("worst_ratio", 0.0))))
        for cases in faults.values()
    ]
    return sorted(groups, key=lambda group: WORST_FIRST.index(group.worst_case["outcome"]))


def fault_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of faults: one row per run, check, function, verdict and citation, with its worst case."""
    columns: Columns = {
        "run": lambda group: words(group.row.record.name),
        "check": lambda group: words(check_name(group.row.key)),
        "function": lambda group: words(group.row.function),
        "verdict": lambda group: words(group.worst_case["outcome"], style=group.worst_case["outcome"]),
        "cases": lambda group: number(group.num_cases),
        "findings": lambda group: _links_to(findings_in(group.worst_case.get("finding", ""))),
        "wrong in the worst case": lambda group: words("; ".join(group.worst_case.get("wrongs", ())), style="long"),
        "reproduce with": lambda group: words(_reproduction(group), style="long code"),
    }
    caption = "What was wrong, and the worst case of each"
    return make_table(columns, _fault_groups(records), name="faults", caption=caption)


class _Refusal(NamedTuple):
    """A reason for which a run's implementation refused cases, and the number of them."""

    record: RecordedFile
    reason: str
    num_cases: int


def decline_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run and reason of a refusal, the most frequent reason of a run first."""
    refused = [
        _Refusal(record, reason, count)
        for record in records
        for reason, count in Counter(
            reason for case in record.content.get("cases") or () for reason in case.get("declines", ())
        ).most_common()
    ]
    columns: Columns = {
        "run": lambda refusal: words(refusal.record.name),
        "cases": lambda refusal: number(refusal.num_cases),
        "reason": lambda refusal: words(refusal.reason, style="long"),
    }
    return make_table(columns, refused, name="declines", caption="What was refused, and why")


class _SurveyLine(NamedTuple):
    """A forward mode or a replay sequence of a survey, and the number of its cases by outcome."""

    record: RecordedFile
    name: str
    counts: Mapping[str, int]


def survey_table(records: Sequence[RecordedFile]) -> Table:
    """Make a table of recorded surveys (`Kind.SURVEY`): a row per forward mode, or per replay sequence."""
    lines = [
        _SurveyLine(record, name, counts)
        for record in records
        for name, counts in (record.content["summary"].get("modes") or record.content["summary"]).items()
        if isinstance(counts, Mapping)
    ]
    columns: Columns = {
        "run": lambda line: words(line.record.name),
        "implementation": lambda line: words(implementation_name(line.record)),
        "commit": lambda line: words(line.record.environment.get("commit")),
        "mode or sequence": lambda line: words(line.name.lower().replace("_", " ")),
        "cases": lambda line: number(sum(line.counts.values())),
        **_outcome_columns(lambda line: line.counts),
    }
    return make_table(columns, lines, name="surveys", caption="Forward passes and graph replays judged")


def cited_findings(records: Sequence[RecordedFile]) -> list[Finding]:
    """Return every finding that a case cites, once, by page and then by number."""
    cited = {finding for row in check_rows(records) for finding in row.findings}
    return sorted(cited, key=lambda finding: (finding.path, finding.order))


def verdict_matrix(records: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per run and function, and a column per check: its verdict, and the largest right error."""
    by_function = grouped(((row.record.name, row.function), row) for row in check_rows(records))
    met = {row.key for rows in by_function.values() for row in rows}
    columns: Columns = {
        "run": lambda item: words(item[0][0]),
        "function": lambda item: words(item[0][1]),
        **{key: partial(_matrix_cell, key) for key in (*CHECKS, *sorted(met - CHECKS.keys())) if key in met},
    }
    caption = "Verdicts by run, function and check; numbers: largest error of a right case, % of its bound"
    return make_table(columns, list(by_function.items()), name="verdict-matrix", caption=caption, say_once=())


def _matrix_cell(key: str, item: tuple[tuple[str, str], Sequence[CheckRow]]) -> Cell:
    row = next((row for row in item[1] if row.key == key), None)
    if row is None:
        return words(None)
    outcome = row.check["outcome"]
    largest = "" if row.worst_right is None else f" {_percent(row.worst_right).text}"
    return words(f"{outcome}{largest}", style=outcome)


def _outcome_columns(counts_of: Callable[[Any], Mapping[str, int]]) -> Columns:
    """Return a column per outcome: the number of cases; `counts_of` gives the counts of a table's record by outcome."""

    def count(outcome: str, record: Any) -> Cell:
        return number(counts_of(record).get(outcome, 0))

    return {outcome: partial(count, outcome) for outcome in WORST_FIRST}


def implementation_name(record: RecordedFile) -> str:
    """Return the name of the judged implementation without "lab.kernels."; "" if it is not recorded."""
    return str(record.content.get("implementation", "")).removeprefix(MODULE_PREFIX)


def _links_to(findings: Sequence[Finding]) -> Cell:
    text = ", ".join(finding.label for finding in findings)
    return Cell(text or ABSENT, links=tuple(Link(finding.label, finding.target) for finding in findings))


def _percent(ratio: float | str | None) -> Cell:
    """Return a cell of a ratio in percent; None is a dash.

    JSON has no infinity, so the judge records "inf". It means that an output was not finite.
    """
    if ratio is None:
        return Cell(ABSENT)
    value = 100 * float(ratio)
    return Cell(f"{value:,.0f}", value) if math.isfinite(value) else Cell("not finite", math.inf)


def _largest(ratios: Iterable[float | str | None]) -> float | None:
    return max((float(ratio) for ratio in ratios if ratio is not None), default=None)
