"""Mutants of the metadata builder; those that are wrong for some batches alone are in `metadata_batches`."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.mutant import MHA_METADATA, Defective, Memory
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import uncounted_tokens, uniform_boundaries
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata


class Builder(Defective, is_model=True, interface=(MHA_METADATA,)):
    """`lab.metadata.build_mha_metadata`, and one change of what it built."""

    def build_mha_metadata(self, batch: ForwardBatch, pool: KVPool, **options: bool) -> TRTLLMMHAMetadata:
        """As `lab.metadata.build_mha_metadata`."""
        return self.changed(build_mha_metadata(batch, pool, **options), batch, pool)

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return self.misread(metadata, batch, pool)


class TableNotPopulated(
    Builder, source="SGLang #26019", instead={"page_table": lambda metadata, *_: torch.zeros_like(metadata.page_table)}
):
    """The page table is a new one that nobody filled."""


class TokensAsPages(Builder, source="SGLang #38187"):
    """The page table holds slots of tokens."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, page_table=metadata.page_table * pool.page_size)


class TableOfTokenColumns(Builder, source="SGLang #11985"):
    """Column c of the page table names the page of token c, not of token c * page_size."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        rows = pool.req_to_token.index_select(0, batch.req_pool_indices)[:, : pool.block_table_width]
        return replace(metadata, page_table=(rows // pool.page_size).to(torch.int32))


class TablePagesConsecutive(Builder):
    """A request's pages are taken to follow its first one."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        columns = torch.arange(metadata.page_table.shape[1], dtype=torch.int32, device=pool.device)
        return replace(metadata, page_table=metadata.page_table[:, :1] + columns)


class LastPageMissing(Builder):
    """A last page that is not full is left out of the page table."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        full = metadata.cache_seqlens_int32 // pool.page_size
        columns = torch.arange(metadata.page_table.shape[1], device=pool.device)
        return replace(metadata, page_table=metadata.page_table.masked_fill(columns >= full[:, None], 0))


class TableInPoolOrder(
    Builder, instead={"page_table": lambda metadata, batch, *_: metadata.page_table[batch.req_pool_indices.argsort()]}
):
    """The page table's rows are sorted by the pool's rows, and the lengths are not."""


class BufferRegrown(Builder, source="SGLang #39175"):
    """A batch larger than all before it frees the page tables that earlier calls gave out."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if self.given and metadata.page_table.shape[0] > max(len(table) for table in self.given):
            for table in self.given:
                table.fill_(-1)
            self.given = []
        self.given.append(metadata.page_table)
        return metadata


class BufferShared(Memory, Builder):
    """Batches of a size share one tensor of lengths, so that a call overwrites an earlier one's."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        lens = metadata.cache_seqlens_int32
        return replace(metadata, cache_seqlens_int32=self.first(len(lens), lambda: lens).copy_(lens))


class LengthsAreTheBatchs(Builder):
    """Lengths that need no change are the batch's own tensor, if it is int32 already."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if uncounted_tokens(batch) or batch.seq_lens.dtype != torch.int32:
            return metadata
        return replace(metadata, cache_seqlens_int32=batch.seq_lens)


class SeqWithoutQ(Builder, source="SGLang #12295"):
    """Lengths leave out the tokens that seq_lens does not count: draft tokens in verification and drafting."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, cache_seqlens_int32=batch.seq_lens.to(torch.int32))


class DraftStepUncounted(Builder):
    """Lengths of a draft step count the tokens before its own, and not its own."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if batch.spec_info is None or batch.forward_mode.query_rows is not QueryRows.ONE:
            return metadata
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 - 1)


class FrozenDraftCountsItsRow(Builder, source="SGLang 0.5.23, frozen_kv_mtp_cuda_graph_runner.py"):
    """Lengths of a frozen-KV draft count a token of its own, which is not in the cache."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 + int(batch.writes_no_kv))


class RaggedVerifyCountsDraft(Builder):
    """Lengths of a ragged verification count the whole draft of each request, as MLA's do, not its own rows."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if batch.forward_mode.query_rows is not QueryRows.VERIFIED:
            return metadata
        return replace(metadata, cache_seqlens_int32=(batch.seq_lens + metadata.max_seq_len_q).to(torch.int32))


class EncoderOnlyRowsCausal(Builder):
    """A row of an encoder-only layer's verification sees no key after its own."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if metadata.encoder_cache_seqlens is None:
            return metadata
        after = torch.arange(metadata.max_seq_len_q, dtype=torch.int32, device=pool.device).flip(0)
        lens = metadata.encoder_cache_seqlens - after.repeat(batch.batch_size)
        return replace(metadata, encoder_cache_seqlens=lens)


class CuSeqlensKWithoutQ(Builder):
    """cu_seqlens_k sums seq_lens, not the lengths that the kernel is given."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        ends = batch.seq_lens.cumsum(0).to(torch.int32)
        return replace(metadata, cu_seqlens_k=torch.nn.functional.pad(ends, (1, 0)))


class CuSeqlensQOfEqualRows(Builder, source="SGLang #21212"):
    """cu_seqlens_q gives every request max_seq_len_q rows."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        offsets = uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, pool.device)
        return replace(metadata, cu_seqlens_q=offsets)


class NoPrefixListTakenAsOneRowEach(Builder):
    """cu_seqlens_q gives every request of a prefill one row where there is no list of cached prefixes."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if not batch.forward_mode.is_prefill or batch.extend_prefix_lens_cpu is not None:
            return metadata
        return replace(metadata, cu_seqlens_q=torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device))


class MaxSeqLenQOverridden(Builder, source="SGLang #27473"):
    """max_seq_len_q is 1 in verification."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        is_verification = batch.forward_mode.query_rows is QueryRows.DRAFT_TOKENS
        return replace(metadata, max_seq_len_q=1) if is_verification else metadata


class WindowTableUntranslated(Builder, source="SGLang #18970"):
    """The sliding window's page table holds the full pool's pages."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return metadata if metadata.swa_page_table is None else replace(metadata, swa_page_table=metadata.page_table)


class WindowSlotsUntranslated(Builder):
    """swa_out_cache_loc holds the full pool's slots."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if metadata.swa_out_cache_loc is None:
            return metadata
        padding = batch.num_tokens - len(batch.out_cache_loc)
        return replace(metadata, swa_out_cache_loc=torch.nn.functional.pad(batch.out_cache_loc, (0, padding)))


class WindowSlotsOfPaddingRepeated(Builder):
    """Rows of padding write to the window slot of the last token, not to the sink."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        slots, rows = metadata.swa_out_cache_loc, len(batch.out_cache_loc)
        if slots is None or rows == 0:
            return metadata
        padding = slots[rows - 1].expand(len(slots) - rows)
        return replace(metadata, swa_out_cache_loc=torch.cat([slots[:rows], padding]))


class WindowTableMissing(Builder, instead={"swa_page_table": None}):
    """There is no page table for the sliding window."""


class TableTooNarrow(Builder, source="SGLang #24566"):
    """The page table has the columns that seq_lens needs, without the draft tokens."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        width = -(-int(batch.seq_lens.max()) // pool.page_size) if batch.batch_size else 0
        return replace(metadata, page_table=metadata.page_table[:, :width].contiguous())
