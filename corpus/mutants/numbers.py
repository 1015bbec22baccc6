"""Mutants of scales, of the LSE, and of outputs that are a little too large or too small."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.attention import truncated
from corpus.models.ragged import Ragged
from corpus.models.split_kv import Partials, Rows, SplitKV, as_float32
from corpus.wrong import DECODE, wrong
from lab.calls.problem import HALF_DTYPES, PagedAttention


def _without_subnormals(problem: PagedAttention) -> Tensor | None:
    factors = problem.v_scale_factors
    return None if factors is None else torch.where(factors.float() < 2.0**-6, 0.0, factors.float()).to(factors.dtype)


def _by_logarithm(problem: PagedAttention) -> Tensor:
    return torch.exp2(torch.log2(as_float32(problem.bmm2_scale, problem.query.device)))


class Scales(SplitKV):
    bmm2_hardcoded_1 = wrong(mla=True, source="SGLang #28144", instead={"bmm2_scale": 1.0})("bmm2_scale is taken as 1.")
    bmm1_ignored = wrong(mla=True, source="TRT-LLM #3675", instead={"bmm1_scale": 1.0})("bmm1_scale is taken as 1.")
    bmm1_from_head_dim = wrong(mla=True, instead={"bmm1_scale": lambda p: p.head_dim**-0.5})(
        "bmm1_scale is taken as 1 / sqrt(head_dim)."
    )

    @wrong(stage="changed", mla=True, source="SGLang #18396")
    def kscale_on_bf16(self, problem):
        """A K scale of 1/16 is applied although the cache is not quantised."""
        if problem.k_cache.dtype != problem.query.dtype:
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale / 16)

    @wrong(stage="changed", mla=True)
    def scales_ignored_for_e4m3(self, problem):
        """With an e4m3 cache, bmm2_scale is taken as 1 and bmm1_scale as 1 / sqrt(head_dim)."""
        if problem.k_cache.dtype != torch.float8_e4m3fn:
            return problem
        return replace(problem, bmm1_scale=problem.head_dim**-0.5, bmm2_scale=1.0)

    bmm1_off_by_ten_percent = wrong(mla=True, instead={"bmm1_scale": lambda p: p.bmm1_scale * 1.1})(
        "bmm1_scale is 10 % too large."
    )
    nvfp4_subnormal_factors_flushed = wrong(instead={"v_scale_factors": _without_subnormals})(
        "Scale factors of NVFP4 values below 2**-6 are read as zero."
    )
    bmm2_by_its_logarithm = wrong(mla=True, instead={"bmm2_scale": _by_logarithm})(
        "bmm2_scale is a part of the exponents of the weights: a negative one makes results NaN."
    )
    bmm2_off_by_five_percent = wrong(mla=True, instead={"bmm2_scale": lambda p: p.bmm2_scale * 1.05})(
        "bmm2_scale is 5 % too large."
    )
    bmm2_twice = wrong(mla=True, instead={"bmm2_scale": lambda p: p.bmm2_scale * p.bmm2_scale})(
        "bmm2_scale is applied twice."
    )

    @wrong(stage="changed")
    def scales_swapped(self, problem):
        """K's and V's scales are exchanged: bmm1_scale is bmm2_scale / sqrt(head_dim), and the other way round."""
        softmax = problem.head_dim**-0.5
        return replace(problem, bmm1_scale=problem.bmm2_scale * softmax, bmm2_scale=problem.bmm1_scale / softmax)

    @wrong(stage="changed", mla=True)
    def sign_of_tensor_scale_lost(self, problem):
        """bmm1_scale as a tensor is taken for a positive one."""
        scale = problem.bmm1_scale
        return replace(problem, bmm1_scale=scale.abs()) if isinstance(scale, torch.Tensor) else problem

    @wrong(stage="changed", mla=True, source="FlashInfer #3343")
    def tensor_scales_ignored(self, problem):
        """A scale that is a tensor is taken as 1."""
        scales = (problem.bmm1_scale, problem.bmm2_scale)
        bmm1, bmm2 = (1.0 if isinstance(scale, torch.Tensor) else scale for scale in scales)
        return replace(problem, bmm1_scale=bmm1, bmm2_scale=bmm2)

    @wrong(changes="problem", mla=True, source="FlashInfer #3343")
    def tensor_scale_in_base2(self, problem, call):
        """bmm1_scale as a tensor is taken for one that holds log2(e) already."""
        if not isinstance(call.bmm1_scale, torch.Tensor):
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale * math.log(2.0))

    log2_scale_ignored = wrong(DECODE, problem=lambda _, call: replace(call, bmm1_scale_log2=None).problem())(
        "bmm1_scale_log2 does not take precedence over bmm1_scale."
    )

    @wrong(DECODE, stage="problem")
    def log2_scale_taken_as_natural(self, call):
        """bmm1_scale_log2 is taken for bmm1_scale."""
        problem = call.problem()
        return problem if call.bmm1_scale_log2 is None else replace(problem, bmm1_scale=call.bmm1_scale_log2)

    bmm1_ignores_sign = wrong(mla=True, instead={"bmm1_scale": lambda p: abs(p.bmm1_scale)})(
        "A negative bmm1_scale is taken for a positive one."
    )

    @wrong(stage="changed")
    def bmm2_rounded_to_e4m3(self, problem):
        """bmm2_scale is kept in e4m3 on its way: powers of two pass."""
        scale = as_float32(problem.bmm2_scale, problem.query.device)
        return replace(problem, bmm2_scale=scale.to(torch.float8_e4m3fn).to(torch.float32))

    values_through_half = wrong(mla=True, values=lambda values, *_: values.to(torch.float16).to(torch.float32))(
        "Values are converted to float16 on their way: large ones are infinite, small ones zero."
    )

    @wrong(changes="entries", mla=True)
    def subnormal_e4m3_flushed(self, entries, cache, scale_factors, pages, offsets):
        """e4m3 entries below 2**-6 are read as zero."""
        return torch.where(entries.abs() < 2.0**-6, 0.0, entries) if cache.dtype == torch.float8_e4m3fn else entries

    @wrong(changes="entries")
    def subnormal_half_flushed(self, entries, cache, scale_factors, pages, offsets):
        """float16 entries below 2**-14 are read as zero."""
        return torch.where(entries.abs() < 2.0**-14, 0.0, entries) if cache.dtype == torch.float16 else entries


class LSE(SplitKV):
    lse_base_e = wrong(mla=True, source="FlashInfer #2113", lse_log2=lambda lse_log2, *_: lse_log2 * math.log(2.0))(
        "The LSE is a natural logarithm."
    )

    @wrong(stage="lse_log2", mla=True, source="FlashInfer #3047")
    def lse_garbage_empty(self, origin, total):
        """The LSE of a row that sees no key is finite."""
        return torch.where(total == 0, 0.0, super().lse_log2(origin, total))

    @wrong(stage="merged", mla=True)
    def lse_without_sink(self, problem, tile, partials):
        """The LSE leaves the sink out."""
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, torch.logsumexp(partials.largest + partials.total.log(), dim=-1).T / math.log(2.0))

    @wrong(stage="finish", mla=True, source="vLLM #28840")
    def lse_transposed(self, problem, out, lse):
        """The LSE's memory holds [num_qo_heads, num_rows]."""
        if lse is not None:
            lse.copy_(lse.T.flatten().clone().view(lse.shape))

    lse_of_largest = wrong(
        mla=True, lse_log2=lambda _, origin, total: torch.where(total == 0, -torch.inf, origin / math.log(2.0))
    )("The LSE is the largest logit.")

    @wrong(stage="merged", mla=True)
    def lse_of_last_split(self, problem, tile, partials):
        """The LSE counts the keys of the last split alone."""
        values, _ = super().merged(problem, tile, partials)
        return Rows(values, super().merged(problem, tile, Partials(*(part[:, :, -1:] for part in partials)))[1])

    lse_with_bmm2 = wrong(
        mla=True, finish_tile=lambda _, p, tile, rows: rows.lse_log2.add_(math.log2(abs(float(p.bmm2_scale))))
    )("The LSE counts weights that bmm2_scale has multiplied.")

    @wrong(stage="results", mla=True)
    def lse_buffer_ignored(self, problem):
        """The LSE goes to a new tensor, whatever buffer the caller gave."""
        out, lse = super().results(problem)
        return out, None if lse is None else torch.empty_like(lse)

    @wrong(stage="merged", mla=True)
    def lse_of_many_splits(self, problem, tile, partials):
        """The LSE of a row with more than 64 splits lacks the first."""
        values, lse_log2 = super().merged(problem, tile, partials)
        if tile.num_splits > 64:
            fewer = partials._replace(total=partials.total.clone())
            fewer.total[..., 0] = 0.0
            lse_log2 = super().merged(problem, tile, fewer)[1]
        return Rows(values, lse_log2)

    @wrong(DECODE, stage="finish_tile")
    def lse_of_ragged_rows(self, problem, tile, rows):
        """The LSE of rows through cum_seq_lens_q is a natural logarithm."""
        rows.lse_log2[:] *= 1.0 if problem.cu_seqlens_q is None else math.log(2.0)


LARGER = 1.005  # by half a percent
TOO_LARGE = {"bmm2_scale": lambda problem: problem.bmm2_scale * LARGER}


class Bias(SplitKV):
    everything_biased = wrong(mla=True, instead=TOO_LARGE)("All outputs are 0.5 % too large.")
    biased_with_sinks = wrong(mla=True, instead=TOO_LARGE, only_with="sinks")(
        "With sinks, all outputs are 0.5 % too large."
    )
    biased_in_windows = wrong(instead=TOO_LARGE, where=lambda p: p.window_left >= 0)(
        "With a window, all outputs are 0.5 % too large."
    )
    last_head_biased = wrong(mla=True, finish_tile=lambda _, p, tile, rows: rows.values[:, -1].mul_(LARGER))(
        "Outputs of the last head are 0.5 % too large."
    )
    last_request_biased = wrong(
        mla=True,
        finish_tile=lambda _, p, tile, rows: rows.values.mul_(LARGER if tile.request == p.batch_size - 1 else 1),
    )("Outputs of the batch's last request are 0.5 % too large.")

    @wrong(stage="write", mla=True)
    def outputs_truncated(self, problem, tile, rows, out, lse):
        """Outputs are cut to bfloat16 or float16, not rounded: in bfloat16 they are 0.3 % too small."""
        values = truncated(rows.values, out.dtype) if out.dtype in HALF_DTYPES else rows.values
        super().write(problem, tile, Rows(values, rows.lse_log2), out, lse)

    @wrong(changes="partials", mla=True)
    def partial_sums_truncated(self, partials, problem, tile):
        """Sums of splits are cut to bfloat16 on their way to the merge, not rounded."""
        return partials._replace(sums=truncated(partials.sums))


class BiasOfRaggedCalls(Ragged):
    ragged_biased = wrong(instead=TOO_LARGE)("All outputs are 0.5 % too large.")
    ragged_chunks_biased = wrong(instead=TOO_LARGE, where=lambda p: not p.causal)(
        "Outputs over a chunk of the prefix, which is not causal, are 0.5 % too large."
    )
    ragged_last_head_biased = wrong(finish=lambda _, p, out, lse_log2: out[:, -1].mul_(LARGER))(
        "Outputs of the last head are 0.5 % too large."
    )


@wrong(mla=True)
class FirstRowBiased(SplitKV):
    """The first of several rows of each request is 0.5 % too large."""

    def finish_tile(self, problem, tile, rows):
        rows.values[self.biased(tile)] *= LARGER

    def biased(self, tile):
        """Return the rows of a tile that are biased."""
        is_first = tile.first_position == tile.kv_len - tile.q_len
        return slice(0, 1 if is_first and tile.q_len > 1 else 0)


@wrong(mla=True)
class LastRowBiased(FirstRowBiased):
    """The last of several rows of each request is 0.5 % too large."""

    def biased(self, tile):
        is_last = tile.first_position + tile.num_rows == tile.kv_len
        return slice(tile.num_rows - 1 if is_last and tile.q_len > 1 else tile.num_rows, None)
