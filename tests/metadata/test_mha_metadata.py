"""MHA's metadata by the fused kernel, and in graphs; `test_either_backend.py` has every mode's eager pass."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from lab.metadata import ForwardBatch, ForwardMode, KVPool, TRTLLMMHAMetadata, build_mha_metadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MetadataBuilder, allocate_mha_metadata, prepare_mha_metadata
from lab.metadata.speculation.draft_steps import frozen_kv_batch
from lab.references.forward_metadata import encoder_only_verify, forward_metadata
from tests.devices import DEVICES, IN_INTERPRETER, ON_GPU, graph_of, synchronisation_is_an_error
from tests.metadata.batches import (
    DRAFT_EXTENDS,
    EXTENDS,
    PAGE_SIZES,
    Case,
    all_modes,
    assert_live_cells_right,
    assert_live_pages_right,
    build,
    drawn_cases,
    graph_case,
    label,
    tensors_of,
)
from tests.metadata.test_either_backend import assert_mha_right

POISON = -77
D, CONTEXT = 4, 100
GRAPH_MODES = [
    GraphMode(ForwardMode.DECODE),
    GraphMode.draft_decode(1),
    GraphMode.draft_decode(FROZEN_KV_STEP),
    GraphMode(ForwardMode.TARGET_VERIFY, D),
    GraphMode(ForwardMode.RAGGED_VERIFY, D),
    GraphMode(ForwardMode.DRAFT_EXTEND, D),
    GraphMode(ForwardMode.DRAFT_EXTEND_V2, D),
]


@pytest.mark.parametrize("mode", EXTENDS + DRAFT_EXTENDS)
def test_no_list_of_prefixes_is_no_prefix(mode: ForwardMode) -> None:
    batch, pool = build(Case(mode, (20, 3), (20, 3)))
    batch = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    assert_mha_right(build_mha_metadata(batch, pool), batch, pool)


# --- in one launch ----------------------------------------------------------------------------------------------------


def poison(metadata: TRTLLMMHAMetadata) -> None:
    for tensor in tensors_of(metadata).values():
        tensor.fill_(POISON)


def assert_fused_right(batch: ForwardBatch, pool: KVPool) -> None:
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
@pytest.mark.parametrize("index", range(len(all_modes())))
def test_the_fused_kernel_in_every_mode(index: int, device: str) -> None:
    """Each with one of the page sizes; drawn batches have any."""
    assert_fused_right(*build(all_modes(PAGE_SIZES[index % 4])[index], device))


@IN_INTERPRETER
@given(drawn_cases(virtual=None))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_the_fused_kernel_on_drawn_batches(case: Case) -> None:
    assert_fused_right(*build(case))


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


# --- in graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("builder", MetadataBuilder)
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=repr)
def test_every_replay_is_right(mode: GraphMode, builder: MetadataBuilder, device: str) -> None:
    """A long batch, shorter and smaller ones. Padding requests have a token, and the rows of the mode."""
    pool = build(graph_case(mode, (CONTEXT,) * 4), device)[1]
    backend = TRTLLMMHABackend(builder=builder, expand_encoder_only_verify=True)
    runner = GraphRunner(backend, mode, pool, (2, 4), lambda *_: lambda: None, MetadataPlace.BEFORE_REPLAY)
    for totals in ((CONTEXT, 33, 32, 31), (17, 16), (5, 48, 96), (64,)):
        batch, _ = build(graph_case(mode, totals), device)
        batch = replace(batch, req_pool_indices=torch.arange(len(totals), 0, -1, device=pool.device))
        runner.replay(frozen_kv_batch(batch) if mode.draft_step == FROZEN_KV_STEP else batch)
        captured = runner.captured[runner.size_for(len(totals))]
        assert (captured.view.seq_lens[len(totals) :] == 1).all()
        assert not captured.view.req_pool_indices[len(totals) :].any()
        expected = forward_metadata(captured.view, pool)
        assert expected.cache_seqlens[: len(totals)] == list(totals)
        assert_live_cells_right(captured.metadata, replace(expected, max_seq_len_q=mode.num_tokens_per_req))
        if captured.metadata.encoder_page_table is not None:
            keys, pages = encoder_only_verify(captured.view, pool)
            assert captured.metadata.encoder_cache_seqlens.tolist() == keys
            assert_live_pages_right(captured.metadata.encoder_page_table, pages)
    assert (captured.metadata.encoder_page_table is not None) is (mode == GraphMode(ForwardMode.TARGET_VERIFY, D))
