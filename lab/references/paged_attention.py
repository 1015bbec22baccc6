"""The one algorithm behind the references: softmax attention in float64, first over plain K/V, then over a paged cache.

`attention` is the definition; an end-to-end check hands it a request's K/V history as it was written.
`paged_attention` looks the same keys up through a page table, then calls it. Requests are padded together only so that
a GPU has enough to do at once; a padded or dead key is replaced by zero before any arithmetic sees it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls import MASK_BITS_PER_WORD, PagedAttention, Scale, check_values
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4, rounded

# Most float64 elements that one gathered piece may hold (K and V, or scores): 0.5 GiB, small beside any device.
PIECE_ELEMENTS = 2**26


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    *,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped-query softmax attention in float64.

    Query head h reads K/V head h // (num_qo_heads / num_kv_heads). A sink is one more logit per head: it enlarges the
    softmax's denominator and brings no value. A row that sees no key is zero.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim], any float dtype.
        keys, values: [batch, kv_len, num_kv_heads, head_dim], dequantised; finite, even where not visible.
        visible: bool [batch, q_len, kv_len].
        bmm1_scale, bmm2_scale: factor of Q·K^T and of P·V.
        sinks: [num_qo_heads] or None.

    Returns:
        out, float64 [batch, q_len, num_qo_heads, head_dim]; lse_log2, float64 [batch, q_len, num_qo_heads], log2 of the
        denominator (sink included), -inf where it is empty.
    """
    batch, q_len, num_qo_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_qo_heads // num_kv_heads

    # [batch, num_kv_heads, q_len * group, head_dim]: the rows that share a K/V head form one matrix.
    rows = query.to(torch.float64) * _as_float64(bmm1_scale, query.device)
    rows = rows.unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    # [batch, num_kv_heads, q_len, group, kv_len]
    scores = (rows @ keys.to(torch.float64).permute(0, 2, 3, 1)).unflatten(2, (q_len, group))
    scores = scores.masked_fill(~visible[:, None, :, None, :], -math.inf)

    largest = (
        scores.amax(dim=-1, keepdim=True) if keys.shape[1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    )
    sink_logits = None
    if sinks is not None:
        sink_logits = sinks.to(torch.float64).view(num_kv_heads, 1, group, 1)
        largest = torch.maximum(largest, sink_logits)
    origin = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    weights = torch.exp(scores - origin)
    denominator = weights.sum(dim=-1, keepdim=True)
    if sink_logits is not None:
        denominator = denominator + torch.exp(sink_logits - origin)
    lse_log2 = (origin + torch.log(denominator)).squeeze(-1) / math.log(2.0)

    # [batch, num_kv_heads, q_len * group, head_dim]
    sums = weights.flatten(2, 3) @ values.to(torch.float64).transpose(1, 2)
    out = sums.unflatten(2, (q_len, group)) / torch.where(denominator == 0, 1.0, denominator)
    out = out.permute(0, 2, 1, 3, 4).reshape(batch, q_len, num_qo_heads, head_dim)
    return out * _as_float64(bmm2_scale, query.device), lse_log2.permute(0, 2, 1, 3).reshape(batch, q_len, num_qo_heads)


def visible_keys(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    causal: bool,
    window_left: int,
) -> torch.Tensor:
    """Which keys a row sees: bool [batch, q_len, kv_len].

    Args:
        query_positions: [batch, q_len], position of each row in its request; negative for a row before its first key.
        key_positions: [batch, kv_len].
        kv_lens: [batch], keys that exist.
        causal: a row at position p sees keys up to p.
        window_left: and, unless it is -1, none before p - window_left (FlashInfer's inclusive window).
    """
    rows, keys = query_positions.unsqueeze(2), key_positions.unsqueeze(1)
    visible = (keys >= 0) & (keys < kv_lens[:, None, None])
    if causal:
        visible = visible & (keys <= rows)
    if window_left >= 0:
        visible = visible & (keys >= rows - window_left)
    return visible


def paged_attention(problem: PagedAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Solve a checked problem in float64 and round the result once, to `problem.out_dtype`.

    Returns:
        out [num_rows, num_qo_heads, head_dim] and lse_log2 float32 [num_rows, num_qo_heads], or None.

    Raises:
        ValueError: a length, offset or page id that `lab.calls.check_values` refuses.
    """
    out, lse_log2 = problem.results()
    if problem.num_rows == 0:
        return out, lse_log2
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        check_values(problem)
    for piece in _pieces(problem):
        piece_out, piece_lse_log2 = _solve(problem, piece)
        rows, columns = piece.rows(), piece.row_exists()
        out[rows] = rounded(piece_out[columns], out.dtype)
        if lse_log2 is not None:
            lse_log2[rows] = piece_lse_log2[columns].to(lse_log2.dtype)
    return out, lse_log2


@dataclass(frozen=True)
class _Block:
    """Consecutive query rows of one request, and the span of keys that any of them may see."""

    request: int
    first_row: int  # in the query
    num_rows: int
    first_position: int  # of that row in its request; negative before the first key
    kv_len: int
    key_start: int
    key_end: int
    first_page: int  # column of the page table
    num_pages: int


class _Piece:
    """Blocks that are solved together, padded to the longest."""

    def __init__(self, blocks: list[_Block], device: torch.device) -> None:
        self.blocks = blocks
        self.device = device
        self.num_rows = max(block.num_rows for block in blocks)
        self.num_pages = max(block.num_pages for block in blocks)

    def field(self, name: str) -> torch.Tensor:
        """One attribute of all blocks, int64 [len(blocks)]."""
        return torch.tensor([getattr(block, name) for block in self.blocks], device=self.device)

    def row_exists(self) -> torch.Tensor:
        """bool [len(blocks), num_rows]: False for padding."""
        return torch.arange(self.num_rows, device=self.device) < self.field("num_rows").unsqueeze(1)

    def rows(self) -> torch.Tensor:
        """Row in the query of each row that exists, in row-major order, int64."""
        offsets = torch.arange(self.num_rows, device=self.device) + self.field("first_row").unsqueeze(1)
        return offsets[self.row_exists()]


def _pieces(problem: PagedAttention) -> Iterator[_Piece]:
    """The problem in pieces of at most PIECE_ELEMENTS; requests of like length go together."""
    chosen: list[_Block] = []
    rows = pages = 0
    for block in sorted(_blocks(problem), key=lambda block: (block.num_pages, block.num_rows)):
        rows, pages = max(rows, block.num_rows), max(pages, block.num_pages)
        if chosen and (len(chosen) + 1) * _elements(problem, rows, pages * problem.page_size) > PIECE_ELEMENTS:
            yield _Piece(chosen, problem.query.device)
            chosen, rows, pages = [], block.num_rows, block.num_pages
        chosen.append(block)
    if chosen:
        yield _Piece(chosen, problem.query.device)


def _elements(problem: PagedAttention, rows: int, keys: int) -> int:
    """Elements of the larger of one block's K and V and its scores."""
    return keys * max(2 * problem.num_kv_heads * problem.head_dim, rows * problem.num_qo_heads)


def _blocks(problem: PagedAttention) -> Iterator[_Block]:
    kv_lens = problem.seq_lens.tolist()
    if problem.cu_seqlens_q is None:
        offsets = list(range(0, problem.num_rows + 1, problem.max_q_len))
    else:
        offsets = problem.cu_seqlens_q.tolist()
    for request, kv_len in enumerate(kv_lens):
        q_start, q_end = offsets[request], offsets[request + 1]
        rows_at_once = max(1, PIECE_ELEMENTS // (problem.num_qo_heads * max(kv_len, 1)))
        for first_row in range(q_start, q_end, rows_at_once):
            num_rows = min(rows_at_once, q_end - first_row)
            first_position = kv_len - (q_end - q_start) + first_row - q_start
            # A mask may show a row the draft tokens after it, up to the request's end.
            last_key = first_position + num_rows if problem.causal and problem.mask is None else kv_len
            key_end = max(last_key, 0)
            key_start = max(0, first_position - problem.window_left) if problem.window_left >= 0 else 0
            first_page = min(key_start, key_end) // problem.page_size
            num_pages = -(-key_end // problem.page_size) - first_page
            yield _Block(
                request, first_row, num_rows, first_position, kv_len, key_start, key_end, first_page, num_pages
            )


def _solve(problem: PagedAttention, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor]:
    device = problem.query.device
    requests, kv_lens = piece.field("request"), piece.field("kv_len")
    row_offsets = torch.arange(piece.num_rows, device=device)
    rows = (piece.field("first_row").unsqueeze(1) + row_offsets).clamp(max=problem.num_rows - 1)
    query_positions = piece.field("first_position").unsqueeze(1) + row_offsets
    # Whole pages are looked up, [len(blocks), num_pages]; a page that no row of a block may see is not.
    page_columns = piece.field("first_page").unsqueeze(1) + torch.arange(piece.num_pages, device=device)
    in_page = torch.arange(problem.page_size, device=device)
    key_positions = (page_columns.unsqueeze(2) * problem.page_size + in_page).flatten(1)
    exists = (key_positions >= piece.field("key_start").unsqueeze(1)) & (
        key_positions < piece.field("key_end").unsqueeze(1)
    )
    visible = exists.unsqueeze(1) & visible_keys(
        query_positions,
        key_positions,
        kv_lens,
        causal=problem.causal and problem.mask is None,
        window_left=problem.window_left,
    )
    if problem.mask is not None:
        q_starts = (kv_lens - problem.max_q_len).unsqueeze(1)
        words = problem.mask.to(torch.int32)[requests]
        visible = visible & _unmasked(words, query_positions - q_starts, key_positions - q_starts)
    lookup = _Lookup(requests, page_columns, exists.unflatten(1, (-1, problem.page_size)))
    return attention(
        _indexed(problem.query, rows),
        lookup.entries(problem.k_cache, problem.k_scale_factors, problem.k_block_tables),
        lookup.entries(problem.v_cache, _plain_v_scales(problem), problem.v_block_tables),
        visible,
        bmm1_scale=problem.bmm1_scale,
        bmm2_scale=problem.bmm2_scale,
        sinks=problem.sinks,
    )


@dataclass(frozen=True)
class _Lookup:
    """Where a piece's keys lie.

    Attributes:
        requests: [batch].
        page_columns: [batch, num_pages], columns of the page table.
        exists: bool [batch, num_pages, page_size].
    """

    requests: torch.Tensor
    page_columns: torch.Tensor
    exists: torch.Tensor

    def entries(
        self, cache: torch.Tensor, scale_factors: torch.Tensor | None, block_tables: torch.Tensor
    ) -> torch.Tensor:
        """The cache's entries, dequantised, zero where no key exists.

        Returns:
            float64 [batch, num_keys, num_kv_heads, head_dim].
        """
        page_exists = self.exists.any(dim=2)
        columns = torch.where(page_exists, self.page_columns, 0)
        pages = torch.where(page_exists, block_tables[self.requests].gather(1, columns), 0)
        entries = self._live(cache, pages)
        if scale_factors is not None:
            entries = dequantize_nvfp4(entries, self._live(scale_factors, pages))
        # One pass converts and puts each head's keys together, as the products read them.
        heads_first = entries.permute(0, 2, 1, 3, 4)
        converted = torch.empty(heads_first.shape, dtype=torch.float64, device=entries.device).copy_(heads_first)
        return converted.flatten(2, 3).transpose(1, 2)

    def _live(self, cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """[batch, num_pages, num_kv_heads, page_size, last], zero where no key exists."""
        entries = _indexed(cache, pages)
        as_bytes = entries.view(torch.uint8) if entries.dtype == torch.float8_e4m3fn else entries
        as_bytes.masked_fill_(~self.exists[:, :, None, :, None], 0)
        return entries


def _unmasked(mask: torch.Tensor, rows: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Which keys XQA's packed draft mask leaves visible: bool [batch, q_len, kv_len].

    Args:
        mask: its words as int32 [batch, q_len, words].
        rows: [batch, q_len], the row's index among its request's rows.
        draft_tokens: [batch, kv_len], the key's index among the draft tokens; negative for the keys before them.
    """
    q_len = mask.shape[1]
    bits = (mask.unsqueeze(-1) >> torch.arange(MASK_BITS_PER_WORD, device=mask.device, dtype=torch.int32)) & 1
    shown = bits.flatten(2)[:, :, :q_len].bool()  # [batch, row, draft token]
    batch = torch.arange(mask.shape[0], device=mask.device)
    columns = draft_tokens.clamp(0, q_len - 1)
    picked = shown[batch[:, None, None], rows.clamp(0, q_len - 1).unsqueeze(2), columns.unsqueeze(1)]
    return picked | (draft_tokens < 0).unsqueeze(1)


def _plain_v_scales(problem: PagedAttention) -> torch.Tensor | None:
    if problem.v_scale_factors is None or not problem.v_scale_factors_interleaved:
        return problem.v_scale_factors
    return deinterleave_v_scale_factors(problem.v_scale_factors.view(torch.uint8)).view(torch.float8_e4m3fn)


def _indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """`tensor[index]`, also where torch does not index float8: its bytes can always be moved."""
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    return tensor[index]


def _as_float64(scale: Scale, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(scale, dtype=torch.float64, device=device).reshape(())
