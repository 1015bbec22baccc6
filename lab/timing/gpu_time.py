"""Measure the GPU time of calls by a stated method (clock and state of L2). Each call is checked, captured in a CUDA graph and
timed, and then the results in every timed buffer are checked.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lab.timing import cupti
from lab.timing.device_state import DeviceState, watched
from lab.timing.method import Clock, Method
from lab.timing.sampling import (
    IDLE_SLACK_US,
    QUEUED_SLACK_US,
    RefusedTimeError,
    Sample,
    Step,
    between_events,
    check_clocks,
    driver,
    fresh_seed,
    refuse_foreign_threads,
)
from lab.timing.staging import Staged, check_results, renew, stage
from lab.timing.work import GpuWork
from lab.workloads.inputs.redraw import SHORTER_EVERY, SeededRedraw, Seeds, wipe

SAMPLES = 30
WARM_UP_RUNS = 3
# The GPU is idle this long before the first sample, because earlier work determines how close to the power limit samples run:
# an H200's prefill took 1,980 ± 2 µs after a rest, and 2,151 ± 180 µs right after other work. Rests between samples would make
# the samples slower by 1 to 3 %.
REST_S = 1.0
SHUFFLE_SEED = 0
# The largest number of bytes, and of randomly chosen buffers, whose K, V and pages are redrawn before a sample.
RENEWED_BYTES = 2**29
MOST_RENEWED = 8


class DeviceClock:
    """A clock for pytest-benchmark, in seconds. Its time changes only if `advance` adds a measured GPU time."""

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
    """Samples of one call's GPU time, with the conditions of the measurement. Raises ValueError for a sample of 0 or less."""

    samples_us: tuple[float, ...]  #: time per call; one sample is one replay, or one eager call for the events clock
    method: Method
    launches: int  #: number of kernels, copies and fills of one call
    calls_per_sample: int = 1  #: number of calls in one replay of the CUDA graph
    buffer_copies: int = 1  #: number of copies of the call's tensors that consecutive calls used in turn
    kernels: tuple[str, ...] = ()  #: names of the kernels of one replay, by CUPTI only
    busy_us: float | None = None  #: time per call during which the GPU ran something, by CUPTI only
    #: clocks, power and throttling during the measurement; calls with interleaved samples share this object
    device: DeviceState = field(default_factory=DeviceState)
    #: seed of the tensors' contents; with this seed `measure_interleaved` draws the same contents again
    contents_seed: int | None = None

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
        return interquartile_range(self.samples_us)


Measured = GpuTime | AssertionError | RefusedTimeError


def interquartile_range(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return upper - lower


def rounded_us(samples_us: Sequence[float]) -> list[float]:
    return [round(sample, 3) for sample in samples_us]


def measure(work: GpuWork, method: Method, samples: int = SAMPLES) -> GpuTime:
    return measure_interleaved({"": work}, method, samples)[""]


def measure_interleaved(
    works: Mapping[str, GpuWork], method: Method, samples: int = SAMPLES, seed: int | None = None
) -> dict[str, GpuTime]:
    """Measure GPU times of calls by name. Each round samples every call once, in random order. `seed`: the `contents_seed` of
    an earlier `GpuTime`, to draw the same tensor contents. Raises WrongWorkError for wrong results or a refused time,
    ValueError if the method cannot time a call, and RuntimeError if a call cannot be captured in a graph or recorded by CUPTI.
    """
    staged = {}
    for name, work in works.items():
        try:
            staged[name] = stage(work, method)
        except AssertionError as error:
            raise WrongWorkError(name, str(error)) from error
    found = measure_staged(staged, method, samples, seed)
    times = {}
    for name, result in found.items():
        if not isinstance(result, GpuTime):
            raise WrongWorkError(name, str(result)) from result
        times[name] = result
    return times


def check_named(name: str, works: Iterable[GpuWork], seeds: Seeds) -> None:
    try:
        check_results(works, seeds)
    except AssertionError as error:
        raise WrongWorkError(name, str(error)) from error


class WrongWorkError(AssertionError):
    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}" if name else reason)
        self.name, self.reason = name, reason


def measure_staged(
    works: Mapping[str, Staged], method: Method, samples: int = SAMPLES, seed: int | None = None
) -> dict[str, Measured]:
    """Measure the GPU times of prepared calls by name, in rounds of one sample of every call. Return each call's time or error.

    A buffer is one copy of a call's tensors. Before each sample of a call with a `redraw`, all its buffers get new queries and
    lengths, some buffers get new K, V and pages, and outputs become NaN. After the sample, some results of one random buffer
    are kept. After the call's last sample, some results of every buffer are kept, and of one buffer all. The kept results are
    checked at the end, after the samples of all calls.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    run_seed = fresh_seed() if seed is None else seed
    order = _shuffled_rounds(list(works), samples)
    device_index, contents = torch.cuda.current_device(), _contents_of(works, run_seed)
    kept: list[Kept] = []

    def steps() -> Iterator[Step]:
        for number, name in enumerate(order):
            turn = number // len(works)
            yield partial(_ready, works[name], contents[name], turn), works[name].run
            kept.extend(_keep(name, works[name], contents[name], turn, is_last=turn == samples - 1))

    torch.cuda.synchronize()
    time.sleep(REST_S)
    for each in works.values():  # eager calls at least once on every copy
        for _ in range(max(WARM_UP_RUNS, len(each.calls) if each.number == 1 else 0)):
            each.run()
    with watched(device_index) as state:
        if method.clock is Clock.CUPTI:
            taken: list[Any] = _recorded(steps(), len(order), state, device_index)
        else:
            taken = between_events(steps(), state, device_index, queued=method.clock is Clock.GRAPH)
    gather = _from_records if method.clock is Clock.CUPTI else _from_samples
    results = _wrong_results(works, kept)
    for name, each in works.items():
        mine = [sample for sample, owner in zip(taken, order, strict=True) if owner == name]
        if name not in results:
            try:
                results[name] = replace(gather(mine, each, method, state), contents_seed=run_seed)
            except RefusedTimeError as error:
                results[name] = error
    return {name: results[name] for name in works}


class BufferContents:
    """Draws new contents for buffers of timed calls, from one seed. An argument `turn` is the number of a round of samples."""

    def __init__(self, buffers: Sequence[GpuWork], seed: int) -> None:
        self._buffers, self._seed, self._turn = buffers, seed, -1
        # Number of a buffer -> the turn in which its K and V were drawn last
        self._tokens = dict.fromkeys(range(len(buffers)), -1)

    def renew_tokens(self, turn: int) -> None:
        if turn == self._turn:
            return
        self._turn, numbers = turn, list(range(len(self._buffers)))
        if turn:
            most = max(1, min(MOST_RENEWED, RENEWED_BYTES // max(self._buffers[0].bytes_moved, 1)))
            numbers = self._dice(turn).sample(numbers, min(most, len(numbers)))
        for number in numbers:
            self._tokens[number] = turn
            renew(self._buffers[number], self.seeds(turn, number))

    def renew_calls(self, turn: int, buffers: Sequence[GpuWork]) -> None:
        for number, work in enumerate(buffers):
            renew(work, self.seeds(turn, number), tokens=False)

    def seeds(self, turn: int, number: int) -> Seeds:
        tokens = random.Random(f"{self._seed} tokens {self._tokens[number]} {number}").getrandbits(60)
        call = random.Random(f"{self._seed} call {turn} {number}").getrandbits(60)
        return Seeds(tokens, SHORTER_EVERY * call + self._dice(turn).randrange(SHORTER_EVERY))

    def chosen(self, turn: int, buffers: Sequence[GpuWork]) -> int:
        return self._dice(turn).randrange(len(buffers))

    def _dice(self, turn: int) -> random.Random:
        return random.Random(f"{self._seed} {turn}")


def _contents_of(works: Mapping[str, Staged], seed: int) -> dict[str, BufferContents]:
    most: dict[int, Staged] = {}
    for each in works.values():
        key = id(each.redraw or each)
        most[key] = max(most.get(key, each), each, key=lambda staged: len(staged.buffers))
    shared = {key: BufferContents(each.buffers, seed) for key, each in most.items()}
    return {name: shared[id(each.redraw or each)] for name, each in works.items()}


@dataclass(frozen=True, eq=False)
class Kept:
    name: str  # the call
    redraw: SeededRedraw
    seeds: Seeds  # of the sample's inputs
    whole: bool  # `results` are all results of a buffer
    results: Any


def _ready(staged: Staged, contents: BufferContents, turn: int) -> None:
    refuse_foreign_threads()
    contents.renew_tokens(turn)
    staged.run()  # untimed, so that its code is in the caches
    contents.renew_calls(turn, staged.buffers)
    driver().cuCtxResetPersistingL2Cache()  # lines that a kernel had kept there (`cudaAccessPropertyPersisting`)
    # Last, also where buffers rotate: dirty lines of the new inputs would be written back during the sample, which cost 7 to
    # 20 µs per millisecond on an H100.
    if staged.flush is not None:
        staged.flush()


def _keep(name: str, staged: Staged, contents: BufferContents, turn: int, *, is_last: bool) -> Iterator[Kept]:
    one = contents.chosen(turn, staged.buffers)
    for number, work in enumerate(staged.buffers):
        if work.redraw is not None and (number == one or is_last):
            seeds, whole = contents.seeds(turn, number), number == one and is_last
            yield Kept(name, work.redraw, seeds, whole, work.redraw.results(work.arguments, seeds, whole=whole))
    for work in staged.buffers:
        if work.redraw is not None:
            wipe(work.arguments)


def _wrong_results(works: Mapping[str, Staged], kept: Sequence[Kept]) -> dict[str, Measured]:
    wrong: dict[str, Measured] = {}
    groups: dict[tuple[int, Seeds, bool], list[Kept]] = {}
    for each in kept:
        groups.setdefault((id(each.redraw), each.seeds, each.whole), []).append(each)
    for alike in groups.values():
        if asked := [each for each in alike if each.name not in wrong]:
            check = asked[0].redraw.check_of(asked[0].seeds, whole=asked[0].whole)
            for each in asked:
                try:
                    check(each.results)
                except AssertionError as error:
                    wrong[each.name] = error
    for name, staged in works.items():
        try:
            check_results([work for work in staged.buffers if work.redraw is None], Seeds(0, 0))
        except AssertionError as error:
            wrong.setdefault(name, error)
    return wrong


def _shuffled_rounds(names: Sequence[str], rounds: int) -> list[str]:
    generator = random.Random(SHUFFLE_SEED)
    return [name for _ in range(rounds) for name in generator.sample(names, len(names))]


def _recorded(steps: Iterable[Step], count: int, state: DeviceState, device_index: int) -> list[list[cupti.Activity]]:
    read_every = max(1, count // 10)

    def read_while_it_runs(run: Callable[[], object]) -> None:
        run()
        state.read(device_index)

    return cupti.record(
        (before, partial(read_while_it_runs, run) if number % read_every == 0 else run)
        for number, (before, run) in enumerate(steps)
    )


def _from_samples(samples: list[Sample], staged: Staged, method: Method, state: DeviceState) -> GpuTime:
    check_clocks(samples, QUEUED_SLACK_US if method.clock is Clock.GRAPH else IDLE_SLACK_US)
    return GpuTime(
        samples_us=tuple(sample.us / staged.number for sample in samples),
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
    spans = [Sample(cupti.span_us(activities), None) for activities in records]
    return replace(
        _from_samples(spans, staged, method, state),
        kernels=tuple(dict.fromkeys(activity.name for activity in records[0])),
        busy_us=statistics.median(cupti.busy_us(activities) for activities in records) / staged.number,
    )
