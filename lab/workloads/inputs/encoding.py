"""Make the pages and page tables of a case, convert values to the dtype of a cache and back, and fill memory with poison
(values that would change a result).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4, NVFP4_BLOCK
from lab.references.quantization import dequantize_nvfp4, quantize_e4m3, quantize_nvfp4
from lab.workloads.attention_case import AttentionCase, Dead

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


def fill(storage: Tensor, value: float | None = None) -> None:
    """Fill storage with a value, or with its dtype's `POISON`, a huge value. NVFP4 has no NaN, so it is filled with its poison
    for any value except 0.
    """
    if value is None or (storage.dtype == NVFP4 and value != 0):
        value = POISON[storage.dtype]
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
    return buffer.copy_(values[turns])


def new_pools(case: AttentionCase, num_pages: int, device: torch.device) -> list[Tensor]:
    """Return uninitialised pages of K and of V; MLA has one pool for both."""
    new: dict[str, Any] = {"dtype": case.kv_dtype, "device": device}
    if case.is_mla:
        return [torch.empty(num_pages, case.page_size, case.head_dim, **new)]
    width = case.head_dim // 2 if case.kv_dtype == NVFP4 else case.head_dim
    page: tuple[int, ...] = (case.num_kv_heads, case.page_size, width)
    if case.storage.kv_layout == "NHD":
        page = (case.page_size, case.num_kv_heads, width)
    if case.storage.stacked:
        return list(torch.empty(num_pages, 2, *page, **new).unbind(1))
    return list(torch.empty(2, num_pages, *page, **new).unbind(0))


def new_scale_factors(case: AttentionCase, pools: list[Tensor]) -> list[Tensor]:
    """Return the scale factors of K and of V for all pages of an NVFP4 cache; an empty list for other caches."""
    if case.kv_dtype != NVFP4:
        return []
    pages, *page = pools[0].shape
    page[-1] = case.head_dim // NVFP4_BLOCK
    room = 2 if case.storage.gaps_in_scale_factors else 1
    whole = torch.empty(2, pages, room, *page, dtype=E4M3, device=pools[0].device)
    return list(whole[:, :, 0].unbind(0))


def block_tables(
    case: AttentionCase, tables: Sequence[Tensor], most_pages: int, live: list[int], device: torch.device
) -> Tensor:
    """Return page tables, int32 [len(tables), columns]: each row has its page ids in `tables`, then what the case says. As many
    columns as the case says follow `most_pages`, the pages of the longest request. `live` are ids of pages that some row lists.
    """
    width = most_pages + case.storage.spare_columns
    page_id = case.storage.table_tail.page_id
    if page_id is None:
        cells = torch.tensor(live, dtype=torch.int32).repeat(-(-len(tables) * width // len(live)))
        filled = cells[: len(tables) * width].view(len(tables), width).flip(0)
    else:
        filled = torch.full((len(tables), width), page_id, dtype=torch.int32)
    for row, table in enumerate(tables):
        filled[row, : len(table)] = table
    return filled.to(device)
