"""Metadata by the fused kernel, for every mode, against the loops of lab.references."""

import pytest
import torch
from hypothesis import given, settings

from lab.metadata import ForwardBatch, KVPool, TRTLLMMHAMetadata
from lab.metadata.mha.buffers import allocate_mha_metadata, prepare_mha_metadata
from lab.references.forward_metadata import forward_metadata
from tests.devices import DEVICES, IN_INTERPRETER, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import (
    PAGE_SIZES,
    Case,
    all_modes,
    assert_live_cells_right,
    build,
    drawn_cases,
    label,
)

POISON = -77


def poison(metadata: TRTLLMMHAMetadata) -> None:
    for tensor in vars(metadata).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(POISON)


def assert_right(batch: ForwardBatch, pool: KVPool) -> None:
    """Written over poison, which the dead cells keep; again after the lengths changed in place."""
    metadata = allocate_mha_metadata(batch, pool)
    has_no_prefix = batch.forward_mode.is_prefill and not any(batch.extend_prefix_lens_cpu or ())
    assert (metadata.cu_seqlens_q is metadata.cu_seqlens_k) is has_no_prefix
    write = prepare_mha_metadata(batch, pool, metadata)
    for _ in range(2):
        poison(metadata)
        write()
        assert_live_cells_right(metadata, forward_metadata(batch, pool), POISON)
        if metadata.cu_seqlens_q is not metadata.cu_seqlens_k:  # else the new tokens are all the keys
            batch.seq_lens.sub_(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("index", range(len(all_modes())))
def test_every_mode(index: int, page_size: int, device: str) -> None:
    assert_right(*build(all_modes(page_size)[index], device))


@IN_INTERPRETER
@given(drawn_cases(virtual=None))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_drawn_cases(case: Case) -> None:
    assert_right(*build(case))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("case", all_modes(), ids=label)
def test_in_a_graph_without_a_synchronisation(case: Case, device: str) -> None:
    batch, pool = build(case, device)
    with synchronisation_is_an_error():
        metadata = allocate_mha_metadata(batch, pool)
        write = prepare_mha_metadata(batch, pool, metadata)
        write()
    if batch.batch_size == 0:
        return  # nothing is launched
    graph = graph_of(write)
    poison(metadata)
    graph.replay()
    assert_live_cells_right(metadata, forward_metadata(batch, pool), POISON)
