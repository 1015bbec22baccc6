"""The two command lines that measure: what they say and with what status they end, the GPU's part simulated."""

from typing import Any

import pytest

from lab.timing import GpuTime, GpuWork, ab, clocks, method_named

DECODE = "decode/tiny/2q1s64"
WORDS = [DECODE, "lab.kernels.portable", "lab.references"]


def simulate(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    monkeypatch.setattr(ab, "build_forward", lambda case, device: case)
    monkeypatch.setattr(ab, "forward_work", lambda forward, module: GpuWork.of(print, 1))
    monkeypatch.setattr(ab, "measure_interleaved", measured)


def times(first_us: float, second_us: float) -> Any:
    method = method_named("graph", "cold")
    return lambda works, method_, samples: {
        side: GpuTime(tuple(median_us * (1 + 0.0001 * number) for number in range(30)), method, launches=1)
        for side, median_us in zip(works, (first_us, second_us), strict=True)
    }


@pytest.mark.parametrize(
    ("second_us", "status", "verdict"), [(110, 1, "SLOWER"), (90, 0, "FASTER"), (100.5, 0, "SAME")]
)
def test_the_second_is_compared_with_the_first(
    second_us: float, status: int, verdict: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, times(100, second_us))
    assert ab.main(WORDS) == status
    assert f"The second is {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [NotImplementedError("no such head"), AssertionError("12 vectors are wrong")])
def test_what_cannot_be_compared_is_not_slower(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: Any) -> Any:
        raise error

    simulate(monkeypatch, measured)
    assert ab.main(WORDS) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([DECODE, "lab.references"], "the two sides are the same"),
        (["decode/nosuch/2q1s64", "lab.references", "lab.kernels.portable"], "nosuch"),
        ([*WORDS, "--clock", "wall"], "no clock is called 'wall'"),
    ],
)
def test_a_wrong_command_line_says_so(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ab.main(words)
    assert message in capsys.readouterr().err


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
