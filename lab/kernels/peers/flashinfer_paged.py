"""FlashInfer's decode and prefill wrappers (FA2, FA3) over a paged cache, under the names of the decode and context calls.

`BatchDecodeWithPagedKVCacheWrapper` serves decode calls with one row per request, without mask and sinks. It uses tensor cores
where SGLang 0.5.23 does. `BatchPrefillWithPagedKVCacheWrapper` serves all other calls. The module's functions run FA3 on SM90
and FA2 on other GPUs. The module's attributes `fa2` and `fa3` have the same functions for one backend, as in `lab judge
lab.kernels.peers.flashinfer_paged:fa2`.
"""

import importlib
from functools import partial
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import E4M3, AttentionCall, PagedAttention, shown_draft_tokens
from lab.kernels.flashinfer_call import PreparedCall, Ready, installed, scratch_for
from lab.kernels.peers.planned import PlannedWrapper, live_pages

DECODE, CONTEXT = AttentionCall.DECODE.value, AttentionCall.CONTEXT.value
LEAST_GROUP_OF_TENSOR_CORES = 4  # SGLang 0.5.23, flashinfer_backend.py, `should_use_tensor_core`


def _plan(call: DecodeCall | ContextCall, problem: PagedAttention, backend: str) -> Ready:
    out, lse = problem.results()
    decodes = (
        problem.call is AttentionCall.DECODE
        and problem.max_q_len == 1
        and problem.cu_seqlens_q is None
        and problem.mask is None
        and problem.sinks is None
        and problem.k_cache.stride() == problem.v_cache.stride()  # without tensor cores it reads V with K's strides
    )
    offsets = problem.row_offsets()
    num_rows = offsets[-1]
    if num_rows == 0:
        return lambda: problem.returned(out, lse)
    scratch = scratch_for(call.workspace_buffer, problem.query.device)
    wrapper = _planned(problem, scratch, backend, decodes, offsets)
    of_sinks = () if problem.sinks is None else (problem.sinks, float(problem.bmm1_scale))
    arguments: dict[str, Any] = {
        "out": out[:num_rows],
        "lse": None if lse is None else lse[:num_rows],
        "return_lse": lse is not None,
        "v_scale": None if problem.bmm2_scale == 1 else float(problem.bmm2_scale),
    }
    run = partial(wrapper.run, problem.query[:num_rows], (problem.k_cache, problem.v_cache), *of_sinks)
    return PreparedCall(run, arguments, returned=problem.returned(out, lse))


def _planned(problem: PagedAttention, scratch: torch.Tensor, backend: str, decodes: bool, offsets: list[int]) -> Any:
    kv_lens, indptr, indices, last_page_len = live_pages(problem)
    arguments = {
        "num_qo_heads": problem.num_qo_heads,
        "num_kv_heads": problem.num_kv_heads,
        "page_size": problem.page_size,
        "window_left": problem.window_left,
        "sm_scale": float(problem.bmm1_scale),
        "q_data_type": problem.query.dtype,
        "kv_data_type": problem.kv_dtype,
        "o_data_type": problem.out_dtype,
        "seq_lens": kv_lens,
    }
    if decodes:
        wrapper_type, _ = installed("flashinfer.decode", "BatchDecodeWithPagedKVCacheWrapper")
        on_tensor_cores = backend == "fa3" or problem.kv_dtype == E4M3 or problem.group >= LEAST_GROUP_OF_TENSOR_CORES
        wrapper = wrapper_type(scratch, kv_layout="HND", backend=backend, use_tensor_cores=on_tensor_cores)
        wrapper.plan(indptr, indices, last_page_len, head_dim=problem.head_dim, **arguments)
        return wrapper
    wrapper_type, _ = installed("flashinfer.prefill", "BatchPrefillWithPagedKVCacheWrapper")
    variant = {} if problem.sinks is None else _sink_variant(problem, backend)
    wrapper = wrapper_type(scratch, kv_layout="HND", backend=backend, **variant)
    wrapper.plan(
        qo_indptr=torch.tensor(offsets, dtype=torch.int32),
        paged_kv_indptr=indptr,
        paged_kv_indices=indices,
        paged_kv_last_page_len=last_page_len,
        head_dim_qk=problem.head_dim,
        custom_mask=None if problem.mask is None else _visible_keys(problem, problem.mask, kv_lens.tolist()),
        causal=problem.causal and problem.mask is None,
        **arguments,
    )
    return wrapper


def _sink_variant(problem: PagedAttention, backend: str) -> dict[str, Any]:
    """Return the constructor arguments with which FlashInfer's prefill wrapper applies sinks. FlashInfer 0.7.2's
    `BatchAttentionWithAttentionSinkWrapper` passes the same arguments, but its name for the JIT-compiled module lacks the
    head_dim and the dtype of K/V, so that different kernels have one name in the cache.
    """
    name_of, _ = installed("flashinfer.jit.attention.modules", "get_batch_prefill_attention_sink_uri")
    declarations = importlib.import_module("flashinfer.jit.attention.variants").attention_sink_decl
    dtypes = (problem.query.dtype, problem.kv_dtype, problem.out_dtype, torch.int32)
    dims = (problem.head_dim, problem.v_head_dim)
    without_positions, windowed = 0, problem.window_left >= 0
    sink = (["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", declarations[backend])
    return {
        "jit_args": [name_of(backend, *dtypes, *dims, without_positions, windowed), *dtypes, *dims, *sink],
        "jit_kwargs": {
            "use_sliding_window": windowed,
            "use_fp16_qk_reduction": False,
            "pos_encoding_mode": without_positions,
            "paged_kv_stride_mode": "independent" if backend == "fa2" else "runtime",
            "module_surface": "full",
        },
    }


def _visible_keys(problem: PagedAttention, mask: torch.Tensor, kv_lens: list[int]) -> torch.Tensor:
    """Convert a packed draft mask to FlashInfer's mask, flat bool [sum of q_len * kv_len]: keys before the draft are True."""
    q_len = problem.max_q_len
    shown = shown_draft_tokens(mask.to(torch.int32))
    requests = []
    for drafts, kv_len in zip(shown, kv_lens, strict=True):
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=mask.device)
        cached = min(q_len, kv_len)
        visible[:, kv_len - cached :] = drafts[:, q_len - cached :]
        requests.append(visible.flatten())
    return torch.cat(requests)


fa2, fa3, _fitting = (
    PlannedWrapper(__name__, (DecodeCall, ContextCall), _plan, backend) for backend in ("fa2", "fa3", "")
)
kernel_for = _fitting.kernel_for
trtllm_batch_decode_with_kv_cache = getattr(_fitting, DECODE)
trtllm_batch_context_with_kv_cache = getattr(_fitting, CONTEXT)
plan_trtllm_batch_decode_with_kv_cache = getattr(_fitting, f"plan_{DECODE}")
plan_trtllm_batch_context_with_kv_cache = getattr(_fitting, f"plan_{CONTEXT}")
