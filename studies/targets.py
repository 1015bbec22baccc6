"""Define targets, which are numbers that a variant should reach, and report whether it reached them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.named_enum import NamedEnum
from lab.reports.tables import Cell, number, words
from studies.recording import Formats


class Figure(NamedEnum):
    """A quantity with a target. The value is its unit in words."""

    SPEED = "x the speed of {baseline}"
    BANDWIDTH = "% of the copy bandwidth"
    HOST = "µs of host time"


@dataclass(frozen=True)
class Target:
    """A quantity and its bound: the smallest value that a variant should reach, or for host time the largest value."""

    figure: Figure
    bound: float

    def margin(self, reached: float) -> float:
        return self.bound - reached if self.figure is Figure.HOST else reached - self.bound


def target_rows(
    targets: Sequence[Target], reached: Mapping[Figure, float | None], baseline: str
) -> list[dict[str, Any]]:
    """Return the recorded results of a variant's targets. A target whose value is None is neither passed nor missed."""
    rows: list[dict[str, Any]] = []
    for target in targets:
        figure, value = target.figure.value.format(baseline=baseline), reached[target.figure]
        margin = None if value is None else target.margin(value)
        rows.append(
            {
                "figure": figure,
                "target": target.bound,
                "reached": None if value is None else round(value, 3),
                "margin": None if margin is None else round(margin, 3),
                "passed": None if margin is None else margin >= 0,
            }
        )
    return rows


def target_text(row: Mapping[str, Any]) -> str:
    return "; ".join(_one_text(target) for target in row["targets"])


def target_cell(row: Mapping[str, Any]) -> Cell:
    return words(target_text(row))


def _one_text(target: Mapping[str, Any]) -> str:
    bound = f"{target['target']:g} {target['figure']}"
    if target["passed"] is None:
        return f"{bound}: nothing to compare with"
    return f"{bound}: {'passed' if target['passed'] else 'missed'} by {abs(target['margin']):.3g}"


# Of rows of variants that were compared with a baseline.
TIME_COLUMNS: Formats = {
    "point": "{point}",
    "variant": "{arm}",
    "kernel": "{kernel}",
    "cache": "{kv_dtype}",
    "µs": "{median_us:,.1f}",
    "spread, µs": "{iqr_us:,.1f}",
    "floor, µs": "{floor_us:,.1f}",
    "bound by": "{floor_bound}",
    "floor, %": "{floor_percent:.1f}",
    "speed, x": lambda row: number(row["speed_of_baseline"], 3),
    "targets": target_cell,
}


def score(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    passed = [target["passed"] for row in rows for target in row["targets"]]
    return {"passed": passed.count(True), "missed": passed.count(False), "not_compared": passed.count(None)}
