"""Interleaved samples of passes on a simulated GPU: what is run and judged, and which wrong result refuses a time."""

import contextlib
from collections.abc import Iterable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lab import references
from lab.timing import GpuTime, gpu_time, method_named
from lab.timing.device_state import DeviceState
from lab.timing.forward import TimedPasses
from lab.timing.gpu_time import WrongWorkError, measure_interleaved, measure_staged
from lab.timing.sampling import RefusedTimeError, Sample, Step
from lab.timing.staging import Staged, renew
from lab.workloads import scenario
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.redraw import Seeds

COLD = method_named("graph", "cold")
SAMPLES, BUFFERS, WARM_UP = 3, 3, 3
CALLS = BUFFERS * (WARM_UP + 2 * SAMPLES)  # before each sample, a run that is not timed


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(steps: Iterable[Step], state: DeviceState, device: int, *, queued: bool) -> list[Sample]:
        samples = []
        for before, run in steps:
            assert before is not None
            before()
            run()
            samples.append(Sample(5.0 * BUFFERS, None))
        return samples

    monkeypatch.setattr(gpu_time, "between_events", between)
    monkeypatch.setattr(gpu_time, "driver", Mock())
    monkeypatch.setattr(gpu_time, "watched", lambda device: contextlib.nullcontext(DeviceState()))
    monkeypatch.setattr(gpu_time.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


class Kernel:
    """An honest kernel but for one of its calls, by its number, which writes nothing."""

    def __init__(self, idle_call: int | None = None) -> None:
        self.idle_call, self.count = idle_call, 0

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        def call() -> None:
            self.count += 1
            if self.count - 1 != self.idle_call:
                references.trtllm_batch_decode_with_kv_cache(**arguments)

        return call


def staged(kernel: Kernel, passes: TimedPasses, number: int = BUFFERS) -> Staged:
    work = passes.work(kernel)
    buffers = [work, *map(work.copy, range(1, number))]
    for work in buffers:
        renew(work, Seeds(1, 1))
    calls = [work.call() for work in buffers]
    return Staged(buffers, calls, lambda: [call() for call in calls], None, number, 1)


def passes() -> TimedPasses:
    return TimedPasses.over(build_forward(scenario("decode/tiny/2q1s40", None), torch.device("cpu")))


def test_an_honest_kernel_has_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(gpu_time.time, "sleep", rests.append)
    kernel = Kernel()
    work = staged(kernel, passes())
    (found,) = measure_staged({"it": work}, COLD, SAMPLES, seed=3).values()
    assert isinstance(found, GpuTime)
    assert found.samples_us == (5.0, 5.0, 5.0)
    assert (found.launches, found.calls_per_sample, found.buffer_copies) == (1, BUFFERS, BUFFERS)
    assert found.contents_seed == 3
    assert kernel.count == CALLS
    assert rests == [1.0]  # before the first sample alone
    assert all(each.arguments["out"].isnan().all() for each in work.buffers)  # nobody can read a result later


@pytest.mark.parametrize("buffer", range(BUFFERS))
def test_after_the_last_sample_every_buffer_is_judged(buffer: int) -> None:
    (found,) = measure_staged(
        {"it": staged(Kernel(CALLS - BUFFERS + buffer), passes())}, COLD, SAMPLES, seed=3
    ).values()
    assert isinstance(found, AssertionError)
    assert "output vectors are wrong" in str(found)


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_of_each_sample_a_buffer_is_judged(sample: int) -> None:
    """Of one there is no choice; the run before the sample is not judged."""
    timed = WARM_UP + 1 + 2 * sample
    for call, is_judged in ((timed, True), (timed - 1, False)):
        work = staged(Kernel(call), passes(), number=1)
        (found,) = measure_staged({"it": work}, COLD, SAMPLES, seed=3).values()
        assert isinstance(found, AssertionError) == is_judged


def test_who_is_right_keeps_its_time_beside_who_is_wrong() -> None:
    shared = passes()
    works = {"right": staged(Kernel(), shared), "wrong": staged(Kernel(CALLS - 1), shared)}
    found = measure_staged(works, COLD, SAMPLES, seed=3)
    assert list(found) == ["right", "wrong"]
    assert isinstance(found["right"], GpuTime)
    assert isinstance(found["wrong"], AssertionError)


@pytest.mark.parametrize("error", [AssertionError("wrong"), RefusedTimeError("wrong")])
def test_what_refuses_a_time_has_the_name_of_the_call(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    right = GpuTime((5.0,), COLD, 1, 1, DeviceState())
    found: dict[str, Any] = {"right": right}
    monkeypatch.setattr(gpu_time, "stage", lambda work, method: work)
    monkeypatch.setattr(gpu_time, "measure_staged", lambda works, *_: {name: found[name] for name in works})
    works: dict[str, Any] = dict.fromkeys(found)
    assert measure_interleaved(works, COLD) == found
    found["second"] = error
    with pytest.raises(WrongWorkError, match=r"^second: wrong$"):
        measure_interleaved(works | {"second": None}, COLD)


def test_samples_are_at_least_one() -> None:
    (found,) = measure_staged({"it": staged(Kernel(), passes())}, COLD, 1, seed=3).values()
    assert isinstance(found, GpuTime)
    assert found.samples_us == (5.0,)
    with pytest.raises(ValueError, match="samples=0 must be at least 1"):
        measure_staged({}, COLD, 0)
