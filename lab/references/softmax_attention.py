"""Softmax attention over contiguous K/V: `attention` in float64, and `eager_attention` in low precision.

`attention` is the definition. An end-to-end check passes it a request's K/V history as it was written. The algorithm walks
tiles of K and V twice: once for all scores, and after the softmax once for the sums. A tile is a range of keys in all requests
that are long enough. It is converted to float64, multiplied and dropped:

    request 0  | tile 0 | tile 1 |
    request 1  | tile 0 | tile 1 | tile 2          | tile 3          |

`eager_attention` is the control of an error bound: the same attention with the roundings of a matrix unit.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.calls.arguments import check_scale, check_tensor, check_vector
from lab.calls.entry import takes_fields_of
from lab.calls.problem import E4M3, Scale, Softmax
from lab.references.quantization import rounded

FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# Most elements of K and V, or of scores, in one piece. Scores are float64: 0.5 GiB of them, little on any device.
# K and V are never there at once, but few of them keep a short request from being padded to a long one.
PIECE_ELEMENTS = 2**26
GPU_PIECE_ELEMENTS = 2**28  # launches, not memory, are what a GPU is short of
# Most elements of K or V that are in float64 at a time. A CPU's cache holds 4 MiB of them. A GPU gains nothing from a tile that
# its L2 holds, and each tile costs seven launches (results/nvidia-h200/README.md): 256 MiB.
TILE_ELEMENTS = 2**19
GPU_TILE_ELEMENTS = 2**25


@takes_fields_of(Softmax)
def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    **softmax: Any,
) -> tuple[Tensor, Tensor]:
    """Compute grouped-query softmax attention in float64.

    Query head h reads K/V head h // (num_qo_heads / num_kv_heads). A sink is a further logit of a head: it increases the
    softmax's denominator and has no value vector. The output of a row that sees no key is zero.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim], any float dtype.
        keys: [batch, kv_len, num_kv_heads, head_dim], dequantised, and finite even where not visible.
        values: [batch, kv_len, num_kv_heads, v_head_dim], dequantised, and finite even where not visible.
        visible: bool [batch, q_len, kv_len].
        softmax: fields of `lab.calls.problem.Softmax`: bmm1_scale and bmm2_scale, 1 if left out, and sinks.

    Returns:
        out, float64 [batch, q_len, num_qo_heads, v_head_dim]; lse_log2, float64 [batch, q_len, num_qo_heads], log2 of the
        denominator (sink included), -inf where it is empty.

    Raises:
        TypeError, ValueError: `check_plain` refuses an argument, before any arithmetic.
    """
    terms = Softmax(**softmax)
    check_plain(query, keys, values, visible, terms)
    return unchecked_attention(query, keys, values, visible, terms)


@takes_fields_of(Softmax)
def eager_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    arithmetic: torch.dtype,
    out_dtype: torch.dtype,
    **softmax: Any,
) -> Tensor:
    """Compute the control for the error bound: attention as a matrix unit computes it, operands in `arithmetic`, sums in
    float32.

    The query and the softmax's weights are rounded to `arithmetic` before each product (for e4m3, scaled to its range per row,
    as a kernel of that dtype does); scores, softmax and sums are float32; the output is in `out_dtype`.

    Args:
        query, keys, values, visible, softmax: as in `attention`.
        arithmetic: dtype of the operands of both products: float16, bfloat16, e4m3 or float32.
        out_dtype: dtype of the result.

    Returns:
        [batch, q_len, num_qo_heads, v_head_dim] in `out_dtype`.

    Raises:
        TypeError, ValueError: see `attention`.
    """
    terms = Softmax(**softmax)
    check_plain(query, keys, values, visible, terms)
    return rounded(unchecked_eager_attention(query, keys, values, visible, terms, arithmetic), out_dtype)


def check_plain(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax) -> None:
    """Raise an error if `attention` does not support the arguments.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices contradict each other, or on a CPU query, sinks or a scale contain NaN.
    """
    expected = "[batch, {}, heads, head_dim]"
    for name, tensor, length in (("query", query, "q_len"), ("keys", keys, "kv_len"), ("values", values, "kv_len")):
        if not check_tensor(name, tensor).is_floating_point():
            raise TypeError(f"{name} must be of a float dtype, got {tensor.dtype}; dequantise it first")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must be {expected.format(length)}, got shape {list(tensor.shape)}")
    batch, q_len, num_qo_heads, head_dim = query.shape
    if keys.shape[:3] != values.shape[:3] or keys.shape[0] != batch:
        raise ValueError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must have the query's batch, {batch}, and the same "
            "tokens and heads"
        )
    if keys.shape[3] != head_dim:
        raise ValueError(f"keys have head_dim {keys.shape[3]}, but query has {head_dim}: they must agree")
    if keys.shape[2] == 0 or num_qo_heads % keys.shape[2]:
        raise ValueError(
            f"the {num_qo_heads} heads of query do not divide evenly over the {keys.shape[2]} heads of keys"
        )
    if check_tensor("visible", visible).dtype != torch.bool:
        raise TypeError(f"visible must be bool, got {visible.dtype}")
    if visible.shape not in ((batch, q_len, keys.shape[1]), (batch, 1, keys.shape[1])):  # 1: all rows see the same
        raise ValueError(
            f"visible must be [batch, q_len, kv_len] = {[batch, q_len, keys.shape[1]]}, got {list(visible.shape)}"
        )
    if softmax.sinks is not None:
        check_vector("sinks", softmax.sinks, num_qo_heads, FLOAT_DTYPES)
    for name, other in (("keys", keys), ("values", values), ("visible", visible), ("sinks", softmax.sinks)):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name} is on {other.device}, but query is on {query.device}; move it there")
    for name, value in {**softmax.terms(), "query": query}.items():
        is_number = name not in ("query", "sinks")
        if is_number and not isinstance(value, Tensor):
            check_scale(name, value)
        elif is_number and value.numel() != 1:
            raise ValueError(f"{name} as a tensor must have one element, got shape {list(value.shape)}")
        if isinstance(value, Tensor) and value.device.type == "cpu" and bool(value.isnan().any()):
            raise ValueError(f"{name} holds NaN, which would make the output NaN")


def unchecked_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Compute `attention` without checking the arguments, for callers that have checked them. NaN in a query gives NaN in its
    output.
    """
    batch, kv_len, num_kv_heads, head_dim = keys.shape
    v_head_dim = values.shape[3]

    def in_float64(side: Tensor, tile: Tile) -> Tensor:
        by_head = side[:, tile.start : tile.end].transpose(1, 2)
        return by_head.to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 1)

    kv = TiledKV(
        keys=partial(in_float64, keys),
        values=partial(in_float64, values),
        tiles=tiles([kv_len] * batch, num_kv_heads * max(head_dim, v_head_dim), query.device),
        kv_len=kv_len,
        num_kv_heads=num_kv_heads,
        v_head_dim=v_head_dim,
    )
    return attention_by_tiles(query, kv, lambda: visible, softmax)


class Tile(NamedTuple):
    """The keys `start` to `end` - 1 of several requests, which are sorted by length. Requests before `first_request` are too
    short to have such keys.
    """

    first_request: int
    start: int
    end: int


class TiledKV(NamedTuple):
    """A protocol: K and V of a batch. `keys` and `values` return one tile, contiguous float64 [requests * num_kv_heads, keys,
    head_dim], so that the matrix products do not copy it again. Values must be finite.
    """

    keys: Callable[[Tile], Tensor]
    values: Callable[[Tile], Tensor]
    tiles: list[Tile]
    kv_len: int
    num_kv_heads: int
    v_head_dim: int


def tiles(kv_lens: list[int], elements: int, device: torch.device, step: int = 1) -> list[Tile]:
    """Return tiles that divide the keys of all requests. They are as large as the limit of float64 elements of K or V allows.

    Args:
        kv_lens: numbers of keys of the requests, ascending, multiples of `step`.
        elements: number of elements of one key in K or in V.
        device: the device that computes.
        step: the number of keys of a tile is a multiple of `step`.
    """
    keys_at_once = (GPU_TILE_ELEMENTS if device.type == "cuda" else TILE_ELEMENTS) // max(elements, 1)
    found = []
    first = start = 0
    while kv_lens and start < kv_lens[-1]:
        while kv_lens[first] <= start:
            first += 1
        width = max(keys_at_once // (len(kv_lens) - first) // step, 1) * step
        found.append(Tile(first, start, min(start + width, kv_lens[-1])))
        start += width
    return found


@torch.no_grad()  # scores and sums are written where they are to be
def attention_by_tiles(
    query: Tensor, kv: TiledKV, visible: Callable[[], Tensor], softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Compute `attention` with at most one tile of K or V in float64 at a time.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim].
        kv: K and V of the batch.
        visible: returns bool [batch, q_len or 1, kv_len]. It is called while a GPU is busy with the scores.
        softmax: scales and sinks.

    Returns:
        out and lse_log2, as `attention` returns them.
    """
    batch, q_len, num_qo_heads, _ = query.shape
    num_kv_heads = kv.num_kv_heads
    by_row = (batch, num_kv_heads, q_len, num_qo_heads // num_kv_heads)

    # [batch * num_kv_heads, q_len * group, head_dim]: the rows that share a K/V head form one matrix.
    rows = query.to(torch.float64).unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    bmm1_scale, bmm2_scale = scales_as(rows, softmax)
    scores = rows.new_empty(*rows.shape[:2], kv.kv_len)
    for tile in kv.tiles:
        first = tile.first_request * num_kv_heads
        _write_products(scores[first:, :, tile.start : tile.end], rows[first:], kv.keys(tile).mT)

    # [batch, num_kv_heads, q_len, group, kv_len], in place: they are the largest tensor of a long prompt.
    scores = scores.mul_(bmm1_scale).view(*by_row, kv.kv_len).masked_fill_(~visible()[:, None, :, None], -math.inf)
    # [batch, num_kv_heads, q_len, group, 1]
    largest = scores.amax(dim=4, keepdim=True) if kv.kv_len else scores.new_full((*by_row, 1), -math.inf)
    sink_logits = None
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float64).view(num_kv_heads, 1, by_row[3], 1)
        largest = torch.maximum(largest, sink_logits)
    origin = largest.nan_to_num(0.0, 0.0, 0.0)
    weights = scores.sub_(origin).exp_()
    denominator = weights.sum(dim=4, keepdim=True)
    if sink_logits is not None:
        denominator = denominator + torch.exp(sink_logits - origin)
    lse_log2 = (origin + torch.log(denominator)) / math.log(2.0)

    weights = weights.view(*rows.shape[:2], kv.kv_len)
    sums = rows.new_zeros(*rows.shape[:2], kv.v_head_dim)
    for tile in kv.tiles:
        first = tile.first_request * num_kv_heads
        sums[first:].baddbmm_(weights[first:, :, tile.start : tile.end], kv.values(tile))
    # [batch, num_kv_heads, q_len, group, v_head_dim]
    out = sums.view(*by_row, kv.v_head_dim) / denominator.masked_fill(denominator == 0, 1.0)
    out = (out * bmm2_scale).transpose(1, 2).flatten(2, 3)
    return out, lse_log2.squeeze(4).transpose(1, 2).flatten(2, 3)


def _write_products(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write matrix products to a part of a tensor. On a CPU torch would write to a strided part one matrix at a time."""
    if out.is_cuda or out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def visible_keys(
    query_positions: Tensor,
    key_positions: Tensor,
    kv_lens: Tensor,
    *,
    causal: bool,
    window_left: int,
) -> Tensor:
    """Return the keys that each row sees: bool [batch, q_len, kv_len], or [batch, 1, kv_len] if all rows see the same keys.

    Args:
        query_positions: [batch, q_len], position of each row in its request; negative for a row before the first key.
        key_positions: [batch, kv_len].
        kv_lens: [batch], number of existing keys.
        causal: a row at position p sees no key after p.
        window_left: a row at position p sees no key before p - window_left (FlashInfer's inclusive window); -1: no window.
    """
    rows, keys = query_positions.unsqueeze(2), key_positions.unsqueeze(1)
    visible = (keys >= 0) & (keys < kv_lens[:, None, None])
    if causal:
        visible = visible & (keys <= rows)
    if window_left >= 0:
        visible = visible & (keys >= rows - window_left)
    return visible


def unchecked_eager_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    softmax: Softmax,
    arithmetic: torch.dtype,
) -> Tensor:
    """Compute `eager_attention` without checking the arguments, for callers that have checked them. Return float32."""
    keys, values = (side.to(torch.float32).transpose(1, 2) for side in (keys, values))
    rows = _as_operand(query.to(torch.float32), arithmetic).transpose(1, 2)  # [batch, num_qo_heads, q_len, head_dim]
    bmm1_scale, bmm2_scale = scales_as(rows, softmax)
    scores = _of_each_group(rows, keys.transpose(2, 3)).mul_(bmm1_scale).masked_fill(~visible.unsqueeze(1), -math.inf)
    if scores.shape[-1] == 0:  # no key at all
        return rows.new_zeros(*query.shape[:3], values.shape[-1])
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float32).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_logits), dim=-1)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))
    denominator = weights.sum(dim=-1, keepdim=True)
    weights = weights[..., : keys.shape[2]]
    sums = _of_each_group(_as_operand(weights, arithmetic), values)
    out = sums / torch.where(denominator == 0, 1.0, denominator)
    return (out * bmm2_scale).transpose(1, 2)


def _of_each_group(rows: Tensor, side: Tensor) -> Tensor:
    """Multiply the rows of each query head by the matrix of its K/V head. Query heads that share a K/V head are multiplied
    together.
    """
    q_len = rows.shape[2]
    by_head = rows.unflatten(1, (side.shape[1], -1)).flatten(2, 3) @ side
    return (
        by_head.unflatten(2, (-1, q_len)).flatten(1, 2) if q_len else by_head.new_zeros(*rows.shape[:3], side.shape[3])
    )


def _as_operand(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != E4M3:
        return values.to(dtype).to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
    return (values / scale).to(dtype).to(torch.float32) * scale


def scales_as(like: Tensor, softmax: Softmax) -> tuple[Scale, Scale]:
    """Return (bmm1_scale, bmm2_scale), each a number or a 0-dimensional tensor of `like`'s dtype and device."""
    bmm1_scale, bmm2_scale = (
        scale.to(like.device, like.dtype).reshape(()) if isinstance(scale, Tensor) else scale
        for scale in (softmax.bmm1_scale, softmax.bmm2_scale)
    )
    return bmm1_scale, bmm2_scale


def piece_elements(device: torch.device) -> int:
    """Return the largest number of elements of K and V, or of scores, in one piece on a device."""
    return GPU_PIECE_ELEMENTS if device.type == "cuda" else PIECE_ELEMENTS
