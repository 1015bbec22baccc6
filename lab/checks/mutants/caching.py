"""Mutants that remember something of an earlier call which the next one must not get. Each keeps it on its instance."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import DECODE, mutants_of
from lab.checks.mutants.split_kv import Call, Forgiving


class Remembering(Forgiving):
    """Not a mutant: has a memory."""

    is_model = True

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


class CachedBmm1(Remembering):
    """The first call's bmm1_scale serves all calls of its shapes."""

    source = "FlashInfer #4014"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, bmm1_scale=self.first(shapes(problem), lambda: problem.bmm1_scale))


class CachedBmm2(Remembering):
    """The first call's bmm2_scale serves all calls of its shapes."""

    source = "FlashInfer #4014"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, bmm2_scale=self.first(shapes(problem), lambda: problem.bmm2_scale))


class CachedTensorScale(Remembering):
    """A scale in a tensor is read once: what is written there later has no effect."""

    source = "FlashInfer #4199"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, bmm1_scale=self._once(problem.bmm1_scale), bmm2_scale=self._once(problem.bmm2_scale))

    def _once(self, scale: float | Tensor) -> float | Tensor:
        if not isinstance(scale, Tensor):
            return scale
        kept: Tensor = self.first(scale.data_ptr(), scale.clone)
        return kept


class CachedQLen(Remembering):
    """The number of rows per request is that of the first call with these heads and pages."""

    source = "FlashInfer #2157"
    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        key = (problem.query.shape[1:], problem.query.dtype, problem.k_cache.shape[1:])
        self.q_len = self.first(key, lambda: problem.max_q_len)
        return problem

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return kv_len - self.q_len + min(row, self.q_len - 1)


class CachedWindow(Remembering):
    """The first call's window serves all calls of its shapes."""

    source = "SGLang #31501"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, window_left=self.first(shapes(problem), lambda: problem.window_left))


class CachedSinks(Remembering):
    """The first call's sinks, or their absence, serve all calls of its shapes."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, sinks=self.first(shapes(problem), lambda: problem.sinks))


class CachedMask(Remembering):
    """The first call's draft mask, or its absence, serves all calls of its shapes."""

    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, mask=self.first(shapes(problem), lambda: problem.mask))


class CachedLengths(Remembering):
    """Lengths are read once per tensor: those written into it later have no effect."""

    source = "SGLang #26824"

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        key = (problem.seq_lens.data_ptr(), problem.batch_size)
        lens: list[int] = self.first(key, lambda: problem.seq_lens.tolist())
        return lens


class CachedTable(Remembering):
    """The page table is copied once per tensor: what is written into it later has no effect."""

    source = "SGLang #26019"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        tables = (problem.k_block_tables, problem.v_block_tables)
        k, v = (self.first((table.data_ptr(), table.shape), table.clone) for table in tables)
        return replace(problem, k_block_tables=k, v_block_tables=k if tables[0] is tables[1] else v)


class CachedLengthsByShape(Remembering):
    """The work of a batch is split by the lengths of the first batch of its shapes: longer requests lose keys."""

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        lens = super().kv_lens(problem)
        planned = self.first(shapes(problem), lambda: lens)
        return [min(pair) for pair in zip(lens, planned, strict=True)]


class CachedKeys(Remembering):
    """Dequantised tokens of a page are kept: what is written into the cache later has no effect."""

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        kept: Tensor = self.first((cache.data_ptr(), cache.shape, cache.dtype), cache.clone)
        return super().entries(kept, scale_factors, pages, offsets)


class CachedOffsets(Remembering):
    """Row offsets are those of the first ragged call with as many rows and requests."""

    source = "FlashInfer #4199"

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        offsets = super().row_offsets(problem)
        kept: list[int] = self.first((problem.num_rows, problem.batch_size), lambda: offsets)
        return kept


class CachedLayout(Remembering):
    """The strides of the first cache of a shape serve all caches of that shape."""

    source = "FlashInfer #4124"

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        strides = self.first(problem.k_cache.shape, problem.k_cache.stride)
        if strides[0] != problem.k_cache.stride(0) or strides[0] != problem.v_cache.stride(0):  # outside the memory
            return problem
        k, v = (torch.as_strided(cache, cache.shape, strides) for cache in (problem.k_cache, problem.v_cache))
        return replace(problem, k_cache=k, v_cache=v)


MUTANTS = mutants_of(__name__)
