"""At which sizes is a draft extend V2 faster on the decode call than on the context call (SGLang's PR 24566)?

    lab experiments draft-extend-kernels --out draft_extend_kernels.json
    lab experiments draft-extend-kernels --q-lens 4 --requests 1 --keys 4096,81920 --out draft_extend_kernels.json

One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two), pages of 64, bf16. At every point the decode call,
the context call and the portable kernel's decode call are interleaved. L2 is cold: each call has its own buffers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any

from lab.metadata import AttentionCall
from lab.metadata.engine.forward_mode import ForwardMode
from lab.reports.tables import Cell, Table
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch, sweep
from lab.workloads.forward_case import ForwardCase
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, pass_facts
from studies.recording import Formats, Recorded, StudyRow, rows_by_point, table_of
from studies.study import Part, TimedStudy, count, names, sizes
from studies.variants import Point, Variant, chosen

GEOMETRY, TENSOR_PARALLEL = "qwen3-32b", 2  # 64 / 8 heads of 128 over two GPUs: 32 / 4
PAGE_SIZE = 64
VARIANTS: Mapping[str, tuple[AttentionCall, str]] = {  # by name: the call, and the module that has it
    "decode": (AttentionCall.DECODE, FLASHINFER_MODULE),
    "context": (AttentionCall.CONTEXT, FLASHINFER_MODULE),
    "portable decode": (AttentionCall.DECODE, PORTABLE_MODULE),
}


def case_of(batch: Batch, call: AttentionCall) -> ForwardCase:
    return ForwardCase(
        ForwardMode.DRAFT_EXTEND_V2,
        GEOMETRY,
        batch.prefix_lens,
        batch.q_lens,
        page_size=PAGE_SIZE,
        tensor_parallel=TENSOR_PARALLEL,
        draft_extend=call,
    )


def point_of(batch: Batch, variants: Mapping[str, tuple[AttentionCall, str]] = VARIANTS) -> Point:
    """Return the draft extend of a batch by several variants. The numbers of keys include the new tokens."""
    facts = {"q_len": batch.q_lens[0], "requests": len(batch.q_lens), "kv_len": batch.kv_lens[0]}
    return Point(
        str(batch),
        tuple(Variant(name, case_of(batch, call), module) for name, (call, module) in variants.items()),
        facts,
    )


def facts_of(variant: Variant, work: GpuWork) -> dict[str, Any]:
    return {"call": variant.case.draft_extend.value, **pass_facts(variant, work)}


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the context call's time over the decode call's by query rows, and the fewest rows at which it is faster."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for (requests, kv_len, q_len), variants in points_of(rows).items():
        if {"decode", "context"} <= set(variants):
            ratio = variants["context"]["median_us"] / variants["decode"]["median_us"]
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


def points_of(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    return rows_by_point(rows, ("requests", "kv_len", "q_len"), "arm")


def crossover_table(rows: Sequence[Mapping[str, Any]], method: str) -> Table:
    """Make a table of both calls' times in µs and their ratio: a line per requests and keys, a column per query rows."""
    points = points_of(rows)

    def cell(q_len: int, found: Mapping[str, Any]) -> Cell:
        ratio = found["context_over_decode"].get(q_len)
        variants = points.get((found["requests"], found["kv_len"], q_len), {})
        both = "{decode[median_us]:,.1f} / {context[median_us]:,.1f}"
        return Cell("" if ratio is None else f"{both.format_map(variants)} ({ratio:.2f})", ratio)

    columns: Formats = {
        "requests": "{requests:,}",
        "keys": "{kv_len:,}",
        **{f"q {q_len}": partial(cell, q_len) for q_len in sorted({row["q_len"] for row in rows})},
    }
    return table_of(f"Draft extend V2, decode / context call in µs (ratio): {method}", columns, crossovers(rows))


@dataclass(frozen=True, kw_only=True)
class DraftExtendKernels(TimedStudy):
    """Measures all combinations of the numbers of requests, keys and query rows."""

    q_lens: Annotated[tuple[int, ...], sizes("query rows of each request")] = (1, 2, 4, 8, 16, 32)
    requests: Annotated[tuple[int, ...], sizes("requests of a point")] = (1, 4, 16, 64)
    keys: Annotated[tuple[int, ...], sizes("keys of each request, the new tokens included")] = (
        *(1024, 4096, 16384, 65536, 131072),
    )
    only: Annotated[tuple[str, ...], names("these points, such as 4q2s1k")] = ()
    # 4 GB of K and V here, pools of twice that, and one pool for each of three variants.
    most_keys: Annotated[int, count("skip points with more keys in all requests together")] = 2 * 1024 * 1024

    @cached_property
    def split(self) -> tuple[list[Batch], list[StudyRow]]:
        fitting: list[Batch] = []  # those to measure
        skipped: list[StudyRow] = []
        for batch in chosen(sweep(self.requests, self.keys, self.q_lens), self.only, str):
            keys = sum(batch.kv_lens)
            if keys <= self.most_keys:
                fitting.append(batch)
                continue
            model = case_of(batch, AttentionCall.DECODE).model
            gigabytes = keys * 2 * model.num_kv_heads * model.head_dim * 2 / 1e9
            reason = f"{keys:,} keys, {gigabytes:.1f} GB of K and V, are more than the bound of {self.most_keys:,} keys"
            skipped.append(point_of(batch).row | {"reason": reason})
        return fitting, skipped

    @property
    def parts(self) -> Sequence[Part]:
        return [self.passes([point_of(batch) for batch in self.split[0]], facts_of)]

    def facts(self) -> Mapping[str, Any]:
        setting = {"geometry": GEOMETRY, "tensor_parallel": TENSOR_PARALLEL, "most_keys": self.most_keys}
        return {**setting, "skipped": self.split[1]}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        return {"crossovers": crossovers(result["rows"])}

    def answer(self, result: Recorded) -> Iterable[Table | str]:
        yield crossover_table(result["rows"], result["method"])
        yield f"{len(result['declined'])} declined, {len(result['skipped'])} skipped"
