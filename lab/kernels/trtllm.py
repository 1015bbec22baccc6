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

from lab.calls import MASK_BITS_PER_WORD
from lab.calls import Call
from lab.calls import ContextCall
from lab.calls import DecodeCall
from lab.calls import PagedAttention
from lab.calls import mask_words
from lab.calls import takes
from lab.kernels.support import Kernel
from lab.kernels.support import capability_of
from lab.kernels.support import context_kernel
from lab.kernels.support import decode_kernel
from lab.kernels.support import refuse_unsupported

# XQA's semaphores: the first 8 MiB of its workspace, zero at each launch (FlashInfer 0.7.2, `xqa_batch_decode_with_kv_cache`).
SEMAPHORE_BYTES = 8 * 2**20
# Scratch behind them. XQA never checks its size (FlashInfer 0.7.2, xqa_wrapper.cu); 512 MiB is SGLang 0.5.23's default.
SCRATCH_BYTES = 512 * 2**20


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
    changes: dict[str, Any] = {"workspace_buffer": call.workspace_buffer}
    if call.workspace_buffer is None:
        changes["workspace_buffer"] = _workspace_of_current_stream(problem.query.device)
    if kernel is Kernel.XQA:
        _check_workspace(changes["workspace_buffer"])
        # XQA ignores the table's strides; an engine's rows are packed, and then this copies nothing.
        changes["block_tables"] = call.block_tables.contiguous()
        changes["bmm1_scale"], changes["bmm1_scale_log2"] = problem.bmm1_scale, None
        if problem.max_q_len > 1 and call.mask is None:
            changes["mask"] = causal_mask(problem.batch_size, problem.max_q_len, problem.query.device)
    return call_installed("flashinfer.decode", "trtllm_batch_decode_with_kv_cache", _arguments(call, changes))


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """FlashInfer's context kernel: extend and prefill. Shapes and errors are `lab.calls.ContextCall`'s.

    On SM90, SM120 and SM121 it runs `trtllm_fmha_v2_prefill`: over a stacked cache tensor, or over K and V that are halves
    of one allocation. The latter's [B, 2, M] table is built by two small launches in each call.
    """
    problem = call.problem()
    if problem.num_rows == 0:
        return problem.returned(*problem.results())
    kernel = context_kernel(_capability(problem))
    refuse_unsupported(kernel, problem)
    if kernel is Kernel.FMHA_V2:
        return call_installed("flashinfer.prefill", "trtllm_fmha_v2_prefill", fmha_v2_arguments(call, problem))
    workspace = call.workspace_buffer
    if workspace is None:
        workspace = _workspace_of_current_stream(problem.query.device)
    return call_installed(
        "flashinfer.prefill",
        "trtllm_batch_context_with_kv_cache",
        _arguments(call, {"workspace_buffer": workspace}),
    )


def call_installed(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """Call a function of the installed FlashInfer by keyword, after binding the arguments to its real signature.

    Raises:
        TypeError: the installed version lacks a parameter that is passed, or needs one that is not; it names both, and
            the version.
    """
    function, signature = _installed(module, name)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        version = importlib.metadata.version("flashinfer-python")
        raise TypeError(
            f"{module}.{name} of the installed FlashInfer {version} does not take this call: {error}; "
            f"the lab is written for 0.7.2. Its parameters: {', '.join(signature.parameters)}"
        ) from error
    return function(**arguments)


@functools.cache
def _installed(module: str, name: str) -> tuple[Callable[..., Any], inspect.Signature]:
    function = getattr(importlib.import_module(module), name)
    return function, inspect.signature(function)


def _arguments(call: Call, changes: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, less those at their default: a version without such a parameter does the same."""
    values = {field.name: getattr(call, field.name) for field in fields(call)} | changes
    defaults = {field.name: field.default for field in fields(call)}
    return {name: value for name, value in values.items() if value is not defaults[name]}


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
        raise RuntimeError(f"{what} would be made inside the CUDA graph being captured; make this call once before it")


def _check_workspace(workspace: torch.Tensor) -> None:
    size = workspace.numel() * workspace.element_size()
    if size <= SEMAPHORE_BYTES:
        raise ValueError(
            f"workspace_buffer has {size} bytes, but XQA's semaphores alone take {SEMAPHORE_BYTES}; pass None for the lab's own"
        )


def fmha_v2_arguments(call: ContextCall, problem: PagedAttention) -> dict[str, Any]:
    """`trtllm_fmha_v2_prefill`'s arguments for a context call.

    Raises:
        ValueError: K and V are neither one stacked tensor nor contiguous halves, V behind K, of one allocation.
    """
    layout, cache, block_tables = _fmha_v2_cache(call, problem)
    workspace = call.workspace_buffer
    if workspace is None:
        # Not the semaphores: XQA needs them zero, and fmha_v2 writes where it likes.
        workspace = _workspace_of_current_stream(problem.query.device)[SEMAPHORE_BYTES:]
    if not problem.causal:
        mask_mode = "padding"
    else:
        mask_mode = "causal" if problem.window_left < 0 else "sliding_window"
    arguments: dict[str, Any] = {
        "qkv": (problem.query, cache),
        "input_layout": f"Q_PAGED_KV_{layout}",
        "workspace_buffer": workspace,
        "seq_lens": problem.seq_lens,
        "max_q_len": problem.max_q_len,
        "max_kv_len": problem.max_kv_len,
        "bmm1_scale": float(problem.bmm1_scale),
        "bmm2_scale": float(problem.bmm2_scale),
        "batch_size": problem.batch_size,
        "cum_seq_lens_q": problem.cu_seqlens_q,
        "cum_seq_lens_kv": problem.cu_seqlens_kv,
        "block_tables": block_tables,
        "mask_mode": mask_mode,
        "window_left": problem.window_left,
        "sinks": problem.sinks,
        "out": problem.out,
        "out_dtype": problem.out_dtype,
    }
    return arguments


def _fmha_v2_cache(call: ContextCall, problem: PagedAttention) -> tuple[str, Any, torch.Tensor]:
    """(layout, cache, block_tables): the cache as it lies in memory, whatever views the call carries."""
    if isinstance(call.kv_cache, torch.Tensor):
        if call.kv_cache.shape[1] != 2 or not call.kv_cache.is_contiguous():
            raise ValueError(
                "trtllm_fmha_v2_prefill needs a stacked kv_cache to be contiguous with a second dimension of 2, got shape "
                f"{list(call.kv_cache.shape)} with stride {call.kv_cache.stride()}"
            )
        return call.kv_layout, call.kv_cache, problem.k_block_tables
    layout, k, v = "HND", problem.k_cache, problem.v_cache
    if not k.is_contiguous():
        layout, k, v = "NHD", k.transpose(1, 2), v.transpose(1, 2)
    page_bytes = k[0].numel() * k.element_size()
    distance = v.data_ptr() - k.data_ptr()
    if not (k.is_contiguous() and v.is_contiguous()) or distance <= 0 or distance % page_bytes:
        raise ValueError(
            "trtllm_fmha_v2_prefill needs K and V to be contiguous halves of one allocation, V whole pages behind K; got "
            f"strides {k.stride()} and {v.stride()}, V {distance} bytes behind K, pages of {page_bytes} bytes"
        )
    k_pages = problem.k_block_tables
    return layout, (k, v), torch.stack((k_pages, k_pages + distance // page_bytes), dim=1)
