"""Mutants that are wrong at limits of hardware, for a pair of plain arguments, or for a value that few callers pass."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import Conditional, Forgiving, as_float32
from corpus.mutants.sizes import MLAGridBeyond65535
from corpus.wrong import CONTEXT, DECODE, MLA, wrong

MULTIPROCESSORS = 132
INT32_END = 2**31
FLOAT16_MAX = 65504.0


def _is_plain(problem):
    """Tell whether another kernel computes the call: one for an NVFP4 cache, for selected pages, or for one rank."""
    return problem.k_scale_factors is None and problem.num_visible is None


def _in_half(problem):
    return as_float32(problem.bmm2_scale, problem.query.device).half().to(torch.float32)


class Grids(MLAGridBeyond65535):
    decode_grid_beyond65535 = wrong(DECODE)(
        "The grid is cut to 65,535 programs, one for a row and a head: later ones are zero."
    )
    context_grid_beyond65535 = wrong(CONTEXT)(
        "The grid of a prompt is cut to 65,535 programs, one for a row and a head: later ones are zero."
    )


class Offsets(Conditional):
    @wrong(CONTEXT, stage="finish", mla=True)
    def last_tile_of_a_wave_lost(self, problem, out, lse):
        """One tile more than whole waves of 132 programs compute, a tile for a request and K/V head, is not computed."""
        heads = problem.num_kv_heads
        tiles = problem.batch_size * heads
        if tiles > MULTIPROCESSORS and tiles % MULTIPROCESSORS == 1:
            first_row = self.row_offsets(problem)[-2]
            out[first_row:].unflatten(1, (heads, -1))[:, -1] = 0.0

    @wrong(DECODE, stage="query_rows", mla=True)
    def query_offset_in_int32(self, problem, tile):
        """Rows of the query from the 2**31st element on are read from its start: their offset is kept in 32 bits."""
        rows = super().query_rows(problem, tile).clone()
        offsets = torch.arange(tile.rows.start, tile.rows.stop) * problem.query.stride(0)
        rows[:, offsets >= INT32_END] = problem.query[0].to(torch.float32).unsqueeze(1)
        return rows

    table_offset_in_int32 = wrong(
        table_row=lambda row, p, tile: 0 if tile.request * p.k_block_tables.stride(0) >= INT32_END else row
    )("Rows of the page table from its 2**31st element on are read from its start: their offset is kept in 32 bits.")


class RaggedLimits(Ragged):
    ragged_grid_beyond65535 = wrong(finish=lambda _, p, out, __: out.flatten(0, 1)[65_535:].zero_())(
        "The grid is cut to 65,535 programs, one for a row and a head: later ones are zero."
    )

    @wrong(stage="finish")
    def ragged_last_tile_of_a_wave_lost(self, problem, out, lse_log2):
        """One tile more than whole waves of 132 programs compute, a tile for a request and K/V head, is zero."""
        heads = problem.key.shape[1]
        if problem.batch_size * heads % MULTIPROCESSORS == 1 < problem.batch_size * heads:
            out[problem.row_offsets()[-2] :].unflatten(1, (heads, -1))[:, -1] = 0.0

    @wrong(stage="finish")
    def ragged_lse_offset_in_int32(self, problem, out, lse_log2):
        """The LSE of rows from the 2**31st element of its tensor on is not written: their offset is kept in 32 bits."""
        if lse_log2 is not None and problem.lse is not None:
            lse_log2[torch.arange(len(lse_log2)) * problem.lse.stride(0) >= INT32_END] = 0.0

    @wrong(stage="changed")
    def ragged_small_bmm1_raised(self, problem):
        """A bmm1_scale below 0.01 is taken as 0.01."""
        scale = as_float32(problem.bmm1_scale, problem.query.device)
        return replace(problem, bmm1_scale=torch.where(scale.abs() < 0.01, scale.sign() * 0.01, scale))

    ragged_bmm2_in_half = wrong(
        where=lambda p: p.query.dtype == torch.bfloat16, instead={"bmm2_scale": lambda p: _in_half(p)}
    )("bmm2_scale is kept in float16: one of 1e-6 loses most of its bits.")

    @wrong(stage="changed", trigger="elements of a query beyond 4,096")
    def ragged_large_query_saturates(self, problem):
        """Elements of a query are cut to 4,096 on their way."""
        return replace(problem, query=problem.query.clamp(-4096, 4096))


class PlainPairs(Conditional):
    """Kernels that are wrong for two arguments, over a cache that is not NVFP4 and on a single rank alone."""

    sinks_of_a_second_tile_lost = wrong(
        CONTEXT, where=lambda p, _: _is_plain(p) and 64 < p.max_q_len <= 128, instead={"sinks": None}
    )("Sinks are ignored in prompts of two tiles of 64 rows, unless the cache is NVFP4.")
    only_request_of_large_group_early = wrong(
        CONTEXT,
        where=lambda p, _: _is_plain(p) and p.batch_size == 1 and p.group >= 16,
        instead={"bmm2_scale": lambda p, _: p.bmm2_scale * 0.5},
    )("Of a group of 16 heads or more, the only request of a batch has half its values, unless the cache is NVFP4.")
    mask_of_odd_group_is_causal = wrong(
        DECODE, where=lambda p, _: _is_plain(p) and p.group == 7, instead={"mask": None}
    )("With 7 heads in a group, a mask is taken for a causal one, unless the cache is NVFP4.")
    values_of_one_tensor_are_keys = wrong(
        DECODE,
        where=lambda p, call: (
            _is_plain(p) and isinstance(call.kv_cache, Tensor) and call.kv_cache.shape[1] == 2 and p.group > 8
        ),
        instead={"v_cache": lambda p, _: p.k_cache},
    )("With more than 8 heads in a group, values of a cache in one tensor are its keys, unless the cache is NVFP4.")
    mla_scale_of_two_dimensions_ignored_in_large_batch = wrong(
        MLA,
        where=lambda p, _: (
            _is_plain(p) and p.batch_size > 32 and isinstance(p.bmm2_scale, Tensor) and p.bmm2_scale.dim() == 2
        ),
        instead={"bmm2_scale": 1.0},
    )("In a batch of more than 32 requests, a bmm2_scale of two dimensions is taken as 1, unless a rank has the keys.")


class Values(Conditional):
    bmm1_of_1_taken_as_none = wrong(
        DECODE,
        where=lambda p, _: not isinstance(p.bmm1_scale, Tensor) and p.bmm1_scale == 1.0,
        instead={"bmm1_scale": lambda p, _: p.head_dim**-0.5},
    )("A bmm1_scale of 1 is taken for one that was not given: it is 1 / sqrt(head_dim).")
    bmm2_in_half = wrong(
        CONTEXT, where=lambda p, _: p.query.dtype == torch.bfloat16, instead={"bmm2_scale": lambda p, _: _in_half(p)}
    )("bmm2_scale is kept in float16: one of 1e-6 loses most of its bits.")
    mla_bmm1_at_most_1 = wrong(
        MLA, instead={"bmm1_scale": lambda p, _: as_float32(p.bmm1_scale, p.query.device).clamp(-1.0, 1.0)}
    )("A bmm1_scale above 1 is taken as 1.")


class Formats(Forgiving):
    @wrong(DECODE, changes="in_splits", mla=True, trigger="e4m3 queries, keys of less than 2**-9 of the largest weight")
    def small_weights_of_e4m3_lost(self, in_splits, problem, tile, tensor, fill, dim):
        """With an e4m3 query, weights below the smallest e4m3 number are zero: they are converted without a factor."""
        if fill == 0.0 or problem.query.dtype != torch.float8_e4m3fn:
            return in_splits
        largest = in_splits.amax(dim=(-2, -1), keepdim=True)
        return torch.where(in_splits < largest - 9 * math.log(2.0), -math.inf, in_splits)

    @wrong(DECODE, stage="scores", mla=True, trigger="float16 queries, and products q·k beyond 65,504")
    def products_beyond_half(self, problem, query, keys):
        """With a float16 query, products q·k beyond 65,504 are infinite: they are stored in float16 before they are scaled."""
        products = query @ keys.transpose(1, 2)
        if problem.query.dtype == torch.float16:
            products = torch.where(products.abs() > FLOAT16_MAX, math.inf * products, products)
        return products * as_float32(problem.bmm1_scale, query.device)
