"""The decode reference against a second formula, hand-computed cases, and what must not matter."""

import math
from typing import Any

import pytest
import torch

from lab.references import trtllm_batch_decode_with_kv_cache
from lab.references.softmax_attention import PIECE_ELEMENTS
from tests.cases import (
    Batch,
    assert_same,
    coded_batch,
    decode_arguments,
    expected,
    keys_seen,
    pack_mask,
    random_batch,
    seen_keys,
)

decode = trtllm_batch_decode_with_kv_cache
P = 16


def coded(batch: Batch, **changes: Any) -> list[set[int]]:
    return seen_keys(*decode(**decode_arguments(batch, **changes)))


# Which keys a row sees


@pytest.mark.parametrize("q_len", [*range(1, 9), 33, 40])
def test_rows_end_at_the_last_key(q_len: int) -> None:
    batch = coded_batch([q_len] * 3, [q_len, 41, 50])
    assert coded(batch) == keys_seen(batch)


def test_causal_rule_by_hand() -> None:
    assert coded(coded_batch([3], [5])) == [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_window_by_hand() -> None:
    assert coded(coded_batch([2], [6]), window_left=2) == [{2, 3, 4}, {3, 4, 5}]
    assert coded(coded_batch([2], [6]), window_left=0) == [{4}, {5}]


@pytest.mark.parametrize("window_left", [0, 1, P - 1, P, 49, 50, 1000])
@pytest.mark.parametrize("q_len", [1, 3])
def test_window_keeps_window_left_keys_and_the_row_itself(window_left: int, q_len: int) -> None:
    batch = coded_batch([q_len] * 4, [3, 16, 33, 50])
    assert coded(batch, window_left=window_left) == keys_seen(batch, window_left=window_left)


def test_lengths_at_page_boundaries() -> None:
    batch = coded_batch([1] * 8, [0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1])
    assert coded(batch) == [set(range(length)) for length in batch.kv_lens]


def test_variable_query_lengths() -> None:
    batch = coded_batch([0, 3, 1, 0, 7, 2, 0], [5, 20, 1, 0, 4, 50, 9])
    assert coded(batch, ragged=True) == keys_seen(batch)


# Draft masks


def tree(q_len: int, parents: Any) -> list[list[bool]]:
    """Row j sees itself and its ancestors."""
    mask = [[False] * q_len for _ in range(q_len)]
    for row in range(q_len):
        token = row
        while token >= 0:
            mask[row][token] = True
            token = parents(token)
    return mask


MASKS = {
    "causal": lambda q_len: [[token <= row for token in range(q_len)] for row in range(q_len)],
    "full": lambda q_len: [[True] * q_len for _ in range(q_len)],
    "none": lambda q_len: [[False] * q_len for _ in range(q_len)],
    "itself": lambda q_len: [[token == row for token in range(q_len)] for row in range(q_len)],
    "binary tree": lambda q_len: tree(q_len, lambda token: (token - 1) // 2 if token else -1),
    "star": lambda q_len: tree(q_len, lambda token: 0 if token else -1),
}


@pytest.mark.parametrize("q_len", [1, 2, 8, 16, 17, 33, 40])
@pytest.mark.parametrize("kind", MASKS)
def test_mask(kind: str, q_len: int) -> None:
    batch = coded_batch([q_len] * 3, [q_len, q_len + 3, 50])
    masks = [MASKS[kind](q_len)] * 3
    assert coded(batch, mask=pack_mask(masks)) == keys_seen(batch, masks=masks)


def test_causal_mask_is_no_mask() -> None:
    batch = random_batch([35, 35], [35, 60])
    arguments = decode_arguments(batch)
    masked = decode(**arguments, mask=pack_mask([MASKS["causal"](35)] * 2))
    assert_same(masked, tuple(part.double() for part in decode(**arguments)))


def test_each_request_has_its_own_mask_and_a_window_applies_beside_it() -> None:
    masks = [MASKS["full"](5), MASKS["binary tree"](5), MASKS["star"](5)]
    batch = coded_batch([5] * 3, [5, 17, 40])
    assert coded(batch, mask=pack_mask(masks), window_left=3) == keys_seen(batch, masks=masks, window_left=3)


def test_mask_of_a_request_shorter_than_its_rows() -> None:
    masks = [MASKS["full"](6)]
    batch = coded_batch([6], [4])
    assert coded(batch, mask=pack_mask(masks)) == [{0, 1, 2, 3}] * 6


def test_mask_bits_by_hand() -> None:
    mask = torch.zeros(1, 18, 2, dtype=torch.int32)
    mask[0, 0, 0] = 1 << 3 | 1 << 15
    mask[0, 17, 1] = 1 << 1
    seen = coded(coded_batch([18], [20]), mask=mask.to(torch.uint16))
    assert seen[0] == {0, 1, 5, 17}
    assert seen[17] == {0, 1, 19}


# Values


def test_query_head_reads_the_kv_head_of_its_group() -> None:
    batch = random_batch([1], [3], heads=(6, 2), head_dim=1, dtype=torch.float64)
    batch.values[0][:, 0], batch.values[0][:, 1] = 10.0, 20.0
    out, _ = decode(**decode_arguments(batch))
    torch.testing.assert_close(out.flatten().tolist(), [10.0] * 3 + [20.0] * 3)


def test_output_is_the_mean_of_visible_values_where_q_and_k_are_zero() -> None:
    batch = Batch(
        [torch.zeros(2, 1, 2)],
        [torch.zeros(3, 1, 2)],
        [torch.tensor([[[1.0, 10.0]], [[2.0, 20.0]], [[6.0, 30.0]]])],
    )
    out, lse = decode(**decode_arguments(batch, bmm2_scale=2.0))
    assert out.tolist() == [[[3.0, 30.0]], [[6.0, 40.0]]]
    torch.testing.assert_close(lse.flatten().tolist(), [1.0, math.log2(3.0)])


def test_softmax_by_hand() -> None:
    batch = Batch([torch.ones(1, 1, 1)], [torch.tensor([[[0.0]], [[2.0]]])], [torch.tensor([[[1.0]], [[5.0]]])])
    out, lse = decode(**decode_arguments(batch, bmm1_scale=math.log(3.0) / 2))  # weights 1 and 3
    assert out.item() == pytest.approx((1 + 3 * 5) / 4, rel=1e-14)
    assert lse.item() == pytest.approx(2.0)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("separate_tables", [False, True])
def test_layouts_and_tables(kv_layout: str, separate_tables: bool) -> None:
    batch = random_batch([3] * 4, [0, 2, 16, 37])
    arguments = decode_arguments(batch, kv_layout=kv_layout, separate_tables=separate_tables, bmm1_scale=0.25)
    assert_same(decode(**arguments), expected(batch, bmm1_scale=0.25))


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_one_cache_tensor(kv_layout: str) -> None:
    batch = random_batch([1, 1], [9, 30])
    arguments = decode_arguments(batch, kv_layout=kv_layout)
    arguments["kv_cache"] = torch.stack(arguments["kv_cache"], dim=1)
    assert_same(decode(**arguments), expected(batch))


def test_one_cache_tensor_whose_second_dimension_is_one_is_both_k_and_v() -> None:
    batch = random_batch([1, 1], [9, 30])
    batch = Batch(batch.queries, batch.keys, batch.keys)
    arguments = decode_arguments(batch)
    arguments["kv_cache"] = arguments["kv_cache"][0].unsqueeze(1)
    assert_same(decode(**arguments), expected(batch))


def test_strided_cache() -> None:
    """K and V as an engine may hold them: views of one wider allocation."""
    batch = random_batch([1, 1], [9, 30])
    arguments = decode_arguments(batch)
    k, v = arguments["kv_cache"]
    both = torch.cat((k, v), dim=-1)
    arguments["kv_cache"] = (both[..., :16], both[..., 16:])
    assert_same(decode(**arguments), expected(batch))


def test_log2_scale_takes_precedence() -> None:
    batch = random_batch([2, 2], [7, 30])
    log2_scale = torch.tensor([0.375 / math.log(2.0)])
    out, lse = decode(**decode_arguments(batch, bmm1_scale=100.0, bmm1_scale_log2=log2_scale))
    truth = expected(batch, bmm1_scale=0.375)
    torch.testing.assert_close(out, truth[0], rtol=1e-5, atol=1e-6)  # log2_scale is rounded to float32
    torch.testing.assert_close(lse.double(), truth[1], rtol=1e-5, atol=1e-6)


def test_log2_scale_is_multiplied_in_float64() -> None:
    batch = random_batch([2, 2], [7, 30])
    log2_scale = torch.tensor([0.7])
    out = decode(**decode_arguments(batch, bmm1_scale_log2=log2_scale))
    same = decode(**decode_arguments(batch, bmm1_scale=log2_scale.item() * math.log(2.0)))
    torch.testing.assert_close(out, same, rtol=1e-12, atol=1e-12)


# LSE


def test_a_row_with_a_sink_and_no_key() -> None:
    batch = random_batch([1], [0], heads=(3, 1))
    out, lse = decode(
        **decode_arguments(batch, sinks=torch.tensor([1.0, -math.inf, -800.0]))
    )  # exp(-800) is 0 in float64
    assert (out == 0).all()
    assert lse.tolist() == [[pytest.approx(1 / math.log(2.0)), -math.inf, pytest.approx(-800 / math.log(2.0))]]


@pytest.mark.parametrize("cut", [1, 16, 29])
def test_two_halves_merge_by_their_lse(cut: int) -> None:
    batch = random_batch([1], [30], magnitude=3.0)
    halves = [
        Batch(batch.queries, [batch.keys[0][part]], [batch.values[0][part]]) for part in (slice(cut), slice(cut, None))
    ]
    (out_a, lse_a), (out_b, lse_b) = (decode(**decode_arguments(half, bmm1_scale=0.25)) for half in halves)
    share = torch.sigmoid((lse_a - lse_b).double() * math.log(2.0)).unsqueeze(-1)
    whole, lse = decode(**decode_arguments(batch, bmm1_scale=0.25))
    torch.testing.assert_close(out_a * share + out_b * (1 - share), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.logaddexp2(lse_a, lse_b), lse)


# Where results go


@pytest.mark.parametrize(
    "out_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
def test_out_dtype(out_dtype: torch.dtype) -> None:
    batch = random_batch([2, 2], [7, 30])
    out = decode(**decode_arguments(batch, out_dtype=out_dtype, return_lse=False))
    assert out.dtype == out_dtype
    truth = expected(batch)[0].to(out_dtype)
    torch.testing.assert_close(out.double(), truth.double(), rtol=torch.finfo(out_dtype).eps, atol=1e-12)


def test_e4m3_output_saturates() -> None:
    batch = Batch([torch.zeros(1, 1, 2)], [torch.zeros(1, 1, 2)], [torch.tensor([[[1.0, -1.0]]])])
    arguments = decode_arguments(batch, bmm2_scale=1e6, out_dtype=torch.float8_e4m3fn)
    assert decode(**arguments)[0].float().flatten().tolist() == [448.0, -448.0]


# What must not matter


def test_keys_left_of_the_window_change_no_bit() -> None:
    batch = random_batch([1, 1], [40, 50])
    arguments = decode_arguments(batch, window_left=10)
    clean = decode(**arguments)
    for side in (batch.keys, batch.values):
        for history in side:
            history[: len(history) - 11] = math.nan
    got = decode(**decode_arguments(batch, window_left=10))
    assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))


def test_requests_may_share_pages() -> None:
    batch = random_batch([1], [33])
    batch = Batch(batch.queries * 2, batch.keys * 2, batch.values * 2)
    arguments = decode_arguments(batch)
    arguments["block_tables"][1] = arguments["block_tables"][0]
    assert_same(decode(**arguments), expected(batch))


def test_a_request_may_repeat_a_page() -> None:
    batch = random_batch([1], [16])
    arguments = decode_arguments(batch)
    arguments["block_tables"][0, :3] = arguments["block_tables"][0, 0].item()
    arguments |= {"seq_lens": torch.tensor([40], dtype=torch.int32), "max_seq_len": 40}
    keys, values = (torch.cat((side[0], side[0], side[0][:8])) for side in (batch.keys, batch.values))
    assert_same(decode(**arguments), expected(Batch(batch.queries, [keys], [values])))


@pytest.mark.parametrize("piece_elements", [1, 300, 2000, 10000])
@pytest.mark.parametrize("kind", ["causal", "window", "mask", "ragged"])
def test_pieces_do_not_matter(piece_elements: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = kind == "ragged"
    batch = random_batch([0, 9, 1, 33, 4] if ragged else [9] * 5, [3, 40, 1, 20, 70], magnitude=2.0)
    rule: dict[str, Any] = {"window_left": 6} if kind == "window" else {}
    masks = [MASKS["binary tree"](9)] * 5 if kind == "mask" else None
    mask: dict[str, Any] = {} if masks is None else {"mask": pack_mask(masks)}
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", piece_elements)
    arguments = decode_arguments(batch, ragged=ragged, poison=math.nan, **rule, **mask)
    assert_same(decode(**arguments), expected(batch, masks=masks, **rule))
