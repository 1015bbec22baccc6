"""The reference metadata of every mode, against numbers that were worked out by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.references.forward_metadata import (
    DSV4ForwardMetadata,
    MLAForwardMetadata,
    block_sparse_forward_metadata,
    dsa_forward_metadata,
    dsv4_forward_metadata,
    encoder_only_verify,
    forward_metadata,
    live_pages,
    mla_dcp_metadata,
    mla_forward_metadata,
    mla_prefix_chunks,
    zigzag_forward_metadata,
)
from tests.devices import Operations

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
    alone = batch("EXTEND", [6], [1], extend_prefix_lens=torch.tensor([5]))
    assert mla_prefix_chunks(alone, pool(), 3) == [[[20, 21, 22]], [[23, 8]]]
    assert mla_prefix_chunks(batch("EXTEND", [], [], extend_prefix_lens=torch.tensor([])), pool(), 3) == []


def test_a_rank_of_decode_context_parallelism_holds_every_second_token() -> None:
    assert mla_dcp_metadata(5, 1, pool(), 2, 0) == (3, [5, 2])
    assert mla_dcp_metadata(5, 1, pool(), 2, 1) == (2, [5])
    assert mla_dcp_metadata(1, 1, pool(), 2, 1) == (0, [])


@pytest.mark.parametrize(
    ("given", "selected", "groups", "lens", "places"),
    [
        # A decode step has no padding rows, and neither its own length nor that of the draft is limited.
        (batch("DECODE", [4, 5], num_tokens=3, **STEP), [[0, 3, -1]], (2, 2), [4, 5], [[20, 23, -1, -1], [-1] * 4]),
        (
            batch("TARGET_VERIFY", [4, 5], num_tokens=4, **STEP),
            [[4, 0, 3, 1], [5, 4, -1, -1], [5, 1, 2, 3], [6, -1, -1, 4]],
            (6, 1),
            [5, 6, 6, 6],
            [[8, 20, 23, 21], [9, 8, -1, -1], [25, 13, 14, 15], [26, -1, -1, 24]],
        ),
        # Rows before the first key, and two rows of padding.
        (
            batch("EXTEND", [1, 9], [3, 2], num_tokens=7),
            [[-1] * 5, [-1] * 5, [0, *[-1] * 4], [7, 0, -1, 4, 2], [8, 1, -1, -1, -1]],
            (4, 2),
            [0, 0, 1, 4, 5, 0, 0],
            [
                *[[-1] * 8] * 2,
                [20, *[-1] * 7],
                [27, 12, -1, 24, 14, -1, -1, -1],
                [16, 13, *[-1] * 6],
                *[[-1] * 8] * 2,
            ],
        ),
        (batch("EXTEND", [], [], num_tokens=2), [[0]], (4, 1), [], []),
    ],
)
def test_a_row_of_sparse_mla_has_the_slots_that_it_selects(
    given: Any, selected: list[list[int]], groups: tuple[int, int], lens: list[int], places: list[list[int]]
) -> None:
    topk, kpool = groups
    found = dsa_forward_metadata(given, pool(), torch.tensor(selected), index_topk=topk, index_kpool=kpool)
    assert found == (lens, places)


# The slots of the first five tokens in the sliding-window pool, from the last to the first.
OF_ROW_1, OF_ROW_2 = [12, 7, 6, 5, 4], [0, 11, 10, 9, 8]


def seen_slots(*slots: int) -> list[int]:
    return [*slots, *[-1] * (128 - len(slots))]


@pytest.mark.parametrize(
    ("given", "ratio", "selected", "found"),
    [
        (
            batch("DECODE", [4, 5], **STEP),
            2,
            None,
            ([4, 5], [[*seen_slots(*OF_ROW_1[1:]), 10, 11], [*seen_slots(*OF_ROW_2), 6, 7]], [0, 1, 2], [4, 5]),
        ),
        # A row that sees no entry has one more column if an entry stands for 4 tokens.
        (
            batch("TARGET_VERIFY", [2, 3], num_tokens=4, **STEP),
            4,
            None,
            (
                [3, 4, 4, 5],
                [
                    [*seen_slots(*OF_ROW_1[2:]), -1],
                    [*seen_slots(*OF_ROW_1[1:]), 5],
                    [*seen_slots(*OF_ROW_2[1:]), 3],
                    [*seen_slots(*OF_ROW_2), 3],
                ],
                [0, 2, 4],
                [4, 5],
            ),
        ),
        # Padding rows are rows of the last request that see its first token.
        (
            batch("RAGGED_VERIFY", [2, 4], [2, 1], num_tokens=5, **STEP),
            2,
            [[0, 1], [1, 0], [1, 0], [1, 0], [1, 0]],
            (
                [3, 4, 5, 1, 1],
                [
                    [*seen_slots(*OF_ROW_1[2:]), 10],
                    [*seen_slots(*OF_ROW_1[1:]), 11, 10],
                    [*seen_slots(*OF_ROW_2), 7, 6],
                    *[seen_slots(8)] * 2,
                ],
                [0, 2, 3],
                [4, 5],
            ),
        ),
        # Rows before the first key.
        (
            batch("EXTEND", [1, 3], [3, 1], num_tokens=9),
            3,
            None,
            ([-1, 0, 1, 3], [*[seen_slots()] * 2, seen_slots(4), [*seen_slots(*OF_ROW_2[2:]), 3]], [0, 3, 4], [1, 3]),
        ),
        (
            batch("DRAFT_EXTEND_V2", [1, 3], [3, 1]),
            0,
            None,
            ([1, 1, 1, 3], [*[seen_slots(4)] * 3, seen_slots(*OF_ROW_2[2:])], [0, 3, 4], [1, 3]),
        ),
        (batch("RAGGED_VERIFY", [], [], num_tokens=2), 4, None, ([], [], [0], [])),
    ],
)
def test_a_row_of_deepseek_v4_has_its_window_and_the_entries_of_its_request(
    given: Any, ratio: int, selected: list[list[int]] | None, found: tuple[Any, ...]
) -> None:
    topk = None if selected is None else torch.tensor(selected)
    metadata = dsv4_forward_metadata(given, pool(has_swa=True), compress_ratio=ratio, topk_indices=topk)
    assert metadata == DSV4ForwardMetadata(*found)


def test_a_block_sparse_row_counts_16_pages_and_has_the_slots_of_those_that_each_head_selects() -> None:
    extend = batch("EXTEND", [1, 65], [3, 2])
    pages = torch.tensor([[[0, -1], [0, -1], [0, 1], [1, -1], [-1, 2]], [[-1, -1]] * 4 + [[2, 0]]])
    assert block_sparse_forward_metadata(extend, pool(), pages) == (
        [1, 1, 1, 64, 61],
        [
            [[], [], [20], [24, 25, 26, 27], [16, 17, 18, 19]],
            [[], [], [], [], [16, 17, 18, 19, 12, 13, 14, 15]],
        ],
    )
    steps = batch("DECODE", [4, 1], **STEP)
    pages = torch.tensor([[[1, 0], [0, -1]]])
    assert block_sparse_forward_metadata(steps, pool(), pages) == ([6, 3], [[[8, 9, 20, 21, 22, 23], [12, 13, 14]]])


def test_prebuilt_has_no_metadata() -> None:
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        forward_metadata(batch("PREBUILT", [4, 5]), pool())


@pytest.mark.parametrize(
    "build",
    [
        lambda given, pool: forward_metadata(given, pool),
        lambda given, pool: mla_forward_metadata(given, pool, counts_draft=True),
        lambda given, pool: mla_dcp_metadata(int(given.seq_lens[0]), 1, pool, 2, 0),
        lambda given, pool: dsa_forward_metadata(
            given, pool, torch.arange(given.seq_lens[0]).unsqueeze(0), index_topk=8
        ),
        lambda given, pool: dsv4_forward_metadata(given, pool, compress_ratio=0),
        lambda given, pool: block_sparse_forward_metadata(given, pool, torch.tensor([[[0, 1, 2]]])),
    ],
    ids=["forward", "mla", "dcp", "dsa", "dsv4", "block sparse"],
)
def test_tensors_are_not_read_once_for_each_token_because_each_read_waits_for_the_gpu(build: Any) -> None:
    counts = []
    for keys in (2, 12):
        with Operations() as operations:
            build(batch("DECODE", [keys]), pool(has_swa=True))
        counts.append(len(operations.names))
    assert counts[0] == counts[1]
