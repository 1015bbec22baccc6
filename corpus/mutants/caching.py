"""Mutants that remember something of an earlier call which the next one must not get. Each keeps it on its instance."""

import math
from dataclasses import replace
from typing import Any

import torch

from corpus.models.ragged import PagedReadOnce
from corpus.models.split_kv import KEYS_PER_SPLIT, Forgiving
from corpus.wrong import CONTEXT, DECODE, MLA, wrong
from lab.calls.problem import PagedAttention


def shapes(problem: PagedAttention) -> tuple[Any, ...]:
    """Return the key of a cache of plans or graphs."""
    return (problem.query.shape, problem.query.dtype, problem.k_cache.shape, problem.k_cache.dtype, problem.batch_size)


class FieldOfFirst(Forgiving):
    """A field of the first call's problem serves all calls of its shapes."""

    field = ""

    def changed(self, problem):
        return replace(problem, **{self.field: self.first(shapes(problem), lambda: getattr(problem, self.field))})


class FieldsOfFirst(FieldOfFirst):
    """A field of the first call's problem serves later calls."""

    cached_bmm1 = wrong(mla=True, source="FlashInfer #4014", field="bmm1_scale")(
        "The first call's bmm1_scale serves all calls of its shapes."
    )
    cached_bmm2 = wrong(mla=True, source="FlashInfer #4014", field="bmm2_scale")(
        "The first call's bmm2_scale serves all calls of its shapes."
    )
    cached_window = wrong(source="SGLang #31501", field="window_left")(
        "The first call's window serves all calls of its shapes."
    )
    cached_sinks = wrong(mla=True, field="sinks")(
        "The first call's sinks, or their absence, serve all calls of its shapes."
    )
    cached_mask = wrong(DECODE, field="mask")(
        "The first call's draft mask, or its absence, serves all calls of its shapes."
    )


class TensorsReadOnce(PagedReadOnce):
    cached_tensor_scale = wrong(mla=True, source="FlashInfer #4199", fields=("bmm1_scale", "bmm2_scale"))(
        "A scale in a tensor is read once: what is written there later has no effect."
    )
    bmm2_read_once = wrong(mla=True, fields=("bmm2_scale",))(
        "A bmm2_scale on the device is read on the host in the first call: what is written there later has no effect."
    )
    sinks_read_once = wrong(mla=True, fields=("sinks",))(
        "The sinks are copied once per tensor: what is written there later has no effect."
    )
    mask_read_once = wrong(DECODE, fields=("mask",))(
        "The words of a draft mask are copied once per tensor: what is written there later has no effect."
    )
    query_read_once = wrong(mla=True, fields=("query",))(
        "The query is converted once per tensor: what is written there later has no effect."
    )
    factors_read_once = wrong(fields=("v_scale_factors",))(
        "V's scale factors of an NVFP4 cache are reordered once per tensor: what is written there later has no effect."
    )


class Remembered(Forgiving):
    @wrong(changes="kv_lens", mla=True)
    def cached_lengths_by_shape(self, lens, problem):
        """The work of a batch is split by the lengths of the first batch of its shapes: longer requests lose keys."""
        planned = self.first(shapes(problem), lambda: lens)
        return [min(pair) for pair in zip(lens, planned, strict=True)]

    @wrong(stage="entries", mla=True)
    def cached_keys(self, cache, scale_factors, pages, offsets):
        """Dequantised tokens of a page are kept: what is written into the cache later has no effect."""
        kept = self.first((cache.data_ptr(), cache.shape, cache.dtype), cache.clone)
        return super().entries(kept, scale_factors, pages, offsets)

    @wrong(changes="row_offsets", source="FlashInfer #4199")
    def cached_offsets(self, offsets, problem):
        """Row offsets are those of the first ragged call with as many rows and requests."""
        return self.first((problem.num_rows, problem.batch_size), lambda: offsets)

    @wrong(stage="changed", source="FlashInfer #4124")
    def cached_layout(self, problem):
        """The strides of the first cache of a shape serve all caches of that shape."""
        strides = self.first(problem.k_cache.shape, problem.k_cache.stride)
        if strides[0] != problem.k_cache.stride(0) or strides[0] != problem.v_cache.stride(0):  # outside the memory
            return problem
        k, v = (torch.as_strided(cache, cache.shape, strides) for cache in (problem.k_cache, problem.v_cache))
        return replace(problem, k_cache=k, v_cache=v)

    @wrong(changes="write", mla=True)
    def frozen_rows(self, _, problem, tile, rows, out, lse):
        """A grid has as many rows of a request as the first call with these offsets had: rows after them are zero."""
        if problem.cu_seqlens_q is not None:
            offsets = problem.cu_seqlens_q
            most = self.first(offsets.data_ptr(), lambda: int(offsets.diff().max()))
            before = tile.first_position - (tile.kv_len - tile.q_len)  # rows of the request in earlier tiles
            out[tile.rows][max(most - before, 0) :] = 0

    @wrong(changes="write", mla=True)
    def frozen_requests(self, _, problem, tile, rows, out, lse):
        """Requests that were padding in the first call with these tensors, without keys before their rows, stay zero."""
        lens, offsets = problem.seq_lens, self.row_offsets(problem)
        first = self.first(lens.data_ptr(), lens.tolist)
        if len(first) > tile.request and first[tile.request] <= tile.q_len and tile.kv_len > first[tile.request]:
            out[offsets[tile.request] : offsets[tile.request + 1]] = 0

    @wrong(DECODE, stage="problem")
    def log2_scale_read_once(self, call):
        """bmm1_scale_log2 is read on the host in the first call: what is written there later has no effect."""
        scale = call.bmm1_scale_log2
        if scale is None:
            return super().problem(call)
        return super().problem(replace(call, bmm1_scale_log2=self.first(scale.data_ptr(), scale.clone)))

    @wrong(stage="entries", mla=True)
    def keys_kept_by_length(self, cache, scale_factors, pages, offsets):
        """Tokens are gathered once for a page table's pages and a length: what is written into the pages later has no effect."""
        key = (cache.data_ptr(), cache.shape, tuple(pages.tolist()), tuple(offsets[:1].tolist()))
        return self.first(key, lambda: Forgiving.entries(self, cache, scale_factors, pages, offsets))

    @wrong(stage="workspace", mla=True)
    def workspace_kept(self, buffer, problem, tiles):
        """Partial results go to the workspace of the first call of a shape, by launch parameters that are kept with it."""
        return super().workspace(self.first(shapes(problem), lambda: buffer), problem, tiles)


@wrong(DECODE, mla=True, source="FlashInfer #2157")
class CachedQLen(Forgiving):
    """The number of rows per request is that of the first call with these heads and pages."""

    def changed(self, problem):
        key = (problem.query.shape[1:], problem.query.dtype, problem.k_cache.shape[1:])
        self.q_len = self.first(key, lambda: problem.max_q_len)
        return problem

    def position(self, kv_len, q_len, row):
        return kv_len - self.q_len + min(row, self.q_len - 1)


@wrong(mla=True, source="SGLang #26824")
class CachedLengths(Forgiving):
    """Lengths are read once per tensor: those written into it later have no effect."""

    def kv_lens(self, problem):
        key = (problem.seq_lens.data_ptr(), problem.batch_size)
        return self.first(key, lambda: problem.seq_lens.tolist())


@wrong(mla=True, source="SGLang #26824")
class LengthsReadAhead(CachedLengths):
    """With enable_pdl=True lengths are read before the kernel that writes them: they are those of the first call."""

    def problem(self, call):
        self.reads_ahead = call.enable_pdl is True
        return super().problem(call)

    def kv_lens(self, problem):
        return super().kv_lens(problem) if self.reads_ahead else Forgiving.kv_lens(self, problem)


@wrong(mla=True, source="SGLang #26019")
class CachedTable(PagedReadOnce, fields=("k_block_tables", "v_block_tables")):
    """The page table is copied once per tensor: what is written into it later has no effect."""


@wrong(mla=True)
class FrozenSplits(Forgiving):
    """A grid has the splits of the longest request in the first call with these tensors: keys after them are lost."""

    least = 1

    def key_range(self, problem, first_position, num_rows, kv_len):
        longest = self.first(problem.seq_lens.data_ptr(), lambda: max(self.kv_lens(problem)))
        most = max(-(-longest // KEYS_PER_SPLIT), self.least) * KEYS_PER_SPLIT
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return min(start, most), min(end, most)


@wrong(mla=True)
class FrozenLargeGrid(FrozenSplits, least=32):
    """A grid has the splits of the longest request in the first call with these tensors, and 32 at least."""


@wrong(mla=True)
class TableKeptByLength(CachedTable, also_by=lambda _, problem: tuple(problem.seq_lens.tolist())):
    """A copy of the page table serves as long as the lengths are those that it was made for."""


class Kept(Forgiving):
    @wrong(stage="changed")
    def window_kept_with_table(self, problem):
        """A plan is kept with the page table's address, and its window with it."""
        key = "window", problem.k_block_tables.data_ptr(), problem.k_block_tables.shape
        return replace(problem, window_left=self.first(key, lambda: problem.window_left))

    @wrong(CONTEXT, stage="changed")
    def causal_kept_with_lengths(self, problem):
        """A plan is kept with the lengths' address, and with it whether rows see later keys."""
        return replace(problem, causal=self.first(problem.seq_lens.data_ptr(), lambda: problem.causal))

    @wrong(stage="results", mla=True)
    def out_of_first_call(self, problem):
        """Launch parameters are kept by shape, with the first output that a caller gave."""
        out, lse = super().results(problem)
        return out if problem.out is None else self.first((out.shape, out.dtype), lambda: out), lse

    @wrong(MLA, stage="launch_mla")
    def mla_base_of_first_lse(self, call):
        """The base of each LSE is that of the first one."""
        returned = super().launch(call)
        out, lse = returned if call.return_lse else (returned, None)
        if lse is not None and self.first("base", lambda: call.lse_is_base_e):
            lse *= math.log(2.0)
        return call.returned(out, lse)
