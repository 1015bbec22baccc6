"""Mutants of the metadata builders of MLA's decode and prefill."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corpus.models.metadata import MLABuilder, MLAPrefillBuilder, of_rows
from corpus.wrong import wrong
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.lengths import DraftAttention, exclusive_cumsum, uniform_boundaries
from lab.metadata.mla.metadata import DEAD_PAGE, QueryLayout, TRTLLMMLADecodeMetadata, TRTLLMMLAPrefillMetadata


def with_table(metadata: TRTLLMMLADecodeMetadata, table: Tensor) -> TRTLLMMLADecodeMetadata:
    return replace(metadata, block_kv_indices=table)


class MLAMetadata(MLABuilder):
    mla_draft_counted = wrong(counted=lambda *_: DraftAttention.MLA_WITH_OFFSET)(
        "A draft step counts the drafted tokens where the backend's does not."
    )
    mla_draft_uncounted = wrong(counted=lambda *_: DraftAttention.MLA)("A draft step never counts the drafted tokens.")
    mla_verify_uncounted = wrong(
        where=of_rows(QueryRows.DRAFT_TOKENS),
        instead={"seq_lens_k": lambda right, *_: right.seq_lens_k - right.max_seq_len_q},
    )("Lengths of a verification leave its rows out.")
    mla_ragged_verify_counts_its_rows = wrong(
        where=of_rows(QueryRows.VERIFIED),
        instead={"seq_lens_k": lambda right, batch, _: (batch.seq_lens + right.seq_lens_q).to(torch.int32)},
    )(
        "Lengths of a ragged verification count each request's own rows, as MHA's do, where its block is the whole draft."
    )
    mla_ragged_verify_as_narrow_as_its_rows = wrong(
        where=of_rows(QueryRows.VERIFIED),
        instead={"max_seq_len_q": lambda _, batch, __: max(batch.extend_seq_lens_cpu or (1,))},
    )("The block of a ragged verification is as long as the longest request's rows, and the lengths count the draft.")
    mla_padding_uncounted = wrong(
        only_with="seq_lens_q",
        instead={"seq_lens_k": lambda right, *_: right.seq_lens_k + right.seq_lens_q - right.max_seq_len_q},
    )("Lengths of a padded draft extend leave the padding out: each row sits too far to the left.")

    @wrong(stage="changed", source="SGLang 0.5.23")
    def mla_unequal_rows_viewed(self, metadata, batch, pool):
        """Rows that divide by the requests are viewed as equally many for each."""
        rows = metadata.sum_seq_lens_q
        if rows is None or rows % batch.batch_size:
            return metadata
        width = rows // batch.batch_size
        own = metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q
        return replace(metadata, seq_lens_k=own, max_seq_len_q=width, query_layout=QueryLayout.VIEW)

    mla_tail_zero = wrong(instead={"block_kv_indices": lambda right, *_: right.block_kv_indices.clamp(min=0)})(
        "The block table ends in page 0, not in -1."
    )

    @wrong(stage="changed")
    def mla_width_not_rounded(self, metadata, batch, pool):
        """The block table is as wide as the longest request's pages."""
        longest = int(metadata.seq_lens_k.max()) if batch.batch_size else 0
        return with_table(metadata, metadata.block_kv_indices[:, : -(-longest // pool.page_size)].contiguous())

    @wrong(stage="changed", source="SGLang 0.5.23")
    def mla_width_without_padding(self, metadata, batch, pool):
        """The block table's width leaves out where padded rows look: next to 4,096 tokens they look after their row."""
        if metadata.query_layout is QueryLayout.VIEW:
            return metadata
        longest = int(batch.seq_lens.max())
        columns = -(-longest // 4096) * (4096 // pool.page_size)
        return with_table(metadata, metadata.block_kv_indices[:, :columns].contiguous())

    @wrong(stage="changed")
    def mla_tokens_as_pages(self, metadata, batch, pool):
        """The block table holds slots of tokens."""
        table = metadata.block_kv_indices
        return with_table(metadata, torch.where(table == DEAD_PAGE, table, table * pool.page_size))

    @wrong(stage="changed")
    def mla_last_page_dead(self, metadata, batch, pool):
        """A last page that is not full is -1."""
        columns = torch.arange(metadata.block_kv_indices.shape[1], device=pool.device)
        full = metadata.seq_lens_k // pool.page_size
        return with_table(metadata, metadata.block_kv_indices.masked_fill(columns >= full[:, None], DEAD_PAGE))

    mla_rows_in_pool_order = wrong(
        instead={"block_kv_indices": lambda metadata, *_: metadata.block_kv_indices.flip(0)}
    )("The block table's rows are sorted by the pool's rows, and the lengths are not.")

    @wrong(stage="changed")
    def mla_table_reused(self, metadata, batch, pool):
        """All passes of a size write one block table."""
        table = metadata.block_kv_indices
        return with_table(metadata, self.first(table.shape, lambda: table).copy_(table))

    mla_lengths_are_the_batchs = wrong(
        where=lambda right, batch, _: torch.equal(right.seq_lens_k, batch.seq_lens.to(torch.int32)),
        instead={"seq_lens_k": lambda _, batch, __: batch.seq_lens},
    )("Lengths that are the batch's are the batch's own tensor.")
    mla_boundaries_of_equal_rows = wrong(
        only_with="cu_seqlens_q",
        instead={
            "cu_seqlens_q": lambda right, batch, pool: uniform_boundaries(
                batch.batch_size, right.max_seq_len_q, pool.device
            )
        },
    )("cu_seqlens_q counts as many rows for every request.")
    mla_bound_too_small = wrong(
        instead={"max_seq_len_k": lambda _, batch, pool: max(1, int(batch.seq_lens.max()) - pool.page_size)}
    )("max_seq_len_k is that of the batch's lengths, in verification too, and one page less.")
    mla_bound_without_the_draft = wrong(
        where=of_rows(QueryRows.DRAFT_TOKENS),
        instead={"max_seq_len_k": lambda right, *_: right.max_seq_len_k - right.max_seq_len_q},
    )("max_seq_len_k of a verification leaves its rows out.")

    @wrong(stage="changed")
    def mla_draft_steps_beyond_two_count_two(self, metadata, batch, pool):
        """From the third draft step on, lengths that count the draft count the second step's tokens."""
        if batch.spec_info is None or batch.spec_info.speculative_step_id is None:
            return metadata
        counted = metadata.seq_lens_k - batch.seq_lens.to(torch.int32)
        return replace(metadata, seq_lens_k=metadata.seq_lens_k - (counted - 3).clamp(min=0))

    @wrong(stage="changed")
    def mla_requests_beyond80_dead(self, metadata, batch, pool):
        """The block table's rows from the 81st on are -1."""
        requests = torch.arange(len(metadata.block_kv_indices), device=pool.device)
        return with_table(metadata, metadata.block_kv_indices.masked_fill(requests[:, None] >= 80, DEAD_PAGE))

    mla_empty_slots_get_a_key = wrong(instead={"seq_lens_k": lambda metadata, *_: metadata.seq_lens_k.clamp(min=1)})(
        "A length of 0 is 1."
    )
    mla_table_ends_after_two_blocks = wrong(
        instead={"block_kv_indices": lambda right, _, pool: right.block_kv_indices[:, : 8192 // pool.page_size].clone()}
    )("The block table has room for 8,192 tokens of a request at most.")

    @wrong(stage="changed")
    def mla_table_of_same_lengths_kept(self, metadata, batch, pool):
        """A block table is kept for the same requests of the same pool and length, whatever the pool's slots now are."""
        key = (pool, *batch.req_pool_indices.tolist(), *metadata.seq_lens_k.tolist())
        return with_table(metadata, self.first(key, metadata.block_kv_indices.clone).clone())

    mla_rows_are_the_batchs = wrong(
        where=lambda _, batch, __: batch.extend_seq_lens is not None and batch.extend_seq_lens.dtype == torch.int32,
        only_with="seq_lens_q",
        instead={"seq_lens_q": lambda _, batch, __: batch.extend_seq_lens},
    )("seq_lens_q is the batch's own tensor, if it is int32 already.")
    mla_bound_of_the_context = wrong(
        instead={"max_seq_len_k": lambda right, _, pool: max(right.max_seq_len_k, pool.max_context_len)}
    )("max_seq_len_k is that of the context, also where the host has the lengths.")

    @wrong(stage="changed")
    def mla_dead_rows_are_not_negative(self, metadata, batch, pool):
        """The table is -1 only where the request table has a 0: what freed requests left there stays."""
        width = metadata.block_kv_indices.shape[1]
        left = pool.req_to_token[:, :: pool.page_size].index_select(0, batch.req_pool_indices)[:, :width]
        left = torch.nn.functional.pad(pool.pages(left), (0, width - left.shape[1]))
        is_dead = (metadata.block_kv_indices == DEAD_PAGE) & (left != 0)
        return with_table(metadata, torch.where(is_dead, left, metadata.block_kv_indices))

    @wrong(stage="changed")
    def mla_hole_rounded_to_the_sink(self, metadata, batch, pool):
        """Slot -1 is divided by the page size as C divides: it is in page 0, not -1."""
        table, keys = metadata.block_kv_indices, metadata.seq_lens_k
        columns = torch.arange(table.shape[1], device=table.device)
        is_live = columns < torch.ceil(keys / pool.page_size).unsqueeze(1)
        return replace(metadata, block_kv_indices=table.masked_fill(is_live & (table == -1), 0))

    @wrong(stage="counted")
    def mla_attention_of_first_pass(self, attention):
        """Lengths count the draft if they did in the first pass."""
        return self.first("attention", lambda: attention)

    @wrong(stage="changed")
    def mla_lengths_counted_in_place(self, metadata, batch, pool):
        """Lengths are counted in the batch's own tensor, with the draft and all."""
        batch.seq_lens.copy_(metadata.seq_lens_k)
        return metadata


@wrong()
class MLAMostRowsOfAnyPass(MLABuilder):
    """max_seq_len_q never falls from one pass to the next."""

    most = 0

    def changed(self, metadata, batch, pool):
        self.most = max(self.most, metadata.max_seq_len_q)
        return replace(metadata, max_seq_len_q=self.most)


def _of_keys(metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, _: Any) -> TRTLLMMLAPrefillMetadata:
    keys = batch.seq_lens.to(torch.int32)
    return replace(metadata, seq_lens=keys, cum_seq_lens=exclusive_cumsum(keys))


class MLAPrefillMetadata(MLAPrefillBuilder):
    mla_prefill_counts_cached_tokens = wrong(changed=_of_keys)(
        "The lengths of a prefill count the cached prefixes, whose calls are others."
    )
    mla_prefill_maximum_of_first = wrong(
        instead={"max_seq_len": lambda _, batch, __: next(iter(batch.extend_seq_lens_cpu), 0)}
    )("max_seq_len is the first request's.")
    mla_prefill_maximum_of_keys = wrong(instead={"max_seq_len": lambda _, batch, __: max(batch.seq_lens.tolist())})(
        "max_seq_len is the longest request's, with its cached prefix."
    )
    mla_prefill_falls_back_without_prefix = wrong(
        instead={
            "fallback_to_flashinfer_impl": lambda right, _, settings: (
                right.fallback_to_flashinfer_impl or settings["disable_chunked_prefix_cache"]
            )
        }
    )("A prefill without the chunked prefix cache falls back also if no request has a cached prefix.")
    mla_prefill_ignores_its_graph = wrong(
        instead={
            "fallback_to_flashinfer_impl": lambda right, batch, settings: (
                settings["disable_chunked_prefix_cache"] and any(batch.extend_prefix_lens_cpu)
            )
        }
    )("A prefill that is captured in a graph does not fall back.")
    mla_prefill_lengths_of_the_engine = wrong(instead={"seq_lens": lambda _, batch, __: batch.extend_seq_lens})(
        "seq_lens is the engine's own tensor of new lengths, which the next batch is written into."
    )

    @wrong(stage="changed")
    def mla_prefill_offsets_kept(self, metadata, batch, settings):
        """The offsets of the first prefill with so many requests serve all of them."""
        return replace(metadata, cum_seq_lens=self.first(batch.batch_size, metadata.cum_seq_lens.clone))

    @wrong(stage="changed")
    def mla_prefix_taken_from_batch(self, metadata, batch, settings):
        """The cached prefix is subtracted from the batch's own lengths."""
        if batch.extend_seq_lens is not None:
            batch.seq_lens.copy_(batch.extend_seq_lens)
        return metadata
