"""The passes of a frozen-KV draft, and of a whole iteration in one launch, equal the batches that they stand for."""

from dataclasses import replace

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, KVPool, SpecInfo, build_mha_metadata
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.metadata import build_mla_decode_metadata
from lab.metadata.speculation.draft_steps import (
    DraftPlan,
    MultiStepDraft,
    build_draft_steps,
    frozen_kv_batch,
    prepare_iteration,
)
from lab.references.forward_metadata import forward_metadata
from tests.devices import DEVICES, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import Case, assert_live_cells_right, build

LENS = (15, 16, 17, 64)  # of which one more token would need another page: 16 and 64
CASE = Case(ForwardMode.DECODE, LENS, host_seq_lens=True)
FROZEN = DraftAttention.MHA_FROZEN_KV


def drafted(topk: int, device: str = "cpu", case: Case = CASE) -> tuple[ForwardBatch, KVPool]:
    batch, pool = build(case, device)
    return frozen_kv_batch(batch, topk), pool


@pytest.mark.parametrize("topk", [1, 3])
def test_branches_are_rows_next_to_each_other_with_plain_lengths(topk: int) -> None:
    target, pool = build(CASE)
    batch = frozen_kv_batch(target, topk)
    assert batch.seq_lens.tolist() == [length for length in LENS for _ in range(topk)] == batch.seq_lens_cpu
    assert batch.req_pool_indices.tolist() == [row for row in target.req_pool_indices.tolist() for _ in range(topk)]
    assert (batch.num_tokens, batch.batch_size, len(batch.out_cache_loc)) == (4 * topk, 4 * topk, 0)
    metadata = build_mha_metadata(batch, pool)
    assert metadata.cache_seqlens_int32.tolist() == batch.seq_lens.tolist()
    assert_live_cells_right(metadata, forward_metadata(batch, pool))
    assert metadata.swa_page_table is not None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sliding_window", [False, True])
@pytest.mark.parametrize("plan", [DraftPlan.PER_STEP, DraftPlan.ONE_LAUNCH])
@pytest.mark.parametrize("num_steps", [1, 4])
def test_all_passes_of_a_draft_share_the_metadata_of_one(
    num_steps: int, plan: DraftPlan, sliding_window: bool, device: str
) -> None:
    batch, pool = drafted(2, device, replace(CASE, sliding_window=sliding_window))
    draft = MultiStepDraft(FROZEN, num_steps, plan, topk=2)
    steps = build_draft_steps(draft, replace(batch, seq_lens_cpu=None), pool)
    assert len(steps) == num_steps
    expected = forward_metadata(batch, pool)
    for step in steps:
        assert_live_cells_right(step.metadata, expected)
        assert step.kv_indices is None
        assert step.metadata.block_tables.data_ptr() == steps[0].metadata.block_tables.data_ptr()


def test_bad_input_is_refused() -> None:
    batch, _ = build(CASE)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        frozen_kv_batch(batch, 0)
    with pytest.raises(ValueError, match="DECODE with a SpecInfo: a frozen-KV draft is made from a plain DECODE"):
        frozen_kv_batch(frozen_kv_batch(batch))
    with pytest.raises(ValueError, match="out_cache_loc names 4 slots, but a frozen-KV draft writes no K and V"):
        replace(batch, spec_info=SpecInfo(speculative_step_id=FROZEN_KV_STEP))
    plain = build(replace(CASE, sliding_window=False, page_size=32))[1]
    with pytest.raises(ValueError, match="a frozen-KV draft runs on MHA"):
        build_mla_decode_metadata(frozen_kv_batch(batch), plain)


def test_bad_drafts_are_refused() -> None:
    batch, pool = drafted(2)
    for attention, topk in ((DraftAttention.MHA, 2), (DraftAttention.MHA, 0), (FROZEN, 0)):
        with pytest.raises(ValueError, match=rf"topk={topk}: .* draft one chain .* only a frozen-KV draft has more"):
            MultiStepDraft(attention, 3, topk=topk)
    with pytest.raises(ValueError, match="speculative_num_steps=0 must be 1 to 8: each is a pass of the draft"):
        MultiStepDraft(FROZEN, 0)
    with pytest.raises(ValueError, match="a frozen-KV draft has no common template"):
        MultiStepDraft(FROZEN, 3, DraftPlan.COMMON_TEMPLATE)
    with pytest.raises(ValueError, match="a batch of 8 rows, of a frozen-KV draft"):
        build_draft_steps(MultiStepDraft(FROZEN, 3, topk=3), batch, pool)
    with pytest.raises(ValueError, match="a batch of 4 rows, not of a frozen-KV draft"):
        build_draft_steps(MultiStepDraft(FROZEN, 3), build(CASE)[0], pool)
    with pytest.raises(ValueError, match="or a frozen-KV draft, which reads the target's pool"):
        build_draft_steps(MultiStepDraft(DraftAttention.MHA, 3), build(CASE)[0], pool)


ROWS = 4
VERIFY_CASE = Case(ForwardMode.TARGET_VERIFY, (20, 33, 47, 96), new=ROWS, sliding_window=False)


def passes_of(verify: ForwardBatch, num_steps: int) -> list[ForwardBatch]:
    """The batches that an engine would build, pass by pass: the draft steps', verify's, the draft extend's."""
    bs = verify.batch_size
    locations = verify.out_cache_loc[:bs]
    steps = [
        replace(
            verify,
            forward_mode=ForwardMode.DECODE,
            out_cache_loc=locations,
            num_tokens=bs,
            spec_info=SpecInfo(speculative_step_id=step),
        )
        for step in range(num_steps - 1)
    ]
    extend = replace(
        verify,
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        seq_lens=verify.seq_lens + ROWS,
        extend_seq_lens=torch.full_like(verify.seq_lens, ROWS),
        extend_seq_lens_cpu=[ROWS] * bs,
        spec_info=SpecInfo(num_tokens_per_req=ROWS),
    )
    return [*steps, verify, extend]


def assert_iteration_right(verify: ForwardBatch, pool: KVPool, prepared: object, num_steps: int) -> None:
    written = [*prepared.draft_steps, prepared.target_verify, prepared.draft_extend]  # type: ignore[attr-defined]
    for metadata, batch in zip(written, passes_of(verify, num_steps), strict=True):
        assert_live_cells_right(metadata, forward_metadata(batch, pool))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("share_table", [False, True])
def test_every_pass(share_table: bool, num_steps: int, device: str) -> None:
    verify, pool = build(VERIFY_CASE, device)
    prepared = prepare_iteration(verify, pool, speculative_num_steps=num_steps, share_table=share_table)
    for _ in range(2):
        prepared.write()
        assert_iteration_right(verify, pool, prepared, num_steps)
        verify.seq_lens.sub_(5)
    tables = {prepared.target_verify.page_table.data_ptr(), prepared.draft_extend.page_table.data_ptr()}
    assert len(tables) == (1 if share_table else 2)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_in_a_graph_without_a_synchronisation(device: str) -> None:
    verify, pool = build(VERIFY_CASE, device)
    with synchronisation_is_an_error():
        prepared = prepare_iteration(verify, pool, speculative_num_steps=3)
        prepared.write()
    graph = graph_of(prepared.write)
    verify.seq_lens.sub_(3)
    graph.replay()
    assert_iteration_right(verify, pool, prepared, 3)


def test_what_is_no_iteration_is_refused() -> None:
    verify, pool = build(VERIFY_CASE)
    with pytest.raises(ValueError, match="prepared from its TARGET_VERIFY batch"):
        prepare_iteration(passes_of(verify, 2)[0], pool, speculative_num_steps=3)
    with pytest.raises(ValueError, match="sliding-window"):
        prepare_iteration(*build(replace(VERIFY_CASE, sliding_window=True)), speculative_num_steps=3)
    with pytest.raises(ValueError, match="the batch is empty"):
        prepare_iteration(*build(replace(VERIFY_CASE, total_lens=())), speculative_num_steps=3)
