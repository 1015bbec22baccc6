"""Mutants that remember something of an earlier call which the next one must not get. Each keeps it on its instance."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corpus.mutants.mutant import DECODE, Memory, ReadOnce
from corpus.mutants.split_kv import KEYS_PER_SPLIT, Call, Forgiving, Rows, RowTile, Workspace
from lab.calls import DecodeCall
from lab.calls.problem import PagedAttention


class Remembering(Memory, Forgiving, is_model=True):
    """Not a mutant: a kernel with a memory of earlier calls."""


def shapes(problem: PagedAttention) -> tuple[Any, ...]:
    """Return the key of a cache of plans or graphs."""
    return (problem.query.shape, problem.query.dtype, problem.k_cache.shape, problem.k_cache.dtype, problem.batch_size)


class FieldOfFirst(Remembering, is_model=True):
    """Not a mutant: a field of the first call's problem serves all calls of its shapes."""

    field = ""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        return replace(problem, **{self.field: self.first(shapes(problem), lambda: getattr(problem, self.field))})


class CachedBmm1(FieldOfFirst, mla=True, source="FlashInfer #4014", field="bmm1_scale"):
    """The first call's bmm1_scale serves all calls of its shapes."""


class CachedBmm2(FieldOfFirst, mla=True, source="FlashInfer #4014", field="bmm2_scale"):
    """The first call's bmm2_scale serves all calls of its shapes."""


class PagedReadOnce(ReadOnce, Forgiving, is_model=True):
    """Not a mutant: a tensor is copied when its address is first seen, and the copy serves later calls."""


class CachedTensorScale(PagedReadOnce, mla=True, source="FlashInfer #4199", fields=("bmm1_scale", "bmm2_scale")):
    """A scale in a tensor is read once: what is written there later has no effect."""


class CachedQLen(Remembering, mla=True, interface=(DECODE,), source="FlashInfer #2157"):
    """The number of rows per request is that of the first call with these heads and pages."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        key = (problem.query.shape[1:], problem.query.dtype, problem.k_cache.shape[1:])
        self.q_len = self.first(key, lambda: problem.max_q_len)
        return problem

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return kv_len - self.q_len + min(row, self.q_len - 1)


class CachedWindow(FieldOfFirst, source="SGLang #31501", field="window_left"):
    """The first call's window serves all calls of its shapes."""


class CachedSinks(FieldOfFirst, mla=True, field="sinks"):
    """The first call's sinks, or their absence, serve all calls of its shapes."""


class CachedMask(FieldOfFirst, interface=(DECODE,), field="mask"):
    """The first call's draft mask, or its absence, serves all calls of its shapes."""


class CachedLengths(Remembering, mla=True, source="SGLang #26824"):
    """Lengths are read once per tensor: those written into it later have no effect."""

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        key = (problem.seq_lens.data_ptr(), problem.batch_size)
        lens: list[int] = self.first(key, lambda: problem.seq_lens.tolist())
        return lens


class LengthsReadAhead(CachedLengths, mla=True):
    """With enable_pdl=True lengths are read before the kernel that writes them: they are those of the first call."""

    def problem(self, call: Call) -> PagedAttention:
        self.reads_ahead = call.enable_pdl is True
        return super().problem(call)

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        return super().kv_lens(problem) if self.reads_ahead else Remembering.kv_lens(self, problem)


class CachedTable(PagedReadOnce, mla=True, source="SGLang #26019", fields=("k_block_tables", "v_block_tables")):
    """The page table is copied once per tensor: what is written into it later has no effect."""


class CachedLengthsByShape(Remembering, mla=True):
    """The work of a batch is split by the lengths of the first batch of its shapes: longer requests lose keys."""

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        lens = super().kv_lens(problem)
        planned = self.first(shapes(problem), lambda: lens)
        return [min(pair) for pair in zip(lens, planned, strict=True)]


class CachedKeys(Remembering, mla=True):
    """Dequantised tokens of a page are kept: what is written into the cache later has no effect."""

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        kept: Tensor = self.first((cache.data_ptr(), cache.shape, cache.dtype), cache.clone)
        return super().entries(kept, scale_factors, pages, offsets)


class CachedOffsets(Remembering, source="FlashInfer #4199"):
    """Row offsets are those of the first ragged call with as many rows and requests."""

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        offsets = super().row_offsets(problem)
        kept: list[int] = self.first((problem.num_rows, problem.batch_size), lambda: offsets)
        return kept


class CachedLayout(Remembering, source="FlashInfer #4124"):
    """The strides of the first cache of a shape serve all caches of that shape."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        strides = self.first(problem.k_cache.shape, problem.k_cache.stride)
        if strides[0] != problem.k_cache.stride(0) or strides[0] != problem.v_cache.stride(0):  # outside the memory
            return problem
        k, v = (torch.as_strided(cache, cache.shape, strides) for cache in (problem.k_cache, problem.v_cache))
        return replace(problem, k_cache=k, v_cache=v)


class FrozenSplits(Remembering, mla=True):
    """A grid has the splits of the longest request in the first call with these tensors: keys after them are lost."""

    least = 1

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        longest = self.first(problem.seq_lens.data_ptr(), lambda: max(self.kv_lens(problem)))
        most = max(-(-longest // KEYS_PER_SPLIT), self.least) * KEYS_PER_SPLIT
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return min(start, most), min(end, most)


class FrozenLargeGrid(FrozenSplits, mla=True, least=32):
    """A grid has the splits of the longest request in the first call with these tensors, and 32 at least."""


class FrozenRows(Remembering, mla=True):
    """A grid has as many rows of a request as the first call with these offsets had: rows after them are zero."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        super().write(problem, tile, rows, out, lse)
        if problem.cu_seqlens_q is not None:
            offsets = problem.cu_seqlens_q
            most = self.first(offsets.data_ptr(), lambda: int(offsets.diff().max()))
            before = tile.first_position - (tile.kv_len - tile.q_len)  # rows of the request in earlier tiles
            out[tile.rows][max(most - before, 0) :] = 0


class FrozenRequests(Remembering, mla=True):
    """Requests that were padding in the first call with these tensors, without keys before their rows, stay zero."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        super().write(problem, tile, rows, out, lse)
        lens, offsets = problem.seq_lens, self.row_offsets(problem)
        first: list[int] = self.first(lens.data_ptr(), lens.tolist)
        if len(first) > tile.request and first[tile.request] <= tile.q_len and tile.kv_len > first[tile.request]:
            out[offsets[tile.request] : offsets[tile.request + 1]] = 0


class Bmm2ReadOnce(PagedReadOnce, mla=True, fields=("bmm2_scale",)):
    """A bmm2_scale on the device is read on the host in the first call: what is written there later has no effect."""


class SinksReadOnce(PagedReadOnce, mla=True, fields=("sinks",)):
    """The sinks are copied once per tensor: what is written there later has no effect."""


class MaskReadOnce(PagedReadOnce, interface=(DECODE,), fields=("mask",)):
    """The words of a draft mask are copied once per tensor: what is written there later has no effect."""


class QueryReadOnce(PagedReadOnce, mla=True, fields=("query",)):
    """The query is converted once per tensor: what is written there later has no effect."""


class FactorsReadOnce(PagedReadOnce, fields=("v_scale_factors",)):
    """V's scale factors of an NVFP4 cache are reordered once per tensor: what is written there later has no effect."""


class Log2ScaleReadOnce(Remembering, interface=(DECODE,)):
    """bmm1_scale_log2 is read on the host in the first call: what is written there later has no effect."""

    def problem(self, call: Call) -> PagedAttention:
        assert isinstance(call, DecodeCall)
        scale = call.bmm1_scale_log2
        if scale is None:
            return super().problem(call)
        return super().problem(replace(call, bmm1_scale_log2=self.first(scale.data_ptr(), scale.clone)))


class KeysKeptByLength(Remembering, mla=True):
    """Tokens are gathered once for a page table's pages and a length: what is written into the pages later has no effect."""

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        key = (cache.data_ptr(), cache.shape, tuple(pages.tolist()), tuple(offsets[:1].tolist()))
        kept: Tensor = self.first(
            key, lambda: super(KeysKeptByLength, self).entries(cache, scale_factors, pages, offsets)
        )
        return kept


class TableKeptByLength(CachedTable, mla=True, source="", also_by=lambda _, problem: tuple(problem.seq_lens.tolist())):
    """A copy of the page table serves as long as the lengths are those that it was made for."""


class WorkspaceKept(Remembering, mla=True):
    """Partial results go to the workspace of the first call of a shape, by launch parameters that are kept with it."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        return super().workspace(self.first(shapes(problem), lambda: buffer), problem, tiles)
