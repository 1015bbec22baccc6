"""A recorded call of each kind: functions, layouts, dtypes, masks, windows, lengths and selected entries."""

from typing import Any

import torch

from lab.calls import AttentionCall
from lab.calls.problem import E4M3
from lab.recorded.call import RecordedCall
from lab.workloads.inputs.masks import packed_mask
from tests.recorded.record_calls import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    NUM_PAGES,
    PAGE_OFFSETS,
    PAGE_SIZE,
    context_arguments,
    decode_arguments,
    latent_arguments,
    ragged_arguments,
    rank_arguments,
    selecting_arguments,
    several_rows,
)


def decode(**changes: Any) -> RecordedCall:
    return RecordedCall(AttentionCall.DECODE, decode_arguments(**changes))


def verify(q_len: int, **changes: Any) -> RecordedCall:
    """Make a decode of `q_len` rows for each request, with a mask in which each row but the first hides one draft token."""
    rows = torch.arange(q_len)
    shown = torch.ones(len(LENGTHS), q_len, q_len, dtype=torch.bool).tril()
    shown[:, rows[1:], rows[:-1]] = False
    query = torch.randn(len(LENGTHS) * q_len, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    given = {"query": query.to(torch.bfloat16), "q_len_per_req": q_len, "mask": packed_mask(shown)}
    return decode(**given | changes)


def context(**changes: Any) -> RecordedCall:
    """Make a context call of 1, 4 and 2 rows, and two rows of no request."""
    return RecordedCall(AttentionCall.CONTEXT, context_arguments((0, 1, 5, 7), 9, **changes))


def ragged(**changes: Any) -> RecordedCall:
    return RecordedCall(AttentionCall.RAGGED_CONTEXT, ragged_arguments(**changes))


def latent(**changes: Any) -> RecordedCall:
    return RecordedCall(AttentionCall.MLA_DECODE, latent_arguments(**changes))


def selecting(**changes: Any) -> RecordedCall:
    return RecordedCall(AttentionCall.MLA_DECODE, selecting_arguments(**changes))


def int32(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def _nvfp4() -> RecordedCall:
    draw = torch.Generator().manual_seed(2)
    shape = (NUM_PAGES, KV_HEADS, PAGE_SIZE)
    sides = tuple(torch.randint(256, (*shape, HEAD_DIM // 2), dtype=torch.uint8, generator=draw) for _ in range(2))
    factors = tuple((0.1 + torch.rand(*shape, HEAD_DIM // 16, generator=draw)).to(E4M3) for _ in range(2))
    return decode(kv_cache=sides, kv_cache_sf=factors, backend="xqa")


def _shared_pages() -> RecordedCall:
    """Requests 1 and 2 share their first page, and cells after the last pages hold ids of no page."""
    tables = decode_arguments()["block_tables"]
    tables[2, 0], tables[0, 1], tables[0, 2] = tables[1, 0], -1, 99
    return decode(block_tables=tables)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CACHE, TABLE = decode_arguments()["kv_cache"], decode_arguments()["block_tables"]
E4M3_CACHE = tuple((4 * side.float()).to(E4M3) for side in CACHE)
TWICE = int32([[96, 96, 35, -1], [39, 97, 39, 96]], [[2, 0, 2, 2], [4, 1, 1, 0]])
WIDE = selecting_arguments()["block_tables"].repeat(1, 1, 2)[..., :4]
CALLS = {
    "decode": decode(),
    "decode, LSE and sinks": decode(sinks=SINKS, lse=torch.empty(3, HEADS), return_lse=True),
    "decode, a given output": decode(out=torch.zeros(3, HEADS, HEAD_DIM, dtype=torch.float16)),
    "decode, window": decode(window_left=3, out_dtype=torch.float16),
    "decode, e4m3": decode(kv_cache=E4M3_CACHE, bmm1_scale=0.01, bmm2_scale=0.7),
    "decode, NHD": decode(kv_cache=tuple(side.transpose(1, 2) for side in CACHE), kv_layout="NHD"),
    "decode, one tensor": decode(kv_cache=torch.stack(CACHE, dim=1)),
    "decode, K is V": decode(kv_cache=CACHE[0][:, None].contiguous()),
    "decode, separate tables": decode(
        block_tables=torch.stack([TABLE, TABLE.flip(0, 1)], dim=1), uses_shared_paged_kv_idx=False
    ),
    "decode, shared pages": _shared_pages(),
    "decode, one table of all": decode(block_tables=TABLE[2:].expand(3, 3)),
    "decode, a table of wide rows": decode(block_tables=TABLE.repeat(1, 2)[:, :3]),
    "decode, scales as tensors": decode(bmm1_scale_log2=torch.tensor([0.2]), bmm2_scale=torch.tensor([3.0])),
    "decode, rows of different widths": decode(
        query=verify(3).given["query"][:8], cum_seq_lens_q=int32(0, 3, 4, 6), max_q_len=3, q_len_per_req=None
    ),
    "decode, several rows": RecordedCall(AttentionCall.DECODE, several_rows()),
    "verify": verify(3),
    "verify, window, more rows than keys": verify(7, window_left=4),
    "verify of 18 rows, causal": verify(18, mask=None),
    "a request without keys": decode(seq_lens=int32(0, 17, 33), return_lse=True),
    "context": context(),
    "context, not causal": context(causal=False, return_lse=True),
    "context, offsets of pages": RecordedCall(AttentionCall.CONTEXT, context_arguments(cum_seq_lens_kv=PAGE_OFFSETS)),
    "MLA": latent(return_lse=True, return_lse_base="basee"),
    "MLA, selected entries": selecting(),
    "MLA, selected entries in wide rows": selecting(block_tables=WIDE),
    "MLA, numbers of selected entries": selecting(sparse_mla_top_k_lens=int32(1, 3, 2, 4)),
    "MLA, an entry selected twice": selecting(block_tables=TWICE),
    "MLA, sinks in a list": latent(sinks=[SINKS]),
    "ragged": ragged(),
    "ragged, window": ragged(window_left=2, return_lse=True),
    "ragged, not causal, sinks": ragged(is_causal=False, return_lse=True, attention_sinks=SINKS),
}
RANK = {"cp_world": 2, "cp_rank": 1, "causal_seqlens_kv_global": int32(5, 12, 30), "return_lse": True}
RANKS = {  # calls that no single key is left of
    "decode on a rank": decode(**RANK),
    "MLA, 1 row on a rank": RecordedCall(AttentionCall.MLA_DECODE, rank_arguments(1)),
    "MLA, 3 rows on a rank": RecordedCall(AttentionCall.MLA_DECODE, rank_arguments(3)),
}
NVFP4 = _nvfp4()  # which no program makes
