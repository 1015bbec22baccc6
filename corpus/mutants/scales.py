"""Mutants of the two scales."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.mutant import DECODE
from corpus.mutants.split_kv import Call, SplitKV, as_float32
from lab.calls import DecodeCall
from lab.calls.problem import PagedAttention


class Bmm2Hardcoded_1(SplitKV, mla=True, source="SGLang #28144", instead={"bmm2_scale": 1.0}):  # noqa: N801
    """bmm2_scale is taken as 1."""


class Bmm1Ignored(SplitKV, mla=True, source="TRT-LLM #3675", instead={"bmm1_scale": 1.0}):
    """bmm1_scale is taken as 1."""


class Bmm1FromHeadDim(SplitKV, mla=True, instead={"bmm1_scale": lambda problem: problem.head_dim**-0.5}):
    """bmm1_scale is taken as 1 / sqrt(head_dim)."""


class KscaleOnBf16(SplitKV, mla=True, source="SGLang #18396"):
    """A K scale of 1/16 is applied although the cache is not quantised."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        if problem.k_cache.dtype != problem.query.dtype:
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale / 16)


class ScalesIgnoredForE4m3(SplitKV, mla=True):
    """With an e4m3 cache, bmm2_scale is taken as 1 and bmm1_scale as 1 / sqrt(head_dim)."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        if problem.k_cache.dtype != torch.float8_e4m3fn:
            return problem
        return replace(problem, bmm1_scale=problem.head_dim**-0.5, bmm2_scale=1.0)


class Bmm1OffByTenPercent(SplitKV, mla=True, instead={"bmm1_scale": lambda problem: problem.bmm1_scale * 1.1}):
    """bmm1_scale is 10 % too large."""


def _without_subnormals(problem: PagedAttention) -> Tensor | None:
    factors = problem.v_scale_factors
    return None if factors is None else torch.where(factors.float() < 2.0**-6, 0.0, factors.float()).to(factors.dtype)


class Nvfp4SubnormalFactorsFlushed(SplitKV, instead={"v_scale_factors": _without_subnormals}):
    """Scale factors of NVFP4 values below 2**-6 are read as zero."""


def _by_logarithm(problem: PagedAttention) -> Tensor:
    return torch.exp2(torch.log2(as_float32(problem.bmm2_scale, problem.query.device)))


class Bmm2ByItsLogarithm(SplitKV, mla=True, instead={"bmm2_scale": _by_logarithm}):
    """bmm2_scale is a part of the exponents of the weights: a negative one makes results NaN."""


class Bmm2OffByFivePercent(SplitKV, mla=True, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * 1.05}):
    """bmm2_scale is 5 % too large."""


class Bmm2Twice(SplitKV, mla=True, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * problem.bmm2_scale}):
    """bmm2_scale is applied twice."""


class ScalesSwapped(SplitKV):
    """K's and V's scales are exchanged: bmm1_scale is bmm2_scale / sqrt(head_dim), and the other way round."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        softmax = problem.head_dim**-0.5
        return replace(problem, bmm1_scale=problem.bmm2_scale * softmax, bmm2_scale=problem.bmm1_scale / softmax)


class SignOfTensorScaleLost(SplitKV, mla=True):
    """bmm1_scale as a tensor is taken for a positive one."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        scale = problem.bmm1_scale
        return replace(problem, bmm1_scale=scale.abs()) if isinstance(scale, torch.Tensor) else problem


class TensorScalesIgnored(SplitKV, mla=True, source="FlashInfer #3343"):
    """A scale that is a tensor is taken as 1."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        scales = (problem.bmm1_scale, problem.bmm2_scale)
        bmm1, bmm2 = (1.0 if isinstance(scale, torch.Tensor) else scale for scale in scales)
        return replace(problem, bmm1_scale=bmm1, bmm2_scale=bmm2)


class TensorScaleInBase2(SplitKV, mla=True, source="FlashInfer #3343"):
    """bmm1_scale as a tensor is taken for one that holds log2(e) already."""

    def problem(self, call: Call) -> PagedAttention:
        problem = super().problem(call)
        if not isinstance(call.bmm1_scale, torch.Tensor):
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale * math.log(2.0))


class Log2ScaleIgnored(SplitKV, interface=(DECODE,)):
    """bmm1_scale_log2 does not take precedence over bmm1_scale."""

    def problem(self, call: Call) -> PagedAttention:
        assert isinstance(call, DecodeCall)
        return replace(call, bmm1_scale_log2=None).problem()


class Log2ScaleTakenAsNatural(SplitKV, interface=(DECODE,)):
    """bmm1_scale_log2 is taken for bmm1_scale."""

    def problem(self, call: Call) -> PagedAttention:
        assert isinstance(call, DecodeCall)
        problem = call.problem()
        return problem if call.bmm1_scale_log2 is None else replace(problem, bmm1_scale=call.bmm1_scale_log2)


class Bmm1IgnoresSign(SplitKV, mla=True, instead={"bmm1_scale": lambda problem: abs(problem.bmm1_scale)}):
    """A negative bmm1_scale is taken for a positive one."""


class Bmm2RoundedToE4m3(SplitKV):
    """bmm2_scale is kept in e4m3 on its way: powers of two pass."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        scale = as_float32(problem.bmm2_scale, problem.query.device)
        return replace(problem, bmm2_scale=scale.to(torch.float8_e4m3fn).to(torch.float32))


class ValuesThroughHalf(SplitKV, mla=True, values=lambda values, *_: values.to(torch.float16).to(torch.float32)):
    """Values are converted to float16 on their way: large ones are infinite, small ones zero."""


class SubnormalE4m3Flushed(SplitKV, mla=True):
    """e4m3 entries below 2**-6 are read as zero."""

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        entries = super().entries(cache, scale_factors, pages, offsets)
        return torch.where(entries.abs() < 2.0**-6, 0.0, entries) if cache.dtype == torch.float8_e4m3fn else entries


class SubnormalHalfFlushed(SplitKV):
    """float16 entries below 2**-14 are read as zero."""

    def entries(self, cache: Tensor, scale_factors: Tensor | None, pages: Tensor, offsets: Tensor) -> Tensor:
        entries = super().entries(cache, scale_factors, pages, offsets)
        return torch.where(entries.abs() < 2.0**-14, 0.0, entries) if cache.dtype == torch.float16 else entries
