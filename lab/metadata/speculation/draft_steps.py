"""The multi-step draft backends of TRT-LLM MHA and MLA: the metadata of every draft step, with and without dead work.

A draft of ``speculative_num_steps`` steps runs the draft model one time less than that behind its draft extend, so
``speculative_num_steps - 1`` inner backends each want the metadata of one decode pass. SGLang's template for them first
makes the ragged K/V lists that other backends read, and that these two ignore; change 26241 skips it for MLA.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from lab.kernels.serving.draft_decode_kv_indices import Schedule, generate_draft_decode_kv_indices
from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.metadata import DEAD_PAGE, TRTLLMMLADecodeMetadata, check_mla_page_size, mla_block_table_width

STEPS = range(2, 9)  # of ``speculative_num_steps``; with one step there is no draft decode


class DraftPlan(Enum):
    """How a draft's metadata is made."""

    COMMON_TEMPLATE = "common_template"  # the ragged lists of all steps, then one launch per step (before 26241)
    PER_STEP = "per step"  # one launch per step (after 26241)
    ONE_LAUNCH = "one launch"  # one for all steps, which share one page table

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True, eq=False)
class DraftStep:
    """What one draft step's backend is handed.

    Attributes:
        metadata: of the step's decode pass.
        kv_indptr: ``[batch_size + 1]`` int32 and
        kv_indices: ``[tokens]`` int32, the ragged lists of the common template, which neither backend reads; or None.
    """

    metadata: TRTLLMMHAMetadata | TRTLLMMLADecodeMetadata
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None


@dataclass(frozen=True)
class MultiStepDraft:
    """A multi-step draft backend's configuration.

    Attributes:
        attention: of the draft model.
        speculative_num_steps: 2 to 8; one inner backend fewer than that.
        plan: how the metadata is made; nothing else depends on it.
        topk: branches per request; the TRT-LLM backends draft chains.
        schedule: of the ragged lists' kernel, in the common template.

    Raises:
        ValueError: a number is out of range.
    """

    attention: DraftAttention
    speculative_num_steps: int
    plan: DraftPlan = DraftPlan.PER_STEP
    topk: int = 1
    schedule: Schedule = Schedule.SERIAL

    def __post_init__(self) -> None:
        if self.speculative_num_steps not in STEPS:
            raise ValueError(
                f"speculative_num_steps={self.speculative_num_steps} must be {STEPS.start} to {STEPS.stop - 1}: one step "
                "fewer than that is a draft decode"
            )
        if self.topk != 1:
            raise ValueError(f"topk={self.topk}: the TRT-LLM backends draft one chain per request, so topk must be 1")

    @property
    def num_decode_steps(self) -> int:
        return self.speculative_num_steps - 1


@dataclass(frozen=True, eq=False)
class DraftBuffers:
    """What a draft's metadata is written to. Buffers made once serve every batch up to their size, with other contents.

    Attributes:
        cache_seqlens: per step ``[max_batch_size]`` int32.
        cu_seqlens_k: per step ``[max_batch_size + 1]`` int32, MHA only.
        cu_seqlens_q: ``[max_batch_size + 1]`` int32, 0, 1, 2, ..., of all steps, MHA only.
        tables: per step ``[max_batch_size, width]`` int32; the same tensor for all steps in ONE_LAUNCH.
        kv_indptr: ``[speculative_num_steps, max_batch_size + 1]`` int32, common template only.
        kv_indices: ``[speculative_num_steps, max_batch_size * max_context_len]`` int32, common template only.
    """

    cache_seqlens: tuple[Tensor, ...]
    cu_seqlens_k: tuple[Tensor, ...] | None
    cu_seqlens_q: Tensor | None
    tables: tuple[Tensor, ...]
    kv_indptr: Tensor | None
    kv_indices: Tensor | None


@dataclass(frozen=True, eq=False)
class PreparedDraft:
    """Metadata of every step, which each call of `write` makes anew from what the batch's tensors then hold."""

    steps: tuple[DraftStep, ...]
    write: Callable[[], None]


def allocate_draft(draft: MultiStepDraft, pool: KVPool, max_batch_size: int) -> DraftBuffers:
    """Buffers that stay, as an engine makes for its CUDA graphs.

    Tables start as 0 (MHA) or -1 (MLA), and ``kv_indptr`` as 0; a table's dead cells later hold what was live once.

    Raises:
        ValueError: ``max_batch_size`` below 0, or a pool that the backend does not have.
    """
    check_pool(draft, pool)
    if max_batch_size < 0:
        raise ValueError(f"max_batch_size={max_batch_size} must be 0 or more")
    count, device = draft.num_decode_steps, pool.device

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def table() -> Tensor:
        if draft.attention.is_mla:
            return zeros(max_batch_size, _table_width(draft, pool)).fill_(DEAD_PAGE)
        return zeros(max_batch_size, _table_width(draft, pool))

    is_template, is_mla = draft.plan is DraftPlan.COMMON_TEMPLATE, draft.attention.is_mla
    capacity = max_batch_size * draft.topk
    return DraftBuffers(
        cache_seqlens=tuple(zeros(max_batch_size) for _ in range(count)),
        cu_seqlens_k=None if is_mla else tuple(zeros(max_batch_size + 1) for _ in range(count)),
        cu_seqlens_q=None if is_mla else torch.arange(max_batch_size + 1, dtype=torch.int32, device=device),
        tables=(table(),) * count if draft.plan is DraftPlan.ONE_LAUNCH else tuple(table() for _ in range(count)),
        kv_indptr=zeros(draft.speculative_num_steps, capacity + 1) if is_template else None,
        kv_indices=zeros(draft.speculative_num_steps, capacity * pool.max_context_len) if is_template else None,
    )


def prepare_draft(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, buffers: DraftBuffers) -> PreparedDraft:
    """Check once; then each `write` launches what the plan needs, and can be captured in a CUDA graph.

    Args:
        draft: the backend.
        batch: a decode batch; ``seq_lens`` without the drafted tokens. Its host lengths are not needed: without them a
            step's ``kv_indices`` is the whole row.
        pool: where its requests live.
        buffers: from `allocate_draft` with the same draft and pool.

    Raises:
        ValueError: not a decode batch, larger than the buffers, on another device, or a pool that the backend does not have.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_pool(draft, pool)
    _check_batch(batch, pool, buffers)
    passes = [_pass_buffers(draft, batch, buffers, step) for step in range(draft.num_decode_steps)]
    groups = [passes] if draft.plan is DraftPlan.ONE_LAUNCH else [[each] for each in passes]
    launches = [
        prepare_write_forward_metadata(
            group,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            req_to_token=pool.req_to_token,
            page_size=pool.page_size,
        )
        for group in groups
    ]
    if draft.plan is DraftPlan.COMMON_TEMPLATE:
        launches.insert(0, _lists_launch(draft, batch, pool, buffers))
    steps = tuple(_step(draft, batch, pool, buffers, each, step) for step, each in enumerate(passes))
    return PreparedDraft(steps, partial(_run_all, launches))


def build_draft_steps(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool) -> tuple[DraftStep, ...]:
    """The eager pass: fresh buffers and metadata of every step, in the engine's way.

    In the common template the ragged lists are cleared first, and each step gets a copy of its own.

    Raises:
        ValueError, NotImplementedError: as `prepare_draft`.
    """
    prepared = prepare_draft(draft, batch, pool, allocate_draft(draft, pool, batch.batch_size))
    prepared.write()
    if draft.plan is not DraftPlan.COMMON_TEMPLATE:
        return prepared.steps
    return tuple(_with_clones(step) for step in prepared.steps)


def check_pool(draft: MultiStepDraft, pool: KVPool) -> None:
    """Raise ValueError for a pool that the backend does not have."""
    if draft.attention.is_mla:
        check_mla_page_size(pool.page_size)
    if pool.full_to_swa is not None:
        raise ValueError(
            "the pool has sliding-window pages, but a draft model has a plain pool of its own (SGLang 0.5.23): make one "
            "without swa_num_pages"
        )


def _check_batch(batch: ForwardBatch, pool: KVPool, buffers: DraftBuffers) -> None:
    if batch.forward_mode.query_rows is not QueryRows.ONE:
        raise ValueError(f"{batch.forward_mode!r} is no draft decode: pass a DECODE batch")
    if batch.seq_lens.device != pool.device:
        raise ValueError(f"the batch is on {batch.seq_lens.device} but the pool on {pool.device}: use one device")
    if batch.batch_size > (largest := buffers.cache_seqlens[0].shape[0]):
        raise ValueError(f"the batch has {batch.batch_size} requests, the buffers hold {largest}: allocate larger ones")


def _table_width(draft: MultiStepDraft, pool: KVPool) -> int:
    if draft.attention.is_mla:
        return mla_block_table_width(pool.max_context_len, pool.page_size)
    return pool.block_table_width


def _pass_buffers(draft: MultiStepDraft, batch: ForwardBatch, buffers: DraftBuffers, step: int) -> PassBuffers:
    bs = batch.batch_size
    return PassBuffers(
        cache_seqlens=buffers.cache_seqlens[step][:bs],
        cu_seqlens_k=None if buffers.cu_seqlens_k is None else buffers.cu_seqlens_k[step][: bs + 1],
        cu_seqlens_q=None if buffers.cu_seqlens_q is None else buffers.cu_seqlens_q[: bs + 1],
        page_table=buffers.tables[step][:bs],
        seq_len_offset=draft.attention.seq_len_offset(step),
    )


def _lists_launch(
    draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, buffers: DraftBuffers
) -> Callable[[], None]:
    assert buffers.kv_indices is not None
    assert buffers.kv_indptr is not None
    return partial(
        generate_draft_decode_kv_indices,
        batch.req_pool_indices,
        pool.req_to_token,
        batch.seq_lens,
        buffers.kv_indices,
        buffers.kv_indptr,
        batch.seq_lens,  # the positions of a chain: each request's next one is its length
        topk=draft.topk,
        page_size=pool.page_size,
        schedule=draft.schedule,
    )


def _step(
    draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, buffers: DraftBuffers, written: PassBuffers, step: int
) -> DraftStep:
    assert written.page_table is not None
    metadata: TRTLLMMHAMetadata | TRTLLMMLADecodeMetadata
    if draft.attention.is_mla:
        metadata = TRTLLMMLADecodeMetadata(written.page_table, written.cache_seqlens, pool.max_context_len)
    else:
        assert written.cu_seqlens_q is not None
        assert written.cu_seqlens_k is not None
        metadata = TRTLLMMHAMetadata(
            written.cache_seqlens, 1, written.cu_seqlens_q, written.cu_seqlens_k, written.page_table
        )
    if buffers.kv_indptr is None or buffers.kv_indices is None:
        return DraftStep(metadata)
    branches = batch.batch_size * draft.topk
    indptr, indices = buffers.kv_indptr[step, : branches + 1], buffers.kv_indices[step]
    if batch.seq_lens_cpu is not None:
        indices = indices[: draft.topk * sum(batch.seq_lens_cpu) + branches * (step + 1)]
    return DraftStep(metadata, indptr, indices)


def _with_clones(step: DraftStep) -> DraftStep:
    assert step.kv_indptr is not None
    assert step.kv_indices is not None
    return DraftStep(step.metadata, step.kv_indptr.clone(), step.kv_indices.clone())


def _run_all(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()
