"""Draw the numbers of an attention call's tensors, and turn them into the kind that the case's `Contents` names."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.workloads.attention_case import AttentionCase, Contents
from lab.workloads.inputs.encoding import E4M3_K_SCALE, E4M3_V_SCALE
from lab.workloads.inputs.needles import leaning, needle_positions, plant

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


@dataclass(frozen=True, eq=False)
class _Drawn:
    case: AttentionCase
    request: int  # the request's number in the case
    directions: Tensor  # directions of the needles, [num_kv_heads, head_dim]
    query: Tensor  # [q_len, num_qo_heads, head_dim]
    keys: Tensor  # [kv_len, num_kv_heads, head_dim]
    values: Tensor  # [kv_len, num_kv_heads, head_dim]


def draw_contents(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Draw query, keys, values and sinks. The numbers do not depend on the storage.

    Returns:
        The query [num_rows, num_qo_heads, head_dim] in the case's dtype; K and V of all requests, one after another, float32
        [sum(kv_lens), num_kv_heads, head_dim]; and the sinks, float32 [num_qo_heads], or None. All are on the device.
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
        drawn.append(_SHAPE[case.contents](_Drawn(case, request, directions, query, keys, values)))
    query, keys, values = (torch.cat([getattr(each, side) for each in drawn]) for side in ("query", "keys", "values"))
    on_device = query.to(device=device, dtype=case.dtype), keys.to(device), values.to(device)
    return *on_device, sinks.to(device) if case.sinks else None


def _needles(drawn: _Drawn) -> _Drawn:
    """Turn the first and last keys that rows see, and their neighbours, into needles (keys that outweigh all others)."""
    case, request = drawn.case, drawn.request
    limits = needle_positions(case.kv_lens[request], case.q_lens[request], case.page_size, case.window_left)
    plant(drawn.keys, limits, drawn.directions, case.softmax_scale)
    return replace(drawn, query=leaning(drawn.query, drawn.directions))


def _counted(drawn: _Drawn) -> _Drawn:
    """Encode a key's position in its value, one-hot: position % half in the first half of the elements, position // half in the
    second.

    Heads differ in the size of their values.
    """
    case, half = drawn.case, drawn.case.out_head_dim // 2
    positions = torch.arange(len(drawn.keys))
    values = torch.zeros_like(drawn.values)
    for head in range(case.num_kv_heads):
        size = 2.0 ** (head % 4)
        values[positions, head, positions % half] = size
        values[positions, head, half + (positions // half + drawn.request) % half] = size
    # MLA's keys are its values. Zero queries give all keys the same weight.
    keys = values if case.is_mla else torch.zeros_like(drawn.keys)
    return replace(drawn, query=torch.zeros_like(drawn.query), keys=keys, values=values)


def _low(drawn: _Drawn) -> _Drawn:
    """Set the last coordinate of queries and keys so that every logit is -200,000. MLA's values do not include this coordinate.

    With an e4m3 cache a float16 query cannot be large enough: logits are then about -100,000.
    """
    query, keys = torch.zeros_like(drawn.query), drawn.keys.clone()
    largest = _LARGEST_E4M3_KEY if drawn.case.is_quantised else 1024.0
    keys[..., -1] = -largest
    query[..., -1] = min(2e5 / (largest * drawn.case.softmax_scale), torch.finfo(drawn.case.dtype).max)
    return replace(drawn, query=query, keys=keys)


def _tall(drawn: _Drawn) -> _Drawn:
    """Make logits rise from 0 to 512 in steps of 8, one step per 64 keys. With e4m3 keys some steps are equal."""
    steps = torch.arange(len(drawn.keys)).div(64, rounding_mode="floor").clamp(max=64)
    query, keys = 0.25 * drawn.query, drawn.keys.clone()
    # Keys are then at most 12, which e4m3 represents
    at_query = 2.0 ** round(math.log2(64.0 / drawn.case.softmax_scale))
    query[..., -1] = at_query
    keys[..., -1] = (8.0 * steps / (drawn.case.softmax_scale * at_query))[:, None]
    return replace(drawn, query=query, keys=keys)


def _overshadowed(drawn: _Drawn, logit: float = 20.0) -> _Drawn:
    """Make key 0's logit large and all other logits 0, by the last coordinate of queries and keys, which MLA's values do not
    include.

    In MLA without a rotary part they would include it, and its rounding would dominate the error.
    """
    query, keys, values = torch.zeros_like(drawn.query), drawn.keys.clone(), drawn.values.clone()
    product = logit / drawn.case.softmax_scale
    # No dtype rounds a power of two. Otherwise a Q cast to e4m3 (12.73 to 13) turns e**-9 into e**-9.19: outputs 14 % smaller.
    at_query = 2.0 ** round(math.log2(product / 8.0))
    query[..., -1] = at_query
    keys[..., -1] = 0.0
    for side in (keys, values):
        side[:1] = 0.0
    keys[:1, :, -1] = product / at_query
    return replace(drawn, query=query, keys=keys, values=values)


def _loud(drawn: _Drawn) -> _Drawn:
    """Make values large and positive, so that their sum grows with the number of keys."""
    side = "keys" if drawn.case.is_mla else "values"
    drawn = replace(drawn, **{side: getattr(drawn, side).abs()})
    return _scaled_values(drawn, _LOUD[drawn.case.kv_dtype])


def _scaled_values(drawn: _Drawn, factor: float) -> _Drawn:
    """Scale the values. In MLA this scales the keys too, so the query is divided by a large number to keep logits small."""
    if drawn.case.is_mla:
        return replace(drawn, query=drawn.query / max(factor, 1.0), keys=drawn.keys * factor)
    return replace(drawn, values=drawn.values * factor)


_SHAPE: dict[Contents, Callable[[_Drawn], _Drawn]] = {
    Contents.RANDOM: lambda drawn: drawn,
    Contents.NEEDLES: _needles,
    Contents.COUNTED: _counted,
    Contents.LOW: _low,
    Contents.LOUD: _loud,
    Contents.FAINT: lambda drawn: _scaled_values(drawn, _FAINT[drawn.case.kv_dtype]),
    Contents.TALL: _tall,
    Contents.OVERSHADOWED: _overshadowed,
    Contents.SHADED: partial(_overshadowed, logit=9.0),
}
