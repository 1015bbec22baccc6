"""Convert values to the dtype of a cache and back, and fill memory with poison (values that would change a result)."""

import math

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.references.quantization import dequantize_nvfp4, quantize_e4m3, quantize_nvfp4
from lab.workloads.attention_case import Dead

# Finite values, so large that one poisoned value in a product changes the result. e4m3's maximum is 448. e2m1's maximum is 6:
# the byte holds two sixes, and poisoned scale factors make them large.
POISON = {torch.bfloat16: 1e30, torch.float16: 6e4, E4M3: 448.0, NVFP4: 0x77}
# Scales of an e4m3 cache. They are unequal and far from 1, so that a dropped or swapped scale changes the result.
E4M3_K_SCALE = 0.03125
E4M3_V_SCALE = 0.0625


def as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return values in a cache's dtype, same shape. For an e4m3 cache they are divided by the scale."""
    return quantize_e4m3(values, scale) if dtype == E4M3 else values.to(dtype)


def stored_kv(dtype: torch.dtype, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Return K and V of tokens as a cache of this dtype stores them. Scale factors of K and V follow if it is NVFP4."""
    if dtype == E4M3:
        return quantize_e4m3(keys, E4M3_K_SCALE), quantize_e4m3(values, E4M3_V_SCALE)
    if dtype != NVFP4:
        return keys.to(dtype), values.to(dtype)
    (k, k_factors), (v, v_factors) = quantize_nvfp4(keys, E4M3_K_SCALE), quantize_nvfp4(values, E4M3_V_SCALE)
    return k, v, k_factors, v_factors


def read_kv(k: Tensor, v: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V as a kernel reads them, without the layer's scales. NVFP4 values are multiplied by `factors`."""
    return (dequantize_nvfp4(k, factors[0]), dequantize_nvfp4(v, factors[1])) if factors else (k, v)


def raw(tensor: Tensor) -> Tensor:
    """Return the tensor, viewed as uint8 if its elements have one byte: torch supports few operations on e4m3 on a CPU."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def fill(storage: Tensor, value: float | None = None) -> None:
    """Fill storage with a value, or with its dtype's `POISON`, a huge value. e4m3 is filled as bytes, because torch cannot fill
    it on every device.

    NVFP4 has no NaN, so it is filled with its poison for any value except 0.
    """
    value = POISON[storage.dtype] if value is None else value
    if storage.dtype == NVFP4:
        storage.fill_(POISON[NVFP4] if value != 0 else 0)
    elif storage.dtype == E4M3:
        storage.view(torch.uint8).fill_(int(torch.tensor(value).to(E4M3).view(torch.uint8)))
    else:
        storage.fill_(value)


def fill_dead(pool: Tensor, dead: Dead) -> None:
    """Fill pages with the numbers of cells that no row may read."""
    fill(pool, {Dead.ZERO: 0.0, Dead.HUGE: POISON[pool.dtype], Dead.NAN: float("nan")}[dead])


def unwritten(buffer: Tensor) -> Tensor:
    """Fill a buffer that a kernel must write with NaN, a huge value and minus this value in turn, and return the buffer.

    A kernel that adds to NaN returns NaN. The maximum of NaN and a result may be the result, so that only huge values show it.
    """
    huge = POISON.get(buffer.dtype, POISON[torch.bfloat16])
    values = torch.tensor((math.nan, huge, -huge), device=buffer.device).to(buffer.dtype)
    turns = torch.arange(buffer.numel(), device=buffer.device).view(buffer.shape) % len(values)
    raw(buffer).copy_(raw(values)[turns])
    return buffer
