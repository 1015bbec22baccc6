"""MHA's metadata where it differs from MLA's, worked out by hand; `test_either_backend.py` has every mode."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, KVPool, TRTLLMMHAMetadata, build_mha_metadata
from lab.references.forward_metadata import encoder_only_verify
from tests.metadata.batches import DRAFT_EXTENDS, EXTENDS, Case, all_modes, assert_live_pages_right, build, label
from tests.metadata.test_either_backend import assert_mha_right


def built(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Build metadata that the loops find right."""
    got = build_mha_metadata(batch, pool)
    assert_mha_right(got, batch, pool)
    return got


def hand_made_pool() -> KVPool:
    """Pages of 4 tokens, contexts of 18: tables are 5 wide. Row 1 has pages 7 2 5 3 9, row 2 has 4 1 8 6 10.

    The window pool holds pages 2 and 5 of row 1 (as 3 and 1) and 8 and 6 of row 2 (as 2 and 4).
    """
    pool = KVPool(num_requests=2, max_context_len=18, page_size=4, num_pages=11, swa_num_pages=5)
    for row, pages in ((1, (7, 2, 5, 3, 9)), (2, (4, 1, 8, 6, 10))):
        for position in range(18):
            pool.req_to_token[row, position] = pages[position // 4] * 4 + position % 4
    for page, swa_page in ((2, 3), (5, 1), (8, 2), (6, 4)):
        pool.full_to_swa[page * 4 : page * 4 + 4] = torch.arange(swa_page * 4, swa_page * 4 + 4)
    return pool


def hand_made_batch(mode: ForwardMode, rows: list[int], seq_lens: list[int], slots: list[int]) -> ForwardBatch:
    return ForwardBatch(mode, torch.tensor(rows), torch.tensor(seq_lens), torch.tensor(slots), num_tokens=len(slots))


DECODE, IDLE, VERIFY = ForwardMode.DECODE, ForwardMode.IDLE, ForwardMode.TARGET_VERIFY
NO_PAGES = [0] * 5


@pytest.mark.parametrize(
    ("batch", "keys", "tables", "swa_tables", "swa_slots"),
    [
        (
            hand_made_batch(DECODE, [2, 1], [8, 9], [9, 22]),
            [0, 8, 17],
            [[4, 1, 0, 0, 0], [7, 2, 5, 0, 0]],
            [NO_PAGES, [0, 3, 1, 0, 0]],
            [13, 6],
        ),
        # A slot of -1 stays -1; a request's capacity is 18 tokens.
        (
            hand_made_batch(VERIFY, [2, 1], [15, 6], [9, 22, -1, 0, 0, 0]),
            [0, 18, 27],
            [[4, 1, 8, 6, 10], [7, 2, 5, 0, 0]],
            [[0, 0, 2, 4, 0], [0, 3, 1, 0, 0]],
            [13, 6, -1, 0, 0, 0],
        ),
        # Padded rows have a length of 0, or below it, and no pages.
        (hand_made_batch(IDLE, [2, 1], [0, -2], [9, 22]), [0, 0, -2], [NO_PAGES] * 2, [NO_PAGES] * 2, [13, 6]),
        # One request at two lengths, around padding of row 0 and length 1, as SGLang's graph runner fills it.
        (
            hand_made_batch(VERIFY, [1, 0, 1], [3, 1, 14], [31, 0, 14]),
            [0, 4, 6, 21],
            [[7, 0, 0, 0, 0], NO_PAGES, [7, 2, 5, 3, 0]],
            [NO_PAGES, NO_PAGES, [0, 3, 1, 0, 0]],
            [0, 0, 0],
        ),
    ],
)
def test_by_hand(batch: ForwardBatch, keys: list[int], tables: Any, swa_tables: Any, swa_slots: list[int]) -> None:
    got = built(batch, hand_made_pool())
    assert got.cu_seqlens_k.tolist() == keys
    assert (got.page_table.tolist(), got.swa_page_table.tolist()) == (tables, swa_tables)
    assert got.swa_out_cache_loc.tolist() == swa_slots


def test_unmapped_slots_stay_minus_one_and_lengths_beyond_the_context_are_clamped_to_the_table() -> None:
    pool = hand_made_pool()
    pool.full_to_swa[32:36] = -1
    got = built(hand_made_batch(DECODE, [2, 1], [9, 99], [9, 22]), pool)
    assert got.swa_page_table.tolist() == [[0, 0, -1, 0, 0], [0, 3, 1, 0, 0]]


@pytest.mark.parametrize("mode", EXTENDS + DRAFT_EXTENDS)
def test_without_any_prefix_the_query_boundaries_of_a_prefill_are_the_key_boundaries(mode: ForwardMode) -> None:
    """A draft extend has its own boundaries, and never needs prefixes."""
    batch, pool = build(Case(mode, (20, 3), (20, 3)))
    unlisted = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    for each in (batch, unlisted):
        got = built(each, pool)
        assert (got.cu_seqlens_q is got.cu_seqlens_k) is mode.is_prefill
    one_prefix = built(*build(Case(mode, (20, 3), (20, 2))))
    assert (one_prefix.cu_seqlens_q.tolist(), one_prefix.cu_seqlens_k.tolist()) == ([0, 20, 22], [0, 20, 23])


@pytest.mark.parametrize("case", all_modes(), ids=label)
def test_a_verification_alone_has_its_rows_as_requests_for_encoder_only_layers(case: Case) -> None:
    batch, pool = build(case)
    got, plain = (build_mha_metadata(batch, pool, expand_encoder_only_verify=expand) for expand in (True, False))
    assert plain.encoder_cache_seqlens is plain.encoder_page_table is None
    assert torch.equal(got.page_table, plain.page_table)
    if case.mode is not VERIFY:
        assert got.encoder_cache_seqlens is got.encoder_page_table is None
        return
    keys, pages = encoder_only_verify(batch, pool)
    assert (got.encoder_cache_seqlens.dtype, got.encoder_cache_seqlens.tolist()) == (torch.int32, keys)
    assert got.encoder_page_table.is_contiguous()
    assert_live_pages_right(got.encoder_page_table, pages)
