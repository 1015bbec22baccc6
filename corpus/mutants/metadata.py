"""Mutants of the metadata builder of MHA passes; those that are wrong for some batches alone come last."""

from dataclasses import replace

import torch

from corpus.models.metadata import MHABuilder, of_rows
from corpus.wrong import wrong
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.lengths import exclusive_cumsum, first_slots, uncounted_tokens, uniform_boundaries


def _zero_from(table, row):
    """Return the table with zeros from a row on."""
    return table.masked_fill(torch.arange(len(table), device=table.device)[:, None] >= row, 0)


def _equal_boundaries(metadata, batch, pool):
    return uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, pool.device)


def _virtual_pages(metadata, batch, pool):
    slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
    return (slots // pool.page_size).to(torch.int32)


class Metadata(MHABuilder):
    table_not_populated = wrong(
        source="SGLang #26019", instead={"page_table": lambda metadata, *_: torch.zeros_like(metadata.page_table)}
    )("The page table is a new one that nobody filled.")
    tokens_as_pages = wrong(
        source="SGLang #38187", instead={"page_table": lambda right, _, pool: right.page_table * pool.page_size}
    )("The page table holds slots of tokens.")

    @wrong(stage="changed", source="SGLang #11985")
    def table_of_token_columns(self, metadata, batch, pool):
        """Column c of the page table names the page of token c, not of token c * page_size."""
        rows = pool.req_to_token.index_select(0, batch.req_pool_indices)[:, : pool.block_table_width]
        return replace(metadata, page_table=(rows // pool.page_size).to(torch.int32))

    @wrong(stage="changed")
    def table_pages_consecutive(self, metadata, batch, pool):
        """A request's pages are taken to follow its first one."""
        columns = torch.arange(metadata.page_table.shape[1], dtype=torch.int32, device=pool.device)
        return replace(metadata, page_table=metadata.page_table[:, :1] + columns)

    @wrong(stage="changed")
    def last_page_missing(self, metadata, batch, pool):
        """A last page that is not full is left out of the page table."""
        full = metadata.cache_seqlens_int32 // pool.page_size
        columns = torch.arange(metadata.page_table.shape[1], device=pool.device)
        return replace(metadata, page_table=metadata.page_table.masked_fill(columns >= full[:, None], 0))

    table_in_pool_order = wrong(
        instead={"page_table": lambda metadata, batch, *_: metadata.page_table[batch.req_pool_indices.argsort()]}
    )("The page table's rows are sorted by the pool's rows, and the lengths are not.")

    @wrong(stage="changed")
    def buffer_shared(self, metadata, batch, pool):
        """Batches of a size share one tensor of lengths, so that a call overwrites an earlier one's."""
        lens = metadata.cache_seqlens_int32
        return replace(metadata, cache_seqlens_int32=self.first(len(lens), lambda: lens).copy_(lens))

    lengths_are_the_batchs = wrong(
        where=lambda _, batch, __: not uncounted_tokens(batch) and batch.seq_lens.dtype == torch.int32,
        instead={"cache_seqlens_int32": lambda _, batch, __: batch.seq_lens},
    )("Lengths that need no change are the batch's own tensor, if it is int32 already.")
    seq_without_q = wrong(
        source="SGLang #12295", instead={"cache_seqlens_int32": lambda _, batch, __: batch.seq_lens.to(torch.int32)}
    )("Lengths leave out the tokens that seq_lens does not count: draft tokens in verification and drafting.")
    draft_step_uncounted = wrong(
        where=lambda _, batch, __: batch.spec_info is not None and batch.forward_mode.query_rows is QueryRows.ONE,
        instead={"cache_seqlens_int32": lambda right, *_: right.cache_seqlens_int32 - 1},
    )("Lengths of a draft step count the tokens before its own, and not its own.")
    frozen_draft_counts_its_row = wrong(
        source="SGLang 0.5.23, frozen_kv_mtp_cuda_graph_runner.py",
        instead={"cache_seqlens_int32": lambda right, batch, _: right.cache_seqlens_int32 + int(batch.writes_no_kv)},
    )("Lengths of a frozen-KV draft count a token of its own, which is not in the cache.")
    ragged_verify_counts_draft = wrong(
        where=of_rows(QueryRows.VERIFIED),
        instead={"cache_seqlens_int32": lambda right, batch, _: (batch.seq_lens + right.max_seq_len_q).to(torch.int32)},
    )("Lengths of a ragged verification count the whole draft of each request, as MLA's do, not its own rows.")

    @wrong(stage="changed", only_with="encoder_cache_seqlens")
    def encoder_only_rows_causal(self, metadata, batch, pool):
        """A row of an encoder-only layer's verification sees no key after its own."""
        after = torch.arange(metadata.max_seq_len_q, dtype=torch.int32, device=pool.device).flip(0)
        lens = metadata.encoder_cache_seqlens - after.repeat(batch.batch_size)
        return replace(metadata, encoder_cache_seqlens=lens)

    cu_seqlens_k_without_q = wrong(instead={"cu_seqlens_k": lambda _, batch, __: exclusive_cumsum(batch.seq_lens)})(
        "cu_seqlens_k sums seq_lens, not the lengths that the kernel is given."
    )
    cu_seqlens_q_of_equal_rows = wrong(source="SGLang #21212", instead={"cu_seqlens_q": _equal_boundaries})(
        "cu_seqlens_q gives every request max_seq_len_q rows."
    )
    no_prefix_list_taken_as_one_row_each = wrong(
        where=lambda _, batch, __: batch.forward_mode.is_prefill and batch.extend_prefix_lens_cpu is None,
        instead={"cu_seqlens_q": lambda _, batch, pool: uniform_boundaries(batch.batch_size, 1, pool.device)},
    )("cu_seqlens_q gives every request of a prefill one row where there is no list of cached prefixes.")
    max_seq_len_q_overridden = wrong(
        source="SGLang #27473", where=of_rows(QueryRows.DRAFT_TOKENS), instead={"max_seq_len_q": 1}
    )("max_seq_len_q is 1 in verification.")
    window_table_untranslated = wrong(
        source="SGLang #18970",
        only_with="swa_page_table",
        instead={"swa_page_table": lambda right, *_: right.page_table},
    )("The sliding window's page table holds the full pool's pages.")

    @wrong(stage="changed", only_with="swa_out_cache_loc")
    def window_slots_untranslated(self, metadata, batch, pool):
        """swa_out_cache_loc holds the full pool's slots."""
        padding = batch.num_tokens - len(batch.out_cache_loc)
        return replace(metadata, swa_out_cache_loc=torch.nn.functional.pad(batch.out_cache_loc, (0, padding)))

    @wrong(stage="changed")
    def window_slots_of_padding_repeated(self, metadata, batch, pool):
        """Rows of padding write to the window slot of the last token, not to the sink."""
        slots, rows = metadata.swa_out_cache_loc, len(batch.out_cache_loc)
        if slots is None or rows == 0:
            return metadata
        padding = slots[rows - 1].expand(len(slots) - rows)
        return replace(metadata, swa_out_cache_loc=torch.cat([slots[:rows], padding]))

    window_table_missing = wrong(instead={"swa_page_table": None})("There is no page table for the sliding window.")

    @wrong(stage="changed", source="SGLang #24566")
    def table_too_narrow(self, metadata, batch, pool):
        """The page table has the columns that seq_lens needs, without the draft tokens."""
        width = -(-int(batch.seq_lens.max()) // pool.page_size) if batch.batch_size else 0
        return replace(metadata, page_table=metadata.page_table[:, :width].contiguous())


@wrong(source="SGLang #39175")
class BufferRegrown(MHABuilder):
    """A batch larger than all before it frees the page tables that earlier calls gave out."""

    def __init__(self):
        self.given = []

    def changed(self, metadata, batch, pool):
        if self.given and metadata.page_table.shape[0] > max(len(table) for table in self.given):
            for table in self.given:
                table.fill_(-1)
            self.given = []
        self.given.append(metadata.page_table)
        return metadata


class MetadataBatches(MHABuilder):
    """Kernels of the metadata builder that are wrong for some batches alone: large or empty ones, later ones, virtual slots."""

    offsets_of_large_batch_stop = wrong(
        instead={"cu_seqlens_q": lambda right, *_: right.cu_seqlens_q.clamp(max=int(right.cu_seqlens_q[:33][-1]))}
    )("cu_seqlens_q stops rising after the 32nd request.")
    columns_beyond256_zero = wrong(instead={"page_table": lambda right, *_: _zero_from(right.page_table.T, 256).T})(
        "Columns of the page table from the 257th on are zero."
    )
    lengths_capped = wrong(
        instead={"cache_seqlens_int32": lambda metadata, *_: metadata.cache_seqlens_int32.clamp(max=4096)}
    )("Lengths end at 4,096.")

    @wrong(stage="changed")
    def window_hole_taken_as_slot(self, metadata, batch, pool):
        """A window map's -1 is the last page of the window's pool."""
        table = metadata.swa_page_table
        if table is None or pool.swa_num_pages is None:
            return metadata
        return replace(metadata, swa_page_table=torch.where(table < 0, pool.swa_num_pages - 1, table))

    @wrong(stage="changed")
    def table_of_same_lengths_kept(self, metadata, batch, pool):
        """A page table is kept for the same requests of the same pool and length, whatever the pool's slots now are."""
        key = (pool, *batch.req_pool_indices.tolist(), *metadata.cache_seqlens_int32.tolist())
        return replace(metadata, page_table=self.first(key, metadata.page_table.clone).clone())

    @wrong(stage="changed")
    def window_map_of_first_pool(self, metadata, batch, pool):
        """The window's map is that of the first pool that was seen."""
        if pool.full_to_swa is None:
            return metadata
        first = self.first("map", pool.full_to_swa.clone)
        slots = (metadata.page_table.to(torch.int64) * pool.page_size).clamp(max=len(first) - 1)
        return replace(metadata, swa_page_table=(first[slots] // pool.page_size).to(torch.int32))

    virtual_pages_left = wrong(where=lambda *given: given[2].v2p is not None, instead={"page_table": _virtual_pages})(
        "The page table of virtual slots has the pages that they name, and not those of the cache."
    )

    @wrong(stage="changed")
    def window_pages_of_physical_slots(self, metadata, batch, pool):
        """Where slots are virtual, a window's pages are looked up by where the slots lie in the full pool."""
        if pool.v2p is None or metadata.swa_page_table is None:
            return metadata
        slots = metadata.page_table.to(torch.int64) * pool.page_size
        return replace(metadata, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))

    empty_slots_get_a_key = wrong(
        instead={"cache_seqlens_int32": lambda metadata, *_: metadata.cache_seqlens_int32.clamp(min=1)}
    )("A length of 0 is 1.")

    @wrong(stage="changed")
    def divisible_rows_taken_as_equal(self, metadata, batch, pool):
        """Rows that divide by the requests are taken as equally many for each."""
        rows = sum(batch.extend_seq_lens_cpu or (1,))
        if batch.batch_size == 0 or batch.extend_seq_lens_cpu is None or rows % batch.batch_size:
            return metadata
        offsets = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device)
        return replace(metadata, cu_seqlens_q=offsets * (rows // batch.batch_size))

    requests_beyond80_pageless = wrong(instead={"page_table": lambda right, *_: _zero_from(right.page_table, 80)})(
        "The page table's rows from the 81st on are zero."
    )
    idle_pass_without_rows = wrong(
        where=lambda _, batch, __: batch.forward_mode is ForwardMode.IDLE, instead={"max_seq_len_q": 0}
    )("max_seq_len_q of an idle pass is 0.")
    split_prefill_without_prefix = wrong(
        where=lambda _, batch, __: (
            batch.forward_mode is ForwardMode.SPLIT_PREFILL and batch.extend_seq_lens is not None
        ),
        instead={"cache_seqlens_int32": lambda _, batch, __: batch.extend_seq_lens.to(torch.int32)},
    )("Lengths of a split prefill leave the cached prefix out.")
    pages_of256_taken_as128 = wrong(
        where=lambda *given: given[2].page_size == 256, instead={"page_table": lambda right, *_: right.page_table * 2}
    )("Pages of 256 tokens are numbered as if they held 128.")

    @wrong(stage="changed")
    def draft_steps_beyond_two_count_two(self, metadata, batch, pool):
        """From the third draft step on, lengths count the second's tokens."""
        step = (batch.spec_info.speculative_step_id if batch.spec_info else None) or 0
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 - max(0, step - 2))

    most_rows_of_host_lengths = wrong(
        where=lambda _, batch, __: batch.forward_mode.is_prefill and bool(batch.seq_lens_cpu),
        instead={"max_seq_len_q": lambda _, batch, __: max(batch.seq_lens_cpu)},
    )("max_seq_len_q of a prefill whose lengths are on the host is the longest of them, cached tokens and all.")
    page_ids_of16_bits = wrong(instead={"page_table": lambda metadata, *_: metadata.page_table & 0xFFFF})(
        "The page table's ids have 16 bits."
    )
    unknown_rows_dealt_evenly = wrong(
        where=lambda _, batch, __: (
            batch.forward_mode.query_rows is QueryRows.VERIFIED and batch.extend_seq_lens_cpu is None
        ),
        instead={"max_seq_len_q": lambda _, batch, __: batch.num_tokens // batch.batch_size},
    )("Of a ragged verification whose rows the host does not know, max_seq_len_q is their mean.")

    @wrong(stage="changed")
    def dead_cells_left(self, metadata, batch, pool):
        """Cells after a request's pages name what freed requests left in its row of the pool."""
        slots = pool.req_to_token[:, :: pool.page_size].index_select(0, batch.req_pool_indices)
        return replace(metadata, page_table=pool.pages(slots))

    table_rows_apart = wrong(
        instead={"page_table": lambda metadata, *_: torch.nn.functional.pad(metadata.page_table, (0, 3))[:, :-3]}
    )("The page table's rows lie three cells apart.")
    lengths_end_at_the_context = wrong(
        instead={
            "cache_seqlens_int32": lambda right, _, pool: right.cache_seqlens_int32.clamp(max=pool.max_context_len)
        }
    )("A length above the context is the context's.")

    @wrong(stage="changed")
    def verify_counts_the_draft(self, metadata, batch, pool):
        """Lengths of a verification count the draft of the SpecInfo, not the rows that the pass has."""
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS or batch.spec_info is None:
            return metadata
        draft = batch.spec_info.num_draft_tokens or 0
        return replace(metadata, cache_seqlens_int32=(batch.seq_lens + draft).to(torch.int32))

    @wrong(stage="changed")
    def rows_are_the_accepted_tokens(self, metadata, batch, pool):
        """An eager draft extend has the rows that a graph's replay reads, num_accept_tokens."""
        accepted = None if batch.spec_info is None else batch.spec_info.num_accept_tokens
        if batch.forward_mode.query_rows is not QueryRows.ACCEPTED or accepted is None:
            return metadata
        return replace(metadata, cu_seqlens_q=exclusive_cumsum(accepted[: batch.batch_size]))

    encoder_rows_beyond200_pageless = wrong(
        only_with="encoder_page_table",
        instead={"encoder_page_table": lambda right, *_: _zero_from(right.encoder_page_table, 200)},
    )("The table of an encoder-only layer's rows is zero from the 201st row on.")

    @wrong(stage="changed")
    def rows_of_first_request(self, metadata, batch, pool):
        """cu_seqlens_q of the second draft extend rises by the first request's rows."""
        if batch.forward_mode.query_rows is not QueryRows.FIXED or not batch.extend_seq_lens_cpu:
            return metadata
        offsets = uniform_boundaries(batch.batch_size, batch.extend_seq_lens_cpu[0], pool.device)
        return replace(metadata, cu_seqlens_q=offsets)

    @wrong(stage="changed")
    def pages_of_request_once(self, metadata, batch, pool):
        """A request that occurs twice has the pages of its last occurrence, whatever the lengths."""
        rows = batch.req_pool_indices.tolist()
        last = {row: place for place, row in enumerate(rows)}
        return replace(metadata, page_table=metadata.page_table[[last[row] for row in rows]])

    @wrong(stage="changed", source="SGLang #34613")
    def hole_takes_the_last_virtual_page(self, metadata, batch, pool):
        """With pages of one token, slot -1 reads the map of virtual pages at -1, its last entry."""
        if pool.v2p is None or pool.page_size > 1:
            return metadata
        slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
        return replace(metadata, page_table=metadata.page_table.masked_fill(slots == -1, int(pool.v2p[-1])))

    @wrong(stage="changed")
    def step_of_first_pass(self, metadata, batch, pool):
        """The number of tokens that lengths leave out is that of the first pass with as many requests."""
        more = self.first(batch.batch_size, lambda: uncounted_tokens(batch)) - uncounted_tokens(batch)
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 + more)

    @wrong(stage="changed")
    def draft_added_to_batch(self, metadata, batch, pool):
        """The draft's tokens are added to the batch's own lengths, which the next step counts from."""
        batch.seq_lens.add_(uncounted_tokens(batch))
        return metadata

    @wrong(stage="changed")
    def row_cleared_in_pool(self, metadata, batch, pool):
        """What freed requests left in the pool's rows is overwritten by 0, in the pool."""
        for row, length in zip(batch.req_pool_indices.tolist(), metadata.cache_seqlens_int32.tolist(), strict=True):
            pool.req_to_token[row, length:] = 0
        return metadata

    @wrong(stage="changed")
    def accepted_tokens_summed_in_place(self, metadata, batch, pool):
        """The accepted tokens of a draft are turned into their running sums in place."""
        accepted = None if batch.spec_info is None else batch.spec_info.num_accept_tokens
        if accepted is not None:
            accepted.copy_(accepted.cumsum(0))
        return metadata


@wrong()
class MostRowsOfAnyPass(MHABuilder):
    """max_seq_len_q never falls from one pass to the next."""

    most = 0

    def changed(self, metadata, batch, pool):
        self.most = max(self.most, metadata.max_seq_len_q)
        return replace(metadata, max_seq_len_q=self.most)
