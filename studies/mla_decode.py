"""The portable MLA decode against FlashInfer's BatchMLAPagedAttentionWrapper, and both against the floor.

    lab experiments mla-decode --out mla_decode.json
    lab experiments mla-decode --q-lens 1,4 --kv-dtype e4m3 --out mla_decode.json

One layer of DeepSeek-V3 after absorption (entries of 512 + 64, pages of 64, bf16 queries), all its 128 heads or the 16 of one
rank of eight. At every point the arms take turns; cold by rotation. One query row per request is a decode, more are a
verification. The wrapper is FA3 on SM90 and FA2 elsewhere; it plans on the host from the lengths, which is done before and not
in the time.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch
from lab.workloads.mla_case import MLACase
from studies.arms import JUDGED, OUTCOMES, Arm, Point, TimingPlan, measure_point
from studies.passes import PORTABLE_MODULE, gpu_works, pass_facts
from studies.targets import TEXT_COLUMNS, TIME_COLUMNS, Figure, Target, score

SHAPES = ((64, 8192), (8, 81920))  # requests, keys of each: about 0.6 and 0.75 GB of bf16 entries
HEADS = (16, 128)
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TARGETS = (Target(Figure.SPEED, 0.8),)  # of the portable kernel, in times the wrapper's speed
PLANNED = "planned on the host before; not in the time"
PORTABLE, WRAPPER = "portable", "wrapper"
WRAPPER_MODULE = "lab.kernels.peers.flashinfer_mla"


def cases_of(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    heads: Sequence[int] = HEADS,
    q_lens: Sequence[int] = (1,),
    kv_dtype: torch.dtype = torch.bfloat16,
) -> list[MLACase]:
    """Return all passes, `q_lens` varying fastest.

    Args:
        shapes: requests, and keys of each with the new tokens.
        heads: query heads.
        q_lens: query rows of each request: 1 is a decode, more are a verification.
        kv_dtype: of the cache.
    """
    cases = []
    for (requests, kv_len), num_heads, q_len in product(shapes, heads, q_lens):
        mode = ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY
        prefixes = (kv_len - q_len,) * requests
        cases.append(MLACase(mode, prefixes, (q_len,) * requests, num_qo_heads=num_heads, kv_dtype=kv_dtype))
    return cases


def arms_of(case: MLACase) -> tuple[Arm, Arm]:
    """Return the portable kernel, and the wrapper that it is compared with."""
    return Arm(PORTABLE, case, PORTABLE_MODULE, TARGETS), Arm(WRAPPER, case, WRAPPER_MODULE, planned=True)


def point_of(case: MLACase) -> Point:
    """Return the pass of both arms; `kv_len` is each request's, its new tokens included."""
    facts = {
        "q_len": case.q_lens[0],
        "requests": len(case.q_lens),
        "kv_len": case.kv_lens[0],
        "heads": case.num_qo_heads,
    }
    name = f"{Batch(case.q_lens, case.kv_lens)}/{case.num_qo_heads} heads"
    return Point(name, arms_of(case), facts, baseline=WRAPPER)


def facts_of(arm: Arm, work: GpuWork) -> dict[str, Any]:
    """Return what a row says of its pass; the wrapper's kernel is FA3 on SM90, and FA2 elsewhere."""
    return {"plan": PLANNED if arm.planned else None, **pass_facts(arm, work)}


def run(points: Sequence[Point], plan: TimingPlan, out: Path | None = None) -> int:
    """Measure points of `point_of`; see `studies`."""
    recording = plan.recording("mla_decode", out, OUTCOMES, judged=JUDGED, targets=lambda result: score(result["rows"]))
    recording.measure(points, lambda point: measure_point(point, gpu_works, plan, facts_of).by_list())
    title = f"MLA, one layer: {plan.method}. The wrapper is {PLANNED}"
    recording.print_table(title, TIME_COLUMNS, "rows", words=TEXT_COLUMNS)
    recording.print_reasons()
    return recording.exit_status
