"""The first section of the page: a sentence on what was judged, one on what was timed, and the defects of each faulty run."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.reports.html.judged import (
    BROKEN,
    WORST_FIRST,
    CheckRow,
    check_name,
    check_rows,
    implementation_name,
    verdict_of,
)
from lab.reports.recorded import RecordedFile, RecordedRun
from lab.reports.timing_tables import implementation_of, next_speed, rivals
from lab.timing.statistics import Speed
from lab.wording import counted

# Keys of a diagnosis' smallest wrong case that the page shows, in this order.
SMALLEST_CASE_KEYS = ("result", "where", "expected", "got")


@dataclass(frozen=True)
class FaultyRun:
    """A run of the judge with a wrong or failed case.

    Attributes:
        name: of the recorded file.
        implementation: that was judged.
        verdict: the worst outcome of its cases.
        sentence: the diagnosis; without one, the number of wrong and failed cases.
        details: the conditions under which cases are wrong; without a diagnosis, the checks that are not right and what they
            catch.
        smallest_case: (heading, text) of each fact of the smallest wrong case; () without a diagnosis.
    """

    name: str
    implementation: str
    verdict: str
    sentence: str
    details: tuple[str, ...]
    smallest_case: tuple[tuple[str, str], ...]


def judged_sentence(records: Sequence[RecordedFile]) -> str:
    """Return a sentence with the number of runs of each verdict, the worst first; "" without a run."""
    counts = Counter(map(verdict_of, records))
    numbers = ", ".join(f"{counts[verdict]} {verdict}" for verdict in sorted(counts, key=WORST_FIRST.index))
    return f"{counted(len(records), 'run')} of the judge: {numbers}." if records else ""


def fastest_sentence(runs: Sequence[RecordedRun]) -> str:
    """Return a sentence with the number of scenarios in which each implementation was the fastest.

    It counts the scenarios that several implementations were timed in, in each run by itself; without one, it is "".
    """
    compared_by_run = [rows for rows in ([each for each in rivals(run) if len(each) > 1] for run in runs) if rows]
    compared = [rows for one_run in compared_by_run for rows in one_run]
    # The first row is the fastest. It counts only if the second is slower by the lab's rule.
    wins = Counter(implementation_of(rows[0]) for rows in compared if next_speed(rows) is Speed.SLOWER)
    numbers = [f"{name} in {count}" for name, count in wins.most_common()]
    if wins.total() < len(compared):
        numbers.append(f"no clear difference in {len(compared) - wins.total()}")
    scenarios = f"{counted(len(compared), 'scenario')} with several implementations"
    if len(compared_by_run) > 1:
        scenarios += f", in {len(compared_by_run)} runs"
    return f"Fastest in {scenarios}: {', '.join(numbers)}." if compared else ""


def faulty_runs(records: Sequence[RecordedFile]) -> list[FaultyRun]:
    """Return the runs with wrong or failed cases, the worst first. Runs with known faults alone are not among them."""
    rows = check_rows(records)
    runs = [
        _faulty_run(record, [row for row in rows if row.record is record])
        for record in records
        if verdict_of(record) in BROKEN
    ]
    return sorted(runs, key=lambda run: WORST_FIRST.index(run.verdict))


def _faulty_run(record: RecordedFile, rows: Sequence[CheckRow]) -> FaultyRun:
    """Return a run's part of the section; `rows` are the checks of the run."""
    diagnosis = record.content.get("diagnosis") or {}
    cases = Counter(outcome for row in rows for outcome, count in row.check["counts"].items() for _ in range(count))
    numbers = " and ".join(f"{outcome} in {cases[outcome]}" for outcome in BROKEN if cases[outcome])
    checks = [
        f"{check_name(row.key)} of {row.function}: {row.check['outcome']}. What the check catches: {row.catches}"
        for row in rows
        if row.check["outcome"] in BROKEN
    ]
    return FaultyRun(
        name=record.name,
        implementation=implementation_name(record),
        verdict=verdict_of(record),
        sentence=diagnosis.get("sentence") or f"{numbers} of {cases.total():,} cases.".capitalize(),
        details=tuple(map(_region_sentence, diagnosis.get("regions") or ())) or tuple(checks),
        smallest_case=tuple(_smallest_case(diagnosis.get("smallest") or {}, record)),
    )


def _region_sentence(region: Mapping[str, Any]) -> str:
    """Return a diagnosed region's rule, and the numbers of wrong results inside it and of right ones outside."""
    names = ("wrong", "results", "right_outside", "outside")
    wrong, results, right_outside, outside = (region.get(name) or 0 for name in names)
    inside = f"{region.get('rule') or 'everywhere'}: wrong in {wrong:,} of {results:,}"
    return f"{inside}, right in {right_outside:,} of {outside:,} other results" if outside else inside


def _smallest_case(smallest: Mapping[str, Any], record: RecordedFile) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of the smallest wrong case, of the command that judges it again, and of what was wrong in it."""
    number = smallest.get("case")
    if number is not None:
        found = next((case for case in record.content.get("cases") or () if case.get("number") == number), None)
        if found is not None:  # a trimmed report has some cases alone
            yield f"smallest case, #{number}", str(found.get("case", ""))
            yield "reproduce with", f"lab judge --case {record.name}.json#{number}"
    for key in SMALLEST_CASE_KEYS:
        value = smallest.get(key)
        if value:
            yield key, " ".join(f"{float(each):.4g}" for each in value) if isinstance(value, list) else str(value)
