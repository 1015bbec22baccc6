"""Quantise K/V to NVFP4, dequantise it to float64, and convert the order of V's scale factors."""

import torch

from lab.calls.problem import INTERLEAVED_TOKENS, NVFP4_BLOCK
from lab.references.softmax_attention import quantize_e4m3, widened

E2M1_MAX = 6.0  # largest e2m1 magnitude
# Magnitudes of the eight codes of e2m1: 1 sign, 2 exponent, 1 mantissa bit (OCP Microscaling Formats v1.0, 5.3.3).
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize_nvfp4(packed: torch.Tensor, scale_factors: torch.Tensor) -> torch.Tensor:
    """Return NVFP4 values in float64 [..., head_dim]. They are not multiplied by the cache's global scale.

    Args:
        packed: uint8 [..., head_dim // 2]. The even element of a pair is in the low four bits.
        scale_factors: e4m3 [..., head_dim // 16], one per 16 elements, in token order (not interleaved).
    """
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64)
    of_codes = torch.cat((magnitudes, -magnitudes))
    pairs = torch.stack((of_codes.repeat(16), of_codes.repeat_interleave(16)), dim=1)  # of every byte
    values = pairs.to(packed.device, non_blocking=True).index_select(0, packed.flatten().to(torch.int32))
    by_block = values.view(*scale_factors.shape, NVFP4_BLOCK) * widened(scale_factors, torch.float64).unsqueeze(-1)
    return by_block.flatten(-2)


def quantize_nvfp4(values: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `values / global_scale` in NVFP4: (uint8 [..., head_dim // 2], two e2m1 values per byte, the even element in the
    low four bits; e4m3 scale factors [..., head_dim // 16]). `values` are [..., head_dim]; head_dim is a multiple of 16.
    """
    blocks = (values.to(torch.float64) / global_scale).unflatten(-1, (-1, NVFP4_BLOCK))
    scale_factors = quantize_e4m3(blocks.abs().amax(dim=-1) / E2M1_MAX, 1.0)
    divisor = scale_factors.to(torch.float64).unsqueeze(-1)
    scaled = torch.where(divisor > 0, blocks / divisor, torch.zeros_like(blocks)).flatten(-2)
    magnitudes = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float64, device=values.device)
    midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2  # half of the way is rounded down
    codes = torch.bucketize(scaled.abs(), midpoints).to(torch.uint8)
    codes = torch.where(scaled < 0, codes + 8, codes).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4), scale_factors


def interleave_v_scale_factors(scale_factors: torch.Tensor) -> torch.Tensor:
    """Return V's scale factors, uint8 or e4m3 [num_pages, num_kv_heads, page_size, S], in the order that trtllm-gen
    reads. 4 must divide page_size. In a page of one head, factor s of token t lies at (t // 4) * 4 S + 4 s + t % 4.
    """
    grouped = scale_factors.unflatten(2, (-1, INTERLEAVED_TOKENS))
    return grouped.transpose(3, 4).reshape(scale_factors.shape).contiguous()


def deinterleave_v_scale_factors(scale_factors: torch.Tensor) -> torch.Tensor:
    """Return scale factors in token order, same shape and dtype, from the order that `interleave_v_scale_factors` makes."""
    pages, heads, page_size, count = scale_factors.shape
    grouped = scale_factors.reshape(pages, heads, page_size // INTERLEAVED_TOKENS, count, INTERLEAVED_TOKENS)
    return grouped.transpose(3, 4).reshape(scale_factors.shape)
