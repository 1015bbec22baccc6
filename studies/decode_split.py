"""A decode call divided by length: what does SGLang's setting save on a trace, on each kernel?

    lab experiments decode-split --out decode_split.json
    lab experiments decode-split lab.kernels.portable lab.kernels.peers.flashinfer_paged --splits 2,4 --out decode_split.json
    lab experiments decode-split --only decode/qwen3-32b/trace64/tp2 --trace conversation_trace.jsonl --out decode_split.json

SGLang 0.5.23 divides decode calls into ``SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS`` calls over requests sorted by length
(`lab.metadata.mha.decode_split`). One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two), pages of 64, bf16.
The batches are 64 running requests of a trace, one request of 81,920 keys beside 63 of 512, and 64 of 4,096 each, where a
division can save nothing and shows its price; as a decode, and as a verification of 4 tokens.

At every point one kernel's arms take turns, one for each number of calls; cold by rotation. The sort, the copies of queries,
lengths, tables and outputs, and all calls are in the time, as they are in an engine's graph. What a kernel plans on the host is
planned before, and not in the time. The file has the fastest number of calls of each point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.timing.work import GpuWork
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest
from studies.arms import JUDGED, OUTCOMES, Arm, Point, TimingPlan, measure_point
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, gpu_works, pass_facts
from studies.recording import Columns, rows_by_point

MODULES = (FLASHINFER_MODULE, PORTABLE_MODULE)
SPLITS = (2, 4, 8)  # of 64 requests
SCENARIOS = tuple(
    f"{mode}/qwen3-32b/{batch}/tp2"
    for batch in ("trace64{q}", "q{n}s80k_63q{n}s512", "64q{n}s4k")
    for mode, batch in (("decode", batch.format(q="", n=1)), ("target_verify", batch.format(q="q4", n=4)))
)


def point_of(name: str, module: str, splits: Sequence[int], trace: Sequence[TracedRequest] | None = None) -> Point:
    """Return a scenario on a kernel, whole and in so many calls; the whole call is the baseline.

    Args:
        name: of the scenario; a decode, or another mode with as many rows for every request.
        module: the implementation.
        splits: numbers of calls above 1.
        trace: what traced lengths are drawn from; the lab's own if None.

    Raises:
        ValueError: the scenario is unknown, or makes no decode call that can be divided.
    """
    case = scenario(name, trace)
    make = partial(Arm, module=module, planned=True, needs_flashinfer=module != PORTABLE_MODULE)
    arms = tuple(make(arm_name(number), replace(case, decode_splits=number)) for number in (1, *splits))
    facts = {"scenario": name, "q_len": max(case.q_lens), "longest_kv_len": max(case.kv_lens)}
    return Point(f"{name} on {module}", arms, facts, baseline=arm_name(1))


def arm_name(number: int) -> str:
    """Return the name of an arm of so many calls."""
    return "1 call" if number == 1 else f"{number} calls"


def facts_of(arm: Arm, work: GpuWork) -> dict[str, Any]:
    """Return what a row says of its pass."""
    return {"calls": arm.case.decode_splits, **pass_facts(arm, work)}


def savings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each point the fastest number of calls, and the µs that it saves of the whole call; 0 where that is it."""
    found = []
    for (point,), arms in rows_by_point(rows, ("point",), "arm").items():
        if arm_name(1) not in arms:
            continue
        whole_us = arms[arm_name(1)]["median_us"]
        best = min(arms.values(), key=lambda row: float(row["median_us"]))
        saved_us = whole_us - best["median_us"]
        found.append(
            {
                "point": point,
                "calls": best["calls"],
                "whole_us": whole_us,
                "saved_us": round(saved_us, 2),
                "saved_percent": round(100 * saved_us / whole_us, 1),
            }
        )
    return found


COLUMNS: Columns = {
    "point": "{point}",
    "arm": "{arm}",
    "kernel": "{kernel}",
    "µs": "{median_us:,.1f}",
    "spread, µs": "{iqr_us:,.1f}",
    "floor, %": "{floor_percent:.1f}",
    "speed of 1 call, x": lambda row: "" if row["speed_of_baseline"] is None else f"{row['speed_of_baseline']:.3f}",
}


def run(points: Sequence[Point], plan: TimingPlan, trace: str, out: Path | None = None) -> int:
    """Measure points of `point_of`; see `studies`."""
    recording = plan.recording(
        "decode_split", out, OUTCOMES, judged=JUDGED, trace=trace, savings=lambda result: savings(result["rows"])
    )
    recording.measure(points, lambda point: measure_point(point, gpu_works, plan, facts_of).by_list())
    recording.print_table(f"Decode divided by length: {plan.method}", COLUMNS, "rows", words=("point", "arm", "kernel"))
    recording.print_reasons()
    return recording.exit_status
