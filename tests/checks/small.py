"""Cases that a CPU judges in milliseconds, and implementations made of the reference."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Ranges

SMALL = Ranges(
    dtypes=((torch.bfloat16, torch.bfloat16),),
    groups=(2,),
    num_kv_heads=(1,),
    head_dims=(64,),
    page_sizes=(16,),
    q_lens=(1, 2),
    windows=(False,),
    sinks=(False,),
    kv_layouts=("HND",),
    nvfp4=(False,),
    long_requests=(300,),
    large_batches=(5,),
    masked_rows=(4,),
    mla_head_dims=((80, 64),),
    mla_heads=(4,),
    mla_page_sizes=(32,),
    longest=40,
)


def decoding(function: Callable[..., Any]) -> SimpleNamespace:
    """An implementation of the decode call alone."""
    return SimpleNamespace(**{AttentionCall.DECODE.value: function})


def twice_as_large_if(condition: Callable[..., bool]) -> SimpleNamespace:
    """The reference's decode, but for calls of this kind."""

    def decode(**arguments: Any) -> Any:
        if condition(**arguments):
            arguments["bmm2_scale"] = 2 * arguments.get("bmm2_scale", 1.0)
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    return decoding(decode)


def declining_if(condition: Callable[..., bool], says: str = "no") -> SimpleNamespace:
    """The reference's decode, which refuses calls of this kind."""

    def decode(**arguments: Any) -> Any:
        if condition(**arguments):
            raise NotImplementedError(says)
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    return decoding(decode)
