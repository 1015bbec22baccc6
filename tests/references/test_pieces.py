"""The K and V that are copied together have no more elements than they may, and are of as many requests as fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.calls import DecodeCall, PagedAttention
from lab.references import assert_close_to_reference, attention_calls, trtllm_batch_decode_with_kv_cache
from lab.references.softmax_attention import PIECE_ELEMENTS
from tests.cases import decode_arguments, random_batch

PAGE_SIZE, PAGES, HEADS, HEAD_DIM = 16, 2, 2, 8
# K and V of one request of 32 keys.
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
def test_k_and_v_of_as_many_requests_as_fit_are_copied_together(
    most: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", most)
    batch = random_batch([1] * 5, [PAGE_SIZE * PAGES] * 5, heads=(HEADS, HEADS), head_dim=HEAD_DIM)
    problem = DecodeCall(**decode_arguments(batch, PAGE_SIZE)).problem()
    assert [len(requests) for requests in attention_calls._together(problem)] == sizes


def test_requests_of_equal_lengths_are_copied_together() -> None:
    """So that they are computed together too."""
    batch = random_batch([2, 1, 2, 1, 1], [20, 7, 20, 20, 7], heads=(2, 2), head_dim=8)
    problem = DecodeCall(**decode_arguments(batch, 4, ragged=True)).problem()
    assert list(attention_calls._together(problem)) == [[1, 4, 3, 0, 2]]


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
