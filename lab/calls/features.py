"""The four calls by name, and the features that a problem asks for beyond a plain call.

`FIELDS` classifies every field of a problem. A field that it does not name asks for `Feature.UNDECLARED`, which no kernel
honours, so that a new argument is refused everywhere until the kernels that take it say so.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch


class Call(enum.Enum):
    """FlashInfer's four calls; the value is the function's name."""

    DECODE = "trtllm_batch_decode_with_kv_cache"
    CONTEXT = "trtllm_batch_context_with_kv_cache"
    MLA_DECODE = "trtllm_batch_decode_with_kv_cache_mla"
    RAGGED_CONTEXT = "trtllm_ragged_attention_deepseek"


class Feature(enum.Enum):
    """Something that a call can ask for beyond the plain one; the value names it in a refusal."""

    UNDECLARED = "a field of the problem that lab.calls.features does not declare"
    SEVERAL_ROWS = "more than one query row per request"
    RAGGED_ROWS = "requests of different widths (cum_seq_lens_q)"
    STRIDED_QUERY = "a query that is not contiguous"
    SEPARATE_TABLES = "separate page tables of K and V (uses_shared_paged_kv_idx=False)"
    OTHER_V_STRIDES = "V with other strides than K's"
    NVFP4 = "NVFP4 K/V"
    PLAIN_FACTORS = "V's NVFP4 scale factors in plain order"
    INTERLEAVED_FACTORS = "V's NVFP4 scale factors interleaved over 4 tokens"
    NON_CAUSAL = "causal=False"
    WINDOW = "a window (window_left)"
    SINKS = "sinks"
    MASK = "a draft mask"
    TENSOR_SCALES = "scales as tensors"
    V_SCALE = "a bmm2_scale other than the number 1"
    OUT = "a given out"
    LSE = "an LSE"
    STRIDED_LSE = "an lse that is not contiguous"


Asks = Mapping[Feature, Callable[[Any], bool]]
STRUCTURE: Asks = {}  # every call has it: shapes, dtypes, lengths and bounds, which a kernel's row limits one by one


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


# Field of `PagedAttention` or `RaggedAttention` -> the features that it may ask for, each with the test of a problem.
FIELDS: dict[str, Asks] = {
    **dict.fromkeys(("k_cache", "k_block_tables", "key", "value"), STRUCTURE),
    **dict.fromkeys(("call", "seq_lens", "cu_seqlens_kv", "max_kv_len", "out_dtype"), STRUCTURE),
    "query": {Feature.STRIDED_QUERY: lambda problem: not problem.query.is_contiguous()},
    "max_q_len": {Feature.SEVERAL_ROWS: lambda problem: problem.max_q_len > 1},
    "cu_seqlens_q": {Feature.RAGGED_ROWS: lambda problem: problem.cu_seqlens_q is not None},
    "v_block_tables": {Feature.SEPARATE_TABLES: lambda problem: problem.k_block_tables is not problem.v_block_tables},
    "v_cache": {Feature.OTHER_V_STRIDES: lambda problem: problem.k_cache.stride() != problem.v_cache.stride()},
    "k_scale_factors": {Feature.NVFP4: lambda problem: problem.k_scale_factors is not None},
    "v_scale_factors": {Feature.NVFP4: lambda problem: problem.v_scale_factors is not None},
    "v_scale_factors_interleaved": {
        Feature.PLAIN_FACTORS: lambda problem: problem.is_nvfp4 and not problem.v_scale_factors_interleaved,
        Feature.INTERLEAVED_FACTORS: lambda problem: problem.v_scale_factors_interleaved,
    },
    "causal": {Feature.NON_CAUSAL: lambda problem: not problem.causal},
    "window_left": {Feature.WINDOW: lambda problem: problem.window_left >= 0},
    "sinks": {Feature.SINKS: lambda problem: problem.sinks is not None},
    "mask": {Feature.MASK: lambda problem: problem.mask is not None},
    "bmm1_scale": {Feature.TENSOR_SCALES: lambda problem: _is_tensor(problem.bmm1_scale)},
    "bmm2_scale": {
        Feature.TENSOR_SCALES: lambda problem: _is_tensor(problem.bmm2_scale),
        Feature.V_SCALE: lambda problem: _is_tensor(problem.bmm2_scale) or problem.bmm2_scale != 1,
    },
    "out": {Feature.OUT: lambda problem: problem.out is not None},
    "lse": {
        Feature.LSE: lambda problem: problem.lse is not None,
        Feature.STRIDED_LSE: lambda problem: problem.lse is not None and not problem.lse.is_contiguous(),
    },
    "return_lse": {Feature.LSE: lambda problem: problem.return_lse},
}
UNDECLARED: Asks = {Feature.UNDECLARED: lambda problem: True}


def features_of(problem: Any) -> frozenset[Feature]:
    """Return what a problem asks for; it reads shapes, strides and host numbers, and no tensor's contents.

    Args:
        problem: a `PagedAttention` or `RaggedAttention`.
    """
    asked = (FIELDS.get(field.name, UNDECLARED) for field in fields(problem))
    return frozenset(feature for asks in asked for feature, is_asked in asks.items() if is_asked(problem))
