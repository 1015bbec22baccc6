"""What each kernel supports: one `Kernel` per kernel. `why_not` returns the reason why a kernel does not support a call.

Every limit names its source. An unsupported call raises the reason, and a skipped benchmark prints it.
"""

from collections.abc import Iterable
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.gpus import capability_of
from lab.kernels.support import packages, peers, portable, trtllm
from lab.kernels.support.kernel import Kernel as Kernel
from lab.kernels.support.kernel import Problem as Problem
from lab.kernels.support.kernel import no_triton
from lab.kernels.support.kernel import triton_interprets as triton_interprets
from lab.kernels.support.kernel import why_not as why_not

KERNELS: tuple[Kernel, ...] = (*portable.KERNELS, *trtllm.KERNELS, *peers.KERNELS, *packages.KERNELS)


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
    implementation without `kernel_for`, return the implementation's own name.
    """
    capability = capability_of(device)
    if capability is None or not hasattr(implementation, "kernel_for"):
        return str(implementation.__name__).rpartition(".")[2]
    return " + ".join(implementation.kernel_for(AttentionCall(function), capability).name for function in functions)
