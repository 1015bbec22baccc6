"""Kernels that take a CUDA context with them, or never return, for some calls; for all others, the portable ones."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from lab.kernels import portable

HOSTILE_HEAD_DIM = 128


@triton.jit
def _read_illegal_address(out, far):
    tl.store(out, tl.load(out + far))


@triton.jit
def _never_return(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


logarithm = tl.log2  # Triton's interpreter replaces `tl.log2` alone


@triton.jit
def _alias(out):
    tl.store(out, logarithm(tl.load(out)))


@triton.jit
def _assembly(out):
    numbers = tl.load(out + tl.arange(0, 2)).to(tl.int32)
    tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _assertion(out):
    assert out is None, "mine"


@triton.jit
def _wrong_product(out):
    numbers = tl.load(out + tl.arange(0, 2))
    tl.store(out, tl.dot(numbers, numbers))


@triton.jit
def _wrong_axis(out):
    tl.store(out, tl.sum(tl.load(out + tl.arange(0, 2)), axis=3))


def launching(kernel: Any) -> Callable[..., None]:
    return lambda **_: kernel[(1,)](torch.ones(2))


launch_an_alias, launch_assembly, launch_an_assertion = map(launching, (_alias, _assembly, _assertion))
launch_a_wrong_product, launch_a_wrong_axis = launching(_wrong_product), launching(_wrong_axis)


class Hostile:
    """Launches a kernel in calls of one head_dim."""

    def __init__(self, launch: Callable[[torch.Tensor], object]) -> None:
        self.launch = launch

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        query = arguments["query"]
        if query.shape[2] == HOSTILE_HEAD_DIM:
            self.launch(torch.zeros(1, dtype=torch.int64, device=query.device))
        return portable.trtllm_batch_decode_with_kv_cache(**arguments)


illegal = Hostile(lambda zero: _read_illegal_address[(1,)](zero, 2**40))
endless = Hostile(lambda zero: _never_return[(1,)](zero.to(torch.int32)))
