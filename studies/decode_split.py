"""How much time does SGLang's division of a decode call by length save on a trace, for each kernel?

    lab experiments decode-split --out decode_split.json
    lab experiments decode-split lab.kernels.portable lab.kernels.peers.flashinfer_paged --splits 2,4 --out decode_split.json
    lab experiments decode-split --only decode/qwen3-32b/trace64/tp2 --trace conversation_trace.jsonl --out decode_split.json

SGLang 0.5.23 divides a decode call into ``SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS`` calls over requests sorted by length
(`lab.metadata.mha.decode_split`). The study times one layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two),
pages of 64, bf16. The batches are 64 running requests of a trace; one request of 81,920 keys with 63 of 512; and 64 requests of
4,096 keys, where a division only costs time. Each batch is a decode, and a verification of 4 tokens.

At every point the variants of one kernel, one per number of calls, are interleaved. L2 is cold: each call has its own buffers.
The time includes the sort, the copies of queries, lengths, tables and outputs, and all calls, as in an engine's graph. It does
not include a kernel's planning on the host. The recorded file names the fastest number of calls of each point.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from lab.commands.options import Trace
from lab.reports.tables import Table
from lab.timing.work import GpuWork
from lab.workloads.scenarios import scenario
from lab.workloads.traces import TracedRequest
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, pass_facts
from studies.recording import Formats, Recorded, rows_by_point, table_of
from studies.study import Modules, Part, Scenarios, TimedStudy, requests_of, sizes, trace_name
from studies.targets import TIME_COLUMNS
from studies.variants import JUDGED, Point, Variant

SCENARIOS = tuple(
    f"{mode}/qwen3-32b/{batch}/tp2"
    for batch in ("trace64{q}", "q{n}s80k_63q{n}s512", "64q{n}s4k")
    for mode, batch in (("decode", batch.format(q="", n=1)), ("target_verify", batch.format(q="q4", n=4)))
)


def point_of(name: str, module: str, splits: Sequence[int], trace: Sequence[TracedRequest] | None = None) -> Point:
    """Return a scenario with one decode call, the baseline, and with the call divided into each number of calls in `splits`.
    All variants run on one module.

    Raises:
        ValueError: the scenario is unknown, or makes no decode call that can be divided.
    """
    case = scenario(name, trace)
    make = partial(Variant, module=module, planned=True, needs_flashinfer=module != PORTABLE_MODULE)
    variants = tuple(make(variant_name(number), replace(case, decode_splits=number)) for number in (1, *splits))
    facts = {"scenario": name, "q_len": max(case.q_lens), "longest_kv_len": max(case.kv_lens)}
    return Point(f"{name} on {module}", variants, facts, baseline=variant_name(1))


def variant_name(number: int) -> str:
    return "1 call" if number == 1 else f"{number} calls"


def facts_of(variant: Variant, work: GpuWork) -> dict[str, Any]:
    return {"calls": variant.case.decode_splits, **pass_facts(variant, work)}


def savings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each point (scenario and module) the fastest number of calls, and the time that it saves against one call."""
    found = []
    for (point,), variants in rows_by_point(rows, ("point",), "arm").items():
        if variant_name(1) not in variants:
            continue
        whole_us = variants[variant_name(1)]["median_us"]
        best = min(variants.values(), key=lambda row: float(row["median_us"]))
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


COLUMNS: Formats = {
    **{name: TIME_COLUMNS[name] for name in ("point", "variant", "kernel", "µs", "spread, µs", "floor, %")},
    "speed of 1 call, x": TIME_COLUMNS["speed, x"],
}


@dataclass(frozen=True, kw_only=True)
class DecodeSplitStudy(TimedStudy):
    """Times scenarios with a whole and with a divided decode call."""

    implementations: Modules = (FLASHINFER_MODULE, PORTABLE_MODULE)
    splits: Annotated[tuple[int, ...], sizes("numbers of decode calls besides 1")] = (2, 4, 8)  # of 64 requests
    only: Scenarios = SCENARIOS
    trace: Trace = None

    @property
    def modules(self) -> tuple[str, ...]:
        return self.implementations

    @property
    def parts(self) -> Sequence[Part]:
        requests = requests_of(self.trace)
        numbers = [number for number in dict.fromkeys(self.splits) if number > 1]
        points = [point_of(name, module, numbers, requests) for name in self.only for module in self.implementations]
        return [self.passes(points, facts_of)]

    def facts(self) -> Mapping[str, Any]:
        return {"judged": JUDGED, "trace": trace_name(self.trace)}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        return {"savings": savings(result["rows"])}

    def answer(self, result: Recorded) -> Iterable[Table]:
        yield table_of(f"Decode divided by length: {result['method']}", COLUMNS, result["rows"])
