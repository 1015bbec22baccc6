"""Block-sparse decode: lengths and copied pages against loops, attention against histories, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import lab.references
from lab.metadata import ForwardBatch, ForwardMode, KVLayout
from lab.metadata.mha.backend import AttentionLayer
from lab.metadata.mha.block_sparse import BlockSparseBackend, build_block_sparse_metadata, copy_selected_pages, num_seen
from lab.references.forward_metadata import block_sparse_forward_metadata
from tests.metadata.batches import Case, build
from tests.metadata.host_reads import ForbidHostReads

HEADS, GROUP, DIM = 2, 2, 16
LAYER = AttentionLayer(0.3)
LENGTHS = (1, 127, 128, 129, 2048, 2049, 2300, 2175)


def case_of(mode: ForwardMode, **fields: Any) -> Case:
    new = 3 if mode is ForwardMode.TARGET_VERIFY else 0
    totals = tuple(length + new for length in LENGTHS)
    return Case(mode, totals, new=new, page_size=128, max_context_len=2400, sliding_window=False, **fields)


def select(batch: ForwardBatch, generator: torch.Generator) -> Tensor:
    """Draw pages as MSA-v1's indexer gives them: earlier pages in any order, the row's own page, then -1."""
    counts = range(1, 4) if batch.forward_mode is ForwardMode.TARGET_VERIFY else range(1)
    own = [(length + count - 1) // 128 for length in batch.seq_lens.tolist() for count in counts]

    def row(page: int) -> list[int]:
        earlier = torch.randperm(page, generator=generator)[:15].tolist()
        return [*earlier, page, *[-1] * (15 - len(earlier))]

    return torch.tensor([[row(page) for page in own] for _ in range(HEADS)], dtype=torch.int32)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_attention_over_the_selected_pages(mode: ForwardMode, layout: KVLayout) -> None:
    batch, pool = build(case_of(mode))
    generator = torch.Generator().manual_seed(0)
    topk = select(batch, generator)
    with ForbidHostReads():
        metadata = build_block_sparse_metadata(batch, pool, HEADS)
    expected_lens, expected_slots = block_sparse_forward_metadata(batch, pool, topk)
    assert metadata.seq_lens.tolist() == [expected_lens] * HEADS
    assert list(map(num_seen, metadata.query_seq_lens.tolist())) == expected_lens
    assert {metadata.seq_lens.dtype, metadata.block_tables.dtype, metadata.page_table.dtype} == {torch.int32}
    assert metadata.seq_lens.is_contiguous()
    assert metadata.block_tables.is_contiguous()
    cache = pool.new_cache(HEADS, DIM, torch.float64, layout)
    cache.storage.normal_(generator=generator)
    rows = len(expected_lens)
    query = torch.randn(rows + 2, HEADS * GROUP, DIM, dtype=torch.float64, generator=generator)
    out = torch.full_like(query, 9.0)
    selected = torch.zeros_like(topk)
    attend = BlockSparseBackend(lab.references).prepare_attention(
        batch, metadata, LAYER, query, cache, out=out, topk_indices=selected
    )
    selected.copy_(topk)
    attend()
    assert not out[rows:].any()
    k, v = (side.transpose(1, 2).reshape(-1, HEADS, DIM) for side in cache.as_hnd())
    for row in range(rows):
        for head in range(HEADS):
            own, of_head = expected_slots[head][row], slice(head * GROUP, (head + 1) * GROUP)
            weights = torch.softmax(0.3 * query[row, of_head] @ k[own, head].T, dim=-1)
            torch.testing.assert_close(out[row, of_head], weights @ v[own, head], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_tokens_that_a_row_does_not_see_are_zeros(dtype: torch.dtype) -> None:
    batch, pool = build(Case(ForwardMode.DECODE, (130, 1), page_size=128, max_context_len=300, sliding_window=False))
    batch.seq_lens[1] = 0
    metadata = build_block_sparse_metadata(batch, pool, 1)
    assert metadata.seq_lens.tolist() == [[130, 1]]
    topk = torch.full((1, 2, 16), -1, dtype=torch.int32)
    topk[0, 0, :3] = torch.tensor([1, 0, 7])
    topk[0, 1, 0] = 0
    cache = pool.new_cache(1, 8, dtype, KVLayout.NHD)
    cache.storage.copy_(torch.full(cache.storage.shape, 2.0))
    compact = torch.full((2, 2, 1, 16, 128, 8), math.nan).to(dtype)
    copy_selected_pages(metadata, topk, cache, compact)
    seen = compact.float().eq(2.0).all(-1)
    assert seen[:, 0, 0, 0].sum(-1).tolist() == [2, 2]
    assert seen[:, 0, 0, 1].all()
    assert not compact[:, 0, 0, 2:].float().any(), "pages beyond the table and -1"
    assert not compact[:, 1].float().any(), "a row that sees no token"
