"""FlashAttention-4 (`flash-attn-4`, CuTe DSL) under the names of FlashInfer's decode and context calls: SM90, SM100, SM103.

The package is imported at the first call. A call that differs from earlier ones in more than lengths compiles for some seconds.
A prepared call reads the current lengths and page ids on the device, also in a CUDA graph. On SM100 and SM103
FlashAttention-4's heuristic chooses how keys are split. The lab calls `_flash_attn_fwd` of 4.0.0b36, because
`flash_attn_varlen_func` has no `out`. The package's LSE is a natural logarithm: one more launch converts it to base 2.
"""

import math
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import PagedAttention
from lab.gpus import SM100, capability_of, family_of
from lab.kernels.flashinfer_call import Ready, entries, installed_function
from lab.kernels.support.peers import FLASH_ATTENTION_4

FUNCTION, WRITTEN_FOR = "flash_attn.cute.interface._flash_attn_fwd", "flash-attn-4 4.0.0b36"
LOG2_E = math.log2(math.e)
BY_ITS_HEURISTIC = 0  # value of `num_splits`


def _prepare(call: DecodeCall | ContextCall, problem: PagedAttention) -> Ready:
    """Return a function that runs a decode or context call by FlashAttention-4. `lab.calls.DecodeCall` and `ContextCall`
    document shapes and errors. Raises NotImplementedError with the reason if FlashAttention-4 does not support the call.
    `workspace_buffer` is not used.
    """
    out, lse = problem.results()
    splits = family_of(capability_of(problem.query.device)) is SM100
    arguments: dict[str, Any] = {
        "q": _by_request(problem, problem.query),
        "k": problem.k_cache.transpose(1, 2),
        "v": problem.v_cache.transpose(1, 2),
        "cu_seqlens_q": problem.cu_seqlens_q,
        "seqused_k": problem.seq_lens.view(torch.int32),
        "max_seqlen_q": problem.max_q_len,
        "max_seqlen_k": max(problem.max_kv_len, 1),
        "page_table": problem.k_block_tables,
        "softmax_scale": float(problem.bmm1_scale),
        "causal": problem.causal,
        "window_size_left": problem.window_left if problem.window_left >= 0 else None,
        "learnable_sink": problem.sinks,
        "num_splits": BY_ITS_HEURISTIC if splits else 1,
        "out": _by_request(problem, out),
    }
    if lse is not None:  # the package's LSE has heads before rows
        arguments["lse"] = torch.empty(_by_request(problem, lse).mT.shape, dtype=lse.dtype, device=lse.device)
    attend = installed_function(__name__, FUNCTION, WRITTEN_FOR, frozenset(arguments))

    def run() -> Any:
        attend(**arguments)
        if lse is not None:
            torch.mul(arguments["lse"].mT, LOG2_E, out=_by_request(problem, lse))
        return problem.returned(out, lse)

    return run


def _by_request(problem: PagedAttention, rows: torch.Tensor) -> torch.Tensor:
    if problem.cu_seqlens_q is not None:
        return rows
    return rows.unflatten(0, (problem.batch_size, problem.max_q_len))


prepare_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries(
    "prepare", DecodeCall, _prepare, FLASH_ATTENTION_4
)
prepare_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries(
    "prepare", ContextCall, _prepare, FLASH_ATTENTION_4
)
