"""Work made ready to be sampled, with a simulated capture: each call must do its own work, and in its turn."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.timing import staging
from lab.timing.forward import TimedPasses
from lab.timing.work import GpuWork
from lab.workloads import scenario
from lab.workloads.inputs.forward_pass import build_forward


class Portable:
    """Prepares honest calls."""

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        return lambda: references.trtllm_batch_decode_with_kv_cache(**arguments)


class FirstDoesAll(Portable):
    """Does the work of all calls in the first one."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        honest, number = super().prepare_trtllm_batch_decode_with_kv_cache(**arguments), len(self.calls)
        self.calls.append(honest)
        return lambda: None if number else [each() for each in self.calls]


@pytest.mark.parametrize(("kernel", "is_honest"), [(Portable, True), (FirstDoesAll, False)])
def test_a_call_that_does_anothers_work_is_found(kernel: Any, is_honest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[int] = []

    def captured(calls: Any, stream: Any) -> Any:
        steps = list(calls)
        captures.append(len(steps))
        return SimpleNamespace(replay=lambda: [step() for step in steps])

    monkeypatch.setattr(staging, "_captured", captured)
    forward = build_forward(scenario("decode/tiny/2q1s40", None), torch.device("cpu"))
    buffers = TimedPasses.over(forward).work(kernel()).copies(4)
    calls = [each.call() for each in buffers]
    if is_honest:
        staging._check_each_call(buffers, calls, stream=None)  # type: ignore[arg-type]
    else:
        with pytest.raises(AssertionError, match="output vectors are wrong"):
            staging._check_each_call(buffers, calls, stream=None)  # type: ignore[arg-type]
    assert captures == [8]  # each call, and a wipe before it


class Memory:
    """A GPU's memory, of which a copy of `Tensor` takes 100 bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.allocated + 2000)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8000, 80_000))


class Tensor:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __deepcopy__(self, memo: Any) -> "Tensor":
        self.memory.allocated += 100
        return Tensor(self.memory)


def test_buffers_are_limited_by_the_memory_of_a_whole_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of 10,000 bytes holds 20 sets of 100, though another work over the pass has made the next set already."""
    tensor = Tensor(Memory(monkeypatch))
    redraw = SimpleNamespace(inputs=lambda number: {"query": tensor})
    work = GpuWork(dict, {"query": tensor, "out": torch.empty(0)}, 1, redraw=redraw)  # type: ignore[arg-type]
    assert staging._most_buffers([work, work, work]) == 3 + 20
