"""The decode reference against a second formula: forms of the cache, a log2 scale, saturation, and what must not matter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.references import trtllm_batch_decode_with_kv_cache
from tests.cases import Batch, assert_same, decode_arguments, expected, random_batch

decode = trtllm_batch_decode_with_kv_cache


# Values


def one_tensor(cache: tuple[Tensor, Tensor]) -> Tensor:
    return torch.stack(cache, dim=1)


def only_k(cache: tuple[Tensor, Tensor]) -> Tensor:
    """K is V where the second dimension is 1."""
    return cache[0].unsqueeze(1)


def views_of_a_wider_allocation(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return torch.cat(cache, dim=-1).split(16, dim=-1)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("held", [one_tensor, only_k, views_of_a_wider_allocation])
def test_an_engine_holds_k_and_v_together(kv_layout: str, held: Callable[..., Any]) -> None:
    batch = random_batch([1, 1], [9, 30])
    arguments = decode_arguments(batch, kv_layout=kv_layout)
    arguments["kv_cache"] = held(arguments["kv_cache"])
    values = batch.keys if held is only_k else batch.values
    assert_same(decode(**arguments), expected(Batch(batch.queries, batch.keys, values)))


def test_log2_scale_takes_precedence_and_is_multiplied_in_float64() -> None:
    batch = random_batch([2, 2], [7, 30])
    log2_scale = torch.tensor([0.7])
    out = decode(**decode_arguments(batch, bmm1_scale=100.0, bmm1_scale_log2=log2_scale))
    same = decode(**decode_arguments(batch, bmm1_scale=log2_scale.item() * math.log(2.0)))
    torch.testing.assert_close(out, same, rtol=1e-12, atol=1e-12)


# Where results go


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
