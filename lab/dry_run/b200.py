"""FlashInfer's TRT-LLM functions on a B200 that is not there, for CPU tensors, as trtllm-gen would read their calls.

`lab.kernels.trtllm` makes the call, FlashInfer's own launcher selects the kernel and fills its parameters, and
`lab.dry_run.arithmetic` computes attention from these alone. So `lab judge lab.dry_run.b200 --device cpu` judges *the call*: a
wrong stride, offset, length, table, window or scale of the lab's adapters gives a wrong result. It judges nothing of NVIDIA's
machine code: a kernel's bugs, its rounding and what it writes outside its output show on a B200 alone. A given
`workspace_buffer` is not used, for the judge's are smaller on a CPU than a B200's call takes: each call has the lab's own.

What rests on the kernels' table of flashinfer-cubin 0.6.13 is that there is a kernel for a call, and its mask.
"""

import functools
from collections.abc import Callable
from typing import Any

from lab.dry_run.build import NotBuiltError
from lab.dry_run.machine import machine
from lab.kernels import trtllm


def _on_a_b200(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(**arguments: Any) -> Any:
        try:
            with machine("b200", computes=True):
                return function(**arguments | {"workspace_buffer": None})
        except NotBuiltError as error:
            raise NotImplementedError(str(error)) from error

    return call


trtllm_batch_decode_with_kv_cache = _on_a_b200(trtllm.trtllm_batch_decode_with_kv_cache)
trtllm_batch_context_with_kv_cache = _on_a_b200(trtllm.trtllm_batch_context_with_kv_cache)
trtllm_batch_decode_with_kv_cache_mla = _on_a_b200(trtllm.trtllm_batch_decode_with_kv_cache_mla)
trtllm_ragged_attention_deepseek = _on_a_b200(trtllm.trtllm_ragged_attention_deepseek)
