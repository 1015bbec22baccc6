"""Mutants of the MLA decode call alone; those of other modules that say `mla=True` meet it too."""

import math
from dataclasses import replace

import torch

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

    @wrong(MLA, stage="launch_mla")
    def mla_given_lse_in_base2(self, call):
        """The LSE is returned in the base that return_lse_base says, and an lse that is handed out stays in base 2."""
        returned = super().launch_mla(call)
        if call.lse is None or call.return_lse_base != "basee":
            return returned
        out, lse = returned
        returned = out, lse.clone()
        lse /= math.log(2.0)
        return returned

    @wrong(MLA, stage="launch_mla")
    def mla_lse_as_the_query_transposed(self, call):
        """An lse of [batch_size, q_len_per_request, num_qo_heads] is written as [batch_size, num_qo_heads, q_len_per_request]."""
        returned = super().launch_mla(call)
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

    @wrong(MLA, stage="launch_mla")
    def mla_output_of_rows(self, call):
        """The output is returned as [num_rows, num_qo_heads, kv_lora_rank], whatever the query's shape."""
        returned = super().launch_mla(call)
        out, *lse = returned if call.return_lse else (returned,)
        out = out.flatten(0, -3)
        return (out, *lse) if lse else out


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
