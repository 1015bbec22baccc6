"""Mutants of the MLA decode call alone, at the end those of rows that select entries (`sparse_mla_top_k`). Mutants of other
modules that say `mla=True` meet it too.
"""

import math
from dataclasses import replace

import torch

from corpus.models.ragged import SelectedSplitKV
from corpus.models.split_kv import Forgiving, Rows, SplitKV, as_float32
from corpus.mutants.pages import PageOffsetAbsolute
from corpus.wrong import MLA, wrong


class MLAAlone(SplitKV):
    @wrong(MLA, stage="scores")
    def mla_rope_left_out(self, problem, query, keys):
        """Q·K^T leaves the rotary part out."""
        rank = problem.v_head_dim
        return super().scores(problem, query[..., :rank], keys[..., :rank])

    @wrong(MLA, stage="scores")
    def mla_rope_scaled_twice(self, problem, query, keys):
        """The rotary part's product is multiplied by bmm1_scale twice."""
        scale, rank = as_float32(problem.bmm1_scale, query.device), problem.v_head_dim
        query = torch.cat((query[..., :rank], query[..., rank:] * scale), dim=-1)
        return super().scores(problem, query, keys)

    @wrong(MLA, stage="masked", trigger="a request has several rows, and the heads are no power of two")
    def mla_rows_packed_with_heads_misread(self, scores, visible):
        """Rows are packed with heads, and a packed row's number is shifted right as if the heads were a power of two."""
        heads, rows, _ = scores.shape
        packed = torch.arange(rows * heads, device=scores.device).view(rows, heads) >> (heads - 1).bit_length()
        return super().masked(scores, visible[packed].transpose(0, 1))

    mla_heads_after_whole_tiles_zero = wrong(
        MLA, finish=lambda _, p, out, lse: out[:, max(16, p.num_qo_heads // 16 * 16) :].zero_()
    )("Query heads go in tiles of 16, and those after the last whole tile are not written where there are several.")
    mla_bmm1_of_unabsorbed_head = wrong(
        MLA, problem=lambda p, call: replace(p, bmm1_scale=(call.qk_nope_head_dim + call.qk_rope_head_dim) ** -0.5)
    )("bmm1_scale is taken as 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), the head before absorption.")
    mla_bmm2_on_logits_too = wrong(
        MLA, scores=lambda scores, p, query, *_: scores * as_float32(p.bmm2_scale, query.device)
    )("bmm2_scale, for a scale of the cache as such, multiplies the logits too.")
    mla_v_from_last_columns = wrong(MLA, instead={"v_cache": lambda p: p.k_cache[..., p.head_dim - p.v_head_dim :]})(
        "A value is the last kv_lora_rank elements of its entry, qk_rope_head_dim too far."
    )

    @wrong(MLA, stage="values")
    def mla_v_after_rope(self, problem, tile, positions):
        """A value begins with the rotary part, and its latent vector lacks as many elements at the end."""
        entries = self.keys(problem, tile, positions)
        rank = problem.v_head_dim
        return torch.cat((entries[..., rank:], entries[..., :rank]), dim=-1)[..., :rank]

    @wrong(MLA, stage="merged")
    def mla_sink_lost_without_keys(self, problem, tile, partials):
        """The LSE of a row that sees no key is minus infinity, whatever its sink."""
        values, lse_log2 = super().merged(problem, tile, partials)
        none = (partials.largest.amax(dim=-1) == -torch.inf).transpose(0, 1)
        return Rows(values, lse_log2.masked_fill(none, -torch.inf))

    @wrong(MLA, stage="launch_mla")
    def mla_lse_base_ignored(self, call):
        """The LSE is in base 2, whatever return_lse_base says."""
        return super().launch_mla(replace(call, return_lse_base="base2" if call.return_lse_base else None))

    @wrong(MLA, changes="launch_mla")
    def mla_given_lse_in_base2(self, returned, call):
        """The LSE is returned in the base that return_lse_base says, and an lse that is handed out stays in base 2."""
        if call.lse is None or call.return_lse_base != "basee":
            return returned
        out, lse = returned
        returned = out, lse.clone()
        lse /= math.log(2.0)
        return returned

    @wrong(MLA, changes="launch_mla")
    def mla_lse_as_the_query_transposed(self, returned, call):
        """An lse of [batch_size, q_len_per_request, num_qo_heads] is written as [batch_size, num_qo_heads, q_len_per_request]."""
        if call.lse is not None and call.lse.ndim == 3:
            call.lse.copy_(call.lse.transpose(1, 2).reshape(call.lse.shape))
        return returned

    @wrong(MLA, stage="changed")
    def mla_rotary_part_taken_from_the_end(self, problem):
        """The rotary part is the last elements of an entry: all of them where it has none."""
        if problem.head_dim > problem.v_head_dim:
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale * 2.0)  # each product is counted twice

    @wrong(MLA, stage="write")
    def mla_half_out_holds_bf16(self, problem, tile, rows, out, lse):
        """A float16 out is filled with the bits of bfloat16."""
        if out.dtype == torch.float16:
            out[tile.rows] = rows.values.to(torch.bfloat16).view(torch.float16)
        else:
            super().write(problem, tile, rows, out, lse)

    @wrong(MLA, stage="changed")
    def mla_page_stride_ignored(self, problem):
        """Pages are taken to lie one after the other."""
        cache = problem.k_cache
        strides = (cache.shape[2] * cache.stride(2), *cache.stride()[1:])
        cache = cache.as_strided(cache.shape, strides, cache.storage_offset())
        return replace(problem, k_cache=cache, v_cache=cache[..., : problem.v_head_dim])

    @wrong(MLA, changes="launch_mla")
    def mla_output_of_rows(self, returned, call):
        """The output is returned as [num_rows, num_qo_heads, kv_lora_rank], whatever the query's shape."""
        out, *lse = returned if call.return_lse else (returned,)
        out = out.flatten(0, -3)
        return (out, *lse) if lse else out

    @wrong(MLA, stage="finish", trigger="a number of heads that is no multiple of 8, and an LSE")
    def mla_lse_of_incomplete_eight_lost(self, problem, out, lse):
        """The LSE of heads after the last whole block of 8 heads is zero, where there are more than 8."""
        if lse is not None and problem.num_qo_heads > 8:
            lse[:, problem.num_qo_heads // 8 * 8 :] = 0.0

    @wrong(MLA, stage="query_rows", trigger="a rotary part whose size is no power of two")
    def mla_rope_of_a_power_of_two(self, problem, tile):
        """The rotary part is read in one block, of the largest power of two of elements that it has."""
        rows, rope = super().query_rows(problem, tile).clone(), problem.head_dim - problem.v_head_dim
        if rope:
            rows[..., problem.v_head_dim + 2 ** (rope.bit_length() - 1) :] = 0.0
        return rows

    @wrong(MLA, stage="query_rows", trigger="a rotary part of more than 64 elements")
    def mla_rope_wraps_at_64(self, problem, tile):
        """Elements of a rotary part after 64 are those of its beginning."""
        rows, rope = super().query_rows(problem, tile).clone(), problem.head_dim - problem.v_head_dim
        if rope > 64:
            start = problem.v_head_dim
            rows[..., start + 64 :] = rows[..., start : start + rope - 64]
        return rows

    @wrong(MLA, stage="launch_mla", trigger="backend 'cute-dsl' without return_lse_base, and a given lse")
    def mla_given_lse_of_cute_dsl_in_base_2(self, call):
        """A given lse is in base 2 without return_lse_base, and a returned one in the backend's base."""
        if call.lse is not None and call.return_lse_base is None:
            call = replace(call, return_lse_base="base2")
        return super().launch_mla(call)

    @wrong(MLA, stage="launch_mla", trigger="a backend's name without return_lse_base")
    def mla_lse_of_named_backends_in_base_e(self, call):
        """Without return_lse_base each backend that is named has base e, as CuTe DSL has."""
        if call.backend != "auto" and call.return_lse_base is None:
            call = replace(call, return_lse_base="basee")
        return super().launch_mla(call)


class MLAPages(Forgiving):
    @wrong(MLA, stage="pages")
    def mla_page_size32_taken_as64(self, problem, table, tile, positions):
        """Pages of 32 tokens are taken for pages of 64: the second half of one is what lies after it in the pool."""
        if problem.page_size != 32:
            return super().pages(problem, table, tile, positions)
        first = super().pages(problem, table, tile, positions // 64 * 32)
        return (first + positions % 64 // 32) % problem.k_cache.shape[0]


@wrong(MLA)
class MLANegativePageIsLast(Forgiving):
    """Keys are read 128 at a time: after the last, page -1 is the pool's last one, multiplied by weights of zero."""

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start, min(-(-end // 128) * 128, problem.k_block_tables.shape[1] * problem.page_size)

    def values(self, problem, tile, positions):
        ids = problem.v_block_tables[tile.request][positions // problem.page_size]
        unread = (positions >= tile.kv_len) & (ids != -1)
        return super().values(problem, tile, positions).masked_fill(unread.view(1, -1, 1), 0.0)


@wrong(MLA, source="FlashInfer #4347")
class MLALatentPageOffsetAbsolute(PageOffsetAbsolute, at_once=32):
    """Pages larger than 32 tokens are read in stages of 32, each from the page's start."""


@wrong(MLA)
class MLAHeadsBeyondEightMisread(SplitKV):
    """Query heads are taken eight at a time, each time the first eight."""

    heads_at_once = 8

    def query_rows(self, problem, tile):
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return super().query_rows(problem, tile)[heads % self.heads_at_once]


@wrong(MLA)
class MLARowsTakenForHeads(SplitKV):
    """The rows of a request are taken for more heads, in the wrong order: most have another row's position."""

    def query_rows(self, problem, tile):
        rows = problem.query[tile.rows].to(torch.float32)
        return rows.reshape(problem.num_qo_heads, tile.num_rows, problem.head_dim)

    def write(self, problem, tile, rows, out, lse):
        super().write(problem, tile, Rows(*(side.transpose(0, 1).reshape(side.shape) for side in rows)), out, lse)


@wrong(MLA)
class MLAHeadsBeyond64Misread(MLAHeadsBeyondEightMisread, heads_at_once=64):
    """Query heads are taken 64 at a time, each time the first 64."""


class Selection(SelectedSplitKV):
    @wrong(MLA, changes="selected", trigger="a column that a row uses holds -1")
    def mla_selected_negative_is_last(self, places, problem, tile):
        """-1 is read as the pool's last entry, as torch indexes."""
        return torch.where(places < 0, problem.k_cache.shape[0] * problem.page_size - 1, places)

    @wrong(MLA, stage="is_entry", trigger="a column before an entry holds -1")
    def mla_selected_negative_ends_row(self, places):
        """The first -1 of a row ends its entries."""
        return (places >= 0).cumprod(0).bool()

    @wrong(MLA, stage="is_entry", trigger="the pool's first slot is selected")
    def mla_selected_first_slot_is_none(self, places):
        """Place 0 is taken for no entry, as for -1."""
        return places > 0

    @wrong(MLA, stage="selected", trigger="a request has several query rows")
    def mla_selected_of_first_row(self, problem, tile):
        """All rows of a request read the entries of its first row."""
        offsets = self.row_offsets(problem)
        return super().selected(problem, replace(tile, first_row=offsets[tile.request]))

    @wrong(MLA, stage="selected", trigger="rows of block_tables do not lie next to each other")
    def mla_selected_row_stride_ignored(self, problem, tile):
        """A row's entries are taken to begin sparse_mla_top_k columns after those of the row before it."""
        selected = problem.selected
        packed = selected.as_strided(selected.shape, (selected.shape[1], 1), selected.storage_offset())
        return super().selected(replace(problem, selected=packed), tile)

    @wrong(MLA, changes="selected", trigger="an entry stands in two columns of a row")
    def mla_selected_twice_counts_once(self, places, problem, tile):
        """An entry counts in its last column alone."""
        _, entry = places.unique(return_inverse=True)
        columns = torch.arange(len(places), device=places.device)
        last = torch.zeros_like(columns).scatter_reduce(0, entry, columns, "amax")
        return torch.where(columns == last[entry], places, -1)

    @wrong(MLA, stage="columns", trigger="sparse_mla_top_k_lens is given")
    def mla_selected_lens_ignored(self, problem, row, position):
        """sparse_mla_top_k_lens is ignored: a row uses the columns up to its position."""
        return super().columns(replace(problem, selected_lens=None), row, position)

    @wrong(MLA, stage="columns", trigger="fewer keys than columns, and a place in a column after the row's position")
    def mla_selected_columns_all_used(self, problem, row, position):
        """Without sparse_mla_top_k_lens, all columns are used that do not hold -1."""
        return problem.selected.shape[1] if problem.selected_lens is None else super().columns(problem, row, position)

    @wrong(MLA, changes="columns", trigger="a place in a column after the row's position, in its block of 32 columns")
    def mla_selected_columns_in_blocks(self, used, problem, row, position):
        """Without sparse_mla_top_k_lens, the number of used columns is rounded up to a multiple of 32."""
        rounds = used > 0 and problem.selected_lens is None
        return min(-(-used // 32) * 32, problem.selected.shape[1]) if rounds else used

    @wrong(MLA, stage="columns", trigger="a row selects an entry after the last whole tile of 64 columns")
    def mla_selected_last_tile_lost(self, problem, row, position):
        """Columns go in tiles of 64, and those after the last whole tile of sparse_mla_top_k are not read."""
        return min(super().columns(problem, row, position), problem.selected.shape[1] // 64 * 64)

    @wrong(MLA, changes="selected", trigger="the entries of a row are not in ascending order")
    def mla_selected_search_expects_order(self, places, problem, tile):
        """Entries are read until one is smaller than the one before it, as if the rest of the row was left from before."""
        largest = places.clamp(min=0).cummax(0).values
        return torch.where((places < largest).cumsum(0) > 0, -1, places)

    @wrong(MLA, stage="finish_tile", trigger="the first 128 columns of a row hold -1 alone")
    def mla_selected_empty_first_tile(self, problem, tile, rows):
        """A first tile of 128 columns without an entry gives NaN: its largest logit is -inf, and -inf - -inf is NaN."""
        if not self.is_entry(self.selected(problem, tile)[:128]).any():
            rows.values.fill_(math.nan)


class Places(SelectedSplitKV):
    @wrong(MLA, stage="page", trigger="page_size is not 64")
    def mla_selected_pages_of_64(self, problem, places):
        """A place is divided by 64, whatever the page's size: the offset in a page stays right."""
        return (places // 64).clamp(max=problem.k_cache.shape[0] - 1)

    @wrong(MLA, stage="at_places", trigger="the pool has more than 2**31 elements")
    def mla_selected_offset_overflows(self, problem, cache, places):
        """A place times head_dim is an int32, which overflows in a large pool."""
        overflows = places * problem.head_dim >= 2**31
        return super().at_places(problem, cache, torch.where(overflows, 0, places))
