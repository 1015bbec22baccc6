"""The head of the page: what was judged and timed in a sentence each, and for each faulty run what is broken and where."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.reports.html.judged import FAULTS, CheckRow, check_name, check_rows, implementation_of, verdict_of
from lab.reports.recorded import RecordedFile, RecordedRun
from lab.reports.tables import counted
from lab.reports.timing_tables import implementation_of as implementation_of_row
from lab.reports.timing_tables import next_speed, rivals
from lab.timing.statistics import Speed

SMALLEST = ("result", "where", "expected", "got")  # of a diagnosis' smallest case, in this order


@dataclass(frozen=True)
class FaultyRun:
    """A run of the judge that met a fault.

    Attributes:
        verdict: the worst outcome of its cases.
        sentence: of its diagnosis, or else what is counted.
        lines: the rules that separate wrong cases from right ones; or else the checks that are not right and what they catch.
        smallest: heading and text of the smallest wrong case; () without a diagnosis.
    """

    name: str
    implementation: str
    verdict: str
    sentence: str
    lines: tuple[str, ...]
    smallest: tuple[tuple[str, str], ...]


def lead(records: Sequence[RecordedFile]) -> str:
    """Return how many runs have which verdict, the worst first; "" without a run."""
    counts = Counter(map(verdict_of, records))
    said = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in sorted(counts, key=[*FAULTS, "declined", "right"].index)
    )
    return f"{counted(len(records), 'run')} of the judge: {said}." if records else ""


def fastest(runs: Sequence[RecordedRun]) -> str:
    """Return how often which implementation was the fastest of several; "" if no scenario was timed with several."""
    races = [rows for run in runs for rows in rivals(run) if len(rows) > 1]
    won = Counter(implementation_of_row(rows[0]) for rows in races if next_speed(rows) is Speed.SLOWER)
    said = [f"{name} in {count}" for name, count in won.most_common()]
    if won.total() < len(races):
        said.append(f"no clear difference in {len(races) - won.total()}")
    return (
        f"Fastest in {counted(len(races), 'scenario')} with several implementations: {', '.join(said)}."
        if races
        else ""
    )


def faulty_runs(records: Sequence[RecordedFile]) -> list[FaultyRun]:
    """Return the runs with wrong or failed cases, the worst first; a known fault is the findings' matter."""
    rows = check_rows(records)
    runs = [
        _faulty(record, [row for row in rows if row.record is record])
        for record in records
        if verdict_of(record) in FAULTS[:2]
    ]
    return sorted(runs, key=lambda run: FAULTS.index(run.verdict))


def _faulty(record: RecordedFile, rows: Sequence[CheckRow]) -> FaultyRun:
    diagnosis = record.content.get("diagnosis") or {}
    broken = [row for row in rows if row.check["outcome"] in FAULTS[:2]]
    cases = Counter(outcome for row in rows for outcome, count in row.check["counts"].items() for _ in range(count))
    numbers = " and ".join(f"{outcome} in {cases[outcome]}" for outcome in FAULTS[:2] if cases[outcome])
    return FaultyRun(
        name=record.name,
        implementation=implementation_of(record),
        verdict=verdict_of(record),
        sentence=diagnosis.get("sentence") or f"{numbers} of {cases.total():,} cases.".capitalize(),
        lines=tuple(map(_region, diagnosis.get("regions") or ())) or tuple(map(_broken, broken)),
        smallest=tuple(_smallest(diagnosis.get("smallest") or {}, record)),
    )


def _region(region: Mapping[str, Any]) -> str:
    inside = f"{region.get('rule') or 'everywhere'}: wrong in {_of(region, 'wrong', 'results')}"
    return f"{inside}, right in {_of(region, 'right_outside', 'outside')} others" if region.get("outside") else inside


def _of(region: Mapping[str, Any], part: str, whole: str) -> str:
    return f"{region.get(part, 0):,} of {region.get(whole, 0):,}"


def _broken(row: CheckRow) -> str:
    return f"{check_name(row.key)} of {row.function}: {row.check['outcome']}. What the check catches: {row.catches}"


def _smallest(smallest: Mapping[str, Any], record: RecordedFile) -> Iterator[tuple[str, str]]:
    number = smallest.get("case")
    if number is not None:
        found: Mapping[str, Any] = next((case for case in record.content["cases"] if case.get("number") == number), {})
        yield f"smallest case, #{number}", str(found.get("case", ""))
        yield "to see it again", f"lab judge --case {record.path.name}#{number}"
    for name in SMALLEST:
        said = smallest.get(name)
        if said:
            yield name, " ".join(f"{float(value):.4g}" for value in said) if isinstance(said, list) else str(said)
