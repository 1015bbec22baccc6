"""The metadata of one speculative iteration (draft, verify and draft extend) in one launch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lab.metadata.engine.backend import prepare_passes
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends
from lab.metadata.mha.metadata import TRTLLMMHAMetadata


@dataclass(frozen=True, eq=False)
class PreparedIteration:
    """The metadata of every pass of one speculative iteration, and a function `write` that fills it from the current contents
    of the batch's tensors.

    Attributes:
        draft_steps: metadata of one decode pass per step, with lengths ``seq_lens + step + 1``.
        target_verify: metadata of the verify pass, with lengths ``seq_lens + d``.
        draft_extend: metadata of DRAFT_EXTEND_V2, with the same lengths: the ``seq_lens`` of a DRAFT_EXTEND_V2 batch already
            count the draft tokens.
        write: fills all metadata in one launch.
    """

    draft_steps: tuple[TRTLLMMHAMetadata, ...]
    target_verify: TRTLLMMHAMetadata
    draft_extend: TRTLLMMHAMetadata
    write: Callable[[], None]


def prepare_iteration(
    verify: ForwardBatch, pool: KVPool, *, speculative_num_steps: int, share_table: bool = True
) -> PreparedIteration:
    """Allocate the metadata of all passes of a speculative iteration, and prepare the launch that fills it.

    All inputs of the metadata are known before the draft runs: no pass depends on which tokens are drafted or accepted.

    Args:
        verify: a TARGET_VERIFY batch, which defines requests, lengths and draft width of all passes. ``seq_lens`` stops at the
            last accepted token.
        pool: the request table and slots, without sliding-window pages. In SGLang, draft and target share table and slots, but
            not caches.
        speculative_num_steps: number of draft steps, one more than the draft's decode passes.
        share_table: use one page table for all passes, because their pages are the same. It has the pages of the longest pass.

    Raises:
        ValueError: the batch has another mode or device or is empty, or the pool has sliding-window pages.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_attends(verify, pool)
    if verify.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
        raise ValueError(f"{verify.forward_mode!r}: an iteration is prepared from its TARGET_VERIFY batch")
    if pool.full_to_swa is not None:
        raise ValueError("the pool has sliding-window pages, which a draft model's passes do not use: make one without")
    if verify.batch_size == 0:
        raise ValueError("the batch is empty: an iteration needs a request")
    bs, rows = verify.batch_size, verify.num_tokens // verify.batch_size
    shared = torch.empty(bs, pool.block_table_width, dtype=torch.int32, device=pool.device) if share_table else None
    # Uncounted tokens and query rows of each pass.
    facts = [*((step + 1, 1) for step in range(speculative_num_steps - 1)), (rows, rows), (rows, rows)]
    passes = [
        TRTLLMMHAMetadata.allocate(pool, bs, width, bs * width, new=torch.empty, page_table=shared)
        for _, width in facts
    ]
    written = [each.pass_buffers(offset, width) for each, (offset, width) in zip(passes, facts, strict=True)]
    *draft_steps, target_verify, draft_extend = passes
    return PreparedIteration(tuple(draft_steps), target_verify, draft_extend, prepare_passes(written, verify, pool))
