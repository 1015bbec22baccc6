"""A whole iteration's metadata in one launch: each pass equals that of the batch that it stands for."""

from dataclasses import replace

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, KVPool, SpecInfo
from lab.metadata.speculation.draft_steps import prepare_iteration
from lab.references.forward_metadata import forward_metadata
from tests.devices import DEVICES, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import Case, assert_live_cells_right, build

ROWS = 4
VERIFY = Case(ForwardMode.TARGET_VERIFY, (20, 33, 47, 96), new=ROWS, sliding_window=False)


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
    verify, pool = build(VERIFY, device)
    prepared = prepare_iteration(verify, pool, speculative_num_steps=num_steps, share_table=share_table)
    for _ in range(2):
        prepared.write()
        assert_iteration_right(verify, pool, prepared, num_steps)
        verify.seq_lens.sub_(5)
    tables = {prepared.target_verify.page_table.data_ptr(), prepared.draft_extend.page_table.data_ptr()}
    assert len(tables) == (1 if share_table else 2)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_in_a_graph_without_a_synchronisation(device: str) -> None:
    verify, pool = build(VERIFY, device)
    with synchronisation_is_an_error():
        prepared = prepare_iteration(verify, pool, speculative_num_steps=3)
        prepared.write()
    graph = graph_of(prepared.write)
    verify.seq_lens.sub_(3)
    graph.replay()
    assert_iteration_right(verify, pool, prepared, 3)


def test_what_is_no_iteration_is_refused() -> None:
    verify, pool = build(VERIFY)
    with pytest.raises(ValueError, match="prepared from its TARGET_VERIFY batch"):
        prepare_iteration(passes_of(verify, 2)[0], pool, speculative_num_steps=3)
    with pytest.raises(ValueError, match="sliding-window"):
        prepare_iteration(*build(replace(VERIFY, sliding_window=True)), speculative_num_steps=3)
    with pytest.raises(ValueError, match="the batch is empty"):
        prepare_iteration(*build(replace(VERIFY, total_lens=())), speculative_num_steps=3)
