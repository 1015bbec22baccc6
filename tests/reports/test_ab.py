"""The command line that measures two sides: what it says and with what status it ends, the GPU's part simulated."""

from typing import Any

import pytest
import torch

from lab.reports import ab
from lab.timing import GpuTime, GpuWork, method_named
from tests.commands.command import run

DECODE = "decode/tiny/2q1s64"
WORDS = [DECODE, "lab.kernels.portable", "lab.references"]


def simulate(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
    assert run(["ab", *WORDS]) == status
    assert f"The second is {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize("error", [NotImplementedError("no such head"), AssertionError("12 vectors are wrong")])
def test_what_cannot_be_compared_is_not_slower(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: Any) -> Any:
        raise error

    simulate(monkeypatch, measured)
    assert run(["ab", *WORDS]) == 125
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([DECODE, "lab.references"], "the two sides are the same"),
        (["decode/nosuch/2q1s64", "lab.references", "lab.kernels.portable"], "nosuch"),
        ([*WORDS, "--clock", "wall"], "'wall' is not one of 'graph', 'cupti', 'events'"),
    ],
)
def test_a_wrong_command_line_says_so(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ab", *words]) == 2
    assert message in capsys.readouterr().err
