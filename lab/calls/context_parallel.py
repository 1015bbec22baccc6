"""Decode context parallelism: the keys of a request are divided among ranks, and the ranks' results are merged by their LSEs.

Rank r of W ranks has the keys at positions r, r + W, r + 2 W, … of a request, without gaps in its cache. A rank's call computes
the softmax over the rank's keys alone. A row sees the rank's keys up to the row's position in the whole request.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import arguments
from lab.calls.allowed import Reasons, check_combination
from lab.calls.problem import PagedAttention

# The values that other arguments of a rank's decode call must have (FlashInfer 0.7.2, decode.py 3992 and 4043-4089).
WITH_RANK_DECODE: Reasons = {
    "backend": (("auto", "trtllm-gen"), "only its Cake kernel takes a rank's keys"),
    "kv_layout": (("HND",), "a rank's cache is HND"),
    "kv_cache_sf": ((None,), "a rank's cache is not NVFP4"),
    "cum_seq_lens_q": ((None,), "all requests have q_len_per_req rows"),
    "window_left": ((-1,), "a rank's keys have no window"),
    "mask": ((None,), "a rank's keys have no mask"),
    "sinks": ((None,), "a sink would count once for each rank"),
    "skip_softmax_threshold_scale_factor": ((None,), "a rank's keys are not skipped"),
    "uses_shared_paged_kv_idx": ((True,), "K and V have one page table"),
    "bmm1_scale_log2": ((None,), "scales are numbers"),
    "o_scale": ((1.0, None), "the output is not e4m3"),
    "enable_pdl": ((None, False), "the kernel has no programmatic launch"),
}
# The same for an MLA decode (mla/_core.py 3082-3095, and 3186 and 3204 of the only kernel, CuTe DSL's).
WITH_RANK_MLA: Reasons = {
    "backend": (("auto", "cute-dsl"), "only CuTe DSL takes a rank's keys, which auto selects"),
    "sinks": ((None,), "a sink would count once for each rank"),
    "skip_softmax_threshold_scale_factor": ((None,), "a rank's keys are not skipped"),
    "sparse_mla_top_k": ((0,), "a rank's keys are not selected"),
    "return_lse": ((True,), "the results of the ranks are merged by their LSEs"),
    "cute_dsl_impl": (("auto", "monolithic"), "the modular kernels take no rank"),
}


def problem_of_rank(
    call: Any, problem: PagedAttention, argument: str, required: Reasons, uncounted_rows: int = 0
) -> PagedAttention:
    """Return a copy of `problem` for the call of one rank of decode context parallelism. The copy's `num_visible`, int32
    [num_rows], is the number of keys of this rank that each row sees, at most the `seq_lens` of the row's request, as in CuTe
    DSL's kernel (FlashInfer 0.7.2, monolithic/mla_decode_fp16.py 2979).

    Args:
        argument: the argument that makes `call` the call of a rank, such as "enable_dcp=True". ValueError if it is "".
        required: the arguments that are restricted in such a call: name -> (allowed values, reason).
        uncounted_rows: what to add to `causal_seqlens_kv_global` for the number of keys that a request's newest row sees.
    """
    if not argument:
        raise ValueError(
            f"cp_world={call.cp_world} and cp_rank={call.cp_rank} need causal_seqlens_kv_global, and in an MLA "
            "decode enable_dcp=True"
        )
    if call.cp_rank >= call.cp_world:
        raise ValueError(f"cp_rank={call.cp_rank} must be below cp_world={call.cp_world}")
    check_combination(call, argument, required)
    arguments.check_vector(
        "causal_seqlens_kv_global", call.causal_seqlens_kv_global, problem.batch_size, (torch.int32,)
    )
    for name in ("bmm1_scale", "bmm2_scale") if "bmm1_scale_log2" in required else ():
        if isinstance(getattr(call, name), Tensor):
            raise ValueError(f"{name} is a tensor with {argument}, but scales are numbers: pass a float")
    if not call.return_lse and call.lse is None:
        raise ValueError(
            f"{argument} without an LSE, by which the results of the ranks are merged: pass return_lse=True"
        )
    ends = call.causal_seqlens_kv_global.to(torch.int64) + uncounted_rows  # keys that each request's newest row sees
    rows = torch.arange(problem.num_rows, device=ends.device)
    if not len(ends):
        return replace(problem, num_visible=torch.zeros_like(rows, dtype=torch.int32))
    offsets = problem.cu_seqlens_q
    if offsets is None:
        offsets = torch.arange(len(ends) + 1, device=ends.device) * problem.max_q_len
    row_ends = offsets.to(torch.int64)[1:]
    request = torch.searchsorted(row_ends, rows, right=True).clamp(max=len(ends) - 1)
    seen = ends[request] - (row_ends[request] - 1 - rows)
    own = torch.div(seen - call.cp_rank + call.cp_world - 1, call.cp_world, rounding_mode="floor").clamp(min=0)
    return replace(problem, num_visible=own.minimum(call.seq_lens.to(torch.int64)[request]).to(torch.int32))
