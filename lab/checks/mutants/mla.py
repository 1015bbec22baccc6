"""Mutants of the MLA decode call: defects of the other modules that can meet it too, and its own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.checks.mutants import batching, caching, lse, masks, memory, merging, pages, scales
from lab.checks.mutants.mutant import MLA_DECODE, Mutant
from lab.checks.mutants.split_kv import Call, Forgiving, Partials, RowTile, SplitKV, as_float32


def of_mla(defective: type[SplitKV]) -> Mutant:
    """The mutant whose MLA decode call has a class's defect: "mla_" before its name."""
    mutant = Mutant.of(defective)
    return replace(mutant, name=f"mla_{mutant.name}", interface=(MLA_DECODE,))


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


class Bmm1OfUnabsorbedHead(SplitKV):
    """bmm1_scale is taken as 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim), the head before absorption."""

    def problem(self, call: Call) -> PagedAttention:
        assert isinstance(call, MLADecodeCall)
        return replace(call.problem(), bmm1_scale=(call.qk_nope_head_dim + call.qk_rope_head_dim) ** -0.5)


class Bmm2OnLogitsToo(SplitKV):
    """bmm2_scale, for a scale of the cache as such, multiplies the logits too."""

    def scores(self, problem: PagedAttention, query: Tensor, keys: Tensor) -> Tensor:
        return super().scores(problem, query, keys) * as_float32(problem.bmm2_scale, query.device)


class VFromLastColumns(SplitKV):
    """A value is the last kv_lora_rank elements of its entry, qk_rope_head_dim too far."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, v_cache=problem.k_cache[..., problem.head_dim - problem.v_head_dim :])


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


class LatentPageOffsetAbsolute(pages.PageOffsetAbsolute):
    """Pages larger than 32 tokens are read in stages of 32, each from the page's start."""

    stage = 32


class HeadsBeyondEightMisread(SplitKV):
    """Query heads are taken eight at a time, each time the first eight."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return super().query_rows(problem, tile)[torch.arange(problem.num_qo_heads, device=problem.query.device) % 8]


class RowsTakenForHeads(SplitKV):
    """The rows of a request are taken for more heads, in the wrong order: most have another row's position."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        rows = problem.query[tile.rows].to(torch.float32)
        return rows.reshape(problem.num_qo_heads, tile.num_rows, problem.head_dim)

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        values, lse_log2 = (side.transpose(0, 1).reshape(side.shape) for side in (values, lse_log2))
        super().write(problem, tile, values, lse_log2, out, lse)


class SinksListIgnored(SplitKV):
    """Sinks that come in a list are ignored."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, sinks=None) if isinstance(call.sinks, list | tuple) else problem


class SinksTensorIgnored(SplitKV):
    """Sinks that come as one tensor are ignored."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return replace(problem, sinks=None) if isinstance(call.sinks, Tensor) else problem


class SinkLostWithoutKeys(SplitKV):
    """The LSE of a row that sees no key is minus infinity, whatever its sink."""

    def merged(self, problem: PagedAttention, tile: RowTile, partials: Partials) -> tuple[Tensor, Tensor]:
        values, lse_log2 = super().merged(problem, tile, partials)
        none = (partials.largest.amax(dim=-1) == -torch.inf).transpose(0, 1)
        return values, lse_log2.masked_fill(none, -torch.inf)


class HeadsBeyond64Misread(SplitKV):
    """Query heads are taken 64 at a time, each time the first 64."""

    def query_rows(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return super().query_rows(problem, tile)[torch.arange(problem.num_qo_heads, device=problem.query.device) % 64]


class LseBaseIgnored(SplitKV):
    """The LSE is in base 2, whatever return_lse_base says."""

    def launch_mla(self, call: MLADecodeCall) -> Any:
        return super().launch_mla(replace(call, return_lse_base="base2" if call.return_lse_base else None))


class HalfOutHoldsBf16(SplitKV):
    """A float16 out is filled with the bits of bfloat16."""

    def write(
        self, problem: PagedAttention, tile: RowTile, values: Tensor, lse_log2: Tensor, out: Tensor, lse: Tensor | None
    ) -> None:
        if out.dtype == torch.float16:
            out[tile.rows] = values.to(torch.bfloat16).view(torch.float16)
        else:
            super().write(problem, tile, values, lse_log2, out, lse)


class PageStrideIgnored(SplitKV):
    """Pages are taken to lie one after the other."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        cache = problem.k_cache
        strides = (cache.shape[2] * cache.stride(2), *cache.stride()[1:])
        cache = cache.as_strided(cache.shape, strides, cache.storage_offset())
        return replace(problem, k_cache=cache, v_cache=cache[..., : problem.v_head_dim])


MUTANTS = tuple(
    of_mla(each)
    for each in (
        masks.VerifyRowsAtLastPosition,
        masks.CausalAtTopLeft,
        masks.CausalExcludesItself,
        masks.ShortRequestFromItsStart,
        masks.MaskedRowUniform,
        masks.FiniteSentinel,
        masks.MaskLowersLogits,
        scales.Bmm2Hardcoded_1,
        scales.Bmm1Ignored,
        scales.Bmm1FromHeadDim,
        scales.KscaleOnBf16,
        scales.ScalesIgnoredForE4m3,
        scales.Bmm1OffByTenPercent,
        scales.Bmm2OffByFivePercent,
        scales.Bmm2Twice,
        scales.TensorScalesIgnored,
        scales.TensorScaleInBase2,
        scales.Bmm1IgnoresSign,
        pages.PagesTakenAsConsecutive,
        pages.LastPageLost,
        pages.LastKeyLost,
        pages.SeqLenOffByOne,
        pages.LengthRoundedUpToPage,
        pages.MaxLengthForOneRequest,
        pages.TableStrideIgnored,
        pages.QueryStrideIgnored,
        pages.WrapInt32,
        pages.WrapInt32Bytes,
        pages.WrapUint32Bytes,
        pages.PageIdInt16,
        pages.TailMultiply,
        pages.TailAdditiveMask,
        pages.TableTailRead,
        pages.StaleKeyOfLastToken,
        merging.MergedWithoutRescale,
        merging.MergedAsMean,
        merging.LastSplitLost,
        merging.SinkIgnored,
        merging.SinkPerSplit,
        merging.SinkOfNextHead,
        merging.SinkScaled,
        merging.SinkInBase2,
        merging.LightKeysLost,
        merging.LightSplitsLost,
        merging.OverflowsWithoutOrigin,
        merging.NondeterministicMerge,
        batching.SecondRequestHasFirstLength,
        batching.LengthsSorted,
        batching.RequestsRotated,
        batching.TableOfFirstRequest,
        batching.RequestIndexMod8,
        batching.EqualLengthsShareKeys,
        batching.RowsReversed,
        batching.OddRowCountsMisplaced,
        batching.LastRowOfEightLost,
        batching.HeadsSwapped,
        memory.Zeros,
        memory.NanInOneHead,
        memory.LengthZeroNan,
        memory.LengthZeroUntouched,
        memory.OutRowBeyond,
        memory.OutRowBefore,
        memory.LseBeyond,
        memory.OutIgnored,
        memory.OutRoundedToE4m3,
        memory.NeedsZeroOut,
        memory.QueryScaledInPlace,
        memory.SeqLensWritten,
        memory.TableTailWritten,
        memory.PageTailCleared,
        memory.CountersLeft,
        memory.CountersLeftByOtherShape,
        memory.ScratchNotCleared,
        memory.ScratchAddedTo,
        memory.ScratchInCounters,
        memory.ScratchBeyondEnd,
        memory.OutputReused,
        caching.CachedBmm1,
        caching.CachedBmm2,
        caching.CachedTensorScale,
        caching.CachedQLen,
        caching.CachedSinks,
        caching.CachedLengths,
        caching.CachedTable,
        caching.CachedLengthsByShape,
        caching.CachedKeys,
        lse.LseBaseE,
        lse.LseGarbageEmpty,
        lse.LseWithoutSink,
        lse.LseTransposed,
        lse.LseOfLargest,
        lse.LseOfLastSplit,
        lse.LseWithBmm2,
        lse.LseBufferIgnored,
        RopeLeftOut,
        RopeScaledTwice,
        Bmm1OfUnabsorbedHead,
        Bmm2OnLogitsToo,
        VFromLastColumns,
        VAfterRope,
        NegativePageIsLast,
        PageSize32TakenAs64,
        LatentPageOffsetAbsolute,
        HeadsBeyondEightMisread,
        RowsTakenForHeads,
        SinksListIgnored,
        SinksTensorIgnored,
        SinkLostWithoutKeys,
        HeadsBeyond64Misread,
        LseBaseIgnored,
        HalfOutHoldsBf16,
        PageStrideIgnored,
        batching.PaddedRowsAreRequestRows,
        batching.RaggedRowsIgnored,
        batching.RequestsBeyond32Wrap,
        merging.SplitsBeyond64Lost,
        merging.PartialSumsInHalf,
        scales.ValuesThroughHalf,
        scales.SubnormalE4m3Flushed,
        pages.WideTableRowsOf1024,
        pages.WholeTilesLoseTheLast,
        pages.UnsignedLengthsMisread,
        pages.SharedPageOfOneRequest,
        memory.EmptyBatchUntouched,
        lse.LseOfManySplits,
        batching.OtherRowsTimesZero,
    )
)
