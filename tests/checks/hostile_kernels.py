"""Kernels that take a CUDA context with them, or never return, for some calls; for all others, the portable ones."""

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


def launch_an_alias(**arguments: Any) -> None:
    _alias[(1,)](torch.ones(2))


def launch_assembly(**arguments: Any) -> None:
    _assembly[(1,)](torch.ones(2))


def launch_an_assertion(**arguments: Any) -> None:
    _assertion[(1,)](torch.ones(2))


def launch_a_wrong_product(**arguments: Any) -> None:
    _wrong_product[(1,)](torch.ones(2))


def launch_a_wrong_axis(**arguments: Any) -> None:
    _wrong_axis[(1,)](torch.ones(2))


class Illegal:
    """Reads an illegal address in calls of one head_dim."""

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        query = arguments["query"]
        if query.shape[2] == HOSTILE_HEAD_DIM:
            _read_illegal_address[(1,)](torch.zeros(1, dtype=torch.int64, device=query.device), 2**40)
        return portable.trtllm_batch_decode_with_kv_cache(**arguments)


class Endless:
    """Never returns from calls of one head_dim."""

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Any:
        query = arguments["query"]
        if query.shape[2] == HOSTILE_HEAD_DIM:
            _never_return[(1,)](torch.zeros(1, dtype=torch.int32, device=query.device))
        return portable.trtllm_batch_decode_with_kv_cache(**arguments)


illegal, endless = Illegal(), Endless()
