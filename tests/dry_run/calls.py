"""Arguments of the four calls, on CPU tensors, small where a shape does not matter."""

from typing import Any

import torch

REQUESTS, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 8, 32, 4, 128, 64, 40


def workspace() -> torch.Tensor:
    return torch.zeros(128 << 20, dtype=torch.uint8)


def paged(rows: int, keys: int, dtype: torch.dtype = torch.bfloat16, head_dim: int = HEAD_DIM) -> dict[str, Any]:
    cache = tuple(torch.zeros(PAGES, KV_HEADS, PAGE_SIZE, head_dim, dtype=dtype) for _ in range(2))
    return {
        "query": torch.zeros(rows, HEADS, head_dim, dtype=dtype),
        "kv_cache": cache,
        "workspace_buffer": workspace(),
        "block_tables": torch.zeros(REQUESTS, keys // PAGE_SIZE, dtype=torch.int32),
        "seq_lens": torch.full((REQUESTS,), keys, dtype=torch.int32),
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
    }


def decode(keys: int = 512, q_len: int = 1, **paged_as: Any) -> dict[str, Any]:
    q_lens = {"q_len_per_req": q_len} if q_len > 1 else {}
    return paged(REQUESTS * q_len, keys, **paged_as) | q_lens | {"max_seq_len": keys}


def context(keys: int = 512, q_len: int = 8) -> dict[str, Any]:
    offsets = torch.arange(REQUESTS + 1, dtype=torch.int32)
    lengths = {"max_q_len": q_len, "max_kv_len": keys, "batch_size": REQUESTS}
    return (
        paged(REQUESTS * q_len, keys) | lengths | {"cum_seq_lens_q": offsets * q_len, "cum_seq_lens_kv": offsets * keys}
    )


def mla(keys: int = 512) -> dict[str, Any]:
    return {
        "query": torch.zeros(REQUESTS, 1, 128, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.bfloat16),
        "workspace_buffer": workspace(),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "block_tables": torch.zeros(REQUESTS, keys // PAGE_SIZE, dtype=torch.int32),
        "seq_lens": torch.full((REQUESTS,), keys, dtype=torch.int32),
        "max_seq_len": keys,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
    }


def ragged(q_len: int = 64, heads: int = 16) -> dict[str, Any]:
    offsets = torch.arange(REQUESTS + 1, dtype=torch.int32) * q_len
    return {
        "query": torch.zeros(REQUESTS * q_len, heads, 192, dtype=torch.bfloat16),
        "key": torch.zeros(REQUESTS * q_len, heads, 192, dtype=torch.bfloat16),
        "value": torch.zeros(REQUESTS * q_len, heads, 128, dtype=torch.bfloat16),
        "workspace_buffer": workspace(),
        "seq_lens": torch.full((REQUESTS,), q_len, dtype=torch.int32),
        "max_q_len": q_len,
        "max_kv_len": q_len,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "o_sf_scale": -1.0,
        "batch_size": REQUESTS,
        "window_left": -1,
        "cum_seq_lens_q": offsets,
        "cum_seq_lens_kv": offsets,
        "enable_pdl": False,
        "is_causal": True,
        "return_lse": True,
    }
