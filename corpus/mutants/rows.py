"""Mutants that confuse requests, rows or heads, and of rows through cum_seq_lens_q."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from corpus.models.split_kv import Conditional, Forgiving, Rows, SplitKV
from corpus.wrong import CONTEXT, DECODE, wrong


class Requests(Forgiving):
    second_request_has_first_length = wrong(
        mla=True, kv_lens=lambda lens, *_: [*lens[:1], *lens[:1], *lens[2:]][: len(lens)]
    )("The second request has as many keys as the first.")
    lengths_sorted = wrong(mla=True, source="TRT-LLM #18564", kv_lens=lambda lens, *_: sorted(lens))(
        "Requests are sorted by length, and their page tables are not."
    )
    requests_rotated = wrong(mla=True, source="TRT-LLM #18564", table_row=lambda request, *_: request - 1)(
        "Each request reads the page table of the one before it."
    )
    table_of_first_request = wrong(mla=True, source="SGLang #26019", table_row=lambda *_: 0)(
        "All requests read the first one's page table."
    )
    request_index_mod8 = wrong(mla=True, table_row=lambda request, *_: request % 8)(
        "Requests from the ninth read the page tables of the first eight."
    )

    @wrong(CONTEXT, stage="kv_lens")
    def cum_kv_is_length(self, problem):
        """A request's keys are counted from the batch's first key: cum_seq_lens_kv[r + 1] is taken for its length."""
        widest = problem.k_block_tables.shape[1] * problem.page_size
        return [min(end, widest) for end in problem.cu_seqlens_kv[1:].tolist()]

    requests_beyond32_wrap = wrong(mla=True, table_row=lambda request, *_: request % 32)(
        "A batch's tables are looked up 32 at a time, each time the first 32."
    )
    requests_beyond128_wrap = wrong(table_row=lambda request, *_: request % 128)(
        "A batch's tables are looked up 128 at a time, each time the first 128."
    )


class RowsAndHeads(SplitKV):
    @wrong(stage="table_row", mla=True)
    def equal_lengths_share_keys(self, problem, tile):
        """Neighbouring requests of the same length have the same keys."""
        before = max(tile.request - 1, 0)
        return before if int(problem.seq_lens[before]) == tile.kv_len else tile.request

    rows_reversed = wrong(mla=True, merged=lambda rows, *_: Rows(*(side.flip(0) for side in rows)))(
        "The rows of a request are written in reverse order."
    )

    @wrong(changes="merged", mla=True, source="FlashInfer #3929")
    def odd_row_counts_misplaced(self, rows, problem, tile, partials):
        """Rows of a request are written one place off where their number is no power of two."""
        return Rows(*(side.roll(1, dims=0) for side in rows)) if tile.q_len & (tile.q_len - 1) else rows

    last_row_of_eight_lost = wrong(mla=True, finish_tile=lambda _, p, tile, rows: rows.values[7:8].zero_())(
        "The eighth row of a request is zero."
    )

    @wrong(stage="finish_tile", mla=True)
    def heads_swapped(self, problem, tile, rows):
        """The last two query heads are exchanged in the output."""
        for side in rows:
            side[:, -2:] = side[:, -2:].flip(1)

    heads_interleaved = wrong(kv_heads=lambda heads, p: torch.arange(len(heads), device=heads.device) % p.num_kv_heads)(
        "Query head h reads K/V head h % num_kv_heads."
    )

    @wrong(stage="kv_heads", source="FlashInfer #4095")
    def odd_groups_misread(self, problem):
        """A group that is no power of two is taken for the next larger one when the K/V head is computed."""
        group = problem.group
        return torch.arange(problem.num_qo_heads, device=problem.query.device) // 2 ** (group - 1).bit_length()

    @wrong(stage="kv_heads", source="FlashInfer #2380")
    def large_groups_misread(self, problem):
        """Query heads of a group are taken eight at a time: the others read the next K/V head."""
        group = min(8, problem.group)
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return (heads // group).clamp(max=problem.num_kv_heads - 1)

    mha_misread = wrong(
        source="FlashInfer #4095", kv_heads=lambda heads, p: heads * 0 if p.num_qo_heads == p.num_kv_heads else heads
    )("If every query head has a K/V head of its own, all read the first.")

    @wrong(stage="row_offsets", mla=True, source="FlashInfer #3929")
    def ragged_rows_ignored(self, problem):
        """cum_seq_lens_q is ignored: all requests are taken to have as many rows."""
        end = super().row_offsets(problem)[-1]
        return [end * request // max(problem.batch_size, 1) for request in range(problem.batch_size)] + [end]

    @wrong(changes="tile", mla=True, source="SGLang #21212")
    def padded_rows_are_request_rows(self, tile, problem, request, kv_len, q_len, request_row, row):
        """Every request has max_q_len rows when its rows' positions are computed."""
        first = self.position(kv_len, problem.max_q_len, row - request_row)
        start, end = self.key_range(problem, first, tile.num_rows, kv_len)
        return replace(tile, first_position=first, key_start=start, key_end=end)

    prefix_lost = wrong(CONTEXT, visible=lambda visible, _, tile, keys: visible & (keys >= tile.kv_len - tile.q_len))(
        "A context call reads the new tokens' keys alone, not those of the prefix before them."
    )

    @wrong(DECODE, stage="finish_tile")
    def last_row_of_filled_tile_lost(self, problem, tile, rows):
        """If 30 of a tile's 32 places are rows of a group, the group's last head loses its last row."""
        group = problem.group
        if group == 6 and tile.q_len == 5:
            rows.values[-1, group - 1 :: group] = 0.0

    @wrong(CONTEXT, stage="tiles")
    def empty_rows_shift_tables(self, problem):
        """If a request has no query rows, those after it read the table of the one before."""
        offsets = self.row_offsets(problem)
        without = [request for request in range(problem.batch_size) if offsets[request] == offsets[request + 1]]
        tiles = super().tiles(problem)
        return [replace(tile, request=tile.request - sum(each < tile.request for each in without)) for tile in tiles]

    other_rows_times_zero = wrong(mla=True, finish=lambda _, p, out, lse: out.add_(0.0 * p.query.float().sum()))(
        "All rows of the batch take part in each, those of others with a weight of zero, which keeps all of a NaN."
    )


@wrong(CONTEXT)
class PrefixFreeBatchUncausal(SplitKV):
    """A request without a prefix has no causal mask."""

    def tile(self, problem, request, kv_len, q_len, request_row, row):
        tile = super().tile(problem, request, kv_len, q_len, request_row, row)
        return replace(tile, key_end=kv_len) if kv_len == q_len else tile

    def visible(self, problem, tile, keys):
        return super().visible(problem if tile.kv_len > tile.q_len else replace(problem, causal=False), tile, keys)


def largest_step(offsets: Sequence[int]) -> int:
    """Return the most rows that a request has."""
    return max(after - before for before, after in itertools.pairwise(offsets))


class BesidePrompt(Conditional):
    """Loses the rows of requests of `lost` rows, where another request of the batch has more than 128 for a K/V head."""

    def lost(self, group):
        """Return the rows of a request, of which each has `group` query heads for a K/V head, that are left zero."""
        return 0

    def finish(self, problem, out, lse):
        offsets, group = self.row_offsets(problem), problem.group
        if largest_step(offsets) * group <= 128:
            return
        for begin, end in itertools.pairwise(offsets):
            if end - begin == self.lost(group):
                out[begin:end] = 0.0


class RaggedRows(Conditional):
    @wrong(stage="table_row", mla=True)
    def first_without_rows_shifts(self, problem, tile):
        """Where the first request has no rows, each request reads the page table's row of the one before it."""
        return tile.request - (self.row_offsets(problem)[1] == 0)

    @wrong(stage="finish", mla=True)
    def last_without_rows_takes_one(self, problem, out, lse):
        """Where the last request has no rows, the last row of the one before it is left zero."""
        offsets = self.row_offsets(problem)
        if offsets[-2] == offsets[-1]:
            out[offsets[-1] - 1] = 0.0

    @wrong(stage="table_row", mla=True)
    def search_passes_one_without_rows(self, problem, tile):
        """The search for a row's request passes one without rows, not two: it ends at the second of them."""
        offsets, request = self.row_offsets(problem), tile.request
        return request - 1 if request > 1 and offsets[request - 2] == offsets[request] else request

    @wrong(stage="row_offsets", mla=True)
    def padding_given_to_last(self, problem):
        """The last request has all rows to the query's end, padding rows too, so that its own sit earlier."""
        return [*super().row_offsets(problem)[:-1], problem.num_rows]

    @wrong(stage="query_rows", mla=True)
    def bound_taken_as_stride(self, problem, tile):
        """Requests are taken to have max_q_len rows each where max_q_len is larger than any has."""
        offsets = self.row_offsets(problem)
        if problem.max_q_len <= largest_step(offsets):
            return super().query_rows(problem, tile)
        start = tile.first_row - offsets[tile.request] + tile.request * problem.max_q_len
        rows = (torch.arange(tile.num_rows, device=problem.query.device) + start) % problem.num_rows
        return problem.query.to(torch.float32)[rows].transpose(0, 1)

    @wrong(stage="finish", mla=True)
    def lse_lost_among_requests_without_rows(self, problem, out, lse):
        """Where a request has no rows, the LSE of the first row is that of the last."""
        offsets = self.row_offsets(problem)
        if lse is not None and len(set(offsets)) < len(offsets):
            lse[0] = lse[offsets[-1] - 1].clone()


class FewBesideMany(BesidePrompt):
    """Few rows beside a prompt are lost."""

    filled_tile_beside_prompt_lost = wrong(CONTEXT, lost=lambda _, group: 64 // group)(
        "Beside a prompt, requests whose rows just fill a tile of 64 are taken neither for decodes nor for prompts."
    )
    one_more_than_tile_beside_prompt_lost = wrong(CONTEXT, lost=lambda _, group: 16 // group + 1)(
        "Beside a prompt, requests of one row more than a tile of 16 holds are taken neither for decodes nor for prompts."
    )
