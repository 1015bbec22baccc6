"""When two clocks are called apart."""

from typing import Any

import pytest

from lab.experiments import clocks


def row(graph_us: float, cupti_us: float, launches: int = 1, rotated_us: float | None = None) -> dict[str, Any]:
    rotated = {"graph cold by rotation": graph_us if rotated_us else None, "cupti cold by rotation": rotated_us}
    return {"graph warm": graph_us, "cupti warm": cupti_us, "launches": launches} | rotated


@pytest.mark.parametrize(
    ("measured", "apart"),
    [
        (row(100, 102.9), False),
        (row(100, 103.1), True),
        (row(100, 96.9), True),
        (row(100, 100, rotated_us=104), True),
        (row(19, 25), False),  # too short to be judged
        (row(59, 65, launches=3), False),
        (row(61, 65, launches=3), True),
    ],
)
def test_clocks_that_differ_by_more_than_3_percent_are_apart(measured: dict[str, Any], apart: bool) -> None:
    assert clocks.are_apart(measured) is apart
