"""Quantised caches on the MLA backend: the query's dtype, and a prefill's e4m3 query, keys and values.

The rules are those of SGLang 0.5.23, `sglang/srt/layers/attention/trtllm_mla_backend.py`.
"""

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.metadata.engine.kv_cache import saturated_e4m3
from lab.metadata.mla.calls import MLALayer


def mla_query_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which the decode call's query is cast: e4m3 over an e4m3 cache, without a scale (`forward_decode`).

    Args:
        dtype: the model's dtype.
        kv_dtype: the cache's dtype.

    Raises:
        ValueError: the cache has 4 bits, which FlashInfer's MLA kernels do not read. SGLang converts the whole cache to the
            model's dtype before each layer's call (`MLATokenToKVPoolFP4.get_key_buffer`).
    """
    if kv_dtype == torch.uint8:
        raise ValueError("no MLA kernel reads a cache of 4 bits: convert it to the model's dtype first, as SGLang does")
    return E4M3 if kv_dtype == E4M3 else dtype


def quantised_prefill(layer: MLALayer, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a prefill's query, key and value in e4m3, in the same shapes, for calls over an e4m3 cache (`_quantize_fp8_qkv`).

    Keys and values are divided by the layer's scales, and the calls multiply by the same scales. The query has no scale.
    """
    scales = (1.0, layer.k_scale, layer.v_scale)
    query, key, value = (
        saturated_e4m3(side.to(torch.float32) / scale) for side, scale in zip((query, key, value), scales, strict=True)
    )
    return query, key, value
