"""What do the draft steps' dead ragged lists cost (SGLang's change 26241), and what would one launch for all steps save?

    python -m lab.experiments.draft_steps --out results/nvidia-h200/draft_steps.json --trace conversation.jsonl

At every point of a grid of requests, tokens and draft steps, and at snapshots of a trace, GPU times of: the lists by SGLang's
serial schedule and by the spread one; every step's metadata with the lists (common_template), without them (per_step) and in
one launch, for MHA and MLA, into buffers that stay as inside a CUDA graph, and for MHA eagerly. All of a point are timed in
turns, in one process. Host times of the same calls are taken at fewer points: they depend on the steps, hardly on the lengths.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from lab.experiments.arms import WARM, Arm, Point, measure_all
from lab.experiments.command import ExperimentParser, timing_plan, trace_name, trace_of
from lab.experiments.recording import NO_GPU, Recording, Row, gpu_is_here
from lab.metadata.engine.capture import capturing
from lab.timing.draft import draft_facts, draft_work
from lab.timing.gpu_time import SAMPLES
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from lab.timing.work import GpuWork
from lab.workloads.draft import draft_scenario
from lab.workloads.traces import TracedRequest

ARMS = (
    "kv_indices/serial/{}",
    "kv_indices/spread/{}",
    "draft_steps/mha/common_template/{}",
    "draft_steps/mha/per_step/{}",
    "draft_steps/mha/one_launch/{}",
    "draft_steps/mla/common_template/{}",
    "draft_steps/mla/per_step/{}",
    "draft_steps/mla/one_launch/{}",
    "draft_steps/mha/common_template/{}/eager",
    "draft_steps/mha/per_step/{}/eager",
)
GRID = tuple(
    f"{count}x{length}/steps{steps}"
    for count in (1, 8, 64, 256)
    for length in ("1k", "8k", "32k", "128k")
    for steps in (2, 3, 4, 5)
)
# The context of 26241's own figures; its batch size is not stated.
LONG = tuple(f"{count}x80k/steps3" for count in (1, 2, 4, 8, 16, 64))
TRACED = tuple(f"trace{count}/steps3" for count in (8, 32, 64, 96))
EVERY_POINT = (*GRID, *LONG, *TRACED)
HOST_POINTS = tuple(f"{count}x8k/steps{steps}" for count in (1, 64) for steps in (2, 3, 4, 5))

# PR 26241's description: Kimi-K2.5-NVFP4, TP4, 80K tokens of context, EAGLE3 with 3 steps, topk 1.
CLAIM = {"tpot_before_ms": 2.47, "tpot_after_ms": 2.41, "accept_length": 3.94}


def implied_saving_us(claim: dict[str, float]) -> float:
    """Return the saving per iteration, in microseconds, of a saving per token; an iteration yields ``accept_length`` tokens."""
    return (claim["tpot_before_ms"] - claim["tpot_after_ms"]) * claim["accept_length"] * 1000


def point_of(point: str, trace: Sequence[TracedRequest]) -> Point:
    """Return a point of the grid, or a snapshot of the trace."""
    names = [arm.format(point) for arm in ARMS]
    return Point(point, tuple(Arm(name, draft_scenario(name, trace)) for name in names))


def works_of(arms: Sequence[Arm]) -> dict[str, GpuWork]:
    """Make the works of arms on the GPU."""
    return {arm.name: draft_work(arm.case, torch.device("cuda")) for arm in arms}


def facts_of(arm: Arm, work: GpuWork) -> Row:
    """Return what a row says of its work."""
    return {"scenario": arm.name, **draft_facts(arm.case, work)}


def measure_host(point: Point) -> list[Row]:
    """Measure host times at one point: of each arm's launches, and of a replay of the graph that holds them, in turns."""
    works = works_of(point.arms)
    calls = {name: work.call() for name, work in works.items()}
    replays = {f"{name} in a graph": _replay_of(works[name]) for name in works if not name.endswith("/eager")}
    times = host_time(calls | replays)
    return [{"call": name, "point": point.name, **time.facts()} for name, time in times.items()]


def _replay_of(work: GpuWork) -> Callable[[], object]:
    call = work.call()
    call()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        call()

    def replay(kept: Callable[[], object] = call) -> None:  # a graph does not keep what its call owns
        graph.replay()

    return replay


def median_of(rows: Sequence[dict[str, Any]], arm: str, point: str) -> float:
    """Return the GPU time of one arm at one point, in microseconds."""
    (found,) = [row["median_us"] for row in rows if row["scenario"] == arm.format(point)]
    return float(found)


def claim_table(rows: Sequence[dict[str, Any]], host_rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Set 26241's figures per iteration beside what skipping the lists saves here, on the GPU and on the host."""

    def saved(prefix: str, point: str) -> float:
        before, after = (median_of(rows, f"{prefix}/{plan}/{{}}", point) for plan in ("common_template", "per_step"))
        return round(before - after, 2)

    hosts = {row["call"]: row["host_us"] for row in host_rows}

    def host_saved(form: str) -> float:
        point = "1x8k/steps3"
        before, after = (hosts[f"draft_steps/mha/{plan}/{point}{form}"] for plan in ("common_template", "per_step"))
        return round(before - after, 2)

    return {
        "claim": CLAIM,
        "implied_saving_us_per_iteration": round(implied_saving_us(CLAIM), 1),
        "gpu_saving_us_per_draft_mla": {point: saved("draft_steps/mla", point) for point in LONG},
        "host_saving_us_per_draft": {"static buffers": host_saved(""), "eager": host_saved("/eager")},
    }


def point_table(rows: Sequence[dict[str, Any]], method: str) -> Table:
    """Draw one line per point: the dead lists, the metadata with and without them, and in one launch."""
    table = Table(title=f"GPU time in µs, {method}", title_justify="left")
    heads = ("lists serial", "spread", "MHA template", "per step", "one", "MLA template", "per step", "one")
    for header in ("requests x tokens / steps", *heads, "MHA eager template", "eager per step"):
        table.add_column(header, justify="right")
    for point in dict.fromkeys(row["point"] for row in rows):
        table.add_row(point, *(f"{median_of(rows, arm, point):,.1f}" for arm in ARMS))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if not gpu_is_here():
        return NO_GPU
    plan = timing_plan(given)
    facts = {"method": str(plan.method), "host_method": HOST_METHOD, "trace": trace_name(given)}
    recording = Recording(
        "draft_steps", given.out, facts, ("rows",) if given.only else ("rows", "host"), ceilings=plan.ceilings
    )
    recording.measure(given.points, lambda point: {"rows": measure_all(point, works_of, plan, facts_of)})
    rows = recording.result["rows"]
    if not given.only:  # only all of them have what 26241's figures are held against
        recording.measure(given.host_points, lambda point: {"host": measure_host(point)}, "host times")
        recording.add("pr_26241", claim_table(rows, recording.result["host"]))
        recording.console.print_json(data=recording.result["pr_26241"])
    recording.console.print(point_table(rows, str(plan.method)))
    return recording.exit_status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ExperimentParser("draft_steps", __doc__)
    parser.add_trace()
    parser.add_only("these points, on the grid or off it, such as 64x8k/steps3")
    parser.add_timing(WARM, SAMPLES)
    return parser.parsed(
        argv,
        traced=trace_of,
        points=lambda given: [point_of(name, given.traced) for name in given.only or EVERY_POINT],
        host_points=lambda given: [point_of(name, given.traced) for name in HOST_POINTS],
    )


if __name__ == "__main__":
    sys.exit(main())
