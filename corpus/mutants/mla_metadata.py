"""Mutants of the MLA metadata builder."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.mutant import MLA_METADATA, Defective, Memory
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.metadata import DEAD_PAGE, QueryLayout, TRTLLMMLADecodeMetadata, build_mla_decode_metadata


class MLABuilder(Defective, is_model=True, interface=(MLA_METADATA,)):
    """`lab.metadata.build_mla_decode_metadata`, and one change of what it is asked, or of what it built."""

    def build_mla_decode_metadata(
        self, batch: ForwardBatch, pool: KVPool, attention: DraftAttention = DraftAttention.MLA
    ) -> TRTLLMMLADecodeMetadata:
        """As `lab.metadata.build_mla_decode_metadata`."""
        return self.changed(build_mla_decode_metadata(batch, pool, self.counted(attention)), batch, pool)

    def counted(self, attention: DraftAttention) -> DraftAttention:
        return attention

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        return self.misread(metadata, batch, pool)


def with_table(metadata: TRTLLMMLADecodeMetadata, table: Tensor) -> TRTLLMMLADecodeMetadata:
    return replace(metadata, block_kv_indices=table)


class MLADraftCounted(MLABuilder, counted=lambda *_: DraftAttention.MLA_WITH_OFFSET):
    """A draft step counts the drafted tokens where the backend's does not."""


class MLADraftUncounted(MLABuilder, counted=lambda *_: DraftAttention.MLA):
    """A draft step never counts the drafted tokens."""


class MLAVerifyUncounted(MLABuilder):
    """Lengths of a verification leave its rows out."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
            return metadata
        return replace(metadata, seq_lens_k=metadata.seq_lens_k - metadata.max_seq_len_q)


class MLARaggedVerifyCountsItsRows(MLABuilder):
    """Lengths of a ragged verification count each request's own rows, as MHA's do, where its block is the whole draft."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if batch.forward_mode.query_rows is not QueryRows.VERIFIED:
            return metadata
        assert metadata.seq_lens_q is not None
        return replace(metadata, seq_lens_k=(batch.seq_lens + metadata.seq_lens_q).to(torch.int32))


class MLARaggedVerifyAsNarrowAsItsRows(MLABuilder):
    """The block of a ragged verification is as long as the longest request's rows, and the lengths count the draft."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if batch.forward_mode.query_rows is not QueryRows.VERIFIED:
            return metadata
        return replace(metadata, max_seq_len_q=max(batch.extend_seq_lens_cpu or (1,)))


class MLAPaddingUncounted(MLABuilder):
    """Lengths of a padded draft extend leave the padding out: each row sits too far to the left."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if metadata.seq_lens_q is None:
            return metadata
        return replace(metadata, seq_lens_k=metadata.seq_lens_k + metadata.seq_lens_q - metadata.max_seq_len_q)


class MLAUnequalRowsViewed(MLABuilder, source="SGLang 0.5.23"):
    """Rows that divide by the requests are viewed as equally many for each."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        rows = metadata.sum_seq_lens_q
        if rows is None or rows % batch.batch_size:
            return metadata
        assert metadata.seq_lens_q is not None
        width = rows // batch.batch_size
        own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
        return replace(metadata, seq_lens_k=own, max_seq_len_q=width, query_layout=QueryLayout.VIEW)


class MLATailZero(MLABuilder):
    """The block table ends in page 0, not in -1."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        table = metadata.block_kv_indices
        return with_table(metadata, table.masked_fill(table == DEAD_PAGE, 0))


class MLAWidthNotRounded(MLABuilder):
    """The block table is as wide as the longest request's pages."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        longest = int(metadata.seq_lens_k.max()) if batch.batch_size else 0
        return with_table(metadata, metadata.block_kv_indices[:, : -(-longest // pool.page_size)].contiguous())


class MLAWidthWithoutPadding(MLABuilder, source="SGLang 0.5.23"):
    """The block table's width leaves out where padded rows look: next to 4,096 tokens they look after their row."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if metadata.query_layout is QueryLayout.VIEW:
            return metadata
        longest = int(batch.seq_lens.max())
        columns = -(-longest // 4096) * (4096 // pool.page_size)
        return with_table(metadata, metadata.block_kv_indices[:, :columns].contiguous())


class MLATokensAsPages(MLABuilder):
    """The block table holds slots of tokens."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        table = metadata.block_kv_indices
        return with_table(metadata, torch.where(table == DEAD_PAGE, table, table * pool.page_size))


class MLALastPageDead(MLABuilder):
    """A last page that is not full is -1."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        columns = torch.arange(metadata.block_kv_indices.shape[1], device=pool.device)
        full = metadata.seq_lens_k // pool.page_size
        return with_table(metadata, metadata.block_kv_indices.masked_fill(columns >= full[:, None], DEAD_PAGE))


class MLARowsInPoolOrder(
    MLABuilder, instead={"block_kv_indices": lambda metadata, *_: metadata.block_kv_indices.flip(0)}
):
    """The block table's rows are sorted by the pool's rows, and the lengths are not."""


class MLATableReused(Memory, MLABuilder):
    """All passes of a size write one block table."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        table = metadata.block_kv_indices
        return with_table(metadata, self.first(table.shape, lambda: table).copy_(table))


class MLALengthsAreTheBatchs(MLABuilder):
    """Lengths that are the batch's are the batch's own tensor."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        same = torch.equal(metadata.seq_lens_k, batch.seq_lens.to(torch.int32))
        return replace(metadata, seq_lens_k=batch.seq_lens) if same else metadata


class MLABoundariesOfEqualRows(MLABuilder):
    """cu_seqlens_q counts as many rows for every request."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if metadata.cu_seqlens_q is None:
            return metadata
        steps = torch.arange(batch.batch_size + 1, dtype=torch.int32, device=pool.device)
        return replace(metadata, cu_seqlens_q=steps * metadata.max_seq_len_q)


class MLABoundTooSmall(
    MLABuilder, instead={"max_seq_len_k": lambda _, batch, pool: max(1, int(batch.seq_lens.max()) - pool.page_size)}
):
    """max_seq_len_k is that of the batch's lengths, in verification too, and one page less."""


class MLABoundWithoutTheDraft(MLABuilder):
    """max_seq_len_k of a verification leaves its rows out."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
            return metadata
        return replace(metadata, max_seq_len_k=metadata.max_seq_len_k - metadata.max_seq_len_q)


class MLADraftStepsBeyondTwoCountTwo(MLABuilder):
    """From the third draft step on, lengths that count the draft count the second step's tokens."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if batch.spec_info is None or batch.spec_info.speculative_step_id is None:
            return metadata
        counted = metadata.seq_lens_k - batch.seq_lens.to(torch.int32)
        return replace(metadata, seq_lens_k=metadata.seq_lens_k - (counted - 3).clamp(min=0))


class MLARequestsBeyond80Dead(MLABuilder):
    """The block table's rows from the 81st on are -1."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        requests = torch.arange(len(metadata.block_kv_indices), device=pool.device)
        return with_table(metadata, metadata.block_kv_indices.masked_fill(requests[:, None] >= 80, DEAD_PAGE))


class MLAEmptySlotsGetAKey(MLABuilder, instead={"seq_lens_k": lambda metadata, *_: metadata.seq_lens_k.clamp(min=1)}):
    """A length of 0 is 1."""


class MLATableEndsAfterTwoBlocks(MLABuilder):
    """The block table has room for 8,192 tokens of a request at most."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        return with_table(metadata, metadata.block_kv_indices[:, : 8192 // pool.page_size].contiguous())


class MLAMostRowsOfAnyPass(MLABuilder):
    """max_seq_len_q never falls from one pass to the next."""

    most = 0

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        self.most = max(self.most, metadata.max_seq_len_q)
        return replace(metadata, max_seq_len_q=self.most)


class MLATableOfSameLengthsKept(Memory, MLABuilder):
    """A block table is kept for the same requests of the same pool and length, whatever the pool's slots now are."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        key = (pool, *batch.req_pool_indices.tolist(), *metadata.seq_lens_k.tolist())
        return with_table(metadata, self.first(key, metadata.block_kv_indices.clone).clone())


class MLARowsAreTheBatchs(MLABuilder):
    """seq_lens_q is the batch's own tensor, if it is int32 already."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if metadata.seq_lens_q is None or batch.extend_seq_lens is None or batch.extend_seq_lens.dtype != torch.int32:
            return metadata
        return replace(metadata, seq_lens_q=batch.extend_seq_lens)


class MLABoundOfTheContext(MLABuilder):
    """max_seq_len_k is that of the context, also where the host has the lengths."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        return replace(metadata, max_seq_len_k=max(metadata.max_seq_len_k, pool.max_context_len))


class MLADeadRowsAreNotNegative(MLABuilder):
    """The table is -1 only where the request table has a 0: what freed requests left there stays."""

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        width = metadata.block_kv_indices.shape[1]
        left = pool.req_to_token[:, :: pool.page_size].index_select(0, batch.req_pool_indices)[:, :width]
        left = torch.nn.functional.pad(pool.pages(left), (0, width - left.shape[1]))
        is_dead = (metadata.block_kv_indices == DEAD_PAGE) & (left != 0)
        return with_table(metadata, torch.where(is_dead, left, metadata.block_kv_indices))
