"""The context reference: variable query lengths, causal or not, against the same second formula."""

import math
from typing import Any

import pytest
import torch

from lab.references import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from tests.cases import (
    Batch,
    coded_batch,
    context_arguments,
    decode_arguments,
    keys_seen,
    random_batch,
    seen_keys,
)

context = trtllm_batch_context_with_kv_cache

Q_LENS = [5, 0, 1, 40, 0, 33, 8, 3]
KV_LENS = [5, 7, 17, 40, 0, 50, 16, 2]


def coded(batch: Batch, **changes: Any) -> list[set[int]]:
    return seen_keys(*context(**context_arguments(batch, **changes)))


@pytest.mark.parametrize("window_left", [-1, 0, 1, 15, 16, 100])
def test_causal_rows_end_at_the_last_key(window_left: int) -> None:
    batch = coded_batch(Q_LENS, KV_LENS)
    assert coded(batch, window_left=window_left) == keys_seen(batch, window_left=window_left)


def test_not_causal_rows_see_every_key() -> None:
    batch = coded_batch(Q_LENS, KV_LENS)
    assert coded(batch, causal=False) == [
        set(range(kv)) for q, kv in zip(Q_LENS, KV_LENS, strict=True) for _ in range(q)
    ]


def test_by_hand() -> None:
    batch = coded_batch([2, 1], [2, 4])
    assert coded(batch) == [{0}, {0, 1}, {0, 1, 2, 3}]
    assert coded(batch, causal=False) == [{0, 1}, {0, 1}, {0, 1, 2, 3}]


def test_rows_without_keys() -> None:
    batch = random_batch([3, 2], [1, 0])
    for causal, empty in ((True, [True, True, False, True, True]), (False, [False] * 3 + [True, True])):
        out, lse = context(**context_arguments(batch, causal=causal))
        assert ((out == 0).all(dim=-1).all(dim=-1)).tolist() == empty
        assert ((lse == -math.inf).all(dim=-1)).tolist() == empty


def test_equal_to_decode_where_both_apply() -> None:
    batch = random_batch([6, 6], [6, 30])
    decoded = trtllm_batch_decode_with_kv_cache(**decode_arguments(batch))
    assert all(torch.equal(a, b) for a, b in zip(context(**context_arguments(batch)), decoded, strict=True))


def test_a_batch_without_rows() -> None:
    arguments = context_arguments(random_batch([0, 0], [7, 0]), max_q_len=0)
    assert context(**arguments)[0].shape == (0, 4, 16)
