"""FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper` under the name of the ragged context call, for GPUs without trtllm-gen.

The module's functions run FA3 on SM90 and FA2 on other GPUs. The module's attributes `fa2` and `fa3` have the same functions
for one backend, as in `lab judge lab.kernels.peers.flashinfer_ragged:fa2`.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch

from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.kernels.flashinfer_call import PreparedCall, installed, scratch_for
from lab.kernels.peers.planned import PlannedWrapper
from lab.kernels.trtllm.ragged_context import fill_rows_without_keys

NAME = "trtllm_ragged_attention_deepseek"


def _plan(call: RaggedContextCall, problem: RaggedAttention, backend: str) -> PreparedCall:
    out, lse = problem.results()
    q_offsets, kv_offsets = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_kv.tolist()
    num_rows, num_tokens = q_offsets[-1], kv_offsets[-1]
    steps: list[Callable[[], object]] = []
    if min(num_rows, num_tokens) > 0:
        wrapper_type, _ = installed("flashinfer.prefill", "BatchPrefillWithRaggedKVCacheWrapper")
        scratch = scratch_for(call.workspace_buffer, problem.query.device)
        wrapper = wrapper_type(scratch, kv_layout="NHD", backend=backend)
        wrapper.plan(
            qo_indptr=torch.tensor(q_offsets, dtype=torch.int32),
            kv_indptr=torch.tensor(kv_offsets, dtype=torch.int32),
            num_qo_heads=problem.num_qo_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim,
            head_dim_vo=problem.v_head_dim,
            causal=problem.causal,
            window_left=problem.window_left,
            sm_scale=float(problem.bmm1_scale),
            q_data_type=problem.query.dtype,
            kv_data_type=problem.key.dtype,
            o_data_type=problem.out_dtype,
        )
        inputs = problem.query[:num_rows], problem.key[:num_tokens], problem.value[:num_tokens]
        lse_of_rows = None if lse is None else lse[:num_rows]
        steps.append(partial(wrapper.run, *inputs, out=out[:num_rows], lse=lse_of_rows, return_lse=lse is not None))
    q_lens, kv_lens = ([end - start for start, end in itertools.pairwise(each)] for each in (q_offsets, kv_offsets))
    if any(keys < rows if problem.causal else keys == 0 < rows for rows, keys in zip(q_lens, kv_lens, strict=True)):
        steps.append(partial(fill_rows_without_keys, problem, out, lse))
    return PreparedCall(partial(problem.returned, out, lse), {}, tuple(steps))


fa2, fa3, _fitting = (PlannedWrapper(__name__, (RaggedContextCall,), _plan, backend) for backend in ("fa2", "fa3", ""))
kernel_for = _fitting.kernel_for
trtllm_ragged_attention_deepseek = getattr(_fitting, NAME)
plan_trtllm_ragged_attention_deepseek = getattr(_fitting, f"plan_{NAME}")
