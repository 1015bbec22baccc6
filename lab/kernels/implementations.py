"""The lab's implementations of FlashInfer's calls, and which of them can run on a machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from lab.calls.problem import AttentionCall
from lab.extras import sentence
from lab.gpus import FAMILIES, Capability
from lab.kernels.support import packages, peers, portable, trtllm
from lab.kernels.support.kernel import Implementation, wrong_device, wrong_gpu

IMPLEMENTATIONS = (
    Implementation("lab.references", "torch", "torch"),
    Implementation("lab.kernels.portable", "triton", "triton", portable.KERNELS),
    Implementation("lab.kernels.trtllm", "flashinfer", "flashinfer-python", trtllm.KERNELS),
    *(
        Implementation(f"lab.kernels.peers.{module}:{backend}", "flashinfer", "flashinfer-python", (kernel,))
        for module, by_backend in peers.BY_MODULE.items()
        for backend, kernel in by_backend.items()
    ),
    *packages.IMPLEMENTATIONS,
)


@dataclass(frozen=True)
class Availability:
    """Whether one function of an implementation can run on one machine."""

    implementation: Implementation
    function: AttentionCall
    kernels: tuple[str, ...]  # names of the kernels that run the function on this machine; () if none does
    why_not: str | None  # a sentence that says why the function cannot run there; None if it can


def availabilities(capability: Capability | None) -> Iterator[Availability]:
    """Yield an `Availability` for each function of each implementation, without importing a package. `capability` is (major,
    minor) of the GPU; None: no GPU.
    """
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
