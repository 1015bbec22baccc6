"""MHA's metadata by hand, by the fused kernel, and in graphs; `test_either_backend.py` has every mode's eager pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lab.metadata import ForwardBatch, ForwardMode, KVPool, TRTLLMMHAMetadata, build_mha_metadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MetadataBuilder, allocate_mha_metadata, prepare_mha_metadata
from lab.references.forward_metadata import encoder_only_verify, forward_metadata
from tests.devices import DEVICES, IN_INTERPRETER, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import (
    DRAFT_EXTENDS,
    EXTENDS,
    PAGE_SIZES,
    Case,
    all_modes,
    assert_live_cells_right,
    assert_live_pages_right,
    build,
    drawn_cases,
    graph_case,
    label,
    tensors_of,
)
from tests.metadata.test_either_backend import assert_mha_right

POISON = -77
D, CONTEXT = 4, 100
GRAPH_MODES = [
    GraphMode(ForwardMode.DECODE),
    GraphMode.draft_decode(1),
    GraphMode(ForwardMode.TARGET_VERIFY, D),
    GraphMode(ForwardMode.RAGGED_VERIFY, D),
    GraphMode(ForwardMode.DRAFT_EXTEND, D),
    GraphMode(ForwardMode.DRAFT_EXTEND_V2, D),
]


# --- by hand ----------------------------------------------------------------------------------------------------------


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
def test_no_list_of_prefixes_is_no_prefix(mode: ForwardMode) -> None:
    batch, pool = build(Case(mode, (20, 3), (20, 3)))
    built(replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None), pool)


# --- in one launch ----------------------------------------------------------------------------------------------------


def poison(metadata: TRTLLMMHAMetadata) -> None:
    for tensor in tensors_of(metadata).values():
        tensor.fill_(POISON)


def assert_fused_right(batch: ForwardBatch, pool: KVPool) -> None:
    """Written over poison, which the dead cells keep; again after the lengths changed in place."""
    metadata = allocate_mha_metadata(batch, pool)
    has_no_prefix = batch.forward_mode.is_prefill and not any(batch.extend_prefix_lens_cpu or ())
    assert (metadata.cu_seqlens_q is metadata.cu_seqlens_k) is has_no_prefix
    write = prepare_mha_metadata(batch, pool, metadata)
    for _ in range(2):
        poison(metadata)
        write()
        assert_live_cells_right(metadata, forward_metadata(batch, pool), POISON)
        if metadata.cu_seqlens_q is not metadata.cu_seqlens_k:  # else the new tokens are all the keys
            batch.seq_lens.sub_(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("index", range(len(all_modes())))
def test_the_fused_kernel_in_every_mode(index: int, page_size: int, device: str) -> None:
    assert_fused_right(*build(all_modes(page_size)[index], device))


@IN_INTERPRETER
@given(drawn_cases(virtual=None))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_the_fused_kernel_on_drawn_batches(case: Case) -> None:
    assert_fused_right(*build(case))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("case", all_modes(), ids=label)
def test_in_a_graph_without_a_synchronisation(case: Case, device: str) -> None:
    batch, pool = build(case, device)
    with synchronisation_is_an_error():
        metadata = allocate_mha_metadata(batch, pool)
        write = prepare_mha_metadata(batch, pool, metadata)
        write()
    if batch.batch_size == 0:
        return  # nothing is launched
    graph = graph_of(write)
    poison(metadata)
    graph.replay()
    assert_live_cells_right(metadata, forward_metadata(batch, pool), POISON)


# --- in graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("builder", MetadataBuilder)
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=repr)
def test_every_replay_is_right(mode: GraphMode, builder: MetadataBuilder, device: str) -> None:
    """A long batch, shorter and smaller ones. Padding requests have a token, and the rows of the mode."""
    pool = build(graph_case(mode, (CONTEXT,) * 4), device)[1]
    backend = TRTLLMMHABackend(builder=builder, expand_encoder_only_verify=True)
    runner = GraphRunner(backend, mode, pool, (2, 4), lambda *_: lambda: None, MetadataPlace.BEFORE_REPLAY)
    for totals in ((CONTEXT, 33, 32, 31), (17, 16), (5, 48, 96), (64,)):
        batch, _ = build(graph_case(mode, totals), device)
        rows = torch.arange(len(totals), 0, -1, device=pool.device)
        runner.replay(replace(batch, req_pool_indices=rows))
        captured = runner.captured[runner.size_for(len(totals))]
        expected = forward_metadata(captured.view, pool)
        assert expected.cache_seqlens[: len(totals)] == list(totals)
        assert_live_cells_right(captured.metadata, replace(expected, max_seq_len_q=mode.num_tokens_per_req))
        if captured.metadata.encoder_page_table is not None:
            keys, pages = encoder_only_verify(captured.view, pool)
            assert captured.metadata.encoder_cache_seqlens.tolist() == keys
            assert_live_pages_right(captured.metadata.encoder_page_table, pages)
    assert (captured.metadata.encoder_page_table is not None) is (mode == GraphMode(ForwardMode.TARGET_VERIFY, D))
