"""The MLA decode reference against a dense second formula, hand-computed cases, what must not matter, and bad input."""

import math
from typing import Any

import pytest
import torch

from lab.references import attention, eager_attention, trtllm_batch_decode_with_kv_cache_mla
from tests.cases import RANK, ROPE, assert_same, expected, latent_batch, mla_arguments, of_entries

mla = trtllm_batch_decode_with_kv_cache_mla


# By hand


@pytest.mark.parametrize(
    ("entries", "queries", "changes", "out", "lse"),
    [
        # One key returns its latent part.
        ([[3.0, -5.0, 7.0]], [[1.0, 2.0, 4.0]], {"bmm1_scale": math.log(2.0)}, [[3.0, -5.0]], [21.0]),
        # Weights 1 and 3 by the rotary parts, 1 and 4 by the latent ones.
        (
            [[1.0, 10.0, 0.0], [5.0, 20.0, 2.0]],
            [[0.0, 0.0, 1.0]],
            {"bmm1_scale": math.log(3.0) / 2},
            [[(1 + 3 * 5) / 4, (10 + 3 * 20) / 4]],
            [2.0],
        ),
        (
            [[0.0, 10.0, 9.0], [1.0, 20.0, 9.0]],
            [[math.log(4.0), 0.0, 0.0]],
            {"bmm2_scale": 2.0},
            [[2 * 4 / 5, 2 * (10 + 4 * 20) / 5]],
            [math.log2(5.0)],
        ),
    ],
    ids=["one key", "rotary weights", "latent weights"],
)
def test_by_hand(
    entries: list[list[float]], queries: list[list[float]], changes: Any, out: list[list[float]], lse: list[float]
) -> None:
    """Rows of one head, a latent vector of 2 and a rotary part of 1."""
    batch = of_entries([torch.tensor(queries).unsqueeze(1)], [torch.tensor(entries)], rank=2)
    got, got_lse = mla(**mla_arguments(batch, **changes))
    assert got.flatten().tolist() == pytest.approx([each for row in out for each in row])
    assert got_lse.flatten().tolist() == pytest.approx(lse, rel=1e-6)


# Against the dense formula


def test_a_cache_without_the_dimension_of_the_only_head() -> None:
    batch = latent_batch([2] * 4, [0, 1, 16, 37])
    arguments = mla_arguments(batch)
    assert_same(mla(**arguments | {"kv_cache": arguments["kv_cache"].squeeze(1)}), expected(batch))


def test_a_cache_that_is_a_view_of_a_wider_pool() -> None:
    batch = latent_batch([1, 1], [9, 30])
    arguments = mla_arguments(batch)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat((cache, torch.full_like(cache, math.nan)), dim=-1)[..., : RANK + ROPE]
    assert_same(mla(**arguments), expected(batch))


def test_sinks_in_a_sequence() -> None:
    batch, sinks = latent_batch([3] * 2, [2, 25]), torch.tensor([0.0, 0.5, -1.0, 3.0])
    for wrapped in ([sinks], (sinks,)):
        assert_same(mla(**mla_arguments(batch, sinks=wrapped)), expected(batch, sinks=sinks))


@pytest.mark.parametrize("max_q_len", [7, 100, None])
def test_variable_query_lengths(max_q_len: int | None) -> None:
    batch = latent_batch([0, 3, 1, 0, 7, 2, 0], [5, 20, 1, 0, 4, 50, 9])
    assert_same(mla(**mla_arguments(batch, ragged=True, max_q_len=max_q_len)), expected(batch))


# Where results go


@pytest.mark.parametrize("base", [None, "base2", "basee"])
@pytest.mark.parametrize("shape", [None, (6, 4), (3, 2, 4)])
def test_lse(base: str | None, shape: tuple[int, ...] | None) -> None:
    batch = latent_batch([2] * 3, [1, 7, 30])
    lse = None if shape is None else torch.full(shape, math.nan)
    _, returned = mla(**mla_arguments(batch, lse=lse, return_lse_base=base))
    assert lse is None or returned is lse
    assert returned.dtype == torch.float32
    assert returned.shape == (shape or (6, 4))
    truth = expected(batch)[1] * (math.log(2.0) if base == "basee" else 1.0)
    torch.testing.assert_close(returned.reshape(6, 4).double(), truth, rtol=1e-6, atol=1e-6)


def test_results_of_a_ragged_call() -> None:
    batch = latent_batch([1, 3], [7, 30])
    given = torch.full((4, 4), math.nan)
    out, lse = mla(**mla_arguments(batch, ragged=True, out=None, lse=given, return_lse_base="basee"))
    assert out.shape == (4, 4, RANK)
    assert lse is given
    torch.testing.assert_close(lse.double(), expected(batch)[1] * math.log(2.0), rtol=1e-6, atol=1e-6)


# The functions under it, where V is narrower than K


def test_attention_and_its_control_take_values_of_another_head_dim() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(shape, generator=generator) for shape in ((2, 3, 4, 12), (2, 20, 2, 12)))
    inputs: Any = {"query": query, "keys": keys, "values": keys[..., :5], "visible": torch.ones(2, 3, 20) > 0}
    truth, _ = attention(**inputs)
    padded, _ = attention(**inputs | {"values": torch.nn.functional.pad(keys[..., :5], (0, 7))})
    # Not bit for bit: how a product is summed may depend on its shape, and does on some CPUs.
    torch.testing.assert_close(padded[..., :5], truth, rtol=1e-13, atol=1e-14)
    control = eager_attention(**inputs, arithmetic=torch.float32, out_dtype=torch.float32)
    torch.testing.assert_close(control.double(), truth, rtol=1e-4, atol=1e-5)
    nothing: Any = {"keys": keys[:, :0], "values": keys[:, :0, :, :5], "visible": inputs["visible"][..., :0]}
    control = eager_attention(query, **nothing, arithmetic=torch.float32, out_dtype=torch.float32)
    assert torch.equal(control, torch.zeros(2, 3, 4, 5))
