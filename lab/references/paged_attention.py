"""FlashInfer's TRT-LLM attention functions over a paged K/V cache in float64, with the same names and parameters.

Requests are padded and computed together in pieces, so that a GPU has enough work. If a call selects entries for each row, each
row is computed as a request whose keys are its entries.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from lab.calls import ContextCall, DecodeCall, DSV4DecodeCall, MLADecodeCall, takes
from lab.calls.entries import entries_first, live_cells
from lab.calls.entry import with_own_settings
from lab.calls.problem import E4M3, PagedAttention, shown_draft_tokens
from lab.references.quantization import deinterleave_v_scale_factors, dequantize_nvfp4
from lab.references.softmax_attention import (
    PIECE_ELEMENTS,
    Tile,
    TiledKV,
    attention_by_tiles,
    rounded,
    tiles,
    visible_keys,
    widened,
)


@takes(DecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """Compute attention of the newest tokens of each request over its paged K/V in float64: decode, verify, draft extend.

    Pass the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.DecodeCall` documents. In addition,
    `out_dtype` may be float32 or float64, so that the result is not rounded. Wrong arguments raise an error before any
    arithmetic. The host reads lengths and tables.

    Returns:
        out [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse float32 [num_rows, num_qo_heads], base 2.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(ContextCall)
@with_own_settings
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """Compute attention of the newest tokens of each request, in any number, over its paged K/V in float64: extend, prefill.

    Pass the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.ContextCall` documents. In
    addition, `out_dtype` may be float32 or float64. Wrong arguments raise an error before any arithmetic. Returns out
    [num_rows, num_qo_heads, head_dim]; with `return_lse`, (out, lse), lse in base 2.
    """
    problem = call.problem()
    return problem.returned(*paged_attention(problem))


@takes(MLADecodeCall)
@with_own_settings
def trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> Any:
    """Compute latent attention (MLA) of the newest tokens of each request over its paged cache in float64, after absorption.

    Pass the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.MLADecodeCall` documents. In
    addition, `out` may be float64, so that the result is not rounded, and latent vector, rotary part and page may have any
    size. Wrong arguments raise an error before any arithmetic. The host reads lengths and tables.

    Returns:
        out, the query's shape with a last dimension of `kv_lora_rank`, bfloat16 unless `out` is given; with `return_lse`
        (out, lse), lse in the base that `return_lse_base` selects.
    """
    out, lse = paged_attention(call.problem())
    if lse is not None and call.lse_is_base_e:
        lse *= math.log(2.0)
    return call.returned(out, lse)


@takes(DSV4DecodeCall)
@with_own_settings
def trtllm_batch_decode_sparse_mla_dsv4(call: DSV4DecodeCall) -> Any:
    """Compute DeepSeek-V4's sparse attention in float64. Each query row attends, in one softmax, to the cache entries that its
    row of `sparse_indices` lists: recent tokens in `swa_kv_cache`, and compressed tokens in `compressed_kv_cache`.

    Pass the keyword arguments of FlashInfer 0.7.2's function, which `lab.calls.DSV4DecodeCall` documents. In
    addition, query and caches may be float16, float32 or float64, head_dim may have any size, and `out` may be float64. Wrong
    arguments raise an error before any arithmetic. Both caches are copied.

    Returns:
        out, the query's shape, bfloat16 unless `out` is given.
    """
    out, _ = paged_attention(call.problem())
    return call.returned(out)


def paged_attention(problem: PagedAttention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, LSE in base 2 or None) of a checked problem, computed in float64 and rounded once. The output is
    [num_rows, num_qo_heads, v_head_dim] in `problem.out_dtype`, the LSE float32 [num_rows, num_qo_heads]. Padding rows have the
    output zero and the LSE -inf, also with sinks. Raises ValueError for a wrong length, offset or page id.
    """
    if len(problem.query) == 0:
        return problem.results()
    if problem.is_block_sparse:
        out, lse_log2 = problem.results()
        for of_head in replace(problem, out=out, lse=lse_log2).of_kv_heads():
            paged_attention(of_head)
        return out, lse_log2
    if problem.query.device.type != "cpu":  # on a CPU the call has been checked already
        problem = _planned_on_host(problem)
        problem.check_values()
    problem = problem.of_one_pool()
    if problem.selected is not None:
        problem = _of_selected_entries(problem, problem.selected)
    if problem.num_visible is not None:
        problem = problem.of_rows()
    out, lse_log2 = problem.results()
    if problem.cu_seqlens_q is not None:
        end = int(problem.cu_seqlens_q[-1])
        out[end:] = 0
        if lse_log2 is not None:
            lse_log2[end:] = -math.inf
    v_head_dim = out.shape[2]
    for piece in _pieces(problem, problem.row_offsets(), v_head_dim):
        piece_out, piece_lse_log2 = _solve(problem, piece, v_head_dim)
        out[piece.rows] = rounded(piece_out.flatten(0, 1)[piece.places], out.dtype)
        if lse_log2 is not None:
            lse_log2[piece.rows] = piece_lse_log2.flatten(0, 1)[piece.places].to(lse_log2.dtype)
    return out, lse_log2


def _planned_on_host(problem: PagedAttention) -> PagedAttention:
    """Return the problem with lengths, offsets and page tables on the host, where computing indices launches no kernels."""
    names = ("seq_lens", "cu_seqlens_q", "selected", "selected_lens", "num_visible", "k_block_tables")
    on_host = {name: each.cpu() for name in names if (each := getattr(problem, name)) is not None}
    shared = problem.v_block_tables is problem.k_block_tables
    v_tables = on_host["k_block_tables"] if shared else problem.v_block_tables.cpu()
    return replace(problem, v_block_tables=v_tables, **on_host)


def _of_selected_entries(problem: PagedAttention, selected: torch.Tensor) -> PagedAttention:
    """Return a problem with the same result: each row is a request, and each entry that it selects is a page of one token."""
    places = entries_first(torch.where(live_cells(problem), selected, -1))
    end = problem.row_offsets()[-1]  # later rows are padding
    k_cache, v_cache = (
        cache.transpose(1, 2).flatten(0, 1).unsqueeze(2) for cache in (problem.k_cache, problem.v_cache)
    )
    return replace(
        problem,
        selected=None,
        selected_lens=None,
        k_cache=k_cache,
        v_cache=v_cache,
        k_block_tables=places[:end],
        v_block_tables=places[:end],
        seq_lens=(places >= 0).sum(dim=1, dtype=torch.int32)[:end],
        cu_seqlens_q=torch.arange(end + 1, dtype=torch.int32),
        max_q_len=1,
    )


class _Block(NamedTuple):
    """Consecutive query rows of one request, and the range of keys that at least one of these rows may see."""

    request: int
    first_row: int  # index of the first row in the query
    num_rows: int
    first_position: int  # position of the first row in its request; negative before the first key
    kv_len: int  # number of keys of the request
    key_start: int  # the range of keys
    key_end: int
    first_page: int  # the page table's column of the first key
    num_pages: int


class _Piece:
    """A batch of blocks (consecutive query rows of one request) that are computed together, padded to the largest block. Key 0
    of a block is the first key of the block's first page.

    Attributes:
        request, kv_len, first_key: each block's request, the request's number of keys, and the position of the block's key 0,
            int64 [len(blocks)].
        positions, query_rows: each row's position in its request, and its index in the query, int64 [len(blocks), num_rows].
            Values after a block's last row are undefined.
        places, rows: for each row that is not padding its index in the piece (block * num_rows + row) and in the query, int64.
        k_pages, v_pages: for each tile (range of keys) its page ids, int64 [blocks * pages]; 0 after a block's last page.
    """

    def __init__(self, problem: PagedAttention, blocks: list[_Block]) -> None:
        (num_rows, _, head_dim), device = problem.query.shape, problem.query.device  # V's head_dim is no larger
        num_kv_heads, page_size = problem.k_cache.shape[1:3]
        # Each field of all blocks, int64 [len(blocks)].
        of = dict(zip(_Block._fields, torch.tensor(list(zip(*blocks, strict=True))), strict=True))
        kv_lens = [block.num_pages * page_size for block in blocks]
        self.tiles = tiles(kv_lens, num_kv_heads * head_dim, device, page_size)
        first_key = of["first_page"] * page_size
        self._seen_from, self._seen_to = of["key_start"] - first_key, of["key_end"] - first_key
        offsets = torch.arange(max(block.num_rows for block in blocks))
        exists = offsets < of["num_rows"].unsqueeze(1)
        rows = of["first_row"].unsqueeze(1) + offsets
        k_pages = v_pages = self._pages(problem.k_block_tables, of, page_size)
        if problem.v_block_tables is not problem.k_block_tables:
            v_pages = self._pages(problem.v_block_tables, of, page_size)
        self.request, self.kv_len, self.first_key, self.positions, self.query_rows, self.places, self.rows, *pages = (
            _moved(
                device,
                of["request"],
                of["kv_len"],
                first_key,
                of["first_position"].unsqueeze(1) + offsets,
                rows.clamp(max=num_rows - 1),
                exists.flatten().nonzero().squeeze(1),
                rows[exists],
                *k_pages,
                *v_pages,
            )
        )
        self.k_pages = dict(zip(self.tiles, pages, strict=False))
        self.v_pages = dict(zip(self.tiles, pages[len(self.tiles) :], strict=True))

    def _pages(self, table: torch.Tensor, of: dict[str, torch.Tensor], page_size: int) -> list[torch.Tensor]:
        page = torch.arange(int(of["num_pages"].max()))
        exists = page < of["num_pages"].unsqueeze(1)
        columns = torch.where(exists, of["first_page"].unsqueeze(1) + page, 0)
        pages = torch.where(exists, table[of["request"]].gather(1, columns).long(), 0)
        return [
            pages[tile.first_request :, tile.start // page_size : tile.end // page_size].flatten()
            for tile in self.tiles
        ]

    def unseen(self, tile: Tile) -> Sequence[torch.Tensor]:
        """Return (block index, key index) of each key in `tile` that no row of its block sees, int64; () if all are seen."""
        start, end = self._seen_from[tile.first_request :], self._seen_to[tile.first_request :]
        if int(start.max()) <= tile.start and tile.end <= int(end.min()):
            return ()
        keys = torch.arange(tile.start, tile.end)
        unseen = (keys < start.unsqueeze(1)) | (keys >= end.unsqueeze(1))
        return unseen.nonzero().to(self.request.device, non_blocking=True).unbind(1)


def _moved(device: torch.device, *indices: torch.Tensor) -> Sequence[torch.Tensor]:
    if device.type == "cpu":
        return indices
    flat = torch.cat([each.flatten() for each in indices]).to(device, non_blocking=True)
    parts = flat.split([each.numel() for each in indices])
    return [part.view(each.shape) for part, each in zip(parts, indices, strict=True)]


def _pieces(problem: PagedAttention, offsets: list[int], v_head_dim: int) -> Iterator[_Piece]:
    _, num_qo_heads, head_dim = problem.query.shape
    num_kv_heads, page_size = problem.k_cache.shape[1:3]
    kv_elements = num_kv_heads * (head_dim + v_head_dim)  # of one key
    chosen: list[_Block] = []
    most = PIECE_ELEMENTS[problem.query.device.type]
    rows = pages = 0
    for block in sorted(_blocks(problem, offsets, most), key=lambda block: (block.num_pages, block.num_rows)):
        rows, pages = max(rows, block.num_rows), max(pages, block.num_pages)
        # A block's K and V, or its scores, whichever are more.
        elements = pages * page_size * max(kv_elements, rows * num_qo_heads)
        if chosen and (len(chosen) + 1) * elements > most:
            yield _Piece(problem, chosen)
            chosen, rows, pages = [], block.num_rows, block.num_pages
        chosen.append(block)
    if chosen:
        yield _Piece(problem, chosen)


def _blocks(problem: PagedAttention, offsets: list[int], most: int) -> Iterator[_Block]:
    """Yield blocks of query rows. A block has at most `most` scores, or one row. Request i begins at row offsets[i]."""
    num_qo_heads, page_size, window_left = problem.query.shape[1], problem.k_cache.shape[2], problem.window_left
    ends_at_row = problem.causal and problem.mask is None  # a mask may show a row the draft tokens after it
    for request, kv_len in enumerate(problem.seq_lens.tolist()):
        q_start, q_end = offsets[request : request + 2]
        rows_at_once = max(1, most // (num_qo_heads * max(kv_len, 1)))
        for first_row in range(q_start, q_end, rows_at_once):
            num_rows = min(rows_at_once, q_end - first_row)
            first_position = kv_len - (q_end - q_start) + first_row - q_start
            key_end = max(first_position + num_rows if ends_at_row else kv_len, 0)
            key_start = max(0, first_position - window_left) if window_left >= 0 else 0
            first_page = min(key_start, key_end) // page_size
            num_pages = -(-key_end // page_size) - first_page
            yield _Block(
                request, first_row, num_rows, first_position, kv_len, key_start, key_end, first_page, num_pages
            )


def _solve(problem: PagedAttention, piece: _Piece, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    v_scale_factors, num_kv_heads = plain_v_scales(problem), problem.k_cache.shape[1]

    def values(tile: Tile) -> torch.Tensor:
        unseen = piece.unseen(tile)
        entries = _entries(problem.v_cache, v_scale_factors, piece.v_pages[tile], tile)
        if unseen:
            requests, keys = unseen  # 0 * NaN is NaN, so a weight of zero does not exclude a value
            entries.unflatten(0, (-1, num_kv_heads))[requests, :, keys] = 0.0
        return entries

    kv_len = piece.tiles[-1].end if piece.tiles else 0
    kv = TiledKV(
        keys=lambda tile: _entries(problem.k_cache, problem.k_scale_factors, piece.k_pages[tile], tile),
        values=values,
        tiles=piece.tiles,
        kv_len=kv_len,
        num_kv_heads=num_kv_heads,
        v_head_dim=v_head_dim,
    )
    visible = partial(_visible, problem, piece, kv_len)
    return attention_by_tiles(problem.query[piece.query_rows], kv, visible, problem)


def _visible(problem: PagedAttention, piece: _Piece, kv_len: int) -> torch.Tensor:
    key_positions = piece.first_key.unsqueeze(1) + torch.arange(kv_len, device=piece.first_key.device)
    visible = visible_keys(
        piece.positions,
        key_positions,
        piece.kv_len,
        causal=problem.causal and problem.mask is None,
        window_left=problem.window_left,
    )
    if problem.mask is None:
        return visible
    q_starts, last = (piece.kv_len - problem.max_q_len).unsqueeze(1), problem.max_q_len - 1
    rows, drafts = piece.positions - q_starts, key_positions - q_starts  # indices in the draft, negative before it
    shown = shown_draft_tokens(problem.mask.to(torch.int32)[piece.request])
    request = torch.arange(len(shown), device=shown.device)[:, None, None]
    in_draft = shown[request, rows.clamp(0, last).unsqueeze(2), drafts.clamp(0, last).unsqueeze(1)]
    return visible & (in_draft | (drafts < 0).unsqueeze(1))


def _entries(cache: torch.Tensor, scale_factors: torch.Tensor | None, pages: torch.Tensor, tile: Tile) -> torch.Tensor:
    """Return K or V of a tile (a range of keys) from its `cache`, float64 [requests * num_kv_heads, keys, head_dim]."""
    num_keys = tile.end - tile.start

    def by_head(stored: torch.Tensor) -> torch.Tensor:  # [requests, num_kv_heads, pages, page_size, last dimension]
        return stored.view(-1, num_keys // stored.shape[2], *stored.shape[1:]).transpose(1, 2)

    entries = by_head(cache[pages])
    if scale_factors is None:
        entries = widened(entries, torch.float64)
    else:
        entries = dequantize_nvfp4(entries, by_head(scale_factors[pages]))
    return entries.reshape(-1, num_keys, entries.shape[-1])


def plain_v_scales(problem: PagedAttention) -> torch.Tensor | None:
    """Return V's NVFP4 scale factors in token order (not interleaved), or None if the cache is not NVFP4."""
    if problem.v_scale_factors is None or not problem.v_scale_factors_interleaved:
        return problem.v_scale_factors
    return deinterleave_v_scale_factors(problem.v_scale_factors.view(torch.uint8)).view(E4M3)
