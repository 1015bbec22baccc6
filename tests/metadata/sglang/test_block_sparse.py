"""Block-sparse decode against SGLang's own adapter of FlashInfer's call and its kernel of the plan."""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.metadata import ForwardMode, KVLayout
from lab.metadata.engine.backend import RebuiltMetadata
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.mha.backend import AttentionLayer
from lab.metadata.mha.block_sparse import BlockSparseBackend, as_pages, build_block_sparse_metadata
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import build, graph_case
from tests.metadata.noted import NotedCalls, is_same
from tests.metadata.sglang.mha import Load
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

PLAN, ADAPTER = (f"sglang.kernels.ops.attention.msa_v1.{name}" for name in ("decode_plan", "flashinfer_decode"))
HEADS, GROUP, DRAFT = 2, 4, 3
POOL: dict[str, Any] = {"page_size": 128, "max_context_len": 2500, "sliding_window": False}

sglang = sglang_fixture(PLAN, ADAPTER)


def planned(load: Load, batch: Any, pool: Any, mode: GraphMode) -> dict[str, Tensor]:
    """Run SGLang's kernel, which writes a plan's tables and lengths in one launch."""
    width, size = mode.num_tokens_per_req, batch.batch_size
    written = {
        "page_table": torch.empty(size, pool.block_table_width, dtype=torch.int32),
        "query_seq_lens": torch.empty(size * width, dtype=torch.int32),
        "flashinfer_seq_lens": torch.empty(HEADS, size * width, dtype=torch.int32),
    }
    load(PLAN).update_msa_v1_decode_plan(
        **written,
        req_to_token=pool.req_to_token,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        query_length=width,
        seq_len_offset=width if mode.forward_mode is ForwardMode.TARGET_VERIFY else 0,
        final_seq_lens=torch.empty(size, dtype=torch.int32),
        chunk_seq_lens=torch.empty(1, size, dtype=torch.int32),
    )
    return written


@pytest.mark.parametrize("mode", [GraphMode(ForwardMode.DECODE), GraphMode(ForwardMode.TARGET_VERIFY, DRAFT)], ids=str)
def test_the_plan_of_replays(sglang: Load, mode: GraphMode) -> None:
    """Batches that shrink and grow, padded to the captured size: lengths of all rows, and live pages of all requests."""
    size, width = 4, mode.num_tokens_per_req
    _, pool = build(graph_case(mode, (2500, 200, 300, 5), **POOL))
    inputs = StaticInputs(mode, size, pool.device)
    buffers = RebuiltMetadata(mode, pool, partial(build_block_sparse_metadata, num_kv_heads=HEADS))
    view, metadata = inputs.view(size), buffers.slices(size)
    rebuild = buffers.prepare(view)
    for totals in ((2500, 128, 130, 2049), (5, 2180), (2048, 129, 4), (257,)):
        batch, _ = build(graph_case(mode, totals, **POOL))
        inputs.load(batch, size)
        rebuild()
        theirs = planned(sglang, view, pool, mode)
        assert metadata.query_seq_lens.tolist() == theirs["query_seq_lens"].tolist()
        assert torch.equal(metadata.seq_lens, theirs["flashinfer_seq_lens"])
        table = theirs["page_table"].repeat_interleave(width, dim=0)
        for row, seen in enumerate(metadata.query_seq_lens.tolist()):
            live = -(-seen // 128)
            assert metadata.page_table[row, :live].tolist() == table[row, :live].tolist()


def test_the_call(sglang: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's tables, lengths, view of the copied pages, and arguments."""
    calls: list[dict[str, Any]] = []
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len")

    def call(
        *positional: Any, enable_block_sparse_attention: bool, multi_ctas_kv_counter_buffer: Any, **rest: Any
    ) -> None:
        calls.append(dict(zip(names, positional, strict=True)) | rest | {"is_sparse": enable_block_sparse_attention})

    flashinfer, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    decode.trtllm_batch_decode_with_kv_cache = call  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", decode)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    batch, pool = build(graph_case(GraphMode(ForwardMode.DECODE), (2500, 128, 130), **POOL))
    metadata = build_block_sparse_metadata(batch, pool, HEADS)
    compact = torch.zeros(2, 3, HEADS, 16, 128, 128).to(torch.float8_e4m3fn)
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8)
    theirs = sglang(ADAPTER).FlashInferQ8K8Decode(
        *compact, num_q_heads=HEADS * GROUP, sm_scale=0.25, workspace_buffer=workspace
    )
    theirs.update_lengths(metadata.query_seq_lens)
    query = torch.zeros(3, HEADS * GROUP, 128).to(torch.float8_e4m3fn)
    theirs.run(query)
    noted, cache = NotedCalls(), pool.new_cache(HEADS, 128, torch.float8_e4m3fn, KVLayout.NHD)
    topk, out = torch.zeros(HEADS, 3, 16, dtype=torch.int32), torch.zeros(query.shape, dtype=torch.bfloat16)
    backend, layer = BlockSparseBackend(noted), AttentionLayer(0.25)
    backend.prepare_attention(batch, metadata, layer, query, cache, out=out, topk_indices=topk)()
    ((_, ours),), (other,) = noted.calls, calls
    for name in ("block_tables", "seq_lens", "query"):
        assert ours[name].stride() == other[name].stride(), name
    for name in ("block_tables", "seq_lens", "query", "max_seq_len", "bmm1_scale", "bmm2_scale", "q_len_per_req"):
        assert is_same(ours[name], other[name]), name
    assert ours["enable_block_sparse_attention"] is other["is_sparse"] is True
    for sides in (ours["kv_cache"], as_pages(compact)):
        for own, side in zip(sides, other["kv_cache"], strict=True):
            assert (own.shape, own.stride(), own.dtype) == (side.shape, side.stride(), side.dtype)
    assert [side.data_ptr() for side in as_pages(compact)] == [side.data_ptr() for side in other["kv_cache"]]
