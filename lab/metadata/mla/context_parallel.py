"""The metadata of decode context parallelism (DCP): each GPU of a group has a part of every request's tokens.

* owner: the token at position p of a request belongs to rank p % size. Each rank has all query heads.
* widened pool: the pool from which the engine allocates. A page of it has ``size`` times as many tokens as a page of one GPU's
  cache. Slot s of the pool is slot s // size of rank s % size, so that a page has the same index on all GPUs.

The sources in SGLang 0.5.23 are `_get_dcp_local_seq_lens`, `_fill_dcp_block_kv_indices` and `_forward_decode_dcp` of
`trtllm_mla_backend.py`, and for selected entries `dsa/dsa_dcp.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.calls.entries import entries_first
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, check_attends, key_lens, max_query_rows, uncounted_tokens
from lab.metadata.mla.metadata import (
    TRTLLMMLADecodeMetadata,
    check_mla,
    longest_request,
    mla_block_table,
    mla_block_table_width,
)


@dataclass(frozen=True)
class DecodeContextParallel:
    """One GPU of a group that divides each request's tokens: the number of GPUs in the group, and this GPU's number (rank)."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} of size={self.size}: a group has 2 GPUs or more, ranks 0 to size - 1")

    def local_lens(self, lens: Tensor) -> Tensor:
        """Return how many of each request's first ``lens[i]`` tokens this rank owns, in a new int32 tensor."""
        return ((lens - self.rank + self.size - 1) // self.size).clamp(min=0).to(torch.int32)

    def own_entries(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return (slots, counts) of the selected entries that this rank's cache has (SGLang's
        `transform_index_page_table_dcp`).

        `places`, int32 ``[num_rows, columns]``, has slots of the whole group's pool, and -1 for no entry. ``slots`` has the
        slots of the rank's entries in the rank's cache, in the same shape and order, then -1. ``counts`` is their number, int32
        ``[num_rows]``.
        """
        is_own = (places >= 0) & (places % self.size == self.rank)
        return entries_first(torch.where(is_own, places // self.size, -1)), is_own.sum(dim=1, dtype=torch.int32)


def page_size_of_rank(pool: KVPool, size: int) -> int:
    """Return how many tokens of a page each GPU has, if `size` GPUs divide each page of `pool` equally."""
    if pool.page_size % size:
        raise ValueError(
            f"page_size={pool.page_size} is no multiple of the {size} GPUs: widen the pool's pages by their number"
        )
    return pool.page_size // size


def build_mla_dcp_metadata(
    batch: ForwardBatch, pool: KVPool, dcp: DecodeContextParallel, attention: DraftAttention = DraftAttention.MLA
) -> TRTLLMMLADecodeMetadata:
    """Build one rank's metadata of an eager decode, draft step or verification with decode context parallelism (SGLang 0.5.23).
    `batch` and `pool` have the slots and lengths of the whole group. A page of the pool has p = 32 or 64 tokens per GPU.

    ``seq_lens_k`` counts the keys of each request that the rank owns, 0 or more; ``global_seq_lens_k`` counts the keys on all
    ranks. Column c of the block table has ``req_to_token[request, rank + c * size * p] // size // p`` for each page with a
    token of the rank, then -1.
    """
    page_size = page_size_of_rank(pool, dcp.size)
    check_mla(pool, attention, page_size)
    check_attends(batch, pool)
    if batch.forward_mode.query_rows not in (QueryRows.ONE, QueryRows.DRAFT_TOKENS):
        raise ValueError(f"{batch.forward_mode!r} is not modelled with DCP: decode, draft steps and TARGET_VERIFY are")
    keys = key_lens(batch, attention)
    most = longest_request(batch, pool) + uncounted_tokens(batch, attention)
    own = dcp.local_lens(keys)
    # `live` tokens need as many pages of the widened pool as the rank's `own` tokens need of its cache.
    live = own * dcp.size
    width = mla_block_table_width(most, page_size)
    return TRTLLMMLADecodeMetadata(
        block_kv_indices=mla_block_table(batch.req_pool_indices, live, live, pool, width),
        seq_lens_k=own,
        max_seq_len_k=max((most - dcp.rank + dcp.size - 1) // dcp.size, 1),  # the kernel requires 1 or more
        max_seq_len_q=max_query_rows(batch),
        global_seq_lens_k=keys,
    )
