"""Mutants that remember something of an earlier call which the next one must not get. Each keeps it on its instance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import DECODE
from lab.checks.mutants.split_kv import Forgiving


class Remembering(Forgiving, is_model=True):
    """Not a mutant: a kernel with a memory of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[Any, Any] = {}

    def first(self, key: Any, value: Callable[[], Any]) -> Any:
        """Return the value that was computed when the key was first seen."""
        if key not in self.memory:
            self.memory[key] = value()
        return self.memory[key]


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


class CachedTensorScale(Remembering, mla=True, source="FlashInfer #4199"):
    """A scale in a tensor is read once: what is written there later has no effect."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        return replace(problem, bmm1_scale=self._once(problem.bmm1_scale), bmm2_scale=self._once(problem.bmm2_scale))

    def _once(self, scale: float | Tensor) -> float | Tensor:
        if not isinstance(scale, Tensor):
            return scale
        kept: Tensor = self.first(scale.data_ptr(), scale.clone)
        return kept


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


class CachedTable(Remembering, mla=True, source="SGLang #26019"):
    """The page table is copied once per tensor: what is written into it later has no effect."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        tables = (problem.k_block_tables, problem.v_block_tables)
        k, v = (self.first((table.data_ptr(), table.shape), table.clone) for table in tables)
        return replace(problem, k_block_tables=k, v_block_tables=k if tables[0] is tables[1] else v)


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
