"""Make the attention calls of forward passes for an absent GPU, and record for each call the kernel and its launches, or the
reason why no kernel supports the call.

A forward pass has the same lengths, pool, metadata and arguments as in `lab bench` and in the judge. Its tensors are not
written, so a pool of gigabytes takes no memory.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.checks.properties.forward_modes import mode_cases
from lab.checks.properties.mla_modes import mla_mode_cases, two_pool_cases
from lab.dry_run import build
from lab.dry_run.launches import Launch
from lab.dry_run.machine import Gpu, LaunchError, Machine, gpu_named, machine
from lab.gpus import family_of
from lab.kernels import prepare, trtllm
from lab.kernels.flashinfer_call import SCRATCH_BYTES
from lab.kernels.support import portable, why_not
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch
from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache, PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.dsv4 import DSV4Cache
from lab.metadata.mla.metadata import build_mla_decode_metadata
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import (
    EnginePass,
    ForwardPass,
    new_layer,
    new_poisonable_pool,
    stored_width,
    with_scale_factors,
)
from lab.workloads.inputs.mla_pass import MLAPass, new_mla_layer
from lab.workloads.mla_case import MLACase
from lab.workloads.requests import admit
from lab.workloads.scenarios import DEFAULT_SCENARIOS, scenario

CPU = torch.device("cpu")
# The shown passes: those of the judge's check M1 (forward modes) for each (model, has a sliding window), and those of its check
# M2 (forward modes of MLA) for each of these numbers of query heads.
SURVEYED_MODELS = (("llama-3.1-8b", False), ("gpt-oss-120b", True))
SURVEYED_MLA_HEADS = (16, 128)
PAGE_SIZE, Q_LEN = 64, 4


@dataclass(frozen=True)
class DryCall:
    """One attention call of a forward pass on a GPU that this machine does not have."""

    function: str  #: FlashInfer's name of the call
    kernel: str  #: name of the kernel's row in `lab.kernels.support`
    #: launches of FlashInfer's launcher, in order; empty if only the rules of `lab.kernels.support` were used
    launches: tuple[Launch, ...] = ()
    #: the sentence of `lab.kernels.support.why_not` if the kernel does not support the call; None if it does
    refusal: str | None = None
    #: error of FlashInfer's launcher for a call that `why_not` accepts; None if it launched, or was not called
    failure: str | None = None


@dataclass(frozen=True)
class DryPass:
    """A named forward pass and its attention calls. A mixed batch may have a second call, for its decode requests."""

    name: str
    case: ForwardCase | MLACase
    calls: tuple[DryCall, ...]


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run: the kernels and launches of forward passes on a GPU that this machine does not have."""

    gpu: Gpu
    #: origin of the launcher's kernel table, such as "flashinfer-cubin 0.6.13"; None if the launcher was not called
    table: str | None
    table_is_older: bool  #: the launcher reads members of a kernel's row that the table does not have
    #: why FlashInfer's launcher was not called and the rules of `lab.kernels.support` named the kernels; None if it was called
    by_rules_because: str | None
    passes: tuple[DryPass, ...]


def surveyed_passes() -> Iterator[tuple[str, ForwardCase | MLACase]]:
    """Yield (name, case) of `lab dry-run`'s passes: `lab bench`'s default scenarios, and forward modes such as extend."""
    for name in DEFAULT_SCENARIOS:
        yield name, scenario(name)
    for model, is_window in SURVEYED_MODELS:
        for case in mode_cases(model, PAGE_SIZE, (Q_LEN,)):
            # Context parallelism needs several GPUs, and virtual slots do not change a launch.
            if case.context_parallel > 1 or case.virtual_slots:
                continue
            has_window = is_window and not case.encoder_only
            words = ["M1", model, case.mode.name.lower(), *_options(case), *(["window"] if has_window else [])]
            yield "/".join(words), replace(case, sliding_window=has_window)
    for heads in SURVEYED_MLA_HEADS:
        two_pools = two_pool_cases(Q_LEN, num_qo_heads=heads)
        for mla in itertools.chain(mla_mode_cases(PAGE_SIZE, (Q_LEN,), num_qo_heads=heads), two_pools):
            if mla.virtual_slots:
                continue
            yield "/".join(["M2", f"{heads}_heads", mla.mode.name.lower(), *_mla_options(mla)]), mla


def _options(case: ForwardCase) -> list[str]:
    """Return the options of a case for the name of its forward pass, such as "hnd" for a cache in HND layout."""
    is_frozen = case.draft_step == FROZEN_KV_STEP
    options = {
        f"frozen_kv/topk{case.topk}": is_frozen,
        f"step{case.draft_step}": case.draft_step is not None and not is_frozen,
        "hnd": case.layout is KVLayout.HND,
        f"on_{case.draft_extend and case.draft_extend.name.lower()}": case.draft_extend is not None,
        "split_tail": case.split_mixed_tail,
        "encoder_only": case.encoder_only,
        f"padding{case.num_padding_rows}": case.num_padding_rows,
        f"splits{case.decode_splits}": case.decode_splits > 1,
        "no_prefix": case.mode.is_prefill and not any(case.prefix_lens),
    }
    return [option for option, is_set in options.items() if is_set]


def _mla_options(case: MLACase) -> list[str]:
    options = {
        f"ratio{case.compress_ratio}": case.compress_ratio is not None,
        f"step{case.draft_step}": case.draft_step is not None,
        "with_offset": case.attention is DraftAttention.MLA_WITH_OFFSET,
        f"draft{case.num_draft_tokens}": case.num_draft_tokens is not None,
        f"rows{'+'.join(map(str, case.q_lens))}": case.mode.query_rows.are_unequal_drafts,
    }
    return [option for option, is_set in options.items() if is_set]


def dry_run(
    gpu_name: str, cases: Iterable[tuple[str, ForwardCase | MLACase]], before_build: Callable[[], object] = lambda: None
) -> DryRun:
    """Return the kernels and launches of named forward passes on the absent GPU `gpu_name`, a key of `lab.dry_run.GPUS`.

    For SM100 and SM103, FlashInfer's launcher selects the kernels. If it cannot be compiled here, and for other GPUs, the rules
    of `lab.kernels.support` select them. `before_build` is called before the launcher is compiled, which takes a minute. Raises
    ValueError if the GPU is unknown.
    """
    gpu, reason = gpu_named(gpu_name), build.why_not_built()
    family = family_of(gpu.capability)
    if family is None or family.trtllm_backend != "trtllm-gen":
        reason = f"FlashInfer's launcher is trtllm-gen's, which {gpu.name} does not run"
    with ExitStack() as stack:
        on: Machine | None = None
        if reason is None:
            if not build.is_built():
                before_build()
            try:
                on = stack.enter_context(machine(gpu_name))
            except build.NotBuiltError as error:
                reason = str(error)
        passes = []
        for name, case in cases:
            forward, noted = _unwritten_pass(case), _NotedCalls(gpu, on)
            out = forward.query.new_empty((len(forward.query), *case.out_shape))
            forward.prepare(noted, **forward.arguments(out))
            passes.append(DryPass(name, case, tuple(noted.calls)))
    if on is None:
        return DryRun(gpu, None, False, reason, tuple(passes))
    return DryRun(gpu, on.launcher.table.source, bool(on.table_lacks), None, tuple(passes))


class _NotedCalls:
    """An implementation of FlashInfer's functions that runs no kernel, and records the kernel and the launches of each call."""

    def __init__(self, gpu: Gpu, on: Machine | None) -> None:
        self.calls: list[DryCall] = []
        self._capability, self._machine = gpu.capability, on
        self._workspace = torch.empty(SEMAPHORE_BYTES + SCRATCH_BYTES, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("prepare_trtllm_"):
            raise AttributeError(name)
        return partial(self._prepare, AttentionCall(name.removeprefix("prepare_")))

    def _prepare(self, call: AttentionCall, **arguments: Any) -> Callable[[], object]:
        family = family_of(self._capability)
        if family is not None and family.trtllm_backend is not None:
            kernel = trtllm.kernel_for(call, self._capability)
        else:
            kernel = next(kernel for kernel in portable.KERNELS if call in kernel.calls)
        arguments["workspace_buffer"] = self._workspace
        refusal = why_not(kernel, self._capability, CALL_TYPES[call](**arguments).problem())
        launches: tuple[Launch, ...] = ()
        failure = None
        if refusal is None and self._machine is not None:
            self._machine.clear()
            try:
                prepare(trtllm, call.value, **arguments)()
                launches = self._machine.launches
            except LaunchError as error:
                failure = str(error)
        self.calls.append(DryCall(call.value, kernel.name, launches, refusal, failure))
        return lambda: None


def _unwritten_pass(case: ForwardCase | MLACase) -> EnginePass:
    """Return the forward pass of a case. Its query and cache are not initialised, and it has no expected outputs."""
    pool = new_poisonable_pool(case, CPU)
    requests = admit(pool, case.prefix_lens, case.q_lens, case.draft_step, case.num_draft_tokens, case.topk)
    if case.window_left >= 0:
        requests.evict(case.window_left)
    batch = requests.batch(case.mode, case.num_padding_rows)
    if isinstance(case, MLACase):
        return _unwritten_mla_pass(case, pool, batch)
    query = torch.empty(batch.num_tokens, case.model.num_qo_heads, case.model.head_dim, dtype=case.dtype)
    metadata, layer = case.backend().build_metadata(batch, pool), new_layer(case, CPU, torch.Generator())
    num_pages = pool.swa_num_pages if case.sliding_window else pool.num_pages
    assert num_pages is not None
    page = (case.page_size, case.model.num_kv_heads)
    axes = page if case.layout is KVLayout.NHD else page[::-1]
    storage = torch.empty(2, num_pages, *axes, stored_width(case), dtype=case.kv_dtype)
    cache = with_scale_factors(case, PagedKVCache(storage, case.layout))
    return ForwardPass(case, pool, batch, metadata, layer, cache, query, ())


def _unwritten_mla_pass(case: MLACase, pool: KVPool, batch: ForwardBatch) -> MLAPass:
    query = torch.empty(batch.num_tokens, case.num_qo_heads, case.head_dim, dtype=case.dtype)
    layer = new_mla_layer(case, torch.Generator())
    cache: Any
    if case.compress_ratio is None:
        cache = PagedLatentCache(torch.empty(pool.num_pages, pool.page_size, case.head_dim, dtype=case.kv_dtype))
    else:
        empty = DSV4Cache.over(pool, 0, case.kv_dtype, case.compress_ratio)
        cache = replace(empty, storage=empty.storage.new_empty(len(empty.storage), case.head_dim))
    if case.is_sparse:
        own = case.backend().build_metadata(batch, pool)
        chosen = torch.full((len(own.seq_lens), case.index_topk or 0), -1, dtype=torch.int32)
        return MLAPass(case, pool, batch, own, layer, cache, query, (), chosen)
    metadata = build_mla_decode_metadata(batch, pool, case.attention)
    return MLAPass(case, pool, batch, metadata, layer, cache, query, ())
