"""The portable kernels that read K/V once, against FlashInfer's XQA and fmha_v2 and against the floor.

    python -m lab.experiments.kv_read_once --out kv_read_once.json
    python -m lab.experiments.kv_read_once --only 64x4096 trace --out kv_read_once.json
    python -m lab.experiments.kv_read_once --only heads --portable-only --out kv_read_once.json

One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two) unless a group says otherwise, pages of 64, bf16. The
groups, which `--only` takes one by one:

    64x4096, 16x32768, 1x81920, 1x4096   requests x keys of each, 1 to 16 query tokens on the decode call
    trace        64 running requests of a trace, 1 to 16 query tokens
    e4m3         the portable kernel with an e4m3 cache against itself with a bf16 one, 64x8192
    heads        groups of 1 to 16 and heads of 64 to 256 over 4 K/V heads, 64x4096
    windows      the sliding-window layers of gpt-oss-120b, 64x4096; the floor has the window's whole pages
    extend       512 query tokens over 32,768 keys, and a prompt of 4,096 tokens, on the context call
    unequal      a request of 81,920 keys beside 63 of 512
    host         host time of eager calls, all of their work done in each; no GPU time
    host_prepared   the same, of prepared calls

At every point the arms take turns in one process, each on its own copies of the same pool, query and output; cold by rotation.
Each arm runs before it is captured, so that nothing is compiled in a time. Every output vector of every request is judged by
the requests' histories before and after: a wrong arm has no time. fmha_v2's time has the small launch that writes its page
table. An arm that declines a point, or whose module FlashInfer cannot load or build, is listed with the reason. The file is
written anew after every point. Exit status: 1 if an arm is wrong, 2 without a GPU.
"""

import argparse
import enum
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.checks.forward_pass import ForwardPass, build_forward
from lab.experiments.arms import Outcome, Works, declined_by, measure_right_ones, named_in_failures, reason_rows
from lab.experiments.recording import NO_GPU, Columns, Recording, ceilings_of_gpu, gpu_is_here, table_of
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mha.calls import PlannedCall, call_arguments, prepare_attention
from lab.timing.forward import case_facts, forward_work, kernel_names, time_facts
from lab.timing.gpu_time import GpuTime, interquartile_range, measure_interleaved
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import HostTime, host_time
from lab.timing.method import L2, Clock, Method
from lab.timing.roofline import Ceilings, roofline
from lab.timing.work import GpuWork
from lab.workloads.batches import parse_batch
from lab.workloads.forward_case import ForwardCase
from lab.workloads.geometries import Geometry
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest, own_trace, read_trace

METHOD = Method(Clock.GRAPH, L2.COLD_ROTATION)
MODEL, RANK = "qwen3-32b", "tp2"  # 64 / 8 heads of 128 over two GPUs: 32 / 4
PORTABLE, FLASHINFER, E4M3 = "portable", "flashinfer", "portable e4m3"
HOST, HOST_PREPARED = "host", "host_prepared"
# The groups that have host times, and what their points' names begin with.
HOST_FORMS = {HOST: "eager", HOST_PREPARED: "prepared"}
PORTABLE_MODULE, FLASHINFER_MODULE = "lab.kernels.portable", "lab.kernels.trtllm"
# What FlashInfer raises where a module cannot be imported, built or loaded, a function is lacking, or a call is refused.
MISSING_MODULE = (ImportError, OSError, RuntimeError, TypeError, ValueError)
SAMPLES = 15
JUDGED = "every output vector of every request, before and after it was timed, on every buffer"


class Figure(enum.Enum):
    """What a target bounds; the value is how a row says it."""

    SPEED = "x the speed of {baseline}"
    BANDWIDTH = "% of the copy bandwidth"
    HOST = "µs of host time"

    def __repr__(self) -> str:
        return f"Figure.{self.name}"


@dataclass(frozen=True)
class Target:
    """A figure, and the least that it must reach; of host time, the most it may be."""

    figure: Figure
    bound: float

    def margin(self, reached: float) -> float:
        """By how much it is passed, in the figure's unit; negative where it is missed."""
        return self.bound - reached if self.figure is Figure.HOST else reached - self.bound


Targets = tuple[Target, ...]


def _targets(speed: float, bandwidth_percent: float | None = None) -> Targets:
    """Least speed in times the baseline's, and least part of the measured copy bandwidth."""
    speeds = (Target(Figure.SPEED, speed),)
    return speeds if bandwidth_percent is None else (*speeds, Target(Figure.BANDWIDTH, bandwidth_percent))


# All targets are those of the record's table (issue 8), set for an H200. Its columns: up to 4, 8 and 16 query tokens.
Q_LENS = (1, 2, 4, 8, 16)
_COLUMNS = {1: 0, 2: 0, 4: 0, 8: 1, 16: 2}
_ONE_REQUEST = (_targets(1.1), _targets(1.9), _targets(2.8))
_MANY_KEYS = (_targets(1.02, 92), _targets(1.75, 90), _targets(2.8, 80))
SHAPES: dict[str, tuple[str, tuple[Targets, Targets, Targets]]] = {  # group: batch for q rows, its targets
    "64x4096": ("64q{q}s4k", _MANY_KEYS),
    "16x32768": ("16q{q}s32k", _MANY_KEYS),
    "1x81920": ("1q{q}s80k", _ONE_REQUEST),
    "1x4096": ("1q{q}s4k", _ONE_REQUEST),
    "trace": ("trace64q{q}", (_targets(1.1), _targets(1.75), _targets(2.8))),
}
E4M3_TARGET = _targets(1.6)  # the table names no number of query tokens: it holds for each of these
E4M3_Q_LENS = (1, 4)
EXTENDS = {"q512s32k": _targets(1.0), "q4k": _targets(0.7)}
HOST_TARGET = (Target(Figure.HOST, 25.0),)
# Without targets: query heads per K/V head and head_dim, 4 K/V heads throughout so that groups read the same bytes.
HEADS = ((1, 128), (4, 128), (5, 128), (8, 128), (16, 128), (8, 64), (8, 256))
NUM_KV_HEADS = 4
HEADS_Q_LENS = (1, 4)
WIDE_Q_LENS = (1, 4, 16)  # of windows and unequal lengths
WINDOW_MODEL = "gpt-oss-120b"  # a window of 128 keys, its own included


@dataclass(frozen=True, repr=False)
class HeadsCase(ForwardCase):
    """A pass of heads that no model of `GEOMETRIES` has; `geometry` is their name."""

    heads: Geometry = field(kw_only=True)

    @property
    def model(self) -> Geometry:
        return self.heads


@dataclass(frozen=True)
class Arm:
    """One way to run a pass.

    Attributes:
        name: its name.
        module: has the two attention calls.
        case: the pass; arms of one point with the same case share its tensors' contents and its truth.
        targets: what it must reach.
    """

    name: str
    module: str
    case: ForwardCase
    targets: Targets = ()


@dataclass(frozen=True)
class Point:
    """What is measured together: its group, its name, and arms, of which the last is the one that others are compared with."""

    group: str
    name: str
    arms: tuple[Arm, ...]

    @property
    def baseline(self) -> str:
        return self.arms[-1].name

    @property
    def facts(self) -> dict[str, Any]:
        """What every row says of its point."""
        return {"group": self.group, "point": self.name}


def _against_flashinfer(group: str, name: str, case: ForwardCase, targets: Targets = ()) -> Point:
    return Point(group, name, (Arm(PORTABLE, PORTABLE_MODULE, case, targets), Arm(FLASHINFER, FLASHINFER_MODULE, case)))


def _named(group: str, name: str, targets: Targets = (), trace: Sequence[TracedRequest] | None = None) -> Point:
    """Of a scenario's name."""
    return _against_flashinfer(group, name, scenario(name, trace), targets)


def _mode(q_len: int) -> str:
    """What makes a decode call of so many query tokens, as scenarios name it."""
    return (ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY).name.lower()


def shape_points(group: str, trace: Sequence[TracedRequest]) -> list[Point]:
    """A row of the table, a point per number of query tokens."""
    batch, columns = SHAPES[group]
    return [
        _named(group, f"{_mode(q)}/{MODEL}/{batch.format(q=q)}/{RANK}", columns[_COLUMNS[q]], trace) for q in Q_LENS
    ]


def e4m3_points() -> list[Point]:
    """An e4m3 cache against a bf16 one, both on the portable kernel."""
    points = []
    for q in E4M3_Q_LENS:
        name = f"{_mode(q)}/{MODEL}/64q{q}s8k/{RANK}"
        halved = Arm(E4M3, PORTABLE_MODULE, scenario(f"{name}/e4m3"), E4M3_TARGET)
        points.append(Point("e4m3", f"{name}/e4m3", (halved, Arm(PORTABLE, PORTABLE_MODULE, scenario(name)))))
    return points


def heads_points() -> list[Point]:
    """Groups and head dimensions."""
    return [
        _against_flashinfer("heads", f"{_mode(q)}/{heads.name}/64q{q}s4k", heads_case(heads, q))
        for heads in (_heads(group, head_dim) for group, head_dim in HEADS)
        for q in HEADS_Q_LENS
    ]


def _heads(group: int, head_dim: int) -> Geometry:
    query_heads = group * NUM_KV_HEADS
    name = f"heads-{query_heads}-{NUM_KV_HEADS}-{head_dim}"
    return Geometry(name, query_heads, NUM_KV_HEADS, head_dim, head_dim**-0.5, "no model's: one axis at a time")


def heads_case(heads: Geometry, q_len: int) -> HeadsCase:
    """64 requests of 4,096 keys, on the decode call."""
    batch = parse_batch(f"64q{q_len}s4k")
    return HeadsCase(ForwardMode[_mode(q_len).upper()], heads.name, batch.prefix_lens, batch.q_lens, heads=heads)


def window_points() -> list[Point]:
    return [_named("windows", f"{_mode(q)}/{WINDOW_MODEL}/64q{q}s4k/window") for q in WIDE_Q_LENS]


def extend_points() -> list[Point]:
    """On the context call."""
    return [_named("extend", f"extend/{MODEL}/{batch}/{RANK}", targets) for batch, targets in EXTENDS.items()]


def unequal_points() -> list[Point]:
    return [_named("unequal", f"{_mode(q)}/{MODEL}/q{q}s80k_63q{q}s512/{RANK}") for q in WIDE_Q_LENS]


def host_points(group: str) -> list[Point]:
    """A decode, a verification and an extend, called without a graph."""
    names = (
        f"decode/{MODEL}/64q1s4k/{RANK}",
        f"target_verify/{MODEL}/64q4s4k/{RANK}",
        f"extend/{MODEL}/q512s4k/{RANK}",
    )
    return [_against_flashinfer(group, f"{HOST_FORMS[group]}/{name}", scenario(name), HOST_TARGET) for name in names]


GROUPS: dict[str, Callable[[Sequence[TracedRequest]], list[Point]]] = {
    **{group: partial(shape_points, group) for group in SHAPES},
    "e4m3": lambda trace: e4m3_points(),
    "heads": lambda trace: heads_points(),
    "windows": lambda trace: window_points(),
    "extend": lambda trace: extend_points(),
    "unequal": lambda trace: unequal_points(),
    HOST: lambda trace: host_points(HOST),
    HOST_PREPARED: lambda trace: host_points(HOST_PREPARED),
}


def points_of(only: Sequence[str], trace: Sequence[TracedRequest], portable_only: bool = False) -> list[Point]:
    """The points of some groups, in the groups' order.

    Args:
        only: names of groups or of points; all if empty.
        trace: what the traced lengths are drawn from.
        portable_only: leave FlashInfer's arms out.

    Raises:
        ValueError: a name is neither's.
    """
    points = [point for make in GROUPS.values() for point in make(trace)]
    unknown = set(only) - set(GROUPS) - {point.name for point in points}
    if unknown:
        raise ValueError(f"no group or point is called {min(unknown)!r}; groups: {', '.join(GROUPS)}")
    chosen = [point for point in points if not only or point.group in only or point.name in only]
    return [_without_flashinfer(point) for point in chosen] if portable_only else chosen


def _without_flashinfer(point: Point) -> Point:
    return replace(point, arms=tuple(arm for arm in point.arms if arm.module != FLASHINFER_MODULE))


def floor_bytes(case: ForwardCase) -> int:
    """Bytes that must move; of a sliding window all of each page in it, since a page is what a window's pool keeps."""
    if case.window_left < 0:
        return case.bytes_moved
    unseen = 0  # tokens in the window's pages that no row sees
    for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True):
        first = max(0, kv_len - q_len - case.window_left)
        unseen += first % case.page_size + -kv_len % case.page_size
    return case.bytes_moved + 2 * unseen * case.model.num_kv_heads * case.model.head_dim * case.kv_dtype.itemsize


def eager_call(
    implementation: Any, *, plan: Sequence[PlannedCall], out: torch.Tensor, **passed: Any
) -> Callable[[], object]:
    """The call of a pass that makes one, all of its work done in each call, even where an implementation can prepare it."""
    (planned,) = plan
    arguments = call_arguments(planned, **passed) | {"out": out, "workspace_buffer": None}
    return partial(getattr(implementation, planned.call.value), **arguments)


Prepare = Callable[..., Callable[[], object]]


def works_of(
    arms: Sequence[Arm], device: torch.device, prepare: Prepare = prepare_attention
) -> dict[str, tuple[ForwardPass, GpuWork]]:
    """Each arm's pass and work, on tensors of its own. Arms of one case are judged by one truth.

    Args:
        arms: whose modules are imported here.
        device: where the tensors are.
        prepare: makes the call that is timed; its first argument is the implementation.
    """
    built: dict[ForwardCase, tuple[ForwardPass, GpuWork]] = {}
    found = {}
    for arm in arms:
        implementation = importlib.import_module(arm.module)
        if arm.case in built:
            forward, first = built[arm.case]
            work = first.copies(2)[1]
        else:
            forward = build_forward(arm.case, device)
            work = forward_work(forward, implementation)
            built[arm.case] = forward, work
        found[arm.name] = forward, replace(work, prepare=partial(prepare, implementation))
    return found


def without_time(works: Works) -> dict[str, str]:
    """Why an arm has no time, found by its first call: it declines, or FlashInfer's module for it is not there."""
    reasons: dict[str, str] = {}
    for name, work in works.items():
        try:
            reasons |= declined_by({name: work})
        except MISSING_MODULE as error:
            if name != FLASHINFER:
                raise
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises anew what is no missing module, such as a wrong address
            reasons[name] = f"FlashInfer cannot run it here: {type(error).__name__}: {str(error).strip()[:500]}"
    return reasons


def measure_point(point: Point, ceilings: Ceilings, samples: int = SAMPLES) -> Outcome:
    """GPU times of all arms at one point, in turns, and why an arm has none.

    Raises:
        PointFailedError: anything but a refusal, a missing module or a wrong output went wrong.
    """
    with named_in_failures(point.name):
        passes = works_of(point.arms, torch.device("cuda"))
        running, declined = _running(passes)
        times, wrong = measure_right_ones(running, partial(measure_interleaved, method=METHOD, samples=samples))
    rows = [
        _arm_facts(point, arm, passes[arm.name][0])
        | time_facts(times[arm.name], ceilings, floor_bytes(arm.case), arm.case.operations)
        | _compared(point, arm, times, ceilings)
        for arm in point.arms
        if arm.name in times
    ]
    return Outcome(rows, reason_rows(point.facts, declined), reason_rows(point.facts, wrong))


def measure_host(point: Point) -> Outcome:
    """Host times of calls, in turns: each does all of its work, but in the group of prepared ones.

    Raises:
        PointFailedError: as in `measure_point`.
    """
    with named_in_failures(point.name):
        prepare = prepare_attention if point.group == HOST_PREPARED else eager_call
        passes = works_of(point.arms, torch.device("cuda"), prepare)
        running, declined = _running(passes)
        times, wrong = measure_right_ones(running, _host_times)
    rows = [
        _arm_facts(point, arm, passes[arm.name][0])
        | {"host_us": round(time.median_us, 2), "iqr_us": round(interquartile_range(time.samples_us), 2)}
        | {"method": time.method, "targets": _met(arm.targets, {Figure.HOST: time.median_us}, point.baseline)}
        for arm in point.arms
        if (time := times.get(arm.name)) is not None
    ]
    return Outcome(rows, reason_rows(point.facts, declined), reason_rows(point.facts, wrong))


def _host_times(works: Works) -> dict[str, HostTime]:
    """Of each work's call, whose output is judged before and after."""
    calls = {name: work.call() for name, work in works.items()}
    for call in calls.values():
        call()
    _check(works)
    times = host_time(calls)
    _check(works)
    return times


def _check(works: Works) -> None:
    for work in works.values():
        assert work.check is not None
        work.check(work.arguments)


def _running(passes: Mapping[str, tuple[ForwardPass, GpuWork]]) -> tuple[dict[str, GpuWork], dict[str, str]]:
    """The works that can be timed, and why the others cannot."""
    works = {name: work for name, (_, work) in passes.items()}
    declined = without_time(works)
    return {name: work for name, work in works.items() if name not in declined}, declined


def _arm_facts(point: Point, arm: Arm, forward: ForwardPass) -> dict[str, Any]:
    model = arm.case.model
    return (
        point.facts
        | {
            "arm": arm.name,
            "implementation": arm.module,
            "kernel": kernel_names(forward, importlib.import_module(arm.module)),
            "q_len": max(arm.case.q_lens),
            "longest_kv_len": max(arm.case.kv_lens),
            "num_qo_heads": model.num_qo_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "window_left": arm.case.window_left,
        }
        | case_facts(arm.case)
    )


def _compared(point: Point, arm: Arm, times: Mapping[str, GpuTime], ceilings: Ceilings) -> dict[str, Any]:
    """An arm's speed in times the baseline's, and its targets; `floor_bytes` are those of its floor."""
    time_us = times[arm.name].median_us
    speed = times[point.baseline].median_us / time_us if point.baseline in times else None
    line = roofline(time_us, floor_bytes(arm.case), arm.case.operations, ceilings)
    reached = {Figure.SPEED: speed, Figure.BANDWIDTH: line.bandwidth_percent}
    return {
        "floor_bytes": floor_bytes(arm.case),
        "baseline": point.baseline,
        "speed_of_baseline": None if speed is None else round(speed, 3),
        "targets": _met(arm.targets, reached, point.baseline),
    }


def _met(targets: Targets, reached: Mapping[Figure, float | None], baseline: str) -> list[dict[str, Any]]:
    """What a row says of its targets; nothing is passed or missed where there is nothing to compare with."""
    return [_met_one(target, reached[target.figure], baseline) for target in targets]


def _met_one(target: Target, reached: float | None, baseline: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"figure": target.figure.value.format(baseline=baseline), "target": target.bound}
    if reached is None:
        return facts | {"reached": None, "margin": None, "passed": None}
    margin = target.margin(reached)
    return facts | {"reached": round(reached, 3), "margin": round(margin, 3), "passed": margin >= 0}


def target_text(row: Mapping[str, Any]) -> str:
    """By how much a row's arm passes or misses its targets."""
    return "; ".join(_one_target_text(target) for target in row["targets"])


def _one_target_text(target: Mapping[str, Any]) -> str:
    asked = f"{target['target']:g} {target['figure']}"
    if target["passed"] is None:
        return f"{asked}: nothing to compare with"
    return f"{asked}: {'passed' if target['passed'] else 'missed'} by {abs(target['margin']):.3g}"


TEXT_COLUMNS = ("point", "arm", "kernel", "bound by", "targets")
TIME_COLUMNS: Columns = {
    "point": lambda row: str(row["point"]),
    "arm": lambda row: str(row["arm"]),
    "kernel": lambda row: str(row["kernel"]),
    "µs": lambda row: f"{row['median_us']:,.1f}",
    "spread, µs": lambda row: f"{row['iqr_us']:,.1f}",
    "floor, µs": lambda row: f"{row['floor_us']:,.1f}",
    "bound by": lambda row: str(row["floor_bound"]),
    "floor, %": lambda row: f"{row['floor_percent']:.1f}",
    "speed, x": lambda row: "" if row["speed_of_baseline"] is None else f"{row['speed_of_baseline']:.2f}",
    "targets": target_text,
}
HOST_COLUMNS: Columns = {
    "point": lambda row: str(row["point"]),
    "arm": lambda row: str(row["arm"]),
    "host, µs": lambda row: f"{row['host_us']:.2f}",
    "spread, µs": lambda row: f"{row['iqr_us']:.2f}",
    "targets": target_text,
}


def score(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Targets passed, missed, and those that nothing could be compared with."""
    passed = [target["passed"] for row in rows for target in row["targets"]]
    return {"passed": passed.count(True), "missed": passed.count(False), "not_compared": passed.count(None)}


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if not gpu_is_here():
        return NO_GPU
    ceilings = ceilings_of_gpu()
    facts = {
        "method": str(METHOD),
        "host_method": HOST_METHOD,
        "samples": given.samples,
        "trace": "synthetic_chat.jsonl, the lab's own" if given.trace is None else given.trace.name,
        "judged": JUDGED,
    }
    recording = Recording(
        given.out,
        facts,
        ("rows", "host", "declined", "wrong"),
        ceilings=ceilings,
        derived={"targets": lambda result: score(result["rows"] + result["host"])},
    )

    def outcome_of(point: Point) -> Mapping[str, Sequence[dict[str, Any]]]:
        if point.group in HOST_FORMS:
            return measure_host(point).by_list("host")
        return measure_point(point, ceilings, given.samples).by_list()

    recording.measure(given.points, outcome_of)
    _print(recording)
    return recording.exit_status


def _print(recording: Recording) -> None:
    result, console = recording.result, recording.console
    if result["rows"]:
        console.print(table_of(f"K/V read once, one layer: {METHOD}", TIME_COLUMNS, result["rows"], words=TEXT_COLUMNS))
    if result["host"]:
        console.print(
            table_of(f"Calls without a graph: {HOST_METHOD}", HOST_COLUMNS, result["host"], words=TEXT_COLUMNS)
        )
    recording.print_reasons()
    counts = result["targets"]
    console.print(
        f"targets: {counts['passed']} passed, {counts['missed']} missed, {counts['not_compared']} not compared"
    )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.kv_read_once", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"groups ({', '.join(GROUPS)}) or names of points"
    )
    parser.add_argument("--portable-only", action="store_true", help="leave FlashInfer's kernels out")
    parser.add_argument(
        "--trace", type=Path, help="a Mooncake (.jsonl) or Azure (.csv) trace; the lab's own if left out"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each GPU time (%(default)s)")
    given = parser.parse_args(argv)
    if given.samples < 1:
        parser.error("samples must be at least 1")
    try:
        trace = own_trace() if given.trace is None else read_trace(given.trace)
        given.points = points_of(given.only, trace, given.portable_only)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return given


if __name__ == "__main__":
    sys.exit(main())
