"""The clock that pytest-benchmark reads, what a run records of its machine, and the graph timer itself."""

import json

import pytest
import torch

from lab.timing import DeviceClock, GpuTime, copy_bandwidth_gbps, environment, graph_time


def test_the_clock_moves_only_when_told() -> None:
    clock = DeviceClock("some method")
    assert clock() == clock() == 0.0
    clock.advance(2.5e-6)
    assert clock() == 2.5e-6
    assert "some method" in repr(clock)


def test_median_of_samples() -> None:
    assert GpuTime((3.0, 1.0, 2.0)).median_us == 2.0


def test_the_environment_is_json_and_names_versions() -> None:
    facts = json.loads(json.dumps(environment()))
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert ("gpu" in facts) == torch.cuda.is_available()


def test_the_commit_is_the_labs_own_wherever_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: str) -> None:
    here = environment()["commit"]
    monkeypatch.chdir(tmp_path)
    assert environment()["commit"] == here


def test_a_lab_without_git_takes_its_commit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.timing.provenance._output", lambda command: "")
    monkeypatch.setenv("LAB_COMMIT", "0123456789ab")
    assert environment()["commit"] == "0123456789ab"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU, and there is none here")
def test_twice_the_work_takes_twice_the_time() -> None:
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    half = graph_time(lambda: torch.neg(source[: 2**27], out=target[: 2**27])).median_us
    whole = graph_time(lambda: torch.neg(source, out=target)).median_us
    assert 1.8 < whole / half < 2.2
    assert copy_bandwidth_gbps(source.device) == pytest.approx(2 * source.nbytes / whole / 1000, rel=0.1)
