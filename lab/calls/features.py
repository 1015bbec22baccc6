"""Features of attention problems that some kernels do not support.

`FIELDS` lists, for every field of a problem, the features that the field may require. A field that is not listed requires
`Feature.UNDECLARED`, so that every kernel refuses a new argument until its row in `lab.kernels.support` lists the argument's
feature.
"""

import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Feature(enum.Enum):
    """A property of an attention problem that some kernels do not support. Values are the descriptions in error messages."""

    UNDECLARED = "a field of the problem that lab.calls.features does not declare"
    SEVERAL_ROWS = "more than one query row per request"
    RAGGED_ROWS = "requests of different widths (cum_seq_lens_q)"
    STRIDED_QUERY = "a query that is not contiguous"
    SEPARATE_TABLES = "separate page tables of K and V (uses_shared_paged_kv_idx=False)"
    BLOCK_SPARSE = "other pages for each K/V head (enable_block_sparse_attention)"
    OTHER_V_STRIDES = "V with other strides than K's"
    NVFP4 = "NVFP4 K/V"
    PLAIN_FACTORS = "V's NVFP4 scale factors in plain order"
    INTERLEAVED_FACTORS = "V's NVFP4 scale factors interleaved over 4 tokens"
    NON_CAUSAL = "causal=False"
    WINDOW = "a window (window_left)"
    SINKS = "sinks"
    MASK = "a draft mask"
    TOP_K = "entries chosen for each row (sparse_mla_top_k)"
    TWO_POOLS = "chosen entries of two pools (swa_kv_cache)"
    TOP_K_LENS = "numbers of chosen entries (sparse_mla_top_k_lens)"
    STRIDED_TOP_K = "rows of chosen entries that do not lie next to each other"
    RANK_KEYS = "one rank's keys (causal_seqlens_kv_global)"
    SKIP_SOFTMAX = "parts of the softmax that may be left out (skip_softmax_threshold_scale_factor)"
    BLOCK_SCALES = "scales of blocks of rows and of keys (sage_attn_sfs)"
    TENSOR_SCALES = "scales as tensors"
    V_SCALE = "a bmm2_scale other than the number 1"
    OUT = "a given out"
    LSE = "an LSE"
    STRIDED_LSE = "an lse that is not contiguous"


Asks = Mapping[Feature, Callable[[Any], bool]]  # feature -> whether a problem requires it
STRUCTURE: Asks = {}  # no feature: a kernel's row limits shapes, dtypes, lengths and bounds one by one


# Field of `PagedAttention` or `RaggedAttention` -> the features that it may require.
FIELDS: dict[str, Asks] = {
    **dict.fromkeys(("k_cache", "key", "value"), STRUCTURE),
    **dict.fromkeys(("call", "seq_lens", "cu_seqlens_kv", "max_kv_len", "out_dtype"), STRUCTURE),
    "query": {Feature.STRIDED_QUERY: lambda problem: not problem.query.is_contiguous()},
    "max_q_len": {Feature.SEVERAL_ROWS: lambda problem: problem.max_q_len > 1},
    "cu_seqlens_q": {Feature.RAGGED_ROWS: lambda problem: problem.cu_seqlens_q is not None},
    "k_block_tables": {Feature.BLOCK_SPARSE: lambda problem: problem.is_block_sparse},
    "v_block_tables": {Feature.SEPARATE_TABLES: lambda problem: problem.k_block_tables is not problem.v_block_tables},
    "v_cache": {Feature.OTHER_V_STRIDES: lambda problem: problem.k_cache.stride() != problem.v_cache.stride()},
    "k_scale_factors": {Feature.NVFP4: lambda problem: problem.k_scale_factors is not None},
    "v_scale_factors": {Feature.NVFP4: lambda problem: problem.v_scale_factors is not None},
    "v_scale_factors_interleaved": {
        Feature.PLAIN_FACTORS: lambda problem: (
            problem.v_scale_factors is not None and not problem.v_scale_factors_interleaved
        ),
        Feature.INTERLEAVED_FACTORS: lambda problem: problem.v_scale_factors_interleaved,
    },
    "causal": {Feature.NON_CAUSAL: lambda problem: not problem.causal},
    "window_left": {Feature.WINDOW: lambda problem: problem.window_left >= 0},
    "sinks": {Feature.SINKS: lambda problem: problem.sinks is not None},
    "mask": {Feature.MASK: lambda problem: problem.mask is not None},
    "selected": {
        Feature.TOP_K: lambda problem: problem.selected is not None,
        Feature.STRIDED_TOP_K: lambda problem: problem.selected is not None and not problem.selected.is_contiguous(),
    },
    "window_cache": {Feature.TWO_POOLS: lambda _: True},
    "num_visible": {Feature.RANK_KEYS: lambda problem: problem.num_visible is not None},
    "selected_lens": {Feature.TOP_K_LENS: lambda problem: problem.selected_lens is not None},
    "block_scales": {Feature.BLOCK_SCALES: lambda problem: problem.block_scales is not None},
    "skip_softmax": {Feature.SKIP_SOFTMAX: lambda problem: problem.skip_softmax > 0},
    "bmm1_scale": {Feature.TENSOR_SCALES: lambda problem: isinstance(problem.bmm1_scale, torch.Tensor)},
    "bmm2_scale": {
        Feature.TENSOR_SCALES: lambda problem: isinstance(problem.bmm2_scale, torch.Tensor),
        Feature.V_SCALE: lambda problem: isinstance(problem.bmm2_scale, torch.Tensor) or problem.bmm2_scale != 1,
    },
    "out": {Feature.OUT: lambda problem: problem.out is not None},
    "lse": {
        Feature.LSE: lambda problem: problem.lse is not None,
        Feature.STRIDED_LSE: lambda problem: problem.lse is not None and not problem.lse.is_contiguous(),
    },
    "return_lse": {Feature.LSE: lambda problem: problem.return_lse},
}

UNDECLARED: Asks = {Feature.UNDECLARED: lambda problem: True}


def features_of_fields(problem: Any) -> frozenset[Feature]:
    """Return the features that a kernel must support to compute the problem. No tensor's contents are read."""
    tests = (FIELDS.get(name, UNDECLARED) for name in vars(problem))  # one mapping per field
    return frozenset(feature for each in tests for feature, is_needed in each.items() if is_needed(problem))
