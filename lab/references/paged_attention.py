"""The one algorithm of the references: softmax attention in float64, first over plain K/V, then over a paged cache.

`attention` is the definition; an end-to-end check hands it a request's K/V history as it was written.
`paged_attention` looks the same keys up through a page table, then calls it. Requests are padded together only so that
a GPU has enough to do at once; a padded or dead key is replaced by zero before any arithmetic sees it.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from lab.calls.entry import takes_fields_of
from lab.calls.problem import E4M3, PagedAttention, Scale, Softmax, check_values, shown_draft_tokens
from lab.references.plain_arguments import check_plain
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4, rounded

# Most float64 elements that one gathered piece may hold (K and V, or scores): 0.5 GiB, small beside any device.
PIECE_ELEMENTS = 2**26
GPU_PIECE_ELEMENTS = 2**28  # launches, not memory, are what a GPU is short of


@takes_fields_of(Softmax)
def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    **softmax: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute grouped-query softmax attention in float64.

    Query head h reads K/V head h // (num_qo_heads / num_kv_heads). A sink is one more logit per head: it enlarges the
    softmax's denominator and brings no value. A row that sees no key is zero.

    Args:
        query: [batch, q_len, num_qo_heads, head_dim], any float dtype.
        keys: [batch, kv_len, num_kv_heads, head_dim], dequantised; finite, even where not visible.
        values: [batch, kv_len, num_kv_heads, v_head_dim], likewise.
        visible: bool [batch, q_len, kv_len].
        softmax: fields of `lab.calls.problem.Softmax`: bmm1_scale and bmm2_scale, 1 if left out, and sinks.

    Returns:
        out, float64 [batch, q_len, num_qo_heads, v_head_dim]; lse_log2, float64 [batch, q_len, num_qo_heads], log2 of the
        denominator (sink included), -inf where it is empty.

    Raises:
        TypeError, ValueError: before any arithmetic; see `lab.references.plain_arguments.check_plain`.
    """
    terms = Softmax(**softmax)
    check_plain(query, keys, values, visible, terms)
    return unchecked_attention(query, keys, values, visible, terms)


def unchecked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, softmax: Softmax
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` of arguments that a call has checked; a NaN in a query shows in its output."""
    key_block, value_block = (side.transpose(1, 2).unsqueeze(1) for side in (keys, values))
    return _attention_over_blocks(query, key_block, value_block, visible.unsqueeze(2), softmax)


def _attention_over_blocks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    softmax: Softmax,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` over keys that lie in blocks, so that a paged cache need not be rearranged.

    Args:
        keys: [batch, num_blocks, num_kv_heads, block, head_dim]; anything where they are not visible.
        values: [batch, num_blocks, num_kv_heads, block, v_head_dim].
        visible: bool [batch, q_len, num_blocks, block].
    """
    batch, q_len, num_qo_heads, _ = query.shape
    num_kv_heads = keys.shape[2]
    group = num_qo_heads // num_kv_heads

    # [batch, 1, num_kv_heads, q_len * group, head_dim]: the rows that share a K/V head form one matrix.
    rows = query.to(torch.float64).unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3).unsqueeze(1)
    # [batch, num_blocks, num_kv_heads, q_len, group, block]
    scores = logits(rows @ keys.to(torch.float64).transpose(3, 4), softmax).unflatten(3, (q_len, group))
    scores = scores.masked_fill(~visible.transpose(1, 2)[:, :, None, :, None, :], -math.inf)

    # [batch, 1, num_kv_heads, q_len, group, 1]
    if scores.shape[1] * scores.shape[5]:
        largest = scores.amax(dim=(1, 5), keepdim=True)
    else:
        largest = scores.new_full((batch, 1, *scores.shape[2:5], 1), -math.inf)
    sink_logits = None
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float64).view(num_kv_heads, 1, group, 1)
        largest = torch.maximum(largest, sink_logits)
    origin = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    weights = torch.exp(scores - origin)
    denominator = weights.sum(dim=(1, 5), keepdim=True)
    if sink_logits is not None:
        denominator = denominator + torch.exp(sink_logits - origin)
    lse_log2 = (origin + torch.log(denominator)) / math.log(2.0)

    # [batch, num_kv_heads, q_len, group, v_head_dim]
    sums = (weights.flatten(3, 4) @ values.to(torch.float64)).sum(dim=1).unflatten(2, (q_len, group))
    out = sums / torch.where(denominator == 0, 1.0, denominator).squeeze(1) * number(softmax.bmm2_scale, sums)
    out = out.permute(0, 2, 1, 3, 4).reshape(batch, q_len, num_qo_heads, values.shape[-1])
    return out, lse_log2[:, 0, :, :, :, 0].permute(0, 2, 1, 3).reshape(batch, q_len, num_qo_heads)


def logits(products: torch.Tensor, softmax: Softmax) -> torch.Tensor:
    """Return the logits of a softmax from the products of queries and keys, in their dtype."""
    return products * number(softmax.bmm1_scale, products)


def visible_keys(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    causal: bool,
    window_left: int,
) -> torch.Tensor:
    """Return the keys that each row sees: bool [batch, q_len, kv_len].

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

    Rows after the last request's are padding: zero, with an LSE of -inf, as a row that sees no key.

    Returns:
        out [num_rows, num_qo_heads, v_head_dim] and lse_log2 float32 [num_rows, num_qo_heads], or None.

    Raises:
        ValueError: a length, offset or page id that `lab.calls.check_values` refuses.
    """
    out, lse_log2 = problem.results()
    if problem.num_rows == 0:
        return out, lse_log2
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        check_values(problem)
    if problem.cu_seqlens_q is not None:
        end = int(problem.cu_seqlens_q[-1])
        out[end:] = 0
        if lse_log2 is not None:
            lse_log2[end:] = -math.inf
    for piece in _pieces(problem):
        piece_out, piece_lse_log2 = _solve(problem, piece)
        places, rows = piece.rows()
        out[rows] = rounded(piece_out.flatten(0, 1)[places], out.dtype)
        if lse_log2 is not None:
            lse_log2[rows] = piece_lse_log2.flatten(0, 1)[places].to(lse_log2.dtype)
    return out, lse_log2


class _Block(NamedTuple):
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
    """Blocks that are solved together, padded to the longest. Indices are made on the host: on a GPU each read would wait."""

    def __init__(self, blocks: list[_Block], device: torch.device) -> None:
        self.blocks = blocks
        self.device = device
        self.num_rows = max(block.num_rows for block in blocks)
        self.num_pages = max(block.num_pages for block in blocks)
        table = torch.tensor(blocks)
        self._host = dict(zip(_Block._fields, table.unbind(1), strict=True))
        # Each attribute of all blocks, int64 [len(blocks)], on the device.
        self.fields = dict(zip(_Block._fields, table.to(device).unbind(1), strict=True))

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places of the rows that exist, int64 each: in the piece, block * num_rows + row, and in the query."""
        offsets = torch.arange(self.num_rows)
        exists = offsets < self._host["num_rows"].unsqueeze(1)
        in_query = (self._host["first_row"].unsqueeze(1) + offsets)[exists]
        return exists.flatten().nonzero().squeeze(1).to(self.device), in_query.to(self.device)

    def incomplete_pages(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (block, page), int64 each, of every page of the piece in which no row sees some key."""
        pairs = []
        for index, block in enumerate(self.blocks):
            pages = set(range(block.num_pages, self.num_pages))
            if block.num_pages and block.key_start % page_size:
                pages.add(0)
            if block.num_pages and block.key_end % page_size:
                pages.add(block.num_pages - 1)
            pairs += [(index, page) for page in sorted(pages)]
        indices = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(self.device)
        return indices[:, 0], indices[:, 1]


def _pieces(problem: PagedAttention) -> Iterator[_Piece]:
    """Yield the problem in pieces of at most `piece_elements`; requests of like length go together."""
    chosen: list[_Block] = []
    rows = pages = 0
    for block in sorted(_blocks(problem), key=lambda block: (block.num_pages, block.num_rows)):
        rows, pages = max(rows, block.num_rows), max(pages, block.num_pages)
        if chosen and (len(chosen) + 1) * _elements(problem, rows, pages * problem.page_size) > piece_elements(
            problem.query.device
        ):
            yield _Piece(chosen, problem.query.device)
            chosen, rows, pages = [], block.num_rows, block.num_pages
        chosen.append(block)
    if chosen:
        yield _Piece(chosen, problem.query.device)


def piece_elements(device: torch.device) -> int:
    """Return the most float64 elements of one piece on a device."""
    return GPU_PIECE_ELEMENTS if device.type == "cuda" else PIECE_ELEMENTS


def _elements(problem: PagedAttention, rows: int, keys: int) -> int:
    """Return the elements of the larger of one block's K and V and its scores."""
    return keys * max(problem.num_kv_heads * (problem.head_dim + problem.v_head_dim), rows * problem.num_qo_heads)


def _blocks(problem: PagedAttention) -> Iterator[_Block]:
    offsets = problem.row_offsets()
    for request, kv_len in enumerate(problem.seq_lens.tolist()):
        q_start, q_end = offsets[request : request + 2]
        rows_at_once = max(1, piece_elements(problem.query.device) // (problem.num_qo_heads * max(kv_len, 1)))
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
    requests, kv_lens = piece.fields["request"], piece.fields["kv_len"]
    row_offsets = torch.arange(piece.num_rows, device=device)
    rows = (piece.fields["first_row"].unsqueeze(1) + row_offsets).clamp(max=problem.num_rows - 1)
    query_positions = piece.fields["first_position"].unsqueeze(1) + row_offsets
    # Whole pages are looked up, [len(blocks), num_pages]; a page that no row of a block may see is not.
    page_columns = piece.fields["first_page"].unsqueeze(1) + torch.arange(piece.num_pages, device=device)
    in_page = torch.arange(problem.page_size, device=device)
    key_positions = (page_columns.unsqueeze(2) * problem.page_size + in_page).flatten(1)
    exists = (key_positions >= piece.fields["key_start"].unsqueeze(1)) & (
        key_positions < piece.fields["key_end"].unsqueeze(1)
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
    exists, visible = (flags.unflatten(-1, (-1, problem.page_size)) for flags in (exists, visible))

    page_exists = exists.any(dim=2)
    columns = torch.where(page_exists, page_columns, 0)
    k_pages = v_pages = torch.where(page_exists, problem.k_block_tables[requests].gather(1, columns), 0)
    if problem.v_block_tables is not problem.k_block_tables:
        v_pages = torch.where(page_exists, problem.v_block_tables[requests].gather(1, columns), 0)
    keys = _entries(problem.k_cache, problem.k_scale_factors, k_pages)
    values = _entries(problem.v_cache, plain_v_scales(problem), v_pages)
    # A weight of zero does not silence a NaN; a dead score does.
    incomplete = piece.incomplete_pages(problem.page_size)
    values[incomplete] = values[incomplete].masked_fill(~exists[incomplete][:, None, :, None], 0.0)
    if piece.num_rows * problem.num_qo_heads > problem.num_kv_heads * problem.page_size:
        # Many rows: one large product each is worth the rearrangement.
        keys, values = (side.transpose(1, 2).flatten(2, 3).unsqueeze(1) for side in (keys, values))
        visible = visible.flatten(2).unsqueeze(2)
    return _attention_over_blocks(
        indexed(problem.query, rows),
        keys,
        values,
        visible,
        problem,
    )


def _entries(cache: torch.Tensor, scale_factors: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """Return whole pages [batch, num_pages], dequantised: float64 [batch, num_pages, num_kv_heads, page_size, head_dim]."""
    entries = indexed(cache, pages)
    if scale_factors is None:
        # Contiguous whatever the pool's layout: the products would else copy once more.
        return entries.to(torch.float64, memory_format=torch.contiguous_format)
    return dequantize_nvfp4(entries, indexed(scale_factors, pages))


def _unmasked(mask: torch.Tensor, rows: torch.Tensor, draft_tokens: torch.Tensor) -> torch.Tensor:
    """Return the keys that XQA's packed draft mask leaves visible: bool [batch, q_len, kv_len].

    Args:
        mask: its words as int32 [batch, q_len, words].
        rows: [batch, q_len], the row's index among its request's rows.
        draft_tokens: [batch, kv_len], the key's index among the draft tokens; negative for the keys before them.
    """
    q_len = mask.shape[1]
    shown = shown_draft_tokens(mask)
    batch = torch.arange(mask.shape[0], device=mask.device)
    columns = draft_tokens.clamp(0, q_len - 1)
    picked = shown[batch[:, None, None], rows.clamp(0, q_len - 1).unsqueeze(2), columns.unsqueeze(1)]
    return picked | (draft_tokens < 0).unsqueeze(1)


def plain_v_scales(problem: PagedAttention) -> torch.Tensor | None:
    """Return V's scale factors in plain order, whatever order the problem has them in."""
    if problem.v_scale_factors is None or not problem.v_scale_factors_interleaved:
        return problem.v_scale_factors
    return deinterleave_v_scale_factors(problem.v_scale_factors.view(torch.uint8)).view(E4M3)


def indexed(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """Return `tensor[index]`, also where torch does not index float8: its bytes can always be moved."""
    if tensor.dtype == E4M3:
        return tensor.view(torch.uint8)[index].view(E4M3)
    return tensor[index]


def number(scale: Scale, like: torch.Tensor) -> torch.Tensor:
    """Return a scale as a tensor without dimensions, of the dtype and on the device of another."""
    return torch.as_tensor(scale, dtype=like.dtype, device=like.device).reshape(())
