"""When two clocks are called apart, and what the file says of them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from studies import clocks
from tests.studies.conftest import Command


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


@pytest.mark.parametrize(("cupti_us", "status"), [(100, 125), (104, 1)])
def test_the_file_has_what_was_timed_and_what_could_not_be(
    cupti_us: float, status: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clocks that are apart are the worse news."""

    def forward_work(forward: str, implementation: Any) -> str:
        if implementation.__name__ == "lab.references":
            raise NotImplementedError("not here")
        return forward

    monkeypatch.setattr(clocks, "negation", lambda size_bytes, device: None)
    monkeypatch.setattr(clocks, "build_forward", lambda case, device: "a pass")
    monkeypatch.setattr(
        clocks,
        "TimedPasses",
        SimpleNamespace(over=lambda forward: SimpleNamespace(work=partial(forward_work, forward))),
    )
    monkeypatch.setattr(clocks, "row_of", lambda name, work: {"work": name} | row(100, cupti_us))
    name = "decode/tiny/2q1s70"
    done = command(f"clocks lab.references lab.kernels --scenario {name}")
    recorded = done.recorded
    assert done.status == status
    assert len(recorded["rows_us"]) == len(clocks.NEGATION_BYTES) + 1
    assert recorded["rows_us"][-1]["work"] == f"{name}, lab.kernels"
    assert recorded["not_timed"] == [f"{name}, lab.references: NotImplementedError: not here"]
    assert (recorded["experiment"], recorded["environment"]) == ("clocks", {"gpu": "simulated"})
    assert len(recorded["methods"]) == len(clocks.METHODS)
