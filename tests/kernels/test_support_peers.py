"""`why_not` of MLA, ragged and other people's kernels: every rule, from both sides."""

from collections.abc import Callable

import pytest
import torch

from lab.gpus import Capability
from lab.kernels.support import Kernel, why_not
from lab.kernels.support import kernel as support_kernel
from lab.kernels.support.peers import (
    FA2_MLA,
    FA2_PAGED,
    FA2_RAGGED,
    FA3_MLA,
    FA3_PAGED,
    FA3_RAGGED,
    FLASH_MLA,
    VLLM_TRITON,
    fa_backend,
)
from lab.kernels.support.peers import FLASH_ATTENTION_4 as FA4
from lab.kernels.support.portable import PORTABLE_RAGGED
from lab.kernels.support.xqa import XQA_MLA
from tests.cases import Arguments
from tests.kernels.adapter_calls import (
    SINKS,
    SM75,
    SM80,
    SM90,
    SM100,
    SM120,
    TREE,
    TWO_SINKS,
    context,
    decode,
    gapped,
    into,
    misplaced,
    mla,
    posed,
    ragged,
    remade,
    shifted,
    v_elsewhere,
    with_columns,
    with_gaps,
)
from tests.kernels.held import BF16, E4M3, FP16, FP32
from tests.kernels.test_flash_mla import RIGHT as RIGHT_FLASH_MLA
from tests.kernels.test_flash_mla import sparse

CPU = None
TENSOR_SCALE = {"bmm1_scale": torch.tensor([0.1])}


def e4m3(**changes: object) -> Arguments:
    return decode(dtype=E4M3, **{"out_dtype": BF16} | changes)


def wide_mla(q_len: int = 1, **changes: object) -> Arguments:
    """128 heads, and a table of whole 128 tokens."""
    return with_columns(2)(mla(q_len, heads=128, **changes))


odd_out = remade("out", shifted)


def by_offsets(arguments: Arguments) -> Arguments:
    """An MLA call with one row of each request, as rows and offsets."""
    offsets = torch.arange(len(arguments["seq_lens"]) + 1, dtype=torch.int32)
    rows = {name: arguments[name][:, 0] for name in ("query", "block_tables")}
    return arguments | rows | {"cum_seq_lens_q": offsets, "max_q_len": 1}


# kernel, GPU, call, what the sentence says (None: it is taken)
TABLE: list[tuple[Kernel, Capability | None, Callable[[], Arguments], str | None]] = [
    # FlashInfer's paged wrappers
    (FA2_PAGED, CPU, decode, "a CPU"),
    (FA2_PAGED, SM75, decode, "SM80 and later"),
    (FA3_PAGED, SM100, decode, "needs a GPU of SM90"),
    (FA2_PAGED, SM90, e4m3, "fp16 or bf16 queries"),
    (FA3_PAGED, SM90, lambda: decode(kv_dtype=E4M3), "K/V in the query's dtype"),
    (FA3_PAGED, SM90, lambda: e4m3(out_dtype=E4M3), "fp16 or bf16 for e4m3"),
    (FA2_PAGED, SM90, lambda: into(FP32)(decode()), "writes the query's dtype"),
    (FA3_PAGED, SM90, lambda: decode(head_dim=80), "64, 128 and 256, not 80"),
    (FA2_PAGED, SM90, lambda: context(separate_tables=True), "uses_shared_paged_kv_idx must be True"),
    (FA3_PAGED, SM90, lambda: v_elsewhere(decode()), "V with K's strides"),
    (FA3_PAGED, SM90, lambda: decode(5, mask=TREE), "takes no mask"),
    (FA2_PAGED, SM90, lambda: decode(5, mask=TREE, sinks=SINKS), "no mask where it has sinks"),
    (FA3_PAGED, SM90, lambda: e4m3(sinks=SINKS), "sinks for fp16 and bf16"),
    (FA2_PAGED, SM90, lambda: decode(**TENSOR_SCALE), "as numbers"),
    (FA3_PAGED, SM90, lambda: decode(bmm1_scale=0.0), "a positive bmm1_scale, not 0.0"),
    (FA2_PAGED, SM90, lambda: decode(lse=torch.empty(4, 3).T), "contiguous lse"),
    (FA2_PAGED, SM80, lambda: gapped("query", 4)(decode()), "the strides of query must be multiples of them"),
    (
        FA2_PAGED,
        SM90,
        lambda: odd_out(into()(decode())),
        "out must begin at a multiple of them, not 2 bytes after one",
    ),
    *[(FA2_PAGED, gpu, lambda: gapped("query", 8)(decode()), None) for gpu in (SM80, SM90, SM100, SM120)],
    (FA2_PAGED, SM90, lambda: v_elsewhere(decode()), None),
    (FA2_PAGED, SM90, lambda: decode(5, mask=TREE), None),
    # FlashAttention-4
    (FA4, CPU, decode, "needs a GPU of SM90, SM100 and SM103, this is a CPU"),
    (FA4, SM80, decode, "this is SM80"),
    (FA4, SM120, decode, "this is SM120"),
    (FA4, SM90, e4m3, "fp16 or bf16 queries"),
    (FA4, SM90, lambda: decode(kv_dtype=E4M3), "K/V in the query's dtype"),
    (FA4, SM90, lambda: into(FP32)(decode()), "writes the query's dtype"),
    (FA4, SM90, lambda: decode(head_dim=512), "64, 128 and 256, not 512"),
    (FA4, SM90, lambda: decode(head_dim=128, page_size=128), "reads a page of 128 tokens whole"),
    (FA4, SM90, lambda: decode(head_dim=256, page_size=64, window_left=4), "reads a page of 64 tokens whole"),
    (FA4, SM90, lambda: context(separate_tables=True), "must be True"),
    (FA4, SM90, lambda: decode(5, mask=TREE), "takes no packed mask"),
    (FA4, SM90, lambda: decode(**TENSOR_SCALE), "as numbers"),
    (FA4, SM90, lambda: decode(bmm2_scale=0.5), "bmm2_scale must be 1"),
    (FA4, SM90, lambda: decode(bmm1_scale=-0.1), "a positive bmm1_scale, not -0.1"),
    (FA4, SM90, lambda: gapped("query", 4)(decode()), "the strides of query must be multiples"),
    (
        *(FA4, SM90),
        lambda: decode(1, (0, 0, 0), block_tables=torch.empty(3, 0, dtype=torch.int32)),
        "block_tables has no column",
    ),
    (FA4, SM90, decode, None),
    (FA4, SM100, context, None),
    (FA4, SM90, lambda: decode(page_size=64), None),  # half a tile
    (FA4, SM90, lambda: decode(head_dim=256, page_size=64), None),
    (FA4, SM100, lambda: decode(head_dim=256, page_size=64, window_left=4), None),
    (FA4, SM90, lambda: decode(dtype=FP16), None),
    *[(VLLM_TRITON, SM90, lambda size=size: decode(head_dim=size), None) for size in (16, 32, 64, 128, 256)],
    (VLLM_TRITON, SM90, lambda: decode(head_dim=512), "not 512"),
    # MLA
    (XQA_MLA, SM90, mla, "SM120 and SM121"),
    (XQA_MLA, SM120, lambda: mla(heads=16), "128 query heads"),
    (XQA_MLA, SM120, lambda: mla(2, heads=128), "one query row"),
    (XQA_MLA, SM120, lambda: with_columns(3)(mla(heads=128)), "whole 128 tokens"),
    (XQA_MLA, SM120, lambda: wide_mla(sinks=torch.ones(128)), "sinks"),
    (XQA_MLA, SM120, lambda: wide_mla(return_lse=True), "LSE"),
    (XQA_MLA, SM120, lambda: wide_mla(**TENSOR_SCALE), "as numbers"),
    (XQA_MLA, SM120, lambda: wide_mla(bmm2_scale=0.0), "must not be 0"),
    *[
        (XQA_MLA, SM120, lambda size=size: with_columns(128 // size)(mla(heads=128, page_size=size)), None)
        for size in (16, 32, 64, 128)
    ],
    (XQA_MLA, SM120, lambda: with_gaps(wide_mla()), "contiguous"),
    (
        *(XQA_MLA, SM120),
        lambda: mla(heads=128, sparse_mla_top_k=4, block_tables=torch.zeros(3, 1, 4, dtype=torch.int32)),
        "a packed cache of 656 or 528 bytes per token, which the lab does not model",
    ),
    (XQA_MLA, SM120, lambda: misplaced(wide_mla()), "K must begin at a multiple of them, not 2 bytes after one"),
    (FA2_MLA, CPU, mla, "a CPU"),
    (FA3_MLA, SM100, mla, "SM90"),
    (FA3_MLA, SM90, lambda: mla(rank=384), "128, 256 and 512"),
    (FA2_MLA, SM90, lambda: mla(rank=64), "whole 128"),
    (FA3_MLA, SM90, lambda: mla(sinks=TWO_SINKS), "sinks"),
    (FA3_MLA, SM90, lambda: mla(dtype=FP16), "writes the query's dtype"),
    (FA2_MLA, SM80, lambda: mla(kv_dtype=E4M3), "e4m3 cache on SM90"),
    (FA3_MLA, SM90, lambda: into(E4M3)(mla(dtype=E4M3)), "fp16 or bf16 queries"),
    (FA3_MLA, SM90, lambda: mla(bmm2_scale=0.5), "must be 1"),
    (FA3_MLA, SM90, lambda: mla(kv_dtype=E4M3, bmm2_scale=0.0), "positive"),
    (FA3_MLA, SM90, lambda: mla(kv_dtype=E4M3, bmm2_scale=0.5), None),
    (FA3_MLA, SM90, lambda: mla(bmm1_scale=-0.1), "a positive bmm1_scale, not -0.1"),
    (FA3_MLA, SM90, lambda: mla(**TENSOR_SCALE), "as numbers"),
    # FlashMLA
    (FLASH_MLA, CPU, sparse, "needs a GPU of SM90, this is a CPU"),
    (FLASH_MLA, SM80, sparse, "this is SM80"),
    (FLASH_MLA, SM100, sparse, "this is SM100"),
    (FLASH_MLA, SM90, wide_mla, "sparse_mla_top_k must not be 0"),
    (FLASH_MLA, SM90, lambda: mla(heads=16), "query heads of 64 and 128, not 16"),
    (FLASH_MLA, SM90, lambda: mla(heads=64, rank=256), "(512, 64) or (512, 0), not (256, 64)"),
    (FLASH_MLA, SM90, lambda: wide_mla(dtype=FP16), "takes bf16 queries, not torch.float16"),
    (FLASH_MLA, SM90, lambda: wide_mla(kv_dtype=E4M3), "reads a bf16 cache, not torch.float8_e4m3fn"),
    (FLASH_MLA, SM90, lambda: into(FP16)(sparse()), "writes bf16, not torch.float16"),
    (FLASH_MLA, SM90, lambda: sparse(**TENSOR_SCALE), "as numbers"),
    (FLASH_MLA, SM90, lambda: sparse(bmm1_scale=0.0), "a positive bmm1_scale, not 0.0"),
    (FLASH_MLA, SM90, lambda: sparse(bmm2_scale=0.5), "must be 1"),
    (FLASH_MLA, SM90, lambda: by_offsets(sparse()), "equally many rows of each request"),
    (FLASH_MLA, SM90, lambda: gapped("query", 4)(sparse()), "the strides of query must be multiples of them"),
    (FLASH_MLA, SM90, lambda: misplaced(sparse()), "K must begin at a multiple of them, not 2 bytes after one"),
    (FLASH_MLA, SM90, lambda: with_gaps(sparse()), "K's pages must touch and be NHD"),
    *[(FLASH_MLA, SM90, taken, None) for taken in RIGHT_FLASH_MLA.values()],
    # ragged
    (PORTABLE_RAGGED, SM75, ragged, "SM80 and later"),
    (PORTABLE_RAGGED, SM80, lambda: ragged(dtype=E4M3), "SM89"),
    (PORTABLE_RAGGED, SM90, lambda: ragged(dtype=FP32), "the portable Triton ragged kernel takes fp16"),
    (PORTABLE_RAGGED, SM90, lambda: into(torch.float64)(ragged()), "writes fp16"),
    (PORTABLE_RAGGED, SM90, lambda: ragged(dims=(224, 128)), "not 224"),
    (PORTABLE_RAGGED, SM90, lambda: ragged(dims=(320, 128)), "not 320"),
    (PORTABLE_RAGGED, SM90, lambda: ragged(dims=(192, 96)), "v_head_dim"),
    *[(PORTABLE_RAGGED, gpu, ragged, None) for gpu in (CPU, SM80, SM90, SM100, SM120)],
    (PORTABLE_RAGGED, SM90, lambda: ragged(dims=(48, 32)), None),
    (PORTABLE_RAGGED, SM90, lambda: ragged(dims=(256, 16)), None),
    (PORTABLE_RAGGED, SM90, lambda: into(FP32)(ragged(attention_sinks=TWO_SINKS, bmm1_scale=-1)), None),
    (FA2_RAGGED, CPU, ragged, "a CPU"),
    (FA2_RAGGED, SM75, ragged, "SM80 and later"),
    (FA3_RAGGED, SM100, ragged, "SM90"),
    (FA3_RAGGED, SM90, lambda: ragged(dtype=E4M3), "fp16 or bf16 queries"),
    (FA2_RAGGED, SM90, lambda: into(FP32)(ragged()), "writes the query's dtype"),
    (FA3_RAGGED, SM90, lambda: ragged(dims=(64, 64)), "has kernels for"),
    (FA3_RAGGED, SM90, lambda: ragged(attention_sinks=TWO_SINKS), "sinks"),
    (FA3_RAGGED, SM90, lambda: ragged(**TENSOR_SCALE), "as numbers"),
    (FA2_RAGGED, SM90, lambda: ragged(bmm1_scale=0.0), "positive bmm1_scale"),
    (FA3_RAGGED, SM90, lambda: ragged(bmm2_scale=0.5), "must be 1"),
    (FA3_RAGGED, SM90, lambda: ragged(lse=torch.empty(2, 11).T), "contiguous lse"),
    (FA2_RAGGED, SM80, lambda: gapped("query", 4)(ragged()), "the strides of query must be multiples of them, not 392"),
    (FA3_RAGGED, SM90, lambda: gapped("value", 2)(ragged()), "the strides of value must be multiples of them, not 520"),
    *[(FA2_RAGGED, gpu, ragged, None) for gpu in (SM80, SM90, SM100, SM120)],
    (FA3_RAGGED, SM90, lambda: gapped("query", 8)(ragged()), None),
]


def test_fa3_runs_on_hopper_alone() -> None:
    assert [fa_backend(gpu) for gpu in (SM80, SM90, SM100, (6, 0))] == ["fa2", "fa3", "fa2", "fa2"]


@pytest.mark.parametrize(("kernel", "gpu", "make", "words"), TABLE, ids=[f"{row[0].name}-{row[3]}" for row in TABLE])
def test_why_not(
    kernel: Kernel,
    gpu: Capability | None,
    make: Callable[[], Arguments],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(support_kernel, "triton_interprets", lambda: True)  # as where there is no GPU
    reason = why_not(kernel, gpu, posed(make()))
    assert reason is None if words is None else words in (reason or "taken")
