"""FlashInfer's TRT-LLM attention kernels behind the two names, FlashInfer imported at the first call.

What runs depends on the GPU, as in an engine: trtllm-gen on SM100 and SM103; on SM90, SM120 and SM121 XQA for the decode
call and fmha_v2 for the context call. The adapter supplies what those need and the calls do not carry: XQA's packed
causal mask, a workspace whose semaphores are zero, packed page-table rows, fmha_v2's [B, 2, M] table. trtllm-gen's path
has been checked by signature and by simulation only: no SM100 or SM103 was at hand.
"""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from lab.calls import Call, ContextCall, DecodeCall, takes
from lab.kernels.support import Kernel, capability_of, context_kernel, decode_kernel, refuse_unsupported
from lab.problem import MASK_BITS_PER_WORD, PagedAttention, mask_words

# XQA's semaphores: the first 8 MiB of its workspace, zero at each launch (FlashInfer 0.7.2, `xqa_batch_decode_with_kv_cache`).
SEMAPHORE_BYTES = 8 * 2**20
# Scratch behind them. XQA never checks its size (FlashInfer 0.7.2, xqa_wrapper.cu); 512 MiB is SGLang 0.5.23's default.
SCRATCH_BYTES = 512 * 2**20
# The least scratch that the lab hands on. XQA would write past a smaller one without a word.
LEAST_SCRATCH_BYTES = 64 * 2**20


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """FlashInfer's decode kernel: decode, verify, draft extend. Shapes and errors are `lab.calls.DecodeCall`'s.

    Without a `mask`, verify rows are causal on every GPU. Without a `workspace_buffer`, the lab's own is used, one per
    device and stream; a given one must hold 8 MiB of zeros first, then scratch. What the GPU's kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`.
    """
    problem = call.problem()
    if problem.num_rows == 0:
        return problem.returned(*problem.results())
    kernel = _kernel_for(call.backend, problem)
    refuse_unsupported(kernel, problem)
    changes = _canonical(call, problem)
    if kernel is Kernel.XQA:
        _behind_semaphores(changes["workspace_buffer"])
        changes["bmm1_scale"], changes["bmm1_scale_log2"] = problem.bmm1_scale, None
        if problem.max_q_len > 1 and call.mask is None:
            changes["mask"] = causal_mask(problem.batch_size, problem.max_q_len, problem.query.device)
    # XQA multiplies by o_scale, so that its other neutral value, None, would be an error.
    changes["o_scale"] = 1.0
    return call_installed("flashinfer.decode", "trtllm_batch_decode_with_kv_cache", _arguments(call, changes))


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """FlashInfer's context kernel: extend and prefill. Shapes and errors are `lab.calls.ContextCall`'s.

    On SM90, SM120 and SM121 it runs `trtllm_fmha_v2_prefill`: over a stacked cache tensor, or over K and V that are halves
    of one allocation. The latter's [B, 2, M] table is built by two small launches in each call. A given
    `workspace_buffer` may be the decode call's: its first 8 MiB are left alone.
    """
    problem = call.problem()
    if problem.num_rows == 0:
        return problem.returned(*problem.results())
    kernel = context_kernel(_capability(problem))
    refuse_unsupported(kernel, problem)
    if kernel is Kernel.FMHA_V2:
        return call_installed("flashinfer.prefill", "trtllm_fmha_v2_prefill", fmha_v2_arguments(call, problem))
    arguments = _arguments(call, _canonical(call, problem))
    return call_installed("flashinfer.prefill", "trtllm_batch_context_with_kv_cache", arguments)


def call_installed(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """Call a function of the installed FlashInfer by keyword, after binding the arguments to its real signature.

    Raises:
        TypeError: the installed version lacks the function or a parameter that is passed, or needs one that is not; it
            names both, and the version.
    """
    function, signature = _installed(module, name)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise TypeError(
            f"{module}.{name} of the installed FlashInfer {_version()} does not take this call: {error}; "
            f"the lab is written for 0.7.2. Its parameters: {', '.join(signature.parameters)}"
        ) from error
    return function(**arguments)


@functools.cache
def _installed(module: str, name: str) -> tuple[Callable[..., Any], inspect.Signature]:
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise TypeError(f"the installed FlashInfer {_version()} has no {module}.{name}; the lab is written for 0.7.2")
    return function, inspect.signature(function)


def _version() -> str:
    return importlib.metadata.version("flashinfer-python")


def _canonical(call: Call, problem: PagedAttention) -> dict[str, Any]:
    """Arguments in the one form that every kernel of FlashInfer 0.7.2 reads rightly; views where that is possible.

    K and V go as a pair of HND views, which FlashInfer makes of every other form but one with K for V. Its kernels
    ignore the page table's strides; an engine's rows are packed, and then nothing is copied.
    """
    changes: dict[str, Any] = {
        "kv_cache": (problem.k_cache, problem.v_cache),
        "kv_layout": "HND",
        "block_tables": call.block_tables.contiguous(),
        "workspace_buffer": _workspace_for(call),
        "window_left": problem.window_left,
    }
    if problem.k_scale_factors is not None:
        changes["kv_cache_sf"] = (problem.k_scale_factors, problem.v_scale_factors)
    return changes


def _arguments(call: Call, changes: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, less those at their default: a version without such a parameter does the same."""
    given = ((field, changes.get(field.name, getattr(call, field.name))) for field in fields(call))
    return {field.name: value for field, value in given if not _is_default(value, field.default)}


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


def _kernel_for(backend: str, problem: PagedAttention) -> Kernel:
    if backend == "auto":
        return decode_kernel(_capability(problem))
    return Kernel.XQA if backend == "xqa" else Kernel.TRTLLM_GEN_DECODE


def _capability(problem: PagedAttention) -> tuple[int, int]:
    capability = capability_of(problem.query.device)
    if capability is None:
        raise NotImplementedError(
            "FlashInfer's kernels need a CUDA GPU, and these tensors are on "
            f"{problem.query.device}; use lab.kernels.portable or lab.references"
        )
    return capability


def causal_mask(batch_size: int, q_len: int, device: torch.device) -> torch.Tensor:
    """XQA's packed draft mask in which row j sees draft tokens 0 … j: uint16 [batch_size, q_len, 2 * ceil(q_len / 32)].

    Word w of row j is 2 ** clamp(j + 1 - 16 w, 0, 16) - 1. Built once per device, width and power of two of the batch.

    Raises:
        RuntimeError: it would have to be built while a CUDA graph is captured, and so only inside the graph.
    """
    rows = 1 << max(batch_size - 1, 0).bit_length()
    return _causal_mask(rows, q_len, device)[:batch_size]


@functools.cache
def _causal_mask(rows: int, q_len: int, device: torch.device) -> torch.Tensor:
    _refuse_during_capture(f"the causal mask of {rows} requests of {q_len} tokens", device)
    row, word = torch.arange(q_len).unsqueeze(1), torch.arange(mask_words(q_len))
    visible = (row + 1 - MASK_BITS_PER_WORD * word).clamp(0, MASK_BITS_PER_WORD)
    words = (2**visible - 1).to(torch.int32).to(torch.uint16)
    return words.expand(rows, *words.shape).contiguous().to(device)


def _workspace_of_current_stream(device: torch.device) -> torch.Tensor:
    """A zeroed workspace of this device and stream: kernels of two streams must not share semaphores."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _workspace(device, stream)


@functools.cache
def _workspace(device: torch.device, stream: int) -> torch.Tensor:
    _refuse_during_capture("the workspace", device)
    return torch.zeros(SEMAPHORE_BYTES + SCRATCH_BYTES, dtype=torch.uint8, device=device)


def _refuse_during_capture(what: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be made inside the CUDA graph being captured; make this call once before it, on the same stream"
        )


def _workspace_for(call: Call) -> torch.Tensor:
    """The call's workspace, checked, or the lab's own."""
    workspace, device = call.workspace_buffer, call.query.device
    if workspace is None:
        return _workspace_of_current_stream(device)
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace_buffer must be a torch.Tensor or None, got {type(workspace).__name__}")
    if workspace.device != device or not workspace.is_contiguous():
        raise ValueError(
            f"workspace_buffer must be contiguous on {device}, got stride {workspace.stride()} on {workspace.device}; "
            "pass None for the lab's own"
        )
    return workspace


def _behind_semaphores(workspace: torch.Tensor) -> torch.Tensor:
    """The scratch of a workspace, as bytes."""
    scratch = workspace.view(-1).view(torch.uint8)[SEMAPHORE_BYTES:]
    if scratch.numel() < LEAST_SCRATCH_BYTES:
        raise ValueError(
            f"workspace_buffer has {workspace.numel() * workspace.element_size()} bytes, less than the {SEMAPHORE_BYTES} of "
            f"XQA's semaphores and {LEAST_SCRATCH_BYTES} of scratch; pass None for the lab's own"
        )
    return scratch


def fmha_v2_arguments(call: ContextCall, problem: PagedAttention) -> dict[str, Any]:
    """`trtllm_fmha_v2_prefill`'s arguments for a context call.

    Raises:
        NotImplementedError: K and V are neither one stacked tensor nor contiguous halves, V behind K, of one allocation.
    """
    layout, cache, block_tables = _fmha_v2_cache(call, problem)
    causal_mode = "causal" if problem.window_left < 0 else "sliding_window"
    return {
        "qkv": (problem.query, cache),
        "input_layout": f"Q_PAGED_KV_{layout}",
        # Not the semaphores: XQA needs them zero, and fmha_v2 writes where it likes.
        "workspace_buffer": _behind_semaphores(_workspace_for(call)),
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


def _fmha_v2_cache(call: ContextCall, problem: PagedAttention) -> tuple[str, Any, torch.Tensor]:
    """(layout, cache, block_tables): the cache as it lies in memory, whatever views the call carries."""
    if isinstance(call.kv_cache, torch.Tensor):
        if call.kv_cache.shape[1] != 2 or not call.kv_cache.is_contiguous():
            raise NotImplementedError(
                "trtllm_fmha_v2_prefill needs a stacked kv_cache to be contiguous with a second dimension of 2, got shape "
                f"{list(call.kv_cache.shape)} with stride {call.kv_cache.stride()}"
            )
        return call.kv_layout, call.kv_cache, problem.k_block_tables.contiguous()
    # With one K/V head the two layouts are the same memory; an engine's pool is NHD, and so is the module it builds.
    layout, k, v = "NHD", problem.k_cache.transpose(1, 2), problem.v_cache.transpose(1, 2)
    if not k.is_contiguous():
        layout, k, v = "HND", problem.k_cache, problem.v_cache
    page_bytes = k[0].numel() * k.element_size()
    distance = v.data_ptr() - k.data_ptr()
    apart = k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
    if apart or not (k.is_contiguous() and v.is_contiguous()) or distance <= 0 or distance % page_bytes:
        raise NotImplementedError(
            "trtllm_fmha_v2_prefill needs K and V to be contiguous halves of one allocation, V whole pages behind K; got "
            f"strides {k.stride()} and {v.stride()}, V {distance} bytes behind K, pages of {page_bytes} bytes"
        )
    k_pages = problem.k_block_tables
    return layout, (k, v), torch.stack((k_pages, k_pages + distance // page_bytes), dim=1)
