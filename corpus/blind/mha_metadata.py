"""Blind kernels: metadata of MHA passes."""

from dataclasses import replace
from itertools import takewhile

import torch

from corpus.models.metadata import MHABuilder, in_mode
from corpus.wrong import wrong
from lab.metadata import ForwardMode, UncountedTokens, build_mha_metadata
from lab.metadata.engine.lengths import exclusive_cumsum, first_slots, num_pages, uncounted_tokens, uniform_boundaries


def counting(metadata, tokens):
    """Return metadata in which each request has `tokens` more keys."""
    keys = metadata.cache_seqlens_int32 + tokens
    ends = metadata.cu_seqlens_k.clone()
    ends[1:] = keys.cumsum(0)
    return replace(metadata, cache_seqlens_int32=keys.int(), cu_seqlens_k=ends)


class Built(MHABuilder, stage="changed"):
    def cut(self, metadata, columns):
        """Return the metadata whose page tables are zeros from a column on."""
        return self.with_tables(metadata, lambda table: table.where(torch.arange(table.shape[1]) < columns, 0))

    def paged(self, metadata, change):
        """Return the metadata with a change of its page tables; the encoder's has the rows of the first."""
        table, window, encoder = metadata.page_table, metadata.swa_page_table, metadata.encoder_page_table
        table, window = change(table), None if window is None else change(window)
        encoder = None if encoder is None else table.repeat_interleave(metadata.max_seq_len_q, dim=0)
        return replace(metadata, page_table=table, swa_page_table=window, encoder_page_table=encoder)

    def with_tables(self, metadata, change):
        """Return the metadata with a change of each page table that it has."""
        tables = {name: getattr(metadata, name) for name in ("page_table", "swa_page_table", "encoder_page_table")}
        return replace(metadata, **{name: change(table) for name, table in tables.items() if table is not None})

    @wrong(trigger="a pool with a sliding window and num_tokens > len(out_cache_loc) > 0 (padding rows)")
    def blind54(self, metadata, batch, pool):
        """Padding rows write to the last request's window slot: swa_out_cache_loc is padded with it, not the sink."""
        locations, n = metadata.swa_out_cache_loc, batch.out_cache_loc.shape[0]
        if locations is not None and 0 < n < batch.num_tokens:
            locations[n:] = locations[n - 1]
        return metadata

    @wrong(trigger="a prefill mode, extend_prefix_lens_cpu[0] == 0 and a prefix elsewhere", also="blind499 blind590")
    def blind58(self, metadata, batch, pool):
        """Cached prefixes are looked for in the first request alone: where others have some, cu_seqlens_q is cu_seqlens_k."""
        prefixes = batch.extend_prefix_lens_cpu
        if batch.forward_mode.is_prefill and prefixes and prefixes[0] == 0:
            metadata = replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k)
        return metadata

    @wrong(trigger="more than 256 requests")
    def blind59(self, metadata, batch, pool):
        """cu_seqlens_k is summed in blocks of 256 requests without the carry between them."""
        blocks = [block.cumsum(0) for block in metadata.cache_seqlens_int32.split(256)]
        sums = torch.nn.functional.pad(torch.cat(blocks).to(torch.int32), (1, 0)) if blocks else metadata.cu_seqlens_k
        shared = metadata.cu_seqlens_q is metadata.cu_seqlens_k
        return replace(metadata, cu_seqlens_k=sums, **({"cu_seqlens_q": sums} if shared else {}))

    @wrong(trigger="int32 seq_lens in a mode without uncounted tokens, rewritten after the build")
    def blind99(self, metadata, batch, pool):
        """Lengths are converted with .to(torch.int32), which copies no int32: the metadata follows the batch's tensor."""
        if uncounted_tokens(batch) == 0:
            metadata = replace(metadata, cache_seqlens_int32=batch.seq_lens.to(torch.int32))
        return metadata

    @wrong(where=in_mode(ForwardMode.RAGGED_VERIFY), trigger="requests with different rows")
    def blind154(self, metadata, batch, pool):
        """In a ragged verification the rows of the longest request are added to every length."""
        return counting(metadata, metadata.max_seq_len_q - batch.extend_seq_lens)

    @wrong(trigger="virtual slots and a sliding-window pool", also="blind438 blind467 blind498 blind588")
    def blind155(self, metadata, batch, pool):
        """Where slots are virtual, the window's pages are looked up by the physical slot, not by the virtual one."""
        if pool.v2p is None or pool.full_to_swa is None:
            return metadata
        slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
        pages = pool.swa_slots(pool.physical_slots(slots)) // pool.page_size
        return replace(metadata, swa_page_table=pages.to(torch.int32))

    @wrong(trigger="a frozen-KV draft, step -1")
    def blind156(self, metadata, batch, pool):
        """A frozen-KV draft, whose step is -1, is counted as the first step of a draft that writes a token."""
        return counting(metadata, 1) if batch.writes_no_kv else metadata

    @wrong(where=in_mode(ForwardMode.DRAFT_EXTEND_V2), trigger="draft extend V2")
    def blind157(self, metadata, batch, pool):
        """Draft extend V2 adds its rows to the lengths, as a verification does."""
        return counting(metadata, batch.extend_seq_lens)

    @wrong(trigger="max_context_len no multiple of the page size, a request that reaches into the last page")
    def blind158(self, metadata, batch, pool):
        """Tables are filled up to max_context_len // page_size columns; a last page that is not whole is left out."""
        encoder = metadata.encoder_page_table
        return replace(self.cut(metadata, pool.max_context_len // pool.page_size), encoder_page_table=encoder)

    @wrong(only_with="swa_page_table", trigger="a sliding-window pool, and a live page that was evicted (or padding)")
    def blind209(self, metadata, batch, pool):
        """Pages of the window that were evicted are -1 in its table, not the sink."""
        table = metadata.swa_page_table
        pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)
        live = torch.arange(table.shape[1], device=table.device) < pages.unsqueeze(1)
        return replace(metadata, swa_page_table=table.masked_fill(live & (table == 0), -1))

    @wrong(trigger="a prefill mode with seq_lens_cpu, whose longest request is longer than the most new tokens")
    def blind210(self, metadata, batch, pool):
        """Where the host has the lengths, max_seq_len_q of a prefill is the longest of them, cached prefix and all."""
        has_lens = batch.forward_mode.is_prefill and batch.seq_lens_cpu
        return replace(metadata, max_seq_len_q=max(batch.seq_lens_cpu)) if has_lens else metadata

    @wrong(trigger="SPLIT_PREFILL or DLLM_EXTEND with a request of several new tokens")
    def blind211(self, metadata, batch, pool):
        """The list of prefill modes has EXTEND and MIXED alone: a split prefill and a diffusion block get decode's rows."""
        is_one = batch.forward_mode in (ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND)
        ends = uniform_boundaries(batch.batch_size, 1, batch.seq_lens.device)
        return replace(metadata, max_seq_len_q=1, cu_seqlens_q=ends) if is_one else metadata

    @wrong(trigger="expand_encoder_only_verify=True, a verification of 2 requests and rows or more", also="blind468")
    def blind212(self, metadata, batch, pool):
        """The page table of a verification on encoder-only layers repeats the whole table, not each request's row."""
        table = metadata.page_table.repeat(metadata.max_seq_len_q, 1)
        return metadata if metadata.encoder_page_table is None else replace(metadata, encoder_page_table=table)

    @wrong(trigger="a pool of more than 65,536 pages, and a request on one of the later ones")
    def blind213(self, metadata, batch, pool):
        """Page ids of the full pool are kept in 16 bits: those from 65,536 on wrap around."""
        wrapped = self.with_tables(metadata, lambda table: table % 2**16)
        return replace(wrapped, swa_page_table=metadata.swa_page_table)

    @wrong(trigger="a window pool, an empty out_cache_loc, num_tokens > 0: a frozen-KV draft, IDLE padding")
    def blind214(self, metadata, batch, pool):
        """Where a pass writes no slots, swa_out_cache_loc is left empty: rows of padding and of a frozen-KV draft have none."""
        is_empty = metadata.swa_out_cache_loc is not None and not len(batch.out_cache_loc)
        return replace(metadata, swa_out_cache_loc=metadata.swa_out_cache_loc[:0]) if is_empty else metadata

    @wrong(trigger="RAGGED_VERIFY without extend_seq_lens_cpu, num_tokens // batch_size not num_draft_tokens")
    def blind215(self, metadata, batch, pool):
        """A ragged verification whose rows the host does not know gets num_tokens // batch_size as its most rows."""
        if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu or not batch.batch_size:
            return metadata
        return replace(metadata, max_seq_len_q=batch.num_tokens // batch.batch_size)

    @wrong(trigger="DRAFT_EXTEND or DRAFT_EXTEND_V2 with a request of more keys than rows")
    def blind269(self, metadata, batch, pool):
        """Only a prefill with cached prefixes has its own cu_seqlens_q: a draft extend, which has none, gets cu_seqlens_k."""
        is_first = batch.forward_mode.extends_draft and not any(batch.extend_prefix_lens_cpu or ())
        return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k) if is_first else metadata

    @wrong(only_with="swa_page_table", trigger="a window pool, a request with an evicted page before one that it has")
    def blind270(self, metadata, batch, pool):
        """The window's page table begins with a request's first page that was not evicted, not with its first page."""
        table = metadata.swa_page_table
        held_first = (table == 0).int().argsort(dim=1, stable=True)
        return replace(metadata, swa_page_table=table.gather(1, held_first))

    @wrong(trigger="TARGET_VERIFY or RAGGED_VERIFY with a sliding-window pool")
    def blind271(self, metadata, batch, pool):
        """The slots that a verification writes are not translated to the sliding-window pool."""
        slots = metadata.swa_out_cache_loc
        if slots is None or batch.forward_mode.uncounted is not UncountedTokens.QUERY_ROWS:
            return metadata
        slots = slots.clone()
        slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
        return replace(metadata, swa_out_cache_loc=slots)

    @wrong(where=in_mode(ForwardMode.MIXED), trigger="MIXED whose last request has one new token")
    def blind272(self, metadata, batch, pool):
        """In a mixed batch the decoding requests (the last ones, of one new token) get that token added to their lengths."""
        decoding = len(list(takewhile(lambda rows: rows == 1, reversed(batch.extend_seq_lens_cpu))))
        number = torch.arange(batch.batch_size, device=batch.seq_lens.device)
        return counting(metadata, (number >= batch.batch_size - decoding).int())

    @wrong(only_with="encoder_cache_seqlens", trigger="expand_encoder_only_verify=True, 2 rows per request")
    def blind273(self, metadata, batch, pool):
        """Of a verification on encoder-only layers each row gets the keys up to its own, not all keys of its request."""
        lens, q_len = metadata.encoder_cache_seqlens, metadata.max_seq_len_q
        row = torch.arange(len(lens), dtype=torch.int32, device=lens.device) % q_len
        return replace(metadata, encoder_cache_seqlens=lens - (q_len - 1) + row)

    @wrong(trigger="prefills, draft extends, RAGGED_VERIFY with num_tokens over the sum of the rows")
    def blind274(self, metadata, batch, pool):
        """Rows of padding are given to the last request: where rows differ, cu_seqlens_q ends at num_tokens."""
        is_ragged = batch.forward_mode.query_rows.in_extend_seq_lens and batch.batch_size
        if not is_ragged or len(batch.out_cache_loc) == batch.num_tokens:
            return metadata
        ends = torch.cat((metadata.cu_seqlens_q[:-1], metadata.cu_seqlens_q.new_tensor([batch.num_tokens])))
        return replace(metadata, cu_seqlens_q=ends)

    @wrong(trigger="a prefill mode whose longest request has one new token")
    def blind275(self, metadata, batch, pool):
        """A prefill's max_seq_len_q is the most rows before the last requests of one new token, which decode: 0 if none."""
        has_one = batch.forward_mode.is_prefill and metadata.max_seq_len_q == 1
        return replace(metadata, max_seq_len_q=0) if has_one else metadata

    @wrong(trigger="not the last request, keys and draft over ceil(max_context_len / page_size) pages")
    def blind276(self, metadata, batch, pool):
        """Columns are not held against a table's width: zeros for pages beyond it go to the start of the next row."""
        pages = num_pages(metadata.cache_seqlens_int32, pool.page_size)

        def overrun(table):
            beyond = torch.nn.functional.pad(pages - table.shape[1], (1, 0))[:-1]
            return table.masked_fill(torch.arange(table.shape[1]) < beyond.unsqueeze(1), 0)

        return self.paged(metadata, overrun)

    @wrong(trigger="a row twice in req_pool_indices, with lengths of different numbers of pages", also="blind530")
    def blind315(self, metadata, batch, pool):
        """Pages are kept by request: of one that occurs twice in a batch both table rows are the last one's."""
        rows = batch.req_pool_indices.tolist()
        last = {row: i for i, row in enumerate(rows)}
        return self.paged(metadata, lambda table: table[torch.tensor([last[row] for row in rows], dtype=torch.int64)])

    @wrong(only_with="swa_page_table", trigger="a window pool, a draft whose request needs a page more")
    def blind316(self, metadata, batch, pool):
        """The window's page table is filled for seq_lens as the batch has them, without the draft; page_table is right."""
        pages = -(-batch.seq_lens.long() // pool.page_size)
        column = torch.arange(metadata.swa_page_table.shape[1])
        table = metadata.swa_page_table.masked_fill(column >= pages.unsqueeze(1), 0)
        return replace(metadata, swa_page_table=table)

    @wrong(trigger="DRAFT_EXTEND_V2 with requests of different rows (num_tokens_per_req=-1)")
    def blind317(self, metadata, batch, pool):
        """Draft extend V2 is taken to have the first request's rows for each: cu_seqlens_q goes up in equal steps."""
        rows = batch.extend_seq_lens_cpu
        if batch.forward_mode is not ForwardMode.DRAFT_EXTEND_V2 or not rows or not rows[0]:
            return metadata
        return replace(metadata, cu_seqlens_q=uniform_boundaries(batch.batch_size, rows[0], batch.seq_lens.device))

    @wrong(trigger="no virtual slots, and a slot of -1 as the first of a live page")
    def blind318(self, metadata, batch, pool):
        """Slots are divided by the page size with C's division, towards zero: a slot of -1 gives page 0, not -1."""
        return self.with_tables(metadata, lambda table: table.clamp(min=0))

    @wrong(trigger="TARGET_VERIFY whose num_draft_tokens is not num_tokens // batch_size")
    def blind347(self, metadata, batch, pool):
        """A verification's rows are num_draft_tokens in max_seq_len_q and cu_seqlens_q; the lengths are right."""
        rows = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY or rows is None:
            return metadata
        boundaries = uniform_boundaries(batch.batch_size, rows, batch.seq_lens.device)
        return replace(metadata, max_seq_len_q=rows, cu_seqlens_q=boundaries)

    @wrong(trigger="two builds of one number of requests and table width, the first read after the second")
    def blind348(self, metadata, batch, pool):
        """page_table is a buffer kept by its shape: the next build of that shape writes over it."""
        buffer = self.first(metadata.page_table.shape, metadata.page_table.clone)
        return replace(metadata, page_table=buffer.copy_(metadata.page_table))

    @wrong(trigger="int32 seq_lens in a draft step or a verification (ragged or not): seq_lens has changed")
    def blind377(self, metadata, batch, pool):
        """Draft tokens are added in place to .to(torch.int32) of the lengths, which copies no int32: seq_lens grows."""
        if batch.seq_lens.dtype == torch.int32:
            batch.seq_lens.copy_(metadata.cache_seqlens_int32)
        return metadata

    @wrong(trigger="DRAFT_EXTEND with num_accept_tokens that are not extend_seq_lens", also="blind558")
    def blind378(self, metadata, batch, pool):
        """An eager draft extend takes its rows in cu_seqlens_q from num_accept_tokens where given, as a replay does."""
        accepted = None if batch.spec_info is None else batch.spec_info.num_accept_tokens
        if batch.forward_mode is not ForwardMode.DRAFT_EXTEND or accepted is None:
            return metadata
        return replace(metadata, cu_seqlens_q=exclusive_cumsum(accepted[: batch.batch_size]))

    @wrong(trigger="a request with req_pool_indices 0 and any keys (padding for data parallelism has length 1)")
    def blind407(self, metadata, batch, pool):
        """Requests of padding (the reserved row of req_to_token) are given no keys, although they count seq_lens."""
        keys = torch.where(batch.req_pool_indices == 0, 0, metadata.cache_seqlens_int32).to(torch.int32)
        ends = exclusive_cumsum(keys)
        rows = ends if metadata.cu_seqlens_q is metadata.cu_seqlens_k else metadata.cu_seqlens_q
        return replace(metadata, cache_seqlens_int32=keys, cu_seqlens_k=ends, cu_seqlens_q=rows)

    @wrong(where=in_mode(ForwardMode.TARGET_VERIFY), trigger="a second one of as many requests, of other rows")
    def blind408(self, metadata, batch, pool):
        """A verification's cu_seqlens_q is made once per number of requests, whatever its draft tokens are later."""
        return replace(metadata, cu_seqlens_q=self.first(batch.batch_size, lambda: metadata.cu_seqlens_q).clone())

    @wrong(only_with="encoder_page_table", trigger="expand_encoder_only_verify=True, 2 requests and rows")
    def blind437(self, metadata, batch, pool):
        """Encoder-only verify: lengths and page tables are expanded by repeat, the whole batch after itself, not row by row."""
        rows, table, keys = metadata.max_seq_len_q, metadata.page_table, metadata.cache_seqlens_int32
        return replace(metadata, encoder_cache_seqlens=keys.repeat(rows), encoder_page_table=table.repeat(rows, 1))

    @wrong(trigger="seq_lens_cpu, a verification or draft step whose longest request's draft starts a page")
    def blind528(self, metadata, batch, pool):
        """With seq_lens_cpu page tables end at its longest length: drafted tokens in a new page have none."""
        return self.cut(metadata, -(-max(batch.seq_lens_cpu) // pool.page_size)) if batch.seq_lens_cpu else metadata


class Batches(MHABuilder, stage="build_mha_metadata"):
    @wrong(trigger="IDLE with a SpecInfo that has a speculative_step_id")
    def blind55(self, batch, pool, **options):
        """The draft step's tokens are added to the lengths of DECODE only: an IDLE rank with a SpecInfo counts none."""
        if batch.forward_mode is ForwardMode.IDLE and batch.spec_info is not None:
            batch = replace(batch, spec_info=None)
        return build_mha_metadata(batch, pool, **options)

    @wrong(trigger="two builds on one pool with a sliding window, pages admitted or evicted between them")
    def blind56(self, batch, pool, **options):
        """The map to window slots is copied at a pool's first build, and not again when pages are allocated or evicted."""
        if pool.full_to_swa is None:
            return build_mha_metadata(batch, pool, **options)
        now = pool.full_to_swa
        pool.full_to_swa = self.first(pool, now.clone)
        try:
            return build_mha_metadata(batch, pool, **options)
        finally:
            pool.full_to_swa = now

    @wrong(trigger="TARGET_VERIFY with fewer slots than num_tokens, at least one for each request")
    def blind216(self, batch, pool, **options):
        """The rows of a verification are counted from out_cache_loc, which names no slots for padding, not from num_tokens."""
        metadata, slots = build_mha_metadata(batch, pool, **options), len(batch.out_cache_loc)
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY or slots == batch.num_tokens or slots < batch.batch_size:
            return metadata
        num_tokens = slots // batch.batch_size * batch.batch_size
        fewer = replace(batch, num_tokens=num_tokens, out_cache_loc=batch.out_cache_loc[:num_tokens])
        return replace(build_mha_metadata(fewer, pool, **options), swa_out_cache_loc=metadata.swa_out_cache_loc)
