"""How fast is the portable MLA decode, compared with FlashInfer's BatchMLAPagedAttentionWrapper and with the floor?

    lab experiments mla-decode --out mla_decode.json
    lab experiments mla-decode --q-lens 1,4 --kv-dtype e4m3 --out mla_decode.json

One layer of DeepSeek-V3 after absorption (entries of 512 + 64, pages of 64, bf16 queries), all its 128 heads or the 16 of one
rank of eight. At every point the variants are interleaved; L2 is cold. A pass with one query row per request is a decode, with
more rows a verification. The wrapper is FA3 on SM90 and FA2 elsewhere. It plans on the host before it is timed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import torch
import typer

from lab.commands.options import list_option
from lab.metadata.engine.forward_mode import ForwardMode
from lab.ranges import POSITIVE
from lab.reports.tables import Table
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch
from lab.workloads.mla_case import MLACase
from studies.passes import PORTABLE_MODULE, pass_facts
from studies.recording import Recorded, table_of
from studies.study import Part, TimedStudy, names, sizes
from studies.targets import TIME_COLUMNS, Figure, Target, score
from studies.variants import JUDGED, Point, Variant, chosen

KV_DTYPES = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
TARGETS = (Target(Figure.SPEED, 0.8),)  # of the portable kernel, in times the wrapper's speed
PLANNED = "planned on the host before; not in the time"
PORTABLE, WRAPPER = "portable", "wrapper"
WRAPPER_MODULE = "lab.kernels.peers.flashinfer_mla"


def variants_of(case: MLACase) -> tuple[Variant, Variant]:
    return Variant(PORTABLE, case, PORTABLE_MODULE, TARGETS), Variant(WRAPPER, case, WRAPPER_MODULE, planned=True)


def point_of(case: MLACase) -> Point:
    """Return a pass by both variants. The numbers of keys include the new tokens."""
    facts = {
        "q_len": case.q_lens[0],
        "requests": len(case.q_lens),
        "kv_len": case.kv_lens[0],
        "heads": case.num_qo_heads,
    }
    name = f"{Batch(case.q_lens, case.kv_lens)}/{case.num_qo_heads} heads"
    return Point(name, variants_of(case), facts, baseline=WRAPPER)


def facts_of(variant: Variant, work: GpuWork) -> dict[str, Any]:
    return {"plan": PLANNED if variant.planned else None, **pass_facts(variant, work)}


def _requests_and_keys(text: str) -> tuple[int, int]:
    requests, times, keys = text.partition("x")
    if not times:
        raise ValueError(f"{text} is not of the form REQUESTSxKEYS, such as 64x8192")
    return POSITIVE.read(requests), POSITIVE.read(keys)


SHAPES_HELP = "requests, and keys of each with the new tokens included"


@dataclass(frozen=True, kw_only=True)
class MLADecode(TimedStudy):
    """Measures passes of all combinations of the sizes, and compares the portable kernel with the wrapper and the floor."""

    # About 0.6 and 0.75 GB of bf16 entries.
    shapes: Annotated[
        tuple[tuple[int, int], ...], list_option(_requests_and_keys, SHAPES_HELP, "REQUESTSxKEYS,...")
    ] = ((64, 8192), (8, 81920))
    heads: Annotated[tuple[int, ...], sizes("query heads")] = (16, 128)
    q_lens: Annotated[tuple[int, ...], sizes("query rows of each request; more than 1 is a verify pass")] = (1,)
    kv_dtype: Annotated[Literal["bf16", "e4m3"], typer.Option(help="dtype of the K/V cache")] = "bf16"
    only: Annotated[tuple[str, ...], names("these points, such as '64q1s8k/16 heads'")] = ()

    def cases(self) -> list[MLACase]:
        cases = []
        for (requests, kv_len), num_heads, q_len in product(self.shapes, self.heads, self.q_lens):
            mode = ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY
            lens = (kv_len - q_len,) * requests, (q_len,) * requests
            cases.append(MLACase(mode, *lens, num_qo_heads=num_heads, kv_dtype=KV_DTYPES[self.kv_dtype]))
        return cases

    @property
    def parts(self) -> Sequence[Part]:
        points = map(point_of, self.cases())
        return [self.passes(chosen(points, self.only, lambda point: point.name), facts_of)]

    def facts(self) -> Mapping[str, Any]:
        return {"judged": JUDGED}

    def derived(self, result: Recorded) -> Mapping[str, Any]:
        return {"targets": score(result["rows"])}

    def answer(self, result: Recorded) -> Iterable[Table]:
        title = f"MLA, one layer: {result['method']}. The wrapper is {PLANNED}"
        yield table_of(title, TIME_COLUMNS, result["rows"])
