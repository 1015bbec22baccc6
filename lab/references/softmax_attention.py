"""The one algorithm of the references: softmax attention in float64. K and V are converted one tile at a time.

`attention` is the definition. An end-to-end check passes it a request's K/V history as it was written. The algorithm walks the
tiles twice: once for all scores, and after the softmax once for the sums. A tile is a range of keys in all requests that are
long enough. It is converted to float64, multiplied and dropped:

    request 0  | tile 0 | tile 1 |
    request 1  | tile 0 | tile 1 | tile 2          | tile 3          |
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lab.calls.entry import takes_fields_of
from lab.calls.problem import Scale, Softmax
from lab.references.plain_arguments import check_plain

# Most elements of K or V that are in float64 at a time. A CPU's cache holds 4 MiB of them. A GPU gains nothing from a tile that
# its L2 holds, and each tile costs seven launches (results/nvidia-h200/README.md): 256 MiB.
TILE_ELEMENTS = 2**19
GPU_TILE_ELEMENTS = 2**25


@takes_fields_of(Softmax)
def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    **softmax: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
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
        TypeError, ValueError: `lab.references.plain_arguments.check_plain` refuses an argument, before any arithmetic.
    """
    terms = Softmax(**softmax)
    check_plain(query, keys, values, visible, terms)
    return unchecked_attention(query, keys, values, visible, terms)


def unchecked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` without checking the arguments, for callers that have checked them. NaN in a query gives NaN in its
    output.
    """
    batch, kv_len, num_kv_heads, head_dim = keys.shape
    v_head_dim = values.shape[3]
    kv = TiledKV(
        keys=lambda tile: in_float64(keys[:, tile.start : tile.end].transpose(1, 2)).flatten(0, 1),
        values=lambda tile: in_float64(values[:, tile.start : tile.end].transpose(1, 2)).flatten(0, 1),
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
    """A protocol: K and V of a batch. `keys` and `values` return one tile in float64, [requests * num_kv_heads, keys,
    head_dim]. Values must be finite.
    """

    keys: Callable[[Tile], torch.Tensor]
    values: Callable[[Tile], torch.Tensor]
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


def in_float64(entries: torch.Tensor) -> torch.Tensor:
    """Return K or V in float64 as a contiguous tensor, so that the matrix products do not copy it again."""
    return entries.to(torch.float64, memory_format=torch.contiguous_format)


@torch.no_grad()  # scores and sums are written where they are to be
def attention_by_tiles(
    query: torch.Tensor, kv: TiledKV, visible: Callable[[], torch.Tensor], softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _write_products(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write matrix products to a part of a tensor. On a CPU torch would write to a strided part one matrix at a time."""
    if out.is_cuda or out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def visible_keys(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    causal: bool,
    window_left: int,
) -> torch.Tensor:
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


def scales_as(like: torch.Tensor, softmax: Softmax) -> tuple[Scale, Scale]:
    """Return (bmm1_scale, bmm2_scale), each a number or a 0-dimensional tensor of `like`'s dtype and device."""
    bmm1_scale, bmm2_scale = (
        scale.to(like.device, like.dtype).reshape(()) if isinstance(scale, torch.Tensor) else scale
        for scale in (softmax.bmm1_scale, softmax.bmm2_scale)
    )
    return bmm1_scale, bmm2_scale
