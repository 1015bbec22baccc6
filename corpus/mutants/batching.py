"""Mutants that confuse requests, rows or heads."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.mutant import CONTEXT, DECODE
from corpus.mutants.split_kv import Forgiving, Partials, Rows, RowTile, SplitKV
from lab.calls.problem import PagedAttention


class SecondRequestHasFirstLength(
    Forgiving, mla=True, kv_lens=lambda lens, *_: [*lens[:1], *lens[:1], *lens[2:]][: len(lens)]
):
    """The second request has as many keys as the first."""


class LengthsSorted(Forgiving, mla=True, source="TRT-LLM #18564", kv_lens=lambda lens, *_: sorted(lens)):
    """Requests are sorted by length, and their page tables are not."""


class RequestsRotated(Forgiving, mla=True, source="TRT-LLM #18564", table_row=lambda request, *_: request - 1):
    """Each request reads the page table of the one before it."""


class TableOfFirstRequest(Forgiving, mla=True, source="SGLang #26019", table_row=lambda *_: 0):
    """All requests read the first one's page table."""


class RequestIndexMod8(Forgiving, mla=True, table_row=lambda request, *_: request % 8):
    """Requests from the ninth read the page tables of the first eight."""


class EqualLengthsShareKeys(SplitKV, mla=True):
    """Neighbouring requests of the same length have the same keys."""

    def table_row(self, problem: PagedAttention, tile: RowTile) -> int:
        before = max(tile.request - 1, 0)
        return before if int(problem.seq_lens[before]) == tile.kv_len else tile.request


class RowsReversed(SplitKV, mla=True, merged=lambda rows, *_: Rows(*(side.flip(0) for side in rows))):
    """The rows of a request are written in reverse order."""


class OddRowCountsMisplaced(SplitKV, mla=True, source="FlashInfer #3929"):
    """Rows of a request are written one place off where their number is no power of two."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        rows = super().merged(problem, tile, partials)
        return Rows(*(side.roll(1, dims=0) for side in rows)) if tile.q_len & (tile.q_len - 1) else rows


class LastRowOfEightLost(SplitKV, mla=True, finish_tile=lambda _, problem, tile, rows: rows.values[7:8].zero_()):
    """The eighth row of a request is zero."""


class HeadsSwapped(SplitKV, mla=True):
    """The last two query heads are exchanged in the output."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        for side in rows:
            side[:, -2:] = side[:, -2:].flip(1)


class HeadsInterleaved(
    SplitKV, kv_heads=lambda heads, problem: torch.arange(len(heads), device=heads.device) % problem.num_kv_heads
):
    """Query head h reads K/V head h % num_kv_heads."""


class OddGroupsMisread(SplitKV, source="FlashInfer #4095"):
    """A group that is no power of two is taken for the next larger one when the K/V head is computed."""

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        group = problem.num_qo_heads // problem.num_kv_heads
        return torch.arange(problem.num_qo_heads, device=problem.query.device) // 2 ** (group - 1).bit_length()


class LargeGroupsMisread(SplitKV, source="FlashInfer #2380"):
    """Query heads of a group are taken eight at a time: the others read the next K/V head."""

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        group = min(8, problem.num_qo_heads // problem.num_kv_heads)
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return (heads // group).clamp(max=problem.num_kv_heads - 1)


class MhaMisread(
    SplitKV,
    source="FlashInfer #4095",
    kv_heads=lambda heads, problem: heads * 0 if problem.num_qo_heads == problem.num_kv_heads else heads,
):
    """If every query head has a K/V head of its own, all read the first."""


class RaggedRowsIgnored(SplitKV, mla=True, source="FlashInfer #3929"):
    """cum_seq_lens_q is ignored: all requests are taken to have as many rows."""

    def row_offsets(self, problem: PagedAttention) -> list[int]:
        end = super().row_offsets(problem)[-1]
        return [end * request // max(problem.batch_size, 1) for request in range(problem.batch_size)] + [end]


class PaddedRowsAreRequestRows(SplitKV, mla=True, source="SGLang #21212"):
    """Every request has max_q_len rows when its rows' positions are computed."""

    def tile(
        self, problem: PagedAttention, request: int, kv_len: int, q_len: int, request_row: int, row: int
    ) -> RowTile:
        tile = super().tile(problem, request, kv_len, q_len, request_row, row)
        first = self.position(kv_len, problem.max_q_len, row - request_row)
        start, end = self.key_range(problem, first, tile.num_rows, kv_len)
        return replace(tile, first_position=first, key_start=start, key_end=end)


class CumKvIsLength(Forgiving, interface=(CONTEXT,)):
    """A request's keys are counted from the batch's first key: cum_seq_lens_kv[r + 1] is taken for its length."""

    def kv_lens(self, problem: PagedAttention) -> list[int]:
        assert problem.cu_seqlens_kv is not None
        widest = problem.k_block_tables.shape[1] * problem.page_size
        return [min(end, widest) for end in problem.cu_seqlens_kv[1:].tolist()]


class PrefixLost(
    SplitKV, interface=(CONTEXT,), visible=lambda visible, _, tile, keys: visible & (keys >= tile.kv_len - tile.q_len)
):
    """A context call reads the new tokens' keys alone, not those of the prefix before them."""


class PrefixFreeBatchUncausal(SplitKV, interface=(CONTEXT,)):
    """A request without a prefix has no causal mask."""

    def tile(
        self, problem: PagedAttention, request: int, kv_len: int, q_len: int, request_row: int, row: int
    ) -> RowTile:
        tile = super().tile(problem, request, kv_len, q_len, request_row, row)
        return replace(tile, key_end=kv_len) if kv_len == q_len else tile

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return super().visible(problem if tile.kv_len > tile.q_len else replace(problem, causal=False), tile, keys)


class RequestsBeyond32Wrap(Forgiving, mla=True, table_row=lambda request, *_: request % 32):
    """A batch's tables are looked up 32 at a time, each time the first 32."""


class RequestsBeyond128Wrap(Forgiving, table_row=lambda request, *_: request % 128):
    """A batch's tables are looked up 128 at a time, each time the first 128."""


class LastRowOfFilledTileLost(SplitKV, interface=(DECODE,)):
    """If 30 of a tile's 32 places are rows of a group, the group's last head loses its last row."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        group = problem.num_qo_heads // problem.num_kv_heads
        if group == 6 and tile.q_len == 5:
            rows.values[-1, group - 1 :: group] = 0.0


class EmptyRowsShiftTables(SplitKV, interface=(CONTEXT,)):
    """If a request has no query rows, those after it read the table of the one before."""

    def tiles(self, problem: PagedAttention) -> list[RowTile]:
        offsets = self.row_offsets(problem)
        without = [request for request in range(problem.batch_size) if offsets[request] == offsets[request + 1]]
        tiles = super().tiles(problem)
        return [replace(tile, request=tile.request - sum(each < tile.request for each in without)) for tile in tiles]


class OtherRowsTimesZero(SplitKV, mla=True):
    """All rows of the batch take part in each, those of others with a weight of zero, which keeps all of a NaN."""

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        out += 0.0 * problem.query.float().sum()
