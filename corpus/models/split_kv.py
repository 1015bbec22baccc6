"""A right torch model of a paged split-K/V attention kernel. A wrong kernel replaces one stage.

The arithmetic is float32 on operands in the dtypes of the call. The rows of a request are divided into tiles, and a tile's keys
into splits. Each split stores its largest logit, its sum of weights and its sum of weighted values in the workspace's scratch.
The split that arrives last, by a counter before the scratch, merges them. Keys that no row of a tile may see are never read.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corpus.wrong import CONTEXT, DECODE, Model
from lab.calls import ContextCall, DecodeCall, MLADecodeCall, takes
from lab.calls.problem import PagedAttention, Scale
from lab.calls.workspace import SEMAPHORE_BYTES, semaphores_and_scratch
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4
from lab.references.softmax_attention import rounded

KEYS_PER_SPLIT = 64
ROWS_PER_TILE = 64

Call = DecodeCall | ContextCall | MLADecodeCall


@dataclass(frozen=True)
class RowTile:
    """Query rows of one request, and the range of keys that at least one of the rows may see."""

    request: int  # index of the request in the batch
    first_row: int  # index of the tile's first row in the query
    num_rows: int
    first_position: int  # position of the first row in its request; negative for a row before the first key
    q_len: int  # number of rows of the request
    kv_len: int  # number of keys of the request
    key_start: int  # first position that the tile reads
    key_end: int  # end of the positions that the tile reads

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def mask_rows(self) -> slice:
        """Return the tile's rows in a draft mask. All requests have the same number of rows then."""
        start = self.first_row - self.request * self.q_len
        return slice(start, start + self.num_rows)

    @property
    def num_splits(self) -> int:
        """Return the number of splits, at least one: a tile without keys has an empty split."""
        return max(1, -(-self.key_end // KEYS_PER_SPLIT) - self.key_start // KEYS_PER_SPLIT)


class Partials(NamedTuple):
    """The partial results of a tile's splits, float32.

    `largest` (largest logit, -inf without keys) and `total` (sum of weights) are [num_qo_heads, num_rows, num_splits]. `sums`
    of weighted values have v_head_dim as a last dimension.
    """

    largest: Tensor
    total: Tensor
    sums: Tensor


class Rows(NamedTuple):
    """The results of a tile, float32: values [num_rows, num_qo_heads, v_head_dim], lse_log2 [num_rows, num_qo_heads]."""

    values: Tensor
    lse_log2: Tensor


@dataclass(frozen=True, eq=False)
class Workspace:
    """The memory of a call. `counters`: int32, one per tile, zero between calls. `scratch`: float32, may hold anything."""

    counters: Tensor
    scratch: Tensor


class SplitKV(Model, interface=(DECODE, CONTEXT)):
    """A right model of FlashInfer's decode, context and MLA decode calls. All methods except the launches are stages."""

    forgiving = False
    selects_entries = False  # it makes calls whose rows select entries, and no others

    def __init__(self) -> None:
        self.trtllm_batch_decode_with_kv_cache = takes(DecodeCall)(self.launch)
        self.trtllm_batch_context_with_kv_cache = takes(ContextCall)(self.launch)
        self.trtllm_batch_decode_with_kv_cache_mla = takes(MLADecodeCall)(self.launch_mla)

    def launch_mla(self, call: MLADecodeCall) -> Any:
        """Make an MLA decode call: `launch` it, and convert the results to the call's shapes and its base of the LSE."""
        returned = self.launch(call)
        out, lse = returned if call.return_lse else (returned, None)
        if lse is not None and call.lse_is_base_e:
            lse *= math.log(2.0)
        return call.returned(out, lse)

    def launch(self, call: Call) -> Any:
        """Make a call. Return out [num_rows, num_qo_heads, v_head_dim], or (out, lse) if the call wants the LSE."""
        problem = self.problem(call)
        if (problem.selected is not None) != self.selects_entries:
            raise NotImplementedError(f"sparse_mla_top_k={problem.selected is not None} is another model's")
        out, lse = self.results(problem)
        if problem.is_block_sparse:
            for of_head in replace(problem, out=out, lse=lse).of_kv_heads():
                self.solve(call, of_head, *of_head.results())
        else:
            self.solve(call, problem, out, lse)
        self.finish(problem, out, lse)
        return self.returned(problem, out, lse)

    def solve(self, call: Call, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """Compute a problem, of all heads or of one K/V head, into `out` and `lse`."""
        tiles = self.tiles(problem)
        workspace = self.workspace(call.workspace_buffer, problem, tiles)
        end = self.row_offsets(problem)[-1]  # later rows are padding
        out[end:] = 0
        if lse is not None:
            lse[end:] = -math.inf
        for index, tile in enumerate(tiles):
            scratch = self.layout(problem, tile, workspace.scratch)
            for place, part in zip(scratch, self.partials(problem, tile), strict=True):
                place.copy_(part)
            if self.arrives_last(workspace.counters, index, tile):
                rows = self.merged(problem, tile, scratch)
                self.finish_tile(problem, tile, rows)
                self.write(problem, tile, rows, out, lse)

    def problem(self, call: Call) -> PagedAttention:
        return self.applied(call.problem())

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        return problem.seq_lens.tolist()

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        """Return the first query row of each request and the end of the last, [batch_size + 1]."""
        return problem.row_offsets()

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        """Return the K/V head of each query head, int64 [num_qo_heads]."""
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return heads // problem.group

    def sinks(self, problem: PagedAttention) -> Tensor | None:
        return problem.sinks

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        return problem.results()

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        return problem.returned(out, lse)

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        """Return the caller's buffer as the workspace if it is large enough, else a new workspace."""
        device = problem.query.device
        needed = max((partials_size(problem, tile) for tile in tiles), default=0)
        if buffer is not None and buffer.device == device and buffer.is_contiguous():
            data = buffer.flatten().view(torch.uint8)
            if data.storage_offset() % 4 == 0 and len(data) >= SEMAPHORE_BYTES + 4 * needed:
                counters, scratch = semaphores_and_scratch(data)
                return Workspace(counters.view(torch.int32), scratch[: 4 * needed].view(torch.float32))
        return Workspace(
            torch.zeros(len(tiles), dtype=torch.int32, device=device),
            torch.empty(needed, dtype=torch.float32, device=device),
        )

    def layout(self, problem: PagedAttention, tile: RowTile, scratch: Tensor) -> Partials:
        """Return views of the scratch for a tile's partial results."""
        shape = (problem.num_qo_heads, tile.num_rows, tile.num_splits)
        largest, total, sums = scratch[: partials_size(problem, tile)].split_with_sizes(
            [math.prod(shape), math.prod(shape), math.prod(shape) * problem.v_head_dim]
        )
        return Partials(largest.view(shape), total.view(shape), sums.view(*shape, problem.v_head_dim))

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        """Count a tile's splits. The last split finds the results of all others in scratch, and sets the counter to zero."""
        counters[index] += tile.num_splits
        if int(counters[index]) != tile.num_splits:
            return False
        counters[index] = 0
        return True

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        out[tile.rows] = rounded(rows.values, out.dtype)
        if lse is not None:
            lse[tile.rows] = rows.lse_log2

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        """A wrong kernel may change a tile's merged rows here."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """A wrong kernel may change the results here, after all rows are written."""

    def tiles(self, problem: PagedAttention) -> list[RowTile]:
        offsets = self.row_offsets(problem)
        return [
            self.tile(problem, request, kv_len, offsets[request + 1] - offsets[request], offsets[request], row)
            for request, kv_len in enumerate(self.kv_lens(problem))
            for row in range(offsets[request], offsets[request + 1], ROWS_PER_TILE)
        ]

    def tile(
        self, problem: PagedAttention, request: int, kv_len: int, q_len: int, request_row: int, row: int
    ) -> RowTile:
        """Return the tile that begins at query row `row` of a request. The request's first row is `request_row`."""
        num_rows = min(ROWS_PER_TILE, request_row + q_len - row)
        position = self.position(kv_len, q_len, row - request_row)
        key_start, key_end = self.key_range(problem, position, num_rows, kv_len)
        return RowTile(request, row, num_rows, position, q_len, kv_len, key_start, key_end)

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        """Return the position of a row of a request, counted in keys."""
        return kv_len - q_len + row

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        """Return the first position and the end of the positions that rows from `first_position` on may see."""
        sees_ahead = problem.mask is not None or not problem.causal or problem.num_visible is not None
        end = max(0, kv_len if sees_ahead else min(first_position + num_rows, kv_len))
        start = max(0, first_position - problem.window_left) if problem.window_left >= 0 else 0
        return min(start, end), end

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        """Return which of the keys at positions int64 [num_keys] each row sees, bool [num_rows, num_keys]."""
        rows = self.row_positions(problem, tile).unsqueeze(1)
        visible = (keys < tile.kv_len).expand(tile.num_rows, -1)
        if problem.mask is not None:
            visible = visible & self.unmasked(problem, tile, keys)
        elif problem.causal:
            visible = visible & (keys <= rows)
        if problem.window_left >= 0:
            visible = visible & self.in_window(problem, tile, rows, keys)
        return visible

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        """Return the position of each row of a tile, int64 [num_rows]; with `num_visible` that of the last key that it sees."""
        if problem.num_visible is not None:
            return problem.num_visible[tile.rows].to(torch.int64) - 1
        return torch.arange(tile.num_rows, device=problem.query.device) + tile.first_position

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the keys in each row's window, bool [num_rows, num_keys]. `rows` [num_rows, 1] and `keys` [num_keys] are
        positions.
        """
        return keys >= rows - problem.window_left

    def unmasked(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        """Return the keys that the draft mask leaves visible, bool [num_rows, num_keys]. Keys before the draft are visible."""
        draft_tokens = keys - (tile.kv_len - tile.q_len)
        shown = self.mask_bits(problem, tile)
        return shown[:, draft_tokens.clamp(0, tile.q_len - 1)] | (draft_tokens < 0)

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        """Return the bits of a tile's rows in the draft mask, bool [num_rows, q_len]."""
        assert problem.mask is not None
        words = problem.mask[tile.request, tile.mask_rows].to(torch.int32)
        bits = words.unsqueeze(-1) >> torch.arange(16, device=words.device, dtype=torch.int32)
        return (bits & 1).flatten(1)[:, : tile.q_len].bool()

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        """Return a tile's query rows, float32 [num_qo_heads, num_rows, head_dim]."""
        return problem.query[tile.rows].to(torch.float32).transpose(0, 1)

    def keys(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        """Return the keys at positions, float32 [num_kv_heads, num_keys, head_dim]."""
        pages = self.pages(problem, problem.k_block_tables, tile, positions)
        return self.entries(problem.k_cache, problem.k_scale_factors, pages, self.offsets(problem, positions))

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        """Return the values at positions, float32 [num_kv_heads, num_keys, v_head_dim]."""
        pages = self.pages(problem, problem.v_block_tables, tile, positions)
        scale_factors = problem.v_scale_factors
        if scale_factors is not None and problem.v_scale_factors_interleaved:
            plain = deinterleave_v_scale_factors(scale_factors.view(torch.uint8))
            scale_factors = plain.view(torch.float8_e4m3fn)
        return self.entries(problem.v_cache, scale_factors, pages, self.offsets(problem, positions))

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        """Return the page of each position, int64 [num_keys]."""
        row, columns = table[self.table_row(problem, tile)], positions // problem.page_size
        if self.forgiving:
            return row[columns.clamp(0, len(row) - 1)].to(torch.int64) % problem.k_cache.shape[0]
        return row[columns].to(torch.int64)

    def table_row(self, problem: PagedAttention, tile: RowTile) -> int:
        return tile.request

    def offsets(self, problem: PagedAttention, positions: Tensor) -> Tensor:
        """Return the index of each position's token in its page, int64 [num_keys]."""
        return positions % problem.page_size

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        """Return tokens of K or V, dequantised, float32 [num_kv_heads, num_keys, head_dim or v_head_dim]."""
        tokens = gathered(cache, pages, offsets)
        if scale_factors is not None:
            tokens = dequantize_nvfp4(tokens, gathered(scale_factors, pages, offsets))
        return tokens.to(torch.float32).transpose(0, 1)

    def partials(self, problem: PagedAttention, tile: RowTile) -> Partials:
        positions = torch.arange(tile.key_start, tile.key_end, device=problem.query.device)
        heads = self.kv_heads(problem)
        keys, values = (side[heads] for side in (f(problem, tile, positions) for f in (self.keys, self.values)))
        scores = self.scores(problem, self.query_rows(problem, tile), keys)
        scores = self.masked(scores, self.visible(problem, tile, positions))
        scores = self.in_splits(problem, tile, scores, -math.inf, dim=2)
        largest = self.largest(scores)
        weights = self.weights(scores, largest)
        sums = torch.einsum("hrsk,hskd->hrsd", weights, self.in_splits(problem, tile, values, 0.0, dim=1))
        return Partials(largest, weights.sum(dim=-1), sums)

    def scores(self, problem: PagedAttention, query: Tensor, keys: Tensor) -> Tensor:
        """Return the logits, [num_qo_heads, num_rows, num_keys]."""
        return (query @ keys.transpose(1, 2)) * as_float32(problem.bmm1_scale, query.device)

    def masked(self, scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -math.inf)

    def in_splits(self, problem: PagedAttention, tile: RowTile, tensor: Tensor, fill: float, dim: int) -> Tensor:
        """Divide dimension `dim`, a tile's keys, into [num_splits, KEYS_PER_SPLIT]. Places without a key are set to `fill`."""
        size = list(tensor.shape)
        size[dim] = tile.num_splits * KEYS_PER_SPLIT
        padded = tensor.new_full(size, fill)
        padded.narrow(dim, tile.key_start % KEYS_PER_SPLIT, tensor.shape[dim]).copy_(tensor)
        return padded.unflatten(dim, (tile.num_splits, KEYS_PER_SPLIT))

    def largest(self, scores: Tensor) -> Tensor:
        """Return the largest score of each split, from [..., num_splits, KEYS_PER_SPLIT]."""
        return scores.amax(dim=-1)

    def weights(self, scores: Tensor, largest: Tensor) -> Tensor:
        return torch.exp(scores - finite_or_zero(largest).unsqueeze(-1))

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        sinks = self.sinks(problem)
        largest = partials.largest.amax(dim=-1)
        if sinks is not None:
            largest = torch.maximum(largest, sinks.unsqueeze(1))
        origin = finite_or_zero(largest)
        total, sums = self.summed(partials, self.shares(partials, origin))
        if sinks is not None:
            total = total + self.sink_weight(problem, tile, sinks.unsqueeze(1), origin)
        values = sums / torch.where(total == 0, 1.0, total).unsqueeze(-1)
        values = values * as_float32(problem.bmm2_scale, values.device)
        return Rows(values.transpose(0, 1), self.lse_log2(origin, total).transpose(0, 1))

    def shares(self, partials: Partials, origin: Tensor) -> Tensor:
        """Return the weight of each split's sums, [num_qo_heads, num_rows, num_splits]; 0 for a split that saw no key."""
        return torch.exp(partials.largest - origin.unsqueeze(-1))

    def summed(self, partials: Partials, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return (total [num_qo_heads, num_rows], sums [num_qo_heads, num_rows, v_head_dim]), summed over the splits."""
        return (shares * partials.total).sum(dim=-1), (shares.unsqueeze(-1) * partials.sums).sum(dim=-2)

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        """Return the sinks' weights, [num_qo_heads, num_rows]. `sinks` are [num_qo_heads, 1]."""
        return torch.exp(sinks - origin)

    def lse_log2(self, origin: Tensor, total: Tensor) -> Tensor:
        return (origin + torch.log(total)) / math.log(2.0)


class Forgiving(SplitKV, forgiving=True):
    """A model that moves a wrong position or page id into range: a wrong kernel then gives wrong results and does not crash."""


class Conditional(Forgiving):
    """A wrong kernel that changes fields of the problem to the values of `instead` if `where` is true."""

    def problem(self, call: Call) -> PagedAttention:
        return self.applied(call.problem(), call)


def partials_size(problem: PagedAttention, tile: RowTile) -> int:
    return problem.num_qo_heads * tile.num_rows * tile.num_splits * (2 + problem.v_head_dim)


def gathered(cache: Tensor, pages: Tensor, offsets: Tensor) -> Tensor:
    """Return tokens of a cache [num_pages, num_kv_heads, page_size, last], also of float8, as [num_keys,
    num_kv_heads, last].
    """
    if cache.dtype == torch.float8_e4m3fn:
        return cache.view(torch.uint8)[pages, :, offsets].view(torch.float8_e4m3fn)
    return cache[pages, :, offsets]


def as_float32(scale: Scale, device: torch.device) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=device).reshape(())


def finite_or_zero(largest: Tensor) -> Tensor:
    """Return an origin for exponentials: infinite values are replaced by 0, because -inf - -inf would be NaN."""
    return torch.where(largest.isfinite(), largest, 0.0)
