"""The portable MLA decode against FlashInfer's BatchMLAPagedAttentionWrapper, and both against the floor.

    python -m lab.experiments.mla_decode --out mla_decode.json
    python -m lab.experiments.mla_decode --q-lens 1 4 --kv-dtype e4m3 --out mla_decode.json

One layer of DeepSeek-V3 after absorption (entries of 512 + 64, pages of 64, bf16 queries), all its 128 heads or the 16 of one
rank of eight. At every point the arms take turns in one process, each on its own copies of the same pool, query and output;
cold by rotation. One query row per request is a decode, more are a verification. Every output vector of every request is judged
by the requests' histories before and after: a wrong arm has no time. The wrapper is FA3 on SM90 and FA2 elsewhere; it plans on
the host from the lengths, which is done before and not in the time. The file is written anew after every point. Exit status:
1 if an arm is wrong, 2 without a GPU.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from lab.checks.mla_pass import MLAPass, build_mla_pass
from lab.experiments.arms import Outcome, declined_by, measure_right_ones, named_in_failures, reason_rows
from lab.experiments.recording import NO_GPU, Columns, Recording, ceilings_of_gpu, gpu_is_here, table_of
from lab.kernels.support import kernel_names
from lab.metadata.engine.forward_mode import ForwardMode, MLAAttentionCall
from lab.metadata.mla.calls import prepare_mla_attention
from lab.timing.forward import mla_facts, mla_work, time_facts
from lab.timing.gpu_time import GpuTime, measure_interleaved
from lab.timing.method import L2, Clock, Method
from lab.timing.roofline import Ceilings
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch
from lab.workloads.mla_case import MLACase

METHOD = Method(Clock.GRAPH, L2.COLD_ROTATION)
SHAPES = ((64, 8192), (8, 81920))  # requests, keys of each: about 0.6 and 0.75 GB of bf16 entries
HEADS = (16, 128)
KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TARGET = 0.8  # the portable kernel's least speed, as a part of the wrapper's
PLANNED = "planned on the host before; not in the time"
JUDGED = "every output vector of every request, before and after it was timed, on every buffer"
SAMPLES = 15


@dataclass(frozen=True)
class Arm:
    """One way to run the same pass.

    Attributes:
        name: its name.
        module: has the MLA decode call.
        planned: the module's `plan` takes the call's arguments and returns the call that is timed.
    """

    name: str
    module: str
    planned: bool = False

    def implementation(self) -> Any:
        """What `prepare_mla_attention` takes."""
        module = importlib.import_module(self.module)
        if not self.planned:
            return module
        return SimpleNamespace(**{f"prepare_{MLAAttentionCall.DECODE.value}": module.plan})

    def kernel(self, device: torch.device) -> str:
        """What runs on a device."""
        return kernel_names(importlib.import_module(self.module), [MLAAttentionCall.DECODE.value], device)


PORTABLE = "portable"
WRAPPER = "wrapper"
ARMS = (Arm(PORTABLE, "lab.kernels.portable"), Arm(WRAPPER, "lab.kernels.peers.flashinfer_mla", planned=True))


def cases_of(
    shapes: Sequence[tuple[int, int]] = SHAPES,
    heads: Sequence[int] = HEADS,
    q_lens: Sequence[int] = (1,),
    kv_dtype: torch.dtype = torch.bfloat16,
) -> list[MLACase]:
    """All points, the last argument varying fastest.

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


def point_facts(case: MLACase) -> dict[str, Any]:
    """What every row says of its point: `kv_len` of each request, its new tokens included."""
    return {
        "point": f"{Batch(case.q_lens, case.kv_lens)}/{case.num_qo_heads} heads",
        "q_len": case.q_lens[0],
        "requests": len(case.q_lens),
        "kv_len": case.kv_lens[0],
        "heads": case.num_qo_heads,
    }


def works_of(forward: MLAPass, arms: Sequence[Arm] = ARMS) -> dict[str, GpuWork]:
    """Each arm's work. All are judged by one truth; every arm but the first has copies of the tensors."""
    first = mla_work(forward, arms[0].implementation())
    works = {arms[0].name: first}
    for arm in arms[1:]:
        works[arm.name] = replace(first.copies(2)[1], prepare=partial(prepare_mla_attention, arm.implementation()))
    return works


def measure_point(case: MLACase, ceilings: Ceilings, samples: int = SAMPLES, arms: Sequence[Arm] = ARMS) -> Outcome:
    """GPU times of all arms at one point, in turns, and why an arm has none.

    Raises:
        PointFailedError: anything but a refusal or a wrong output went wrong, such as a kernel that is not there.
    """
    device = torch.device("cuda")
    facts = point_facts(case)
    with named_in_failures(facts["point"]):
        works = works_of(build_mla_pass(case, device), arms)
        declined = declined_by(works)
        running = {name: work for name, work in works.items() if name not in declined}
        times, wrong = measure_right_ones(
            running, lambda right: measure_interleaved(right, method=METHOD, samples=samples)
        )
    rows = [
        {"arm": arm.name, "implementation": arm.module, "kernel": arm.kernel(device)}
        | {"plan": PLANNED if arm.planned else None}
        | facts
        | mla_facts(case)
        | time_facts(times[arm.name], ceilings, case.bytes_moved, case.operations)
        | target_facts(arm.name, times)
        for arm in arms
        if arm.name in times
    ]
    return Outcome(rows, reason_rows(facts, declined), reason_rows(facts, wrong))


def target_facts(arm: str, times: Mapping[str, GpuTime]) -> dict[str, Any]:
    """An arm's speed as a part of the wrapper's, and how far the portable one's is above the target; None without a wrapper."""
    if WRAPPER not in times:
        speed = margin = None
    else:
        speed = round(times[WRAPPER].median_us / times[arm].median_us, 3)
        margin = round(speed - TARGET, 3) if arm == PORTABLE else None
    return {"speed_of_wrapper": speed, "target_margin": margin}


def target_text(row: Mapping[str, Any]) -> str:
    """By how much a row's arm passes or misses the target."""
    if row["arm"] != PORTABLE:
        return ""
    margin = row["target_margin"]
    if margin is None:
        return f"{TARGET:.2f}: the wrapper has no time"
    return f"{TARGET:.2f}: {'passed' if margin >= 0 else 'missed'} by {abs(margin):.3f}"


TIME_COLUMNS: Columns = {
    "point": lambda row: str(row["point"]),
    "cache": lambda row: str(row["kv_dtype"]),
    "arm": lambda row: str(row["arm"]),
    "µs": lambda row: f"{row['median_us']:,.1f}",
    "floor, µs": lambda row: f"{row['floor_us']:,.1f}",
    "bound by": lambda row: str(row["floor_bound"]),
    "floor, %": lambda row: f"{row['floor_percent']:.1f}",
    "of the wrapper's speed": lambda row: "" if row["speed_of_wrapper"] is None else f"{row['speed_of_wrapper']:.3f}",
    "target": target_text,
}
TEXT_COLUMNS = ("point", "cache", "arm", "bound by", "of the wrapper's speed", "target")


def times_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per point and arm."""
    return table_of(f"MLA, one layer: {METHOD}. The wrapper is {PLANNED}", TIME_COLUMNS, rows, words=TEXT_COLUMNS)


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    if not gpu_is_here():
        return NO_GPU
    ceilings = ceilings_of_gpu()
    facts = {"method": str(METHOD), "samples": given.samples, "judged": JUDGED, "target_speed_of_wrapper": TARGET}
    recording = Recording(given.out, facts, ("rows", "declined", "wrong"), ceilings=ceilings)
    cases = cases_of(given.shapes, given.heads, given.q_lens, KV_DTYPES[given.kv_dtype])
    recording.measure(cases, lambda case: measure_point(case, ceilings, given.samples).by_list())
    recording.console.print(times_table(recording.result["rows"]))
    recording.print_reasons()
    return recording.exit_status


def _shape(text: str) -> tuple[int, int]:
    requests, keys = text.split("x")
    return int(requests), int(keys)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.experiments.mla_decode", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument(
        "--shapes",
        type=_shape,
        nargs="+",
        default=list(SHAPES),
        metavar="REQUESTSxKEYS",
        help="keys of each request, the new tokens' included (64x8192 8x81920)",
    )
    parser.add_argument("--heads", type=int, nargs="+", default=list(HEADS), help="query heads (16 128)")
    parser.add_argument(
        "--q-lens", type=int, nargs="+", default=[1], help="query rows of each request; more than 1 verify"
    )
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bf16", help="of the cache (%(default)s)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each GPU time (%(default)s)")
    given = parser.parse_args(argv)
    if min(*given.q_lens, *given.heads, given.samples, *(requests for requests, _ in given.shapes)) < 1:
        parser.error("query rows, heads, requests and samples must be at least 1")
    fewest_keys = min(keys for _, keys in given.shapes)
    if fewest_keys < max(given.q_lens):
        parser.error(f"{fewest_keys} keys count the new tokens, and there are {max(given.q_lens)} of them")
    return given


if __name__ == "__main__":
    sys.exit(main())
