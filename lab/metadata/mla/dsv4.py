"""SGLang's TRT-LLM backend of DeepSeek-V4: calls whose query rows attend to recent tokens and selected compressed entries.

* compress ratio: the number of tokens that a compressed entry of a layer represents: 1, 2, 4 or 128. A layer with 0 has no
  compressed entries.
* group: the tokens of one compressed entry. The pass that computes the last token of the group writes the entry.
* place: the index of an entry, page * entries per page + offset in the page.

Each layer has two caches: tokens lie in the sliding-window pages of the pool, compressed entries in its full pages, which have
page_size // ratio entries.

The sources in SGLang 0.5.23 are `deepseek_v4_trtllm_backend.py` and `deepseek_v4_backend.py` in `sglang/srt/layers/attention/`;
line numbers below are the second file's. The pass of DSpark's draft, whose rows also see later rows of their block, is not
modelled.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.calls.selection import WINDOW_COLUMNS
from lab.kernels import prepare
from lab.metadata.engine.backend import RebuildingBackend, cast_to, in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, device_lengths, exclusive_cumsum, host_lengths, seen_by_rows
from lab.metadata.mla.backend import MLALayer, mla_query_dtype
from lab.metadata.mla.metadata import longest_request

# Compress ratios: of layers without compressed entries, and of layers in which a row sees all compressed entries before it.
TOKENS_ALONE, WITHOUT_INDEXER = 0, 128
RATIOS = (TOKENS_ALONE, 1, 2, 4, WITHOUT_INDEXER)
NO_ENTRY = -1
COLUMNS_STEP = 64  # `_pad_last_dim` rounds the number of columns of a table up to it
TILE_ROWS = 64  # the kernel reads tables and lengths up to the end of a tile of rows (line 559)


@dataclass(frozen=True)
class DSV4Layer(MLALayer):
    """One attention layer of DeepSeek-V4. Of the fields of `MLALayer` only `softmax_scale` is used: a whole entry is both key
    and value, and SGLang divides no entry by a scale.
    """

    compress_ratio: int = TOKENS_ALONE  #: one of `RATIOS`
    #: ``[num_qo_heads]`` float32, or None. SGLang always has them
    sinks: Tensor | None = field(default=None, compare=False, hash=False)


@dataclass(frozen=True, eq=False)
class DSV4Cache:
    """The cache of one layer: one entry per token in sliding-window pages, and compressed entries. A compressed entry
    represents `compress_ratio` tokens. With a ratio of 0 there are no compressed entries.
    """

    #: contiguous ``[num_entries, head_dim]``: the entries of tokens, page by page, then the compressed entries, page by page
    storage: Tensor
    pool: KVPool
    compress_ratio: int

    @classmethod
    def over(cls, pool: KVPool, head_dim: int, dtype: torch.dtype, compress_ratio: int) -> "DSV4Cache":
        check_dsv4(pool)
        assert pool.swa_num_pages is not None
        compressed = pool.num_pages * pool.page_size // compress_ratio if compress_ratio else 0
        entries = pool.swa_num_pages * pool.page_size + compressed
        return cls(torch.zeros(entries, head_dim, dtype=dtype, device=pool.device), pool, compress_ratio)

    @property
    def window(self) -> PagedLatentCache:
        return PagedLatentCache(self.storage[: self._num_tokens].unflatten(0, (-1, self.pool.page_size)))

    @property
    def compressed(self) -> PagedLatentCache:
        if self.compress_ratio == TOKENS_ALONE:
            return self.window  # SGLang passes it in place of compressed entries
        per_page = self.pool.page_size // self.compress_ratio
        return PagedLatentCache(self.storage[self._num_tokens :].unflatten(0, (-1, per_page)))

    @property
    def _num_tokens(self) -> int:
        assert self.pool.swa_num_pages is not None
        return self.pool.swa_num_pages * self.pool.page_size

    def write(self, slots: Tensor, entries: Tensor, compressed: Tensor) -> None:
        """Store one token's entry, ``[n, head_dim]``, at each slot of the full pool, ``[n]`` int64. If token i is the last one
        of its group of `compress_ratio` tokens, row i of `compressed` is stored as the group's compressed entry.
        """
        self.window.write(self.pool.swa_slots(slots), entries)
        if self.compress_ratio != TOKENS_ALONE:
            ends = (slots + 1) % self.compress_ratio == 0
            self.compressed.write(slots[ends] // self.compress_ratio, compressed[ends])


@dataclass(frozen=True, eq=False)
class DSV4Metadata:
    """The metadata of a DeepSeek-V4 call: for each query row the number of seen tokens, the last 128 of them, and the pages."""

    seq_lens: Tensor  #: ``[num_rows]`` int32, how many tokens of its request each row sees
    #: ``[num_rows, 128]`` int32, cache indices of the row's token and of the 127 tokens before it, newest first; then -1
    window: Tensor
    #: ``[num_rows, columns]`` int32, the pages of the row's request. Cells after the request's last page are undefined
    page_table: Tensor
    page_size: int
    #: ``[batch_size + 1]`` int32, the first row of each request in a prefill; None in other modes, in whose call each row is a
    #: request of its own
    cum_seq_lens_q: Tensor | None = None
    request_lens: Tensor | None = None  #: ``[batch_size]`` int32, tokens of each request in a prefill
    max_q_len: int | None = None  #: largest number of rows of a request in a prefill

    def sparse_indices(self, compress_ratio: int, topk_indices: Tensor | None = None) -> Tensor:
        """Return the call's ``sparse_indices``: for each query row the cache indices of its last 128 tokens (`window`), then
        the cache indices of compressed entries, padded with -1 to a multiple of 64 columns.

        `topk_indices`, ``[num_rows, top_k]`` int32, has the compressed entries that the model's indexer selected, as indices
        among the compressed entries of the row's request, then -1. It is None for compress ratios 0 and 128, which have no
        indexer.
        """
        if compress_ratio == TOKENS_ALONE:
            return self.window
        per_page, groups = self.page_size // compress_ratio, topk_indices
        if compress_ratio == WITHOUT_INDEXER:
            number = torch.arange(self.page_table.shape[1] * per_page, device=self.seq_lens.device)
            groups = torch.where(number < self.seq_lens[:, None] // compress_ratio, number, NO_ENTRY)
        if groups is None:
            raise ValueError(f"a layer with compress_ratio={compress_ratio} has an indexer: pass topk_indices")
        pages = self.page_table.gather(1, groups.clamp(min=0).long() // per_page)
        places = (pages * per_page + groups % per_page).masked_fill(groups < 0, NO_ENTRY).to(torch.int32)
        padding = (0, -places.shape[1] % COLUMNS_STEP)
        return torch.cat([self.window, torch.nn.functional.pad(places, padding, value=NO_ENTRY)], dim=1)

    def sparse_topk_lens(self, compress_ratio: int, index_topk: int) -> Tensor:
        """Return the call's ``sparse_topk_lens``: ``[num_rows]`` int32, 128 plus the number of compressed entries of the row.

        The number of compressed entries is at most `index_topk`, except at the ratio 128. It is at least 1 at the ratios 4 and
        128: a row without compressed entries has an index of -1 (`deepseek_v4_backend.py`, lines 887 and 510).
        """
        entries = self.seq_lens // compress_ratio if compress_ratio else torch.zeros_like(self.seq_lens)
        if compress_ratio >= 4:
            entries = entries.clamp(min=1)
        if compress_ratio != WITHOUT_INDEXER:
            entries = entries.clamp(max=index_topk)
        return entries + WINDOW_COLUMNS


def build_dsv4_metadata(batch: ForwardBatch, pool: KVPool) -> DSV4Metadata:
    """Build the metadata of one pass in new tensors (SGLang 0.5.23), without reading the device on the host.

    Each query row sees the tokens up to its own, except in a draft step: there it sees only the tokens before the draft. In
    DRAFT_EXTEND_V2 a row sees at least one token, also in a padding request (`deepseek_v4_backend.py`, line 2424). Padding
    rows of a ragged verification see the first token of the last request. Padding rows of other modes have no metadata.

    The page table has one column in DRAFT_EXTEND_V2, because a draft model has no compressed entries. In a prefill it has
    columns for the pages of the longest request, and in other modes for the pages of ``max_context_len`` tokens.

    Raises:
        ValueError: the mode is DRAFT_EXTEND or PREBUILT; the pool has no sliding-window pages, has virtual slots (`KVPool`), or
            its pages are no multiple of 128 tokens; or the batch lacks a number that the mode needs.
    """
    check_dsv4(pool)
    check_attends(batch, pool)
    mode = batch.forward_mode
    if mode.extends_draft and not mode.query_rows.are_uniform:
        raise ValueError(f"{mode!r} is no mode of DSV4 (SGLang 0.5.23): use DRAFT_EXTEND_V2, of equally many rows")
    request, seen, is_padding = seen_by_rows(batch)
    columns, of_prefill = pool.block_table_width, dict[str, Any]()
    if mode.is_prefill or mode.extends_draft:
        rows = host_lengths(batch, "extend_seq_lens_cpu")
        request, seen, is_padding = (each[: sum(rows)] for each in (request, seen, is_padding))
    if mode.extends_draft:
        seen, columns = seen.clamp(min=1), 1
    if mode.is_prefill:
        columns = -(-longest_request(batch, pool) // pool.page_size)
        of_prefill = {
            "cum_seq_lens_q": exclusive_cumsum(device_lengths(batch, "extend_seq_lens")),
            "request_lens": batch.seq_lens.to(torch.int32, copy=True),
            "max_q_len": max(rows, default=0),
        }
    seen = seen.masked_fill(is_padding, 1)
    row = batch.req_pool_indices[request]
    position = seen[:, None] - 1 - torch.arange(WINDOW_COLUMNS, device=pool.device)
    slots = pool.req_to_token[row[:, None], position.clamp(min=0)].masked_fill(position < 0, NO_ENTRY)
    return DSV4Metadata(
        seq_lens=_whole_tiles(seen, 1),
        window=_whole_tiles(pool.swa_slots(slots), NO_ENTRY),
        page_table=pool.pages(pool.req_to_token[row, : columns * pool.page_size : pool.page_size]),
        page_size=pool.page_size,
        **of_prefill,
    )


def check_dsv4(pool: KVPool) -> None:
    if pool.v2p is not None:
        raise ValueError("a pool of DSV4 has no virtual slots: leave num_virtual_pages out")
    if pool.full_to_swa is None or pool.page_size % WITHOUT_INDEXER:
        raise ValueError(
            f"a pool of DSV4 has sliding-window pages and whole groups of {WITHOUT_INDEXER} tokens in a page: "
            f"page_size={pool.page_size}, swa_num_pages={pool.swa_num_pages}"
        )


def _whole_tiles(rows: Tensor, value: int) -> Tensor:
    # An int32 copy, followed in memory by rows of `value` up to a multiple of 64 rows: the kernel reads whole tiles.
    num_rows = -(-len(rows) // TILE_ROWS) * TILE_ROWS
    tiles = torch.full((num_rows, *rows.shape[1:]), value, dtype=torch.int32, device=rows.device)
    tiles[: len(rows)] = rows
    return tiles[: len(rows)]


@dataclass(frozen=True, eq=False)
class DSV4Backend(RebuildingBackend[DSV4Metadata]):
    """Builds metadata and makes DeepSeek-V4's calls as SGLang's backend does (``--dsv4-attn-backend trtllm``)."""

    implementation: Any = None
    index_topk: int = 512  #: largest number of compressed entries that the indexer selects for a row
    query_dtype: torch.dtype | None = None

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> DSV4Metadata:
        return build_dsv4_metadata(batch, pool)

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: DSV4Metadata,
        layer: DSV4Layer,
        query: Tensor,
        cache: DSV4Cache,
        *,
        max_context_len: int | None = None,
        out: Tensor,
        topk_indices: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Return a function that computes one layer's attention and writes `out`. Rows of `out` beyond the rows in `metadata`
        become 0. Each call reads `topk_indices` again, the indexer's compressed entries (`DSV4Metadata.sparse_indices`).
        """
        rows, ratio = len(metadata.seq_lens), layer.compress_ratio
        if rows > len(query):
            raise ValueError(f"the query has {len(query)} rows: pass one for each of the metadata's {rows}")
        if rows == 0:
            return out.zero_
        given, steps = cast_to(self.query_dtype or mla_query_dtype(query.dtype, cache.storage.dtype), query[:rows])
        indices = _whole_tiles(metadata.sparse_indices(ratio, topk_indices), NO_ENTRY)
        lens = _whole_tiles(metadata.sparse_topk_lens(ratio, self.index_topk), WINDOW_COLUMNS)
        is_prefill = metadata.cum_seq_lens_q is not None
        arguments: dict[str, Any] = {
            "query": given if is_prefill else given.unsqueeze(1),
            "swa_kv_cache": cache.window.with_head_axis(),
            "workspace_buffer": None,
            "sparse_indices": indices,
            "compressed_kv_cache": cache.compressed.with_head_axis(),
            "sparse_topk_lens": lens,
            "seq_lens": metadata.request_lens if is_prefill else metadata.seq_lens,
            "out": out[:rows] if is_prefill else out[:rows].unsqueeze(1),
            "bmm1_scale": layer.softmax_scale,
            "bmm2_scale": 1.0,
            "sinks": layer.sinks,
        }
        if is_prefill:
            arguments |= {"cum_seq_lens_q": metadata.cum_seq_lens_q, "max_q_len": metadata.max_q_len}
        call = prepare(self.implementation, AttentionCall.DSV4_DECODE.value, **arguments)
        steps.append(lambda: indices.copy_(metadata.sparse_indices(ratio, topk_indices)))
        steps.append(lambda: lens.copy_(metadata.sparse_topk_lens(ratio, self.index_topk)))
        return in_turn([*steps, call, out[rows:].zero_], out)
