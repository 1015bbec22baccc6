"""Values as a cache stores them, and the poison around them."""

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.references.quantization import dequantize_nvfp4, quantize_e4m3, quantize_nvfp4

# Finite, and so large that one poisoned value in a product shows; e4m3 holds nothing larger than 448, and e2m1 than 6: a byte
# of two sixes, whose scale factors hold the rest.
POISON = {torch.bfloat16: 1e30, torch.float16: 6e4, E4M3: 448.0, NVFP4: 0x77}
# Scales of an e4m3 cache: unequal, and far from 1, so that a dropped or exchanged one shows.
E4M3_K_SCALE = 0.03125
E4M3_V_SCALE = 0.0625


def as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return values in a cache's dtype, divided by the scale if that is e4m3; same shape."""
    return quantize_e4m3(values, scale) if dtype == E4M3 else values.to(dtype)


def stored_kv(dtype: torch.dtype, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Return a request's tokens as a cache of K and V holds them; with the scale factors of both if it is NVFP4."""
    if dtype != NVFP4:
        return as_stored(keys, E4M3_K_SCALE, dtype), as_stored(values, E4M3_V_SCALE, dtype)
    (k, k_factors), (v, v_factors) = quantize_nvfp4(keys, E4M3_K_SCALE), quantize_nvfp4(values, E4M3_V_SCALE)
    return k, v, k_factors, v_factors


def read_kv(k: Tensor, v: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return stored K and V as a kernel must understand them, without the layer's scales."""
    return (dequantize_nvfp4(k, factors[0]), dequantize_nvfp4(v, factors[1])) if factors else (k, v)


def fill(storage: Tensor, value: float | None = None) -> None:
    """Fill storage with a value, or with its dtype's poison: as bytes if that is e4m3, which torch cannot fill everywhere.

    NVFP4 has no NaN, and gets its poison for any value but 0.
    """
    value = POISON[storage.dtype] if value is None else value
    if storage.dtype == NVFP4:
        storage.fill_(POISON[NVFP4] if value != 0 else 0)
    elif storage.dtype == E4M3:
        storage.view(torch.uint8).fill_(int(torch.tensor(value).to(E4M3).view(torch.uint8)))
    else:
        storage.fill_(value)
