"""Mutants that confuse requests, rows or heads."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import CONTEXT, DECODE, mutants_of
from lab.checks.mutants.split_kv import Forgiving, RowTile, SplitKV


class SecondRequestHasFirstLength(Forgiving):
    """The second request has as many keys as the first."""

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        lens = super().kv_lens(problem)
        return [*lens[:1], *lens[:1], *lens[2:]][: len(lens)]


class LengthsSorted(Forgiving):
    """Requests are sorted by length, and their page tables are not."""

    source = "TRT-LLM #18564"

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        return sorted(super().kv_lens(problem))


class RequestsRotated(Forgiving):
    """Each request reads the page table of the one before it."""

    source = "TRT-LLM #18564"

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, replace(tile, request=tile.request - 1), positions)


class TableOfFirstRequest(Forgiving):
    """All requests read the first one's page table."""

    source = "SGLang #26019"

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, replace(tile, request=0), positions)


class RequestIndexMod8(Forgiving):
    """Requests from the ninth read the page tables of the first eight."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, replace(tile, request=tile.request % 8), positions)


class EqualLengthsShareKeys(SplitKV):
    """Neighbouring requests of the same length have the same keys."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        before = max(tile.request - 1, 0)
        same = int(problem.seq_lens[before]) == tile.kv_len
        return super().pages(problem, table, replace(tile, request=before if same else tile.request), positions)


class RowsReversed(SplitKV):
    """The rows of a request are written in reverse order."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        super().write(problem, tile, values.flip(0), lse_log2.flip(0), out, lse)


class OddRowCountsMisplaced(SplitKV):
    """Rows of a request are written one place off where their number is no power of two."""

    source = "FlashInfer #3929"

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if tile.q_len & (tile.q_len - 1):
            values, lse_log2 = values.roll(1, dims=0), lse_log2.roll(1, dims=0)
        super().write(problem, tile, values, lse_log2, out, lse)


class LastRowOfEightLost(SplitKV):
    """The eighth row of a request is zero."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if tile.num_rows >= 8:
            values[7] = 0.0
        super().write(problem, tile, values, lse_log2, out, lse)


class HeadsSwapped(SplitKV):
    """The last two query heads are exchanged in the output."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        heads = [*range(problem.num_qo_heads)]
        heads[-2:] = heads[-2:][::-1]
        super().write(problem, tile, values[:, heads], lse_log2[:, heads], out, lse)


class HeadsInterleaved(SplitKV):
    """Query head h reads K/V head h % num_kv_heads."""

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        return torch.arange(problem.num_qo_heads, device=problem.query.device) % problem.num_kv_heads


class OddGroupsMisread(SplitKV):
    """A group that is no power of two is taken for the next larger one when the K/V head is computed."""

    source = "FlashInfer #4095"

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        group = problem.num_qo_heads // problem.num_kv_heads
        return torch.arange(problem.num_qo_heads, device=problem.query.device) // 2 ** (group - 1).bit_length()


class LargeGroupsMisread(SplitKV):
    """Query heads of a group are taken eight at a time: the others read the next K/V head."""

    source = "FlashInfer #2380"

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        group = min(8, problem.num_qo_heads // problem.num_kv_heads)
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return (heads // group).clamp(max=problem.num_kv_heads - 1)


class MhaMisread(SplitKV):
    """If every query head has a K/V head of its own, all read the first."""

    source = "FlashInfer #4095"

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        heads = super().kv_heads(problem)
        return heads * 0 if problem.num_qo_heads == problem.num_kv_heads else heads


class RaggedRowsIgnored(SplitKV):
    """cum_seq_lens_q is ignored: all requests are taken to have as many rows."""

    source = "FlashInfer #3929"

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        end = super().row_offsets(problem)[-1]
        return [end * request // max(problem.batch_size, 1) for request in range(problem.batch_size)] + [end]


class PaddedRowsAreRequestRows(SplitKV):
    """Every request has max_q_len rows when its rows' positions are computed."""

    source = "SGLang #21212"

    def tile(
        self, problem: PagedAttention, request: int, kv_len: int, q_len: int, request_row: int, row: int
    ) -> RowTile:
        tile = super().tile(problem, request, kv_len, q_len, request_row, row)
        first = self.position(kv_len, problem.max_q_len, row - request_row)
        start, end = self.key_range(problem, first, tile.num_rows, kv_len)
        return replace(tile, first_position=first, key_start=start, key_end=end)


class CumKvIsLength(Forgiving):
    """A request's keys are counted from the batch's first key: cum_seq_lens_kv[r + 1] is taken for its length."""

    interface = (CONTEXT,)

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        assert problem.cu_seqlens_kv is not None
        widest = problem.k_block_tables.shape[1] * problem.page_size
        return [min(end, widest) for end in problem.cu_seqlens_kv[1:].tolist()]


class PrefixLost(SplitKV):
    """A context call reads the new tokens' keys alone, not those of the prefix before them."""

    interface = (CONTEXT,)

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return super().visible(problem, tile, keys) & (keys >= tile.kv_len - tile.q_len)


class PrefixFreeBatchUncausal(SplitKV):
    """A request without a prefix has no causal mask."""

    interface = (CONTEXT,)

    def tile(
        self, problem: PagedAttention, request: int, kv_len: int, q_len: int, request_row: int, row: int
    ) -> RowTile:
        tile = super().tile(problem, request, kv_len, q_len, request_row, row)
        return replace(tile, key_end=kv_len) if kv_len == q_len else tile

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return super().visible(problem if tile.kv_len > tile.q_len else replace(problem, causal=False), tile, keys)


class RequestsBeyond32Wrap(Forgiving):
    """A batch's tables are looked up 32 at a time, each time the first 32."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, replace(tile, request=tile.request % 32), positions)


class RequestsBeyond128Wrap(Forgiving):
    """A batch's tables are looked up 128 at a time, each time the first 128."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, replace(tile, request=tile.request % 128), positions)


class LastRowOfFilledTileLost(SplitKV):
    """If 30 of a tile's 32 places are rows of a group, the group's last head loses its last row."""

    interface = (DECODE,)

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        group = problem.num_qo_heads // problem.num_kv_heads
        if group == 6 and tile.q_len == 5:
            values[-1, group - 1 :: group] = 0.0
        super().write(problem, tile, values, lse_log2, out, lse)


class EmptyRowsShiftTables(SplitKV):
    """If a request has no query rows, those after it read the table of the one before."""

    interface = (CONTEXT,)

    def tiles(self, problem: PagedAttention) -> list[RowTile]:
        offsets = self.row_offsets(problem)
        without = [request for request in range(problem.batch_size) if offsets[request] == offsets[request + 1]]
        tiles = super().tiles(problem)
        return [replace(tile, request=tile.request - sum(each < tile.request for each in without)) for tile in tiles]


class OtherRowsTimesZero(SplitKV):
    """All rows of the batch take part in each, those of others with a weight of zero, which keeps all of a NaN."""

    def returned(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> Any:
        out += 0.0 * problem.query.float().sum()
        return super().returned(problem, out, lse)


MUTANTS = mutants_of(__name__)
