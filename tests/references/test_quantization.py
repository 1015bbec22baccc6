"""e4m3 and NVFP4 as stored: literal codes, round trips, and the two orders of V's scale factors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.references import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from lab.references.quantization import (
    deinterleave_v_scale_factors,
    dequantize_nvfp4,
    interleave_v_scale_factors,
    quantize_nvfp4,
)
from lab.references.softmax_attention import quantize_e4m3
from tests.cases import Batch, assert_same, context_arguments, decode_arguments, expected, random_batch, write_pages

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def unpacked(packed: Tensor, scale_factors: Tensor) -> Tensor:
    """NVFP4 to float64, one element at a time."""
    rows = packed.flatten(0, -2).tolist()
    factors = scale_factors.double().flatten(0, -2).tolist()
    values = [
        [E2M1[row[i // 2] >> 4 if i % 2 else row[i // 2] & 15] * factor[i // 16] for i in range(2 * len(row))]
        for row, factor in zip(rows, factors, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float64).view(*packed.shape[:-1], -1)


def test_every_code_by_hand() -> None:
    packed = torch.tensor([low | (low + 1) << 4 for low in range(0, 16, 2)], dtype=torch.uint8)
    factors = torch.tensor([2.0]).to(torch.float8_e4m3fn)
    assert dequantize_nvfp4(packed, factors).tolist() == [2.0 * value for value in E2M1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(blocks=st.integers(1, 4), magnitude=st.sampled_from([1e-2, 1.0, 30.0]), seed=st.integers(0, 1000))
def test_nvfp4_round_trip(blocks: int, magnitude: float, seed: int) -> None:
    values = torch.randn(3, 16 * blocks, generator=torch.Generator().manual_seed(seed)) * magnitude
    packed, factors = quantize_nvfp4(values, global_scale=magnitude)
    decoded = dequantize_nvfp4(packed, factors)
    assert torch.equal(decoded, unpacked(packed, factors))
    largest = (values / magnitude).abs().unflatten(-1, (-1, 16)).amax(dim=-1).repeat_interleave(16, dim=-1)
    # Half of e2m1's widest step, 2 of 6, and the rounding of the scale factor, 1 part in 16.
    assert ((decoded - values / magnitude).abs() <= largest * (1 / 6 + 1 / 16)).all()
    packed_again, factors_again = quantize_nvfp4(decoded, 1.0)
    assert torch.equal(dequantize_nvfp4(packed_again, factors_again), decoded)


def test_a_number_becomes_the_nearest_that_is_stored_and_half_of_the_way_is_rounded_down() -> None:
    """The block's largest number is 6, so its scale factor is 1."""
    between = [0.25, 0.26, 0.75, 0.76, 1.25, 1.26, 1.75, 1.76, 2.5, 2.6, 3.5, 3.6, 5.0, 5.1, 6.0, -0.76]
    nearest = [0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0, -1.0]
    assert dequantize_nvfp4(*quantize_nvfp4(torch.tensor(between), 1.0)).tolist() == nearest


def test_nvfp4_of_zeros() -> None:
    assert (dequantize_nvfp4(*quantize_nvfp4(torch.zeros(2, 32), 1.0)) == 0).all()


def test_e4m3_saturates_and_keeps_nan() -> None:
    stored = quantize_e4m3(torch.tensor([1e4, -1e4, 448.0, 0.3, math.inf, math.nan]), 0.5).float().tolist()
    assert stored[:5] == [448.0, -448.0, 448.0, 0.625, 448.0]
    assert math.isnan(stored[5])


def test_v_scale_order_by_hand() -> None:
    """8 tokens of 2 factors, named 10 t + s: token t's factor s lies at (t // 4) * 8 + 4 s + t % 4."""
    plain = torch.tensor([[10 * t + s for s in range(2)] for t in range(8)]).view(1, 1, 8, 2)
    stored = [0, 10, 20, 30, 1, 11, 21, 31, 40, 50, 60, 70, 41, 51, 61, 71]
    assert interleave_v_scale_factors(plain).flatten().tolist() == stored
    assert torch.equal(deinterleave_v_scale_factors(interleave_v_scale_factors(plain)), plain)
    assert interleave_v_scale_factors(plain).is_contiguous()


def interleaved(plain: Tensor) -> Tensor:
    """The documented formula, one factor at a time, over [num_pages, num_heads, page_size, S]."""
    pages, heads, page_size, count = plain.shape
    stored = torch.empty(pages, heads, page_size * count)
    for token in range(page_size):
        for factor in range(count):
            stored[:, :, token // 4 * 4 * count + factor * 4 + token % 4] = plain[:, :, token, factor].float()
    return stored.view(plain.shape).to(plain.dtype)


def nvfp4_case(order: str, kv_layout: str = "HND") -> tuple[Batch, dict[str, Any]]:
    """The batch as stored and decoded by hand, and what an NVFP4 cache of it adds to a call's arguments."""
    raw = random_batch([2, 2, 2], [3, 16, 37], head_dim=32)
    stored = {side: [quantize_nvfp4(h, 0.25) for h in getattr(raw, side)] for side in ("keys", "values")}
    batch = Batch(raw.queries, *([unpacked(*pair) for pair in stored[side]] for side in ("keys", "values")))
    caches, factors = [], []
    for pairs in stored.values():
        cache, table = write_pages([packed for packed, _ in pairs], 16, seed=0, poison=255)
        scales, _ = write_pages([scale for _, scale in pairs], 16, seed=0, poison=math.nan)
        caches.append(cache)
        factors.append(scales)
    if order == "trtllm-gen":
        factors[1] = interleaved(factors[1])
    if kv_layout == "NHD":
        caches, factors = ([part.transpose(1, 2).contiguous() for part in both] for both in (caches, factors))
    return batch, {"kv_cache": tuple(caches), "kv_cache_sf": tuple(factors), "block_tables": table}


@pytest.mark.parametrize("backend", ["xqa", "trtllm-gen"])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_decode_of_nvfp4(backend: str, kv_layout: str) -> None:
    batch, cache = nvfp4_case(backend, kv_layout)
    arguments = decode_arguments(batch, kv_layout=kv_layout, backend=backend) | cache
    assert_same(trtllm_batch_decode_with_kv_cache(**arguments), expected(batch))


def test_the_two_orders_differ() -> None:
    batch, cache = nvfp4_case("xqa")
    arguments = decode_arguments(batch, backend="trtllm-gen") | cache
    out, _ = trtllm_batch_decode_with_kv_cache(**arguments)
    assert not torch.allclose(out, expected(batch)[0], rtol=1e-2)


@pytest.mark.parametrize("single_tensor", [False, True])
def test_context_of_nvfp4_is_interleaved(single_tensor: bool) -> None:
    batch, cache = nvfp4_case("trtllm-gen")
    if single_tensor:
        for name in ("kv_cache", "kv_cache_sf"):
            cache[name] = torch.stack([side.view(torch.uint8) for side in cache[name]], dim=1)
        cache["kv_cache_sf"] = cache["kv_cache_sf"].view(torch.float8_e4m3fn)
    arguments = context_arguments(batch) | cache
    assert_same(trtllm_batch_context_with_kv_cache(**arguments), expected(batch))


def test_auto_is_refused_off_the_gpu() -> None:
    batch, cache = nvfp4_case("xqa")
    with pytest.raises(ValueError, match=r"backend='auto'.*pass backend='xqa' or 'trtllm-gen'"):
        trtllm_batch_decode_with_kv_cache(**decode_arguments(batch) | cache)
