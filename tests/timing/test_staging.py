"""Work made ready to be sampled, with a simulated capture: each call must do its own work, and in its turn."""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lab import references
from lab.timing import staging
from lab.timing.forward import TimedPasses
from lab.timing.method import L2, Clock, Method, method_named
from lab.timing.sampling import Sample
from lab.timing.work import GpuWork
from lab.workloads import scenario
from lab.workloads.inputs.forward_pass import build_forward

METHODS = {(clock, l2): method_named(clock, l2) for clock in ("graph", "cupti", "events") for l2 in ("cold", "warm")}


ZEROS, EMPTY = torch.zeros, torch.empty


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
    work = TimedPasses.over(forward).work(kernel())
    buffers = [work, *map(work.copy, range(1, 4))]
    calls = [each.call() for each in buffers]
    if is_honest:
        staging._check_each_call(buffers, calls, stream=None)  # type: ignore[arg-type]
    else:
        with pytest.raises(AssertionError, match="output vectors are wrong"):
            staging._check_each_call(buffers, calls, stream=None)  # type: ignore[arg-type]
    assert captures == [8]  # each call, and a wipe before it


class Driver:
    """The CUDA driver's functions that list a graph's nodes; of each call two, of which one launches something."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUgraphNodeType = SimpleNamespace(
        CU_GRAPH_NODE_TYPE_KERNEL=1, CU_GRAPH_NODE_TYPE_MEMCPY=2, CU_GRAPH_NODE_TYPE_MEMSET=3
    )

    def __init__(self, *kinds: int, error: int = 0) -> None:
        self.kinds, self.error = kinds, error

    def CUgraph(self, graph: "Gpu.Graph") -> list[int]:  # noqa: N802 (the driver's names)
        return list(self.kinds) * graph.calls

    def cuGraphGetNodes(self, nodes: list[int], most: int = 0) -> tuple[int, list[int], int]:  # noqa: N802
        return self.error, [*nodes[:most], 1], len(nodes)

    def cuGraphNodeGetType(self, node: int) -> tuple[int, int]:  # noqa: N802
        return 0, node


class Gpu:
    """A GPU whose calls take `us` each. A capture runs them at once, and a replay does nothing."""

    L2_BYTES = 2**20

    class Graph:
        def __init__(self, *, keep_graph: bool) -> None:
            assert keep_graph  # otherwise its nodes cannot be listed
            self.calls = 0

        def replay(self) -> None:
            pass

        def raw_cuda_graph(self) -> "Gpu.Graph":
            return self

    def __init__(self, monkeypatch: pytest.MonkeyPatch, us: float, driver: Driver | None = None) -> None:
        self.us, self.made, self.checked = us, 0, list[tuple[int, bool]]()
        self.captures: list[int] = []
        self.drawn: list[int] = []
        for name, stub in {
            "zeros": lambda *shape, device: ZEROS(*shape),
            "empty": lambda *shape, device: EMPTY(*shape),
            "cuda.CUDAGraph": self.Graph,
            "cuda.current_device": lambda: 0,
            "cuda.current_stream": Mock,
            "cuda.stream": contextlib.nullcontext,
            "cuda.get_device_properties": lambda index: SimpleNamespace(L2_cache_size=self.L2_BYTES),
        }.items():
            monkeypatch.setattr(f"torch.{name}", stub)
        for name, stub in {
            "_side_stream": lambda index: Mock(),
            "_most_buffers": lambda buffers: 5 * len(buffers),
            "driver": lambda: driver or Driver(1, 7),
            "capturing": self.capturing,
            "between_events": self.between_events,
        }.items():
            monkeypatch.setattr(staging, name, stub)

    @contextlib.contextmanager
    def capturing(self, graph: Graph, stream: Any) -> Iterator[None]:
        before = self.made
        yield
        graph.calls = self.made - before
        self.captures.append(graph.calls)

    def between_events(self, steps: Any, state: Any, index: int, *, queued: bool) -> list[Sample]:
        ((before, run),) = steps
        assert (before, queued) == (None, True)
        return [Sample(self.us * run.__self__.calls, None)]

    def work(self, *, is_redrawn: bool = False) -> GpuWork:
        """A call that moves as many bytes as L2 has, so that two sets of buffers take turns."""

        def prepare(number: int, out: torch.Tensor) -> Any:
            def call() -> None:
                self.made += 1

            return call

        def check(arguments: Any) -> None:
            self.checked.append((arguments["number"], True))

        redraw: Any = SimpleNamespace(
            inputs=lambda number: {"number": number},
            write_tokens=lambda arguments, seed: None,
            write_call=lambda arguments, seeds: self.drawn.append(arguments["number"]),
            results=lambda arguments, seeds, whole: arguments["number"],
            check_of=lambda seeds, whole: lambda number: self.checked.append((number, whole)),
        )
        checks: dict[str, Any] = {"redraw": redraw} if is_redrawn else {"check": check}
        return GpuWork(prepare, {"number": 0, "out": EMPTY(1)}, self.L2_BYTES, **checks)


@pytest.mark.parametrize(
    ("method", "us", "number", "buffers"),
    [
        (METHODS["events", "warm"], 5, 1, 1),
        (METHODS["events", "cold"], 5, 1, 1),
        (METHODS["cupti", "cold"], 5, 1, 1),
        (METHODS["cupti", "warm"], 300, 7, 1),  # about 2,000 µs
        (METHODS["graph", "warm"], 1001, 1, 1),  # long enough at once
        (METHODS["graph", "warm"], 1000, 2, 1),
        (METHODS["graph", "warm"], 1, 1000, 1),  # no replay has more calls
        (METHODS["graph", "cold"], 300, 7, 7),
        (METHODS["graph", "cold"], 90, 10, 10),  # no more fit into the memory
    ],
)
def test_staged_work_has_calls_and_buffers_for_its_method(
    method: Method, us: float, number: int, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, us)
    staged = staging.stage(gpu.work(), method)
    assert (staged.number, len(staged.buffers), len(staged.calls), staged.launches) == (number, buffers, buffers, 1)
    assert gpu.checked == [(0, True)] * buffers
    assert gpu.captures[0] == 1
    run: Any = staged.run
    assert run is staged.calls[0] if method.clock is Clock.EVENTS else run.__self__.calls == number
    assert (staged.flush is None) == (method.l2 is L2.WARM)
    if isinstance(staged.flush, functools.partial):
        assert staged.flush.args[0].nbytes == 2 * gpu.L2_BYTES
        staged.flush()


def test_redrawn_work_is_checked_in_part_and_captured_anew_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of all buffers that are added together is checked, and of the whole capture one of its second half."""
    captures = set()
    for _ in range(40):
        gpu = Gpu(monkeypatch, 300)
        staged = staging.stage(gpu.work(is_redrawn=True), METHODS["graph", "cold"])
        assert (staged.number, len(staged.buffers)) == (7, 7)
        first, added, later = gpu.checked
        assert (first, added) == ((0, False), (2, False))
        assert later in [(number, False) for number in range(3, 7)]
        assert gpu.drawn == [*range(7), *range(7)]
        captures.add(tuple(gpu.captures))
    assert captures == {(1, 2, 7, 7), (1, 2, 7, 7, 7)}


@pytest.mark.parametrize(
    ("driver", "error", "reason"),
    [
        (Driver(7, 8), ValueError, "launches nothing"),
        (Driver(1, error=2), RuntimeError, "did not list the graph's nodes: 2"),
    ],
)
def test_work_whose_launches_cannot_be_counted_is_refused(
    driver: Driver, error: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(monkeypatch, 5, driver)
    with pytest.raises(error, match=reason):
        staging.stage(gpu.work(), METHODS["graph", "warm"])


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
    assert staging._most_buffers([work]) == 1 + 20
    unallocated = GpuWork(dict, {}, 1)
    assert staging._most_buffers([unallocated, unallocated]) == 2 + 2000
