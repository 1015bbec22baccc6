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
