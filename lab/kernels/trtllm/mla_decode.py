"""FlashInfer's `trtllm_batch_decode_with_kv_cache_mla`: trtllm-gen on SM100 and SM103, XQA on SM120 and SM121.

None of these GPUs was at hand: the calls have been checked by signature and by simulation only. The adapter names the backend
and the base of the LSE, which FlashInfer otherwise chooses with it, hands sinks on as the one tensor that the kernels read,
and undoes XQA's multiplying the logits by `bmm2_scale` too (mla_sm120.cu, `qkScaleLog2e`).
"""

from dataclasses import replace
from typing import Any

from lab.calls import made_at_once, takes
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.flashinfer_call import (
    PreparedCall,
    but_defaults,
    check_workspace_size,
    packed,
    prepared,
    returning,
    supported_kernel,
    workspace_for,
)
from lab.kernels.support.xqa import XQA_MLA


@takes(MLADecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache_mla(call: MLADecodeCall) -> PreparedCall:
    """Prepare FlashInfer's MLA decode kernel: decode, verify, draft extend. Shapes, errors: `lab.calls.MLADecodeCall`.

    Without a `workspace_buffer` the lab's own is used, one per device and stream; a given one must hold 8 MiB of zeros first,
    then scratch. What the GPU's kernel does not take raises NotImplementedError with the reason of
    `lab.kernels.support.why_not`.
    """
    problem = call.problem()
    if problem.has_no_rows:
        return returning(problem, call.returned)
    kernel = supported_kernel(problem, call.backend)
    block_tables, refreshes = packed(call.block_tables)
    workspace = workspace_for(call.workspace_buffer, problem.query.device)
    changes: dict[str, Any] = {
        "kv_cache": problem.k_cache,
        "block_tables": block_tables,
        "workspace_buffer": workspace,
        "sinks": problem.sinks,
    }
    if kernel is XQA_MLA:
        check_workspace_size(workspace)
        changes |= _xqa_changes(call, problem)
    else:
        changes |= _trtllm_gen_changes(call)
    arguments = but_defaults(call, changes)
    made = prepared("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla", arguments, refreshes)
    if kernel is XQA_MLA and call.out is not None:
        return replace(made, returned=call.out)
    return made


trtllm_batch_decode_with_kv_cache_mla = made_at_once(prepare_trtllm_batch_decode_with_kv_cache_mla)


def _xqa_changes(call: MLADecodeCall, problem: PagedAttention) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "backend": "xqa",
        "bmm1_scale": float(problem.bmm1_scale) / float(problem.bmm2_scale),
        "multi_ctas_kv_counter_buffer": None,  # trtllm-gen's; XQA counts in the workspace
        "max_q_len": None,
    }
    if call.out is not None:
        changes["out"] = call.out[:, 0]  # which FlashInfer checks as [batch_size, num_qo_heads, kv_lora_rank]
    return changes


def _trtllm_gen_changes(call: MLADecodeCall) -> dict[str, Any]:
    changes: dict[str, Any] = {"backend": "trtllm-gen"}
    if call.return_lse:
        changes["return_lse_base"] = call.return_lse_base or "base2"
    return changes
