"""Batches are padded to the size of a graph, whose static inputs refuse a batch of rows that they cannot know."""

import pytest
import torch

from lab.metadata.engine.cuda_graph import size_for
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.lengths import pad_requests

WIDTH = 2
SIZE = 4


def accepted(*widths: int, on_device: bool = True, on_host: bool = True) -> ForwardBatch:
    """A first draft extend of so many accepted tokens each."""
    count, rows = len(widths), sum(widths)
    return ForwardBatch(
        forward_mode=ForwardMode.DRAFT_EXTEND,
        req_pool_indices=torch.arange(1, count + 1),
        seq_lens=torch.full((count,), 20),
        out_cache_loc=torch.arange(100, 100 + rows),
        num_tokens=rows,
        extend_seq_lens=torch.tensor(widths, dtype=torch.int32) if on_device else None,
        extend_seq_lens_cpu=list(widths) if on_host else None,
    )


@pytest.fixture
def inputs() -> StaticInputs:
    return StaticInputs(GraphMode(ForwardMode.DRAFT_EXTEND, WIDTH), SIZE, torch.device("cpu"))


def test_the_smallest_size_that_fits_is_replayed() -> None:
    assert [size_for(batch_size, [4, 1, 8]) for batch_size in (0, 1, 2, 4, 5, 8)] == [1, 1, 4, 4, 8, 8]
    with pytest.raises(ValueError, match=r"9 requests exceed every captured size \[1, 4, 8\]"):
        size_for(9, [4, 1, 8])


def test_a_batch_is_padded_to_its_own_size_or_more() -> None:
    slots = list(range(100, 106))
    verify = ForwardBatch(
        ForwardMode.TARGET_VERIFY, torch.tensor([1, 2]), torch.tensor([20, 20]), torch.tensor(slots), num_tokens=6
    )
    same, more = pad_requests(verify, 2), pad_requests(verify, 3)
    assert (same.batch_size, same.num_tokens, same.out_cache_loc.tolist()) == (2, 6, slots)
    assert (more.batch_size, more.num_tokens, more.out_cache_loc.tolist()) == (3, 9, [*slots, 0, 0, 0])
    assert (more.req_pool_indices.tolist(), more.seq_lens.tolist()) == ([1, 2, 0], [20, 20, 1])
    for unpadded, size in ((verify, 1), (accepted(2, 1), 3)):
        with pytest.raises(ValueError, match=f"of 2 requests is not padded to {size}"):
            pad_requests(unpadded, size)


def test_a_draft_extend_takes_the_place_of_a_larger_one(inputs: StaticInputs) -> None:
    inputs.load(accepted(2, 1, 2, 1), SIZE)
    inputs.load(accepted(1, 2), SIZE)
    assert inputs.extend_seq_lens.tolist() == [1, 2, WIDTH, WIDTH]
    assert inputs.seq_lens.tolist() == [20, 20, 1, 1]
    assert inputs.req_pool_indices.tolist() == [1, 2, 0, 0]
    assert inputs.out_cache_loc.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]


def test_a_whole_batch_of_fewer_accepted_tokens_leaves_no_slot_of_the_one_before(inputs: StaticInputs) -> None:
    inputs.load(accepted(2, 2, 2, 2), SIZE)
    inputs.load(accepted(1, 2, 1, 1), SIZE)
    assert inputs.extend_seq_lens.tolist() == [1, 2, 1, 1]
    assert inputs.out_cache_loc.tolist() == [100, 101, 102, 103, 104, 0, 0, 0]


@pytest.mark.parametrize("name", ["extend_seq_lens", "extend_seq_lens_cpu"])
def test_a_draft_extend_that_does_not_say_its_rows_is_refused(inputs: StaticInputs, name: str) -> None:
    """Without them on the device the rows of the batch before would stay; without them on the host any number would fit."""
    inputs.load(accepted(2, 1, 2, 1), SIZE)
    before = {name: value.clone() for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    batch = accepted(3, 3, on_device=name != "extend_seq_lens", on_host=name != "extend_seq_lens_cpu")
    with pytest.raises(ValueError, match=rf"{name} is None: .*needs the rows of each of the 2 requests"):
        inputs.load(batch, SIZE)
    assert all(torch.equal(getattr(inputs, name), value) for name, value in before.items())


def test_more_rows_than_a_request_has_in_the_graph_are_refused(inputs: StaticInputs) -> None:
    with pytest.raises(ValueError, match=r"extend_seq_lens_cpu=\[3, 1\] has more than the 2 rows of a request"):
        inputs.load(accepted(3, 1), SIZE)
