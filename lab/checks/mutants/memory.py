"""Mutants of what a call writes, and of what it reads that is nobody's: outputs, inputs, workspace."""

from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import mutants_of
from lab.checks.mutants.split_kv import COUNTER_BYTES, Partials, RowTile, SplitKV, Workspace


class Zeros(SplitKV):
    """The output is zero."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        return values * 0.0, lse_log2


class NanInOneHead(SplitKV):
    """One element of the last head of the last row is NaN."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        out[-1:, -1, -1] = torch.nan
        return super().returned(problem, out, lse)


class OneElementZero(SplitKV):
    """One element of one vector is zero."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        out[:1, 0, 0] = 0.0
        return super().returned(problem, out, lse)


class LengthZeroNan(SplitKV):
    """A request without keys has NaN rows."""

    source = "FlashInfer #2883"

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if tile.kv_len == 0:
            values = torch.full_like(values, torch.nan)
        super().write(problem, tile, values, lse_log2, out, lse)


class LengthZeroUntouched(SplitKV):
    """The rows of a request without keys are not written."""

    source = "FlashInfer #2883"

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if tile.kv_len > 0:
            super().write(problem, tile, values, lse_log2, out, lse)


class OutRowBeyond(SplitKV):
    """One row is written after the output."""

    source = "FlashInfer #3929"

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        overwrite(out, out.numel(), row_size(out))
        return super().returned(problem, out, lse)


class OutRowBefore(SplitKV):
    """One row is written before the output."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        overwrite(out, -row_size(out), row_size(out))
        return super().returned(problem, out, lse)


class LseBeyond(SplitKV):
    """One value is written after the LSE."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        if lse is not None and lse.is_contiguous():
            overwrite(lse, lse.numel(), 1)
        return super().returned(problem, out, lse)


def row_size(out: Tensor) -> int:
    return out.shape[1] * out.shape[2]


def overwrite(tensor: Tensor, offset: int, count: int) -> None:
    """Write zeros `offset` elements after a tensor's first, as far as its own storage reaches."""
    start = int(tensor.storage_offset()) + offset
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    start, end = max(0, start), min(room, start + count)
    if start < end:
        tensor.as_strided((end - start,), (1,), start).zero_()


class OutIgnored(SplitKV):
    """The result goes to a new tensor, whatever `out` the caller gave."""

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse = super().results(problem)
        return torch.empty_like(out), lse


class OutDtypeIgnored(SplitKV):
    """The output has the query's dtype, whatever out_dtype says."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        return super().returned(problem, out if problem.out is not None else out.to(problem.query.dtype), lse)


class OutRoundedToE4m3(SplitKV):
    """The output is rounded to e4m3 on its way."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        super().write(problem, tile, values.to(torch.float8_e4m3fn).float(), lse_log2, out, lse)


class NeedsZeroOut(SplitKV):
    """Results are added to what the output holds."""

    source = "FlashInfer #2408"

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        held = out[tile.rows].float() if problem.out is not None else torch.zeros_like(values)
        super().write(problem, tile, held + values, lse_log2, out, lse)


class QueryScaledInPlace(SplitKV):
    """The caller's query is overwritten by its product with bmm1_scale."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        problem.query.copy_((problem.query.float() * problem.bmm1_scale).to(problem.query.dtype))
        return super().returned(problem, out, lse)


class SeqLensWritten(SplitKV):
    """seq_lens are advanced by one after the call."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        problem.seq_lens.copy_((problem.seq_lens.to(torch.int64) + 1).to(problem.seq_lens.dtype))
        return super().returned(problem, out, lse)


class TableTailWritten(SplitKV):
    """The last column of the page table is overwritten by 0."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        problem.k_block_tables[:, -1:] = 0
        return super().returned(problem, out, lse)


class PageTailCleared(SplitKV):
    """The tails of last pages in the V cache are overwritten by zeros before they are read."""

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        used = tile.kv_len % problem.page_size
        if used:
            page = problem.v_block_tables[tile.request, tile.kv_len // problem.page_size]
            problem.v_cache.view(torch.uint8)[int(page), :, used:] = 0
        return super().values(problem, tile, positions)


class SinksOverwritten(SplitKV):
    """The caller's sinks are overwritten by their exponentials."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        if problem.sinks is not None:
            problem.sinks.exp_()
        return super().returned(problem, out, lse)


class SinksPadded(SplitKV):
    """Sinks are read eight at a time, and what lies after the last reaches the sum with a factor of zero."""

    source = "FlashInfer #4525"

    def sink_weight(self, problem: PagedAttention, tile: RowTile, sinks: Tensor, origin: Tensor) -> Tensor:
        assert problem.sinks is not None
        room = problem.sinks.untyped_storage().nbytes() // 4 - problem.sinks.storage_offset()
        padded = min(room, -(-problem.num_qo_heads // 8) * 8)
        tail = problem.sinks.as_strided((padded,), (1,))[problem.num_qo_heads :]
        return super().sink_weight(problem, tile, sinks, origin) + (tail * 0.0).sum()


class CountersLeft(SplitKV):
    """The split that arrives last leaves its counter as it is."""

    source = "FlashInfer #1643"

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        counters[index] += tile.num_splits
        return int(counters[index]) % tile.num_splits == 0


class CountersLeftByOtherShape(SplitKV):
    """A counter is zeroed only after more than one split."""

    source = "FlashInfer #3465"

    def arrives_last(self, counters: Tensor, index: int, tile: RowTile) -> bool:
        last = super().arrives_last(counters, index, tile)
        counters[index] += tile.num_splits == 1
        return last


class ScratchNotCleared(SplitKV):
    """The merge reads one split more than there is and multiplies it by zero."""

    source = "FlashInfer #1459"

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        self.leftover = float(workspace.scratch[0]) if len(workspace.scratch) and buffer is not None else 0.0
        return workspace

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        return values + 0.0 * self.leftover, lse_log2


class ScratchAddedTo(SplitKV):
    """Sums of weights are added to what the scratch holds."""

    def layout(self, problem: PagedAttention, tile: RowTile, scratch: Tensor) -> Partials:
        partials = super().layout(problem, tile, scratch)
        self.held = partials.total.clone()
        return partials

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        return super().merged(problem, tile, partials._replace(total=partials.total + self.held))

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        if buffer is None:
            workspace.scratch.zero_()
        return workspace


class ScratchInCounters(SplitKV):
    """Sums of weights lie in the last bytes of the counters' 8 MiB."""

    source = "vLLM #25520"

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        workspace = super().workspace(buffer, problem, tiles)
        if 4 * len(workspace.counters) == COUNTER_BYTES:
            workspace.counters[-1] = 1
        return workspace


class ScratchBeyondEnd(SplitKV):
    """64 bytes after the workspace are written."""

    def workspace(self, buffer: Tensor | None, problem: PagedAttention, tiles: list[RowTile]) -> Workspace:
        if buffer is not None and buffer.is_contiguous():
            overwrite(buffer, buffer.numel(), 64 // buffer.element_size())
        return super().workspace(buffer, problem, tiles)


class OutputReused(SplitKV):
    """Without `out`, results of a shape share one tensor, so that a call overwrites an earlier one's."""

    source = "SGLang #39175"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Tensor] = {}

    def results(self, problem: PagedAttention) -> tuple[Tensor, Tensor | None]:
        out, lse = super().results(problem)
        if problem.out is None:
            out = self.kept.setdefault((out.shape, out.dtype, out.device), out)
        return out, lse


class EmptyBatchUntouched(SplitKV):
    """Nothing is written where no request has a key."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if max(self.kv_lens(problem)) > 0:
            super().write(problem, tile, values, lse_log2, out, lse)
        else:
            out[tile.rows] = torch.nan  # what memory holds


MUTANTS = mutants_of(__name__)
