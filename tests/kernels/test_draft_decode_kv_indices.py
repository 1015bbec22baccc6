"""The schedules of the draft's K/V lists in Triton's interpreter, and the check that judges them."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lab.kernels
from corpus.kernels import MUTANTS, kernel
from corpus.models.lists import Lists
from corpus.wrong import LISTS
from lab import references
from lab.kernels.serving import draft_decode_kv_indices as module
from lab.kernels.serving.draft_decode_kv_indices import Schedule, generate_draft_decode_kv_indices
from lab.workloads.inputs.draft_lists import DTYPES, DraftLists, DraftListsCase, Writer, in_place
from tests.devices import IN_INTERPRETER
from tests.kernels.held import zeros

NARROW = dict.fromkeys(DTYPES, torch.int32)

# Around the stores' alignment, and the blocks of both schedules.
EDGES = [0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 504, 511, 512, 513, 520, 1023, 1024, 1025, 1032]
# One case per way to be wrong, at least.
CASES = {
    "chain": DraftListsCase((5, 0, 1, 9), page_size=4),
    "lengths around blocks": DraftListsCase((511, 1024, 129, 8), num_steps=2),
    "branches": DraftListsCase((6, 0, 3), topk=3),
    "branches in pages": DraftListsCase((6, 4, 0, 9), topk=2, page_size=4),
    "branches in large pages": DraftListsCase((70, 64), num_steps=5, topk=2, page_size=16, row_gap=3),
    "positions of their own": DraftListsCase((5, 2, 7), num_steps=2, positions_differ=True),
    "rows far apart": DraftListsCase((5, 2, 7), far_rows=True, dtypes=NARROW),
    "one row for all": DraftListsCase((5, 2, 7), repeated=True, dtypes=NARROW),
    "lists beyond the row's end": DraftListsCase((20, 600), spare_capacity=-570, spare_boundaries=0),
    "a list cut in its draft": DraftListsCase((3, 4), num_steps=4, spare_capacity=-2),
    "drafts beyond the columns": DraftListsCase((9, 3), spare_columns=-2, row_gap=1),
    "prefixes beyond the columns": DraftListsCase((520, 3), spare_columns=-20),
    "a window and a sink": DraftListsCase(
        (40, 3, 12, 0, 600), topk=2, page_size=4, window_size=9, sink_size=3, positions_differ=True
    ),
    "a window alone": DraftListsCase((600, 5, 512), num_steps=2, window_size=5),
    "a window of blocks": DraftListsCase((1700, 513), num_steps=2, window_size=600, sink_size=513),
    "a window cut": DraftListsCase((40, 30), window_size=9, sink_size=3, spare_capacity=-9, spare_columns=-4),
    "entries of pages": DraftListsCase((70, 1030, 0), topk=2, page_size=16, entries_are_pages=True),
    "entries of pages, cut": DraftListsCase(
        (70, 513, 0), page_size=16, entries_are_pages=True, spare_columns=-2, dtypes=NARROW
    ),
    "virtual slots": DraftListsCase((70, 1030, 0), topk=2, page_size=16, translated=True),
    "virtual slots, cut": DraftListsCase((70, 9), page_size=3, translated=True, spare_columns=-2, dtypes=NARROW),
    "virtual pages in a window": DraftListsCase(
        (700, 9), topk=3, page_size=32, entries_are_pages=True, translated=True, window_size=520, sink_size=1
    ),
    "eight steps": DraftListsCase((8,), num_steps=8, topk=3, page_size=64, first_cell=5),
}


def scheduled(schedule: Schedule) -> Writer:
    return partial(generate_draft_decode_kv_indices, schedule=schedule)


@st.composite
def drawn_cases(draw: st.DrawFn) -> DraftListsCase:
    length = st.one_of(st.sampled_from(EDGES), st.integers(0, 40))
    return DraftListsCase(
        lens=tuple(draw(st.lists(length, min_size=1, max_size=3))),
        num_steps=draw(st.integers(2, 8)),
        topk=draw(st.integers(1, 3)),
        page_size=draw(st.sampled_from([1, 4, 16, 64])),
        positions_differ=draw(st.booleans()),
        repeated=draw(st.booleans()),
        spare_columns=draw(st.integers(-3, 20)),
        row_gap=draw(st.integers(0, 5)),
        spare_capacity=draw(st.integers(-9, 20)),
        spare_boundaries=draw(st.integers(0, 2)),
        first_cell=draw(st.integers(1, 9)),
        dtypes={name: draw(st.sampled_from([torch.int32, torch.int64])) for name in DTYPES},
        seed=draw(st.integers(0, 2**16)),
        entries_are_pages=draw(st.booleans()),
        translated=draw(st.booleans()),
        **draw(st.sampled_from([{}, {"window_size": 1}, {"window_size": 9, "sink_size": 5}, {"window_size": 600}])),
    )


@IN_INTERPRETER
@pytest.mark.parametrize("schedule", Schedule, ids=repr)
@settings(deadline=None, derandomize=True, max_examples=15)
@given(case=drawn_cases(), block_requests=st.sampled_from([1, 2, 256]))
def test_drawn_cases(schedule: Schedule, case: DraftListsCase, block_requests: int) -> None:
    """Requests whose lengths are summed one or two at a time stand for hundreds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_REQUESTS", block_requests)
        assert DraftLists(case).wrongs(scheduled(schedule)) == []


SCHEDULED: dict[str, DraftListsCase] = CASES | {
    "more than 512 requests": DraftListsCase(tuple(n % 3 for n in range(513)), num_steps=1),
    "no request": DraftListsCase(()),
    "no step": DraftListsCase((3, 4), num_steps=0),
}


@pytest.mark.parametrize("schedule", Schedule, ids=repr)
@pytest.mark.parametrize("name", SCHEDULED)
def test_named_cases(device: str, name: str, schedule: Schedule) -> None:
    assert DraftLists(SCHEDULED[name], device).wrongs(scheduled(schedule)) == []


# --- the check can fail -------------------------------------------------------------------------------------------

# Wrong writers of the corpus that only larger drafts, other values or later calls than those of CASES show.
UNSEEN = {
    *("branches_beyond_four_share", "branches_beyond_eight_missing", "late_branches_uncounted"),
    *("pages_of128_taken_as64", "steps_beyond_page_lost", "narrow_table_read_as_wide", "window_and_sink_overflow"),
    *("requests_beyond1024_missing", "boundaries_beyond1024_anew", "last_of_full_warp_missing"),
    *("prefix_beyond2048_lost", "prefix_beyond65535_lost", "boundaries_kept"),
}


def is_wrong(write: Writer, case: DraftListsCase) -> bool:
    try:
        return DraftLists(case).wrongs(write) != []
    except IndexError:  # an index, of a page that the draft does not have
        return True


@pytest.mark.parametrize("name", [name for name, each in MUTANTS.items() if each.interface == (LISTS,)])
def test_the_cases_show_what_is_wrong(name: str) -> None:
    write = kernel(name).implementation().generate_draft_decode_kv_indices
    assert any(is_wrong(write, case) for case in CASES.values()) == (name not in UNSEEN)


def test_the_check_names_the_first_wrong_cell() -> None:
    def write(**given: Any) -> None:
        Lists().generate_draft_decode_kv_indices(**given)
        given["kv_indptr"][0, 1].zero_()

    (wrong,) = DraftLists(DraftListsCase((3,))).wrongs(write)
    assert "cells of kv_indptr or of the memory around it are wrong" in wrong
    assert wrong.endswith("[1, 9], holds 0 and should hold 4")


# --- refusals and imports -----------------------------------------------------------------------------------------


F32 = torch.float32
BAD_ARGUMENTS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"window_size": -1}, ValueError, "window_size must be at least 0, got -1"),
    ({"window_size": 4, "sink_size": -1}, ValueError, "sink_size must be at least 0, got -1"),
    ({"sink_size": 4}, ValueError, "sink_size=4 has no meaning without a window"),
    ({"page_size": 16, "entry_page_size": 8}, ValueError, "entry_page_size=8 must be 1 or page_size=16"),
    ({"v2p": zeros(4, dtype=F32)}, TypeError, "v2p .* got torch.float32"),
    ({"v2p": zeros(4, 4)}, ValueError, "v2p must have shape"),
    ({"v2p": zeros(4, device="meta")}, ValueError, "v2p is on meta"),
    ({"topk": 0}, ValueError, "topk must be at least 1, got 0"),
    ({"topk": 1.5}, TypeError, "topk must be an int, got 1.5"),
    ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    ({"topk": 2}, ValueError, r"positions must have shape \[4\], got \[2\]"),
    ({"paged_kernel_lens": [3, 4]}, TypeError, "paged_kernel_lens .* got list"),
    ({"paged_kernel_lens": zeros(2, dtype=F32)}, TypeError, "paged_kernel_lens .* got torch.float32"),
    ({"paged_kernel_lens": zeros(3)}, ValueError, r"paged_kernel_lens .* got \[3\]"),
    ({"paged_kernel_lens": zeros(4)[::2]}, ValueError, r"contiguous, got stride \(2,\)"),
    ({"positions": zeros(2, dtype=F32)}, TypeError, "positions .* got torch.float32"),
    ({"req_pool_indices": zeros(2).short()}, TypeError, "req_pool_indices .* torch.int16"),
    ({"req_to_token": zeros(4, 9, dtype=F32)}, TypeError, "req_to_token .* got torch.float32"),
    ({"req_to_token": zeros(9)}, ValueError, r"req_to_token .* got shape \[9\]"),
    ({"req_to_token": zeros(9, 4).T}, ValueError, r"req_to_token .* stride \(1, 4\)"),
    ({"kv_indices": zeros(9)}, ValueError, r"kv_indices .* got shape \[9\]"),
    ({"kv_indices": zeros(3, 9).bool()}, TypeError, "kv_indices .* got torch.bool"),
    ({"kv_indptr": zeros(2, 9)}, ValueError, r"kv_indptr must be at least .* = \[3, 3\], got \[2, 9\]"),
    ({"kv_indptr": zeros(3, 2)}, ValueError, r"kv_indptr must be at least .* = \[3, 3\], got \[3, 2\]"),
    ({"positions": zeros(2, dtype=torch.int64, device="meta")}, ValueError, "is on meta, but kv_indices is on cpu"),
)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARGUMENTS, ids=[row[2] for row in BAD_ARGUMENTS])
def test_bad_arguments_are_refused_with_the_value(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate_draft_decode_kv_indices(**DraftLists(DraftListsCase((3, 4))).arguments | changes)


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        generate_draft_decode_kv_indices(**DraftLists(DraftListsCase((3, 4))).arguments)


def test_the_package_offers_the_function() -> None:
    assert lab.kernels.generate_draft_decode_kv_indices is generate_draft_decode_kv_indices
    with pytest.raises(AttributeError, match="'generate_nothing'"):
        _ = lab.kernels.generate_nothing


def test_a_function_that_returns_lists_is_judged_as_one_that_writes_them() -> None:
    given = {
        "req_pool_indices": torch.tensor([1, 0]),
        "req_to_token": torch.arange(20).view(2, 10),
        "paged_kernel_lens": torch.tensor([2, 3]),
        "positions": torch.tensor([2, 3]),
    }
    kv_indices, kv_indptr = torch.full((2, 8), -7), torch.full((3, 4), -7)
    in_place(references.generate_draft_decode_kv_indices)(
        **given, kv_indices=kv_indices, kv_indptr=kv_indptr, topk=1, page_size=1
    )
    # Step 0: positions 0 … 2 of row 1, and 0 … 3 of row 0; step 1 has one more each, and the ninth is cut off.
    assert kv_indices.tolist() == [[10, 11, 12, 0, 1, 2, 3, -7], [10, 11, 12, 13, 0, 1, 2, 3]]
    assert kv_indptr.tolist() == [[-7, 3, 7, -7], [-7, 4, 9, -7], [-7, -7, -7, -7]]
