"""The metadata of every step of a multi-step draft on TRT-LLM MHA or MLA, and of a whole speculative iteration in one launch.

A draft of ``speculative_num_steps`` steps begins with the draft extend and then runs ``speculative_num_steps - 1`` decode
passes of the draft model, each with metadata of its own. SGLang's common template first makes lists of K/V slots
(``kv_indptr``, ``kv_indices``) for all passes. TRT-LLM's backends ignore these ragged lists, and change 26241 skips them for
MLA.

A frozen-KV draft (SGLang 0.5.23, `FROZEN_KV_MTP`, for Gemma 4's assistant models) reads the target's K/V and writes none. It
has no draft extend. All its ``speculative_num_steps`` passes attend to the ``seq_lens`` tokens that the target has committed,
also in sliding-window pages, and so share one metadata.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lab.calls.arguments import check_int
from lab.kernels.serving.draft_decode_kv_indices import Schedule, generate_draft_decode_kv_indices
from lab.metadata.engine.backend import PassMetadata, in_turn, prepare_passes
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, check_attends, uniform_boundaries
from lab.metadata.mha.metadata import TRTLLMMHAMetadata
from lab.metadata.mla.metadata import DEAD_PAGE, TRTLLMMLADecodeMetadata, check_mla_page_size, mla_block_table_width
from lab.named_enum import NamedEnum

MOST_STEPS = 8  # largest ``speculative_num_steps``


class DraftPlan(NamedEnum):
    """Which kernel launches write the metadata (lengths, page tables) of all steps of a draft."""

    COMMON_TEMPLATE = "common template"  # a launch for the ragged lists, then one per step (before change 26241)
    PER_STEP = "per step"  # one launch per step (after change 26241)
    ONE_LAUNCH = "one launch"  # one launch for all steps, which share one page table


@dataclass(frozen=True, eq=False)
class DraftStep:
    """The metadata of one draft step, and with `DraftPlan.COMMON_TEMPLATE` a list of the slots of all requests' K/V."""

    metadata: PassMetadata
    kv_indptr: Tensor | None = None  #: ``[batch_size + 1]`` int32, the boundaries of the requests in ``kv_indices``
    kv_indices: Tensor | None = None  #: ``[tokens]`` int32, the slots of all requests' keys


@dataclass(frozen=True)
class MultiStepDraft:
    """The settings of a multi-step draft: attention backend, number of steps, and which launches write the steps' metadata."""

    attention: DraftAttention
    #: 2 to 8, one more than the draft's decode passes; in a frozen-KV draft 1 to 8, the number of passes
    speculative_num_steps: int
    plan: DraftPlan = DraftPlan.PER_STEP  #: in a frozen-KV draft PER_STEP or ONE_LAUNCH, which are the same
    #: branches per request: 1 (a chain), except in a frozen-KV draft, in which each branch is a row of the batch
    topk: int = 1
    schedule: Schedule = Schedule.SERIAL  #: schedule of the kernel that makes the ragged lists of the common template

    def __post_init__(self) -> None:
        least = 1 if self.is_frozen_kv else 2
        if self.speculative_num_steps not in range(least, MOST_STEPS + 1):
            raise ValueError(
                f"speculative_num_steps={self.speculative_num_steps} must be {least} to {MOST_STEPS}: "
                + ("each is a pass of the draft" if self.is_frozen_kv else "one step fewer than that is a draft decode")
            )
        if self.topk < 1 or (self.topk > 1 and not self.is_frozen_kv):
            raise ValueError(
                f"topk={self.topk}: the TRT-LLM backends draft one chain per request, so topk must be 1; only a frozen-KV "
                "draft has more"
            )
        if self.is_frozen_kv and self.plan is DraftPlan.COMMON_TEMPLATE:
            raise ValueError("a frozen-KV draft has no common template: use DraftPlan.PER_STEP or ONE_LAUNCH")

    @property
    def is_frozen_kv(self) -> bool:
        return self.attention is DraftAttention.MHA_FROZEN_KV

    @property
    def num_decode_steps(self) -> int:
        return self.speculative_num_steps - (0 if self.is_frozen_kv else 1)


@dataclass(frozen=True, eq=False)
class DraftBuffers:
    """Buffers for the metadata of all draft steps. Lists of K/V slots, int32, exist only with `DraftPlan.COMMON_TEMPLATE`."""

    #: metadata of ``max_batch_size * topk`` rows for each step. With ONE_LAUNCH all steps have the same table. In a frozen-KV
    #: draft all steps have the same metadata
    steps: tuple[PassMetadata, ...]
    kv_indptr: Tensor | None  #: ``[speculative_num_steps, max_batch_size + 1]``
    kv_indices: Tensor | None  #: ``[speculative_num_steps, max_batch_size * max_context_len]``


@dataclass(frozen=True, eq=False)
class PreparedDraft:
    """The metadata of every draft step, and the function `write` that fills it from the batch's tensors."""

    steps: tuple[DraftStep, ...]
    write: Callable[[], None]


def allocate_draft(draft: MultiStepDraft, pool: KVPool, max_batch_size: int) -> DraftBuffers:
    """Allocate the buffers of a draft for batches of up to `max_batch_size` requests, as an engine does for its CUDA graphs.

    Tables start as 0 (MHA) or -1 (MLA), and ``kv_indptr`` as 0. Cells after a request's pages keep the values of earlier
    batches.
    """
    check_pool(draft, pool)
    if max_batch_size < 0:
        raise ValueError(f"max_batch_size={max_batch_size} must be 0 or more")
    rows = max_batch_size * draft.topk
    boundaries = uniform_boundaries(rows, 1, pool.device)  # of all steps of MHA

    def new_step(table: Tensor | None = None) -> PassMetadata:
        if not draft.attention.is_mla:
            return TRTLLMMHAMetadata.allocate(pool, rows, 1, rows, page_table=table, cu_seqlens_q=boundaries)
        if table is None:
            shape = (rows, mla_block_table_width(pool.max_context_len, pool.page_size))
            table = torch.full(shape, DEAD_PAGE, dtype=torch.int32, device=pool.device)
        return TRTLLMMLADecodeMetadata(table, table.new_zeros(rows), pool.max_context_len)

    first = new_step()
    if draft.is_frozen_kv:
        return DraftBuffers((first,) * draft.num_decode_steps, None, None)
    shared = first.block_tables if draft.plan is DraftPlan.ONE_LAUNCH else None
    is_template = draft.plan is DraftPlan.COMMON_TEMPLATE

    def lists(width: int) -> Tensor | None:
        shape = (draft.speculative_num_steps, width)
        return torch.zeros(shape, dtype=torch.int32, device=pool.device) if is_template else None

    return DraftBuffers(
        steps=(first, *(new_step(shared) for _ in range(1, draft.num_decode_steps))),
        kv_indptr=lists(rows + 1),
        kv_indices=lists(rows * pool.max_context_len),
    )


def prepare_draft(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, buffers: DraftBuffers) -> PreparedDraft:
    """Check the batch. Return the metadata buffers of all draft steps and a function `write` that fills them. A CUDA graph can
    capture `write`.

    For a frozen-KV draft, which writes no K/V, `batch` must be the result of `frozen_kv_batch`. Without ``seq_lens_cpu`` the
    host does not know how many ``kv_indices`` a step has: the step gets its whole row of ``buffers.kv_indices``.
    """
    check_pool(draft, pool)
    if batch.forward_mode.query_rows is not QueryRows.ONE:
        raise ValueError(f"{batch.forward_mode!r} is no draft decode: pass a DECODE batch")
    if batch.writes_no_kv != draft.is_frozen_kv or batch.batch_size % draft.topk:
        raise ValueError(
            f"{draft.attention!r} with topk={draft.topk} and a batch of {batch.batch_size} rows, "
            f"{'of' if batch.writes_no_kv else 'not of'} a frozen-KV draft: exactly such a draft has a batch of "
            "`frozen_kv_batch`, with topk rows for each request"
        )
    check_attends(batch, pool)
    if batch.batch_size > (largest := buffers.steps[0].block_tables.shape[0]):
        raise ValueError(f"the batch has {batch.batch_size} requests, the buffers hold {largest}: allocate larger ones")
    steps = tuple(_step(batch, buffers, step) for step in range(draft.num_decode_steps))
    distinct = steps[:1] if draft.is_frozen_kv else steps
    passes = [
        each.metadata.pass_buffers(draft.attention.seq_len_offset(step), out_cache_loc=batch.out_cache_loc)
        for step, each in enumerate(distinct)
    ]
    groups = [passes] if draft.plan is DraftPlan.ONE_LAUNCH else [[each] for each in passes]
    launches = [prepare_passes(group, batch, pool) for group in groups]
    if buffers.kv_indices is not None and buffers.kv_indptr is not None:
        ragged_lists = partial(
            generate_draft_decode_kv_indices,
            batch.req_pool_indices,
            pool.req_to_token,
            batch.seq_lens,
            buffers.kv_indices,
            buffers.kv_indptr,
            batch.seq_lens,  # the position of a chain's next token is the request's length
            topk=draft.topk,
            page_size=pool.page_size,
            schedule=draft.schedule,
            v2p=pool.v2p,
        )
        launches.insert(0, ragged_lists)
    return PreparedDraft(steps, in_turn(launches, None))


def build_draft_steps(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool) -> tuple[DraftStep, ...]:
    """Build the metadata of every step of a draft in new tensors, as an eager pass does. ValueError: a wrong batch or pool."""
    prepared = prepare_draft(draft, batch, pool, allocate_draft(draft, pool, batch.batch_size))
    prepared.write()
    return tuple(DraftStep(step.metadata, _clone(step.kv_indptr), _clone(step.kv_indices)) for step in prepared.steps)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def check_pool(draft: MultiStepDraft, pool: KVPool) -> None:
    if draft.attention.is_mla:
        check_mla_page_size(pool.page_size)
    if pool.full_to_swa is not None and not draft.is_frozen_kv:
        raise ValueError(
            "the pool has sliding-window pages, but a draft model has a plain pool of its own (SGLang 0.5.23): make one "
            "without swa_num_pages, or a frozen-KV draft, which reads the target's pool"
        )


def _step(batch: ForwardBatch, buffers: DraftBuffers, step: int) -> DraftStep:
    metadata = buffers.steps[step].leading(batch.batch_size)
    if buffers.kv_indptr is None or buffers.kv_indices is None:
        return DraftStep(metadata)
    # A draft with ragged lists is a chain: only a frozen-KV draft has several branches, and it has no ragged lists.
    indptr, indices = buffers.kv_indptr[step, : batch.batch_size + 1], buffers.kv_indices[step]
    if batch.seq_lens_cpu is not None:
        indices = indices[: sum(batch.seq_lens_cpu) + batch.batch_size * (step + 1)]
    return DraftStep(metadata, indptr, indices)


def frozen_kv_batch(batch: ForwardBatch, topk: int = 1) -> ForwardBatch:
    """Return the batch of a frozen-KV draft, which reads the target model's K/V and writes none, with `topk` branches per
    request (SGLang's `expand_for_topk_draft` in `frozen_kv_mtp_utils.py`). The host does not read the device.

    Branch j of request i is row ``i * topk + j`` of new tensors, with the pages and length of the request. ``out_cache_loc`` is
    empty. Raises TypeError or ValueError unless `topk` is an int of 1 or more and the batch a plain decode.
    """
    check_int("topk", topk, 1, "it is the number of branches per request")
    if batch.forward_mode.query_rows is not QueryRows.ONE or batch.spec_info is not None:
        raise ValueError(
            f"{batch.forward_mode!r} {'with' if batch.spec_info else 'without'} a SpecInfo: a frozen-KV draft is made from a "
            "plain DECODE batch of the target's requests"
        )
    lens = batch.seq_lens_cpu
    return replace(
        batch,
        req_pool_indices=batch.req_pool_indices.repeat_interleave(topk),
        seq_lens=batch.seq_lens.repeat_interleave(topk),
        seq_lens_cpu=None if lens is None else [length for length in lens for _ in range(topk)],
        out_cache_loc=batch.out_cache_loc[:0].clone(),
        num_tokens=batch.num_tokens * topk,
        spec_info=SpecInfo(speculative_step_id=FROZEN_KV_STEP),
    )


@dataclass(frozen=True, eq=False)
class PreparedIteration:
    """The metadata of all forward passes of one speculative iteration, and the function `write` that fills it in one launch."""

    # Below, seq_lens are the TARGET_VERIFY batch's, and d is its number of draft tokens per request.
    draft_steps: tuple[TRTLLMMHAMetadata, ...]  #: metadata of each decode pass, with lengths ``seq_lens + step + 1``
    target_verify: TRTLLMMHAMetadata  #: with lengths ``seq_lens + d``
    draft_extend: TRTLLMMHAMetadata  #: metadata of DRAFT_EXTEND_V2, with lengths ``seq_lens + d``
    write: Callable[[], None]


def prepare_iteration(
    verify: ForwardBatch, pool: KVPool, *, speculative_num_steps: int, share_table: bool = True
) -> PreparedIteration:
    """Allocate the metadata of all forward passes of a speculative iteration, and prepare the launch that fills it. The
    metadata does not depend on which tokens are drafted or accepted.

    `verify` is a TARGET_VERIFY batch, whose ``seq_lens`` counts the tokens up to the last accepted token. With `share_table`
    all passes use one page table, with the pages of the pass with the largest lengths.
    """
    check_attends(verify, pool)
    if verify.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
        raise ValueError(f"{verify.forward_mode!r}: an iteration is prepared from its TARGET_VERIFY batch")
    if pool.full_to_swa is not None:
        raise ValueError("the pool has sliding-window pages, which a draft model's passes do not use: make one without")
    if verify.batch_size == 0:
        raise ValueError("the batch is empty: an iteration needs a request")
    bs, rows = verify.batch_size, verify.num_tokens // verify.batch_size
    shared = torch.empty(bs, pool.block_table_width, dtype=torch.int32, device=pool.device) if share_table else None
    # The number that each pass adds to seq_lens, and its query rows per request.
    offsets_and_rows = [*((step + 1, 1) for step in range(speculative_num_steps - 1)), (rows, rows), (rows, rows)]
    passes = [
        TRTLLMMHAMetadata.allocate(pool, bs, width, bs * width, new=torch.empty, page_table=shared)
        for _, width in offsets_and_rows
    ]
    written = [each.pass_buffers(offset, width) for each, (offset, width) in zip(passes, offsets_and_rows, strict=True)]
    *draft_steps, target_verify, draft_extend = passes
    return PreparedIteration(tuple(draft_steps), target_verify, draft_extend, prepare_passes(written, verify, pool))
