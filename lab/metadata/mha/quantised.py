"""Quantised caches on the MHA backend: the dtypes of a call, and the write of e4m3 K and V.

The rules are those of SGLang 0.5.23, `sglang/srt/layers/attention/trtllm_mha_backend.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall
from lab.metadata.engine.kv_cache import PagedKVCache, saturated_e4m3


@dataclass(frozen=True)
class CallDtypes:
    """The dtypes of a call: the engine casts the query to dtype `query` before the call, and the output has dtype `out`."""

    query: torch.dtype
    out: torch.dtype


def call_dtypes(call: AttentionCall, dtype: torch.dtype, kv_dtype: torch.dtype, *, trtllm_gen: bool) -> CallDtypes:
    """Return the dtypes of a call's query and output (`forward_decode`, `forward_extend`).

    ========  ==================  =============  =========
    cache     kernel              query          output
    ========  ==================  =============  =========
    e4m3      trtllm-gen          e4m3           the model's
    e4m3      XQA                 the model's    the model's
    e4m3      fmha_v2             e4m3           the model's
    NVFP4     trtllm-gen          e4m3           e4m3, then converted to the model's
    NVFP4     XQA                 the model's    the model's
    other     any                 the model's    the model's
    ========  ==================  =============  =========

    The cast has no scale, so that values beyond 448 saturate.

    Args:
        call: DECODE or CONTEXT.
        dtype: the model's dtype.
        kv_dtype: the cache's dtype; uint8 is NVFP4.
        trtllm_gen: FlashInfer's trtllm-gen runs the call (SM100, SM103); else XQA or fmha_v2.

    Raises:
        ValueError: a context call over NVFP4 without trtllm-gen. SGLang refuses this configuration when it starts.
    """
    if kv_dtype == NVFP4:
        if not trtllm_gen and call is AttentionCall.CONTEXT:
            raise ValueError("fmha_v2 does not read an NVFP4 cache: prefill with another backend, or on SM100 or SM103")
        return CallDtypes(E4M3, E4M3) if trtllm_gen else CallDtypes(dtype, dtype)
    is_cast = kv_dtype == E4M3 and (trtllm_gen or call is AttentionCall.CONTEXT)
    return CallDtypes(E4M3 if is_cast else dtype, dtype)


def write_e4m3(
    cache: PagedKVCache,
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    query: Tensor | None = None,
) -> Tensor | None:
    """Write K and V to an e4m3 cache, quantised as in SGLang's fused write, and return the quantised query.

    An element is its float32 value times the float32 reciprocal of the scale, rounded once and saturated at ±448
    (`fused_fp8_qkv_kv_cache.cuh`). SGLang's other write divides in the model's dtype first and so rounds twice
    (`MHATokenToKVPool.set_kv_buffer`); context parallelism uses it.

    Args:
        cache: a cache of dtype e4m3.
        slots: ``[n]`` int64.
        k, v: ``[n, num_kv_heads, head_dim]`` in the model's dtype.
        k_scale, v_scale: the layer's scales.
        query: ``[n, num_qo_heads, head_dim]``, quantised without a scale; None if the kernel takes the query in the model's
            dtype.

    Returns:
        The query in e4m3, or None without one.

    Raises:
        TypeError: K and V are neither float16 nor bfloat16, or the cache is not e4m3.
        ValueError: a shape differs from the cache's, or a scale is not positive.
    """
    if cache.storage.dtype != E4M3:
        raise TypeError(f"the fused write fills an e4m3 cache, not one of {cache.storage.dtype}: use cache.write")
    for name, side in (("k", k), ("v", v)):
        if side.dtype not in HALF_DTYPES:
            raise TypeError(f"{name} has dtype {side.dtype}, expected torch.float16 or torch.bfloat16")
    if min(k_scale, v_scale) <= 0:
        raise ValueError(f"k_scale={k_scale} and v_scale={v_scale} must be positive: they divide what is stored")
    cache.write(slots, _times_reciprocal(k, k_scale), _times_reciprocal(v, v_scale))
    return None if query is None else _times_reciprocal(query, 1.0)


def _times_reciprocal(values: Tensor, scale: float) -> Tensor:
    reciprocal = 1.0 / torch.tensor(scale, dtype=torch.float32, device=values.device)
    return saturated_e4m3(values.to(torch.float32) * reciprocal)
