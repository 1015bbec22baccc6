"""The block-sparse decode of SGLang's MiniMax-M3 backend (MSA-v1): each K/V head of a query row attends to 16 selected pages.

* indexer: the part of the model that selects pages. Its output is an input here.
* compact cache: a copy of the selected pages of all rows and K/V heads, which lie next to each other.

In the call every query row is a request of its own. The compact cache of a row has 16 pages of K/V head 0, then 16 pages of
head 1, and so on. The call's ``kv_cache`` is a view of the compact cache with pages of all K/V heads, in which the stride
between heads is 16 pages. So these pages overlap in memory, and one constant block table serves all heads.

The sources in SGLang 0.5.23 are `minimax_sparse_ops/msa_plan.py` in `sglang/srt/layers/attention/`, `flashinfer_decode.py` and
`decode_plan.py` in `sglang/kernels/ops/attention/msa_v1/`, and `dequant.cuh`. SGLang makes e4m3 from NVFP4 as it copies; here
the copy has the cache's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import RebuildingBackend, in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, first_slots, key_lens, max_query_rows
from lab.metadata.mha.backend import AttentionLayer

PAGE_SIZE = 128  # tokens; MSA-v1 has no other
NUM_PAGES = 16  # largest number of pages that a row selects


@dataclass(frozen=True, eq=False)
class BlockSparseMetadata:
    """The lengths and page tables of block-sparse decode calls, in which each K/V head attends to at most 16 selected pages."""

    page_table: Tensor  #: ``[num_rows, width]`` int32, the pages of each row's request
    query_seq_lens: Tensor  #: ``[num_rows]`` int32, how many tokens each row sees, 0 or more
    #: ``[num_kv_heads, num_rows]`` int32, the call's ``seq_lens``: how many tokens a row sees in its selected pages. It is 1
    #: for a row that sees none, because FlashInfer does not write a row without keys; K and V of that token are zeros
    seq_lens: Tensor
    block_tables: Tensor  #: ``[num_kv_heads, num_rows, 16]`` int32, pages of the compact cache


def num_seen(num_tokens: int) -> int:
    """Return how many of a request's `num_tokens` tokens its last query row sees in at most 16 pages of 128 tokens."""
    return num_tokens - max((num_tokens - 1) // PAGE_SIZE - (NUM_PAGES - 1), 0) * PAGE_SIZE


def build_block_sparse_metadata(batch: ForwardBatch, pool: KVPool, num_kv_heads: int) -> BlockSparseMetadata:
    """Build the metadata of one eager pass in new tensors, without reading the device on the host (SGLang 0.5.23).

    Row j of a verification, from 0, sees ``seq_lens + j + 1`` tokens. A row that sees p pages selects min(p, 16) pages: its own
    page, and earlier pages, which are full. Each of the `num_kv_heads` K/V heads selects its own pages.
    """
    check_attends(batch, pool)
    rows, is_draft = batch.forward_mode.query_rows, batch.spec_info is not None
    if rows not in (QueryRows.ONE, QueryRows.DRAFT_TOKENS) or (rows is QueryRows.ONE and is_draft):
        raise ValueError(f"{batch.forward_mode!r} of this kind is no block-sparse decode: decode and TARGET_VERIFY are")
    if pool.page_size != PAGE_SIZE:
        raise ValueError(f"page_size={pool.page_size}: block-sparse decode has pages of {PAGE_SIZE} tokens")
    keys, width = key_lens(batch), max_query_rows(batch)
    lens = (keys[:, None] - torch.arange(width - 1, -1, -1, device=pool.device)).flatten().clamp(min=0).to(torch.int32)
    skipped_pages = ((lens - 1) // PAGE_SIZE - (NUM_PAGES - 1)).clamp(min=0)
    first_page = torch.arange(len(lens), dtype=torch.int32, device=pool.device) * (num_kv_heads * NUM_PAGES)
    tables = first_page[:, None] + torch.arange(NUM_PAGES, dtype=torch.int32, device=pool.device)
    return BlockSparseMetadata(
        page_table=pool.pages(first_slots(batch.req_pool_indices, keys, pool)).repeat_interleave(width, dim=0),
        query_seq_lens=lens,
        seq_lens=(lens - skipped_pages * PAGE_SIZE).clamp(min=1).repeat(num_kv_heads, 1),
        block_tables=tables.repeat(num_kv_heads, 1, 1),
    )


def copy_selected_pages(
    metadata: BlockSparseMetadata, topk_pages: Tensor, cache: PagedKVCache, compact: Tensor
) -> None:
    """Copy the selected pages of all query rows into `compact`, ``[2, num_rows, num_kv_heads, 16, 128, head_dim]``, with zeros
    in place of tokens that a row does not see.

    `topk_pages`, ``[num_kv_heads, num_rows, 16]`` int32, has the pages that the model's indexer selected, as columns of the
    row's page table: earlier pages in any order, then the page of the row's token, then -1.
    """
    selected, table = topk_pages.transpose(0, 1).long(), metadata.page_table
    is_page = (selected >= 0) & (selected < table.shape[1])
    logical = selected.masked_fill(~is_page, 0)
    physical = table.gather(1, logical.flatten(1)).view_as(selected).long()
    token = logical[..., None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=table.device)
    is_seen = is_page[..., None] & (token < metadata.query_seq_lens[:, None, None, None])
    head = torch.arange(selected.shape[1], device=table.device)[:, None]
    for side, own in zip(compact, cache.as_hnd(), strict=True):
        pages = own[physical, head]
        side.view(torch.uint8).copy_(pages.view(torch.uint8).masked_fill(~is_seen[..., None], 0))


def as_pages(compact: Tensor) -> tuple[Tensor, Tensor]:
    """Return the copied pages `compact` as ``kv_cache``: HND views (K, V). Page p of head h is page p + 16 of head h - 1."""
    _, rows, heads, _, _, head_dim = compact.shape
    shape = ((rows - 1) * heads * NUM_PAGES + NUM_PAGES, heads, PAGE_SIZE, head_dim)
    stride = PAGE_SIZE * head_dim
    k, v = (side.as_strided(shape, (stride, NUM_PAGES * stride, head_dim, 1)) for side in compact)
    return k, v


@dataclass(frozen=True, eq=False)
class BlockSparseBackend(RebuildingBackend[BlockSparseMetadata]):
    """Builds metadata and makes block-sparse decode calls as SGLang's MiniMax-M3 backend (MSA-v1) does."""

    implementation: Any = None  #: any object with FlashInfer's decode function, such as `lab.references`
    num_kv_heads: int = 1

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> BlockSparseMetadata:
        return build_block_sparse_metadata(batch, pool, self.num_kv_heads)

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: BlockSparseMetadata,
        layer: AttentionLayer,
        query: Tensor,
        cache: PagedKVCache,
        *,
        max_context_len: int | None = None,
        out: Tensor,
        topk_indices: Tensor,
    ) -> Callable[[], Tensor]:
        """Return a function that copies the selected pages, computes one layer's attention over them and writes `out`.
        `topk_indices`, ``[num_kv_heads, num_rows, 16]`` int32, has the selected pages (`copy_selected_pages`). Of `layer` only
        `softmax_scale` is used. Rows of `out` beyond the rows in `metadata` become 0.
        """
        rows, heads, count = len(metadata.query_seq_lens), *metadata.block_tables.shape[::2]
        if rows == 0:
            return out.zero_
        compact = cache.storage.new_empty(2, rows, heads, count, PAGE_SIZE, query.shape[-1])
        call = prepare(
            self.implementation,
            AttentionCall.DECODE.value,
            query=query[:rows],
            kv_cache=as_pages(compact),
            workspace_buffer=None,
            block_tables=metadata.block_tables,
            seq_lens=metadata.seq_lens,
            max_seq_len=NUM_PAGES * PAGE_SIZE,
            bmm1_scale=layer.softmax_scale,
            bmm2_scale=1.0,
            out=out[:rows],
            q_len_per_req=1,
            enable_block_sparse_attention=True,
        )
        copy = partial(copy_selected_pages, metadata, topk_indices, cache, compact)
        return in_turn([copy, call, out[rows:].zero_], out)
