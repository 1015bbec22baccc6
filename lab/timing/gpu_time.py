"""GPU time of work, by a stated method, and a clock that carries it into pytest-benchmark.

Work is prepared, run and checked; captured in a CUDA graph; timed; and checked again, on every buffer that was timed.
"""

import functools
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lab.metadata.engine.capture import capturing
from lab.timing import cupti
from lab.timing.device_state import DeviceState, watched
from lab.timing.host_time import drain
from lab.timing.method import L2, Clock, Method
from lab.timing.work import Call, GpuWork

SAMPLES = 30
WARM_UP_RUNS = 3
# Idle before the samples: without it the work before decides how near the power limit they run. An H200's prefill read
# 1,980 ± 2 µs after a rest and 2,151 ± 180 µs right after other work. Rests between the samples make them slower by 1 to 3 %.
REST_S = 1.0
# A replay lasts about this long, so that the 2 µs that two events add to it are 0.2 %.
REPLAY_US = 1000.0
MOST_CALLS_PER_REPLAY = 1000
# A byte is cold again when this many times L2's size was read since.
REUSE_DISTANCE = 2
MOST_COPIES = 512
SHUFFLE_SEED = 0


class DeviceClock:
    """A clock for pytest-benchmark that moves only when it is told to, in seconds."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __repr__(self) -> str:
        return f"DeviceClock({self.method!r})"


@dataclass(frozen=True)
class GpuTime:
    """Samples of one call's GPU time in microseconds, and how they were taken.

    Attributes:
        samples_us: time per call; one sample is one replay, or one eager call for the events clock.
        method: how.
        launches: kernels, copies and fills of one call.
        calls_per_sample: calls in one replay.
        buffer_copies: sets of buffers that took turns.
        kernels: their names, where the clock tells (CUPTI).
        busy_us: median time per call in which something ran, gaps left out, where the clock tells (CUPTI).
        device: clocks, power and throttling while it ran; of interleaved works, while all of them did.

    Raises:
        ValueError: no samples, or one that is not a positive number: nothing was timed.
    """

    samples_us: tuple[float, ...]
    method: Method
    launches: int
    calls_per_sample: int = 1
    buffer_copies: int = 1
    kernels: tuple[str, ...] = ()
    busy_us: float | None = None
    device: DeviceState = field(default_factory=DeviceState)

    def __post_init__(self) -> None:
        wrong = [sample for sample in self.samples_us if not (math.isfinite(sample) and sample > 0)]
        if wrong or not self.samples_us or self.launches < 1:
            raise ValueError(
                f"nothing was timed: {len(self.samples_us)} samples, {self.launches} launches, "
                f"{len(wrong)} samples that are no positive time {wrong[:3]}"
            )

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def iqr_us(self) -> float:
        """Return the distance of the quartiles: the spread of the middle half."""
        return interquartile_range(self.samples_us)


def interquartile_range(samples: Sequence[float]) -> float:
    """Return the distance of the quartiles, in the unit of the samples; 0 for a single one."""
    if len(samples) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return upper - lower


def rounded_us(samples_us: Sequence[float]) -> list[float]:
    """Round samples to nanoseconds, as rows keep them; a clock of the GPU tells no more."""
    return [round(sample, 3) for sample in samples_us]


def measure(work: GpuWork, method: Method, samples: int = SAMPLES) -> GpuTime:
    """Measure one work; see `measure_interleaved`."""
    return measure_interleaved({"": work}, method, samples)[""]


def measure_interleaved(works: Mapping[str, GpuWork], method: Method, samples: int = SAMPLES) -> dict[str, GpuTime]:
    """Measure works against each other: their samples are taken in turns, in an order reshuffled each round.

    Args:
        works: by name. Each is run before it is captured, so that whatever it builds at first use exists.
        method: the same for all.
        samples: of each work.

    Raises:
        ValueError: the method cannot time this work; says what can.
        RuntimeError: from torch, if a call cannot be captured; from `lab.timing.cupti`.
    """
    return measure_staged({name: stage(work, method) for name, work in works.items()}, method, samples)


def measure_staged(works: Mapping[str, "Staged"], method: Method, samples: int = SAMPLES) -> dict[str, GpuTime]:
    """Measure works that were staged with the method, so that one that cannot be is left out; see `measure_interleaved`."""
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    staged = dict(works)
    if method.l2 is L2.WARM and len(works) > 1:  # the sample before was another work's, and left its buffers in L2
        staged = {name: replace(each, before=each.run) for name, each in staged.items()}
    order = _shuffled_rounds(list(works), samples)
    torch.cuda.synchronize()
    time.sleep(REST_S)
    for each in staged.values():
        _warm_up(each)
    device_index = torch.cuda.current_device()
    with watched(device_index) as state:
        steps = [(staged[name].before, staged[name].run) for name in order]
        if method.clock is Clock.CUPTI:
            taken: list[Any] = _recorded(steps, state, device_index)
        else:
            taken = _between_events(steps, state, device_index, drained=method.clock is Clock.EVENTS)
    gather = _from_records if method.clock is Clock.CUPTI else _from_samples
    results = {}
    for name, each in staged.items():
        check_results(each.buffers)
        mine = [sample for sample, owner in zip(taken, order, strict=True) if owner == name]
        results[name] = gather(mine, each, method, state)
    return results


@dataclass(frozen=True, eq=False)
class Staged:
    """Work ready to be sampled: `run` is one sample of `number` calls, `before` goes before it and is not timed.

    The calls are kept because a graph does not keep what they own, such as a table that is derived in each call.
    """

    buffers: Sequence[GpuWork]
    calls: Sequence[Call]
    run: Callable[[], object]
    before: Callable[[], object] | None
    number: int
    launches: int


def check_results(works: Iterable[GpuWork]) -> None:
    """Check what the works wrote, once the GPU is done; raises what their checks raise."""
    drain()
    for work in works:
        if work.check is not None:
            work.check(work.arguments)


def _shuffled_rounds(names: Sequence[str], rounds: int) -> list[str]:
    """Return every name once a round, in another order each round, so that none always follows the same other."""
    generator = random.Random(SHUFFLE_SEED)
    return [name for _ in range(rounds) for name in generator.sample(names, len(names))]


def stage(work: GpuWork, method: Method) -> Staged:
    """Prepare, run, check and capture a work; raises what these raise, and as `measure_interleaved`."""
    side = _side_stream(torch.cuda.current_device())
    buffers = _copies(work, method)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a kernel keeps per stream is then made for the stream of the captures
        calls = [each.call() for each in buffers]
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    check_results(buffers)
    alone = _captured(calls[:1], side)
    launches = _count_launches(alone)
    if launches == 0:
        raise ValueError("the call launches nothing on the GPU: there is nothing to time")
    flush = _Flush(REUSE_DISTANCE * _l2_bytes()) if method.l2 is L2.COLD_FLUSH else None
    if method.clock is Clock.EVENTS:
        turns = itertools.cycle(calls)
        return Staged(buffers, calls, lambda: next(turns)(), flush, 1, launches)
    if method.l2 is L2.COLD_FLUSH:
        return Staged(buffers, calls, alone.replay, flush, 1, launches)
    graph, number = _long_enough(calls, side)
    return Staged(buffers, calls, graph.replay, None, number, launches)


def _copies(work: GpuWork, method: Method) -> list[GpuWork]:
    number = buffer_copies(work.bytes_moved, method, _l2_bytes())
    try:
        return work.copies(number)
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"{number} copies of the buffers, which cold by rotation needs, do not fit into the GPU's memory: take the CUPTI "
            "clock, which can flush, or time it warm"
        ) from error


class TooSmallError(ValueError):
    """The work moves too few bytes to be cold by rotation."""


def buffer_copies(bytes_moved: int, method: Method, l2_bytes: int) -> int:
    """Return how many sets of buffers must take turns until a byte of the first is out of L2 again; 1 unless by rotation.

    Raises:
        TooSmallError: too many for so little work.
    """
    if method.l2 is not L2.COLD_ROTATION:
        return 1
    copies = math.ceil(REUSE_DISTANCE * l2_bytes / max(bytes_moved, 1))
    if copies > MOST_COPIES:
        raise TooSmallError(
            f"to have {bytes_moved} bytes cold by rotation, {copies} copies would have to take turns, more than "
            f"{MOST_COPIES}: take the CUPTI clock, which can flush, or time it warm"
        )
    return copies


class _Flush:
    """Fill L2 with lines that no call reads.

    By reading: a fill by writing leaves dirty lines, and writing those back is charged to the call that comes next: 3 % of a
    270 µs decode on an H200, 10 % of a 30 µs copy.
    """

    def __init__(self, size_bytes: int) -> None:
        self.rows = torch.zeros(1024, size_bytes // 4096, device="cuda")
        self.result = torch.empty(1024, device="cuda")

    def __call__(self) -> None:
        torch.amax(self.rows, dim=1, out=self.result)


def _captured(calls: Iterable[Call], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with capturing(graph, stream):
        for call in calls:
            call()
    return graph


def _count_launches(graph: torch.cuda.CUDAGraph) -> int:
    try:
        from cuda.bindings import driver  # comes with torch's CUDA wheels
    except ImportError as error:
        raise RuntimeError("counting a graph's launches needs cuda.bindings: pip install cuda-bindings") from error

    def answer(error: Any, *values: Any) -> Any:
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"the CUDA driver did not list the graph's nodes: {error!r}")
        return values

    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, number = answer(*driver.cuGraphGetNodes(handle))
    nodes, _ = answer(*driver.cuGraphGetNodes(handle, number))
    kinds = driver.CUgraphNodeType
    launching = (kinds.CU_GRAPH_NODE_TYPE_KERNEL, kinds.CU_GRAPH_NODE_TYPE_MEMCPY, kinds.CU_GRAPH_NODE_TYPE_MEMSET)
    return sum(answer(*driver.cuGraphNodeGetType(node))[0] in launching for node in nodes[:number])


def _long_enough(calls: Sequence[Call], stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph whose replay takes long enough, and the number of its calls: a multiple of `calls`, taken in turn."""
    number = len(calls)
    while True:
        graph = _captured(itertools.islice(itertools.cycle(calls), number), stream)
        graph.replay()  # the first one uploads the graph
        (replay_us,) = _between_events([(None, graph.replay)], DeviceState(), torch.cuda.current_device())
        if replay_us > REPLAY_US / 2 or number >= MOST_CALLS_PER_REPLAY:
            return graph, number
        wanted = min(math.ceil(number * REPLAY_US / replay_us), MOST_CALLS_PER_REPLAY)
        number = len(calls) * math.ceil(max(wanted, 2 * number) / len(calls))


def _warm_up(staged: Staged) -> None:
    """Run some times before the first sample, and for eager calls at least once on every copy."""
    for _ in range(max(WARM_UP_RUNS, len(staged.calls))):
        if staged.before is not None:
            staged.before()
        staged.run()


def _between_events(
    steps: Sequence[cupti.Step], state: DeviceState, device_index: int, drained: bool = False
) -> list[float]:
    """Time each step by CUDA events, in microseconds. The device is read while it works through them.

    `drained`: it is idle when a step starts, so that all of the host's launch time is in the step, and not what is left of it
    after earlier work.
    """
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in steps]
    for (start, end), (before, run) in zip(pairs, steps, strict=True):
        if before is not None:
            before()
        if drained:
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
    state.read(device_index)
    while not pairs[-1][1].query():
        state.read(device_index)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1000 for start, end in pairs]


def _recorded(steps: Sequence[cupti.Step], state: DeviceState, device_index: int) -> list[list[cupti.Activity]]:
    """Record each step's activities by CUPTI. The device is read while it works on some of them."""
    read_every = max(1, len(steps) // 10)

    def read_while_it_runs(run: Callable[[], object]) -> None:
        run()
        state.read(device_index)

    return cupti.record(
        (before, functools.partial(read_while_it_runs, run) if number % read_every == 0 else run)
        for number, (before, run) in enumerate(steps)
    )


def _from_samples(samples_us: list[float], staged: Staged, method: Method, state: DeviceState) -> GpuTime:
    return GpuTime(
        samples_us=tuple(sample / staged.number for sample in samples_us),
        method=method,
        launches=staged.launches,
        calls_per_sample=staged.number,
        buffer_copies=len(staged.buffers),
        device=state,
    )


def _from_records(records: list[list[cupti.Activity]], staged: Staged, method: Method, state: DeviceState) -> GpuTime:
    numbers = {len(activities) for activities in records}
    if numbers != {staged.launches * staged.number}:
        raise RuntimeError(
            f"CUPTI saw {sorted(numbers)} activities in replays of a graph of {staged.launches * staged.number}: it lost some"
        )
    spans_us = [cupti.span_us(activities) for activities in records]
    return replace(
        _from_samples(spans_us, staged, method, state),
        kernels=tuple(dict.fromkeys(activity.name for activity in records[0])),
        busy_us=statistics.median(cupti.busy_us(activities) for activities in records) / staged.number,
    )


def _l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    """Return the one stream of all captures: what a kernel keeps per stream, such as a workspace, is then kept once."""
    return torch.cuda.Stream(device_index)
