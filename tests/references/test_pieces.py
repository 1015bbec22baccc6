"""A piece of a batch holds no more elements than it may, and as many blocks as fit."""

import pytest

from lab.calls import DecodeCall
from lab.references import paged_attention
from lab.references.softmax_attention import PIECE_ELEMENTS
from tests.cases import decode_arguments, random_batch

PAGE_SIZE, PAGES, HEADS, HEAD_DIM = 16, 2, 2, 8
# Of one request of a row and of 32 keys: K and V, which are more than its scores.
ELEMENTS = PAGES * PAGE_SIZE * HEADS * 2 * HEAD_DIM


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (ELEMENTS - 1, [1, 1, 1, 1, 1]),
        (2 * ELEMENTS - 1, [1, 1, 1, 1, 1]),
        (2 * ELEMENTS, [2, 2, 1]),
        (3 * ELEMENTS, [3, 2]),
        (5 * ELEMENTS, [5]),
    ],
)
def test_as_many_requests_as_fit_are_solved_together(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", most)
    batch = random_batch([1] * 5, [PAGE_SIZE * PAGES] * 5, heads=(HEADS, HEADS), head_dim=HEAD_DIM)
    problem = DecodeCall(**decode_arguments(batch, PAGE_SIZE)).problem()
    pieces = paged_attention._pieces(problem, problem.row_offsets(), problem.v_head_dim)
    assert [len(piece.request) for piece in pieces] == sizes
