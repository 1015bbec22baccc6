"""What each kernel supports: one `Kernel` per kernel. `why_not` returns the reason why a kernel does not support a call, and
`availabilities` says which implementations can run on a machine.

Every limit names its source. An unsupported call raises an error with the reason, and a skipped benchmark prints it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.extras import sentence
from lab.gpus import FAMILIES, Capability, capability_of
from lab.kernels.support import peers, portable, trtllm
from lab.kernels.support.kernel import Implementation, no_triton, wrong_device, wrong_gpu
from lab.kernels.support.kernel import Kernel as Kernel
from lab.kernels.support.kernel import Problem as Problem
from lab.kernels.support.kernel import triton_interprets as triton_interprets
from lab.kernels.support.kernel import why_not as why_not

IMPLEMENTATIONS = (
    Implementation("lab.references", "torch", "torch"),
    Implementation("lab.kernels.portable", "triton", "triton", portable.KERNELS),
    Implementation("lab.kernels.trtllm", "flashinfer", "flashinfer-python", trtllm.KERNELS),
    *peers.IMPLEMENTATIONS,
)
KERNELS: tuple[Kernel, ...] = tuple(kernel for each in IMPLEMENTATIONS for kernel in each.kernels)


def refuse_unsupported(kernel: Kernel, problem: Problem) -> None:
    """Raise NotImplementedError with the reason if a kernel does not support a call on the call's device."""
    reason = why_not(kernel, capability_of(problem.query.device), problem)
    if reason is not None:
        raise NotImplementedError(reason)


def refuse_without_triton(device: torch.device) -> None:
    reason = no_triton(capability_of(device))
    if reason is not None:
        raise NotImplementedError(reason)


def kernel_names(implementation: Any, functions: Iterable[str], device: torch.device) -> str:
    """Return the names of the kernels that an implementation runs for these functions, joined by " + ". On a CPU, and for an
    implementation whose kernels the lab does not know, return the implementation's own name.
    """
    module, capability = str(implementation.__name__), capability_of(device)
    if capability is not None and hasattr(implementation, "kernel_for"):
        return " + ".join(implementation.kernel_for(AttentionCall(function), capability).name for function in functions)
    known = {each.module: each.kernels[0].name for each in peers.IMPLEMENTATIONS} if capability is not None else {}
    return known.get(module, module.rpartition(".")[2])


@dataclass(frozen=True)
class Availability:
    """Whether one function of an implementation can run on one machine."""

    implementation: Implementation
    function: AttentionCall
    kernels: tuple[str, ...]  # names of the kernels that run the function on this machine; () if none does
    why_not: str | None  # a sentence that says why the function cannot run there; None if it can


def availabilities(capability: Capability | None) -> Iterator[Availability]:
    """Yield an `Availability` for each function of each implementation. No package is imported. `capability` None: no GPU."""
    for each in IMPLEMENTATIONS:
        missing = None if find_spec(each.package) else sentence(each.module, [each.package])
        if not each.kernels:
            yield from (Availability(each, call, ("float64 torch",), missing) for call in AttentionCall)
            continue
        for call in AttentionCall:
            serving = [kernel for kernel in each.kernels if call in kernel.calls]
            if not serving:
                continue
            here = tuple(kernel.name for kernel in serving if wrong_device(kernel, capability) is None)
            why_not = missing
            if not here and not missing:
                families = tuple(family for family in FAMILIES if any(family in kernel.gpus for kernel in serving))
                on_triton = [wrong_device(kernel, capability) for kernel in serving if kernel.uses_triton]
                why_not = on_triton[0] if on_triton else wrong_gpu("it", families, capability)
            yield Availability(each, call, here, why_not)


def modules_of(call: AttentionCall, capability: Capability | None) -> dict[str, str | None]:
    found = (each for each in availabilities(capability) if each.function is call and each.implementation.kernels)
    return {each.implementation.module: each.why_not for each in found}
