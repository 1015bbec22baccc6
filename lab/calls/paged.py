"""Check the arguments that FlashInfer's decode and context calls share, and make the attention problem over a paged K/V
cache.
"""

from typing import Any

import torch

from lab.calls import arguments
from lab.calls.problem import PagedAttention, refuse_nan

KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def pose_paged(
    call: Any,
    *,
    kv_bound: str,
    max_q_len: int,
    max_kv_len: int,
    causal: bool,
    cum_seq_lens_kv: torch.Tensor | None,
    mask: torch.Tensor | None = None,
) -> PagedAttention:
    """Check the arguments that decode and context calls share, and return the attention problem. It has one form of layout,
    page tables and output dtype, whichever the caller used.

    Args:
        call: a `DecodeCall` or `ContextCall`.
        kv_bound: the call's name for `max_kv_len`, for error messages.
        max_q_len, max_kv_len, causal, cum_seq_lens_kv, mask: as in `PagedAttention`.

    Raises:
        TypeError, ValueError, NotImplementedError: see `DecodeCall.problem`.
    """
    query = call.query
    arguments.check_bool("return_lse", call.return_lse)
    k_cache, v_cache = arguments.split_cache("kv_cache", call.kv_cache, call.kv_layout)
    arguments.check_cache(query, k_cache)
    scale_factors = arguments.check_scale_factors(call, k_cache)
    k_tables, v_tables = arguments.split_tables(call.block_tables, call.uses_shared_paged_kv_idx)
    batch_size = k_tables.shape[0]
    arguments.check_vector("seq_lens", call.seq_lens, batch_size, arguments.LENGTH_DTYPES)
    for name, offsets in (("cum_seq_lens_q", call.cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        if offsets is not None:
            arguments.check_vector(name, offsets, batch_size + 1, (torch.int32,))
    max_kv_len = arguments.check_int(kv_bound, max_kv_len, 0, "it bounds the keys of one request")
    window_left = arguments.check_int("window_left", call.window_left, -1, "-1 means no window")
    if call.sinks is not None:
        arguments.check_vector("sinks", call.sinks, query.shape[1], (torch.float32,))
    problem = PagedAttention(
        call=call.function,
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale_factors=scale_factors[0],
        v_scale_factors=scale_factors[1],
        v_scale_factors_interleaved=scale_factors[0] is not None and arguments.has_interleaved_v_scales(call),
        k_block_tables=k_tables,
        v_block_tables=v_tables,
        seq_lens=call.seq_lens,
        cu_seqlens_q=call.cum_seq_lens_q,
        cu_seqlens_kv=cum_seq_lens_kv,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        causal=causal,
        # A window as wide as the longest request is none; some callers write it as a very large number.
        window_left=-1 if window_left >= max_kv_len else window_left,
        sinks=call.sinks,
        mask=mask,
        **arguments.posed_alike(call),
        out=call.out,
        out_dtype=arguments.output_dtype(call),
        lse=arguments.check_lse(call),
        return_lse=call.return_lse,
    )
    arguments.check_devices(call)
    if query.device.type == "cpu":
        problem.check_values()
        refuse_nan(problem, in_query=False)
    return problem
