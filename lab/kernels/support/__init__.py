"""A row per kernel of what it takes and honours; `why_not` gives the reason of a refusal in a sentence.

Rows lie in a file per family: `portable`, `trtllm_gen`, `xqa`, `fmha_v2`, `peers` for FlashInfer's own FA2 and FA3, `packages`
for other packages' kernels. Every limit carries its source. The sentence is what a refused call raises and what a skipped
benchmark prints.
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
    """Raise NotImplementedError with `why_not`'s sentence if the kernel does not take the problem on its device."""
    reason = why_not(kernel, capability_of(problem.query.device), problem)
    if reason is not None:
        raise NotImplementedError(reason)


def refuse_without_triton(device: torch.device) -> None:
    """Raise NotImplementedError with a sentence if Triton does not run the lab's kernels on this device."""
    reason = no_triton(capability_of(device))
    if reason is not None:
        raise NotImplementedError(reason)


def kernel_names(implementation: Any, functions: Iterable[str], device: torch.device) -> str:
    """Return the names of the kernels that an implementation runs on a device, joined by " + ".

    Args:
        implementation: one with `kernel_for(call, capability)` says which kernel of a GPU a call comes to; any other is
            named by the last part of its own name.
        functions: FlashInfer's names of the calls.
        device: where the calls run.
    """
    capability = capability_of(device)
    if capability is None or not hasattr(implementation, "kernel_for"):
        return str(implementation.__name__).rpartition(".")[2]
    return " + ".join(implementation.kernel_for(AttentionCall(function), capability).name for function in functions)
