"""The algorithms of the references: softmax attention in float64, and the same with its control for rows of requests.

The exact algorithm walks tiles of K and V twice: once for all scores, and after the softmax once for the sums. A tile is a
range of keys in all requests that are long enough. It is converted to float64, multiplied and dropped:

    request 0  | tile 0 | tile 1 |
    request 1  | tile 0 | tile 1 | tile 2          | tile 3          |
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.calls import Problem
from lab.calls.problem import E4M3, Softmax
from lab.references.eager_attention import skippable, unchecked_eager_attention
from lab.references.errors import Truth
from lab.references.quantization import rounded, saturated, widened

# Most elements of K and V, or of scores, in one piece, by the device. Scores are float64: 0.5 GiB of them, little on any
# device. K and V are never there at once, but few of them keep a short request from being padded to a long one. Launches, not
# memory, are what a GPU is short of.
PIECE_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}
TOGETHER = 16  # requests that are computed together are a piece's 16th at most: they are copied for it
# Most elements of K or V that are in float64 at a time. A CPU's cache holds 4 MiB of them. A GPU gains nothing from a tile that
# its L2 holds, and each tile costs seven launches (results/nvidia-h200/README.md): 256 MiB.
TILE_ELEMENTS = 2**19
GPU_TILE_ELEMENTS = 2**25


def unchecked_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax: Softmax
) -> tuple[Tensor, Tensor]:
    """Compute `lab.references.attention` of checked arguments. NaN in a query gives NaN in its output."""
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
    """The keys `start` to `end` - 1 of requests sorted by length; those before `first_request` are too short."""

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
    """Return tiles that divide the keys of all requests, as large as the limit of float64 elements of K or V allows. The
    requests' numbers of keys are ascending multiples of `step`, and so are tiles; one key has `elements` in K or in V.
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
    """Compute `lab.references.attention` with at most one tile of K or V in float64 at a time.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim].
        kv: K and V of the batch.
        visible: returns bool [batch, q_len or 1, kv_len]. It is called while a GPU is busy with the scores.
        softmax: scales and sinks.

    Returns:
        out and lse_log2, as `lab.references.attention` returns them.
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
    # [batch, num_kv_heads, q_len, group, v_head_dim], in place too
    out = sums.view(*by_row, kv.v_head_dim).div_(denominator.masked_fill(denominator == 0, 1.0)).mul_(bmm2_scale)
    return out.transpose(1, 2).flatten(2, 3), lse_log2.squeeze(4).transpose(1, 2).flatten(2, 3)


def _write_products(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write matrix products to a part of a tensor. On a CPU torch would write to a strided part one matrix at a time."""
    if out.is_cuda or out.is_contiguous():
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def visible_keys(
    query_positions: Tensor, key_positions: Tensor, kv_lens: Tensor, *, causal: bool, window_left: int
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Rules(Softmax):
    """The rules of attention for the rows of a request: masks, the softmax's terms, and precision."""

    #: dtypes of the control's operands and of the output
    arithmetic: torch.dtype
    out_dtype: torch.dtype
    window_left: int = -1  #: how many keys before its own position a row sees; -1 for all
    causal: bool = True  #: False: every row sees every key
    #: factor of the weights that a kernel may leave out, as in `AttentionProblem`; 0 for none
    skip_softmax: float = 0.0
    #: bool [num_requests, q_len, q_len], the keys that each row sees among a request's last q_len keys. It replaces the causal
    #: rule; None: no such mask.
    shown: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, arithmetic: torch.dtype | None = None, shown: Tensor | None = None) -> "Rules":
        """Return the rules of a problem. The control's operands have the query's dtype, or float32 for float64."""
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


def truth_of_requests(query: Tensor, histories: list[tuple[Tensor, Tensor]], q_lens: list[int], rules: Rules) -> Truth:
    """Return the expected results of the rows of consecutive requests.

    Args:
        query: [num_rows, num_qo_heads, head_dim]. Rows after the requests' rows have no expected results.
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim]. V's head_dim may differ from K's.
        q_lens: query rows of each request, which belong to its newest tokens.
        rules: how rows attend to keys.
    """
    pieces = list(solved_requests(query, histories, q_lens, rules, with_control=True))
    places, exact, lse_log2, control, skipped = map(torch.cat, zip(*pieces, strict=True))
    order = places.argsort()
    request_of_row = requests_of_rows(q_lens, query.device)
    shared_error = _error_of_scaled_values(query, histories, rules)
    expected, control = saturated(exact[order], rules.out_dtype), rounded(control[order], rules.out_dtype)
    return Truth(expected, control, lse_log2[order], request_of_row, rules.arithmetic, shared_error, skipped[order])


def requests_of_rows(q_lens: Sequence[int], device: torch.device) -> Tensor:
    """Return the request of each row, int64 [sum(q_lens)], if consecutive requests have `q_lens` rows."""
    return torch.arange(len(q_lens), device=device).repeat_interleave(torch.tensor(q_lens, device=device))


def truth_of_selected(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], selected: Sequence[Tensor], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests as `truth_of_requests` does. Each row attends to the keys
    that it selects, as if it were a request with no other keys: `selected` are their positions, int64 [q_len, num_columns] for
    each request. A negative number is no key; a key that is selected twice counts twice.
    """
    of_rows = [
        (keys[row[row >= 0]], values[row[row >= 0]])
        for (keys, values), rows in zip(histories, selected, strict=True)
        for row in rows
    ]
    truth = truth_of_requests(query[: len(of_rows)], of_rows, [1] * len(of_rows), rules)
    return with_requests(truth, [len(rows) for rows in selected])


def with_requests(truth: Truth, q_lens: Sequence[int]) -> Truth:
    """Return expected results that were computed with each row as a request, as those of requests with `q_lens` rows."""
    return replace(truth, request_of_row=requests_of_rows(q_lens, truth.expected.device))


def truth_of_heads(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], seen: Sequence[Tensor], q_lens: list[int], rules: Rules
) -> Truth:
    """Return the expected results of the rows of consecutive requests as `truth_of_requests` does. To each K/V head, the keys
    that it sees are the whole request: `seen` are these keys of each request, bool [kv_len, num_kv_heads].
    """
    num_kv_heads = seen[0].shape[1]
    parts = []
    for head, rows in enumerate(query.split(query.shape[1] // num_kv_heads, dim=1)):
        of_head = [
            (keys[own[:, head], head : head + 1], values[own[:, head], head : head + 1])
            for (keys, values), own in zip(histories, seen, strict=True)
        ]
        sinks = None if rules.sinks is None else rules.sinks.chunk(num_kv_heads)[head]
        parts.append(truth_of_requests(rows, of_head, q_lens, replace(rules, sinks=sinks)))
    return Truth.of_heads(parts)


def _error_of_scaled_values(query: Tensor, histories: list[tuple[Tensor, Tensor]], rules: Rules) -> float:
    """Return a relative error that all outputs may share: that of a kernel which multiplies a quantised cache's values by
    bmm2_scale and rounds the products.

    A quantised cache's values have few different mantissas, so their roundings do not average out. Half of the largest rounding
    error is allowed: with normally distributed values in e4m3 or NVFP4 and any bmm2_scale, the mean error was at most 2.0e-3 in
    bfloat16. A scale that is a power of two causes no rounding.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0


def solved_requests(
    query: Tensor,
    histories: Sequence[tuple[Tensor, Tensor]],
    q_lens: Sequence[int],
    rules: Rules,
    *,
    with_control: bool = False,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """Compute attention of the rows of consecutive requests, one piece at a time: some rows of requests with equal numbers of
    keys and rows.

    Args:
        query, histories, q_lens, rules: as in `truth_of_requests`.
        with_control: compute the control too, and what `rules.skip_softmax` allows.

    Yields:
        The index of each row of the piece in the query, int64 [rows]; its output, float64 [rows, num_qo_heads, v_head_dim]; its
        LSE in base 2, float64 [rows, num_qo_heads]; the control, float32 in the output's shape, or None; and `Truth.skipped` of
        the rows, or None.
    """
    row_ids = torch.arange(sum(q_lens), device=query.device).split(list(q_lens))
    most = PIECE_ELEMENTS[query.device.type]
    for requests in _together(query, histories, q_lens, most // TOGETHER):
        keys, values = (_stacked([histories[request][side] for request in requests]) for side in (0, 1))
        shown = None if rules.shown is None else torch.stack([rules.shown[request] for request in requests])
        rows_of_each, q_len = torch.stack([row_ids[request] for request in requests]), q_lens[requests[0]]
        rows_at_once = max(1, most // (query.shape[1] * max(keys.shape[1], 1)))
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            visible = visible_to(rows, q_len, keys.shape[1], rules, shown, query.device).expand(len(requests), -1, -1)
            place, last = rows_of_each[:, rows.start : rows.stop], visible.shape[2]
            inputs = query[place], keys[:, :last], values[:, :last], visible, rules
            out, lse_log2 = unchecked_attention(*inputs)
            control = skipped = None
            if with_control:
                control = unchecked_eager_attention(*inputs, rules.arithmetic).flatten(0, 1)
                threshold = rules.skip_softmax / max(keys.shape[1], 1)
                skipped = skippable(*inputs, rules.arithmetic, threshold, out).flatten(0, 1)
            yield place.flatten(), out.flatten(0, 1), lse_log2.flatten(0, 1), control, skipped


def _together(
    query: Tensor, histories: Sequence[tuple[Tensor, Tensor]], q_lens: Sequence[int], most: int
) -> Iterator[list[int]]:
    """Yield lists of requests to compute together. The requests of a list have equal numbers of keys and rows, and at most
    `most` elements of K and V or of scores. Requests without rows are left out.
    """
    by_size: dict[tuple[int, int], list[int]] = {}
    for request, ((keys, _), q_len) in enumerate(zip(histories, q_lens, strict=True)):
        if q_len:
            by_size.setdefault((len(keys), q_len), []).append(request)
    for (kv_len, q_len), requests in by_size.items():
        elements = max(sum(side.numel() for side in histories[requests[0]]), kv_len * q_len * query.shape[1], 1)
        at_once = max(1, most // elements)
        yield from (requests[first : first + at_once] for first in range(0, len(requests), at_once))


def visible_to(
    rows: range, q_len: int, kv_len: int, rules: Rules | Problem, shown: Tensor | None, device: torch.device
) -> Tensor:
    """Return the keys that rows of requests with equal lengths see, up to the last key that one of the rows may see.

    Args:
        rows: the rows' indices in a request of `q_len` rows and `kv_len` keys.
        rules: what says if the rows are causal and have a window.
        shown: the requests' part of `Rules.shown`, or None.

    Returns:
        bool [num_requests, len(rows), keys]; the first axis is 1 without `shown`.
    """
    first = kv_len - q_len  # position of a request's first row
    last = kv_len if shown is not None or not rules.causal else max(first + rows.stop, 0)
    visible = visible_keys(
        torch.arange(first + rows.start, first + rows.stop, device=device).unsqueeze(0),
        torch.arange(last, device=device).unsqueeze(0),
        torch.tensor([kv_len], device=device),
        causal=rules.causal and shown is None,
        window_left=rules.window_left,
    ).expand(1, len(rows), last)  # without a causal rule, all rows see the same
    if shown is None:
        return visible
    visible = visible.expand(len(shown), -1, -1).clone()
    visible[:, :, max(first, 0) :] &= shown[:, rows.start : rows.stop, max(-first, 0) :]
    return visible


def _stacked(sides: list[Tensor]) -> Tensor:
    """Stack K or V of several requests. One request's K or V is not copied, except e4m3, which becomes float32 once for all."""
    stacked = sides[0].unsqueeze(0) if len(sides) == 1 else torch.stack(sides)
    return widened(stacked, torch.float32) if stacked.dtype == E4M3 else stacked
