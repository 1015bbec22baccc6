"""Draft extend V2 on the decode call against the context call: where does SGLang's change 24566 pay, and where would it not?

    lab experiments draft-extend-kernels --out draft_extend_kernels.json
    lab experiments draft-extend-kernels --q-lens 4 --requests 1 --keys 4096,81920 --out draft_extend_kernels.json

One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two), pages of 64, bf16. At every point the decode call,
the context call and the portable kernel's decode call take turns; cold by rotation.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.metadata import AttentionCall
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch
from lab.workloads.forward_case import ForwardCase
from studies.arms import OUTCOMES, Arm, Point, TimingPlan, measure_point
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, gpu_works, pass_facts
from studies.recording import Columns, rows_by_point, table_of

GEOMETRY, TENSOR_PARALLEL = "qwen3-32b", 2  # 64 / 8 heads of 128 over two GPUs: 32 / 4
PAGE_SIZE = 64
Q_LENS = (1, 2, 4, 8, 16, 32)
REQUESTS = (1, 4, 16, 64)
KEYS = (1024, 4096, 16384, 65536, 131072)
# Keys of one point over all requests: 4 GB of K and V here, pools of twice that, and one pool for each of three arms.
MOST_KEYS = 2 * 1024 * 1024
ARMS: Mapping[str, tuple[AttentionCall, str]] = {  # by name: the call, and the module that has it
    "decode": (AttentionCall.DECODE, FLASHINFER_MODULE),
    "context": (AttentionCall.CONTEXT, FLASHINFER_MODULE),
    "portable decode": (AttentionCall.DECODE, PORTABLE_MODULE),
}


def case_of(batch: Batch, call: AttentionCall) -> ForwardCase:
    """Return the draft extend of a batch on a call."""
    return ForwardCase(
        ForwardMode.DRAFT_EXTEND_V2,
        GEOMETRY,
        batch.prefix_lens,
        batch.q_lens,
        page_size=PAGE_SIZE,
        tensor_parallel=TENSOR_PARALLEL,
        draft_extend=call,
    )


def point_of(batch: Batch, arms: Mapping[str, tuple[AttentionCall, str]] = ARMS) -> Point:
    """Return the draft extend of a batch by several arms; `kv_len` is each request's, its new tokens included."""
    facts = {"q_len": batch.q_lens[0], "requests": len(batch.q_lens), "kv_len": batch.kv_lens[0]}
    return Point(
        str(batch), tuple(Arm(name, case_of(batch, call), module) for name, (call, module) in arms.items()), facts
    )


def split_by_size(batches: Iterable[Batch], most_keys: int) -> tuple[list[Batch], list[dict[str, Any]]]:
    """Return the batches that fit, and for each of the others a row that says why it does not."""
    fitting: list[Batch] = []
    skipped: list[dict[str, Any]] = []
    for batch in batches:
        keys = sum(batch.kv_lens)
        if keys <= most_keys:
            fitting.append(batch)
        else:
            model = case_of(batch, AttentionCall.DECODE).model
            gigabytes = keys * 2 * model.num_kv_heads * model.head_dim * 2 / 1e9
            size = f"{keys:,} keys, {gigabytes:.1f} GB of K and V"
            skipped.append(point_of(batch).row | {"reason": f"{size}, are more than the bound of {most_keys:,} keys"})
    return fitting, skipped


def facts_of(arm: Arm, work: GpuWork) -> dict[str, Any]:
    """Return what a row says of its pass."""
    return {"call": arm.case.draft_extend.value, **pass_facts(arm, work)}


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, per requests and keys, context over decode time for each q, and the least measured q at which context is faster.

    A point that lacks one of the two is left out.
    """
    found: dict[tuple[int, int], dict[int, float]] = {}
    for (requests, kv_len, q_len), arms in _points(rows).items():
        if {"decode", "context"} <= set(arms):
            ratio = arms["context"]["median_us"] / arms["decode"]["median_us"]
            found.setdefault((requests, kv_len), {})[q_len] = round(ratio, 3)
    return [
        {
            "requests": requests,
            "kv_len": kv_len,
            "context_over_decode": dict(sorted(ratios.items())),
            "context_faster_from_q_len": min((q_len for q_len, ratio in ratios.items() if ratio < 1), default=None),
        }
        for (requests, kv_len), ratios in found.items()
    ]


def _points(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    return rows_by_point(rows, ("requests", "kv_len", "q_len"), "arm")


def crossover_table(rows: Sequence[Mapping[str, Any]], method: str) -> Table:
    """Draw one line per requests and keys, one column per q: decode / context in µs, and context over decode."""
    points = _points(rows)

    def cell(q_len: int, found: Mapping[str, Any]) -> str:
        ratio = found["context_over_decode"].get(q_len)
        arms = points.get((found["requests"], found["kv_len"], q_len), {})
        both = "{decode[median_us]:,.1f} / {context[median_us]:,.1f}"
        return "" if ratio is None else f"{both.format_map(arms)} ({ratio:.2f})"

    columns: Columns = {
        "requests": "{requests:,}",
        "keys": "{kv_len:,}",
        **{f"q {q_len}": partial(cell, q_len) for q_len in sorted({row["q_len"] for row in rows})},
    }
    return table_of(f"Draft extend V2, decode / context call in µs (ratio): {method}", columns, crossovers(rows))


def run(batches: Sequence[Batch], most_keys: int, plan: TimingPlan, out: Path | None = None) -> int:
    """Measure the draft extend of batches, but of those with more than `most_keys` keys in all; see `studies`."""
    batches, skipped = split_by_size(batches, most_keys)
    recording = plan.recording(
        "draft_extend_kernels",
        out,
        OUTCOMES,
        geometry=GEOMETRY,
        tensor_parallel=TENSOR_PARALLEL,
        most_keys=most_keys,
        skipped=skipped,
        crossovers=lambda result: crossovers(result["rows"]),
    )
    recording.measure(batches, lambda batch: measure_point(point_of(batch), gpu_works, plan, facts_of).by_list())
    recording.console.print(crossover_table(recording.result["rows"], str(plan.method)))
    recording.print_reasons()
    recording.console.print(f"{len(recording.result['declined'])} declined, {len(skipped)} skipped")
    return recording.exit_status
