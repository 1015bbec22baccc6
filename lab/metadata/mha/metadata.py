"""Arguments of the TRT-LLM MHA kernels for every forward mode, built without reading the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows, UncountedTokens
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.speculation.draft_attention import DraftAttention


@dataclass(frozen=True, eq=False)
class TRTLLMMHAMetadata:
    """What SGLang's TRT-LLM MHA backend keeps per forward pass.

    Attributes:
        cache_seqlens_int32: ``[batch_size]`` int32, keys of each request, new tokens included (``seq_lens`` of
            FlashInfer's decode call).
        max_seq_len_q: most query rows of one request (``q_len_per_req`` of a decode call, ``max_q_len`` of a
            context call).
        cu_seqlens_q: ``[batch_size + 1]`` int32, first query row of each request.
        cu_seqlens_k: ``[batch_size + 1]`` int32, 0 followed by the running sum of ``cache_seqlens_int32``.
        page_table: ``[batch_size, ceil(max_context_len / page_size)]`` int32 with packed rows (``block_tables``).
        swa_page_table: the same in pages of the sliding-window pool, or None without one.
        swa_out_cache_loc: ``[num_tokens]`` int64, where K and V of each query row go in the sliding-window pool, or
            None without one.
    """

    cache_seqlens_int32: Tensor
    max_seq_len_q: int
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    page_table: Tensor
    swa_page_table: Tensor | None = None
    swa_out_cache_loc: Tensor | None = None


def build_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Build the metadata of one eager forward pass (SGLang 0.5.23; the first draft extend as in 0.5.13).

    ======================================  =======================  =======================  ====================
    mode                                    cache_seqlens            query rows per request   max_seq_len_q
    ======================================  =======================  =======================  ====================
    DECODE, IDLE                            seq_lens                 1                        1
    the same with a SpecInfo, draft step s  seq_lens + s + 1         1                        1
    TARGET_VERIFY, q = num_tokens // bs     seq_lens + q             q                        q
    DRAFT_EXTEND, DRAFT_EXTEND_V2           seq_lens                 extend_seq_lens          max(extend_seq_lens)
    EXTEND, MIXED, SPLIT_PREFILL,           seq_lens                 extend_seq_lens          max(extend_seq_lens)
    DLLM_EXTEND
    ======================================  =======================  =======================  ====================

    Draft tokens are keys before ``seq_lens`` counts them, hence the offsets: step s of a draft reads the s tokens
    drafted before it and its own. When no request of an EXTEND-like batch has a cached prefix, queries and keys are
    the same tokens and ``cu_seqlens_q`` is the very tensor ``cu_seqlens_k``. Only the eager pass takes its query rows
    from ``extend_seq_lens``; ``SpecInfo.num_accept_tokens`` and ``num_tokens_per_req`` belong to graph replay.

    Page tables hold ``req_to_token[request, c * page_size] // page_size`` in column c, through ``full_to_swa`` for
    the sliding window, in the first ``ceil(cache_seqlens / page_size)`` columns. That number is clamped to the width
    of the table, as SGLang's fused kernel does: a length above it cannot be refused without reading the device. Cells
    beyond are undefined in SGLang; here they name the sink, page 0, which is always there to be read. A length of 0
    or below (a padded row) has no pages, but does count in ``cu_seqlens_k``. A slot that maps to -1 gives page -1,
    again as the fused kernel (PR 29843) does; a healthy map has none.

    Args:
        batch: the forward pass.
        pool: the id spaces that its requests live in, on the same device.

    Returns:
        Fresh tensors: later changes of the batch or the pool do not reach them.

    Raises:
        ValueError: PREBUILT, different devices, or a host fact that the mode needs is missing.
    """
    check_attends(batch, pool)
    cache_seqlens = (batch.seq_lens + uncounted_tokens(batch)).to(torch.int32)
    cu_seqlens_k = exclusive_cumsum(cache_seqlens)
    slots = first_slots(batch.req_pool_indices, cache_seqlens, pool)
    has_swa = pool.full_to_swa is not None
    return TRTLLMMHAMetadata(
        cache_seqlens_int32=cache_seqlens,
        max_seq_len_q=max_query_rows(batch),
        cu_seqlens_q=_cu_seqlens_q(batch, cu_seqlens_k),
        cu_seqlens_k=cu_seqlens_k,
        page_table=_pages(slots, pool.page_size),
        swa_page_table=_pages(pool.swa_slots(slots), pool.page_size) if has_swa else None,
        swa_out_cache_loc=_swa_out_cache_loc(batch, pool) if has_swa else None,
    )


def mixed_tail_split(batch: ForwardBatch) -> int:
    """How many leading requests go to the context kernel; the rest, one new token each, to the decode kernel.

    SGLang 0.5.23 splits off the trailing run of requests with one new token. The scheduler puts the decoding
    requests of a MIXED batch there, but an EXTEND batch is split just the same, and the answer may be 0.

    Raises:
        ValueError: the mode is not an extend, the batch is speculative, or ``extend_seq_lens_cpu`` is missing.
    """
    if not batch.forward_mode.is_prefill or batch.spec_info is not None:
        raise ValueError(
            f"{batch.forward_mode!r} {'with' if batch.spec_info else 'without'} a SpecInfo has no tail of decoding "
            "requests to split off: only prefills without speculation do"
        )
    context = len(lengths := host_lengths(batch, "extend_seq_lens_cpu"))
    while context > 0 and lengths[context - 1] == 1:
        context -= 1
    return context


def uncounted_tokens(batch: ForwardBatch, attention: DraftAttention = DraftAttention.MHA) -> int:
    """Tokens per request that the kernel is to see as keys and that ``seq_lens`` does not count.

    Args:
        batch: the forward pass.
        attention: says which keys a draft step counts; other passes ignore it.

    Raises:
        ValueError: a host fact that the mode needs is missing.
    """
    uncounted = batch.forward_mode.uncounted
    if uncounted is UncountedTokens.QUERY_ROWS:
        return max_query_rows(batch)
    if uncounted is UncountedTokens.DRAFT_STEP and batch.spec_info is not None:
        if batch.spec_info.speculative_step_id is None:
            raise ValueError(
                f"{batch.forward_mode!r} with a SpecInfo is a draft step and needs SpecInfo.speculative_step_id; "
                "a normal decode has spec_info=None"
            )
        return attention.seq_len_offset(batch.spec_info.speculative_step_id)
    return 0


def query_rows(batch: ForwardBatch) -> int | Tensor | None:
    """Query rows of every request (an int) or of each (``extend_seq_lens``); None where they are the keys themselves.

    Raises:
        ValueError: a host fact that the mode needs is missing.
    """
    mode = batch.forward_mode
    if not mode.query_rows.in_extend_seq_lens:
        return max_query_rows(batch)
    if mode.is_prefill and not any(host_lengths(batch, "extend_prefix_lens_cpu")):
        return None
    if batch.extend_seq_lens is None:
        raise ValueError(f"{mode!r} takes its query rows from the device tensor extend_seq_lens, which is None")
    return batch.extend_seq_lens


def max_query_rows(batch: ForwardBatch) -> int:
    """Most query rows of one request, a host fact: ``max_seq_len_q``.

    Raises:
        ValueError: ``extend_seq_lens_cpu`` or, of an empty batch, ``num_draft_tokens`` is missing.
    """
    if batch.forward_mode.query_rows is QueryRows.ONE:
        return 1
    if batch.forward_mode.query_rows is QueryRows.DRAFT_TOKENS:
        return _verify_q_len(batch)
    return max(host_lengths(batch, "extend_seq_lens_cpu"), default=0)


def check_attends(batch: ForwardBatch, pool: KVPool) -> None:
    """Raise ValueError if the pass runs no attention, or not where the pool is."""
    if batch.forward_mode.query_rows is QueryRows.NONE:
        raise ValueError(
            f"{batch.forward_mode!r} runs no attention, its KV cache is already there: "
            "build the metadata of the DECODE after it"
        )
    if batch.seq_lens.device != pool.device:
        raise ValueError(f"the batch is on {batch.seq_lens.device} but the pool on {pool.device}: use one device")


def _verify_q_len(batch: ForwardBatch) -> int:
    """Query rows per request, which is what the kernel is launched with even if padding made it differ from d."""
    if batch.batch_size > 0:
        return batch.num_tokens // batch.batch_size
    if batch.spec_info is None or batch.spec_info.num_draft_tokens is None:
        raise ValueError("an empty TARGET_VERIFY batch needs SpecInfo.num_draft_tokens to know its rows per request")
    return batch.spec_info.num_draft_tokens


def _cu_seqlens_q(batch: ForwardBatch, cu_seqlens_k: Tensor) -> Tensor:
    rows = query_rows(batch)
    if rows is None:
        return cu_seqlens_k
    return _uniform_cu_seqlens(batch, rows) if isinstance(rows, int) else exclusive_cumsum(rows)


def host_lengths(batch: ForwardBatch, name: str) -> Sequence[int]:
    """One of the batch's host lists by its name. Raises ValueError if it is missing."""
    lengths: Sequence[int] | None = getattr(batch, name)
    if lengths is None:
        raise ValueError(
            f"{batch.forward_mode!r} needs {name}: pass the scheduler's list, reading the device would stall it"
        )
    return lengths


def _uniform_cu_seqlens(batch: ForwardBatch, q_len: int) -> Tensor:
    end = batch.batch_size * q_len + 1
    return torch.arange(0, end, q_len, dtype=torch.int32, device=batch.seq_lens.device)


def exclusive_cumsum(lengths: Tensor) -> Tensor:
    """``[n]`` any integer -> ``[n + 1]`` int32 that starts with 0."""
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))


def first_slots(rows: Tensor, cache_seqlens: Tensor, pool: KVPool) -> Tensor:
    """Slot of the first token of each page, ``[bs, width]`` int32; slot 0, in the sink of both pools, in dead cells.

    Dead cells are cleared before anybody maps them: the request table holds leftovers there.
    """
    slots = pool.req_to_token[:, :: pool.page_size].index_select(0, rows)
    columns = torch.arange(pool.block_table_width, device=pool.device)
    return slots.masked_fill(columns >= num_pages(cache_seqlens, pool.page_size)[:, None], 0)


def num_pages(cache_seqlens: Tensor, page_size: int) -> Tensor:
    """Pages of so many tokens, same shape; 0 or below for a length of 0 or below."""
    return (cache_seqlens + (page_size - 1)) // page_size


def _pages(slots: Tensor, page_size: int) -> Tensor:
    """Same shape, int32. Floor division, so that slot -1 is in page -1."""
    return (slots // page_size).to(torch.int32)


def _swa_out_cache_loc(batch: ForwardBatch, pool: KVPool) -> Tensor:
    """``[num_tokens]`` int64; rows beyond the real tokens write to the sink."""
    padding = batch.num_tokens - batch.out_cache_loc.shape[0]
    return torch.nn.functional.pad(pool.swa_slots(batch.out_cache_loc), (0, padding))
