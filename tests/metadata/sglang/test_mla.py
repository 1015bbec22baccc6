"""MLA metadata and calls against SGLang's own class, on random batches: no number here is the lab's."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lab.references
from lab.metadata import (
    ForwardBatch,
    ForwardMode,
    KVPool,
    SpecInfo,
    build_mla_decode_metadata,
    build_mla_prefill_metadata,
)
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.backend import (
    MLALayer,
    TRTLLMMLABackend,
    mla_call_arguments,
    mla_query,
    prepare_mla_dcp_attention,
)
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.metadata import replan_outgrown
from lab.metadata.mla.prefill import plan_prefix_chunks, prepare_mla_prefill, prepare_prefix_chunk, quantised_prefill
from lab.metadata.speculation.verify_mask import VerifyMaskForm, preallocate_verify_mask
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import Case, build, drawn_cases, mla_truth, of_mla
from tests.metadata.noted import NotedCalls, is_same
from tests.metadata.served import HEADS, LAYER, MLA, RANK, REFERENCE, ROPE, Engine
from tests.metadata.sglang import mla
from tests.metadata.sglang.mha import Load, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

PARALLEL = mla.Parallel()


sglang = sglang_fixture(*mla.REAL, names=mla.names(PARALLEL))


ATTENDING = drawn_cases().map(of_mla).filter(lambda case: case.mode is not ForwardMode.DRAFT_EXTEND and case.total_lens)


@given(case=ATTENDING)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_eager_passes(sglang: Load, case: Case) -> None:
    batch, pool = build(case)
    draft = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
    backend = mla.new_backend(sglang, pool, num_draft_tokens=draft)
    backend.init_forward_metadata(server_batch(sglang, batch))
    if case.mode.is_prefill:
        ours, theirs = build_mla_prefill_metadata(batch, pool), backend.forward_prefill_metadata
        assert (ours.max_seq_len, ours.fallback_to_flashinfer_impl) == (theirs.max_seq_len, False)
        assert ours.cum_seq_lens.tolist() == theirs.cum_seq_lens.tolist()
        assert ours.seq_lens.tolist() == theirs.seq_lens.tolist()
        return
    own = mla_truth(batch, pool, MLA).seen_lens
    mla.assert_same(build_mla_decode_metadata(batch, pool), backend.forward_decode_metadata, pool.page_size, own)


DRAFT, MAX_BATCH_SIZE = 4, 4
GRAPH_MODES = [
    GraphMode(ForwardMode.DECODE),
    GraphMode(ForwardMode.TARGET_VERIFY, DRAFT),
    GraphMode(ForwardMode.RAGGED_VERIFY, DRAFT),
    GraphMode(ForwardMode.DRAFT_EXTEND_V2, DRAFT),
]


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.forward_mode.name)
def test_replays(sglang: Load, mode: GraphMode) -> None:
    """Batches that shrink and grow, each padded to the captured size by the lab, and both tables behind it."""
    engine = Engine()
    buffers = TRTLLMMLABackend().new_buffers([mode], engine.pool, MAX_BATCH_SIZE)[mode]
    runner = GraphRunner(
        TRTLLMMLABackend(), mode, engine.pool, (MAX_BATCH_SIZE,), lambda *_: lambda: None, metadata=buffers
    )
    captured = runner.captured[MAX_BATCH_SIZE]
    backend = mla.new_backend(
        sglang,
        engine.pool,
        num_draft_tokens=DRAFT,
        decode_cuda_graph_kv_indices=torch.full_like(buffers.slices(MAX_BATCH_SIZE).block_kv_indices, -1),
    )
    backend.init_forward_metadata_out_graph(server_batch(sglang, captured.view), in_capture=True)
    for totals in ([150, 64, 35, 120], [33, 5], [96, 97, 4], [32]):
        rows = [1 + i % DRAFT for i in range(len(totals))]
        news = rows if mode.forward_mode is ForwardMode.RAGGED_VERIFY else [mode.num_tokens_per_req] * len(totals)
        served, admitted = engine.serve(mode, totals, news)
        runner.replay(served.batch)
        backend.init_forward_metadata_out_graph(server_batch(sglang, captured.view))
        own = mla_truth(captured.view, engine.pool, MLA).seen_lens
        mla.assert_same(
            captured.metadata, backend.decode_cuda_graph_metadata[MAX_BATCH_SIZE], engine.pool.page_size, own
        )
        engine.release(admitted)


def reference(cache: Any) -> Any:
    """Return the lab's reference in the place of FlashInfer's call."""

    def run(*, query: Tensor, layer: Any, kv_cache: Tensor, **arguments: Any) -> Tensor:
        out: Tensor = lab.references.trtllm_batch_decode_with_kv_cache_mla(
            query=query,
            kv_cache=cache.with_head_axis(),
            workspace_buffer=None,
            qk_nope_head_dim=LAYER.qk_nope_head_dim,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            bmm1_scale=layer.scaling,
            **arguments,
        )
        return out

    return run


def hold_calls(
    sglang: Load, engine: Engine, batch: ForwardBatch, query: Tensor, early: ForwardBatch | None = None, **fields: Any
) -> None:
    """Compare an eager pass of the lab's with SGLang's: the call's arguments, and what becomes of its output.

    Metadata is built for `early`, if that is given: SGLang's forward sees that padding outgrew it, and plans again.
    """
    cache = engine.cache
    backend = mla.new_backend(sglang, engine.pool, num_draft_tokens=DRAFT, kernel=reference(cache))
    server = server_batch(sglang, early or batch, **fields)
    backend.init_forward_metadata(server)
    metadata = build_mla_decode_metadata(early or batch, engine.pool)
    if early is not None:
        vars(server).update(vars(server_batch(sglang, batch)))
        metadata = replan_outgrown(metadata, batch, partial(build_mla_decode_metadata, pool=engine.pool))
    theirs = mla.attend(backend, server, query, cache.storage.flatten(0, 1))
    ours = torch.full_like(theirs, 9.0)
    REFERENCE.prepare_attention(batch, metadata, LAYER, query, cache, out=ours)()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    seen = mla_truth(batch, engine.pool, MLA).seen_lens
    mla.assert_same(metadata, backend.forward_decode_metadata, engine.pool.page_size, seen)
    own = mla_call_arguments(batch, metadata, LAYER, mla_query(metadata, query), cache)
    (call,) = backend.calls
    assert torch.equal(own["query"], call["query"])
    assert own["max_seq_len"] == call["max_seq_len"]
    assert own["seq_lens"].tolist() == call["seq_lens"].tolist()


@pytest.mark.parametrize("rows", [(1, 4, 2, 3), (4, 4, 4, 4), (1, 1, 1, 1), (2, 3, 1, 2)])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_ragged_verification(sglang: Load, rows: tuple[int, ...], padding: int) -> None:
    """Lengths, bound, padded query and output of SGLang's own ``forward_extend``, rows of padding and all."""
    engine = Engine()
    served, _ = engine.serve(
        GraphMode(ForwardMode.RAGGED_VERIFY, DRAFT), [40, 64, 35, 120], list(rows), num_padding_rows=padding
    )
    hold_calls(sglang, engine, served.batch, served.query)


def test_a_ragged_verification_padded_to_a_captured_size(sglang: Load) -> None:
    """Two requests in a graph of four with twelve rows: padding takes the rest of them, at most four each."""
    engine = Engine()
    served, _ = engine.serve(GraphMode(ForwardMode.RAGGED_VERIFY, DRAFT), [40, 64], [3, 2], num_padding_rows=15)
    layout = sglang("sglang.srt.speculative.ragged_verify").RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=served.batch.extend_seq_lens, graph_num_tokens=served.batch.num_tokens
    )
    padded = layout.padded_to_bucket(padded_bs=4, cap=DRAFT)
    lens = padded.verify_lens.tolist()
    assert lens == [3, 2, DRAFT, DRAFT], "fifteen rows are left for two requests of at most four"
    pad = torch.nn.functional.pad
    batch = replace(
        served.batch,
        req_pool_indices=pad(served.batch.req_pool_indices, (0, 2)),
        seq_lens=pad(served.batch.seq_lens, (0, 2), value=1),
        out_cache_loc=pad(served.batch.out_cache_loc, (0, sum(lens[2:]))),
        extend_seq_lens=padded.verify_lens,
        extend_seq_lens_cpu=lens,
        extend_prefix_lens=None,
        extend_prefix_lens_cpu=None,
    )
    engine.cache.storage[0] = 0.0  # the sink, which padding reads
    spec_info = SimpleNamespace(draft_token_num=DRAFT, ragged_verify_layout=layout)
    hold_calls(sglang, engine, batch, served.query, spec_info=spec_info)


@pytest.mark.parametrize(
    "mode", [GRAPH_MODES[0], GRAPH_MODES[1], GRAPH_MODES[3]], ids=lambda mode: mode.forward_mode.name
)
def test_padding_that_outgrew_the_metadata(sglang: Load, mode: GraphMode) -> None:
    engine, rows = Engine(), mode.num_tokens_per_req
    served, _ = engine.serve(mode, [40, 64, 35], [rows] * 3)
    engine.cache.storage[0] = 0.0
    query = torch.cat([served.query, engine.draw(2 * rows, HEADS, RANK + ROPE)])
    hold_calls(sglang, engine, pad_requests(served.batch, 5), query, early=served.batch)


@pytest.mark.parametrize("is_draft_runner", [False, True])
@pytest.mark.parametrize("skip_prefill", [False, True])
@pytest.mark.parametrize("num_draft_tokens", [None, 4])
def test_the_verify_mask(sglang: Load, num_draft_tokens: int | None, skip_prefill: bool, is_draft_runner: bool) -> None:
    sizes: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "max_context_len": 100, "device": "cpu"}
    sizes |= {"is_draft_runner": is_draft_runner, "skip_prefill": skip_prefill}
    theirs = sglang(mla.VERIFY_MASK).maybe_create_verify_mask(max_bs=3, is_read=False, **sizes)
    ours = preallocate_verify_mask(VerifyMaskForm.QLEN_ONLY, max_batch_size=3, **sizes)
    assert (ours is None) == (theirs is None)
    assert ours is None or torch.equal(ours.buffer, theirs.buffer)


@pytest.mark.parametrize("rows", [2, 4, 6])
def test_a_verification_of_other_rows_than_the_drafts(sglang: Load, rows: int) -> None:
    """SGLang's lengths add the draft's tokens whatever the rows are; the lab's add the rows.

    See docs/evidence/forward_modes.md.
    """
    batch, pool = build(of_mla(Case(ForwardMode.TARGET_VERIFY, (64, 70), new=rows)))
    spec_info = SpecInfo(num_draft_tokens=DRAFT)
    backend = mla.new_backend(sglang, pool, num_draft_tokens=DRAFT)
    backend.init_forward_metadata(server_batch(sglang, replace(batch, spec_info=spec_info)))
    theirs = backend.forward_decode_metadata.seq_lens_k.tolist()
    assert theirs == (batch.seq_lens + DRAFT).tolist()
    ours = build_mla_decode_metadata(replace(batch, spec_info=spec_info), pool).seq_lens_k.tolist()
    assert ours == (batch.seq_lens + rows).tolist()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 0), (ForwardMode.TARGET_VERIFY, DRAFT)])
def test_decode_context_parallelism(sglang: Load, mode: ForwardMode, new: int, rank: int) -> None:
    """A rank's lengths, bound and table, eager and in a graph; SGLang has no widened pool's page size, only slots."""
    size, page_size = 3, 32
    totals = tuple(new + total for total in (1, 2, 3, 95, 96, 97, 192 + rank, 193 + rank))
    fields: dict[str, Any] = {"page_size": size * page_size, "max_context_len": 280, "sliding_window": False}
    batch, pool = build(Case(mode, totals, new=new, host_seq_lens=True, **fields))
    dcp = DecodeContextParallel(size, rank)
    backend = mla.new_backend(sglang, pool, page_size=page_size, num_draft_tokens=new or None)
    backend.decode_cuda_graph_kv_indices = torch.full((len(totals), 4096 // page_size), -1, dtype=torch.int32)
    runner = GraphRunner(
        TRTLLMMLABackend(dcp=dcp), GraphMode(mode, new or 1), pool, (len(totals),), lambda *_: lambda: None
    )
    runner.replay(batch)
    captured = runner.captured[len(totals)]
    PARALLEL.dcp_size, PARALLEL.dcp_rank = size, rank
    try:
        backend.init_forward_metadata(server_batch(sglang, batch))
        eager = backend.forward_decode_metadata
        backend.init_forward_metadata_out_graph(server_batch(sglang, captured.view), in_capture=True)
    finally:
        PARALLEL.dcp_size, PARALLEL.dcp_rank = 1, 0
    pairs = (
        (build_mla_dcp_metadata(batch, pool, dcp), eager),
        (captured.metadata, backend.decode_cuda_graph_metadata[len(totals)]),
    )
    for ours, theirs in pairs:
        assert ours.global_seq_lens_k.tolist() == theirs.global_seq_lens_k.tolist()
        mla.assert_same(ours, theirs, page_size, ours.seq_lens_k.tolist())


@pytest.mark.parametrize(("mode", "new"), [(ForwardMode.DECODE, 0), (ForwardMode.TARGET_VERIFY, DRAFT)])
def test_cute_dsls_calls_with_context_parallelism(sglang: Load, mode: ForwardMode, new: int) -> None:
    """Each rank's arguments as ``CuteDslMLABackend`` hands them over, from metadata that another test compares."""
    totals = (new + 1, 64, 97)
    batch, pool = build(Case(mode, totals, new=new, page_size=64, max_context_len=150, sliding_window=False))
    cache, size = pool.new_sharded_latent_cache(RANK + ROPE, torch.float32, 2), 2
    metadata = [build_mla_dcp_metadata(batch, pool, DecodeContextParallel(size, rank)) for rank in range(size)]
    noted = NotedCalls(SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=_with_lse))
    query, out = torch.randn(batch.num_tokens, HEADS, RANK + ROPE), torch.zeros(batch.num_tokens, HEADS, RANK)
    prepare_mla_dcp_attention(noted, batch, metadata, LAYER, query, cache, out=out, cute_dsl=True)()
    module, theirs = sglang(mla.CUTE_DSL), NotedCalls(SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=_with_lse))
    module.flashinfer = SimpleNamespace(decode=theirs)
    backend = module.CuteDslMLABackend.__new__(module.CuteDslMLABackend)
    vars(backend).update(workspace_buffer=None, qk_nope_head_dim=LAYER.qk_nope_head_dim, kv_lora_rank=RANK)
    vars(backend).update(qk_rope_head_dim=ROPE, data_type=torch.float32)
    for rank, own in enumerate(metadata):
        backend._run_decode_kernel(
            mla_query(own, query),
            cache.of_rank(rank).with_head_axis(),
            own.block_kv_indices,
            own.seq_lens_k,
            own.max_seq_len_k,
            SimpleNamespace(scaling=LAYER.softmax_scale, k_scale_float=None),
            causal_seqs=own.global_seq_lens_k,
            cp_world=size,
            cp_rank=rank,
            return_lse=True,
        )
    for (_, ours), (_, other) in zip(noted.calls, theirs.calls, strict=True):
        other.pop("skip_softmax_threshold_scale_factor")
        for name, value in other.items():
            assert is_same(ours[name], value), name


def _with_lse(query: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return query[..., :RANK], torch.zeros(query.shape[:3])


def prefix_chunks(sglang: Load, batch: ForwardBatch, pool: KVPool, capacity: int) -> Any:
    """SGLang's batch, with its own plan of the cached prefixes' chunks."""

    class Server(sglang(mla.PREFIX_CHUNKS).ForwardBatchDeepSeekMHAMixin):  # type: ignore[misc]
        pass

    server = Server()
    vars(server).update(vars(server_batch(sglang, batch)))
    PARALLEL.pool, PARALLEL.chunk_capacity = pool, capacity
    server.prepare_chunked_prefix_cache_info(pool.device)
    return server


@given(prefixes=st.lists(st.integers(0, 90), min_size=1, max_size=4), each=st.integers(1, 100), extra=st.integers(0, 1))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_chunks_of_a_prefix(sglang: Load, prefixes: list[int], each: int, extra: int) -> None:
    totals = tuple(prefix + 2 for prefix in prefixes)
    news = (2,) * len(prefixes)
    batch, pool = build(of_mla(Case(ForwardMode.EXTEND, totals, news)))
    capacity = each * len(prefixes) + min(extra, len(prefixes) - 1)
    server = prefix_chunks(sglang, batch, pool, capacity)
    ours = plan_prefix_chunks(batch, pool, capacity)
    assert len(ours) == server.num_prefix_chunks
    for i, chunk in enumerate(ours):
        assert chunk.seq_lens.tolist() == server.prefix_chunk_seq_lens[i].tolist()
        assert chunk.cum_seq_lens.tolist() == server.prefix_chunk_cu_seq_lens[i].tolist()
        assert chunk.max_seq_len == server.prefix_chunk_max_seq_lens[i]
        assert chunk.has_empty == server.prefix_chunk_has_zero_kv[i]
        assert chunk.kv_indices.tolist() == server.prefix_chunk_kv_indices[i].tolist()


def test_a_chunks_call(sglang: Load) -> None:
    """What SGLang's ``forward_extend`` hands the ragged kernel for each chunk, and for the new tokens before them."""
    batch, pool = build(of_mla(Case(ForwardMode.EXTEND, (40, 5, 60), (3, 5, 1))))
    server = prefix_chunks(sglang, batch, pool, 60)
    layer = MLALayer(0.3, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    theirs: list[dict[str, Any]] = []
    backend = mla.new_backend(sglang, pool, q_data_type=torch.float32, data_type=torch.float32)
    backend._run_prefill_kernel = lambda **arguments: theirs.append(arguments)
    backend.init_forward_metadata(server)
    sizes = SimpleNamespace(tp_q_head_num=2, tp_k_head_num=2, head_dim=10, v_head_dim=5, scaling=0.3)
    query, chunks = torch.randn(9, 2, 10), plan_prefix_chunks(batch, pool, 60)
    metadata = build_mla_prefill_metadata(batch, pool)
    noted = NotedCalls(lab.references)
    for i, chunk in enumerate([None, *chunks]):
        count = 9 if chunk is None else len(chunk.kv_indices)
        key, value = torch.randn(count, 2, 10), torch.randn(count, 2, 5)
        server.attn_attend_prefix_cache, server.mha_return_lse = chunk is not None, True
        server.prefix_chunk_idx, server.prefix_chunk_has_zero_kv = i - 1, [False] * len(chunks)
        backend.forward_extend(query, key, value, sizes, server, save_kv_cache=False)
        if chunk is None:
            prepare_mla_prefill(noted, batch, metadata, layer, query, key, value)()
        else:
            prepare_prefix_chunk(noted, batch, metadata, chunk, layer, query, key, value)()
    assert len(noted.calls) == len(theirs) > 2
    names = {"query": "q", "key": "k", "value": "v", "seq_lens": "seq_lens_kv"}
    same = ("max_q_len", "max_kv_len", "cum_seq_lens_q", "cum_seq_lens_kv", "batch_size", "o_sf_scale", "is_causal")
    for (_, own), call in zip(noted.calls, theirs, strict=True):
        for name in (*names, *same, "return_lse"):
            a, b = own[name], call[names.get(name, name)]
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b, name


@pytest.mark.parametrize(("data_type", "counts"), [(torch.float8_e4m3fn, True), (torch.bfloat16, False)])
def test_an_e4m3_cache(sglang: Load, data_type: torch.dtype, counts: bool) -> None:
    """SGLang's own decode: the query that its kernel is handed, and the scale that counts."""
    engine = Engine()
    served, _ = engine.serve(GraphMode(ForwardMode.DECODE), [40, 64, 35], [1, 1, 1])
    query = served.query.to(torch.bfloat16) * 300  # some beyond e4m3's largest
    cache = engine.pool.new_latent_cache(RANK + ROPE, data_type)
    backend = mla.new_backend(
        sglang, engine.pool, data_type=data_type, kernel=lambda query, **_: query[..., :RANK].contiguous()
    )
    server = server_batch(sglang, served.batch)
    backend.init_forward_metadata(server)
    mla.attend(backend, server, query, cache.storage.flatten(0, 1), rope=torch.zeros(3, 1, ROPE, dtype=query.dtype))
    layer = replace(LAYER, k_scale=0.5)
    metadata = build_mla_decode_metadata(served.batch, engine.pool)
    noted = NotedCalls()
    out = torch.empty(3, HEADS, RANK, dtype=torch.bfloat16)
    TRTLLMMLABackend(noted).prepare_attention(served.batch, metadata, layer, query, cache, out=out)()
    ((_, own),), (call,) = noted.calls, backend.calls
    assert own["query"].dtype == call["query"].dtype == data_type
    assert is_same(own["query"], call["query"])
    sglang(mla.BACKEND).logger.warning_once = lambda *_: None  # which SGLang's own logging adds
    theirs = backend._compute_decode_bmm1_scale(SimpleNamespace(scaling=LAYER.softmax_scale, k_scale_float=0.5))
    assert own["bmm1_scale"] == theirs == LAYER.softmax_scale * (0.5 if counts else 1.0)


def test_a_prefills_e4m3_tensors(sglang: Load) -> None:
    """Without scales, which an engine's checkpoint rarely has; those that it has go to a kernel of another package."""
    sides = [torch.randn(7, 2, dim) * 100 for dim in (10, 10, 5)]
    *theirs, k_scale, v_scale = sglang(mla.BACKEND)._quantize_fp8_qkv(*sides, SimpleNamespace())
    ours = quantised_prefill(MLALayer(1.0), *sides)
    assert (k_scale, v_scale) == (1.0, 1.0)
    for own, other in zip(ours, theirs, strict=True):
        assert is_same(own, other)
