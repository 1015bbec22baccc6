"""Draw queries, keys and values, store them in a cache's dtype, and fill all other memory with poison: values that would change
a result if a kernel read them.

A needle is a key that outweighs all other keys, so that an error of one position shows. Each K/V head has its own direction.
Needles are keys in this direction, and every query row has a component in it. A needle's logit exceeds the other logits, which
are within about ± 1, by `HEIGHT`.
"""

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.references.quantization import dequantize_nvfp4, quantize_nvfp4
from lab.references.softmax_attention import quantize_e4m3, rounded
from lab.workloads.attention_case import AttentionCase, Contents, Dead
from lab.workloads.requests import History, PassLens

# Finite values, so large that one poisoned value in a product changes the result. A poisoned NVFP4 byte contains the largest
# e2m1 value, 6, twice, and poisoned scale factors make it large.
POISON = {torch.bfloat16: 1e30, torch.float16: 6e4, E4M3: 448.0, NVFP4: 0x77}
# Scales of an e4m3 cache. They are unequal and far from 1, so that a dropped or swapped scale changes the result.
E4M3_K_SCALE = 0.03125
E4M3_V_SCALE = 0.0625
# Factors of values drawn from N(0, 1), so that sums of weights times values exceed float16's 65,504. The factor for e4m3 is
# smaller, because its largest number is 448.
_LOUD = {torch.bfloat16: 2.0**14, torch.float16: 2.0**13, E4M3: 100.0 * E4M3_V_SCALE}
# bf16: most values are below float16's smallest number, 2**-24. Other dtypes: below their own smallest normal number; NVFP4:
# below the smallest normal number of its scale factors.
_FAINT = {
    torch.bfloat16: 2.0**-24,
    torch.float16: 2.0**-14,
    E4M3: 2.0**-7 * E4M3_V_SCALE,
    NVFP4: 2.0**-5 * E4M3_V_SCALE,
}
_LARGEST_E4M3_KEY = torch.finfo(E4M3).max * E4M3_K_SCALE
TILE_SIZES = (64, 128)  # keys that kernels process at a time
LEAN = 4.0  # factor of the direction that is added to a query row, whose elements are N(0, 1)
HEIGHT = 10.0  # a needle's logit above the other logits
# Scratch of a call's workspace: enough for trtllm-gen's LSE of 512 requests with 64 heads.
SCRATCH_BYTES = {"cpu": 2**20, "cuda": 192 * 2**20}
ENGINE_SCRATCH_BYTES = {"cpu": 2**20, "cuda": 512 * 2**20}  # SGLang 0.5.23's default


@dataclass(eq=False)
class _Drawn:
    case: AttentionCase
    request: int  # the request's number in the case
    directions: Tensor  # directions of the needles, [num_kv_heads, head_dim]
    query: Tensor  # [q_len, num_qo_heads, head_dim]
    keys: Tensor  # [kv_len, num_kv_heads, head_dim]
    values: Tensor  # [kv_len, num_kv_heads, head_dim]


def draw_contents(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draw (query, K, V, sinks) of a case, independent of its storage: query [num_rows, num_qo_heads, head_dim] in the case's
    dtype; K and V of all requests, float32 [sum(kv_lens), num_kv_heads, head_dim]; sinks, float32 [num_qo_heads] or None.
    """
    generator = torch.Generator().manual_seed(case.seed)
    num_qo_heads = case.num_qo_heads
    sinks = torch.randn(num_qo_heads, generator=generator) + 2.0
    directions = torch.nn.functional.normalize(
        torch.randn(case.num_kv_heads, case.head_dim, generator=generator), dim=-1
    )
    drawn = []
    for request, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        own = torch.Generator().manual_seed(1000 * case.seed + request + 1)
        query = torch.randn(q_len, num_qo_heads, case.head_dim, generator=own)
        keys, values = (torch.randn(kv_len, case.num_kv_heads, case.head_dim, generator=own) for _ in range(2))
        drawn.append(_Drawn(case, request, directions, query, keys, values))
        _SHAPE[case.contents](drawn[-1])
    query, keys, values = (torch.cat([getattr(each, side) for each in drawn]) for side in ("query", "keys", "values"))
    on_device = rounded(query.to(device), case.dtype), keys.to(device), values.to(device)
    return *on_device, sinks.to(device) if case.sinks else None


def _needles(drawn: _Drawn) -> None:
    case, request = drawn.case, drawn.request
    limits = needle_positions(case.kv_lens[request], case.q_lens[request], case.page_size, case.window_left)
    plant(drawn.keys, limits, drawn.directions, case.softmax_scale)
    drawn.query = leaning(drawn.query, drawn.directions)


def _counted(drawn: _Drawn) -> None:
    case, half = drawn.case, drawn.case.out_head_dim // 2
    positions = torch.arange(len(drawn.keys))
    values = drawn.values.zero_()
    # Two columns of a value are not zero. They encode its key's position, and their size its head.
    for head in range(case.num_kv_heads):
        size = 2.0 ** (head % 4)
        values[positions, head, positions % half] = size
        values[positions, head, half + (positions // half + drawn.request) % half] = size
    # MLA's keys are its values. Zero queries give all keys the same weight.
    drawn.query.zero_()
    drawn.keys = values if case.is_mla else drawn.keys.zero_()


def _low(drawn: _Drawn) -> None:
    largest = _LARGEST_E4M3_KEY if drawn.case.is_quantised else 1024.0
    drawn.keys[..., -1] = -largest
    # The logits are -200,000, or about -100,000 for a float16 query over an e4m3 cache.
    drawn.query.zero_()[..., -1] = min(2e5 / (largest * drawn.case.softmax_scale), torch.finfo(drawn.case.dtype).max)


def _tall(drawn: _Drawn) -> None:
    # Logits rise with the key's position from 0 to 512, by 8 every 64 keys. Rounding to e4m3 merges some steps.
    steps = torch.arange(len(drawn.keys)).div(64, rounding_mode="floor").clamp(max=64)
    # Keys are then at most 13 for heads of up to 128, which e4m3 represents with its scale
    largest = torch.finfo(drawn.case.dtype).max
    at_query = min(2.0 ** round(math.log2(64.0 / drawn.case.softmax_scale)), largest)
    drawn.query.mul_(0.25)[..., -1] = at_query
    drawn.keys[..., -1] = (8.0 * steps / (drawn.case.softmax_scale * at_query))[:, None]


def _overshadowed(drawn: _Drawn, logit: float = 20.0) -> None:
    product = logit / drawn.case.softmax_scale  # of the last elements of Q and K, in MLA of the rotary part
    # No dtype rounds a power of two. Otherwise a Q cast to e4m3 (12.73 to 13) turns e**-9 into e**-9.19: outputs 14 % smaller.
    at_query = 2.0 ** round(math.log2(product / 8.0))
    drawn.query.zero_()[..., -1] = at_query
    drawn.keys[..., -1] = 0.0
    for side in (drawn.keys, drawn.values):
        side[:1] = 0.0
    drawn.keys[:1, :, -1] = product / at_query


def _loud(drawn: _Drawn) -> None:
    (drawn.keys if drawn.case.is_mla else drawn.values).abs_()
    _scale_values(drawn, _LOUD[drawn.case.kv_dtype])


def _scale_values(drawn: _Drawn, factor: float) -> None:
    if drawn.case.is_mla:
        drawn.query /= max(factor, 1.0)
    side = drawn.keys if drawn.case.is_mla else drawn.values
    side *= factor


# Each function changes the tensors that were drawn.
_SHAPE: dict[Contents, Callable[[_Drawn], object]] = {
    Contents.RANDOM: lambda drawn: None,
    Contents.NEEDLES: _needles,
    Contents.COUNTED: _counted,
    Contents.LOW: _low,
    Contents.LOUD: _loud,
    Contents.FAINT: lambda drawn: _scale_values(drawn, _FAINT[drawn.case.kv_dtype]),
    Contents.TALL: _tall,
    Contents.OVERSHADOWED: _overshadowed,
    Contents.SHADED: partial(_overshadowed, logit=9.0),
}


def needle_positions(kv_len: int, q_len: int, page_size: int, window_left: int = -1) -> list[int]:
    """Return positions for needles (large logits): page, tile and window edges of the first, middle and last row, ±1."""
    edges = {0, kv_len - 1}
    for position in {kv_len - q_len, kv_len - q_len // 2 - 1, kv_len - 1}:
        edges |= {position, *(position // size * size for size in (page_size, *TILE_SIZES))}
        if window_left >= 0:
            edges |= {position - window_left}
    return sorted({near for edge in edges for near in (edge - 1, edge, edge + 1) if 0 <= near < kv_len})


def leaning(query: Tensor, directions: Tensor) -> Tensor:
    """Return the query [rows, num_qo_heads, head_dim] plus `LEAN` times `directions` (a unit vector for each K/V head)."""
    return query + LEAN * directions.repeat_interleave(query.shape[1] // len(directions), dim=0)


def plant(keys: Tensor, positions: Iterable[int], directions: Tensor, softmax_scale: float) -> None:
    """Give the keys [kv_len, num_kv_heads, head_dim] at `positions` large logits: add a multiple of `directions`, in place."""
    index = torch.tensor(sorted(positions), dtype=torch.int64, device=keys.device)
    keys[index] += directions * (HEIGHT / (LEAN * softmax_scale))


def draw_histories(
    lens: PassLens,
    generator: torch.Generator,
    needles: Sequence[Iterable[int]] | None,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: Sequence[int],
    softmax_scale: float,
) -> tuple[Tensor, list[History]]:
    """Draw the query [num_rows, num_qo_heads, head_dim], and each request's history: K and V, or latent entries, [kv_len,
    num_kv_heads, head_dim] each. All are N(0, 1), float32. The `lens.topk` draft branches of a request share one history.

    Args:
        needles: positions of each request's needles; None for no needles.
        head_dims: the head_dim of K and of V, or of each kind of entry. The first one is also the query's.
    """

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=generator.device, generator=generator)

    query = randn(sum(lens.q_lens), num_qo_heads, head_dims[0])
    directions = torch.nn.functional.normalize(randn(num_kv_heads, head_dims[0]), dim=-1)
    drawn: list[History] = []
    for request, kv_len in enumerate(lens.kv_lens):
        if request % lens.topk:
            drawn.append(drawn[-1])
            continue
        drawn.append(tuple(randn(kv_len, num_kv_heads, head_dim) for head_dim in head_dims))
        if needles is not None:
            plant(drawn[-1][0], needles[request], directions, softmax_scale)
    return query if needles is None else leaning(query, directions), drawn


def as_stored(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Convert K or V to a cache's dtype. An e4m3 cache stores the values divided by `scale`."""
    return quantize_e4m3(values, scale) if dtype == E4M3 else values.to(dtype)


def stored_kv(dtype: torch.dtype, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Convert K and V to a cache's dtype. Return (K, V), for NVFP4 (K, V, scale factors of K, scale factors of V)."""
    if dtype != NVFP4:
        return as_stored(keys, E4M3_K_SCALE, dtype), as_stored(values, E4M3_V_SCALE, dtype)
    (k, k_factors), (v, v_factors) = quantize_nvfp4(keys, E4M3_K_SCALE), quantize_nvfp4(values, E4M3_V_SCALE)
    return k, v, k_factors, v_factors


def read_kv(k: Tensor, v: Tensor, *factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the K and V that a cache stores, without multiplying by the layer's scales. NVFP4 is dequantised by `factors`."""
    return (dequantize_nvfp4(k, factors[0]), dequantize_nvfp4(v, factors[1])) if factors else (k, v)


def fill(storage: Tensor, value: float | None = None) -> None:
    """Fill a tensor with `value`. None, and in an NVFP4 tensor each value but 0, stands for the huge number POISON[dtype]."""
    if value is None or (storage.dtype == NVFP4 and value != 0):  # NVFP4 cannot hold NaN
        value = POISON[storage.dtype]
    storage.fill_(value)


def fill_dead(pool: Tensor, dead: Dead) -> None:
    fill(pool, {Dead.ZERO: 0.0, Dead.HUGE: POISON[pool.dtype], Dead.NAN: float("nan")}[dead])


def unwritten(buffer: Tensor) -> Tensor:
    """Fill an output with NaN and huge values, which remain in elements that a kernel does not write. Return the output."""
    huge = POISON.get(buffer.dtype, POISON[torch.bfloat16])
    values = torch.tensor((math.nan, huge, -huge), device=buffer.device).to(buffer.dtype)
    turns = values.repeat(-(-buffer.numel() // len(values)))[: buffer.numel()]
    return buffer.copy_(turns.view(buffer.shape))


def new_workspace(device: torch.device, of_engine: bool = False) -> Tensor:
    """Return a uint8 workspace of zeros: 8 MiB of semaphores, then scratch memory. `of_engine`: 512 MiB on a GPU, as SGLang."""
    size = SEMAPHORE_BYTES + (ENGINE_SCRATCH_BYTES if of_engine else SCRATCH_BYTES)[device.type]
    if device.type == "cpu":
        # The system zeroes a page when it is first touched. One more page is for a kernel that writes past the end.
        pages = mmap.mmap(-1, size + mmap.PAGESIZE, access=mmap.ACCESS_COPY)
        return torch.frombuffer(pages, dtype=torch.uint8, count=size)
    return torch.zeros(size, dtype=torch.uint8, device=device)
