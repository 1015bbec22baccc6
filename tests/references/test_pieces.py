"""A piece of a batch holds no more elements than it may, and as many blocks as fit; and what is planned on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.calls import DecodeCall, PagedAttention
from lab.references import assert_close_to_reference, paged_attention, trtllm_batch_decode_with_kv_cache
from lab.references.softmax_attention import PIECE_ELEMENTS
from tests.cases import decode_arguments, random_batch

PAGE_SIZE, PAGES, HEADS, HEAD_DIM = 16, 2, 2, 8
# Of one request of a row and of 32 keys: K and V, which are more than its scores. The scores of 32 rows are twice as many.
ELEMENTS = PAGES * PAGE_SIZE * HEADS * 2 * HEAD_DIM


@pytest.mark.parametrize(
    ("q_len", "most", "sizes"),
    [
        (1, ELEMENTS - 1, [1, 1, 1, 1, 1]),
        (1, 2 * ELEMENTS - 1, [1, 1, 1, 1, 1]),
        (1, 2 * ELEMENTS, [2, 2, 1]),
        (1, 3 * ELEMENTS, [3, 2]),
        (1, 5 * ELEMENTS, [5]),
        (32, 4 * ELEMENTS - 1, [1, 1, 1, 1, 1]),
        (32, 4 * ELEMENTS, [2, 2, 1]),
    ],
)
def test_as_many_requests_as_fit_are_solved_together(
    q_len: int, most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", most)
    batch = random_batch([q_len] * 5, [PAGE_SIZE * PAGES] * 5, heads=(HEADS, HEADS), head_dim=HEAD_DIM)
    problem = DecodeCall(**decode_arguments(batch, PAGE_SIZE)).problem()
    pieces = paged_attention._pieces(problem, problem.row_offsets(), problem.v_head_dim)
    assert [len(piece.request) for piece in pieces] == sizes


@pytest.mark.parametrize(
    ("window_left", "keys"),
    [
        # The range of keys that each block of rows sees, and the range of their pages: the first, and how many.
        (3, [(12, 17, 3, 2), (14, 19, 3, 2), (16, 20, 4, 1), (0, 0, 0, 0), (0, 3, 0, 1)]),
        (0, [(15, 17, 3, 2), (17, 19, 4, 1), (19, 20, 4, 1), (0, 0, 0, 0), (2, 3, 0, 1)]),
        (-1, [(0, 17, 0, 5), (0, 19, 0, 5), (0, 20, 0, 5), (0, 0, 0, 0), (0, 3, 0, 1)]),
    ],
)
def test_a_request_s_rows_are_in_blocks_with_the_keys_that_they_see(
    window_left: int, keys: list[tuple[int, ...]]
) -> None:
    """Two rows at a time of a request of five rows and 20 keys; a row without keys; and a row of three keys."""
    batch = random_batch([5, 1, 1], [20, 0, 3], heads=(2, 2), head_dim=8)
    problem = DecodeCall(**decode_arguments(batch, 4, ragged=True, window_left=window_left)).problem()
    blocks = [*paged_attention._blocks(problem, problem.row_offsets(), 2 * 20 * 2)]
    rows = [(0, 0, 2, 15, 20), (0, 2, 2, 17, 20), (0, 4, 1, 19, 20), (1, 5, 1, -1, 0), (2, 6, 1, 2, 3)]
    assert blocks == [(*of_rows, *of_keys) for of_rows, of_keys in zip(rows, keys, strict=True)]


@pytest.mark.parametrize("separate_tables", [False, True])
def test_k_and_v_share_a_table_on_the_host_if_the_call_has_one(separate_tables: bool) -> None:
    arguments = decode_arguments(random_batch([1, 1], [5, 20]), 4, separate_tables=separate_tables)
    problem = DecodeCall(**arguments).problem()
    planned = paged_attention._planned_on_host(problem)
    assert torch.equal(planned.k_block_tables, problem.k_block_tables)
    assert torch.equal(planned.v_block_tables, problem.v_block_tables)
    assert (planned.v_block_tables is planned.k_block_tables) is not separate_tables


@pytest.mark.parametrize(
    "read",
    [
        trtllm_batch_decode_with_kv_cache,
        lambda **arguments: assert_close_to_reference(torch.zeros(1, 4, 16), check_dtype=False, **arguments),
    ],
    ids=["reference", "assertion"],
)
def test_the_values_of_a_call_on_a_cpu_are_checked_once(
    read: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[PagedAttention] = []
    monkeypatch.setattr(PagedAttention, "check_values", lambda problem: checked.append(problem))
    read(**decode_arguments(random_batch([1], [0])))
    assert len(checked) == 1
