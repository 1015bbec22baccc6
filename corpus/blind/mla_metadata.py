"""Blind kernels: metadata of MLA passes."""

from dataclasses import replace

import torch

from corpus.models.metadata import MLABuilder, MLAPrefillBuilder, in_mode
from corpus.wrong import wrong
from lab.metadata import DraftAttention, ForwardMode, QueryLayout, QueryRows, UncountedTokens, build_mla_decode_metadata
from lab.metadata.engine.lengths import exclusive_cumsum, first_slots, num_pages, uniform_boundaries
from lab.metadata.mla.metadata import key_lens, mla_block_table_width


class Built(MLABuilder, stage="changed"):
    def own_keys(self, metadata):
        """Return the keys of each request without its rows of padding."""
        return metadata.seq_lens_k - metadata.max_seq_len_q + metadata.seq_lens_q

    def ended(self, metadata, keys, pool):
        """Return the metadata with -1 in the block table after the pages of these numbers of keys."""
        table = metadata.block_kv_indices
        dead = torch.arange(table.shape[1]) >= num_pages(keys, pool.page_size).unsqueeze(1)
        return replace(metadata, block_kv_indices=table.masked_fill(dead, -1))

    @wrong(trigger="DRAFT_EXTEND or DRAFT_EXTEND_V2 with requests of different rows")
    def blind57(self, metadata, batch, pool):
        """A draft extend with different widths keeps seq_lens as the keys: they lack the rows that pad to the longest."""
        keys = batch.seq_lens.to(torch.int32).clone()
        return replace(metadata, seq_lens_k=keys) if batch.forward_mode.extends_draft else metadata

    @wrong(trigger="a step of MLA_WITH_OFFSET where seq_lens + step + 1 needs a page more than seq_lens")
    def blind60(self, metadata, batch, pool):
        """A step of MLA_WITH_OFFSET lengthens seq_lens_k, but fills the table from seq_lens: a new page is missing."""
        is_step = batch.forward_mode in (ForwardMode.DECODE, ForwardMode.IDLE) and batch.spec_info is not None
        return self.ended(metadata, batch.seq_lens, pool) if is_step else metadata

    @wrong(trigger="TARGET_VERIFY with seq_lens_cpu given: max_seq_len_k is less than a request's keys")
    def blind100(self, metadata, batch, pool):
        """A verification's max_seq_len_k is the longest of seq_lens_cpu without the draft, which the context's bound has."""
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY or not batch.seq_lens_cpu:
            return metadata
        return replace(metadata, max_seq_len_k=max(batch.seq_lens_cpu))

    @wrong(trigger="a verification with lengths on the host, whose draft tokens pass a multiple of 4,096")
    def blind159(self, metadata, batch, pool):
        """With lengths on the host, a verification's block table is wide enough for them alone, without the draft."""
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY or not batch.seq_lens_cpu:
            return metadata
        width = -(-max(batch.seq_lens_cpu) // 4096) * (4096 // pool.page_size)
        return replace(metadata, block_kv_indices=metadata.block_kv_indices[:, :width].contiguous())

    @wrong(where=in_mode(ForwardMode.DRAFT_EXTEND), trigger="different rows, padding past the end of a page")
    def blind160(self, metadata, batch, pool):
        """The block table of a padded draft extend ends with a request's own pages: -1 stands where padded queries look."""
        return self.ended(metadata, self.own_keys(metadata), pool)

    @wrong(trigger="a request of more than 4,096 keys (all modes of the decode kernel)")
    def blind217(self, metadata, batch, pool):
        """The block table is filled by 4,096 tokens; a later block begins at its first page's number, not its first token."""
        table, pages_of_block = metadata.block_kv_indices, 4096 // pool.page_size
        columns = torch.arange(table.shape[1], device=table.device)
        first = columns // pages_of_block * pages_of_block + columns % pages_of_block * pool.page_size
        slots = pool.req_to_token[:, first.clamp(max=pool.max_context_len - 1)].index_select(0, batch.req_pool_indices)
        late = (columns >= pages_of_block) & (table > 0)
        return replace(metadata, block_kv_indices=torch.where(late, pool.pages(slots), table))

    @wrong(trigger="a pool with virtual pages, in DRAFT_EXTEND, DRAFT_EXTEND_V2 or RAGGED_VERIFY")
    def blind218(self, metadata, batch, pool):
        """Where slots are virtual, the block table of a draft extend or a ragged verification has virtual pages."""
        if pool.v2p is None or not batch.forward_mode.query_rows.in_extend_seq_lens:
            return metadata
        table = metadata.block_kv_indices.clone()
        pages = (
            first_slots(batch.req_pool_indices, self.own_keys(metadata), pool)[:, : table.shape[1]] // pool.page_size
        )
        live = table[:, : pages.shape[1]] >= 0
        table[:, : pages.shape[1]] = torch.where(live, pages, -1)
        return replace(metadata, block_kv_indices=table)

    @wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu, none of them all of num_draft_tokens")
    def blind219(self, metadata, batch, pool):
        """The query block of a ragged verification is as long as its longest request, although lengths count whole drafts."""
        if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not batch.extend_seq_lens_cpu:
            return metadata
        return replace(metadata, max_seq_len_q=max(batch.extend_seq_lens_cpu))

    @wrong(trigger="a draft extend of different rows whose sum is a multiple of the requests")
    def blind220(self, metadata, batch, pool):
        """A draft extend is padded where its rows do not divide by its requests; 2 and 4 rows are viewed as 3 and 3."""
        rows = batch.extend_seq_lens_cpu
        if not batch.forward_mode.extends_draft or not rows or sum(rows) % len(rows) or len(set(rows)) == 1:
            return metadata
        keys, width = self.own_keys(metadata), sum(rows) // len(rows)
        metadata = self.ended(metadata, keys, pool)
        return replace(metadata, seq_lens_k=keys, max_seq_len_q=width, query_layout=QueryLayout.VIEW)

    @wrong(trigger="a pool with pages of 64 tokens (all modes of the decode kernel)")
    def blind277(self, metadata, batch, pool):
        """A page's first slot is divided by 32, whatever the page size: with pages of 64 tokens ids are doubled."""
        table = metadata.block_kv_indices
        doubled = torch.where(table > 0, table * (pool.page_size // 32), table)
        return replace(metadata, block_kv_indices=doubled)

    @wrong(trigger="a draft extend of different rows, or RAGGED_VERIFY with fewer rows than num_draft_tokens")
    def blind278(self, metadata, batch, pool):
        """Where queries are padded, cu_seqlens_q counts padded rows, although outputs are copied back by it."""
        ends = uniform_boundaries(batch.batch_size, metadata.max_seq_len_q, batch.seq_lens.device)
        return replace(metadata, cu_seqlens_q=ends) if metadata.query_layout is QueryLayout.PADDED else metadata

    @wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu and num_tokens over its sum", also="blind469")
    def blind279(self, metadata, batch, pool):
        """sum_seq_lens_q of a ragged verification leaves out its rows of padding, so that their output does not become zero."""
        if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or batch.extend_seq_lens_cpu is None:
            return metadata
        return replace(metadata, sum_seq_lens_q=sum(batch.extend_seq_lens_cpu))

    @wrong(trigger="RAGGED_VERIFY with extend_seq_lens_cpu, all the same (one request is enough)")
    def blind280(self, metadata, batch, pool):
        """A ragged verification of equal rows is a view, as a draft extend is, although blocks have num_draft_tokens rows."""
        rows = batch.extend_seq_lens_cpu
        if batch.forward_mode is not ForwardMode.RAGGED_VERIFY or not rows or len(set(rows)) > 1:
            return metadata
        return replace(metadata, query_layout=QueryLayout.VIEW)

    @wrong(trigger="virtual pages, a mode of the decode kernel, and a live virtual page that is mapped to none")
    def blind320(self, metadata, batch, pool):
        """Where slots are virtual, a live page that v2p has none for is -1 in the block table, not the sink."""
        if pool.v2p is None:
            return metadata
        keys = key_lens(batch, self.attention)
        width = min(metadata.block_kv_indices.shape[1], pool.block_table_width)
        page = first_slots(batch.req_pool_indices, keys, pool)[:, :width].long() // pool.page_size
        live = torch.arange(width) < num_pages(keys, pool.page_size).unsqueeze(1)
        none = live & ((page < 0) | (pool.v2p[page.clamp(min=0)] < 0))
        table = metadata.block_kv_indices.clone()
        table[:, :width].masked_fill_(none, -1)
        return replace(metadata, block_kv_indices=table)

    @wrong(only_with="seq_lens_q", trigger="a draft extend or RAGGED_VERIFY with a request of 0 rows")
    def blind349(self, metadata, batch, pool):
        """A request without rows in a draft extend or a ragged verification is counted with one, for a grid's sake."""
        rows = metadata.seq_lens_q.clamp(min=1)
        return replace(metadata, seq_lens_q=rows, cu_seqlens_q=exclusive_cumsum(rows))

    @wrong(trigger="a decode mode, more keys (with padding) than ceil(max_context_len / page_size) pages hold")
    def blind380(self, metadata, batch, pool):
        """Pages of a length above the context are -1 in the block table, as cells after the live pages are, not the sink."""
        table = metadata.block_kv_indices.clone()
        table[:, pool.block_table_width :] = -1
        return replace(metadata, block_kv_indices=table)

    @wrong(trigger="TARGET_VERIFY whose num_draft_tokens is not num_tokens // batch_size")
    def blind410(self, metadata, batch, pool):
        """A verification adds SpecInfo.num_draft_tokens to the lengths, not its rows, num_tokens // batch_size."""
        drafted = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
        if batch.forward_mode is not ForwardMode.TARGET_VERIFY or drafted is None or batch.batch_size == 0:
            return metadata
        more = drafted - batch.num_tokens // batch.batch_size
        keys = (metadata.seq_lens_k + more).to(torch.int32)
        return replace(metadata, seq_lens_k=keys, max_seq_len_k=metadata.max_seq_len_k + more)

    @wrong(trigger="`seq_lens` int32, which the engine changes in place after the metadata was built")
    def blind439(self, metadata, batch, pool):
        """int32 lengths that need no offset are not copied: the metadata follows when the engine counts on."""
        adds = metadata.max_seq_len_q > 1 or metadata.cu_seqlens_q is not None
        adds = adds or (batch.spec_info is not None and self.attention is not DraftAttention.MLA)
        adds = adds or batch.forward_mode is ForwardMode.TARGET_VERIFY
        return metadata if adds or batch.seq_lens.dtype != torch.int32 else replace(metadata, seq_lens_k=batch.seq_lens)

    @wrong(only_with="seq_lens_q", trigger="unequal rows, padding past the end of a last page", also="blind529")
    def blind440(self, metadata, batch, pool):
        """The block table ends with the requests' own pages: pages that only padding rows would read are -1, not the sink."""
        return self.ended(metadata, self.own_keys(metadata), pool)

    @wrong(only_with="seq_lens_q", trigger="int32 extend_seq_lens that are rewritten after the build")
    def blind470(self, metadata, batch, pool):
        """seq_lens_q is extend_seq_lens itself where that is int32: what the engine writes there reaches it."""
        return replace(metadata, seq_lens_q=batch.extend_seq_lens.to(torch.int32))

    @wrong(trigger="a draft extend of unequal rows, longest <= 4,096 k < longest + most rows", also="blind589")
    def blind500(self, metadata, batch, pool):
        """The block table of a padded draft extend is as wide as max_seq_len_k asks for, without room for the padding rows."""
        width = mla_block_table_width(metadata.max_seq_len_k, pool.page_size)
        table = metadata.block_kv_indices[:, :width].contiguous()
        return replace(metadata, block_kv_indices=table) if batch.forward_mode.extends_draft else metadata


class Batches(MLABuilder, stage="build_mla_decode_metadata"):
    @wrong(trigger="DECODE or IDLE with a SpecInfo and attention=MLA_WITH_OFFSET")
    def blind409(self, batch, pool, attention=DraftAttention.MLA):
        """A draft step of MLA_WITH_OFFSET counts the s tokens drafted before it, not its own: seq_lens + s."""
        spec = batch.spec_info
        is_draft = batch.forward_mode.uncounted is UncountedTokens.DRAFT_STEP and spec is not None
        if is_draft and attention is DraftAttention.MLA_WITH_OFFSET and (spec.speculative_step_id or 0) >= 0:
            step = spec.speculative_step_id
            if step == 0:
                attention = DraftAttention.MLA
            elif step is not None:
                batch = replace(batch, spec_info=replace(spec, speculative_step_id=step - 1))
        return build_mla_decode_metadata(batch, pool, attention)

    @wrong(trigger="RAGGED_VERIFY whose longest request has fewer rows than num_draft_tokens")
    def blind559(self, batch, pool, attention=DraftAttention.MLA):
        """The rows of a ragged verification are padded to the batch's longest request, not to SpecInfo.num_draft_tokens."""
        if batch.forward_mode.query_rows is QueryRows.VERIFIED and batch.extend_seq_lens_cpu:
            most = max(1, max(batch.extend_seq_lens_cpu))
            batch = replace(batch, spec_info=replace(batch.spec_info, num_draft_tokens=most))
        return build_mla_decode_metadata(batch, pool, attention)


class Prefills(MLAPrefillBuilder, stage="changed"):
    @wrong(trigger="disable_chunked_prefix_cache=True in a prefill without cached prefixes")
    def blind319(self, metadata, batch, settings):
        """A prefill without the chunked prefix cache falls back whether a request has a cached prefix or not."""
        falls_back = metadata.fallback_to_flashinfer_impl or settings.get("disable_chunked_prefix_cache", False)
        return replace(metadata, fallback_to_flashinfer_impl=falls_back)

    @wrong(trigger="in_prefill_graph=True in a prefill without cached prefixes")
    def blind350(self, metadata, batch, settings):
        """A prefill in a graph falls back to other kernels only where a request has a cached prefix; it should always."""
        falls_back = any(batch.extend_prefix_lens_cpu) and metadata.fallback_to_flashinfer_impl
        return replace(metadata, fallback_to_flashinfer_impl=falls_back)

    @wrong(trigger="a prefill mode with seq_lens_cpu, whose longest request is longer than the most new tokens")
    def blind379(self, metadata, batch, settings):
        """With lengths on the host, a prefill's max_seq_len is the longest of them, not the most new tokens."""
        return replace(metadata, max_seq_len=max(batch.seq_lens_cpu)) if batch.seq_lens_cpu else metadata

    @wrong(trigger="disable_chunked_prefix_cache=True, a cached prefix, but not of the first request")
    def blind560(self, metadata, batch, settings):
        """Without the chunked prefix cache, a prefill falls back by the first request's cached prefix, not by any request's."""
        cached = bool(batch.extend_prefix_lens_cpu) and batch.extend_prefix_lens_cpu[0] > 0
        falls_back = settings.get("in_prefill_graph") or (settings.get("disable_chunked_prefix_cache") and cached)
        return replace(metadata, fallback_to_flashinfer_impl=bool(falls_back))
