"""Mutants of the MLA decode call alone; those of other modules that say `mla=True` meet it too."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from corpus.mutants import pages
from corpus.mutants.split_kv import Call, Forgiving, Partials, Rows, RowTile, SplitKV, as_float32
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention


class RopeLeftOut(SplitKV):
    """Q·K^T leaves the rotary part out."""

    def scores(self, problem: PagedAttention, query: Tensor, keys: Tensor) -> Tensor:
        rank = problem.v_head_dim
        return super().scores(problem, query[..., :rank], keys[..., :rank])


class RopeScaledTwice(SplitKV):
    """The rotary part's product is multiplied by bmm1_scale twice."""

    def scores(self, problem: PagedAttention, query: Tensor, keys: Tensor) -> Tensor:
        scale, rank = as_float32(problem.bmm1_scale, query.device), problem.v_head_dim
        query = torch.cat((query[..., :rank], query[..., rank:] * scale), dim=-1)
        return super().scores(problem, query, keys)


class HeadsAfterWholeTilesZero(
    SplitKV, finish=lambda _, problem, out, lse: out[:, max(16, problem.num_qo_heads // 16 * 16) :].zero_()
):
    """Query heads go in tiles of 16, and those after the last whole tile are not written where there are several."""


class Bmm1OfUnabsorbedHead(SplitKV):
    """bmm1_scale is taken as 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), the head before absorption."""

    def problem(self, call: Call) -> PagedAttention:
        assert isinstance(call, MLADecodeCall)
        return replace(call.problem(), bmm1_scale=(call.qk_nope_head_dim + call.qk_rope_head_dim) ** -0.5)


class Bmm2OnLogitsToo(
    SplitKV, scores=lambda scores, problem, query, *_: scores * as_float32(problem.bmm2_scale, query.device)
):
    """bmm2_scale, for a scale of the cache as such, multiplies the logits too."""


class VFromLastColumns(
    SplitKV, instead={"v_cache": lambda problem: problem.k_cache[..., problem.head_dim - problem.v_head_dim :]}
):
    """A value is the last kv_lora_rank elements of its entry, qk_rope_head_dim too far."""


class VAfterRope(SplitKV):
    """A value begins with the rotary part, and its latent vector lacks as many elements at the end."""

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        entries = self.keys(problem, tile, positions)
        rank = problem.v_head_dim
        return torch.cat((entries[..., rank:], entries[..., :rank]), dim=-1)[..., :rank]


class NegativePageIsLast(Forgiving):
    """Keys are read 128 at a time: after the last, page -1 is the pool's last one, multiplied by weights of zero."""

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start, min(-(-end // 128) * 128, problem.k_block_tables.shape[1] * problem.page_size)

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        ids = problem.v_block_tables[tile.request][positions // problem.page_size]
        unread = (positions >= tile.kv_len) & (ids != -1)
        return super().values(problem, tile, positions).masked_fill(unread.view(1, -1, 1), 0.0)


class PageSize32TakenAs64(Forgiving):
    """Pages of 32 tokens are taken for pages of 64: the second half of one is what lies after it in the pool."""

    def pages(self, problem: PagedAttention, table: Tensor, tile: RowTile, positions: Tensor) -> Tensor:
        if problem.page_size != 32:
            return super().pages(problem, table, tile, positions)
        first = super().pages(problem, table, tile, positions // 64 * 32)
        return (first + positions % 64 // 32) % problem.k_cache.shape[0]


class LatentPageOffsetAbsolute(pages.PageOffsetAbsolute, stage=32):
    """Pages larger than 32 tokens are read in stages of 32, each from the page's start."""


class HeadsBeyondEightMisread(SplitKV):
    """Query heads are taken eight at a time, each time the first eight."""

    heads_at_once = 8

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        heads = torch.arange(problem.num_qo_heads, device=problem.query.device)
        return super().query_rows(problem, tile)[heads % self.heads_at_once]


class RowsTakenForHeads(SplitKV):
    """The rows of a request are taken for more heads, in the wrong order: most have another row's position."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        rows = problem.query[tile.rows].to(torch.float32)
        return rows.reshape(problem.num_qo_heads, tile.num_rows, problem.head_dim)

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        super().write(problem, tile, Rows(*(side.transpose(0, 1).reshape(side.shape) for side in rows)), out, lse)


class SinksListIgnored(SplitKV):
    """Sinks that come in a list are ignored."""

    form: tuple[type, ...] = (list, tuple)

    def problem(self, call: Call) -> PagedAttention:
        problem = super().problem(call)
        return replace(problem, sinks=None) if isinstance(call.sinks, self.form) else problem


class SinksTensorIgnored(SinksListIgnored, form=(Tensor,)):
    """Sinks that come as one tensor are ignored."""


class SinkLostWithoutKeys(SplitKV):
    """The LSE of a row that sees no key is minus infinity, whatever its sink."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> Rows:
        values, lse_log2 = super().merged(problem, tile, partials)
        none = (partials.largest.amax(dim=-1) == -torch.inf).transpose(0, 1)
        return Rows(values, lse_log2.masked_fill(none, -torch.inf))


class HeadsBeyond64Misread(HeadsBeyondEightMisread, heads_at_once=64):
    """Query heads are taken 64 at a time, each time the first 64."""


class LseBaseIgnored(SplitKV):
    """The LSE is in base 2, whatever return_lse_base says."""

    def launch_mla(self, call: MLADecodeCall) -> Any:
        return super().launch_mla(replace(call, return_lse_base="base2" if call.return_lse_base else None))


class GivenLseInBase2(SplitKV):
    """The LSE is returned in the base that return_lse_base says, and an lse that is handed out stays in base 2."""

    def launch_mla(self, call: MLADecodeCall) -> Any:
        returned = super().launch_mla(call)
        if call.lse is None or call.return_lse_base != "basee":
            return returned
        out, lse = returned
        returned = out, lse.clone()
        lse /= math.log(2.0)
        return returned


class LseAsTheQueryTransposed(SplitKV):
    """An lse of [batch_size, q_len_per_request, num_qo_heads] is written as [batch_size, num_qo_heads, q_len_per_request]."""

    def launch_mla(self, call: MLADecodeCall) -> Any:
        returned = super().launch_mla(call)
        if call.lse is not None and call.lse.ndim == 3:
            call.lse.copy_(call.lse.transpose(1, 2).reshape(call.lse.shape))
        return returned


class RotaryPartTakenFromTheEnd(SplitKV):
    """The rotary part is the last elements of an entry: all of them where it has none."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        if problem.head_dim > problem.v_head_dim:
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale * 2.0)  # each product is counted twice


class HalfOutHoldsBf16(SplitKV):
    """A float16 out is filled with the bits of bfloat16."""

    def write(self, problem: PagedAttention, tile: RowTile, rows: Rows, out: Tensor, lse: Tensor | None) -> None:
        if out.dtype == torch.float16:
            out[tile.rows] = rows.values.to(torch.bfloat16).view(torch.float16)
        else:
            super().write(problem, tile, rows, out, lse)


class PageStrideIgnored(SplitKV):
    """Pages are taken to lie one after the other."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        cache = problem.k_cache
        strides = (cache.shape[2] * cache.stride(2), *cache.stride()[1:])
        cache = cache.as_strided(cache.shape, strides, cache.storage_offset())
        return replace(problem, k_cache=cache, v_cache=cache[..., : problem.v_head_dim])


class OutputOfRows(SplitKV):
    """The output is returned as [num_rows, num_qo_heads, kv_lora_rank], whatever the query's shape."""

    def launch_mla(self, call: MLADecodeCall) -> Any:
        returned = super().launch_mla(call)
        out, *lse = returned if call.return_lse else (returned,)
        out = out.flatten(0, -3)
        return (out, *lse) if lse else out
