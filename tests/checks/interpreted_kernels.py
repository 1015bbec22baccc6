"""Kernels that do something to the reference's output in Triton: what its interpreter computes right, cuts off, or computes
wrongly in bf16.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from lab.kernels.portable.softmax import rounded
from lab.references import trtllm_batch_decode_with_kv_cache as right
from tests.checks.small import decoding

WIDTH = 64


@triton.jit
def _store(x, out, FACTOR: tl.constexpr):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + at, (tl.load(x + at) * FACTOR).to(out.dtype.element_ty))


@triton.jit
def _store_rounded(x, out, FACTOR: tl.constexpr):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    tl.store(out + at, tl.where(at >= 0, rounded(tl.load(x + at) * FACTOR, out.dtype.element_ty), tl.load(out + at)))


@triton.jit
def _multiply(x, out, FACTOR: tl.constexpr):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    x = rounded(tl.load(x + at) * FACTOR, out.dtype.element_ty)
    tl.store(out + at, x * tl.full([64], 1.0, tl.float32).to(out.dtype.element_ty))


@triton.jit
def _sum(x, out, FACTOR: tl.constexpr):
    at = tl.program_id(0) * 64 + tl.arange(0, 64)
    x = rounded(tl.load(x + at) * FACTOR * 0.5, out.dtype.element_ty)
    tl.store(out + at, tl.sum(tl.join(x, x), 1).to(out.dtype.element_ty))


KERNELS = {"store": _store, "store_rounded": _store_rounded, "multiply": _multiply, "sum": _sum}


def stored_by(kernel: str, factor: float = 1.0) -> SimpleNamespace:
    """The reference's decode, whose output, times a factor, a Triton kernel stores."""
    return decoding(_through(KERNELS[kernel], factor))


def _through(kernel: Any, factor: float) -> Callable[..., Any]:
    def decode(**arguments: Any) -> Any:
        if arguments.pop("return_lse", False):
            raise NotImplementedError("no LSE")
        query = arguments["query"]
        out = arguments.pop("out", None)
        exact = right(**arguments, out=torch.empty(query.shape, dtype=torch.float32))
        out = torch.empty_like(query) if out is None else out
        kernel[(exact.numel() // WIDTH,)](exact.contiguous(), out, factor)
        return out

    return decode
