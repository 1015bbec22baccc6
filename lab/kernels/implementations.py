"""The implementations of FlashInfer's calls that the lab knows, and which of them a machine has."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from lab.calls.problem import AttentionCall
from lab.extras import sentence
from lab.gpus import FAMILIES, Capability
from lab.kernels.support import Kernel, packages, peers, portable, trtllm
from lab.kernels.support.kernel import wrong_device, wrong_gpu


@dataclass(frozen=True)
class Implementation:
    """A module with some of FlashInfer's functions.

    Attributes:
        module: its name, such as "lab.kernels.trtllm"; of two backends in one module with ":fa2" or ":fa3" after it.
        package: the package whose kernels these are, as it is imported.
        distribution: its name on the package index, whose version is the implementation's.
        kernels: their rows; () of plain torch, which runs everywhere.
    """

    module: str
    package: str
    distribution: str
    kernels: tuple[Kernel, ...] = ()


IMPLEMENTATIONS = (
    Implementation("lab.references", "torch", "torch"),
    Implementation("lab.kernels.portable", "triton", "triton", portable.KERNELS),
    Implementation("lab.kernels.trtllm", "flashinfer", "flashinfer-python", trtllm.KERNELS),
    *(
        Implementation(f"lab.kernels.peers.{module}:{backend}", "flashinfer", "flashinfer-python", (kernel,))
        for module, call in (
            ("flashinfer_paged", AttentionCall.DECODE),
            ("flashinfer_mla", AttentionCall.MLA_DECODE),
            ("flashinfer_ragged", AttentionCall.RAGGED_CONTEXT),
        )
        for backend, kernel in peers.BY_BACKEND[call].items()
    ),
    Implementation("lab.kernels.peers.flash_attention_4", "flash_attn", "flash-attn-4", (packages.FLASH_ATTENTION_4,)),
    Implementation("lab.kernels.peers.flex_attention", "torch", "torch", (packages.FLEX_ATTENTION,)),
    Implementation("lab.kernels.peers.sglang_triton", "sglang", "sglang", (packages.SGLANG_TRITON,)),
    Implementation("lab.kernels.peers.vllm_triton", "vllm", "vllm", (packages.VLLM_TRITON,)),
)


@dataclass(frozen=True)
class Availability:
    """One function of an implementation on a machine.

    Attributes:
        implementation, function: names.
        kernels: names of those that serve the call there; () if none does.
        why_not: the reason why it does not run there, as a sentence; None if it does.
    """

    implementation: Implementation
    function: AttentionCall
    kernels: tuple[str, ...]
    why_not: str | None


def availabilities(capability: Capability | None) -> Iterator[Availability]:
    """Yield every function of every implementation, and whether a machine with that GPU (None: a CPU) has it.

    Nothing is imported: packages are looked for. What a kernel takes of a call, `lab.kernels.support.why_not` knows.
    """
    for each in IMPLEMENTATIONS:
        missing = None if find_spec(each.package) else sentence(each.module, [each.package])
        if not each.kernels:
            yield from (Availability(each, call, ("float64 torch",), missing) for call in AttentionCall)
            continue
        for call in AttentionCall:
            serving = [kernel for kernel in each.kernels if call in kernel.calls]
            if serving:
                yield _availability(each, call, serving, capability, missing)


def modules_of(call: AttentionCall, capability: Capability | None) -> dict[str, str | None]:
    """Return the modules with kernels of a call (no references), each with the reason why a machine with that GPU lacks them.

    The reason is a sentence about the package or the GPUs that they need, or None where it has one.
    """
    found = (each for each in availabilities(capability) if each.function is call and each.implementation.kernels)
    return {each.implementation.module: each.why_not for each in found}


def _availability(
    implementation: Implementation,
    call: AttentionCall,
    serving: list[Kernel],
    capability: Capability | None,
    missing: str | None,
) -> Availability:
    here = [kernel for kernel in serving if wrong_device(kernel, capability) is None]
    families = tuple(family for family in FAMILIES if any(family in kernel.gpus for kernel in serving))
    why_not = missing
    if not here and not missing:
        on_triton = [wrong_device(kernel, capability) for kernel in serving if kernel.uses_triton]
        why_not = on_triton[0] if on_triton else wrong_gpu("it", families, capability)
    return Availability(implementation, call, tuple(each.name for each in here), why_not)
