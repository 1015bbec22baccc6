"""Make a timed call ready for sampling: prepare it, run and check it once, and capture it in a CUDA graph. A *buffer* is one
copy of all tensors of the call. With rotation, consecutive calls in the graph use different buffers.
"""

import copy
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lab.metadata.engine.capture import capturing
from lab.timing.device_state import DeviceState
from lab.timing.host_time import drain
from lab.timing.method import L2, Clock, Method
from lab.timing.sampling import between_events, driver, fresh_seed
from lab.timing.work import Call, GpuWork
from lab.workloads.inputs.redraw import SeededRedraw, Seeds, wipe

# Target duration of a replay. Two events add 2 µs to it, and making persisting lines of L2 ordinary adds 17 µs on an H100.
REPLAY_US = 2000.0
MOST_CALLS_PER_REPLAY = 1000
# A byte counts as cold again after reads of this many times L2's size.
REUSE_DISTANCE = 2
MOST_COPIES = 512
SHARE_FOR_BUFFERS = 0.2  # share of the free memory for buffers beyond those that a cold L2 needs


@dataclass(frozen=True, eq=False)
class Staged:
    """A timed call that is ready for sampling. One sample makes `number` calls."""

    buffers: Sequence[GpuWork]  # the call on each set of buffers
    calls: Sequence[Call]  # the prepared calls; they own tensors, such as a derived table, that the graph uses
    run: Callable[[], object]  # makes the `number` calls of one sample
    flush: Callable[[], object] | None  # fills L2 before a sample
    number: int
    launches: int  # number of kernels, copies and fills of one call

    @property
    def redraw(self) -> SeededRedraw | None:
        return self.buffers[0].redraw


def renew(work: GpuWork, seeds: Seeds, *, tokens: bool = True) -> None:
    if work.redraw is not None:
        if tokens:
            work.redraw.write_tokens(work.arguments, seeds.tokens)
        work.redraw.write_call(work.arguments, seeds)


def check_results(works: Iterable[GpuWork], seeds: Seeds, *, whole: bool = True) -> None:
    """Wait for the GPU, and raise AssertionError if results are wrong. Without `whole`, only some results are checked."""
    drain()
    for work in works:
        if work.check is not None:
            work.check(work.arguments)
        if work.redraw is not None:
            work.redraw.check_of(seeds, whole=whole)(work.redraw.results(work.arguments, seeds, whole=whole))


def stage(work: GpuWork, method: Method) -> Staged:
    """Prepare a call, run and check it once, and capture the CUDA graph that a sample replays."""
    side = _side_stream(torch.cuda.current_device())
    buffers = _copies(work, method)
    calls = _first_calls(buffers, side)
    alone = _captured(calls[:1], side)
    launches = _count_launches(alone)
    if launches == 0:
        raise ValueError("the call launches nothing on the GPU: there is nothing to time")
    flush = None if method.l2 is L2.WARM else _flush(REUSE_DISTANCE * _l2_bytes())
    if method.clock is Clock.EVENTS:
        return Staged(buffers, calls, calls[0], flush, 1, launches)
    if method.l2 is L2.COLD_FLUSH:
        return Staged(buffers, calls, alone.replay, flush, 1, launches)
    graph, number = _long_enough(buffers, calls, side, is_rotated=method.l2 is L2.COLD_ROTATION)
    if work.redraw is not None:
        _check_each_call(buffers, calls, side)
        if random.SystemRandom().getrandbits(1):  # a kernel cannot know at the first capture which of two is timed
            graph = _captured(itertools.islice(itertools.cycle(calls), number), side)
            graph.replay()
    return Staged(buffers, calls, graph.replay, flush, number, launches)


def _first_calls(buffers: Sequence[GpuWork], side: torch.cuda.Stream) -> list[Call]:
    seeds = [Seeds(fresh_seed(), fresh_seed()) for _ in buffers]
    for work, each in zip(buffers, seeds, strict=True):
        renew(work, each)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # so that a kernel's state per stream belongs to the stream of the captures
        calls = [each.call() for each in buffers]
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    for work, each in list(zip(buffers, seeds, strict=True))[: 1 if buffers[0].redraw else None]:
        check_results([work], each, whole=False)
    return calls


def _check_each_call(buffers: Sequence[GpuWork], calls: Sequence[Call], stream: torch.cuda.Stream) -> None:
    """Detect a kernel that computes the results of later calls in an earlier call of a graph. Replay a graph that fills each
    call's output with NaN right before the call, and check the result of one late call.
    """
    seeds = [Seeds(fresh_seed(), fresh_seed()) for _ in buffers]
    for work, each in zip(buffers, seeds, strict=True):
        renew(work, each)
    wipes = [functools.partial(wipe, work.arguments) for work in buffers]
    graph = _captured([step for pair in zip(wipes, calls, strict=True) for step in pair], stream)
    graph.replay()
    one = random.SystemRandom().choice(range(len(buffers) // 2, len(buffers)))
    check_results([buffers[one]], seeds[one], whole=False)


def _copies(work: GpuWork, method: Method) -> list[GpuWork]:
    number = buffer_copies(work.bytes_moved, method, _l2_bytes())
    try:
        return [work, *map(work.copy, range(1, number))]
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"{number} copies of the buffers, which cold by rotation needs, do not fit into the GPU's memory: take the CUPTI "
            "clock, which can flush, or time it warm"
        ) from error


class TooSmallError(ValueError):
    """A call moves so few bytes that a measurement with cold L2 would need too many copies of the call's tensors."""


def buffer_copies(bytes_moved: int, method: Method, l2_bytes: int) -> int:
    """Return the number of buffers to rotate through, so that a buffer has left L2 at its next use; 1 without rotation."""
    if method.l2 is not L2.COLD_ROTATION:
        return 1
    copies = math.ceil(REUSE_DISTANCE * l2_bytes / max(bytes_moved, 1))
    if copies > MOST_COPIES:
        raise TooSmallError(
            f"to have {bytes_moved} bytes cold by rotation, {copies} copies would have to take turns, more than "
            f"{MOST_COPIES}: take the CUPTI clock, which can flush, or time it warm"
        )
    return copies


def _flush(size_bytes: int) -> Callable[[], object]:
    """Return a function that evicts the calls' data from L2 by reading other memory. Writes would leave dirty lines, whose
    write-back slows the next call: a 270 µs decode on an H200 by 3 %, a 30 µs copy by 10 %.
    """
    rows, result = torch.zeros(1024, size_bytes // 4096, device="cuda"), torch.empty(1024, device="cuda")
    return functools.partial(torch.amax, rows, dim=1, out=result)


def _captured(calls: Iterable[Call], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, stream):
        for call in calls:
            call()
    return graph


def _count_launches(graph: torch.cuda.CUDAGraph) -> int:
    cuda = driver()

    def answer(error: Any, *values: Any) -> Any:
        if error != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver did not list the graph's nodes: {error!r}")
        return values

    handle = cuda.CUgraph(graph.raw_cuda_graph())
    _, number = answer(*cuda.cuGraphGetNodes(handle))
    nodes, _ = answer(*cuda.cuGraphGetNodes(handle, number))
    kinds = cuda.CUgraphNodeType
    launching = (kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY, kinds.CU_GRAPH_NODE_TYPE_MEMSET)
    return sum(answer(*cuda.cuGraphNodeGetType(node))[0] in launching for node in nodes[:number])


def _long_enough(
    buffers: list[GpuWork], calls: list[Call], stream: torch.cuda.Stream, *, is_rotated: bool
) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph whose replay takes about `REPLAY_US`, and the number of its calls. With rotation each call has a buffer of
    its own, as far as memory allows, so that no call can reuse the result of an earlier one. New buffers and calls are appended
    to `buffers` and `calls`.
    """
    number = len(calls)
    most = min(MOST_CALLS_PER_REPLAY, _most_buffers(buffers)) if is_rotated else MOST_CALLS_PER_REPLAY
    while True:
        graph = _captured(itertools.islice(itertools.cycle(calls), number), stream)
        graph.replay()  # the first one uploads the graph
        (sample,) = between_events([(None, graph.replay)], DeviceState(), torch.cuda.current_device(), queued=True)
        if sample.us > REPLAY_US / 2 or number >= most:
            return graph, number
        number = min(math.ceil(number * REPLAY_US / sample.us), most)  # at least twice as many
        if is_rotated:
            more = [buffers[0].copy(place) for place in range(len(buffers), number)]
            calls += _first_calls(more, stream)
            buffers += more


def _most_buffers(buffers: Sequence[GpuWork]) -> int:
    """Return how many buffers there can be: the existing ones, and those that fit into a share of the free memory."""
    before = torch.cuda.memory_allocated()
    another = copy.deepcopy(dict(buffers[0].arguments))
    each = max(torch.cuda.memory_allocated() - before, 1)
    del another
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return len(buffers) + int(SHARE_FOR_BUFFERS * (torch.cuda.mem_get_info()[0] + unused) / each)


def _l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@functools.cache  # one stream for all captures on a GPU, so that a kernel with state per stream has one state
def _side_stream(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)
