"""Make the metadata of a draft as timed work: ragged K/V lists, the metadata of every step, or the fused metadata of several
passes.

The bytes to move are counted in cells of 4 bytes. Each table entry is read once, and written as often as an output needs it.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.kernels.serving.draft_decode_kv_indices import Schedule, generate_draft_decode_kv_indices
from lab.metadata.engine.backend import PassMetadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, allocate_mha_metadata, prepare_mha_metadata
from lab.metadata.speculation.draft_steps import (
    DraftPlan,
    DraftStep,
    MultiStepDraft,
    allocate_draft,
    build_draft_steps,
    prepare_draft,
    prepare_iteration,
)
from lab.timing.gpu_time import GpuTime, measure
from lab.timing.host_time import METHOD, host_time
from lab.timing.method import Method
from lab.timing.work import Call, GpuWork
from studies.draft_scenarios import DraftCase, DraftScenario, build_verify, draft_decode

CELL_BYTES = 4  # int32
POISON = -7  # what outputs hold before a call: no slot, page, length or boundary is negative


def time_draft(scenario: DraftScenario, method: Method) -> tuple[GpuTime, dict[str, Any]]:
    """Time a draft scenario on the GPU and the host. Raises AssertionError if the metadata is wrong before or after."""
    work = draft_work(scenario, torch.device("cuda"))
    time = measure(work, method)
    host = host_time({"": work.call()})[""]
    return time, draft_facts(scenario, work) | host.facts() | {"host_method": METHOD}


def draft_facts(scenario: DraftScenario, work: GpuWork) -> dict[str, Any]:
    case = scenario.case
    return {
        "mode": scenario.kind,
        "kernel": " ".join((*scenario.choices, *(("eager",) if scenario.eager else ()))),
        "implementation": "lab.kernels",
        "requests": len(case.prefix_lens),
        "kv_tokens": sum(case.prefix_lens),
        "num_steps": case.num_steps,
        "page_size": case.page_size,
        "bytes_moved": work.bytes_moved,
        "operations": work.operations,
    }


def draft_work(scenario: DraftScenario, device: torch.device) -> GpuWork:
    case = scenario.case
    verify, pool = build_verify(case, device)
    if scenario.kind == "kv_indices":
        return kv_indices_work(case, verify, pool, Schedule(scenario.choices[0]))
    if scenario.kind == "forward_metadata":
        return forward_metadata_work(case, verify, pool, scenario.choices[0])
    attention, plan = (choice.upper() for choice in scenario.choices)
    draft = MultiStepDraft(DraftAttention[attention], case.num_steps, DraftPlan[plan])
    return draft_steps_work(draft, verify, pool, eager=scenario.eager)


def kv_indices_work(case: DraftCase, verify: ForwardBatch, pool: KVPool, schedule: Schedule) -> GpuWork:
    bs, tokens, steps = len(case.prefix_lens), sum(case.prefix_lens), case.num_steps
    arguments = {
        "req_pool_indices": verify.req_pool_indices,
        "req_to_token": pool.req_to_token,
        "paged_kernel_lens": verify.seq_lens,
        "kv_indices": torch.full((steps, tokens + bs * steps), POISON, dtype=torch.int32, device=pool.device),
        "kv_indptr": torch.zeros(steps, bs + 1, dtype=torch.int32, device=pool.device),
        "positions": verify.seq_lens.clone(),
    }
    function = partial(generate_draft_decode_kv_indices, topk=1, page_size=case.page_size, schedule=schedule)
    read = tokens + bs * steps
    written = sum(tokens + bs * (step + 1) for step in range(steps)) + steps * bs

    def check(given: Mapping[str, Any]) -> None:
        for step in range(steps):
            _check_lists(given["kv_indices"][step], given["kv_indptr"][step], verify, pool, step)
        _wipe_lists(given["kv_indices"], given["kv_indptr"])

    return GpuWork(partial(partial, function), arguments, CELL_BYTES * (read + written), 0, check)


def draft_steps_work(draft: MultiStepDraft, verify: ForwardBatch, pool: KVPool, *, eager: bool) -> GpuWork:
    batch = draft_decode(verify)
    offsets = [draft.attention.seq_len_offset(step) for step in range(draft.num_decode_steps)]
    tables = 1 if draft.plan is DraftPlan.ONE_LAUNCH else len(offsets)
    arguments: dict[str, Any] = {"batch": batch, "pool": pool, "written": []}
    if not eager:
        arguments["buffers"] = allocate_draft(draft, pool, batch.batch_size)

    def prepare(batch: ForwardBatch, pool: KVPool, written: list[DraftStep], buffers: Any = None) -> Call:
        def build() -> None:
            written[:] = build_draft_steps(draft, batch, pool)

        if eager:
            return build
        prepared = prepare_draft(draft, batch, pool, buffers)
        written[:] = prepared.steps
        return prepared.write

    def check(given: Mapping[str, Any]) -> None:
        for step, (each, offset) in enumerate(zip(given["written"], offsets, strict=True)):
            _check_metadata(each.metadata, given["batch"], given["pool"], offset)
            if draft.plan is DraftPlan.COMMON_TEMPLATE:
                _check_lists(each.kv_indices, each.kv_indptr, given["batch"], given["pool"], step)
                _wipe_lists(each.kv_indices, each.kv_indptr)
        for each in given["written"]:  # after all checks: steps may share a table
            _wipe(each.metadata)

    return GpuWork(prepare, arguments, _metadata_bytes(verify, pool, offsets, tables), 0, check)


def forward_metadata_work(case: DraftCase, verify: ForwardBatch, pool: KVPool, passes: str) -> GpuWork:
    """Return the launch of the fused kernel for one verify pass, or for all passes of an iteration, as timed work."""
    width = case.num_draft_tokens
    offsets = [width] if passes == "verify" else [*range(1, case.num_steps), width, width]
    tables = len(offsets) if passes == "iteration_own_tables" else 1

    def prepare(batch: ForwardBatch, pool: KVPool, written: list[TRTLLMMHAMetadata]) -> Call:
        if passes == "verify":
            written[:] = [allocate_mha_metadata(batch, pool)]
            return prepare_mha_metadata(batch, pool, written[0])
        prepared = prepare_iteration(batch, pool, speculative_num_steps=case.num_steps, share_table=tables == 1)
        written[:] = [*prepared.draft_steps, prepared.target_verify, prepared.draft_extend]
        return prepared.write

    def check(given: Mapping[str, Any]) -> None:
        for each, offset in zip(given["written"], offsets, strict=True):
            _check_metadata(each, given["batch"], given["pool"], offset)
        for each in given["written"]:
            _wipe(each)

    arguments: dict[str, Any] = {"batch": verify, "pool": pool, "written": []}
    return GpuWork(prepare, arguments, _metadata_bytes(verify, pool, offsets, tables), 0, check)


def _metadata_bytes(batch: ForwardBatch, pool: KVPool, offsets: Sequence[int], tables: int) -> int:
    """Count 4 bytes for each live page's slot, for its entry in each table, and for each length that is read or written."""
    longest = batch.seq_lens + max(offsets)
    pages = int(((longest + pool.page_size - 1) // pool.page_size).sum())
    lengths = batch.batch_size * (1 + 3 * len(offsets))
    return CELL_BYTES * (pages * (1 + tables) + lengths)


def _check_lists(kv_indices: Tensor, kv_indptr: Tensor, batch: ForwardBatch, pool: KVPool, step: int) -> None:
    lens = [length + step + 1 for length in batch.seq_lens.tolist()]
    rows = batch.req_pool_indices.tolist()
    expected = torch.cat([pool.req_to_token[row, :length] for row, length in zip(rows, lens, strict=True)])
    boundaries = torch.nn.functional.pad(torch.tensor(lens).cumsum(0), (1, 0)).to(kv_indptr)
    if not torch.equal(kv_indices[: len(expected)], expected) or not torch.equal(kv_indptr, boundaries):
        raise AssertionError(f"the ragged lists of draft step {step} are wrong: a time of this is worth nothing")


def _check_metadata(metadata: PassMetadata, batch: ForwardBatch, pool: KVPool, offset: int) -> None:
    lens = batch.seq_lens + offset
    first_slots = pool.req_to_token[batch.req_pool_indices, :: pool.page_size]
    columns = torch.arange(first_slots.shape[1], device=pool.device)
    is_live = columns < ((lens + pool.page_size - 1) // pool.page_size)[:, None]
    right = torch.equal(metadata.seq_lens, lens.int())
    right &= torch.equal(metadata.block_tables[:, : len(columns)][is_live], (first_slots // pool.page_size)[is_live])
    if isinstance(metadata, TRTLLMMHAMetadata):
        boundaries = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        right &= torch.equal(metadata.cu_seqlens_k, boundaries)
    if not right:
        raise AssertionError(f"metadata with length offset {offset} is wrong: a time of this is worth nothing")


def _wipe_lists(kv_indices: Tensor, kv_indptr: Tensor) -> None:
    """Overwrite ragged lists, [..., tokens], and their boundaries, [..., batch_size + 1]. Boundary 0 is always 0 and stays."""
    kv_indices.fill_(POISON)
    kv_indptr[..., 1:].fill_(POISON)


def _wipe(metadata: PassMetadata) -> None:
    metadata.seq_lens.fill_(POISON)
    metadata.block_tables.fill_(POISON)
    if isinstance(metadata, TRTLLMMHAMetadata):
        metadata.cu_seqlens_k.fill_(POISON)
