"""FlashInfer's TRT-LLM decode and context calls. FlashInfer is imported at the first call.

The GPU decides which kernel runs, as in an engine: trtllm-gen on SM100 and SM103; elsewhere XQA for the decode call and fmha_v2
for the context call. The adapter adds what these kernels need and FlashInfer's call does not contain: XQA's packed causal mask,
a workspace whose semaphores are zero, contiguous page-table rows, fmha_v2's [B, 2, M] table, and trtllm-gen's counters. The
calls for trtllm-gen were checked only with FlashInfer's own launcher on a CPU (`lab.dry_run`), because the lab had no SM100 or
SM103.
"""

import functools
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.arguments import following_scale
from lab.calls.problem import E4M3, MASK_BITS_PER_WORD, PagedAttention, mask_words
from lab.kernels.flashinfer_call import (
    PreparedCall,
    Refresh,
    but_defaults,
    packed,
    prepared,
    refuse_during_capture,
    scratch_for,
    supported_kernel,
    takes_kv_pairs,
    trtllm_gen_memory,
    version,
    xqa_memory,
)
from lab.kernels.support.stored_cache import StoredCache, stored_cache
from lab.kernels.support.trtllm import FMHA_V2
from lab.kernels.support.xqa import XQA


def prepare_decode(call: DecodeCall, problem: PagedAttention) -> PreparedCall:
    """Return FlashInfer's decode call over paged K/V, ready to run. It serves decode, verify and draft extend.

    `lab.calls.DecodeCall` documents parameters, shapes and errors. Raises NotImplementedError with the reason if the GPU's
    kernel does not support the call (`lab.kernels.support.why_not`). Without a `mask`, verify rows are causal on every GPU.
    Without a `workspace_buffer`, the lab's own is used, one per device and stream. A given workspace must begin with 8 MiB of
    zeros, followed by scratch. XQA uses the zeros as semaphores, and trtllm-gen as counters if `multi_ctas_kv_counter_buffer`
    is None. Calls of both kernels may use one workspace in turn.
    """
    kernel = supported_kernel(problem, call.backend)
    changes, refreshes = _canonical(call, problem)
    changes |= xqa_memory(call, call.query.device) if kernel is XQA else trtllm_gen_memory(call, problem)
    converts = (problem.query.dtype, problem.kv_dtype, problem.out_dtype) == (torch.bfloat16, E4M3, torch.bfloat16)
    if kernel is XQA or not converts:  # the launcher refuses it there (trtllm_fmha_kernel_launcher.cu 200)
        changes["bf16q_fp8kv_transform_mode"] = None
    if kernel is XQA:
        changes["bmm1_scale"] = problem.bmm1_scale
        if call.bmm1_scale_log2 is not None:  # XQA has no such argument
            changes["bmm1_scale_log2"] = None
            changes["bmm1_scale"], refresh = following_scale(call.bmm1_scale_log2)
            refreshes += (refresh,)
        if problem.max_q_len > 1 and call.mask is None:
            changes["mask"] = causal_mask(problem.batch_size, problem.max_q_len, problem.query.device)
    # An o_scale changes no result. XQA would round its product with bmm2_scale, and refuses None.
    changes["o_scale"] = 1.0
    arguments = but_defaults(call, changes)
    return prepared("flashinfer.decode", "trtllm_batch_decode_with_kv_cache", arguments, refreshes)


def prepare_context(call: ContextCall, problem: PagedAttention) -> PreparedCall:
    """Return FlashInfer's context call over paged K/V, ready to run. It serves extend and prefill.

    `lab.calls.ContextCall` documents parameters, shapes and errors. On SM90, SM120 and SM121 the call runs
    `trtllm_fmha_v2_prefill`, which takes K and V as one tensor [num_pages, 2, ...], or as two halves of one allocation. Halves
    need a page table [batch_size, 2, pages], with K's and V's page ids. A small launch writes it before each run. To avoid the
    launch, pass such a table with `uses_shared_paged_kv_idx=False`, and for both K and V the allocation [2 * num_pages, ...].
    On these GPUs `cum_seq_lens_kv` counts keys, not pages. `workspace_buffer` may be the decode call's: its first 8 MiB stay 0.
    """
    if supported_kernel(problem) is FMHA_V2:
        return _prepare_fmha_v2(call, problem)
    changes, refreshes = _canonical(call, problem)
    arguments = but_defaults(call, changes | trtllm_gen_memory(call, problem))
    return prepared("flashinfer.prefill", "trtllm_batch_context_with_kv_cache", arguments, refreshes)


def _canonical(call: DecodeCall | ContextCall, problem: PagedAttention) -> tuple[dict[str, Any], tuple[Refresh, ...]]:
    """Return (FlashInfer's arguments for K/V, page tables and window; launches to run before each call). The arguments have
    forms that every kernel of FlashInfer 0.7.2 reads correctly, such as a pair of HND views for K and V.
    """
    block_tables, refreshes = packed(call.block_tables)
    changes: dict[str, Any] = {
        "kv_cache": (problem.k_cache, problem.v_cache),
        "kv_layout": "HND",
        "block_tables": block_tables,
        "window_left": problem.window_left,
    }
    if problem.k_scale_factors is not None:
        changes["kv_cache_sf"] = (problem.k_scale_factors, problem.v_scale_factors)
    return changes, refreshes


def causal_mask(batch_size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """Return XQA's packed draft mask in which row j sees draft tokens 0 … j: uint16 [batch_size, q_len, 2 * ceil(q_len / 32)].

    The mask is cached per device, q_len and next power of 2 of batch_size. Raises RuntimeError if a CUDA graph is being
    captured and the mask is not in the cache: it would exist only inside the graph.
    """
    rows = 1 << max(batch_size - 1, 0).bit_length()
    return _causal_mask(rows, q_len, device)[:batch_size]


@functools.cache
def _causal_mask(rows: int, q_len: int, device: torch.device) -> torch.Tensor:
    refuse_during_capture(f"the causal mask of {rows} requests of {q_len} tokens", device)
    row, word = torch.arange(q_len).unsqueeze(1), torch.arange(mask_words(q_len))
    visible = (row + 1 - MASK_BITS_PER_WORD * word).clamp(0, MASK_BITS_PER_WORD)
    words = (2**visible - 1).to(torch.int32).to(torch.uint16)
    return words.expand(rows, *words.shape).contiguous().to(device)


def _prepare_fmha_v2(call: ContextCall, problem: PagedAttention) -> PreparedCall:
    stored = stored_cache(problem)
    cache, block_tables, refreshes = _fmha_v2_cache(call, stored)
    causal_mode = "causal" if problem.window_left < 0 else "sliding_window"
    arguments = {
        "qkv": (problem.query, cache),
        "input_layout": f"Q_PAGED_KV_{stored.layout}",
        "workspace_buffer": scratch_for(call.workspace_buffer, call.query.device),
        "seq_lens": problem.seq_lens,
        "max_q_len": problem.max_q_len,
        "max_kv_len": max(problem.max_kv_len, problem.max_q_len),  # fmha_v2_run.cu asserts this of the two bounds
        "bmm1_scale": float(problem.bmm1_scale),
        "bmm2_scale": float(problem.bmm2_scale),
        "batch_size": problem.batch_size,
        "cum_seq_lens_q": problem.cu_seqlens_q,
        "cum_seq_lens_kv": problem.cu_seqlens_kv,
        "block_tables": block_tables,
        "mask_mode": causal_mode if problem.causal else "padding",
        "window_left": problem.window_left,
        "sinks": problem.sinks,
        "out": problem.out,
        "out_dtype": problem.out_dtype,
    }
    if problem.skip_softmax:
        arguments["skip_softmax_threshold_scale_factor"] = problem.skip_softmax
    return prepared("flashinfer.prefill", "trtllm_fmha_v2_prefill", arguments, refreshes)


def _fmha_v2_cache(call: ContextCall, stored: StoredCache) -> tuple[Any, torch.Tensor, tuple[Refresh, ...]]:
    if stored.is_stacked:
        return stored.stacked(), *packed(call.block_tables)
    if not takes_kv_pairs():
        raise NotImplementedError(
            f"trtllm_fmha_v2_prefill of the installed FlashInfer {version()} takes K and V as one [num_pages, 2, ...] tensor "
            "alone: keep the pool so, or install 0.6.18 or a later one"
        )
    if not call.uses_shared_paged_kv_idx:
        # The kernel counts the ids of both tables from K's address and ignores V's, which FlashInfer requires to be after K's.
        return (stored.k[:-1], stored.v[1:]), *packed(call.block_tables)
    # Each run writes the table from the current page ids: K's ids, and V's ids as counted from K's first page.
    pages_apart = stored.distance_bytes // stored.page_bytes
    ids = call.block_tables.unsqueeze(1)
    table = torch.empty((ids.shape[0], 2, ids.shape[2]), dtype=torch.int32, device=ids.device)
    # (0, pages_apart), made on the device: a copy from the host cannot be captured in a CUDA graph.
    offsets = torch.arange(0, 2 * pages_apart, pages_apart, dtype=torch.int32, device=ids.device).view(1, 2, 1)
    return (stored.k, stored.v), table, (functools.partial(torch.add, ids, offsets, out=table),)
