"""The context reference: variable query lengths, causal or not, against the same second formula."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.references import paged_attention, trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from tests.cases import (
    Batch,
    assert_same,
    coded_batch,
    context_arguments,
    decode_arguments,
    expected,
    keys_seen,
    random_batch,
    running_sum,
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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("separate_tables", [False, True])
def test_values(causal: bool, kv_layout: str, separate_tables: bool) -> None:
    batch = random_batch([4, 0, 9], [4, 3, 37], heads=(10, 2), magnitude=3.0, kv_dtype=torch.float8_e4m3fn)
    scales: dict[str, Any] = {"bmm1_scale": 0.3125, "bmm2_scale": 1.5, "causal": causal}
    sinks = torch.linspace(-2, 4, 10)
    arguments = context_arguments(batch, kv_layout=kv_layout, separate_tables=separate_tables, sinks=sinks)
    assert_same(context(**arguments | scales), expected(batch, sinks=sinks, **scales))


def test_tensor_scales_and_buffers() -> None:
    batch = random_batch([4, 9], [4, 37])
    out, lse = torch.full((13, 4, 16), math.nan, dtype=torch.float64), torch.full((13, 4), math.nan)
    arguments = context_arguments(batch, out=out, out_dtype=None, lse=lse, return_lse=False)
    scales = {"bmm1_scale": torch.tensor([0.5]), "bmm2_scale": torch.tensor([-2.0])}
    assert context(**arguments | scales) is out
    assert_same((out, lse), expected(batch, bmm1_scale=0.5, bmm2_scale=-2.0))


def test_equal_to_decode_where_both_apply() -> None:
    batch = random_batch([6, 6], [6, 30])
    decoded = trtllm_batch_decode_with_kv_cache(**decode_arguments(batch))
    assert all(torch.equal(a, b) for a, b in zip(context(**context_arguments(batch)), decoded, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("foreign_id", [None, -1, 2**31 - 1])
@pytest.mark.parametrize("causal", [True, False])
def test_dead_memory_changes_no_bit(poison: float, foreign_id: int | None, causal: bool) -> None:
    batch = random_batch([2, 0, 15, 16, 3], [2, 1, 15, 16, 33])
    clean = context(**context_arguments(batch, causal=causal))
    poisoned = context(**context_arguments(batch, causal=causal, poison=poison, foreign_id=foreign_id))
    assert all(torch.equal(a, b) for a, b in zip(poisoned, clean, strict=True))


def test_empty_batch() -> None:
    arguments = context_arguments(random_batch([1], [7])) | {
        "query": torch.zeros(0, 4, 16, dtype=torch.bfloat16),
        "seq_lens": torch.zeros(0, dtype=torch.int32),
        "block_tables": torch.zeros(0, 5, dtype=torch.int32),
        "cum_seq_lens_q": running_sum([]),
        "cum_seq_lens_kv": running_sum([]),
        "batch_size": 0,
        "max_q_len": 0,
        "max_kv_len": 0,
    }
    out, lse = context(**arguments)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_a_batch_without_rows() -> None:
    arguments = context_arguments(random_batch([0, 0], [7, 0]), max_q_len=0)
    assert context(**arguments)[0].shape == (0, 4, 16)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 40)), min_size=1, max_size=4),
    group=st.integers(1, 6),
    num_kv_heads=st.integers(1, 2),
    page_size=st.sampled_from([1, 16, 32]),
    window_left=st.sampled_from([-1, 0, 5]),
    causal=st.booleans(),
    piece_elements=st.sampled_from([50, 2000, 2**26]),
    seed=st.integers(0, 1000),
)
def test_any_call(
    lengths: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    page_size: int,
    window_left: int,
    causal: bool,
    piece_elements: int,
    seed: int,
) -> None:
    q_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
    q_lens[0] = max(q_lens[0], 1)
    batch = random_batch(q_lens, kv_lens, heads=(group * num_kv_heads, num_kv_heads), head_dim=8, seed=seed)
    rule: dict[str, Any] = {"causal": causal, "window_left": window_left if causal else -1}
    arguments = context_arguments(batch, page_size, seed=seed, poison=math.nan, **rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "PIECE_ELEMENTS", piece_elements)
        assert_same(context(**arguments), expected(batch, **rule))


def test_rows_after_the_last_request_are_padding_and_zero() -> None:
    """As a CUDA graph has them that was captured with room for more rows."""
    batch = random_batch([2, 3], [9, 20], dtype=torch.float64)
    arguments = context_arguments(batch)
    padding = torch.full((4, *arguments["query"].shape[1:]), math.nan, dtype=torch.float64)
    out, lse = context(**arguments | {"query": torch.cat((arguments["query"], padding))})
    assert_same((out[:5], lse[:5]), expected(batch))
    assert not out[5:].any()
    assert (lse[5:] == -math.inf).all()
