"""MHA's metadata in graphs, by either builder: every replay is right, and row boundaries that never change are preset."""

from dataclasses import replace

import pytest
import torch

from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.buffers import MetadataBuilder
from lab.references.forward_metadata import encoder_only_verify, forward_metadata
from tests.devices import DEVICES
from tests.metadata.batches import DRAFT_EXTENDS, assert_live_cells_right, assert_live_pages_right, build, graph_case

D, CONTEXT = 4, 100
MODES = [
    GraphMode.decode(),
    GraphMode.draft_decode(1),
    GraphMode.target_verify(D),
    GraphMode.ragged_verify(D),
    GraphMode.draft_extend(D),
    GraphMode(DRAFT_EXTENDS[1], D),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("builder", MetadataBuilder)
@pytest.mark.parametrize("mode", MODES, ids=repr)
def test_every_replay_is_right(mode: GraphMode, builder: MetadataBuilder, device: str) -> None:
    """A long batch, shorter and smaller ones. Padding requests have a token, and the rows of the mode."""
    pool = build(graph_case(mode, (CONTEXT,) * 4), device)[1]
    backend = TRTLLMMHABackend(builder=builder, expand_encoder_only_verify=True)
    runner = GraphRunner(backend, mode, pool, (2, 4), lambda *_: lambda: None, MetadataPlace.BEFORE_REPLAY)
    for totals in ((CONTEXT, 33, 32, 31), (17, 16), (5, 48, 96), (64,)):
        batch, _ = build(graph_case(mode, totals), device)
        rows = torch.arange(len(totals), 0, -1, device=pool.device)
        runner.replay(replace(batch, req_pool_indices=rows, spec_info=batch.spec_info))
        captured = runner.captured[runner.size_for(len(totals))]
        expected = forward_metadata(captured.view, pool)
        assert expected.cache_seqlens[: len(totals)] == list(totals)
        assert_live_cells_right(captured.metadata, replace(expected, max_seq_len_q=mode.num_tokens_per_req))
        if captured.metadata.encoder_page_table is not None:
            keys, pages = encoder_only_verify(captured.view, pool)
            assert captured.metadata.encoder_cache_seqlens.tolist() == keys
            assert_live_pages_right(captured.metadata.encoder_page_table, pages)
    assert (captured.metadata.encoder_page_table is not None) is (mode == GraphMode.target_verify(D))
