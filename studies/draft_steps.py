"""What do the draft steps' dead ragged lists cost (SGLang's change 26241), and what would one launch for all steps save?

    lab experiments draft-steps --out results/nvidia-h200/draft_steps.json --trace conversation.jsonl

At every point of a grid of requests, tokens and draft steps, and at snapshots of a trace, GPU times of: the lists by SGLang's
serial schedule and by the spread one; every step's metadata with the lists (common_template), without them (per_step) and in
one launch, for MHA and MLA, into buffers that stay as inside a CUDA graph, and for MHA eagerly. All of a point are timed in
turns, in one process. Host times of the same calls are taken at fewer points: they depend on the steps, hardly on the lengths.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lab.metadata.engine.capture import capturing
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from lab.timing.work import GpuWork
from lab.workloads.draft import draft_scenario
from lab.workloads.traces import TracedRequest
from studies.arms import Arm, Point, TimingPlan, measure_all
from studies.draft_work import draft_facts, draft_work
from studies.recording import Row, table_of

ARMS = {  # by the arms' names at a point: their columns in the table
    "kv_indices/serial/{}": "lists serial",
    "kv_indices/spread/{}": "spread",
    "draft_steps/mha/common_template/{}": "MHA template",
    "draft_steps/mha/per_step/{}": "MHA per step",
    "draft_steps/mha/one_launch/{}": "MHA one",
    "draft_steps/mla/common_template/{}": "MLA template",
    "draft_steps/mla/per_step/{}": "MLA per step",
    "draft_steps/mla/one_launch/{}": "MLA one",
    "draft_steps/mha/common_template/{}/eager": "MHA eager template",
    "draft_steps/mha/per_step/{}/eager": "eager per step",
}
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
    times_us = {row["scenario"]: row["median_us"] for row in rows}
    points = [
        {"point": point} | {head: times_us[arm.format(point)] for arm, head in ARMS.items()}
        for point in dict.fromkeys(row["point"] for row in rows)
    ]
    columns = {"requests x tokens / steps": "{point}"} | {head: f"{{{head}:,.1f}}" for head in ARMS.values()}
    return table_of(f"GPU time in µs, {method}", columns, points)


def run(
    points: Sequence[Point], host_points: Sequence[Point], plan: TimingPlan, trace: str, out: Path | None = None
) -> int:
    """Measure points of `point_of`, and host times at `host_points`: at none if `points` are not all; see `studies`."""
    lists = ("rows", "host") if host_points else ("rows",)
    recording = plan.recording("draft_steps", out, lists, host_method=HOST_METHOD, trace=trace)
    recording.measure(points, lambda point: {"rows": measure_all(point, works_of, plan, facts_of)})
    rows = recording.result["rows"]
    if host_points:  # only all of them have what 26241's figures are held against
        recording.measure(host_points, lambda point: {"host": measure_host(point)}, "host times")
        recording.add("pr_26241", claim_table(rows, recording.result["host"]))
        recording.console.print_json(data=recording.result["pr_26241"])
    recording.console.print(point_table(rows, str(plan.method)))
    return recording.exit_status
