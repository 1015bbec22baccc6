"""Pictures of what the judge says: every cell is what the data says."""

import math
from collections import Counter
from typing import Any

import torch
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from studies.pictures.judging import (
    FOUND,
    LET_THROUGH,
    NOT_ASKED,
    NOTHING,
    STEP_COLOURS,
    few_figure,
    matrix_figure,
    one_for_each_check,
    passing_figure,
    vector_errors_figure,
)
from tests.reports.pictures.figures import assert_legible, rectangles, words

DECODE, METADATA = "trtllm_batch_decode_with_kv_cache", "build_mha_metadata"
CHECKS, RULES = ["K1", "K2", "K16"], ["loose", "tight"]


def record(mutant: str, kills: str, upstream: list[int] | None, interface: str = DECODE) -> dict[str, Any]:
    return {
        "mutant": mutant,
        "kills": {key: {} for key in kills.split()},
        "upstream": upstream,
        "interface": [interface],
    }


RECORDS = [
    record("one", "K1", [0, 1]),
    record("two", "K1 K2", [0]),
    record("three", "K2", []),
    record("four", "K16", None, METADATA),
]


def colour_at(figure: Figure, x: int, y: int) -> tuple[float, ...]:
    """Of the cell whose left upper corner is within (x, y) to (x + 1, y + 1)."""
    (found,) = [box for box in rectangles(figure) if x <= box.get_x() < x + 1 and y <= box.get_y() < y + 1]
    return tuple(found.get_facecolor())


def test_each_check_gets_the_mutant_that_the_fewest_find() -> None:
    assert [each["mutant"] for each in one_for_each_check(RECORDS, CHECKS)] == ["one", "three", "four"]
    assert [each["mutant"] for each in one_for_each_check(RECORDS, ["K2", "K2"])] == ["three", "two"]
    assert one_for_each_check(RECORDS, ["K9"]) == []


def test_the_matrix_has_a_mark_for_each_kill_and_each_rule() -> None:
    figure = matrix_figure(RECORDS, CHECKS, RULES)
    marks: Counter[tuple[float, ...]] = Counter()  # in columns: marks of neighbours are joined
    for each in rectangles(figure):
        marks[tuple(each.get_facecolor())] += round(each.get_width())
    assert marks == {to_rgba(FOUND): 5, to_rgba(LET_THROUGH): 3, to_rgba(NOT_ASKED): 2}
    said = words(figure)
    assert {"paged attention, 3", "metadata, 1"} <= set(said)
    assert [label for label in said if "(" in label] == ["K1 (2)", "K2 (2)", "K16 (1)", "loose (2)", "tight (1)"]
    figure = few_figure(RECORDS, CHECKS, RULES)
    # A column is left free before the rules.
    drawn = [colour_at(figure, x, y) for x, y in ((0, 0), (1, 0), (4, 1), (5, 1), (5, 3))]
    assert drawn == [to_rgba(each) for each in (FOUND, NOTHING, LET_THROUGH, NOTHING, NOT_ASKED)]


def test_errors_within_the_bound_are_blue_and_beyond_it_red() -> None:
    error = torch.tensor([[0.001, 0.2], [0.011, math.inf], [math.nan, 0.0099]])
    figure = vector_errors_figure(error, torch.full_like(error, 0.01), torch.tensor([0, 0, 1]), "errors")
    drawn = [[STEP_COLOURS.index(_hex(colour_at(figure, row, 1 + head))) for row in range(3)] for head in range(2)]
    assert drawn == [[0, 2, 5], [4, 5, 1]]
    assert {"request 0", "request 1", "query row", "head 0", "head 1"} <= set(words(figure))
    assert_legible(figure)


def _hex(colour: Any) -> str:
    return "#" + "".join(f"{round(255 * part):02X}" for part in colour[:3])


def test_a_rule_that_lets_pass_is_seen() -> None:
    figure = passing_figure([[False, True], [False, False]], [128, 131072], RULES, "zeros")
    assert colour_at(figure, 1, 0) == to_rgba(LET_THROUGH)
    assert colour_at(figure, 0, 0) == colour_at(figure, 1, 1) == to_rgba(FOUND)
    assert {"128", "131,072", "keys per request", "loose"} <= set(words(figure))
    assert_legible(figure)
