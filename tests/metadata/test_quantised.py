"""Quantised caches on the MHA backend: dtypes of a call, the fused write of e4m3, and where NVFP4's scale factors lie."""

import pytest
import torch

from lab.calls.problem import E4M3, NVFP4, AttentionCall
from lab.metadata import KVLayout, KVPool
from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache, write_e4m3
from lab.metadata.mha.backend import CallDtypes, call_dtypes
from lab.references.quantization import deinterleave_v_scale_factors, quantize_nvfp4
from lab.references.softmax_attention import quantize_e4m3

BF16 = torch.bfloat16
P, HEADS, DIM = 4, 2, 32
SLOTS = torch.tensor([5, 30, 17, 4, 6, 7])  # shuffled, and a whole page of four among them


DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT


@pytest.mark.parametrize(
    ("call", "kv_dtype", "trtllm_gen", "query", "out"),
    [
        *[(call, E4M3, True, E4M3, BF16) for call in (DECODE, CONTEXT)],
        (DECODE, E4M3, False, BF16, BF16),
        (CONTEXT, E4M3, False, E4M3, BF16),
        *[(call, NVFP4, True, E4M3, E4M3) for call in (DECODE, CONTEXT)],
        (DECODE, NVFP4, False, BF16, BF16),
        *[(call, BF16, trtllm_gen, BF16, BF16) for call in (DECODE, CONTEXT) for trtllm_gen in (False, True)],
    ],
)
def test_dtypes_of_a_call(
    call: AttentionCall, kv_dtype: torch.dtype, trtllm_gen: bool, query: torch.dtype, out: torch.dtype
) -> None:
    assert call_dtypes(call, BF16, kv_dtype, trtllm_gen=trtllm_gen) == CallDtypes(query, out)


def test_fmha_v2_is_refused_over_nvfp4() -> None:
    with pytest.raises(ValueError, match="fmha_v2 does not read an NVFP4 cache"):
        call_dtypes(CONTEXT, BF16, NVFP4, trtllm_gen=False)


def pool() -> KVPool:
    return KVPool(num_requests=2, max_context_len=12, page_size=P, num_pages=9)


def drawn(seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple((8 * torch.randn(len(SLOTS), heads, DIM, generator=generator)).to(BF16) for heads in (HEADS, HEADS, 4))


def stored(cache: PagedKVCache) -> list[torch.Tensor]:
    sides = (side.transpose(1, 2) if cache.layout is KVLayout.HND else side for side in (cache.k_cache, cache.v_cache))
    return [side.reshape(-1, HEADS, side.shape[-1])[SLOTS] for side in (each.view(torch.uint8) for each in sides)]


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("scales", [(1.0, 0.125), (0.3, 0.0217)])
def test_the_fused_write(layout: KVLayout, scales: tuple[float, float]) -> None:
    """Each element is rounded once, from its float32 product with the scale's float32 reciprocal."""
    cache = pool().new_cache(HEADS, DIM, E4M3, layout)
    k, v, query = drawn()
    k[0, 0, 0] = 3e4  # saturates
    written = write_e4m3(cache, SLOTS, k, v, k_scale=scales[0], v_scale=scales[1], query=query)
    assert written.dtype == E4M3
    assert torch.equal(written.view(torch.uint8), quantize_e4m3(query, 1.0).view(torch.uint8))
    for side, scale, got in zip((k, v), scales, stored(cache), strict=True):
        reciprocal = torch.tensor(1.0) / torch.tensor(scale)
        wanted = [
            (torch.tensor(float(element)) * reciprocal).clamp(-448, 448).to(E4M3).view(torch.uint8)
            for element in side.flatten()
        ]
        assert torch.equal(got.flatten(), torch.stack(wanted))
        if scale in (1.0, 0.125):
            assert torch.equal(got, quantize_e4m3(side, scale).view(torch.uint8))


def test_a_wrong_fused_write_is_refused() -> None:
    k, v, _ = drawn()
    with pytest.raises(TypeError, match=r"fills an e4m3 cache, not one of torch\.bfloat16"):
        write_e4m3(pool().new_cache(HEADS, DIM, BF16, KVLayout.NHD), SLOTS, k, v)
    cache = pool().new_cache(HEADS, DIM, E4M3, KVLayout.NHD)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float32"):
        write_e4m3(cache, SLOTS, k.float(), v)
    with pytest.raises(TypeError, match=r"v has dtype torch\.float64"):
        write_e4m3(cache, SLOTS, k, v.double())
    with pytest.raises(ValueError, match=r"k_scale=0.0 and v_scale=1.0 must be positive"):
        write_e4m3(cache, SLOTS, k, v, k_scale=0.0)


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("trtllm_gen", [False, True])
def test_nvfp4_values_and_scale_factors(layout: KVLayout, trtllm_gen: bool) -> None:
    cache = NVFP4KVCache.over(pool().new_cache(HEADS, DIM // 2, NVFP4, layout), trtllm_gen=trtllm_gen)
    (k, k_factors), (v, v_factors) = (quantize_nvfp4(side, 0.25) for side in drawn()[:2])
    cache.write(SLOTS, k, v, k_factors, v_factors)
    for side, got in zip((k, v), stored(cache), strict=True):
        assert torch.equal(side, got)
    k_pages, v_pages = cache.scale_factors.view(torch.uint8)
    if trtllm_gen:
        v_pages = deinterleave_v_scale_factors(v_pages)
    for factors, pages in ((k_factors, k_pages), (v_factors, v_pages)):
        assert torch.equal(factors.view(torch.uint8), pages.transpose(1, 2).reshape(-1, HEADS, DIM // 16)[SLOTS])


def test_wrong_scale_factors_are_refused() -> None:
    packed = pool().new_cache(HEADS, DIM // 2, NVFP4, KVLayout.NHD)
    with pytest.raises(ValueError, match="scale_factors has shape"):
        NVFP4KVCache(packed.storage, packed.layout, torch.zeros(2, 9, HEADS, P, 4, dtype=E4M3), True)
    cache = NVFP4KVCache.over(packed, trtllm_gen=False)
    (k, k_factors), (v, v_factors) = (quantize_nvfp4(side, 0.25) for side in drawn()[:2])
    with pytest.raises(ValueError, match="k_factors has shape"):
        cache.write(SLOTS, k, v, k_factors[..., :-1], v_factors)
    with pytest.raises(TypeError, match="v_factors has dtype"):
        cache.write(SLOTS, k, v, k_factors, v_factors.half())
    small = KVPool(num_requests=2, max_context_len=12, page_size=2, num_pages=9)
    with pytest.raises(ValueError, match="interleaves V's scale factors over 4 tokens"):
        NVFP4KVCache.over(small.new_cache(HEADS, DIM // 2, NVFP4, KVLayout.NHD), trtllm_gen=True)
