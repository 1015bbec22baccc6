"""Entry points, look-ups of functions, workspaces and page tables for the modules that call kernels of installed packages."""

import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall, MLADecodeCall, made_at_once, takes
from lab.calls.problem import AttentionProblem, PagedAttention
from lab.calls.workspace import SEMAPHORE_BYTES, semaphores_and_scratch
from lab.extras import require
from lab.gpus import Capability, capability_of
from lab.kernels.support import Kernel, Problem, refuse_unsupported
from lab.kernels.support.trtllm import kernel_for

SCRATCH_BYTES = 512 * 2**20  # scratch in the lab's own workspace: SGLang 0.5.23's default
# Smallest scratch of a call. XQA (FlashInfer 0.7.2, xqa_wrapper.cu) and trtllm-gen (kernelParams.h, `ptrPartialO`) would write
# beyond a smaller one without an error.
LEAST_SCRATCH_BYTES = 64 * 2**20

Refresh = Callable[[], object]  # a small launch that computes a tensor again from the contents of another tensor
Ready = Callable[[], Any]  # a call, ready to be made


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """A prepared call (`lab.kernels.prepare`) of an installed package. Calling this object calls the package's function."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    # Steps that run before `function`. Each computes an argument, such as a contiguous page table.
    refreshes: tuple[Refresh, ...] = ()
    returned: Any = None  # the result of each run; None: the result of `function`

    def __call__(self) -> Any:
        for refresh in self.refreshes:
            refresh()
        returned = self.function(**self.arguments)
        return returned if self.returned is None else self.returned


def returning(problem: AttentionProblem, returned: Callable[..., Any]) -> PreparedCall:
    """Return a prepared call that launches no kernel, for a problem without query rows or without keys. A run returns
    `returned(out, lse)` without writing `out` and `lse`. If there are rows but no keys, the caller must fill these tensors.
    """
    return PreparedCall(returned, dict(zip(("out", "lse"), problem.results(), strict=True)))


def entries(
    kind: str, call_type: type[Any], make_ready: Callable[[Any, Any], Ready], kernel: Kernel | None = None
) -> tuple[Callable[..., Any], ...]:
    """Return two functions for FlashInfer's function `<name>`: `<kind>_<name>` prepares a call; `<name>` prepares and runs it.

    Args:
        kind: "prepare" (`lab.kernels.prepare`), or "plan" if the host reads lengths and page tables
            (`lab.kernels.PlannedOnce`).
        call_type: the class of the call, such as `lab.calls.DecodeCall`, whose `function` has the name.
        make_ready: takes a call and its checked arguments, `call.problem()`; returns a function that runs the call any number
            of times. It is not used for a call without query rows. The docstrings of both functions contain its docstring.
        kernel: the kernel that must support the call; None: `make_ready` checks the support.
    """

    @functools.wraps(make_ready)
    def entry(call: Any) -> Ready:
        problem = call.problem()
        if problem.has_no_rows:
            return returning(problem, getattr(call, "returned", problem.returned))
        if kernel is not None:
            refuse_unsupported(kernel, problem)
            if kind == "plan":
                refuse_planning_in_capture(kernel.name, problem.query.device)
        return make_ready(call, problem)

    entry.__name__ = entry.__qualname__ = f"{kind}_{call_type.function.value}"
    ready = takes(call_type)(entry)
    return ready, made_at_once(ready)


def supported_kernel(problem: Problem, backend: str = "auto") -> Kernel:
    """Return the TRT-LLM kernel that FlashInfer runs for a call. Raise NotImplementedError if it cannot run the call."""
    of_one_rank = isinstance(problem, PagedAttention) and problem.num_visible is not None
    kernel = kernel_for(problem.call, capability_for(problem.query.device), backend, of_one_rank)
    refuse_unsupported(kernel, problem)
    return kernel


def prepared(module: str, name: str, arguments: dict[str, Any], refreshes: tuple[Refresh, ...]) -> PreparedCall:
    return PreparedCall(installed_taking(module, name, frozenset(arguments)), arguments, refreshes)


@functools.cache
def installed_taking(module: str, name: str, keywords: frozenset[str]) -> Callable[..., Any]:
    """Return a function of the installed FlashInfer. Raise NotImplementedError unless it takes exactly these keywords."""
    function, signature = installed(module, name)
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise NotImplementedError(
            f"{module}.{name} of the installed FlashInfer {version()} does not take this call: {error}; "
            f"the lab is written for 0.7.2. Its parameters: {', '.join(signature.parameters)}"
        ) from error
    return function


@functools.cache
def installed(module: str, name: str) -> tuple[Any, inspect.Signature]:
    """Return a function or class of the installed FlashInfer and its signature. Raise NotImplementedError if it lacks this."""
    require("lab.kernels.trtllm", "flashinfer")
    function = getattr(importlib.import_module(module), name, None)
    if function is None:
        raise NotImplementedError(
            f"the installed FlashInfer {version()} has no {module}.{name}; the lab is written for 0.7.2"
        )
    return function, inspect.signature(function)


def version() -> str:
    return importlib.metadata.version("flashinfer-python")


@functools.cache
def installed_function(
    part: str, name: str, written_for: str, keywords: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Import and return the function with the dotted name `name`, after checking that it can be called with the keyword
    arguments `keywords` (empty: without a check). Error messages name `part`, the module that needs the function, and
    `written_for`, the release for which the lab was written.

    Raises:
        ModuleNotFoundError: the package, or a package that it imports, is not installed.
        TypeError: the installed release lacks the function or a parameter, or requires a parameter that is not passed.
    """
    package = name.partition(".")[0]
    require(part, package)
    module, _, attribute = name.rpartition(".")
    try:
        release = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a folder on the path
        release = "of an unknown version"
    here = f"the installed {package} {release}"
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise TypeError(f"{here} has no {name}; the lab is written for {written_for}") from error
    if keywords:
        try:
            inspect.signature(function).bind(**dict.fromkeys(keywords))
        except TypeError as error:
            raise TypeError(
                f"{name} of {here} does not take this call: {error}; the lab is written for {written_for}"
            ) from error
    return function


def but_defaults(call: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, updated by `changes`, without those that equal FlashInfer's defaults."""
    defaults = _defaults(call.__class__)  # not passed, because an older FlashInfer may have no such parameter

    def is_default(name: str, value: Any) -> bool:
        default = defaults[name]
        return value is default or (isinstance(value, (bool, int, float, str)) and value == default)

    return {name: value for name, value in (vars(call) | changes).items() if not is_default(name, value)}


@functools.cache
def _defaults(call: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(call)}


def capability_for(device: torch.device) -> Capability:
    capability = capability_of(device)
    if capability is None:
        raise NotImplementedError(
            f"FlashInfer's kernels need a CUDA GPU, and these tensors are on {device}; use lab.kernels.portable or "
            "lab.references"
        )
    return capability


def packed(table: torch.Tensor) -> tuple[torch.Tensor, tuple[Refresh, ...]]:
    """Return (contiguous copy of a page table, launches that fill the copy); (`table`, ()) if `table` is contiguous."""
    if table.is_contiguous():
        return table, ()
    rows = torch.empty(table.shape, dtype=table.dtype, device=table.device)
    return rows, (functools.partial(rows.copy_, table),)


def workspace_for(workspace: object, device: torch.device, statistics_bytes: int = 0) -> torch.Tensor:
    """Check the workspace of a call and return it. For None, return the lab's own workspace of the device and the current
    stream: two streams must not share XQA's semaphores. `statistics_bytes` is the part of the workspace that the kernel needs
    for softmax statistics.
    """
    if workspace is None:
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        workspace = workspace_of(device, stream)
    if not isinstance(workspace, torch.Tensor):
        raise TypeError(f"workspace_buffer must be a torch.Tensor or None, got {type(workspace).__name__}")
    if workspace.device != device or not workspace.is_contiguous():
        raise ValueError(
            f"workspace_buffer must be contiguous on {device}, got stride {workspace.stride()} on {workspace.device}; "
            "pass None for the lab's own"
        )
    least = LEAST_SCRATCH_BYTES + statistics_bytes
    if workspace.nbytes - SEMAPHORE_BYTES < least:
        remedy = f"pass {SEMAPHORE_BYTES + least}" if least > SCRATCH_BYTES else "pass None for the lab's own"
        raise ValueError(
            f"workspace_buffer has {workspace.nbytes} bytes, less than the {SEMAPHORE_BYTES} of XQA's semaphores and "
            f"{least} of scratch; {remedy}"
        )
    return workspace


@functools.cache
def workspace_of(device: torch.device, stream: int) -> torch.Tensor:
    """Allocate the lab's own workspace for one stream of a device, uint8: XQA's semaphores, which are 0, then scratch."""
    refuse_during_capture("the workspace", device)
    return torch.zeros(SEMAPHORE_BYTES + SCRATCH_BYTES, dtype=torch.uint8, device=device)


def xqa_memory(call: DecodeCall | MLADecodeCall, device: torch.device) -> dict[str, Any]:
    """Return two arguments of a call that runs XQA: the workspace, and None for the counters, which only trtllm-gen uses."""
    return {"workspace_buffer": workspace_for(call.workspace_buffer, device), "multi_ctas_kv_counter_buffer": None}


def trtllm_gen_memory(call: Any, problem: PagedAttention) -> dict[str, Any]:
    """Return the arguments for workspace and counters of a call that runs trtllm-gen. If the caller gives no counters, the
    first bytes of the workspace, which are zero, are the counters: FlashInfer would allocate and zero a buffer in each call.
    """
    statistics_bytes = 0
    # A decode kernel's partial results come after the softmax statistics; the launcher does not check that they fit.
    if not isinstance(call, ContextCall) and (problem.lse is not None or problem.return_lse):
        # Two float32 per request, head and row, and 1 MiB (trtllm_fmha_kernel_launcher.cu, `softmax_slots`).
        rows = -(-problem.max_q_len // 256) * 256
        statistics_bytes = problem.batch_size * problem.num_qo_heads * rows * 8 + 2**20
    workspace = workspace_for(call.workspace_buffer, problem.query.device, statistics_bytes)
    given = call.multi_ctas_kv_counter_buffer
    if not takes_counters():
        return {"workspace_buffer": workspace, "multi_ctas_kv_counter_buffer": given}
    counters, scratch = semaphores_and_scratch(workspace)
    return {"workspace_buffer": scratch, "multi_ctas_kv_counter_buffer": counters if given is None else given}


def takes_counters() -> bool:
    """Return True if the installed FlashInfer has a parameter for trtllm-gen's counters. Releases such as 0.6.13
    (`trtllm_fmha_kernel_launcher.cu`) use the first 8 MiB of the workspace as counters, which must be zero.
    """
    _, signature = installed("flashinfer.decode", "trtllm_batch_decode_with_kv_cache")
    return "multi_ctas_kv_counter_buffer" in signature.parameters


def takes_kv_pairs() -> bool:
    """Return True if the installed FlashInfer's `trtllm_fmha_v2_prefill` takes paged K and V as two tensors: since 0.6.18
    (flashinfer-ai/flashinfer#4124). Raise NotImplementedError for releases before 0.6.7, which lack the function.
    """
    installed("flashinfer.prefill", "trtllm_fmha_v2_prefill")
    return hasattr(importlib.import_module("flashinfer.prefill"), "_check_paged_kv_non_interleaved")


def scratch_for(workspace_buffer: object, device: torch.device) -> torch.Tensor:
    """Return the part of a call's workspace after XQA's semaphores, uint8. A kernel may leave any contents in this part."""
    return semaphores_and_scratch(workspace_for(workspace_buffer, device))[1]


def refuse_during_capture(what: str, device: torch.device) -> None:
    """Raise RuntimeError if a CUDA graph is being captured: later calls use the memory `what`, so no graph may allocate it."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{what} would be made inside the CUDA graph being captured; make this call once before it, on the same stream"
        )


def refuse_planning_in_capture(planner: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{planner} plans on the host from the lengths, which no CUDA graph can: call plan before"
        )
