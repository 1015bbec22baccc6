"""FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`: trtllm-gen on SM100 and SM103, XQA on SM120 and SM121.

The lab had none of these GPUs: trtllm-gen's calls were checked with FlashInfer's own launcher on a CPU (`lab.dry_run`), XQA's
by signature and simulation. The adapter always passes the backend and the base of the LSE, because FlashInfer's default base
depends on the backend. For XQA it divides `bmm1_scale` by `bmm2_scale`, because the kernel multiplies the logits by both
(mla_sm120.cu, `qkScaleLog2e`).
"""

from dataclasses import replace
from typing import Any

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.flashinfer_call import (
    PreparedCall,
    but_defaults,
    packed,
    prepared,
    supported_kernel,
    trtllm_gen_memory,
    xqa_memory,
)
from lab.kernels.support.xqa import XQA_MLA


def prepare_mla(call: MLADecodeCall, problem: PagedAttention) -> PreparedCall:
    """Return FlashInfer's MLA decode call, ready to run. It serves decode, verify and draft extend.

    `lab.calls.MLADecodeCall` documents parameters, shapes and errors. Raises NotImplementedError with the reason if the GPU's
    kernel does not support the call. Without a `workspace_buffer`, the lab's own is used. A given workspace must begin with 8
    MiB of zeros: XQA's semaphores, or trtllm-gen's counters if `multi_ctas_kv_counter_buffer` is None.
    """
    kernel = supported_kernel(problem, call.backend)
    block_tables, refreshes = packed(call.block_tables)
    changes: dict[str, Any] = {"kv_cache": problem.k_cache, "block_tables": block_tables, "sinks": problem.sinks}
    if kernel is XQA_MLA:
        changes |= {"backend": "xqa", "max_q_len": None, **xqa_memory(call, problem.query.device)}
        changes["bmm1_scale"] = float(problem.bmm1_scale) / float(problem.bmm2_scale)
        if call.out is not None:
            changes["out"] = call.out[:, 0]  # FlashInfer requires [batch_size, num_qo_heads, kv_lora_rank]
    else:
        changes |= {"backend": "trtllm-gen", **trtllm_gen_memory(call, problem)}
        if call.return_lse:
            changes["return_lse_base"] = call.return_lse_base or "base2"
    made = prepared("flashinfer.mla", call.function.value, but_defaults(call, changes), refreshes)
    return replace(made, returned=call.out) if kernel is XQA_MLA else made
