"""The class `Kernel` describes what one kernel supports. `why_not` returns the reason why a kernel does not support a call."""

import importlib.util
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.calls import Problem
from lab.calls.features import Feature
from lab.calls.problem import E4M3, AttentionCall, PagedAttention
from lab.extras import sentence
from lab.gpus import FAMILIES, Capability, GpuFamily, family_of, names_of, sm_name

Triples = frozenset[tuple[torch.dtype, torch.dtype, torch.dtype]]


@dataclass(frozen=True, eq=False)
class Dtypes:
    """A kernel's (query, K/V, output) dtypes, and error sentences for other dtypes, with the fields `{q}`, `{kv}`, `{out}`."""

    triples: Triples
    queries: str  # the sentence for a query dtype that is not supported
    kv: str | Mapping[torch.dtype, str]  # for a K/V dtype with this query dtype: one sentence, or one per K/V dtype
    out: str | Mapping[torch.dtype, str]  # for an output dtype with both: one sentence, or one per query dtype

    def why_not(self, q: torch.dtype, kv: torch.dtype, out: torch.dtype) -> str | None:
        if (q, kv, out) in self.triples:
            return None
        if q not in {triple[0] for triple in self.triples}:
            words = self.queries
        elif (q, kv) not in {triple[:2] for triple in self.triples}:
            words = self.kv if isinstance(self.kv, str) else self.kv[kv]
        else:
            words = self.out if isinstance(self.out, str) else self.out[q]
        return words.format(q=q, kv=f"{kv} (NVFP4)" if kv == torch.uint8 else kv, out=out)


def triples(queries: Iterable[torch.dtype], kv: Iterable[torch.dtype], out: Iterable[torch.dtype]) -> Triples:
    return frozenset(itertools.product(queries, kv, out))


@dataclass(frozen=True, eq=False)
class Sizes:
    """The values of one size, such as head_dim, that a kernel supports. The error sentence is "<words>, not <value>"."""

    words: str
    size: Callable[[Any], Any]
    among: Collection[Any]


def sizes(words: str, size: Callable[[Any], int], *among: int) -> Sizes:
    """Return `Sizes` for a kernel that supports only the values `among` of `size(problem)`. If `words` is "is built for
    head_dim", an error sentence is "is built for head_dim 64 and 128, not 96".
    """
    return Sizes(f"{words} {', '.join(map(str, among[:-1]))} and {among[-1]}", size, among)


def page_sizes(*among: int, words: str = "is built for page sizes") -> Sizes:
    return sizes(words, lambda problem: problem.page_size, *among)


def head_dims(*among: int, words: str = "is taken for head_dim") -> Sizes:
    return sizes(words, lambda problem: problem.head_dim, *among)


def dims(names: str, pair_of: Callable[[Any], tuple[int, int]], *among: tuple[int, int]) -> Sizes:
    """Return `Sizes` for a pair of dimensions that must be one of `among`. `names` names the pair in the error sentence."""
    return Sizes(f"has kernels for {names} {' or '.join(map(str, among))}", pair_of, among)


def mla_dims(problem: PagedAttention) -> tuple[int, int]:
    """Return (kv_lora_rank, qk_rope_head_dim) of an MLA call."""
    return problem.v_head_dim, problem.head_dim - problem.v_head_dim


@dataclass(frozen=True, eq=False)
class Kernel:
    """One attention kernel: its name, and the calls, GPUs, dtypes, sizes and features that it supports."""

    name: str  # in error sentences and in recorded results
    calls: tuple[AttentionCall, ...]
    gpus: tuple[GpuFamily, ...]
    dtypes: Dtypes
    honours: frozenset[Feature]  # optional features of a call, such as a window, that the kernel computes correctly
    sizes: tuple[Sizes, ...] = ()
    says: Mapping[Feature, str] = field(default_factory=dict)  # error sentences; by default "does not honour <feature>"
    # Takes (capability, problem) and checks all other limits, last. Returns an error sentence or None.
    limits: Callable[[Capability | None, Any], str | None] = lambda _capability, _problem: None
    uses_triton: bool = False  # Triton compiles the kernel, for every GPU since SM80
    on_cpu: bool = False  # the kernel also runs on a CPU, a Triton kernel in Triton's interpreter

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True)
class Implementation:
    """A module that implements some of FlashInfer's functions, and the package and kernels that it uses."""

    module: str  # such as "lab.kernels.trtllm", followed by ":fa2" or ":fa3" if it has two backends
    package: str  # import name of the package that has the kernels
    distribution: str  # name of this package on the package index
    kernels: tuple[Kernel, ...] = ()  # () for plain torch, which runs everywhere


def why_not(kernel: Kernel, capability: Capability | None, problem: Problem) -> str | None:
    """Return a sentence that says why a kernel does not support a call on a GPU; None if the kernel supports the call.

    Args:
        capability: (major, minor) of the GPU; None for a CPU.
        problem: the call's checked arguments.
    """
    if problem.call not in kernel.calls:
        served = " and ".join(call.value for call in kernel.calls)
        return f"{kernel.name} serves {served}, not {problem.call.value}"
    reason = wrong_device(kernel, capability, (problem.query.dtype, problem.kv_dtype, problem.out_dtype))
    if reason is not None:
        return reason
    past = (limit for limit in kernel.sizes if limit.size(problem) not in limit.among)
    refused = sorted(problem.features() - kernel.honours, key=lambda feature: feature.name)
    features = dict.fromkeys(kernel.says.get(feature, f"does not honour {feature.value}") for feature in refused)
    words = (
        kernel.dtypes.why_not(problem.query.dtype, problem.kv_dtype, problem.out_dtype)
        or next((f"{limit.words}, not {limit.size(problem)}" for limit in past), None)
        or ", and ".join(features)
        or kernel.limits(capability, problem)
    )
    return f"{kernel.name} {words}" if words else None


def wrong_device(kernel: Kernel, capability: Capability | None, dtypes: Iterable[torch.dtype] = ()) -> str | None:
    """Return why a kernel does not run with these dtypes on a GPU (`capability` None: a CPU); None if it does."""
    if kernel.uses_triton and (kernel.on_cpu or capability is not None):
        return no_triton(capability, dtypes)
    if kernel.on_cpu and capability is None:
        return None
    return None if family_of(capability) in kernel.gpus else wrong_gpu(kernel.name, kernel.gpus, capability)


def no_triton(capability: Capability | None, dtypes: Iterable[torch.dtype] = ()) -> str | None:
    """Return why Triton runs no kernel with these dtypes on a GPU (`capability` None: a CPU); None if it does."""
    if capability is None:
        if importlib.util.find_spec("triton") is None:
            return sentence("lab.kernels", ["triton"])
        if triton_interprets():
            return None
        return "Triton kernels run on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1 first"
    family = family_of(capability)
    if family is None:
        return wrong_gpu("Triton kernels", FAMILIES, capability)
    if E4M3 in dtypes and not family.has_e4m3:
        return f"Triton compiles e4m3 for SM89 and later, and this is {sm_name(capability)}"
    return None


def triton_interprets() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def wrong_gpu(name: str, gpus: tuple[GpuFamily, ...], capability: Capability | None) -> str:
    here = "a CPU" if capability is None else sm_name(capability)
    return f"{name} needs a GPU of {names_of(gpus)}, this is {here}"
