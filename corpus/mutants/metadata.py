"""Mutants of the metadata builder; those that are wrong for some batches alone are in `metadata_batches`."""

from dataclasses import replace

import torch

from corpus.models.metadata import MHABuilder
from corpus.wrong import wrong
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.lengths import uncounted_tokens, uniform_boundaries


class Metadata(MHABuilder):
    """Kernels of the metadata builder; those that are wrong for some batches alone are in `metadata_batches`."""

    table_not_populated = wrong(
        source="SGLang #26019", instead={"page_table": lambda metadata, *_: torch.zeros_like(metadata.page_table)}
    )("The page table is a new one that nobody filled.")

    @wrong(stage="changed", source="SGLang #38187")
    def tokens_as_pages(self, metadata, batch, pool):
        """The page table holds slots of tokens."""
        return replace(metadata, page_table=metadata.page_table * pool.page_size)

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

    @wrong(stage="changed")
    def lengths_are_the_batchs(self, metadata, batch, pool):
        """Lengths that need no change are the batch's own tensor, if it is int32 already."""
        if uncounted_tokens(batch) or batch.seq_lens.dtype != torch.int32:
            return metadata
        return replace(metadata, cache_seqlens_int32=batch.seq_lens)

    @wrong(stage="changed", source="SGLang #12295")
    def seq_without_q(self, metadata, batch, pool):
        """Lengths leave out the tokens that seq_lens does not count: draft tokens in verification and drafting."""
        return replace(metadata, cache_seqlens_int32=batch.seq_lens.to(torch.int32))

    @wrong(stage="changed")
    def draft_step_uncounted(self, metadata, batch, pool):
        """Lengths of a draft step count the tokens before its own, and not its own."""
        if batch.spec_info is None or batch.forward_mode.query_rows is not QueryRows.ONE:
            return metadata
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 - 1)

    @wrong(stage="changed", source="SGLang 0.5.23, frozen_kv_mtp_cuda_graph_runner.py")
    def frozen_draft_counts_its_row(self, metadata, batch, pool):
        """Lengths of a frozen-KV draft count a token of its own, which is not in the cache."""
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 + int(batch.writes_no_kv))

    @wrong(stage="changed")
    def ragged_verify_counts_draft(self, metadata, batch, pool):
        """Lengths of a ragged verification count the whole draft of each request, as MLA's do, not its own rows."""
        if batch.forward_mode.query_rows is not QueryRows.VERIFIED:
            return metadata
        return replace(metadata, cache_seqlens_int32=(batch.seq_lens + metadata.max_seq_len_q).to(torch.int32))

    @wrong(stage="changed")
    def encoder_only_rows_causal(self, metadata, batch, pool):
        """A row of an encoder-only layer's verification sees no key after its own."""
        if metadata.encoder_cache_seqlens is None:
            return metadata
        after = torch.arange(metadata.max_seq_len_q, dtype=torch.int32, device=pool.device).flip(0)
        lens = metadata.encoder_cache_seqlens - after.repeat(batch.batch_size)
        return replace(metadata, encoder_cache_seqlens=lens)

    @wrong(stage="changed")
    def cu_seqlens_k_without_q(self, metadata, batch, pool):
        """cu_seqlens_k sums seq_lens, not the lengths that the kernel is given."""
        ends = batch.seq_lens.cumsum(0).to(torch.int32)
        return replace(metadata, cu_seqlens_k=torch.nn.functional.pad(ends, (1, 0)))

    @wrong(stage="changed", source="SGLang #21212")
    def cu_seqlens_q_of_equal_rows(self, metadata, batch, pool):
        """cu_seqlens_q gives every request max_seq_len_q rows."""
        offsets = uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, pool.device)
        return replace(metadata, cu_seqlens_q=offsets)

    @wrong(stage="changed")
    def no_prefix_list_taken_as_one_row_each(self, metadata, batch, pool):
        """cu_seqlens_q gives every request of a prefill one row where there is no list of cached prefixes."""
        if not batch.forward_mode.is_prefill or batch.extend_prefix_lens_cpu is not None:
            return metadata
        return replace(metadata, cu_seqlens_q=torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device))

    @wrong(stage="changed", source="SGLang #27473")
    def max_seq_len_q_overridden(self, metadata, batch, pool):
        """max_seq_len_q is 1 in verification."""
        is_verification = batch.forward_mode.query_rows is QueryRows.DRAFT_TOKENS
        return replace(metadata, max_seq_len_q=1) if is_verification else metadata

    @wrong(stage="changed", source="SGLang #18970")
    def window_table_untranslated(self, metadata, batch, pool):
        """The sliding window's page table holds the full pool's pages."""
        return metadata if metadata.swa_page_table is None else replace(metadata, swa_page_table=metadata.page_table)

    @wrong(stage="changed")
    def window_slots_untranslated(self, metadata, batch, pool):
        """swa_out_cache_loc holds the full pool's slots."""
        if metadata.swa_out_cache_loc is None:
            return metadata
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
