"""FlashInfer's TRT-LLM attention kernels behind the two names, FlashInfer imported at the first call.

What runs depends on the GPU, as in an engine: trtllm-gen on SM100 and SM103; on SM90, SM120 and SM121 XQA for the decode
call and fmha_v2 for the context call. The adapter supplies what those need and the calls do not carry: XQA's packed
causal mask, a workspace whose semaphores are zero, packed page-table rows, fmha_v2's [B, 2, M] table. trtllm-gen's path
has been checked by signature and by simulation only: no SM100 or SM103 was at hand.

Checking and converting the arguments takes longer than a small launch. Whoever calls often, or counts microseconds,
prepares once and calls many times: `prepare_` before either name returns a `PreparedCall`.
"""

import functools
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from lab.calls import Call, ContextCall, DecodeCall, takes
from lab.kernels.support import (
    Kernel,
    StoredCache,
    capability_of,
    context_kernel,
    decode_kernel,
    refuse_unsupported,
    stored_cache,
)
from lab.problem import MASK_BITS_PER_WORD, PagedAttention, mask_words

# XQA's semaphores: the first 8 MiB of its workspace, zero at each launch (FlashInfer 0.7.2, `xqa_batch_decode_with_kv_cache`).
SEMAPHORE_BYTES = 8 * 2**20
# Scratch behind them. XQA never checks its size (FlashInfer 0.7.2, xqa_wrapper.cu); 512 MiB is SGLang 0.5.23's default.
SCRATCH_BYTES = 512 * 2**20
# The least scratch that the lab hands on. XQA would write past a smaller one without a word.
LEAST_SCRATCH_BYTES = 64 * 2**20

_DEFAULTS = {call: {field.name: field.default for field in fields(call)} for call in (DecodeCall, ContextCall)}

Refresh = Callable[[], object]  # one small launch that rewrites what was derived from a tensor's contents


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """A call that is checked, converted and ready: calling it calls FlashInfer's function and returns its result.

    It holds the tensors that it was prepared with, not copies. Their contents may change from call to call, as an engine's
    CUDA-graph buffers do; shapes, strides, host numbers and bounds are those of the preparation and are not looked at
    again. What the lab adds, its workspace or a derived table, belongs to the stream it was prepared on: call it there.

    A CUDA graph that captured it uses those tensors: keep it as long as the graph. Prepared during a capture, it is good
    inside that graph alone.

    Attributes:
        function: the installed FlashInfer's.
        arguments: its keyword arguments.
        refreshes: run before it, a launch each. Empty but for a page table that is not packed, K and V as halves of one
            allocation under fmha_v2, and `bmm1_scale_log2` under XQA: what the kernel reads is derived from those.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    refreshes: tuple[Refresh, ...] = ()

    def __call__(self) -> Any:
        for refresh in self.refreshes:
            refresh()
        return self.function(**self.arguments)


@takes(DecodeCall)
def trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> Any:
    """FlashInfer's decode kernel: decode, verify, draft extend. Shapes and errors are `lab.calls.DecodeCall`'s.

    Without a `mask`, verify rows are causal on every GPU. Without a `workspace_buffer`, the lab's own is used, one per
    device and stream; a given one must hold 8 MiB of zeros first, then scratch. What the GPU's kernel does not take raises
    NotImplementedError with the reason of `lab.kernels.support.why_not`.
    """
    return _prepare_decode(call)()


@takes(DecodeCall)
def prepare_trtllm_batch_decode_with_kv_cache(call: DecodeCall) -> PreparedCall:
    """The same call, ready to be made any number of times. It raises what the call would raise, and launches no attention."""
    return _prepare_decode(call)


@takes(ContextCall)
def trtllm_batch_context_with_kv_cache(call: ContextCall) -> Any:
    """FlashInfer's context kernel: extend and prefill. Shapes and errors are `lab.calls.ContextCall`'s.

    On SM90, SM120 and SM121 it runs `trtllm_fmha_v2_prefill`, which knows two pools: a stacked one, [num_pages, 2, ...],
    and K and V as halves of one allocation. The latter needs a [B, 2, M] table, which one small launch writes before each
    call. Who has that table already passes it with `uses_shared_paged_kv_idx=False` and the whole allocation,
    [2 * num_pages, ...], as both K and V: nothing is then launched but the kernel. A given `workspace_buffer` may be the
    decode call's: its first 8 MiB are left alone.
    """
    return _prepare_context(call)()


@takes(ContextCall)
def prepare_trtllm_batch_context_with_kv_cache(call: ContextCall) -> PreparedCall:
    """The same call, ready to be made any number of times. It raises what the call would raise, and launches no attention."""
    return _prepare_context(call)


def _prepare_decode(call: DecodeCall) -> PreparedCall:
    problem = call.problem()
    if problem.num_rows == 0:
        return PreparedCall(_empty_results, {"problem": problem})
    kernel = _kernel_for(call.backend, problem)
    refuse_unsupported(kernel, problem)
    changes, refreshes = _canonical(call, problem)
    if kernel is Kernel.XQA:
        _check_workspace_size(changes["workspace_buffer"])
        changes["bmm1_scale"] = problem.bmm1_scale
        if call.bmm1_scale_log2 is not None:  # which XQA does not take
            changes["bmm1_scale_log2"], changes["bmm1_scale"] = None, torch.empty_like(call.bmm1_scale_log2)
            to_base_e = functools.partial(torch.mul, call.bmm1_scale_log2, math.log(2.0), out=changes["bmm1_scale"])
            refreshes += (to_base_e,)
        if problem.max_q_len > 1 and call.mask is None:
            changes["mask"] = causal_mask(problem.batch_size, problem.max_q_len, problem.query.device)
    # XQA multiplies by o_scale, so that its other neutral value, None, would be an error.
    changes["o_scale"] = 1.0
    arguments = _arguments(call, changes)
    return _prepared("flashinfer.decode", "trtllm_batch_decode_with_kv_cache", arguments, refreshes)


def _prepare_context(call: ContextCall) -> PreparedCall:
    problem = call.problem()
    if problem.num_rows == 0:
        return PreparedCall(_empty_results, {"problem": problem})
    kernel = context_kernel(_capability(problem))
    refuse_unsupported(kernel, problem)
    if kernel is Kernel.FMHA_V2:
        arguments, refreshes = _fmha_v2_arguments(call, problem)
        return _prepared("flashinfer.prefill", "trtllm_fmha_v2_prefill", arguments, refreshes)
    changes, refreshes = _canonical(call, problem)
    arguments = _arguments(call, changes)
    return _prepared("flashinfer.prefill", "trtllm_batch_context_with_kv_cache", arguments, refreshes)


def _empty_results(problem: PagedAttention) -> Any:
    """What a call without a row returns; FlashInfer is not asked for that."""
    return problem.returned(*problem.results())


def _prepared(module: str, name: str, arguments: dict[str, Any], refreshes: tuple[Refresh, ...]) -> PreparedCall:
    return PreparedCall(_installed_taking(module, name, frozenset(arguments)), arguments, refreshes)


@functools.cache
def _installed_taking(module: str, name: str, keywords: frozenset[str]) -> Callable[..., Any]:
    """A function of the installed FlashInfer, after binding these keywords to its real signature.

    Raises:
        TypeError: the installed version lacks the function or a parameter that is passed, or needs one that is not; it
            names both, and the version.
    """
    function, signature = _installed(module, name)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(
            f"{module}.{name} of the installed FlashInfer {_version()} does not take this call: {error}; "
            f"the lab is written for 0.7.2. Its parameters: {', '.join(signature.parameters)}"
        ) from error
    return function


@functools.cache
def _installed(module: str, name: str) -> tuple[Callable[..., Any], inspect.Signature]:
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise TypeError(f"the installed FlashInfer {_version()} has no {module}.{name}; the lab is written for 0.7.2")
    return function, inspect.signature(function)


def _version() -> str:
    return importlib.metadata.version("flashinfer-python")


def _canonical(call: Call, problem: PagedAttention) -> tuple[dict[str, Any], tuple[Refresh, ...]]:
    """Arguments in the one form that every kernel of FlashInfer 0.7.2 reads rightly; views where that is possible.

    K and V go as a pair of HND views, which FlashInfer makes of every other form but one with K for V.
    """
    block_tables, refreshes = _packed(call.block_tables)
    changes: dict[str, Any] = {
        "kv_cache": (problem.k_cache, problem.v_cache),
        "kv_layout": "HND",
        "block_tables": block_tables,
        "workspace_buffer": _workspace_for(call),
        "window_left": problem.window_left,
    }
    if problem.k_scale_factors is not None:
        changes["kv_cache_sf"] = (problem.k_scale_factors, problem.v_scale_factors)
    return changes, refreshes


def _packed(block_tables: torch.Tensor) -> tuple[torch.Tensor, tuple[Refresh, ...]]:
    """The page table with packed rows, and what copies it again before each call.

    FlashInfer's kernels ignore a table's strides. An engine's rows are packed, and then nothing is copied.
    """
    if block_tables.is_contiguous():
        return block_tables, ()
    packed = torch.empty(block_tables.shape, dtype=block_tables.dtype, device=block_tables.device)
    return packed, (functools.partial(packed.copy_, block_tables),)


def _arguments(call: Call, changes: dict[str, Any]) -> dict[str, Any]:
    """The call's arguments, less those at their default: a version without such a parameter does the same."""
    defaults = _DEFAULTS[type(call)]
    given = vars(call) | changes
    return {name: value for name, value in given.items() if not _is_default(value, defaults[name])}


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


def _check_workspace_size(workspace: torch.Tensor) -> None:
    if workspace.nbytes - SEMAPHORE_BYTES < LEAST_SCRATCH_BYTES:
        raise ValueError(
            f"workspace_buffer has {workspace.nbytes} bytes, less than the {SEMAPHORE_BYTES} of XQA's semaphores and "
            f"{LEAST_SCRATCH_BYTES} of scratch; pass None for the lab's own"
        )


def _behind_semaphores(workspace: torch.Tensor) -> torch.Tensor:
    """The scratch of a workspace, as bytes."""
    _check_workspace_size(workspace)
    return workspace.view(-1).view(torch.uint8)[SEMAPHORE_BYTES:]


def _fmha_v2_arguments(call: ContextCall, problem: PagedAttention) -> tuple[dict[str, Any], tuple[Refresh, ...]]:
    """`trtllm_fmha_v2_prefill`'s arguments for a context call."""
    stored = stored_cache(problem)
    cache, block_tables, refreshes = _fmha_v2_cache(call, stored)
    causal_mode = "causal" if problem.window_left < 0 else "sliding_window"
    arguments = {
        "qkv": (problem.query, cache),
        "input_layout": f"Q_PAGED_KV_{stored.layout}",
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
    return arguments, refreshes


def _fmha_v2_cache(call: ContextCall, stored: StoredCache) -> tuple[Any, torch.Tensor, tuple[Refresh, ...]]:
    """(cache, block_tables, refreshes) as fmha_v2 addresses them, in a form that FlashInfer's own checks take."""
    if stored.is_stacked:
        return stored.stacked(), *_packed(call.block_tables)
    if not call.uses_shared_paged_kv_idx:
        # The kernel counts both tables' ids from K's address and never looks at V's; FlashInfer wants V's behind it.
        return (stored.k[:-1], stored.v[1:]), *_packed(call.block_tables)
    # The table's contents may change between calls, so each writes it anew: K's ids, and V's as counted from K's first page.
    pages_apart = stored.distance_bytes // stored.page_bytes
    ids = call.block_tables.unsqueeze(1)
    table = torch.empty((ids.shape[0], 2, ids.shape[2]), dtype=torch.int32, device=ids.device)
    # (0, pages_apart), made on the device: a copy from the host cannot be captured in a CUDA graph.
    offsets = torch.arange(0, 2 * pages_apart, pages_apart, dtype=torch.int32, device=ids.device).view(1, 2, 1)
    return (stored.k, stored.v), table, (functools.partial(torch.add, ids, offsets, out=table),)
