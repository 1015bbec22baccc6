"""Dtypes, sizes and limits that several modules of this package use.

A function that checks a limit returns an error sentence without the kernel's name, or None if the kernel supports the call.
"""

from typing import Any

import torch

from lab.calls.features import Feature
from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionProblem, PagedAttention
from lab.kernels.support.kernel import Dtypes, dims, page_sizes

BF16 = torch.bfloat16
HALVES = frozenset((q, q, q) for q in HALF_DTYPES)
LOAD_BYTES = 16  # alignment that TMA and FA2's copies require
TAKEN_PAGES = page_sizes(16, 32, 64, 128, words="is taken for page sizes")  # SGLang 0.5.23's
NO_LSE = dict.fromkeys((Feature.LSE, Feature.STRIDED_LSE), "computes no LSE")
USUAL = frozenset({Feature.SEVERAL_ROWS, Feature.WINDOW, Feature.SINKS, Feature.V_SCALE, Feature.OUT})
ANY_ROWS = frozenset({Feature.SEVERAL_ROWS, Feature.RAGGED_ROWS, Feature.STRIDED_QUERY, Feature.OUT})
STRIDED_QUERY = "needs a contiguous query"
V_WITH_K_STRIDES = {Feature.OTHER_V_STRIDES: "reads V with K's strides, and they differ"}
NO_MASK = {Feature.MASK: "takes no mask: its rows are causal"}
ONE_TABLE = {Feature.SEPARATE_TABLES: "reads one page table for K and V: uses_shared_paged_kv_idx must be True"}
CONTIGUOUS_LSE = {Feature.STRIDED_LSE: "writes a contiguous lse only"}
NO_V_SCALE = {Feature.V_SCALE: "has no scale of its values: bmm2_scale must be 1"}
HALF_QUERIES = "takes fp16 or bf16 queries, not {q}"
OUT_IN_QUERY_DTYPE = "writes the query's dtype {q}, not {out}"
HALF_DTYPES_ALONE = Dtypes(HALVES, HALF_QUERIES, "takes K/V in the query's dtype, not {kv}", OUT_IN_QUERY_DTYPE)
MLA_DTYPES = Dtypes(
    frozenset({(BF16, BF16, BF16), (E4M3, E4M3, BF16)}),
    queries="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    kv="takes bf16 or e4m3 for both the query and the cache, not {q} and {kv}",
    out="writes bfloat16, not {out}",
)
HALVES_OVER_E4M3 = Dtypes(
    HALVES | {(q, E4M3, q) for q in HALF_DTYPES},
    HALF_QUERIES,
    "takes K/V in the query's dtype or e4m3, not {kv}",
    OUT_IN_QUERY_DTYPE,
)
RAGGED_SIZES = dims(  # of FlashInfer's kernels
    "(head_dim, v_head_dim)", lambda problem: (problem.head_dim, problem.v_head_dim), (192, 128), (128, 128), (256, 256)
)


def misaligned(*sides: tuple[Any, ...], strides: bool = True) -> str | None:
    """Return an error sentence about the first misaligned tensor; None if all are aligned. A side is (name, tensor or None,
    bytes that the kernel loads at a time; 16 if left out). The address must be a multiple of these bytes and, if `strides` is
    True, so must all strides except the last.
    """
    for name, tensor, *given in sides:
        if tensor is None:
            continue
        load_bytes = given[0] if given else LOAD_BYTES
        rule, past = f"loads {load_bytes} bytes at a time:", tensor.data_ptr() % load_bytes
        if past:
            return f"{rule} {name} must begin at a multiple of them, not {past} bytes after one"
        for stride in tensor.stride()[:-1] if strides else ():
            if stride * tensor.element_size() % load_bytes:
                stride_bytes = stride * tensor.element_size()
                return f"{rule} the strides of {name} must be multiples of them, not {stride_bytes} bytes"
    return None


def misaligned_paged(problem: PagedAttention) -> str | None:
    """Return an error sentence unless query, K, V (address and strides) and `out` (address) are aligned to 16 bytes."""
    inputs = (("query", problem.query), ("K", problem.k_cache), ("V", problem.v_cache))
    return misaligned(*inputs) or misaligned(("out", problem.out), strides=False)


def positive_bmm1_scale(problem: AttentionProblem) -> str | None:
    """Return an error sentence unless bmm1_scale is positive: kernels that mask logits before they scale them need this."""
    return None if problem.bmm1_scale > 0 else f"takes a positive bmm1_scale, not {problem.bmm1_scale}"


def misplaced_paged(problem: PagedAttention) -> str | None:
    """Return an error sentence unless the addresses of query, K, V and `out` are aligned as XQA and fmha_v2 need: to 16 bytes
    (mha.cu's `LdGrain`, fmha_v2's `BYTES_PER_LDG`, TMA), and to 8 bytes for NVFP4 K/V (`grainBytesGmemCache`).
    """
    kv_bytes = LOAD_BYTES // 2 if problem.kv_dtype == NVFP4 else LOAD_BYTES
    pools = (("K", problem.k_cache, kv_bytes), ("V", problem.v_cache, kv_bytes))
    return misaligned(("query", problem.query), *pools, ("out", problem.out), strides=False)
