"""The draft's K/V lists against numbers worked out by hand. Slot 203 is position 3 of row 2."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.references import generate_draft_decode_kv_indices

COLUMNS = 20
SLOTS = 100 * torch.arange(4)[:, None] + torch.arange(COLUMNS)


def lists_of(
    rows: list[int], lens: list[int], positions: list[int] | None = None, *, topk: int = 1, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """In plain numbers; positions are each length `topk` times unless given."""
    if positions is None:
        positions = [length for length in lens for _ in range(topk)]
    kv_indices, kv_indptr = generate_draft_decode_kv_indices(
        torch.tensor(rows), SLOTS, torch.tensor(lens), torch.tensor(positions), topk=topk, **options
    )
    return [of_step.tolist() for of_step in kv_indices], [of_step.tolist() for of_step in kv_indptr]


@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
def test_a_chain_goes_on_where_the_prefix_ends_whatever_the_pages(page_size: int) -> None:
    kv_indices, kv_indptr = lists_of([2, 1, 2], [3, 1, 0], num_steps=3, page_size=page_size)
    assert kv_indices == [
        [200, 201, 202, 203, 100, 101, 200],
        [200, 201, 202, 203, 204, 100, 101, 102, 200, 201],
        [200, 201, 202, 203, 204, 205, 100, 101, 102, 103, 200, 201, 202],
    ]
    assert kv_indptr == [[0, 4, 6, 7], [0, 5, 8, 10], [0, 6, 10, 13]]


def test_branches_without_pages_lie_num_steps_apart() -> None:
    kv_indices, kv_indptr = lists_of([1, 3], [2, 0], topk=2, num_steps=3, page_size=1)
    assert kv_indices == [
        [100, 101, 102, 100, 101, 105, 300, 303],
        [100, 101, 102, 103, 100, 101, 105, 106, 300, 301, 303, 304],
        [100, 101, 102, 103, 104, 100, 101, 105, 106, 107, 300, 301, 302, 303, 304, 305],
    ]
    assert kv_indptr == [[0, 3, 6, 7, 8], [0, 4, 8, 10, 12], [0, 5, 10, 13, 16]]


@pytest.mark.parametrize(
    ("length", "branches"),
    [
        # Two tokens of page 1 are prefix. They and three drafted ones take two pages: branch 1 has pages 3 and 4.
        (6, ([6, 7, 8], [14, 15, 16])),
        # One token of page 1 is prefix, and the drafted ones fill the page: branch 1 has page 2.
        (5, ([5, 6, 7], [9, 10, 11])),
        # No page is partly filled: each branch starts a page of its own.
        (4, ([4, 5, 6], [8, 9, 10])),
        (0, ([0, 1, 2], [4, 5, 6])),
    ],
)
def test_branches_in_pages_of_four_continue_in_copies_of_the_last_page(
    length: int, branches: tuple[list[int], list[int]]
) -> None:
    kv_indices, kv_indptr = lists_of([1], [length], topk=2, num_steps=3, page_size=4)
    prefix = list(range(length))
    for step in range(3):
        first, second = (prefix + drafted[: step + 1] for drafted in branches)
        assert kv_indices[step] == [100 + position for position in first + second]
        assert kv_indptr[step] == [0, length + step + 1, 2 * (length + step + 1)]


def test_boundaries_follow_the_positions_and_slots_the_lengths() -> None:
    kv_indices, kv_indptr = lists_of([1, 2], [3, 1], [10, 20], num_steps=2, page_size=4)
    assert kv_indices == [[100, 101, 102, 103, 200, 201], [100, 101, 102, 103, 104, 200, 201, 202]]
    assert kv_indptr == [[0, 11, 32], [0, 12, 34]]


def test_nothing_drafts_nothing() -> None:
    assert lists_of([], [], num_steps=2, page_size=4) == ([[], []], [[0], [0]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_both_results_are_int64(dtype: torch.dtype) -> None:
    arguments: list[Tensor] = [torch.tensor([1]), SLOTS, torch.tensor([3]), torch.tensor([3])]
    results = generate_draft_decode_kv_indices(
        *(each.to(dtype) for each in arguments), num_steps=1, topk=1, page_size=1
    )
    assert [tensor.dtype for result in results for tensor in result] == [torch.int64, torch.int64]


def test_a_draft_may_end_with_its_row_and_no_later() -> None:
    kv_indices, _ = lists_of([1], [COLUMNS - 3], num_steps=3, page_size=1)
    assert kv_indices[2][-3:] == [117, 118, 119]
    with pytest.raises(
        ValueError, match="row 1: step 2 of branch 0 reads position 20, but req_to_token has 20 columns"
    ):
        lists_of([1], [COLUMNS - 2], num_steps=3, page_size=1)
    with pytest.raises(ValueError, match="row 1: step 2 of branch 1 reads position 20"):
        lists_of([1], [10], topk=2, num_steps=3, page_size=8)  # branch 1 starts two positions into page 2


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"paged_kernel_lens=\[2, -1\] must not be negative"):
        lists_of([1, 2], [2, -1], num_steps=2, page_size=1)


def test_as_many_requests_as_lengths() -> None:
    with pytest.raises(ValueError, match="shorter"):
        lists_of([1, 2], [2], num_steps=2, page_size=1)


@pytest.mark.parametrize(
    ("window_size", "sink_size", "kept"),
    [
        (2, 0, [105, 106]),
        (2, 1, [100, 105, 106]),
        (3, 3, [100, 101, 102, 104, 105, 106]),
        (3, 4, [100, 101, 102, 103, 104, 105, 106]),  # the sink ends where the window begins
        (9, 9, [100, 101, 102, 103, 104, 105, 106]),
    ],
)
def test_a_window_keeps_the_ends_of_a_prefix_and_every_drafted_token(
    window_size: int, sink_size: int, kept: list[int]
) -> None:
    kv_indices, kv_indptr = lists_of([1], [7], num_steps=2, page_size=4, window_size=window_size, sink_size=sink_size)
    assert kv_indices == [[*kept, 107], [*kept, 107, 108]]
    assert kv_indptr == [[0, len(kept) + 1], [0, len(kept) + 2]]


def test_a_window_bounds_positions_and_not_where_branches_draft() -> None:
    kv_indices, kv_indptr = lists_of([1], [5], [9, 2], topk=2, num_steps=2, page_size=4, window_size=2, sink_size=1)
    assert kv_indices == [[100, 103, 104, 105, 100, 103, 104, 109], [100, 103, 104, 105, 106, 100, 103, 104, 109, 110]]
    assert kv_indptr == [[0, 4, 7], [0, 5, 9]]


def test_entries_of_pages_are_the_slots_in_them() -> None:
    kv_indices, _ = lists_of([1], [5], num_steps=2, page_size=4, entry_page_size=4)
    assert kv_indices == [[400, 401, 402, 403, 404, 405], [400, 401, 402, 403, 404, 405, 406]]


def test_virtual_slots_are_those_of_their_physical_pages() -> None:
    v2p = torch.full((30,), -1)
    v2p[25], v2p[26] = 7, 2  # slots 100 to 107; 108 and on have no page
    kv_indices, _ = lists_of([1], [7], num_steps=2, page_size=4, v2p=v2p)
    assert kv_indices[1] == [28, 29, 30, 31, 8, 9, 10, 11, 0]
    table = torch.tensor([[5, -1, 3]])
    arguments = (torch.tensor([0]), table, torch.tensor([2]), torch.tensor([2]))
    lists, _ = generate_draft_decode_kv_indices(
        *arguments, num_steps=1, topk=1, page_size=4, v2p=torch.arange(9, 0, -1)
    )
    assert lists[0].tolist() == [8 * 4 + 1, 0, 9 * 4 + 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink_size": 1}, "window_size=0 and sink_size=1 must not be negative, and a sink needs a window"),
        ({"window_size": -1}, "window_size=-1 .* must not be negative"),
        ({"entry_page_size": 2}, "entry_page_size=2 must be 1 or page_size=4"),
        ({"v2p": torch.arange(25)}, "slot 100 is in virtual page 25, but v2p has 25 pages"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lists_of([1], [2], num_steps=2, page_size=4, **options)
