"""Mutants that look up the wrong page, token, head or length in the cache."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.split_kv import Forgiving, SplitKV
from corpus.wrong import DECODE, wrong
from lab.calls.problem import PagedAttention


def with_strides(strides: tuple[int, ...], cache: Tensor) -> Tensor:
    """Copy [num_pages, num_kv_heads, page_size, last] read with wrong strides, within the cache's own storage."""
    storage = cache.as_strided((cache.untyped_storage().nbytes() // cache.element_size(),), (1,), 0)
    index = torch.full((1,), int(cache.storage_offset()), dtype=torch.int64, device=cache.device)
    for size, stride in zip(cache.shape, (*strides, 1), strict=True):
        index = index.unsqueeze(-1) + torch.arange(size, device=cache.device) * stride
    index = index.squeeze(0) % len(storage)
    return storage.view(torch.uint8)[index].view(cache.dtype) if cache.element_size() == 1 else storage[index]


class ReadsDeadPages(Forgiving):
    """A page id outside the pool is somebody else's memory, here NaN."""

    def values(self, problem, tile, positions):
        ids = problem.v_block_tables[tile.request][positions // problem.page_size]
        foreign = (ids < 0) | (ids >= problem.v_cache.shape[0])
        return super().values(problem, tile, positions).masked_fill(foreign.view(1, -1, 1), torch.nan)


class PageOfSeveralColumns(SplitKV):
    """A request's columns of the page table, as whoever looks a column up by its page sees them."""

    def column_of_key(self, problem, tile, keys, first):
        """Return the first or the last column that names the page of each key, int64."""
        pages = problem.k_block_tables[tile.request, : -(-tile.kv_len // problem.page_size)].tolist()
        columns = list(enumerate(pages))
        found = {page: column for column, page in (reversed(columns) if first else columns)}
        columns_of_pages = torch.tensor([found[page] for page in pages], dtype=torch.int64, device=keys.device)
        return columns_of_pages[keys // problem.page_size]


class Pages(SplitKV):
    @wrong(changes="offsets")
    def large_pages_halves_swapped(self, offsets, problem, positions):
        """In pages larger than 64 tokens the second half is read in place of the first, and the other way round."""
        return offsets if problem.page_size <= 64 else (offsets + problem.page_size // 2) % problem.page_size

    @wrong(stage="key_range", mla=True)
    def last_page_lost(self, problem, first_position, num_rows, kv_len):
        """The keys of a last page that is not full are not read, where there is a page before it."""
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        full = kv_len // problem.page_size * problem.page_size
        end = min(end, full) if full else end
        return min(start, end), end

    last_key_lost = wrong(mla=True, kv_lens=lambda lens, *_: [length - 1 if length > 1 else length for length in lens])(
        "A request of several keys has one fewer than seq_lens says."
    )

    @wrong(stage="query_rows", mla=True)
    def query_stride_ignored(self, problem, tile):
        """The query's rows are taken to lie next to each other."""
        shape = problem.query.shape
        packed = problem.query.as_strided(shape, (shape[1] * shape[2], shape[2], 1))
        return packed[tile.rows].to(torch.float32).transpose(0, 1)

    @wrong(stage="entries")
    def nhd_taken_as_hnd(self, cache, scale_factors, pages, offsets):
        """If a page has as many tokens as heads, an NHD cache is read as HND."""
        if cache.shape[1] == cache.shape[2] and cache.stride(1) < cache.stride(2):
            cache = cache.transpose(1, 2)
        return super().entries(cache, scale_factors, pages, offsets)

    @wrong(stage="changed", source="vLLM #53681")
    def v_strides_from_k(self, problem):
        """V is read with the strides of K."""
        strides, cache = problem.k_cache.stride(), problem.v_cache
        return problem if strides == cache.stride() else replace(problem, v_cache=with_strides(strides[:3], cache))

    @wrong(stage="entries", source="SGLang #31641")
    def sf_strides_from_k(self, cache, scale_factors, pages, offsets):
        """The scale factors of an NVFP4 cache are read with the strides of its data, a block for a byte."""
        if scale_factors is not None:
            ratio = cache.shape[3] // scale_factors.shape[3]
            strides = tuple(max(1, stride // ratio) for stride in cache.stride()[:3])
            scale_factors = with_strides(strides, scale_factors)
        return super().entries(cache, scale_factors, pages, offsets)

    page_id_int16 = wrong(mla=True, pages=lambda pages, *_: pages % 2**15)("Page ids are kept in 15 bits.")
    first_split_of_long_lost = wrong(
        visible=lambda visible, _, tile, keys: visible & (keys >= 64) if tile.kv_len > 1024 else visible
    )("The first 64 keys of a request with more than 1,024 are lost.")

    @wrong(stage="scores", source="FlashInfer #2137")
    def large_head_dim_cut(self, problem, query, keys):
        """Q·K^T leaves out elements from the 129th of head_dim."""
        return super().scores(problem, query[..., :128], keys[..., :128])

    @wrong(DECODE, changes="keys", mla=True)
    def stale_key_of_last_token(self, keys, problem, tile, positions):
        """The newest key of a decode is read before it was written: zeros."""
        return keys.masked_fill((positions == tile.kv_len - 1).view(1, -1, 1), 0.0)

    @wrong(changes="visible", mla=True)
    def whole_tiles_lose_the_last(self, visible, problem, tile, keys):
        """A request of a whole number of 512 keys loses its last 64."""
        return visible & (keys < tile.kv_len - 64) if tile.kv_len and tile.kv_len % 512 == 0 else visible

    @wrong(changes="kv_lens", mla=True)
    def unsigned_lengths_misread(self, lengths, problem):
        """uint32 seq_lens are read with another stride: a request has the next one's length."""
        return lengths[1:] + lengths[:1] if problem.seq_lens.dtype == torch.uint32 else lengths

    @wrong(changes="problem")
    def stacked_sides_swapped(self, problem, call):
        """K and V are exchanged where kv_cache is one tensor."""
        if not isinstance(call.kv_cache, Tensor):
            return problem
        return replace(problem, k_cache=problem.v_cache, v_cache=problem.k_cache)

    @wrong(stage="visible", mla=True)
    def shared_page_of_one_request(self, problem, tile, keys):
        """A page that an earlier request of another length names too is masked for the later one."""
        table, lengths = problem.k_block_tables, problem.seq_lens.tolist()
        taken = {
            page
            for request in range(tile.request)
            if lengths[request] != tile.kv_len
            for page in table[request, : -(-lengths[request] // problem.page_size)].tolist()
        }
        own = self.pages(problem, table, tile, keys).tolist()
        free = torch.tensor([page not in taken for page in own], dtype=torch.bool, device=keys.device)
        return super().visible(problem, tile, keys) & free

    interleaved_factors_read_plain = wrong(instead={"v_scale_factors_interleaved": False})(
        "V's scale factors of an NVFP4 cache are read in plain order where they are interleaved."
    )


class PagesAndLengths(Forgiving):
    @wrong(stage="pages", source="SGLang #11138")
    def fixed_page_size(self, problem, table, tile, positions):
        """A column of the page table stands for 64 tokens, whatever the page size."""
        return super().pages(problem, table, tile, positions // 64 * problem.page_size)

    @wrong(stage="pages", mla=True)
    def pages_taken_as_consecutive(self, problem, table, tile, positions):
        """A request's pages are taken to follow its first one."""
        first = super().pages(problem, table, tile, torch.zeros_like(positions))
        return (first + positions // problem.page_size) % problem.k_cache.shape[0]

    seq_len_off_by_one = wrong(mla=True, kv_lens=lambda lens, *_: [length + 1 for length in lens])(
        "A request has one key more than seq_lens says."
    )

    @wrong(stage="kv_lens", mla=True)
    def length_rounded_up_to_page(self, problem):
        """The last page of a request is taken as full."""
        return [-(-length // problem.page_size) * problem.page_size for length in super().kv_lens(problem)]

    @wrong(changes="kv_lens", mla=True)
    def max_length_for_one_request(self, lens, problem):
        """A batch of one has as many keys as the host bound says."""
        widest = problem.k_block_tables.shape[1] * problem.page_size
        return [min(problem.max_kv_len, widest)] if len(lens) == 1 else lens

    @wrong(stage="pages", mla=True)
    def table_stride_ignored(self, problem, table, tile, positions):
        """The page table's rows are taken to lie next to each other."""
        packed = table.as_strided(table.shape, (table.shape[1], 1))
        return super().pages(problem, packed, tile, positions)

    @wrong(stage="values")
    def v_pages_from_k(self, problem, tile, positions):
        """V's own page table is ignored: uses_shared_paged_kv_idx is taken as True."""
        pages = self.pages(problem, problem.k_block_tables, tile, positions)
        return self.entries(problem.v_cache, problem.v_scale_factors, pages, self.offsets(problem, positions))


class DeadPages(ReadsDeadPages):
    @wrong(stage="key_range", mla=True, source="vLLM #37442")
    def table_tail_read(self, problem, first_position, num_rows, kv_len):
        """Every column of the page table is read, and what lies after seq_lens multiplied by weights of zero."""
        start, _ = super().key_range(problem, first_position, num_rows, kv_len)
        return start, problem.k_block_tables.shape[1] * problem.page_size

    pages_before_window_read = wrong(source="FlashInfer #3089", key_range=lambda keys, *_: (0, keys[1]))(
        "Keys that lie before every row's window are read, and multiplied by weights of zero."
    )


def _pages_filled(problem: PagedAttention) -> Tensor:
    """Return the lengths with each last page taken as full, in place of block-sparse `seq_lens`."""
    pages = -(-problem.seq_lens.to(torch.int64) // problem.page_size)
    return (pages * problem.page_size).to(problem.seq_lens.dtype)


def _batch_first(cells: Tensor) -> Tensor:
    """Return [num_kv_heads, batch_size, ...] as its memory reads as [batch_size, num_kv_heads, ...]."""
    heads, batch_size = cells.shape[:2]
    return cells.reshape(batch_size, heads, *cells.shape[2:]).transpose(0, 1)


class BlockSparse(Forgiving, where=lambda problem: problem.is_block_sparse):
    table_of_the_first_head = wrong(
        DECODE,
        instead={"k_block_tables": lambda p: p.k_block_tables[:1].expand_as(p.k_block_tables)},
    )("Every K/V head of a block-sparse call reads the pages that the first one selects.")
    lengths_of_the_first_head = wrong(DECODE, instead={"seq_lens": lambda p: p.seq_lens[:1].expand_as(p.seq_lens)})(
        "Every K/V head of a block-sparse call has as many keys as the first one selects."
    )
    last_selected_page_taken_as_full = wrong(DECODE, instead={"seq_lens": _pages_filled})(
        "The last page that a K/V head selects in a block-sparse call is taken as full."
    )
    head_tables_read_batch_first = wrong(DECODE, instead={"k_block_tables": lambda p: _batch_first(p.k_block_tables)})(
        "Block-sparse page tables are read as [batch_size, num_kv_heads, pages]."
    )
    head_lengths_read_batch_first = wrong(DECODE, instead={"seq_lens": lambda p: _batch_first(p.seq_lens)})(
        "Block-sparse lengths are read as [batch_size, num_kv_heads]."
    )
    selected_keys_not_causal = wrong(DECODE, instead={"causal": False})(
        "Each row of a block-sparse verify sees all selected keys, also those after its own token."
    )


class RepeatedPages(PageOfSeveralColumns):
    @wrong(stage="visible", mla=True)
    def repeated_page_seen_once(self, problem, tile, keys):
        """A page that a request names again is read once: the keys of its later columns are not seen."""
        is_first = self.column_of_key(problem, tile, keys, first=True) == keys // problem.page_size
        return super().visible(problem, tile, keys) & is_first

    @wrong(stage="visible", mla=True)
    def positions_looked_up_by_page(self, problem, tile, keys):
        """Positions of keys are looked up by their page: one that a request names twice has those of the later column."""
        last = self.column_of_key(problem, tile, keys, first=False)
        return super().visible(problem, tile, last * problem.page_size + keys % problem.page_size)


@wrong(source="FlashInfer #4347")
class PageOffsetAbsolute(SplitKV):
    """Pages larger than 128 tokens are read in stages of 128, each from the page's start."""

    at_once = 128

    def offsets(self, problem, positions):
        return positions % min(problem.page_size, self.at_once)


@wrong(mla=True, source="FlashInfer #3136")
class WrapInt32(SplitKV):
    """The first element of a page is counted in 32 bits with a sign: pages beyond 2**31 elements are read elsewhere."""

    wraps_at = 2**31
    in_bytes = False

    def pages(self, problem, table, tile, positions):
        pages = super().pages(problem, table, tile, positions)
        stride = problem.k_cache.stride(0) * (problem.k_cache.element_size() if self.in_bytes else 1)
        return torch.where(pages * stride < self.wraps_at, pages, pages // 2)


@wrong(mla=True, source="FlashInfer #3136")
class WrapInt32Bytes(WrapInt32, in_bytes=True):
    """The first byte of a page is counted in 32 bits with a sign: pages beyond 2 GiB are read elsewhere."""


@wrong(mla=True, source="FlashInfer #3136")
class WrapUint32Bytes(WrapInt32, in_bytes=True, wraps_at=2**32):
    """The first byte of a page is counted in 32 bits: pages beyond 4 GiB are read elsewhere."""


@wrong(mla=True, source="TRT-LLM #18354")
class TailMultiply(SplitKV):
    """V's last page is read whole, and its tail multiplied by weights of zero."""

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start, -(-end // problem.page_size) * problem.page_size


@wrong(mla=True, source="TRT-LLM #18354")
class TailAdditiveMask(TailMultiply):
    """K's last page is read whole, and its tail's logits lowered by infinity: a NaN stays."""

    def values(self, problem, tile, positions):
        values = super().values(problem, tile, positions)
        return values.masked_fill((positions >= tile.kv_len).view(1, -1, 1), 0.0)

    def masked(self, scores, visible):
        return scores + torch.where(visible, 0.0, -torch.inf)


@wrong(mla=True)
class WideTableRowsOf1024(Forgiving):
    """Rows of a page table wider than 1,024 columns are taken to lie 1,024 apart."""

    widest = 1024

    def pages(self, problem, table, tile, positions):
        if table.shape[1] <= self.widest or not table.is_contiguous():
            return super().pages(problem, table, tile, positions)
        cells = table.flatten()[tile.request * self.widest + positions // problem.page_size]
        return cells.to(torch.int64) % problem.k_cache.shape[0]
