"""Mutants of what a call writes, and of what it reads that is nobody's: outputs, inputs, workspace."""

from typing import Any

import torch
from torch import Tensor

from corpus.mutants.mutant import Memory
from corpus.mutants.split_kv import Call, Partials, Rows, RowTile, SplitKV, Workspace
from lab.calls.problem import E4M3, PagedAttention
from lab.calls.workspace import SEMAPHORE_BYTES


class Zeros(SplitKV, mla=True, merged=lambda rows, *_: rows._replace(values=rows.values * 0.0)):
    """The output is zero."""


class NanInOneHead(SplitKV, mla=True, finish=lambda _, problem, out, lse: out[-1:, -1, -1].fill_(torch.nan)):
    """One element of the last head of the last row is NaN."""


class LargeE4m3OutputsNan(SplitKV):
    """An e4m3 output is NaN where 448 is not the nearest: it does not saturate."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        if out.dtype == E4M3:
            rows = rows._replace(values=rows.values.masked_fill(rows.values.abs() > 464, torch.nan))
        super().write(problem, tile, rows, out, lse)


class OneElementZero(SplitKV, finish=lambda _, problem, out, lse: out[:1, 0, 0].fill_(0.0)):
    """One element of one vector is zero."""


class LengthZeroNan(SplitKV, mla=True, source="FlashInfer #2883"):
    """A request without keys has NaN rows."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        if tile.kv_len == 0:
            rows.values.fill_(torch.nan)


class LengthZeroUntouched(SplitKV, mla=True, source="FlashInfer #2883"):
    """The rows of a request without keys are not written."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        if tile.kv_len > 0:
            super().write(problem, tile, rows, out, lse)


class OutRowBeyond(SplitKV, mla=True, source="FlashInfer #3929"):
    """One row is written after the output."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        overwrite(out, out.numel(), out.shape[1:].numel())


class OutRowBefore(SplitKV, mla=True):
    """One row is written before the output."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        row_size = out.shape[1:].numel()
        overwrite(out, -row_size, row_size)


class LseBeyond(SplitKV, mla=True):
    """One value is written after the LSE."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        if lse is not None and lse.is_contiguous():
            overwrite(lse, lse.numel(), 1)


def overwrite(tensor: Tensor, offset: int, count: int) -> None:
    """Write zeros `offset` elements after a tensor's first, as far as its own storage reaches."""
    start = int(tensor.storage_offset()) + offset
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    start, end = max(0, start), min(room, start + count)
    if start < end:
        tensor.as_strided((end - start,), (1,), start).zero_()


class OutIgnored(SplitKV, mla=True, results=lambda results, _: (torch.empty_like(results[0]), results[1])):
    """The result goes to a new tensor, whatever `out` the caller gave."""


class OutDtypeIgnored(SplitKV):
    """The output has the query's dtype, whatever out_dtype says."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        return super().returned(problem, out if problem.out is not None else out.to(problem.query.dtype), lse)


class OutRoundedToE4m3(SplitKV, mla=True, merged=lambda rows, *_: rows._replace(values=rows.values.to(E4M3).float())):
    """The output is rounded to e4m3 on its way."""


class NeedsZeroOut(SplitKV, mla=True, source="FlashInfer #2408"):
    """Results are added to what the output holds."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        held = out[tile.rows].float() if problem.out is not None else torch.zeros_like(rows.values)
        super().write(problem, tile, rows._replace(values=held + rows.values), out, lse)


class QueryScaledInPlace(SplitKV, mla=True):
    """The caller's query is overwritten by its product with bmm1_scale."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        problem.query.copy_((problem.query.float() * problem.bmm1_scale).to(problem.query.dtype))


class SeqLensWritten(SplitKV, mla=True):
    """seq_lens are advanced by one after the call."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        problem.seq_lens.copy_((problem.seq_lens.to(torch.int64) + 1).to(problem.seq_lens.dtype))


class TableTailWritten(SplitKV, mla=True, finish=lambda _, problem, *__: problem.k_block_tables[:, -1:].zero_()):
    """The last column of the page table is overwritten by 0."""


class PageTailCleared(SplitKV, mla=True):
    """The tails of last pages in the V cache are overwritten by zeros before they are read."""

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        used = tile.kv_len % problem.page_size
        if used:
            page = problem.v_block_tables[tile.request, tile.kv_len // problem.page_size]
            problem.v_cache.view(torch.uint8)[int(page), :, used:] = 0
        return super().values(problem, tile, positions)


class SinksOverwritten(SplitKV):
    """The caller's sinks are overwritten by their exponentials."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        if problem.sinks is not None:
            problem.sinks.exp_()


class SinksPadded(SplitKV, source="FlashInfer #4525"):
    """Sinks are read eight at a time, and what lies after the last reaches the sum with a factor of zero."""

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        assert problem.sinks is not None
        room = problem.sinks.untyped_storage().nbytes() // 4 - problem.sinks.storage_offset()
        padded = min(room, -(-problem.num_qo_heads // 8) * 8)
        tail = problem.sinks.as_strided((padded,), (1,))[problem.num_qo_heads :]
        return super().sink_weight(problem, tile, sinks, origin) + (tail * 0.0).sum()


class CountersLeft(SplitKV, mla=True, source="FlashInfer #1643"):
    """The split that arrives last leaves its counter as it is."""

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        counters[index] += tile.num_splits
        return int(counters[index]) % tile.num_splits == 0


class GivenCountersLeft(SplitKV, mla=True):
    """The tiles of several splits count in multi_ctas_kv_counter_buffer too, and leave the count."""

    def launch(self, call: Call) -> Any:
        counters = call.multi_ctas_kv_counter_buffer
        if counters is not None and any(tile.num_splits > 1 for tile in self.tiles(self.problem(call))):
            counters.view(-1)[:1] += 1
        return super().launch(call)


class CountersLeftByOtherShape(SplitKV, mla=True, source="FlashInfer #3465"):
    """A counter is zeroed only after more than one split."""

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        last = super().arrives_last(counters, index, tile)
        counters[index] += tile.num_splits == 1
        return last


class CountersOfFirstCall(Memory, SplitKV, mla=True):
    """As many counters are zeroed as the first call with this workspace had tiles."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        self.zeroed = self.first(workspace.counters.data_ptr(), lambda: len(tiles))
        return workspace

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        last = super().arrives_last(counters, index, tile)
        if last and index >= self.zeroed:
            counters[index] = tile.num_splits
        return last


class ScratchNotCleared(SplitKV, mla=True, source="FlashInfer #1459"):
    """The merge reads one split more than there is and multiplies it by zero."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        self.leftover = float(workspace.scratch[0]) if len(workspace.scratch) and buffer is not None else 0.0
        return workspace

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, lse_log2 = super().merged(problem, tile, partials)
        return Rows(values + 0.0 * self.leftover, lse_log2)


class ScratchAddedTo(SplitKV, mla=True):
    """Sums of weights are added to what the scratch holds."""

    def layout(self, problem: PagedAttention, tile: RowTile, scratch: Tensor) -> Partials:
        partials = super().layout(problem, tile, scratch)
        self.held = partials.total.clone()
        return partials

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        return super().merged(problem, tile, partials._replace(total=partials.total + self.held))

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        if buffer is None:
            workspace.scratch.zero_()
        return workspace


class ScratchInCounters(SplitKV, mla=True, source="vLLM #25520"):
    """Sums of weights lie in the last bytes of the counters' 8 MiB."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        if 4 * len(workspace.counters) == SEMAPHORE_BYTES:
            workspace.counters[-1] = 1
        return workspace


class ScratchBeyondEnd(SplitKV, mla=True):
    """64 bytes after the workspace are written."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        if buffer is not None and buffer.is_contiguous():
            overwrite(buffer, buffer.numel(), 64 // buffer.element_size())
        return super().workspace(buffer, problem, tiles)


class OutputReused(Memory, SplitKV, mla=True, source="SGLang #39175"):
    """Without `out`, results of a shape share one tensor, so that a call overwrites an earlier one's."""

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse = super().results(problem)
        if problem.out is None:
            out = self.first((out.shape, out.dtype, out.device), lambda: out)
        return out, lse


class EmptyBatchUntouched(SplitKV, mla=True):
    """Nothing is written where no request has a key."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        if max(self.kv_lens(problem)) > 0:
            super().write(problem, tile, rows, out, lse)
        else:
            out[tile.rows] = torch.nan  # what memory holds


class ReturnsAnotherTensor(SplitKV):
    """The result is written into out, and what is returned is a new tensor of zeros."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        return super().returned(problem, out if problem.out is None else torch.zeros_like(out), lse)


class LseReturnedUnasked(SplitKV):
    """An lse that is handed out is returned, also without return_lse."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        return super().returned(problem, out, lse) if problem.lse is None else (out, lse)


class NoRowsRefused(SplitKV, mla=True):
    """A batch whose requests have no rows ends in an empty grid."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        if problem.cu_seqlens_q is not None and problem.batch_size and not int(problem.cu_seqlens_q[-1]):
            raise RuntimeError("a grid of no blocks")
        return super().changed(problem)
