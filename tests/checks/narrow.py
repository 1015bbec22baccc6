"""A right decode with limits: bfloat16, head_dim 128, pages of 64, and no refusal but by exception."""

from typing import Any

import torch

from lab.references import trtllm_batch_decode_with_kv_cache as right


def trtllm_batch_decode_with_kv_cache(query: torch.Tensor, kv_cache: Any, *args: Any, **arguments: Any) -> Any:
    keys = kv_cache[0] if isinstance(kv_cache, tuple) else kv_cache
    page_size = keys.shape[-3 if arguments.get("kv_layout") == "NHD" else -2]
    if (query.dtype, keys.dtype, query.shape[-1], page_size) != (torch.bfloat16, torch.bfloat16, 128, 64):
        raise NotImplementedError("bfloat16, head_dim 128 and pages of 64 alone")
    return right(query, kv_cache, *args, **arguments)
