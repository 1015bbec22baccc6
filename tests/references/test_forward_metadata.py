"""The reference metadata of every mode, against numbers that were worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.references.forward_metadata import (
    MLAForwardMetadata,
    encoder_only_verify,
    forward_metadata,
    live_pages,
    mla_dcp_metadata,
    mla_forward_metadata,
    mla_prefix_chunks,
    zigzag_forward_metadata,
)

PAGE_SIZE = 4
# Row 1 has the slots of pages 5, 2, 7, 1 and row 2 those of 3, 6, 4, 8.
ROWS = {1: (5, 2, 7, 1), 2: (3, 6, 4, 8)}
SWA_PAGE = {5: 1, 2: 3, 3: 2}  # by full page; 0, the sink, for the rest


def pool(has_swa: bool = False, v2p: list[int] | None = None) -> Any:
    table = torch.zeros(3, 16, dtype=torch.int32)
    for row, pages in ROWS.items():
        table[row] = torch.tensor([page * PAGE_SIZE + offset for page in pages for offset in range(PAGE_SIZE)])
    swa = [SWA_PAGE.get(slot // PAGE_SIZE, 0) * PAGE_SIZE + slot % PAGE_SIZE for slot in range(9 * PAGE_SIZE)]
    return SimpleNamespace(
        req_to_token=table,
        page_size=PAGE_SIZE,
        max_context_len=14,
        full_to_swa=torch.tensor([*swa, -1]) if has_swa else None,
        v2p=None if v2p is None else torch.tensor(v2p),
    )


def batch(mode: str, seq_lens: list[int], rows: list[int] | None = None, **given: Any) -> Any:
    """Requests in rows 1 and 2; `rows` are their query rows, where the mode does not say them."""
    count = len(seq_lens) if rows is None else sum(rows)
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        req_pool_indices=torch.tensor([1, 2][: len(seq_lens)]),
        seq_lens=torch.tensor(seq_lens),
        extend_seq_lens=None if rows is None else torch.tensor(rows),
        num_tokens=given.pop("num_tokens", count),
        out_cache_loc=torch.tensor(given.pop("out_cache_loc", [5 * PAGE_SIZE, 3 * PAGE_SIZE + 1])),
        **{"spec_info": None} | given,
    )


STEP = {"spec_info": SimpleNamespace(speculative_step_id=1, num_draft_tokens=3)}


@pytest.mark.parametrize(
    ("given", "keys", "rows"),
    [
        (batch("DECODE", [4, 5]), [4, 5], [1, 1]),
        (batch("IDLE", [4, 5]), [4, 5], [1, 1]),
        (batch("DECODE", [4, 5], **STEP), [6, 7], [1, 1]),
        (batch("TARGET_VERIFY", [4, 5], num_tokens=6, **STEP), [7, 8], [3, 3]),
        (batch("RAGGED_VERIFY", [4, 5], [2, 1], **STEP), [6, 6], [2, 1]),
        (batch("DRAFT_EXTEND", [4, 5], [2, 1], **STEP), [4, 5], [2, 1]),
        (batch("EXTEND", [4, 5], [3, 5]), [4, 5], [3, 5]),
    ],
)
def test_lengths_and_rows_of_each_mode(given: Any, keys: list[int], rows: list[int]) -> None:
    metadata = forward_metadata(given, pool())
    assert metadata.cache_seqlens == keys
    assert metadata.max_seq_len_q == max(rows)
    assert metadata.cu_seqlens_q == [0, rows[0], sum(rows)]
    assert metadata.cu_seqlens_k == [0, keys[0], sum(keys)]
    pages = [ROWS[row][: -(-count // PAGE_SIZE)] for row, count in zip((1, 2), keys, strict=True)]
    assert metadata.page_table == [list(each) for each in pages]
    assert metadata.swa_page_table is metadata.swa_out_cache_loc is None


@pytest.mark.parametrize(("mode", "rows"), [("DECODE", 1), ("IDLE", 1), ("TARGET_VERIFY", 3), ("EXTEND", 0)])
def test_an_empty_batch_has_the_rows_that_its_mode_states(mode: str, rows: int) -> None:
    empty = batch(mode, [], out_cache_loc=[], **STEP)
    assert forward_metadata(empty, pool()).max_seq_len_q == rows


def test_a_window_has_pages_and_locations_of_its_own() -> None:
    metadata = forward_metadata(batch("DECODE", [5, 8], num_tokens=3), pool(has_swa=True))
    assert metadata.page_table == [[5, 2], [3, 6]]
    assert metadata.swa_page_table == [[1, 3], [2, 0]]
    assert metadata.swa_out_cache_loc == [4, 9, 0]  # the third row is padding


def test_pages_stop_at_the_context_and_follow_virtual_ones() -> None:
    assert live_pages(1, 99, pool()) == [5, 2, 7, 1]
    assert live_pages(1, 0, pool()) == []
    v2p = [0, 6, 4, -1, -1, 8, -1, 2, 3]
    assert live_pages(1, 14, pool(v2p=v2p)) == [8, 4, 2, 6]
    assert live_pages(2, 5, pool(v2p=v2p)) == [0, 0]  # mapped to none
    unwritten = pool(v2p=v2p)
    unwritten.req_to_token[2, 0] = -1
    assert live_pages(2, 4, unwritten) == [0]


@pytest.mark.parametrize("has_swa", [False, True])
def test_a_zigzag_rank_has_an_early_and_a_late_block(has_swa: bool) -> None:
    """Six and five new tokens in four blocks: 2, 2, 1, 1 and 2, 1, 1, 1, after prefixes of 0 and 2."""
    extend = batch("EXTEND", [6, 7], [6, 5], out_cache_loc=[])
    rows, first = zigzag_forward_metadata(extend, pool(has_swa), 2, 0)
    assert rows == [0, 1, 6, 7, 5, 10]
    assert first.cache_seqlens == [2, 4, 6, 7]
    assert (first.cu_seqlens_q, first.max_seq_len_q) == ([0, 2, 4, 5, 6], 2)
    assert first.cu_seqlens_k == [0, 2, 6, 12, 19]
    assert first.page_table == [[5], [3], [5, 2], [3, 6]]
    assert first.swa_page_table == ([[1], [2], [1, 3], [2, 0]] if has_swa else None)
    rows, second = zigzag_forward_metadata(extend, pool(has_swa), 2, 1)
    assert rows == [2, 3, 8, 4, 9]
    assert second.cache_seqlens == [4, 5, 5, 6]


def test_a_verification_on_an_encoder_only_layer_has_its_rows_as_requests() -> None:
    verify = batch("TARGET_VERIFY", [3, 5], num_tokens=4, **STEP)
    assert encoder_only_verify(verify, pool()) == ([5, 5, 7, 7], [[5, 2], [5, 2], [3, 6], [3, 6]])


def test_mla_counts_padding_rows_and_puts_the_sink_where_they_look() -> None:
    extend = batch("DRAFT_EXTEND", [4, 4], [3, 1], **STEP)
    assert mla_forward_metadata(extend, pool(), counts_draft=False) == MLAForwardMetadata(
        seq_lens_k=[4, 6], seen_lens=[4, 4], max_seq_len_q=3, cu_seqlens_q=[0, 3, 4], block_table=[[5], [3, 0]]
    )
    assert mla_forward_metadata(extend, pool(), counts_draft=False, block=4).seq_lens_k == [5, 7]
    ragged = batch("RAGGED_VERIFY", [3, 3], [1, 2], **STEP)
    assert mla_forward_metadata(ragged, pool(), counts_draft=False).seq_lens_k == [6, 6]
    step = batch("DECODE", [4, 5], **STEP)
    assert mla_forward_metadata(step, pool(), counts_draft=False).seq_lens_k == [4, 5]
    assert mla_forward_metadata(step, pool(), counts_draft=True).seq_lens_k == [6, 7]


def test_prefix_chunks_share_their_capacity() -> None:
    prefill = batch("EXTEND", [6, 3], [1, 2], extend_prefix_lens=torch.tensor([5, 1]))
    assert mla_prefix_chunks(prefill, pool(), 4) == [[[20, 21], [12]], [[22, 23], []], [[8], []]]
    assert len(mla_prefix_chunks(prefill, pool(), 2)) == 5
    with pytest.raises(ValueError, match="capacity=1 has no token for each of 2 requests"):
        mla_prefix_chunks(prefill, pool(), 1)
    prefill.extend_prefix_lens.zero_()
    assert mla_prefix_chunks(prefill, pool(), 1) == []


def test_a_rank_of_decode_context_parallelism_holds_every_second_token() -> None:
    assert mla_dcp_metadata(5, 1, pool(), 2, 0) == (3, [5, 2])
    assert mla_dcp_metadata(5, 1, pool(), 2, 1) == (2, [5])
    assert mla_dcp_metadata(1, 1, pool(), 2, 1) == (0, [])


def test_prebuilt_has_no_metadata() -> None:
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        forward_metadata(batch("PREBUILT", [4, 5]), pool())
