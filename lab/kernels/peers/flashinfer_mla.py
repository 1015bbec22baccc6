"""FlashInfer's `BatchMLAPagedAttentionWrapper` under the name of the MLA decode call, for GPUs without an MLA kernel of
trtllm-gen or XQA.

The module's functions run FA3 on SM90 and FA2 on other GPUs. The module's attributes `fa2` and `fa3` have the same functions
for one backend, as in `lab judge lab.kernels.peers.flashinfer_mla:fa2`.
"""

from typing import Any

import torch

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import E4M3, PagedAttention
from lab.kernels.flashinfer_call import PreparedCall, installed, scratch_for
from lab.kernels.peers.planned import PlannedWrapper, live_pages

NAME = "trtllm_batch_decode_with_kv_cache_mla"


def _plan(call: MLADecodeCall, problem: PagedAttention, backend: str) -> PreparedCall:
    out, lse = problem.results()
    wrapper_type, _ = installed("flashinfer.mla", "BatchMLAPagedAttentionWrapper")
    metadata_type, _ = installed("flashinfer.mla", "MLAPlanMetadata")
    wrapper = wrapper_type(scratch_for(call.workspace_buffer, problem.query.device), backend=backend)
    kv_lens, indptr, indices, _ = live_pages(problem)
    quantised = problem.k_cache.dtype == E4M3
    # The kernel multiplies keys and values by this scale, rounded to the query's dtype.
    kv_scale = float(torch.tensor(float(problem.bmm2_scale)).to(problem.query.dtype))
    wrapper.plan(
        metadata=metadata_type.csr(
            qo_indptr=torch.tensor(problem.row_offsets(), dtype=torch.int32),
            kv_indptr=indptr,
            kv_indices=indices,
            kv_len_arr=kv_lens,
        ),
        num_heads=problem.num_qo_heads,
        head_dim_ckv=problem.v_head_dim,
        head_dim_kpe=problem.head_dim - problem.v_head_dim,
        page_size=problem.page_size,
        causal=True,
        sm_scale=float(problem.bmm1_scale) / kv_scale,
        q_data_type=problem.query.dtype,
        kv_data_type=problem.k_cache.dtype,
        scale_mode="kv-per-tensor" if quantised else "default",
        lse_mode=("basee" if call.lse_is_base_e else "base2") if call.return_lse else "none",
        output_dtype=problem.out_dtype,
    )
    arguments: dict[str, Any] = {
        "query": problem.query,
        "kv_cache": problem.k_cache.squeeze(1),
        "out": out,
        "lse": lse,
        "return_lse": call.return_lse,
        "return_lse_base_on_e": call.return_lse and call.lse_is_base_e,
    }
    if quantised:
        arguments |= dict.fromkeys(("ckv_scale", "kpe_scale"), float(problem.bmm2_scale))
    return PreparedCall(wrapper.run, arguments, returned=call.returned(out, lse))


fa2, fa3, _fitting = (PlannedWrapper(__name__, (MLADecodeCall,), _plan, backend) for backend in ("fa2", "fa3", ""))
kernel_for = _fitting.kernel_for
trtllm_batch_decode_with_kv_cache_mla = getattr(_fitting, NAME)
plan_trtllm_batch_decode_with_kv_cache_mla = getattr(_fitting, f"plan_{NAME}")
