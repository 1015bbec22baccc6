"""The command line that measures two sides: what it says and with what status it ends, the GPU's part simulated."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.reports import ab
from lab.timing import Ceilings, GpuTime, method_named
from lab.timing.gpu_time import WrongWorkError
from lab.timing.sampling import RefusedTimeError
from tests.commands.command import run
from tests.recorded.record_calls import decode_arguments, latent_arguments
from tests.recorded.write_calls import write_call

DECODE = "decode/tiny/2q1s64"
CEILINGS = Ceilings(bandwidth_gbps=4000.0, matrix_rate_tflops=800.0)
WORDS = [DECODE, "lab.kernels.portable", "lab.references"]


def simulate(monkeypatch: pytest.MonkeyPatch, measured: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ab, "measure_ceilings", lambda device: CEILINGS)
    of = ab.TimedPasses.of
    monkeypatch.setattr(ab.TimedPasses, "of", lambda case, device: of(case, torch.device("cpu")))
    monkeypatch.setattr(ab, "measure_interleaved", measured)


def times(first_us: float, second_us: float) -> Any:
    method = method_named("graph", "cold")
    return lambda works, method_, samples, seed: {
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
    effect = re.escape(f"{verdict}: {second_us - 100:+.2f} %")
    assert re.search(rf"The second is {effect} \([+-]\d+\.\d\d to [+-]\d+\.\d\d %\), p = \d", capsys.readouterr().out)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return write_call(tmp_path, "trtllm_batch_decode_with_kv_cache", decode_arguments(), (torch.zeros(1),))


def test_a_recorded_call_is_timed_on_two_modules(
    recording: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch, times(100, 90))
    report = tmp_path / "report.json"
    assert run(["ab", "--calls", str(recording), *WORDS[1:], "--json", str(report)]) == 0
    sides = json.loads(report.read_text())["sides"]
    assert [(side["scenario"], side["implementation"]) for side in sides] == [
        (f"{recording}#1", module) for module in WORDS[1:]
    ]
    assert {(side["mode"], side["kv_tokens"], side["bytes_moved"]) for side in sides} == {("decode", 55, 31_232)}


def test_a_recorded_call_takes_two_modules_and_is_one(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ab", "--calls", f"{recording}#1", *WORDS]) == 2
    assert "on two modules, and lab.references is a third argument" in capsys.readouterr().err
    write_call(recording, "trtllm_batch_decode_with_kv_cache_mla", latent_arguments(), (torch.zeros(1),))
    assert run(["ab", "--calls", str(recording), *WORDS[1:]]) == 2
    assert f"has 2 calls: name one, such as {recording}#1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotImplementedError("no such head"), 125),
        (AssertionError("12 vectors are wrong"), 125),
        (WrongWorkError("second", "12 vectors are wrong"), 3),
        (RefusedTimeError("two clocks disagree"), 3),
    ],
)
def test_what_cannot_be_compared_is_not_slower(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*arguments: Any) -> Any:
        raise error

    simulate(monkeypatch, measured)
    assert run(["ab", *WORDS]) == status
    assert str(error) in capsys.readouterr().err


def test_a_time_that_the_gpu_cannot_reach_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """22 KB in 0.001 µs would be 22,000 GB/s."""
    simulate(monkeypatch, times(0.9, 0.001))
    assert run(["ab", *WORDS]) == 3
    assert "of the bandwidth measured on this GPU" in capsys.readouterr().err


def test_a_kernel_that_changes_the_clock_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulate(monkeypatch, times(100, 90))
    honest = ab.measure_interleaved

    def dishonest(*arguments: Any) -> Any:
        monkeypatch.setattr("time.perf_counter_ns", lambda: 0)
        return honest(*arguments)

    monkeypatch.setattr(ab, "measure_interleaved", dishonest)
    assert run(["ab", *WORDS]) == 3
    assert "it changed time.perf_counter_ns" in capsys.readouterr().err
