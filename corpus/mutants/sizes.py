"""Mutants that are wrong from a size on: of requests, of batches, of groups, heads, pages, tables and rows."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.conditional import Conditional
from corpus.mutants.masks import MaskBeyondFirstWordIgnored
from corpus.mutants.mutant import CONTEXT, DECODE, MLA_DECODE
from corpus.mutants.pages import WideTableRowsOf1024
from corpus.mutants.split_kv import KEYS_PER_SPLIT, Partials, Rows, RowTile
from lab.calls.problem import E4M3, PagedAttention

LONG = 4096

# Long requests.


class MiddleOfLongLost(Conditional, mla=True):
    """Of more than 64 splits, the one in the middle is not merged."""

    def shares(self, partials: Partials, origin: Tensor) -> Tensor:
        shares = super().shares(partials, origin)
        if shares.shape[-1] > 64:
            shares[..., shares.shape[-1] // 2] = 0.0
        return shares


class TileCounterInt8(Conditional, mla=True):
    """Tiles of 64 keys are counted in 7 bits: keys after the 8,192nd are read from a request's start again."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        return super().pages(problem, table, tile, positions % (128 * KEYS_PER_SPLIT))


class WindowIgnoredBeyond4096(Conditional):
    """A window is ignored in requests of more than 4,096 keys."""

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start if kv_len <= LONG else 0, end

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        seen = super().in_window(problem, tile, rows, keys)
        return seen if tile.kv_len <= LONG else torch.ones_like(seen)


class GroupOfLongMixed(Conditional):
    """In requests of more than 4,096 keys, the query heads of a group are exchanged."""

    def is_mixed(self, problem: PagedAttention, tile: RowTile) -> bool:
        """Tell whether the heads of a tile are exchanged."""
        return tile.kv_len > LONG

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        query = super().query_rows(problem, tile)
        if not self.is_mixed(problem, tile):
            return query
        return query.unflatten(0, (problem.num_kv_heads, -1)).flip(1).flatten(0, 1)


class SinkPerSplitOfLong(
    Conditional,
    mla=True,
    sink_weight=lambda weight, _, tile, *__: weight * (tile.num_splits if tile.num_splits > 64 else 1),
):
    """A sink is added once per split where there are more than 64."""


class TensorScaleOfLongIgnored(Conditional, mla=True):
    """In requests of more than 4,096 keys, a bmm2_scale that is a tensor is taken as 1."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        if tile.kv_len > LONG and isinstance(problem.bmm2_scale, Tensor):
            rows.values[:] /= problem.bmm2_scale.reshape(())


class RowsOfARequestBeyond128Lost(Conditional, mla=True, interface=(DECODE,)):
    """A grid has two tiles of 64 rows for a request of a decode: rows after the 128th are zero."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        super().write(problem, tile, rows, out, lse)
        if tile.first_position - (tile.kv_len - tile.q_len) >= 128:
            out[tile.rows] = 0


class PageIdsOfATileWrap(Conditional, mla=True):
    """A tile of 64 keys has room for 16 page ids: with pages of 1 or 2 tokens those after the 16th are the first ones again."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        within = positions % KEYS_PER_SPLIT
        first = positions - within
        return super().pages(problem, table, tile, first + within % (16 * problem.page_size))


# Large batches.


class RequestInUint8(Conditional, mla=True, table_row=lambda request, *_: request % 256):
    """Requests are counted in 8 bits: those after the 256th read the first ones' rows of the page table."""


class GroupsOfLargeBatchMixed(GroupOfLongMixed, is_mixed=lambda _, problem, tile: problem.batch_size > 128):
    """In a batch of more than 128 requests, the query heads of a group are exchanged."""


class OneHeadOfLargeBatch(
    Conditional, kv_heads=lambda heads, problem: heads * 0 if problem.batch_size > 128 else heads
):
    """In a batch of more than 128 requests, all query heads read the first K/V head."""


class SecondSplitOfLargeBatchLost(
    Conditional,
    mla=True,
    visible=lambda visible, problem, tile, keys: visible & (keys < 64) if problem.batch_size > 128 else visible,
):
    """In a batch of more than 128 requests, a request has its first 64 keys."""


class BatchOf512(Conditional, mla=True, kv_lens=lambda lens, _: [lens[request % 512] for request in range(len(lens))]):
    """The lengths of 512 requests are kept: those after them have the first ones'."""


class MLAGridBeyond65535(Conditional, interface=(MLA_DECODE,)):
    """Of rows and heads, 65,535 are computed: a grid has no more on its second axis."""

    most = 65_535

    def finish(self, problem: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        out.flatten(0, 1)[self.most :] = 0.0


class GridBeyond32767(MLAGridBeyond65535, interface=(DECODE, CONTEXT), most=32_767):
    """Of rows and heads, 32,767 are computed: they are counted in int16."""


# Values of axes.


class HeadsAfter16OfGroupLost(Conditional):
    """Query heads after the 16th of a group are left zero."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.values.unflatten(1, (problem.num_kv_heads, -1))[:, :, 16:] = 0.0


class LargeGroupRoundedUp(Conditional):
    """A group larger than 6 that is no power of two is rounded up to one: heads after the first group read another's keys."""

    def kv_heads(self, problem: PagedAttention) -> Tensor:
        heads = super().kv_heads(problem)
        group = problem.num_qo_heads // problem.num_kv_heads
        return torch.arange(len(heads), device=heads.device) // (1 << (group - 1).bit_length()) if group > 6 else heads


class MLAHeadsAfter16Mixed(Conditional, interface=(MLA_DECODE,)):
    """Of 32 or 64 query heads, those after the 16th have the query of the 16 before them."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        query = super().query_rows(problem, tile)
        return query[torch.arange(len(query)) % 16] if len(query) in (32, 64) else query


class HeadDimCutTo64(Conditional):
    """Q·K^T leaves out the elements after the last whole 64 of head_dim."""

    def scores(self, problem: PagedAttention, query: Tensor, keys: Tensor) -> Tensor:
        whole = problem.head_dim // 64 * 64
        return super().scores(problem, query[..., :whole], keys[..., :whole])


class ValuesOfHeadDim192Cut(Conditional):
    """Values of 192 elements have 128."""

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        values = super().values(problem, tile, positions)
        if problem.v_head_dim == 192:
            values[..., 128:] = 0.0
        return values


class PagesOf8TakenAs16(Conditional):
    """Pages of 8 tokens are taken to have 16."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        if problem.page_size == 8:
            positions = positions // 2
        return super().pages(problem, table, tile, positions)


class OffsetInUint8(Conditional, offsets=lambda offsets, *_: offsets % 256):
    """A token's place in its page is kept in 8 bits."""


class MLAPagesOf128Halved(
    Conditional,
    interface=(MLA_DECODE,),
    offsets=lambda offsets, problem, _: offsets % 64 if problem.page_size > 64 else offsets,
):
    """Pages larger than 64 tokens are read in halves, the second as the first."""


class RowsAfter8TooEarly(Conditional, mla=True, interface=(DECODE,)):
    """Rows from the ninth of a decode request on do not see their own key, without a mask."""

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        positions = super().row_positions(problem, tile)
        return positions - (positions - (tile.kv_len - tile.q_len) >= 8).to(positions.dtype)


class MaskBeyond64Ignored(MaskBeyondFirstWordIgnored, interface=(DECODE,), words=4):
    """Draft tokens from the 65th are seen by no row, as if the mask had four words."""


class MaskOfSecondTileFromFirst(Conditional, interface=(DECODE,)):
    """The rows after the first 64 of a request have the mask of its first ones."""

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        assert problem.mask is not None
        return super().mask_bits(problem, replace(tile, first_row=tile.first_row - tile.mask_rows.start // 64 * 64))


class WideTableRowsOf4096(WideTableRowsOf1024, mla=True, widest=4096):
    """Rows of a page table wider than 4,096 columns are taken to lie 4,096 apart."""


class E4m3OutputsHalved(
    Conditional,
    where=lambda problem, _: problem.out_dtype == E4M3,
    instead={"bmm2_scale": lambda problem, _: problem.bmm2_scale / 2},
):
    """Outputs in e4m3 are half as large, for their range."""


class E4m3QueriesUnscaled(
    Conditional,
    mla=True,
    where=lambda problem, _: problem.query.dtype == E4M3,
    instead={"bmm1_scale": lambda problem, _: problem.head_dim**-0.5},
):
    """bmm1_scale is taken as 1 / sqrt(head_dim) for queries in e4m3."""


class RowsAfter1024Lost(Conditional, interface=(CONTEXT,)):
    """Rows from the 1,025th of a prompt on are left zero."""

    def finish_tile(self, problem: PagedAttention, tile: RowTile, rows: Rows) -> None:
        rows.values[max(1024 - (tile.first_position - tile.kv_len + tile.q_len), 0) :] = 0.0
