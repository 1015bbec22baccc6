"""FlashInfer's XQA and fmha_v2 by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one key at a time.

Pointers are followed as the kernels follow them: a page table is read as packed rows whatever its strides, V with K's
strides, fmha_v2's V by its page ids from K's base, XQA's mask bit by bit. The real functions' signatures supply the
defaults, so an argument left out is what the installed FlashInfer makes of it. trtllm-gen is not simulated: on SM100
FlashInfer itself makes the call, on a B200 that is not there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.dry_run.on_a_b200 import on_a_b200
from tests.kernels.simulated import Arguments, Simulated, attend, paged, write_scratch


@dataclass
class SimulatedFlashInfer(Simulated):
    """The decode and context functions on a GPU whose capability's major is `major`."""

    functions: ClassVar[tuple[str, ...]] = (
        "trtllm_batch_decode_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_fmha_v2_prefill",
    )

    major: int = 9

    def call(self, real: Callable[..., Any], arguments: Arguments) -> Any:
        if self.major == 10:
            return on_a_b200(real, arguments)
        if real.__name__ == "trtllm_fmha_v2_prefill":
            return _fmha_v2(**arguments)
        assert arguments.pop("backend") in ("auto", "xqa")
        return _xqa(**arguments)


def _xqa(
    *,
    query: Tensor,
    kv_cache: Any,
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    bmm1_scale: Any,
    bmm2_scale: Any,
    window_left: int,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    sinks: Tensor | None,
    kv_layout: str,
    q_len_per_req: int,
    o_scale: float,
    mask: Tensor | None,
    **others: Any,
) -> Tensor:
    assert all(others[name] is None for name in ("max_q_len", "cum_seq_lens_q", "bmm1_scale_log2", "lse"))
    assert others["uses_shared_paged_kv_idx"] is True
    write_scratch(workspace_buffer)
    k, v = _pair(kv_cache)
    if kv_layout == "NHD":
        k, v = k.transpose(-3, -2), v.transpose(-3, -2)
    head_dim, quantised = query.shape[-1], k.element_size() < 2
    kv_scale = float(bmm2_scale * o_scale)
    q_scale = float(bmm1_scale) / kv_scale * math.sqrt(head_dim)
    scale = q_scale * (kv_scale if quantised else 1.0) / math.sqrt(head_dim)
    out_scale = (kv_scale if quantised else 1.0) / o_scale
    table, window = _packed(block_tables), window_left + 1 if window_left >= 0 else 0
    sinks = None if sinks is None else sinks.reshape(k.shape[1], -1).flatten()
    out = _output(query, out, out_dtype)
    shown = None if q_len_per_req == 1 else _draft_tokens(mask, len(seq_lens), q_len_per_req)
    for request, kv_len in enumerate(seq_lens.tolist()):
        keys = paged(k, table[request], kv_len)
        values = paged(v, table[request], kv_len, k.stride())
        for token in range(q_len_per_req):
            row, draft_start = request * q_len_per_req + token, kv_len - q_len_per_req
            position = draft_start + token
            seen = [key for key in range(kv_len) if not window or key > position - window]
            if shown is not None:
                seen = [key for key in seen if key < draft_start or key - draft_start in shown[row]]
            attend(query[row], keys, values, seen, scale, out_scale, sinks, out[row])
    return out


def _draft_tokens(mask: Tensor | None, batch_size: int, q_len: int) -> list[set[int]]:
    """The draft tokens that each row sees: bit b of its word w is token 16 w + b. Rows are padded to 32 bits."""
    assert mask is not None, "Mask is required for speculative decoding"
    assert mask.dtype == torch.uint16
    words_per_row = 2 * math.ceil(q_len / 32)
    words = torch.as_strided(mask, (batch_size * q_len * words_per_row,), (1,)).tolist()
    rows = [words[start : start + words_per_row] for start in range(0, len(words), words_per_row)]
    return [{token for token in range(16 * words_per_row) if row[token // 16] >> (token % 16) & 1} for row in rows]


def _fmha_v2(
    *,
    qkv: tuple[Tensor, Any],
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    sinks: Tensor | None,
    mask_mode: str,
    window_left: int,
    **others: Any,
) -> Tensor:
    assert others["chunked_attention_size"] == 0
    assert max_kv_len >= max_q_len
    assert isinstance(bmm1_scale, float)
    assert isinstance(bmm2_scale, float)
    workspace_buffer.view(torch.uint8).fill_(0xFF)
    query, cache = qkv
    table = _packed(block_tables)
    assert len(table) == batch_size
    if isinstance(cache, tuple):
        k, v = cache
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert k.shape == v.shape
        assert table.shape[1] == 2
        block = k[0].numel()
        distance = v.data_ptr() - k.data_ptr()
        assert distance > 0
        assert distance % (block * k.element_size()) == 0
        k_blocks, v_blocks = table.unbind(1)
    else:
        k = cache[:, 0]
        block = k[0].numel()
        k_blocks, v_blocks = table * 2, table * 2 + 1
    num_blocks = (k.untyped_storage().nbytes() // k.element_size() - k.storage_offset()) // block
    pool = torch.as_strided(k, (num_blocks, *k.shape[1:]), (block, *k[0].contiguous().stride()))
    pool = pool.transpose(1, 2) if input_layout == "Q_PAGED_KV_NHD" else pool
    half = query.element_size() == 2
    scale = bmm1_scale or 1.0 / math.sqrt(query.shape[-1])
    if 0 < window_left < max_kv_len:
        mask_mode = "sliding_window"
    out = _output(query, out, out_dtype)
    q_starts, kv_lens = cum_seq_lens_q.tolist(), cum_seq_lens_kv.diff().tolist()
    assert kv_lens == seq_lens.tolist()
    for request, kv_len in enumerate(kv_lens):
        keys, values = (paged(pool, blocks[request], kv_len) for blocks in (k_blocks, v_blocks))
        for row in range(q_starts[request], q_starts[request + 1]):
            position = kv_len - (q_starts[request + 1] - row)
            first = position - window_left if mask_mode == "sliding_window" and window_left >= 0 else 0
            last = kv_len - 1 if mask_mode == "padding" else position
            attend(
                query[row],
                keys,
                values,
                range(max(0, first), last + 1),
                scale,
                1.0 if half else bmm2_scale,
                sinks,
                out[row],
            )
    return out


def _pair(cache: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cache, tuple):
        return cache
    return (cache, cache) if cache.shape[1] == 1 else tuple(cache.unbind(1))


def _packed(table: Tensor) -> Tensor:
    """The table as a kernel reads it: from its first element on, strides ignored."""
    return torch.as_strided(table, table.shape, torch.empty(table.shape, device="meta").stride()).clone()


def _output(query: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if out is not None:
        return out
    return torch.empty(query.shape, dtype=out_dtype or query.dtype)
