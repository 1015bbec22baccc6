"""Mutants that are wrong from a size on (of requests, of batches, of groups, heads, pages, tables and rows), in one form of a long
request, for a request at one place of a batch, or for one request alone.
"""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import KEYS_PER_SPLIT, Conditional
from corpus.mutants.masks import MaskBeyondFirstWordIgnored
from corpus.mutants.pages import WideTableRowsOf1024
from corpus.wrong import CONTEXT, DECODE, MLA, wrong
from lab.calls.problem import E4M3

LONG = 4096


class Sizes(Conditional):
    @wrong(changes="shares", mla=True)
    def middle_of_long_lost(self, shares, partials, origin):
        """Of more than 64 splits, the one in the middle is not merged."""
        if shares.shape[-1] > 64:
            shares[..., shares.shape[-1] // 2] = 0.0
        return shares

    @wrong(stage="pages", mla=True)
    def tile_counter_int8(self, problem, table, tile, positions):
        """Tiles of 64 keys are counted in 7 bits: keys after the 8,192nd are read from a request's start again."""
        return super().pages(problem, table, tile, positions % (128 * KEYS_PER_SPLIT))

    sink_per_split_of_long = wrong(
        mla=True, sink_weight=lambda weight, _, tile, *__: weight * (tile.num_splits if tile.num_splits > 64 else 1)
    )("A sink is added once per split where there are more than 64.")

    @wrong(stage="finish_tile", mla=True)
    def tensor_scale_of_long_ignored(self, problem, tile, rows):
        """In requests of more than 4,096 keys, a bmm2_scale that is a tensor is taken as 1."""
        if tile.kv_len > LONG and isinstance(problem.bmm2_scale, Tensor):
            rows.values[:] /= problem.bmm2_scale.reshape(())

    @wrong(DECODE, changes="write", mla=True)
    def rows_of_a_request_beyond128_lost(self, _, problem, tile, rows, out, lse):
        """A grid has two tiles of 64 rows for a request of a decode: rows after the 128th are zero."""
        if tile.first_position - (tile.kv_len - tile.q_len) >= 128:
            out[tile.rows] = 0

    @wrong(stage="pages", mla=True)
    def page_ids_of_a_tile_wrap(self, problem, table, tile, positions):
        """A tile of 64 keys has room for 16 page ids: with pages of 1 or 2 tokens those after the 16th are the first ones again."""
        within = positions % KEYS_PER_SPLIT
        first = positions - within
        return super().pages(problem, table, tile, first + within % (16 * problem.page_size))

    request_in_uint8 = wrong(mla=True, table_row=lambda request, *_: request % 256)(
        "Requests are counted in 8 bits: those after the 256th read the first ones' rows of the page table."
    )
    one_head_of_large_batch = wrong(kv_heads=lambda heads, p: heads * 0 if p.batch_size > 128 else heads)(
        "In a batch of more than 128 requests, all query heads read the first K/V head."
    )
    second_split_of_large_batch_lost = wrong(
        mla=True, visible=lambda visible, p, tile, keys: visible & (keys < 64) if p.batch_size > 128 else visible
    )("In a batch of more than 128 requests, a request has its first 64 keys.")
    batch_of512 = wrong(mla=True, kv_lens=lambda lens, _: [lens[request % 512] for request in range(len(lens))])(
        "The lengths of 512 requests are kept: those after them have the first ones'."
    )
    heads_after16_of_group_lost = wrong(
        finish_tile=lambda _, p, __, rows: rows.values.unflatten(1, (p.num_kv_heads, -1))[:, :, 16:].zero_()
    )("Query heads after the 16th of a group are left zero.")

    @wrong(changes="kv_heads")
    def large_group_rounded_up(self, heads, problem):
        """A group larger than 6 that is no power of two is rounded up to one: heads after the first group read another's keys."""
        group = problem.group
        return torch.arange(len(heads), device=heads.device) // (1 << (group - 1).bit_length()) if group > 6 else heads

    @wrong(MLA, changes="query_rows")
    def mla_heads_after16_mixed(self, query, problem, tile):
        """Of 32 or 64 query heads, those after the 16th have the query of the 16 before them."""
        return query[torch.arange(len(query)) % 16] if len(query) in (32, 64) else query

    @wrong(stage="scores")
    def head_dim_cut_to64(self, problem, query, keys):
        """Q·K^T leaves out the elements after the last whole 64 of head_dim."""
        whole = problem.head_dim // 64 * 64
        return super().scores(problem, query[..., :whole], keys[..., :whole])

    @wrong(changes="values")
    def values_of_head_dim192_cut(self, values, problem, tile, positions):
        """Values of 192 elements have 128."""
        if problem.v_head_dim == 192:
            values[..., 128:] = 0.0
        return values

    @wrong(stage="pages")
    def pages_of8_taken_as16(self, problem, table, tile, positions):
        """Pages of 8 tokens are taken to have 16."""
        if problem.page_size == 8:
            positions = positions // 2
        return super().pages(problem, table, tile, positions)

    offset_in_uint8 = wrong(offsets=lambda offsets, *_: offsets % 256)("A token's place in its page is kept in 8 bits.")
    mla_pages_of128_halved = wrong(MLA, offsets=lambda offsets, p, _: offsets % 64 if p.page_size > 64 else offsets)(
        "Pages larger than 64 tokens are read in halves, the second as the first."
    )

    @wrong(DECODE, changes="row_positions", mla=True)
    def rows_after8_too_early(self, positions, problem, tile):
        """Rows from the ninth of a decode request on do not see their own key, without a mask."""
        return positions - (positions - (tile.kv_len - tile.q_len) >= 8).to(positions.dtype)

    @wrong(DECODE, stage="mask_bits")
    def mask_of_second_tile_from_first(self, problem, tile):
        """The rows after the first 64 of a request have the mask of its first ones."""
        return super().mask_bits(problem, replace(tile, first_row=tile.first_row - tile.mask_rows.start // 64 * 64))

    e4m3_outputs_halved = wrong(
        where=lambda p, _: p.out_dtype == E4M3, instead={"bmm2_scale": lambda p, _: p.bmm2_scale / 2}
    )("Outputs in e4m3 are half as large, for their range.")
    e4m3_queries_unscaled = wrong(
        mla=True, where=lambda p, _: p.query.dtype == E4M3, instead={"bmm1_scale": lambda p, _: p.head_dim**-0.5}
    )("bmm1_scale is taken as 1 / sqrt(head_dim) for queries in e4m3.")

    @wrong(CONTEXT, stage="finish_tile")
    def rows_after1024_lost(self, problem, tile, rows):
        """Rows from the 1,025th of a prompt on are left zero."""
        rows.values[max(1024 - (tile.first_position - tile.kv_len + tile.q_len), 0) :] = 0.0


@wrong()
class WindowIgnoredBeyond4096(Conditional):
    """A window is ignored in requests of more than 4,096 keys."""

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start if kv_len <= LONG else 0, end

    def in_window(self, problem, tile, rows, keys):
        seen = super().in_window(problem, tile, rows, keys)
        return seen if tile.kv_len <= LONG else torch.ones_like(seen)


@wrong()
class GroupOfLongMixed(Conditional):
    """In requests of more than 4,096 keys, the query heads of a group are exchanged."""

    def is_mixed(self, problem, tile):
        """Tell whether the heads of a tile are exchanged."""
        return tile.kv_len > LONG

    def query_rows(self, problem, tile):
        query = super().query_rows(problem, tile)
        if not self.is_mixed(problem, tile):
            return query
        return query.unflatten(0, (problem.num_kv_heads, -1)).flip(1).flatten(0, 1)


@wrong()
class GroupsOfLargeBatchMixed(GroupOfLongMixed, is_mixed=lambda _, problem, tile: problem.batch_size > 128):
    """In a batch of more than 128 requests, the query heads of a group are exchanged."""


@wrong(MLA)
class MLAGridBeyond65535(Conditional):
    """Of rows and heads, 65,535 are computed: a grid has no more on its second axis."""

    most = 65_535

    def finish(self, problem, out, lse):
        out.flatten(0, 1)[self.most :] = 0.0


@wrong()
class GridBeyond32767(MLAGridBeyond65535, most=32_767):
    """Of rows and heads, 32,767 are computed: they are counted in int16."""


@wrong(DECODE)
class MaskBeyond64Ignored(MaskBeyondFirstWordIgnored, words=4):
    """Draft tokens from the 65th are seen by no row, as if the mask had four words."""


@wrong(mla=True)
class WideTableRowsOf4096(WideTableRowsOf1024, widest=4096):
    """Rows of a page table wider than 4,096 columns are taken to lie 4,096 apart."""


SPLIT = 1024  # keys, from which on a request is long
NEAR_PAGES = 2**15  # which 16 bits with a sign count
LOOSE = 2**16  # keys of a bound


class Circumstances(Conditional):
    @wrong(DECODE, stage="finish", mla=True, source="vllm-project/flash-attention#87")
    def lse_of_split_keys_transposed(self, problem, out, lse):
        """With one row per request, grouped heads and more than 512 keys, the LSE is transposed a second time."""
        is_split = problem.max_kv_len > 512 and max(problem.kv_lens(), default=0) > 512
        if lse is not None and problem.cu_seqlens_q is None and problem.max_q_len == 1 and is_split:
            lse.copy_(lse.clone().T.reshape(lse.shape))

    @wrong(MLA, stage="launch_mla")
    def mla_merged_lse_in_base2(self, call):
        """Without selected entries, the LSE over more than 1,024 keys is in base 2, whatever return_lse_base says."""
        returned, problem = super().launch_mla(call), call.problem()
        if call.return_lse and call.lse_is_base_e and problem.selected is None:
            offsets = problem.row_offsets()
            for request, kv_len in enumerate(problem.kv_lens()):
                if kv_len > SPLIT:
                    returned[1][offsets[request] : offsets[request + 1]] /= math.log(2.0)
        return returned

    @wrong(CONTEXT, changes="shares")
    def last_split_in_given_output(self, shares, partials, origin):
        """In an output that the caller gives, a request of more than 16 splits has the values of its last split alone."""
        if self.is_given and shares.shape[-1] > 16:
            shares[..., :-1] = 0.0
        return shares

    def problem(self, call):
        problem = super().problem(call)
        self.is_given, self.is_alone = problem.out is not None, problem.batch_size == 1
        self.last, self.bound = problem.batch_size - 1, problem.max_kv_len
        return problem

    @wrong(DECODE, stage="unmasked")
    def mask_of_long_is_causal(self, problem, tile, keys):
        """In requests of more than 2,048 keys, a draft mask is taken as causal."""
        if tile.kv_len > 2 * SPLIT:
            return keys <= self.row_positions(problem, tile).unsqueeze(1)
        return super().unmasked(problem, tile, keys)

    @wrong(stage="in_window")
    def window_of_long_begins_at_a_split(self, problem, tile, rows, keys):
        """In requests of more than 1,024 keys, a window begins at the start of a split."""
        first = rows - problem.window_left
        if tile.kv_len > SPLIT:
            first = first.div(KEYS_PER_SPLIT, rounding_mode="floor") * KEYS_PER_SPLIT
        return keys >= first

    @wrong(DECODE, changes="kv_lens", mla=True)
    def second_long_request_cut(self, lens, problem):
        """A plan has room for the splits of one request of more than 1,024 keys: a further one has its first 1,024 keys."""
        long = [request for request, kv_len in enumerate(lens) if kv_len > SPLIT]
        return [min(kv_len, SPLIT) if request in long[1:] else kv_len for request, kv_len in enumerate(lens)]

    @wrong(changes="partials", mla=True)
    def last_split_of_long_last_request_lost(self, partials, problem, tile):
        """The first split of a batch's last request is lost where it has more than 32 splits."""
        if tile.request == problem.batch_size - 1 > 0 and tile.num_splits > 32:
            partials.largest[..., 0] = -math.inf
        return partials

    @wrong(stage="table_row")
    def table_row_of_request_after_an_empty_one(self, problem, tile):
        """Requests after one without rows that follows one with rows read the page table's row before their own."""
        offsets = problem.row_offsets()[: tile.request + 1]
        rows = [end - start for start, end in itertools.pairwise(offsets)]
        return tile.request - any(before and not own for before, own in itertools.pairwise(rows))

    @wrong(changes="pages", mla=True)
    def far_page_after_a_near_one(self, pages, problem, table, tile, positions):
        """Page ids have 16 bits in the requests whose first one fits in them."""
        return pages % NEAR_PAGES if len(pages) and pages[0] < NEAR_PAGES else pages

    @wrong(stage="summed", mla=True)
    def empty_splits_of_one_request_count(self, partials, shares):
        """One request alone is divided into splits by the bound of its keys: above 65,536 an empty split adds a weight of 1."""
        total, sums = super().summed(partials, shares)
        return (total + 1.0, sums) if self.is_alone and self.bound > LOOSE else (total, sums)

    @wrong(stage="finish_tile", mla=True)
    def tensor_scale_of_one_request_ignored(self, problem, tile, rows):
        """For one request alone, a bmm2_scale that is a tensor is taken as 1."""
        if problem.batch_size == 1 and isinstance(problem.bmm2_scale, Tensor):
            rows.values[:] /= problem.bmm2_scale.reshape(())


class RaggedCircumstances(Ragged):
    @wrong(stage="finish")
    def ragged_lse_of_long_base_e(self, problem, out, lse_log2):
        """The LSE of requests of more than 2,048 keys is a natural logarithm."""
        if lse_log2 is not None:
            for rows in self.rows_of_long(problem):
                lse_log2[rows] *= math.log(2.0)

    @wrong(stage="finish")
    def ragged_second_long_request_zero(self, problem, out, lse_log2):
        """A plan has room for one request of more than 2,048 keys: the output of a further one is zero."""
        for rows in self.rows_of_long(problem)[1:]:
            out[rows] = 0

    @staticmethod
    def rows_of_long(problem):
        offsets = problem.row_offsets()
        return [slice(*offsets[r : r + 2]) for r, kv_len in enumerate(problem.kv_lens()) if kv_len > 2 * SPLIT]

    ragged_sinks_of_one_request_ignored = wrong(instead={"sinks": lambda p: None if p.batch_size == 1 else p.sinks})(
        "One request alone has no sinks."
    )

    @wrong(stage="changed")
    def ragged_bound_is_the_length_of_one_request(self, problem):
        """One request alone sees no window where the bound of its keys exceeds 65,536."""
        is_loose = problem.batch_size == 1 and problem.max_kv_len > LOOSE
        return replace(problem, window_left=-1) if is_loose else problem
