"""How much time do the unused ragged lists of the draft steps take (SGLang's change 26241), and how much would one launch for
all steps save?

    lab experiments draft-steps --out results/nvidia-h200/draft_steps.json --trace conversation.jsonl

The study measures GPU times at every point of a grid of requests, tokens and draft steps, and for running requests of a trace.
It times the lists by SGLang's serial schedule and by a spread one, and every step's metadata with the lists (common_template),
without them (per_step) and in one launch. The metadata is made for MHA and MLA in buffers that stay, as inside a CUDA graph,
and for MHA also eagerly. All variants of a point are interleaved in one process. Host times of the same calls are taken at
fewer points: they depend on the steps, hardly on the lengths.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from lab.commands.options import L2, Trace
from lab.metadata.engine.capture import capture
from lab.reports.tables import Table
from lab.timing.host_time import METHOD as HOST_METHOD
from lab.timing.host_time import host_time
from lab.timing.work import GpuWork
from lab.workloads.traces import TracedRequest
from studies.draft_scenarios import draft_scenario
from studies.draft_work import draft_facts, draft_work
from studies.recording import Recorded, StudyRow, table_of
from studies.study import Part, Samples, TimedStudy, names, requests_of, trace_name
from studies.variants import Point, Variant, measure_all

VARIANTS = {  # by the variants' names at a point: their columns in the table
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
    """Convert a saving per token into one per iteration, µs; an iteration yields ``accept_length`` tokens."""
    return (claim["tpot_before_ms"] - claim["tpot_after_ms"]) * claim["accept_length"] * 1000


def point_of(point: str, trace: Sequence[TracedRequest]) -> Point:
    names = [variant.format(point) for variant in VARIANTS]
    return Point(point, tuple(Variant(name, draft_scenario(name, trace)) for name in names))


def works_of(variants: Sequence[Variant]) -> dict[str, GpuWork]:
    return {variant.name: draft_work(variant.case, torch.device("cuda")) for variant in variants}


def facts_of(variant: Variant, work: GpuWork) -> StudyRow:
    return {"scenario": variant.name, **draft_facts(variant.case, work)}


def measure_host(point: Point) -> list[StudyRow]:
    """Measure the host times of each variant's launches and of a replay of its CUDA graph, interleaved."""
    works = works_of(point.variants)
    calls = {name: work.call() for name, work in works.items()}
    in_graphs = {f"{name} in a graph": work.call() for name, work in works.items() if not name.endswith("/eager")}
    replays = {name: capture(call, torch.device("cuda"))[0] for name, call in in_graphs.items()}
    times = host_time(calls | replays)
    return [{"call": name, "point": point.name, **time.facts()} for name, time in times.items()]


def median_of(rows: Sequence[dict[str, Any]], variant: str, point: str) -> float:
    """Return the median GPU time in µs of one variant at one point."""
    (found,) = [row["median_us"] for row in rows if row["scenario"] == variant.format(point)]
    return float(found)


def claim_table(rows: Sequence[dict[str, Any]], host_rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the saving per iteration that change 26241 claims, and the savings that were measured without the lists."""
    gpu_us = {row["scenario"]: row["median_us"] for row in rows}
    host_us = {row["call"]: row["host_us"] for row in host_rows}

    def saved(times_us: Mapping[str, float], call: str) -> float:
        return round(times_us[call.format("common_template")] - times_us[call.format("per_step")], 2)

    host = "draft_steps/mha/{}/1x8k/steps3"
    return {
        "claim": CLAIM,
        "implied_saving_us_per_iteration": round(implied_saving_us(CLAIM), 1),
        "gpu_saving_us_per_draft_mla": {point: saved(gpu_us, f"draft_steps/mla/{{}}/{point}") for point in LONG},
        "host_saving_us_per_draft": {"static buffers": saved(host_us, host), "eager": saved(host_us, f"{host}/eager")},
    }


def point_table(rows: Sequence[dict[str, Any]], method: str) -> Table:
    times_us = {row["scenario"]: row["median_us"] for row in rows}
    points = [
        {"point": point} | {head: times_us[variant.format(point)] for variant, head in VARIANTS.items()}
        for point in dict.fromkeys(row["point"] for row in rows)
    ]
    columns = {"requests x tokens / steps": "{point}"} | {head: f"{{{head}:,.1f}}" for head in VARIANTS.values()}
    return table_of(f"GPU time in µs, {method}", columns, points)


@dataclass(frozen=True, kw_only=True)
class DraftSteps(TimedStudy):
    """Measures the metadata of drafts, for equal requests and for requests of a trace."""

    trace: Trace = None
    only: Annotated[tuple[str, ...], names("these points, such as 64x8k/steps3; any sizes will do")] = ()
    l2: L2 = "warm"
    samples: Samples = 30

    @property
    def lists(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rows",) if self.only else ("rows", "host")

    @property
    def parts(self) -> Sequence[Part]:
        requests = requests_of(self.trace)
        points = [point_of(name, requests) for name in self.only or EVERY_POINT]
        timed = Part(points, lambda point: {"rows": measure_all(point, works_of, self.plan, facts_of)})
        if self.only:
            return [timed]
        host_points = [point_of(name, requests) for name in HOST_POINTS]
        return [timed, Part(host_points, lambda point: {"host": measure_host(point)}, "host times")]

    def facts(self) -> Mapping[str, Any]:
        return {"host_method": HOST_METHOD, "trace": trace_name(self.trace)}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        measured = {row["point"] for row in result.get("host", ())}
        return {"pr_26241": claim_table(result["rows"], result["host"])} if measured >= {*HOST_POINTS} else {}

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        if "pr_26241" in result:
            yield json.dumps(result["pr_26241"], indent=2)
        yield point_table(result["rows"], result["method"])
