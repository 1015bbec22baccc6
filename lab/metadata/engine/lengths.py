"""Compute the numbers of keys and of query rows of the requests of a forward pass. Numbers on the host are computed from the
shapes and host lists of the batch: the host never reads the batch's tensors.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows, UncountedTokens
from lab.metadata.engine.kv_pool import KVPool
from lab.named_enum import NamedEnum

# Length of padded requests (`get_cuda_graph_seq_len_fill_value` of SGLang's TRT-LLM backends).
PADDED_SEQ_LEN = 1


class DraftAttention(NamedEnum):
    """The attention backend of a draft model. It determines how many keys a request has in each draft step."""

    MHA = "mha"  # seq_lens + step + 1: the tokens of the earlier steps and of this step count
    MHA_FROZEN_KV = "mha frozen kv"  # seq_lens in every step: the draft reads the target's K/V and writes none
    MLA = "mla"  # seq_lens in every step: SGLang 0.5.11 to 0.5.23 add no offset
    MLA_WITH_OFFSET = "mla with offset"  # seq_lens + step + 1, as MHA and FlashInfer's MLA backend count

    @property
    def is_mla(self) -> bool:
        return self in (DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET)

    def seq_len_offset(self, step: int) -> int:
        return 0 if self in (DraftAttention.MLA, DraftAttention.MHA_FROZEN_KV) else step + 1


def check_attends(batch: ForwardBatch, pool: KVPool) -> None:
    if batch.forward_mode.query_rows is QueryRows.NONE:
        raise ValueError(
            f"{batch.forward_mode!r} runs no attention, its KV cache is already there: "
            "build the metadata of the DECODE after it"
        )
    if batch.seq_lens.device != pool.device:
        raise ValueError(f"the batch is on {batch.seq_lens.device} but the pool on {pool.device}: use one device")


def host_lengths(batch: ForwardBatch, name: str) -> Sequence[int]:
    lengths: Sequence[int] | None = getattr(batch, name)
    if lengths is None:
        raise ValueError(
            f"{batch.forward_mode!r} needs {name}: pass the scheduler's list, reading the device would stall it"
        )
    return lengths


def device_lengths(batch: ForwardBatch, name: str) -> Tensor:
    lengths: Tensor | None = getattr(batch, name)
    if lengths is None:
        raise ValueError(f"{batch.forward_mode!r} takes its rows from the device tensor {name}, which is None")
    return lengths


def max_query_rows(batch: ForwardBatch) -> int:
    """Return ``max_seq_len_q``, the largest number of query rows of a request; if only the device has it, an upper bound."""
    rows = batch.forward_mode.query_rows
    if rows is QueryRows.ONE:
        return 1
    if rows is QueryRows.DRAFT_TOKENS:
        # The kernel gets this number, even if padding made it differ from num_draft_tokens.
        return batch.num_tokens // batch.batch_size if batch.batch_size > 0 else num_draft_tokens(batch)
    if rows.are_bounded and not batch.extend_seq_lens_cpu:
        return num_draft_tokens(batch)
    return max(host_lengths(batch, "extend_seq_lens_cpu"), default=0)


def query_rows(batch: ForwardBatch) -> int | Tensor | None:
    """Return the number of query rows per request: one int in a decode or TARGET_VERIFY, else the tensor ``extend_seq_lens``.
    Return None for a prefill without cached prefixes, in which ``cu_seqlens_q`` and ``cu_seqlens_k`` are the same tensor.
    """
    mode = batch.forward_mode
    if not mode.query_rows.in_extend_seq_lens:
        return max_query_rows(batch)
    if mode.is_prefill and batch.extend_prefix_lens_cpu is None and batch.extend_prefix_lens is not None:
        raise ValueError(
            f"{mode!r} with extend_prefix_lens needs extend_prefix_lens_cpu, the scheduler's list: None says that no request "
            "has a prefix"
        )
    if mode.is_prefill and not any(batch.extend_prefix_lens_cpu or ()):
        return None
    return device_lengths(batch, "extend_seq_lens")


def query_lens(batch: ForwardBatch) -> Sequence[int]:
    if not batch.forward_mode.query_rows.in_extend_seq_lens:
        return [max_query_rows(batch)] * batch.batch_size
    return host_lengths(batch, "extend_seq_lens_cpu")


def num_draft_tokens(batch: ForwardBatch) -> int:
    if batch.spec_info is None or batch.spec_info.num_draft_tokens is None:
        raise ValueError(
            f"an empty or ragged {batch.forward_mode.name} batch needs SpecInfo.num_draft_tokens to know its rows per request"
        )
    return batch.spec_info.num_draft_tokens


def key_lens(batch: ForwardBatch, attention: DraftAttention = DraftAttention.MHA) -> Tensor:
    """Return the number of keys that each request's last query row sees: ``[batch_size]`` int32, in a new tensor."""
    if batch.forward_mode.query_rows.are_bounded:
        return (batch.seq_lens + device_lengths(batch, "extend_seq_lens")).to(torch.int32)
    return (batch.seq_lens + uncounted_tokens(batch, attention)).to(torch.int32)


def seen_by_rows(batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return (request, seen, is_padding), each ``[num_rows]``. `request` is the index of a row's request; padding rows have the
    last request's. `seen` is the number of the request's tokens up to the row's own. In a draft step it does not count draft
    tokens, as in SGLang's MLA backend. `is_padding` marks padding rows, whose `seen` has no meaning.
    """
    keys, mode = key_lens(batch, DraftAttention.MLA), batch.forward_mode
    if mode.query_rows.in_extend_seq_lens:
        ends = device_lengths(batch, "extend_seq_lens").cumsum(0)
    else:
        ends = torch.full_like(keys, max_query_rows(batch)).cumsum(0)
    is_of_requests = mode.query_rows is QueryRows.ONE or not batch.batch_size
    row = torch.arange(batch.batch_size if is_of_requests else batch.num_tokens, device=keys.device)
    request = torch.searchsorted(ends, row, right=True)
    is_padding = request == batch.batch_size
    request = request.clamp(max=batch.batch_size - 1)
    return request, (keys[request] - (ends[request] - 1 - row)).clamp(min=0), is_padding


def uncounted_tokens(batch: ForwardBatch, attention: DraftAttention = DraftAttention.MHA) -> int:
    """Return how many keys of each request ``seq_lens`` does not count, such as draft tokens. In a ragged verification the
    number differs from request to request (``extend_seq_lens``), and the result is its upper bound.
    """
    if batch.writes_no_kv and attention.is_mla:
        raise ValueError("a frozen-KV draft runs on MHA (SGLang 0.5.23): MLA's draft steps are numbered from 0")
    mode, uncounted = batch.forward_mode, batch.forward_mode.uncounted
    if uncounted is UncountedTokens.QUERY_ROWS:
        return num_draft_tokens(batch) if mode.query_rows.are_bounded else max_query_rows(batch)
    if uncounted is UncountedTokens.DRAFT_STEP and batch.spec_info is not None:
        if batch.spec_info.speculative_step_id is None:
            raise ValueError(
                f"{batch.forward_mode!r} with a SpecInfo is a draft step and needs SpecInfo.speculative_step_id; "
                "a normal decode has spec_info=None"
            )
        return attention.seq_len_offset(batch.spec_info.speculative_step_id)
    return 0


def pad_requests(batch: ForwardBatch, batch_size: int) -> ForwardBatch:
    """Append padding requests of one token, so that the batch has `batch_size` requests. SGLang 0.5.23 does so for data
    parallelism (`ForwardBatch.prepare_mlp_sync_batch`), sometimes after it has built the metadata.
    """
    mode, num_padding = batch.forward_mode, batch_size - batch.batch_size
    if not mode.query_rows.are_uniform or num_padding < 0:
        raise ValueError(
            f"{mode!r} of {batch.batch_size} requests is not padded to {batch_size}: only modes with as many rows for every "
            "request are, and to more requests"
        )
    return with_padding_requests(batch, num_padding, PADDED_SEQ_LEN, max_query_rows(batch))


def with_padding_requests(batch: ForwardBatch, num_padding: int, seq_len: int, width: int) -> ForwardBatch:
    """Append `num_padding` requests with `seq_len` tokens and `width` query rows each. They have row 0 of the request table,
    and slot 0 for K and V of all their query rows.
    """

    def padded(lengths: Tensor, value: int = 0, each: int = 1) -> Tensor:
        return torch.nn.functional.pad(lengths, (0, num_padding * each), value=value)

    def padded_list(lengths: Sequence[int] | None, value: int = 0) -> Sequence[int] | None:
        return None if lengths is None else [*lengths, *[value] * num_padding]

    return replace(
        batch,
        req_pool_indices=padded(batch.req_pool_indices),
        seq_lens=padded(batch.seq_lens, seq_len),
        out_cache_loc=batch.out_cache_loc if batch.writes_no_kv else padded(batch.out_cache_loc, each=width),
        num_tokens=batch.num_tokens + num_padding * width,
        extend_seq_lens=None if batch.extend_seq_lens is None else padded(batch.extend_seq_lens, width),
        extend_prefix_lens=None if batch.extend_prefix_lens is None else padded(batch.extend_prefix_lens),
        extend_seq_lens_cpu=padded_list(batch.extend_seq_lens_cpu, width),
        extend_prefix_lens_cpu=padded_list(batch.extend_prefix_lens_cpu),
        seq_lens_cpu=padded_list(batch.seq_lens_cpu, seq_len),
    )


def exclusive_cumsum(lengths: Tensor) -> Tensor:
    """Return 0 followed by the running sum of the lengths: int32 ``[n + 1]`` for any integer dtype ``[n]``."""
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))


def uniform_boundaries(batch_size: int, q_len: int, device: torch.device) -> Tensor:
    return torch.arange(0, batch_size * q_len + 1, q_len, dtype=torch.int32, device=device)


def first_slots(rows: Tensor, cache_seqlens: Tensor, pool: KVPool) -> Tensor:
    """Return the slot of the first token of each page: ``[batch_size, block_table_width]`` int32; 0 after a request's last
    page. `rows` are the requests' rows in the request table, `cache_seqlens` their numbers of keys.
    """
    slots = pool.req_to_token[:, :: pool.page_size].index_select(0, rows)
    columns = torch.arange(pool.block_table_width, device=pool.device)
    return slots.masked_fill(columns >= num_pages(cache_seqlens, pool.page_size)[:, None], 0)


def num_pages(cache_seqlens: Tensor, page_size: int) -> Tensor:
    return (cache_seqlens + (page_size - 1)) // page_size
