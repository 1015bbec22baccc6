"""Every draft step's metadata by every plan, and the dead lists of the common template, against the loops of lab.references."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import references
from lab.kernels.serving.draft_decode_kv_indices import Schedule
from lab.metadata import ForwardBatch, ForwardMode, KVPool, SpecInfo, TRTLLMMHAMetadata
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.metadata import mla_block_table_width
from lab.metadata.speculation.draft_steps import (
    DraftBuffers,
    DraftPlan,
    DraftStep,
    MultiStepDraft,
    allocate_draft,
    build_draft_steps,
    prepare_draft,
)
from lab.references.forward_metadata import ForwardMetadata, forward_metadata
from tests.devices import DEVICES, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import Case, assert_live_cells_right, assert_live_pages_right, build

POISON = -77
MHA, MLA, MLA_WITH_OFFSET = DraftAttention.MHA, DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET


def case_of(*lens: int, page_size: int = 32, **fields: Any) -> Case:
    longest = max(lens, default=0) + 9
    return Case(ForwardMode.DECODE, lens, page_size=page_size, max_context_len=longest, sliding_window=False, **fields)


CASE = case_of(0, 31, 32, 75, 1)


def expected_pass(batch: ForwardBatch, pool: KVPool, step: int | None) -> ForwardMetadata:
    """Of a draft step, or of a plain decode, which is what MLA's steps are."""
    spec_info = None if step is None else SpecInfo(speculative_step_id=step)
    return forward_metadata(replace(batch, spec_info=spec_info), pool)


def assert_steps_right(
    draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, steps: tuple[DraftStep, ...], dead: int | None
) -> None:
    assert len(steps) == draft.speculative_num_steps - 1
    for number, step in enumerate(steps):
        expected = expected_pass(batch, pool, None if draft.attention is MLA else number)
        # A shared table has the pages of the last step.
        shares = draft.plan is DraftPlan.ONE_LAUNCH and draft.attention is not MLA
        tail = None if shares else dead
        if isinstance(step.metadata, TRTLLMMHAMetadata):
            assert_live_cells_right(step.metadata, expected, tail)
        else:
            assert step.metadata.seq_lens_k.tolist() == expected.cache_seqlens
            assert step.metadata.max_seq_len_k == pool.max_context_len
            assert_live_pages_right(step.metadata.block_kv_indices, expected.page_table, tail)
    assert_lists_right(draft, batch, pool, steps)


def assert_lists_right(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool, steps: tuple[DraftStep, ...]) -> None:
    if draft.plan is not DraftPlan.COMMON_TEMPLATE:
        assert all(step.kv_indptr is step.kv_indices is None for step in steps)
        return
    lists, boundaries = references.generate_draft_decode_kv_indices(
        batch.req_pool_indices.cpu(),
        pool.req_to_token.cpu(),
        batch.seq_lens.cpu(),
        batch.seq_lens.cpu(),
        num_steps=draft.speculative_num_steps,
        topk=1,
        page_size=pool.page_size,
    )
    for step, slots, ends in zip(steps, lists, boundaries, strict=False):
        assert step.kv_indptr.tolist() == ends.tolist()
        assert step.kv_indices[: len(slots)].tolist() == slots.tolist()
        if batch.seq_lens_cpu is None:  # nobody on the host knows where the lists end
            assert len(step.kv_indices) % pool.max_context_len == 0
        else:
            assert len(step.kv_indices) == len(slots)


def every_draft(num_steps: int = 3) -> list[MultiStepDraft]:
    return [
        MultiStepDraft(attention, num_steps, plan)
        for attention, plan in itertools.product((MHA, MLA, MLA_WITH_OFFSET), DraftPlan)
    ]


def name_of(draft: MultiStepDraft) -> str:
    return f"{draft.attention.name}-{draft.plan.name}-{draft.speculative_num_steps}"


def tensors_of(buffers: DraftBuffers, name: str) -> list[Tensor]:
    """Each step's lengths, tables or sums of lengths, which MLA does not have."""
    mha = {"lengths": "cache_seqlens_int32", "tables": "page_table", "sums": "cu_seqlens_k"}
    mla = {"lengths": "seq_lens_k", "tables": "block_kv_indices"}
    names = [(step, mha if isinstance(step, TRTLLMMHAMetadata) else mla) for step in buffers.steps]
    return [getattr(step, known[name]) for step, known in names if name in known]


def poison(buffers: DraftBuffers) -> None:
    for name in ("lengths", "tables", "sums"):
        for tensor in tensors_of(buffers, name):
            tensor.fill_(POISON)
    if buffers.kv_indices is not None:
        buffers.kv_indices.fill_(POISON)


def assert_eager_right(draft: MultiStepDraft, batch: ForwardBatch, pool: KVPool) -> None:
    dead = -1 if draft.attention.is_mla else None
    steps = build_draft_steps(draft, batch, pool)
    assert_steps_right(draft, batch, pool, steps, dead)
    lists = [step.kv_indices for step in steps if step.kv_indices is not None]
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in lists), "one list keeps another's memory"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draft", every_draft(4), ids=name_of)
def test_eager_and_in_buffers_that_stay(draft: MultiStepDraft, device: str) -> None:
    """Larger than the batch: what is not its own stays poisoned. Written again, in place, when the lengths have changed."""
    batch, pool = build(CASE, device)
    for num_steps in (2, 8):
        assert_eager_right(replace(draft, speculative_num_steps=num_steps), batch, pool)
    buffers = allocate_draft(draft, pool, 8)
    poison(buffers)
    prepared = prepare_draft(draft, batch, pool, buffers)
    for _ in range(2):
        prepared.write()
        assert_steps_right(draft, batch, pool, prepared.steps, None)
        batch.seq_lens.add_(1)
    for tensor in tensors_of(buffers, "lengths") + tensors_of(buffers, "tables"):
        assert (tensor[5:] == POISON).all()
    for sums in tensors_of(buffers, "sums"):
        assert (sums[6:] == POISON).all()
    addresses = {
        step.metadata.page_table.data_ptr() for step in prepared.steps if isinstance(step.metadata, TRTLLMMHAMetadata)
    }
    if draft.attention is MHA:
        assert len(addresses) == (1 if draft.plan is DraftPlan.ONE_LAUNCH else 3)
        assert addresses == {table.data_ptr() for table in tensors_of(buffers, "tables")}
    if buffers.kv_indices is not None:
        # The last row is computed although no backend reads it; nothing after a row's lists is written.
        batch.seq_lens.sub_(1)
        for step, row in enumerate(buffers.kv_indices):
            assert int((row != POISON).sum()) == int(batch.seq_lens.sum()) + 5 * (step + 1)


@pytest.mark.parametrize("device", DEVICES)
@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=1000 if torch.cuda.is_available() else 20)
def test_drawn_cases(data: st.DataObject, device: str) -> None:
    """Eagerly, or into buffers full of poison, with room for `spare` more requests."""
    draw = data.draw
    lens = draw(st.lists(st.sampled_from([0, 1, 30, 31, 32, 33, 63, 64, 70, 131]), min_size=1, max_size=6))
    draft, num_steps = draw(st.sampled_from(every_draft())), draw(st.integers(2, 8))
    draft = replace(draft, speculative_num_steps=num_steps, schedule=draw(st.sampled_from(Schedule)))
    dtype, page_size = draw(st.sampled_from([torch.int32, torch.int64])), draw(st.sampled_from([32, 64]))
    flags = {name: draw(st.booleans()) for name in ("distinct_requests", "host_seq_lens")}
    batch, pool = build(case_of(*lens, page_size=page_size, index_dtype=dtype, **flags), device)
    spare = draw(st.none() | st.integers(0, 3))
    if spare is None:
        assert_eager_right(draft, batch, pool)
        return
    buffers = allocate_draft(draft, pool, len(lens) + spare)
    poison(buffers)
    prepared = prepare_draft(draft, batch, pool, buffers)
    prepared.write()
    assert_steps_right(draft, batch, pool, prepared.steps, POISON)
    assert all((table[len(lens) :] == POISON).all() for table in tensors_of(buffers, "tables"))


@pytest.mark.parametrize(("max_len", "page_size", "width"), [(1, 32, 128), (4096, 64, 64), (4097, 64, 128), (0, 32, 0)])
def test_mla_tables_are_whole_blocks_of_4096_tokens(max_len: int, page_size: int, width: int) -> None:
    assert mla_block_table_width(max_len, page_size) == width
    _, pool = build(replace(CASE, page_size=page_size))
    (table,) = tensors_of(allocate_draft(MultiStepDraft(MLA, 2), pool, 5), "tables")
    assert table.shape == (5, 4096 // page_size)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("draft", every_draft(4), ids=name_of)
def test_in_a_graph_without_a_synchronisation(draft: MultiStepDraft, device: str) -> None:
    batch, pool = build(CASE, device)
    buffers = allocate_draft(draft, pool, 8)
    with synchronisation_is_an_error():
        prepared = prepare_draft(draft, batch, pool, buffers)
        prepared.write()
    graph = graph_of(prepared.write)
    for change in (1, 3, -4):
        batch.seq_lens.add_(change).clamp_(min=0)
        poison(buffers)
        graph.replay()
        assert_steps_right(draft, batch, pool, prepared.steps, POISON)


def test_what_the_backends_do_not_have_is_refused() -> None:
    batch, pool = build(CASE)
    for steps in (1, 9):
        with pytest.raises(ValueError, match=f"speculative_num_steps={steps} must be 2 to 8"):
            MultiStepDraft(MHA, steps)
    draft = MultiStepDraft(MHA, 3)
    with pytest.raises(ValueError, match="page_size=16"):
        allocate_draft(MultiStepDraft(MLA, 3), build(replace(CASE, page_size=16))[1], 5)
    windowed = KVPool(num_requests=5, max_context_len=99, page_size=32, num_pages=40, swa_num_pages=40)
    with pytest.raises(ValueError, match="sliding-window pages"):
        allocate_draft(draft, windowed, 5)
    with pytest.raises(ValueError, match="max_batch_size=-1"):
        allocate_draft(draft, pool, -1)
    with pytest.raises(ValueError, match="the batch has 5 requests, the buffers hold 4"):
        prepare_draft(draft, batch, pool, allocate_draft(draft, pool, 4))
    verify = replace(batch, forward_mode=ForwardMode.TARGET_VERIFY, spec_info=SpecInfo(num_draft_tokens=1))
    with pytest.raises(ValueError, match="is no draft decode"):
        prepare_draft(draft, verify, pool, allocate_draft(draft, pool, 5))
