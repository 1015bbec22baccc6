"""Softmax attention of checked arguments: exactly in float64, and as the control, in low precision.

The exact algorithm reads the tiles of K first, for all scores, and after the softmax the tiles of V, for the weighted sums. A
tile is a range of keys in all requests that are long enough. It is converted to float64, multiplied and dropped:

    request 0  | tile 0 | tile 1 |
    request 1  | tile 0 | tile 1 | tile 2          | tile 3          |

The control is the same attention by plain low-precision torch operations. Its error bounds a kernel's error.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.calls import Problem
from lab.calls.problem import E4M3, Softmax

E4M3_MAX = 448.0  # largest finite float8_e4m3fn
# Largest number of elements of K and V, or of scores, that are computed together, by the type of device. Float64 scores then
# take 0.5 GiB on a CPU. The limit on K and V keeps short requests from being padded to long ones. It is larger on a GPU, where
# the number of launches limits the speed.
PIECE_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}
# K and V of requests that are computed together are copied, so they have at most 1 / TOGETHER of `PIECE_ELEMENTS`.
TOGETHER = 16
# Largest number of elements of K or V in float64 at a time: 4 MiB, which a CPU's cache holds. On a GPU it is 256 MiB, because a
# tile that fits its L2 is no faster, and each tile costs seven launches (results/nvidia-h200/README.md).
TILE_ELEMENTS = 2**19
GPU_TILE_ELEMENTS = 2**25
# Upper limit of the share of weights that skip-softmax leaves out. A threshold above 1 would leave out all.
LARGEST_SHARE = 1 - 2.0**-40
SKIP_ROUNDING = 1.01  # a kernel may round a weight by this factor before it compares it with the threshold
History = tuple[Tensor, Tensor]  # K and V of a request, [kv_len, num_kv_heads, head_dim]


@dataclass(frozen=True, eq=False, kw_only=True)
class Rules(Softmax):
    """How the query rows of requests attend to keys: the masks, the softmax's scales and sinks, and the dtypes."""

    arithmetic: torch.dtype  #: dtype of the control's operands
    out_dtype: torch.dtype  #: dtype of the output
    window_left: int = -1  #: number of keys before its own position that a row sees; -1 for all
    causal: bool = True  #: False: every row sees every key
    #: threshold of the weights that a kernel may leave out, as in `AttentionProblem`; 0 for none
    skip_softmax: float = 0.0
    #: bool [num_requests, q_len, q_len] or None: a draft mask, the keys that each row sees among its request's last q_len keys.
    #: It replaces the causal rule.
    shown: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, arithmetic: torch.dtype | None = None, shown: Tensor | None = None) -> "Rules":
        """Return the rules (scales, mask, window, sinks, dtypes) by which a problem's output is computed. `arithmetic` is by
        default the query's dtype; float64 becomes float32. `shown` sets the field of this name.
        """
        dtype = problem.query.dtype if arithmetic is None else arithmetic
        return cls(
            **problem.terms(),
            arithmetic=torch.float32 if dtype == torch.float64 else dtype,
            out_dtype=problem.out_dtype,
            window_left=problem.window_left,
            causal=problem.causal,
            skip_softmax=problem.skip_softmax,
            shown=shown,
        )


def saturated(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `values`, clamped to ±448 if `dtype` is e4m3 (as PTX's `cvt.satfinite` does). NaN stays NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX) if dtype == E4M3 else values


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return saturated(values, dtype).to(dtype)


def quantize_e4m3(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Return `values / scale` in e4m3, saturated at ±448 as engines do."""
    return rounded(values / scale, E4M3)


def widened(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous `values` in `dtype`, float32 or float64. On a CPU, a lookup table for e4m3 is faster than torch."""
    if values.dtype != E4M3 or values.device.type != "cpu":
        return values.to(dtype, memory_format=torch.contiguous_format)
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).to(dtype)
    return every.index_select(0, values.view(torch.uint8).flatten().to(torch.int32)).view(values.shape)


def unchecked_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Return (output, LSE in base 2) of attention, both float64, without checks of the arguments."""
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
    """The keys with the indices `start` to `end` - 1 of each request from `first_request` on. Requests are sorted by length."""

    first_request: int
    start: int
    end: int


class TiledKV(NamedTuple):
    """K and V of several requests, read one tile of keys at a time. The functions `keys` and `values` return a tile of K or V,
    contiguous float64 [requests * num_kv_heads, keys, head_dim]. Values must be finite, also where they are not visible.
    """

    keys: Callable[[Tile], Tensor]
    values: Callable[[Tile], Tensor]
    tiles: list[Tile]
    kv_len: int
    num_kv_heads: int
    v_head_dim: int


def tiles(kv_lens: list[int], elements: int, device: torch.device, step: int = 1) -> list[Tile]:
    """Divide the keys of all requests into tiles of at most `TILE_ELEMENTS` elements of K or V (`GPU_TILE_ELEMENTS` on a GPU).

    `kv_lens` are multiples of `step` in ascending order. The index of each tile's first key is also a multiple of `step`.
    `elements` is the number of elements of one key in K or in V, whichever has more.
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


@torch.no_grad()  # scores and sums are written in place
def attention_by_tiles(
    query: Tensor, kv: TiledKV, visible: Callable[[], Tensor], softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Return (out, lse_log2), float64 [batch, q_len, num_qo_heads, v_head_dim] and [batch, q_len, num_qo_heads]. One tile
    of K or V at a time is in float64. `visible` returns bool [batch, q_len or 1, kv_len]; it runs while a GPU computes scores.
    """
    batch, q_len, num_qo_heads, _ = query.shape
    num_kv_heads = kv.num_kv_heads
    by_row = (batch, num_kv_heads, q_len, num_qo_heads // num_kv_heads)

    # [batch * num_kv_heads, q_len * group, head_dim]: the rows that share a K/V head form one matrix.
    rows = query.to(torch.float64).unflatten(2, (num_kv_heads, -1)).transpose(1, 2).flatten(0, 1).flatten(1, 2)
    bmm1_scale, bmm2_scale = float(softmax.bmm1_scale), float(softmax.bmm2_scale)  # before the GPU has work
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
    origin = largest.nan_to_num()  # finite: -inf less itself is NaN
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
    # [batch, num_kv_heads, q_len, group, v_head_dim], in place too
    out = sums.view(*by_row, kv.v_head_dim).div_(denominator.masked_fill(denominator == 0, 1.0)).mul_(bmm2_scale)
    return out.transpose(1, 2).flatten(2, 3), lse_log2.squeeze(4).transpose(1, 2).flatten(2, 3)


def _write_products(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.is_cuda or out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:  # a strided view on a CPU, to which torch.bmm would write one matrix at a time
        out.copy_(torch.bmm(left, right))


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, kv_lens: Tensor, *, causal: bool, window_left: int
) -> Tensor:
    """Return the keys that each row sees: bool [batch, q_len, kv_len], or [batch, 1, kv_len] if all rows see the same keys.

    Args:
        query_positions: [batch, q_len], position of each row in its request; negative for a row before the first key.
        key_positions: [batch, kv_len].
        kv_lens: [batch], number of existing keys.
        causal: True: a row at position p sees no key after p. False: it may.
        window_left: a row at position p sees no key before p - window_left (FlashInfer's inclusive window); -1: no window.
    """
    rows, keys = query_positions.unsqueeze(2), key_positions.unsqueeze(1)
    visible = (keys >= 0) & (keys < kv_lens[:, None, None])
    if causal:
        visible = visible & (keys <= rows)
    if window_left >= 0:
        visible = visible & (keys >= rows - window_left)
    return visible


def visible_to(
    rows: range, q_len: int, kv_len: int, shown: Tensor | None, device: torch.device, *, causal: bool, window_left: int
) -> Tensor:
    """Return which keys the query rows `rows` (indices in the request) see. Each request has `kv_len` keys and `q_len` rows,
    which belong to its newest tokens. If `shown` is None, all requests see the same: the result is bool [1, len(rows), keys],
    and with `causal` it ends at the last row's own key. `shown` is a draft mask of each request, bool [num_requests, q_len,
    q_len], which replaces the causal rule: the result is bool [num_requests, len(rows), kv_len].
    """
    first, causal = kv_len - q_len, causal and shown is None  # first: position of a request's first row
    last = max(first + rows.stop, 0) if causal else kv_len
    visible = visible_keys(
        torch.arange(first + rows.start, first + rows.stop, device=device).unsqueeze(0),
        torch.arange(last, device=device).unsqueeze(0),
        torch.tensor([kv_len], device=device),
        causal=causal,
        window_left=window_left,
    ).expand(1, len(rows), last)  # without a causal rule, all rows see the same
    if shown is None:
        return visible
    visible = visible.expand(len(shown), -1, -1).clone()
    visible[:, :, max(first, 0) :] &= shown[:, rows.start : rows.stop, max(-first, 0) :]
    return visible


def stacked(histories: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Stack K, and stack V, of requests with equally many keys. A single request is not copied. e4m3 becomes float32."""
    of_batch = [torch.stack(sides) if len(sides) > 1 else sides[0][None] for sides in zip(*histories, strict=True)]
    return [widened(side, torch.float32) if side.dtype == E4M3 else side for side in of_batch]


def unchecked_eager_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax, arithmetic: torch.dtype
) -> Tensor:
    """Return the output of attention with operands rounded to `arithmetic`, in float32, without checks of the arguments."""
    weights, denominator = _weights(query, keys, visible, softmax, arithmetic)
    values = values.to(torch.float32).transpose(1, 2)
    sums = _of_each_group(_as_operand(weights, arithmetic), values)
    return (sums / denominator * float(softmax.bmm2_scale)).transpose(1, 2)


def skippable(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    softmax: Softmax,
    arithmetic: torch.dtype,
    threshold: float,
    out: Tensor,
) -> Tensor:
    """Return two bounds, float64 [batch, q_len, num_qo_heads, 2], of what changes if a kernel leaves out softmax weights below
    `threshold` times the row's largest weight (skip-softmax): the left-out share of the denominator, and the output's relative
    L2 error. `out` is the exact output.

    If the left-out weights are the share s of the denominator, the output's error is (s * out - sum(weight * value)) / (1 - s).
    Its norm is at most (s * ‖out‖ + sum(weight * ‖value‖)) / (1 - s), for these weights and for any subset of them.
    """
    if not threshold:
        return out.new_zeros(*out.shape[:3], 2)
    weights, denominator = _weights(query, keys, visible, softmax, arithmetic)
    weights = weights.to(torch.float64)
    largest = weights.amax(dim=-1, keepdim=True) if weights.shape[-1] else weights
    left_out = weights * (weights < SKIP_ROUNDING * threshold * largest)
    lengths = values.to(torch.float64).norm(dim=-1, keepdim=True).transpose(1, 2)
    share, sums = left_out.sum(dim=-1, keepdim=True) / denominator, _of_each_group(left_out, lengths) / denominator
    share = share.clamp(max=LARGEST_SHARE).transpose(1, 2)
    sums = (sums * float(softmax.bmm2_scale)).abs().transpose(1, 2)
    size = out.norm(dim=-1, keepdim=True)
    error = (share * size + sums) / ((1 - share) * size)
    return torch.cat((share, error.nan_to_num(nan=0.0, posinf=math.inf)), dim=-1)


def _weights(
    query: Tensor, keys: Tensor, visible: Tensor, softmax: Softmax, arithmetic: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return (weights, float32 [batch, num_qo_heads, q_len, kv_len]; denominator of each row, 1 if the row sees no key)."""
    keys = keys.to(torch.float32).transpose(1, 2)
    rows = _as_operand(query.to(torch.float32), arithmetic).transpose(1, 2)  # [batch, num_qo_heads, q_len, head_dim]
    scores = _of_each_group(rows, keys.transpose(2, 3)).mul_(float(softmax.bmm1_scale))
    scores = scores.masked_fill_(~visible.unsqueeze(1), -math.inf)
    if scores.shape[-1] == 0:  # no key at all
        return scores, scores.new_ones(*scores.shape[:3], 1)
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float32).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_logits), dim=-1)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest.nan_to_num()).exp_()
    denominator = weights.sum(dim=-1, keepdim=True)
    return weights[..., : keys.shape[2]], torch.where(denominator == 0, 1.0, denominator)


def _of_each_group(rows: Tensor, side: Tensor) -> Tensor:
    group = rows.shape[1] // side.shape[1]
    by_head = rows.unflatten(1, (-1, group)).flatten(2, 3) @ side
    return by_head.unflatten(2, (group, rows.shape[2])).flatten(1, 2)


def _as_operand(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values rounded to `dtype`. For e4m3 each vector is scaled to the dtype's range before, and back after."""
    if dtype != E4M3 or values.shape[-1] == 0:
        return values.to(dtype).to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
    return (values / scale).to(dtype).to(torch.float32) * scale


def solved_requests(
    query: Tensor, histories: Sequence[History], q_lens: Sequence[int], rules: Rules, *, with_control: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Compute the attention of the query rows of consecutive requests. Requests of equal sizes are computed together, and long
    requests in several pieces.

    Yields:
        For each piece: (index of each row in the query, int64 [rows]; output, float64 [rows, num_qo_heads, v_head_dim]; LSE in
            base 2, float64 [rows, num_qo_heads]; output in low precision by `unchecked_eager_attention`, float32; one
            tensor with the bounds of `skippable`). Without `with_control`, the low-precision output and this tensor are None.
    """
    row_ids = torch.arange(sum(q_lens), device=query.device).split(list(q_lens))
    most = PIECE_ELEMENTS[query.device.type]
    for requests in _together(query, histories, q_lens, most // TOGETHER):
        rows_of_each, q_len = torch.stack([row_ids[request] for request in requests]), q_lens[requests[0]]
        shown = None if rules.shown is None else torch.stack([rules.shown[request] for request in requests])
        keys, values = stacked([histories[request] for request in requests])
        rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 1)))
        # Without the keys before the first row's window, whose pages an engine may have freed.
        seen_from = 0 if rules.window_left < 0 else max(0, keys.shape[1] - q_len - rules.window_left)
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            visible = visible_to(
                rows, q_len, keys.shape[1], shown, query.device, causal=rules.causal, window_left=rules.window_left
            ).expand(len(requests), -1, -1)
            place, seen = rows_of_each[:, rows.start : rows.stop], slice(seen_from, visible.shape[2])
            inputs = query[place], keys[:, seen], values[:, seen], visible[:, :, seen], rules
            out, lse_log2 = unchecked_attention(*inputs)
            control = skipped = None
            if with_control:
                control = unchecked_eager_attention(*inputs, rules.arithmetic).flatten(0, 1)
                threshold = rules.skip_softmax / max(keys.shape[1], 1)
                skipped = skippable(*inputs, rules.arithmetic, threshold, out).flatten(0, 1)
            yield place.flatten(), out.flatten(0, 1), lse_log2.flatten(0, 1), control, skipped


def _together(query: Tensor, histories: Sequence[History], q_lens: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield lists of requests with equally many keys and equally many rows. All requests of a list together have at most `most`
    elements of K and V, and at most `most` scores.
    """
    by_size: dict[tuple[int, int], list[int]] = {}
    for request, ((keys, _), q_len) in enumerate(zip(histories, q_lens, strict=True)):
        if q_len:
            by_size.setdefault((len(keys), q_len), []).append(request)
    for (kv_len, q_len), requests in by_size.items():
        elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 1)
        at_once = max(1, most // elements)
        yield from (requests[first : first + at_once] for first in range(0, len(requests), at_once))
