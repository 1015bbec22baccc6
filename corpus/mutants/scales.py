"""Mutants of the two scales."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.split_kv import SplitKV, as_float32
from corpus.wrong import DECODE, wrong
from lab.calls.problem import PagedAttention


def _without_subnormals(problem: PagedAttention) -> Tensor | None:
    factors = problem.v_scale_factors
    return None if factors is None else torch.where(factors.float() < 2.0**-6, 0.0, factors.float()).to(factors.dtype)


def _by_logarithm(problem: PagedAttention) -> Tensor:
    return torch.exp2(torch.log2(as_float32(problem.bmm2_scale, problem.query.device)))


class Scales(SplitKV):
    """Kernels of the two scales."""

    bmm2_hardcoded_1 = wrong(mla=True, source="SGLang #28144", instead={"bmm2_scale": 1.0})("bmm2_scale is taken as 1.")
    bmm1_ignored = wrong(mla=True, source="TRT-LLM #3675", instead={"bmm1_scale": 1.0})("bmm1_scale is taken as 1.")
    bmm1_from_head_dim = wrong(mla=True, instead={"bmm1_scale": lambda problem: problem.head_dim**-0.5})(
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

    bmm1_off_by_ten_percent = wrong(mla=True, instead={"bmm1_scale": lambda problem: problem.bmm1_scale * 1.1})(
        "bmm1_scale is 10 % too large."
    )
    nvfp4_subnormal_factors_flushed = wrong(instead={"v_scale_factors": _without_subnormals})(
        "Scale factors of NVFP4 values below 2**-6 are read as zero."
    )
    bmm2_by_its_logarithm = wrong(mla=True, instead={"bmm2_scale": _by_logarithm})(
        "bmm2_scale is a part of the exponents of the weights: a negative one makes results NaN."
    )
    bmm2_off_by_five_percent = wrong(mla=True, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * 1.05})(
        "bmm2_scale is 5 % too large."
    )
    bmm2_twice = wrong(mla=True, instead={"bmm2_scale": lambda problem: problem.bmm2_scale * problem.bmm2_scale})(
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

    @wrong(stage="problem", mla=True, source="FlashInfer #3343")
    def tensor_scale_in_base2(self, call):
        """bmm1_scale as a tensor is taken for one that holds log2(e) already."""
        problem = super().problem(call)
        if not isinstance(call.bmm1_scale, torch.Tensor):
            return problem
        return replace(problem, bmm1_scale=problem.bmm1_scale * math.log(2.0))

    @wrong(DECODE, stage="problem")
    def log2_scale_ignored(self, call):
        """bmm1_scale_log2 does not take precedence over bmm1_scale."""
        return replace(call, bmm1_scale_log2=None).problem()

    @wrong(DECODE, stage="problem")
    def log2_scale_taken_as_natural(self, call):
        """bmm1_scale_log2 is taken for bmm1_scale."""
        problem = call.problem()
        return problem if call.bmm1_scale_log2 is None else replace(problem, bmm1_scale=call.bmm1_scale_log2)

    bmm1_ignores_sign = wrong(mla=True, instead={"bmm1_scale": lambda problem: abs(problem.bmm1_scale)})(
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

    @wrong(stage="entries", mla=True)
    def subnormal_e4m3_flushed(self, cache, scale_factors, pages, offsets):
        """e4m3 entries below 2**-6 are read as zero."""
        entries = super().entries(cache, scale_factors, pages, offsets)
        return torch.where(entries.abs() < 2.0**-6, 0.0, entries) if cache.dtype == torch.float8_e4m3fn else entries

    @wrong(stage="entries")
    def subnormal_half_flushed(self, cache, scale_factors, pages, offsets):
        """float16 entries below 2**-14 are read as zero."""
        entries = super().entries(cache, scale_factors, pages, offsets)
        return torch.where(entries.abs() < 2.0**-14, 0.0, entries) if cache.dtype == torch.float16 else entries
