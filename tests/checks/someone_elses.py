"""Batch decode over a paged K/V cache as anybody would write it: gather the pages, call torch's attention."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def trtllm_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1,
    out=None,
    kv_layout="HND",
    q_len_per_req=1,
):
    k_cache, v_cache = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(1)
    if query.dtype not in (torch.float16, torch.bfloat16) or k_cache.dtype != query.dtype:
        raise NotImplementedError(f"{query.dtype} queries over a {k_cache.dtype} cache")
    result = torch.empty_like(query) if out is None else out
    for request, length in enumerate(seq_lens.tolist()):
        rows = slice(request * q_len_per_req, (request + 1) * q_len_per_req)
        first = max(0, length - q_len_per_req - window_left) if window_left >= 0 else 0
        keys, values = (
            gather(cache, block_tables[request], length, kv_layout)[:, first:] for cache in (k_cache, v_cache)
        )
        position = length - q_len_per_req + torch.arange(q_len_per_req, device=query.device)[:, None]
        key = torch.arange(first, length, device=query.device)
        visible = key <= position
        if window_left >= 0:
            visible &= key >= position - window_left
        attended = scaled_dot_product_attention(
            query[rows].transpose(0, 1), keys, values, visible, scale=float(bmm1_scale), enable_gqa=True
        )
        result[rows] = attended.transpose(0, 1) * float(bmm2_scale)
    return result


def gather(cache, table, length, kv_layout):
    """[num_kv_heads, length, head_dim] of one request."""
    if kv_layout == "NHD":
        cache = cache.transpose(1, 2)
    num_pages = -(-length // cache.shape[2])
    pages = cache[table[:num_pages].long()]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]
