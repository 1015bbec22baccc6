"""One speculative iteration's metadata, draft, verify and draft extend, in one launch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends
from lab.metadata.mha.metadata import TRTLLMMHAMetadata


@dataclass(frozen=True, eq=False)
class PreparedIteration:
    """Metadata of every pass of one iteration, which each call of `write` makes anew from what the batch then holds.

    Attributes:
        draft_steps: one decode pass each, lengths ``seq_lens + step + 1``.
        target_verify: lengths ``seq_lens + d``.
        draft_extend: DRAFT_EXTEND_V2; the same lengths, which its own batch's ``seq_lens`` already count.
        write: one launch.
    """

    draft_steps: tuple[TRTLLMMHAMetadata, ...]
    target_verify: TRTLLMMHAMetadata
    draft_extend: TRTLLMMHAMetadata
    write: Callable[[], None]


def prepare_iteration(
    verify: ForwardBatch, pool: KVPool, *, speculative_num_steps: int, share_table: bool = True
) -> PreparedIteration:
    """Allocate and prepare the metadata of an iteration whose requests, lengths and draft width a verify batch names.

    Everything that it needs is known before the draft runs: no pass depends on which tokens are drafted or accepted.

    Args:
        verify: a TARGET_VERIFY batch; ``seq_lens`` stops at the last accepted token.
        pool: that draft and target share, as they do in SGLang; without sliding-window pages.
        speculative_num_steps: one draft step more than decode passes.
        share_table: one page table for all passes, whose pages are the same. It then has the pages of the longest.

    Raises:
        ValueError: another mode or device, or a pool with sliding-window pages.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_attends(verify, pool)
    if verify.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
        raise ValueError(f"{verify.forward_mode!r}: an iteration is prepared from its TARGET_VERIFY batch")
    if pool.full_to_swa is not None:
        raise ValueError("the pool has sliding-window pages, which a draft model's passes do not use: make one without")
    if verify.batch_size == 0:
        raise ValueError("the batch is empty: an iteration needs a request")
    rows = verify.num_tokens // verify.batch_size
    shared = _empty(pool, verify.batch_size, pool.block_table_width) if share_table else None
    drafts = [_pass(verify, pool, step + 1, 1, shared) for step in range(speculative_num_steps - 1)]
    both = [_pass(verify, pool, rows, rows, shared) for _ in range(2)]
    write = prepare_write_forward_metadata(
        [*drafts, *both],
        req_pool_indices=verify.req_pool_indices,
        seq_lens=verify.seq_lens,
        req_to_token=pool.req_to_token,
        page_size=pool.page_size,
    )
    target_verify, draft_extend = (_metadata(each, rows) for each in both)
    return PreparedIteration(tuple(_metadata(each, 1) for each in drafts), target_verify, draft_extend, write)


def _empty(pool: KVPool, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device=pool.device)


def _pass(batch: ForwardBatch, pool: KVPool, offset: int, rows: int, shared: Tensor | None) -> PassBuffers:
    bs = batch.batch_size
    return PassBuffers(
        cache_seqlens=_empty(pool, bs),
        cu_seqlens_k=_empty(pool, bs + 1),
        cu_seqlens_q=_empty(pool, bs + 1),
        page_table=_empty(pool, bs, pool.block_table_width) if shared is None else shared,
        seq_len_offset=offset,
        query_rows=rows,
    )


def _metadata(written: PassBuffers, rows: int) -> TRTLLMMHAMetadata:
    assert written.cu_seqlens_q is not None
    assert written.cu_seqlens_k is not None
    assert written.page_table is not None
    return TRTLLMMHAMetadata(
        written.cache_seqlens, rows, written.cu_seqlens_q, written.cu_seqlens_k, written.page_table
    )
