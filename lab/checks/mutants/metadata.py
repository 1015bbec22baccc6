"""Mutants of the metadata builder."""

from dataclasses import replace

import torch
from torch import Tensor

from lab.checks.mutants.mutant import MHA_METADATA, Defective, Memory
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import first_slots, uncounted_tokens
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


class BufferShared(Builder):
    """Batches of a size share one tensor of lengths, so that a call overwrites an earlier one's."""

    def __init__(self) -> None:
        self.buffers: dict[int, Tensor] = {}

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        lens = metadata.cache_seqlens_int32
        buffer = self.buffers.setdefault(len(lens), lens)
        return replace(metadata, cache_seqlens_int32=buffer.copy_(lens))


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
        steps = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device)
        return replace(metadata, cu_seqlens_q=steps * metadata.max_seq_len_q)


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


class OffsetsOfLargeBatchStop(Builder):
    """cu_seqlens_q stops rising after the 32nd request."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        offsets = metadata.cu_seqlens_q
        return replace(metadata, cu_seqlens_q=offsets.clamp(max=int(offsets[: 32 + 1][-1])))


class ColumnsBeyond256Zero(Builder):
    """Columns of the page table from the 257th on are zero."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        columns = torch.arange(metadata.page_table.shape[1], device=pool.device)
        return replace(metadata, page_table=metadata.page_table.masked_fill(columns >= 256, 0))


class LengthsCapped(
    Builder, instead={"cache_seqlens_int32": lambda metadata, *_: metadata.cache_seqlens_int32.clamp(max=4096)}
):
    """Lengths end at 4,096."""


class MostRowsOfAnyPass(Builder):
    """max_seq_len_q never falls from one pass to the next."""

    most = 0

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        self.most = max(self.most, metadata.max_seq_len_q)
        return replace(metadata, max_seq_len_q=self.most)


class WindowHoleTakenAsSlot(Builder):
    """A window map's -1 is the last page of the window's pool."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        table = metadata.swa_page_table
        if table is None or pool.swa_num_pages is None:
            return metadata
        return replace(metadata, swa_page_table=torch.where(table < 0, pool.swa_num_pages - 1, table))


class TableOfSameLengthsKept(Memory, Builder):
    """A page table is kept for the same requests of the same pool and length, whatever the pool's slots now are."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        key = (pool, *batch.req_pool_indices.tolist(), *metadata.cache_seqlens_int32.tolist())
        return replace(metadata, page_table=self.first(key, metadata.page_table.clone).clone())


class WindowMapOfFirstPool(Memory, Builder):
    """The window's map is that of the first pool that was seen."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if pool.full_to_swa is None:
            return metadata
        first = self.first("map", pool.full_to_swa.clone)
        slots = (metadata.page_table.to(torch.int64) * pool.page_size).clamp(max=len(first) - 1)
        return replace(metadata, swa_page_table=(first[slots] // pool.page_size).to(torch.int32))


class VirtualPagesLeft(Builder):
    """The page table of virtual slots has the pages that they name, and not those of the cache."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if pool.v2p is None:
            return metadata
        slots = first_slots(batch.req_pool_indices, metadata.cache_seqlens_int32, pool)
        return replace(metadata, page_table=(slots // pool.page_size).to(torch.int32))


class WindowPagesOfPhysicalSlots(Builder):
    """Where slots are virtual, a window's pages are looked up by where the slots lie in the full pool."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if pool.v2p is None or metadata.swa_page_table is None:
            return metadata
        slots = metadata.page_table.to(torch.int64) * pool.page_size
        return replace(metadata, swa_page_table=(pool.swa_slots(slots) // pool.page_size).to(torch.int32))


class EmptySlotsGetAKey(
    Builder, instead={"cache_seqlens_int32": lambda metadata, *_: metadata.cache_seqlens_int32.clamp(min=1)}
):
    """A length of 0 is 1."""


class DivisibleRowsTakenAsEqual(Builder):
    """Rows that divide by the requests are taken as equally many for each."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        rows = sum(batch.extend_seq_lens_cpu or (1,))
        if batch.batch_size == 0 or batch.extend_seq_lens_cpu is None or rows % batch.batch_size:
            return metadata
        offsets = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device)
        return replace(metadata, cu_seqlens_q=offsets * (rows // batch.batch_size))


class RequestsBeyond80Pageless(Builder):
    """The page table's rows from the 81st on are zero."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        requests = torch.arange(len(metadata.page_table), device=pool.device)
        return replace(metadata, page_table=metadata.page_table.masked_fill(requests[:, None] >= 80, 0))


class IdlePassWithoutRows(Builder):
    """max_seq_len_q of an idle pass is 0."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, max_seq_len_q=0) if batch.forward_mode.name == "IDLE" else metadata


class SplitPrefillWithoutPrefix(Builder):
    """Lengths of a split prefill leave the cached prefix out."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if batch.forward_mode.name != "SPLIT_PREFILL" or batch.extend_seq_lens is None:
            return metadata
        return replace(metadata, cache_seqlens_int32=batch.extend_seq_lens.to(torch.int32))


class PagesOf256TakenAs128(Builder):
    """Pages of 256 tokens are numbered as if they held 128."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, page_table=metadata.page_table * 2) if pool.page_size == 256 else metadata


class DraftStepsBeyondTwoCountTwo(Builder):
    """From the third draft step on, lengths count the second's tokens."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        step = (batch.spec_info.speculative_step_id if batch.spec_info else None) or 0
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32 - max(0, step - 2))


class MostRowsOfHostLengths(Builder):
    """max_seq_len_q of a prefill whose lengths are on the host is the longest of them, cached tokens and all."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if not batch.forward_mode.is_prefill or not batch.seq_lens_cpu:
            return metadata
        return replace(metadata, max_seq_len_q=max(batch.seq_lens_cpu))


class PageIdsOf16Bits(Builder, instead={"page_table": lambda metadata, *_: metadata.page_table & 0xFFFF}):
    """The page table's ids have 16 bits."""


class UnknownRowsDealtEvenly(Builder):
    """Of a ragged verification whose rows the host does not know, max_seq_len_q is their mean."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if batch.forward_mode.query_rows is not QueryRows.VERIFIED or batch.extend_seq_lens_cpu is not None:
            return metadata
        return replace(metadata, max_seq_len_q=batch.num_tokens // batch.batch_size)


class DeadCellsLeft(Builder):
    """Cells after a request's pages name what freed requests left in its row of the pool."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        slots = pool.req_to_token[:, :: pool.page_size].index_select(0, batch.req_pool_indices)
        return replace(metadata, page_table=pool.pages(slots))


class TableRowsApart(
    Builder,
    instead={"page_table": lambda metadata, *_: torch.nn.functional.pad(metadata.page_table, (0, 3))[:, :-3]},
):
    """The page table's rows lie three cells apart."""


class LengthsEndAtTheContext(Builder):
    """A length above the context is the context's."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return replace(metadata, cache_seqlens_int32=metadata.cache_seqlens_int32.clamp(max=pool.max_context_len))


class VerifyCountsTheDraft(Builder):
    """Lengths of a verification count the draft of the SpecInfo, not the rows that the pass has."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS or batch.spec_info is None:
            return metadata
        draft = batch.spec_info.num_draft_tokens or 0
        return replace(metadata, cache_seqlens_int32=(batch.seq_lens + draft).to(torch.int32))


class RowsAreTheAcceptedTokens(Builder):
    """An eager draft extend has the rows that a graph's replay reads, num_accept_tokens."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        accepted = None if batch.spec_info is None else batch.spec_info.num_accept_tokens
        if batch.forward_mode.query_rows is not QueryRows.ACCEPTED or accepted is None:
            return metadata
        rows = accepted[: batch.batch_size].to(torch.int32)
        ends = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).to(torch.int32)
        return replace(metadata, cu_seqlens_q=ends)


class EncoderRowsBeyond200Pageless(Builder):
    """The table of an encoder-only layer's rows is zero from the 201st row on."""

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        if metadata.encoder_page_table is None:
            return metadata
        rows = torch.arange(len(metadata.encoder_page_table), device=pool.device)
        return replace(metadata, encoder_page_table=metadata.encoder_page_table.masked_fill(rows[:, None] >= 200, 0))
