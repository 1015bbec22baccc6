"""Verdicts of the judge, and what of them changed."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.checks import judge
from net.plans import Plan
from net.recorded import read

CHECK, FUNCTION, CASE, OUTCOME, RESULTS, RATIO, SENTENCE = range(7)
Row = list[Any]  # a field for each of these
SHOWN = 200  # characters
# In the recorded text of a case, in this order.
RENAMED = {
    "Combination(": "Configuration(",
    "Interface.DRAFT_KV": "MetadataFunction.DRAFT_KV",
    "Interface.MHA_M": "MetadataFunction.MHA_M",
    "Interface.MLA_M": "MetadataFunction.MLA_M",
    "Interface.MLA_P": "MetadataFunction.MLA_P",
    "Interface.": "AttentionCall.",
}


def record(plans: Iterable[Plan]) -> dict[str, list[Row]]:
    """Judge on the CPU, and return the rows of each plan by its name."""
    return {plan.name: rows_of(plan) for plan in plans}


def rows_of(plan: Plan) -> list[Row]:
    """Judge one implementation at the smoke level, without drawn cases."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        judge(plan.implementation, only=plan.only, functions=plan.functions, device="cpu", drawn=0, workers=2, out=path)
        cases = read(path)["cases"]
    return [
        [
            case["check"],
            case["interface"],
            case["case"],
            case["outcome"],
            case.get("judged", 0),
            case.get("worst_ratio", 0),
            next(iter((*case.get("wrongs", ()), *case.get("declines", ()))), ""),
        ]
        for case in cases
        if not case.get("drawn")
    ]


def compare(before: dict[str, list[Row]], after: dict[str, list[Row]]) -> tuple[list[str], list[str]]:
    """Return (faults, notes)."""
    faults: list[str] = []
    notes: list[str] = []
    for name, rows in after.items():
        groups: dict[tuple[str, str], tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
        for side, each in enumerate((before[name], rows)):
            for row in each:
                groups[row[CHECK], row[FUNCTION]][side].append(_renamed(row))
        for (check, function), (was, now) in groups.items():
            _compare_group(f"{name}: {check} of {function}", was, now, faults, notes)
    return faults, notes


def _renamed(row: Row) -> Row:
    """Return a row whose case has today's names."""
    case = row[CASE]
    for old, new in RENAMED.items():
        case = case.replace(old, new)
    return [*row[:CASE], case, *row[CASE + 1 :]]


def _compare_group(where: str, was: list[Row], now: list[Row], faults: list[str], notes: list[str]) -> None:
    if len(was) != len(now):
        faults.append(f"{where}: {len(was)} cases were judged, {len(now)} are")
    pairs, alone = _paired(was, now)
    if alone:
        notes.append(
            f"{where}: {len(alone)} cases have another text, such as {alone[0][0][CASE]} -> {alone[0][1][CASE]}"
        )
    sentences: Counter[tuple[str, str]] = Counter()
    for old, new in pairs + alone:
        if old[OUTCOME] != new[OUTCOME] or old[RESULTS] != new[RESULTS] or not _is_near(old[RATIO], new[RATIO]):
            faults.append(f"{where}: {old[CASE]}\n    {_verdict(old)}\n    {_verdict(new)}")
        elif old[SENTENCE] != new[SENTENCE]:
            sentences[old[SENTENCE], new[SENTENCE]] += 1
    if sentences:
        (old, new), _ = sentences.most_common(1)[0]
        notes.append(f"{where}: {sentences.total()} sentences differ, such as\n    {old[:SHOWN]}\n    {new[:SHOWN]}")


def _paired(was: list[Row], now: list[Row]) -> tuple[list[tuple[Row, Row]], list[tuple[Row, Row]]]:
    """Return pairs of cases with the same text, and pairs of the others in the order of their verdicts."""
    by_text: dict[str, list[Row]] = defaultdict(list)
    for row in was:
        by_text[row[CASE]].append(row)
    pairs, others = [], []
    for row in now:
        if found := by_text[row[CASE]]:
            pairs.append((found.pop(0), row))
        else:
            others.append(row)
    lost = [row for rows in by_text.values() for row in rows]
    return pairs, list(zip(sorted(lost, key=_order), sorted(others, key=_order), strict=False))


def _order(row: Row) -> Sequence[Any]:
    return row[OUTCOME], row[RESULTS], float(row[RATIO]), row[SENTENCE]


def _is_near(old: float | str, new: float | str) -> bool:
    """Compare ratios of four decimals within 1 %; "inf" and "nan" are text."""
    if isinstance(old, str) or isinstance(new, str):
        return old == new
    return abs(old - new) <= 0.01 * max(abs(old), abs(new)) + 1e-4


def _verdict(row: Row) -> str:
    return f"{row[OUTCOME]}, {row[RESULTS]} results, worst {row[RATIO]}: {row[SENTENCE][:SHOWN]}"
