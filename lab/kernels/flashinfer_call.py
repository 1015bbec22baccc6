"""What calls of FlashInfer's functions share: the installed function and its signature, the workspace, packed tables."""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from lab.gpus import Capability, capability_of, family_of

# XQA's semaphores: the first 8 MiB of its workspace, zero at each launch (FlashInfer 0.7.2, `xqa_batch_decode_with_kv_cache`).
SEMAPHORE_BYTES = 8 * 2**20
# Scratch behind them. XQA never checks its size (FlashInfer 0.7.2, xqa_wrapper.cu); 512 MiB is SGLang 0.5.23's default.
SCRATCH_BYTES = 512 * 2**20
# The least scratch that the lab hands on. XQA would write past a smaller one without a word.
LEAST_SCRATCH_BYTES = 64 * 2**20

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
        returned: what the call returns, where the function would return it in another shape; None: what it returns.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    refreshes: tuple[Refresh, ...] = ()
    returned: Any = None

    def __call__(self) -> Any:
        for refresh in self.refreshes:
            refresh()
        returned = self.function(**self.arguments)
        return returned if self.returned is None else self.returned


def prepared(module: str, name: str, arguments: dict[str, Any], refreshes: tuple[Refresh, ...]) -> PreparedCall:
    """A call of an installed function; raises as `installed_taking`."""
    return PreparedCall(installed_taking(module, name, frozenset(arguments)), arguments, refreshes)


@functools.cache
def installed_taking(module: str, name: str, keywords: frozenset[str]) -> Callable[..., Any]:
    """A function of the installed FlashInfer, after binding these keywords to its real signature.

    Raises:
        TypeError: the installed version lacks the function or a parameter that is passed, or needs one that is not; it
            names both, and the version.
    """
    function, signature = installed(module, name)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise TypeError(
            f"{module}.{name} of the installed FlashInfer {version()} does not take this call: {error}; "
            f"the lab is written for 0.7.2. Its parameters: {', '.join(signature.parameters)}"
        ) from error
    return function


@functools.cache
def installed(module: str, name: str) -> tuple[Any, inspect.Signature]:
    """A function or class of the installed FlashInfer, and its signature; raises TypeError where it has none of that name."""
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise TypeError(f"the installed FlashInfer {version()} has no {module}.{name}; the lab is written for 0.7.2")
    return function, inspect.signature(function)


def version() -> str:
    """The installed FlashInfer's."""
    return importlib.metadata.version("flashinfer-python")


def but_defaults(call: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with some changed, less those at their default: a version without such a parameter does the same."""
    defaults = _defaults(call.__class__)
    given = vars(call) | changes
    return {name: value for name, value in given.items() if not _is_default(value, defaults[name])}


@functools.cache
def _defaults(call: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(call)}


def _is_default(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)


def capability_for(device: torch.device) -> Capability:
    """The GPU's; raises NotImplementedError off the GPU."""
    capability = capability_of(device)
    if capability is None:
        raise NotImplementedError(
            f"FlashInfer's kernels need a CUDA GPU, and these tensors are on {device}; use lab.kernels.portable or "
            "lab.references"
        )
    return capability


def fa_backend(device: torch.device) -> str:
    """Return the newest of FlashInfer's own kernels for a GPU, "fa2" or "fa3"; raises NotImplementedError off the GPU."""
    family = family_of(capability_for(device))
    return "fa2" if family is None else family.fa_backend


def packed(table: torch.Tensor) -> tuple[torch.Tensor, tuple[Refresh, ...]]:
    """A page table with packed rows, and what copies it again before each call.

    FlashInfer's kernels ignore a table's strides. An engine's rows are packed, and then nothing is copied.
    """
    if table.is_contiguous():
        return table, ()
    rows = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    return rows, (functools.partial(rows.copy_, table),)


def workspace_for(workspace: object, device: torch.device) -> torch.Tensor:
    """A call's workspace, checked, or the lab's own, zeroed: one per device and stream, whose semaphores must not be shared.

    Raises:
        TypeError, ValueError: a workspace that no kernel can take.
        RuntimeError: the lab's own would have to be made inside the CUDA graph being captured.
    """
    if workspace is None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return workspace_of(device, stream)
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace_buffer must be a torch.Tensor or None, got {type(workspace).__name__}")
    if workspace.device != device or not workspace.is_contiguous():
        raise ValueError(
            f"workspace_buffer must be contiguous on {device}, got stride {workspace.stride()} on {workspace.device}; "
            "pass None for the lab's own"
        )
    return workspace


@functools.cache
def workspace_of(device: torch.device, stream: int) -> torch.Tensor:
    """The lab's own, semaphores and scratch, zeroed once."""
    refuse_during_capture("the workspace", device)
    return torch.zeros(SEMAPHORE_BYTES + SCRATCH_BYTES, dtype=torch.uint8, device=device)


def check_workspace_size(workspace: torch.Tensor) -> None:
    """Raise ValueError where a workspace has less room than semaphores and the least scratch."""
    if workspace.nbytes - SEMAPHORE_BYTES < LEAST_SCRATCH_BYTES:
        raise ValueError(
            f"workspace_buffer has {workspace.nbytes} bytes, less than the {SEMAPHORE_BYTES} of XQA's semaphores and "
            f"{LEAST_SCRATCH_BYTES} of scratch; pass None for the lab's own"
        )


def behind_semaphores(workspace: torch.Tensor) -> torch.Tensor:
    """The scratch of a workspace, as bytes; raises as `check_workspace_size`."""
    check_workspace_size(workspace)
    return workspace.view(-1).view(torch.uint8)[SEMAPHORE_BYTES:]


def refuse_planning_in_capture(wrapper: str, device: torch.device) -> None:
    """Raise NotImplementedError where a wrapper of FlashInfer's would plan, from lengths on the host, inside a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{wrapper} plans on the host from the lengths, which no CUDA graph can: call plan before"
        )


def refuse_during_capture(what: str, device: torch.device) -> None:
    """Raise RuntimeError where something that must outlive a CUDA graph would be made inside the one being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be made inside the CUDA graph being captured; make this call once before it, on the same stream"
        )
