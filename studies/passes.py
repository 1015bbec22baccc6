"""Make forward passes as variants of a study. A variant's `module` runs the pass `case`."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab.kernels import PlannedOnce
from lab.kernels.support import kernel_names
from lab.metadata import AttentionCall
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.mha.backend import AttentionLayer, PlannedCall, TRTLLMMHABackend, call_arguments
from lab.metadata.mha.vllm import VLLMBackend
from lab.timing.forward import TimedPasses, case_facts
from lab.timing.work import Call, GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.mla_case import MLACase
from studies.variants import Variant

PORTABLE_MODULE, FLASHINFER_MODULE = "lab.kernels.portable", "lab.kernels.trtllm"
Prepare = Callable[..., Call]


def works_of(variants: Sequence[Variant], device: torch.device, prepare: Prepare | None = None) -> dict[str, GpuWork]:
    """Return the timed work of each variant, by name. Each has its own output. Variants whose cases differ only in the call of
    a draft extend, or in the number of decode calls, share all other tensors.

    `prepare` makes the timed call of a pass without latent attention; its first argument is the backend. None: the backend's
    `prepare_attention` makes it.
    """
    made: dict[ForwardCase | MLACase, TimedPasses] = {}
    works = {}
    for variant in variants:
        module = importlib.import_module(variant.module)
        implementation: Any = PlannedOnce(module) if variant.planned else module
        is_mla = isinstance(variant.case, MLACase)
        tensors = variant.case if is_mla else replace(variant.case, draft_extend=None, decode_splits=1)
        if tensors not in made:
            made[tensors] = TimedPasses.over((build_mla_pass if is_mla else build_forward)(tensors, device))
        backend = variant.case.backend(implementation)
        call = backend.prepare_attention if is_mla or prepare is None else partial(prepare, backend)
        works[variant.name] = replace(made[tensors].work(implementation), prepare=call)
    return works


def gpu_works(variants: Sequence[Variant]) -> dict[str, GpuWork]:
    return works_of(variants, torch.device("cuda"))


def eager_call(backend: TRTLLMMHABackend, *, out: torch.Tensor, **passed: Any) -> Call:
    """Return the only call of a pass, as a function that does the whole work of the call each time, without preparation."""
    (planned,) = _planned(backend, **passed)
    arguments = call_arguments(planned, **passed) | {"out": out, "workspace_buffer": None}
    return partial(getattr(backend.implementation, planned.call.value), **arguments)


def _planned(
    backend: TRTLLMMHABackend | VLLMBackend,
    *,
    batch: ForwardBatch,
    layer: AttentionLayer,
    query: torch.Tensor,
    cache: PagedKVCache,
    **others: Any,
) -> list[PlannedCall]:
    return backend.plan_calls(batch, layer, query.dtype, cache.storage.dtype)


def pass_facts(variant: Variant, work: GpuWork) -> dict[str, Any]:
    return {"implementation": variant.module, "kernel": kernel_of(variant, work), **case_facts(variant.case)}


def kernel_of(variant: Variant, work: GpuWork) -> str:
    """Return the names of the kernels that run a variant's calls on the device of `work`."""
    calls = [AttentionCall.MLA_DECODE.value]
    if isinstance(variant.case, ForwardCase):
        calls = [planned.call.value for planned in _planned(variant.case.backend(), **work.arguments)]
    return kernel_names(importlib.import_module(variant.module), calls, work.arguments["query"].device)
