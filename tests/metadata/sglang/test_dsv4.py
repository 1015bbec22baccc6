"""DSV4 metadata and calls against SGLang's own classes and kernels: no number here is the lab's."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.metadata import ForwardBatch, ForwardMode, KVPool, SpecInfo
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.dsv4 import RATIOS, DSV4Backend, DSV4Cache, DSV4Layer, DSV4Metadata, build_dsv4_metadata
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import EXTENDS, Case, build, drawn_cases, graph_case, with_drafts
from tests.metadata.noted import NotedCalls, is_same
from tests.metadata.sglang import mha
from tests.metadata.sglang.mha import Load, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

LAYERS, KERNELS = "sglang.srt.layers.attention", "sglang.kernels.ops.attention"
BACKEND = f"{LAYERS}.deepseek_v4_trtllm_backend"
REAL = (
    BACKEND,
    f"{LAYERS}.deepseek_v4_backend",
    f"{LAYERS}.dsv4.metadata",
    f"{KERNELS}.dsv4.attn_metadata_kernels",
    f"{KERNELS}.dsv4.metadata_kernel",
    f"{KERNELS}.dsv4.trtllm_metadata",
    mha.FORWARD_BATCH,
    mha.RAGGED_VERIFY,
    "sglang.kernels.ops.speculative.ragged_verify_kernels",
)
NAMES: dict[str, object] = {
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph.eager_on_graph": (
        lambda _: lambda function: function
    ),
    "sglang.srt.environ.envs": SimpleNamespace(
        SGLANG_RAGGED_VERIFY_MODE=SimpleNamespace(get=lambda: "compact"),
        SGLANG_OPT_USE_ONLINE_COMPRESS=SimpleNamespace(get=lambda: False),
    ),
    "sglang.srt.layers.cp.utils.is_cp_active": lambda batch: False,
    "sglang.srt.utils.is_cuda": lambda: True,
    "sglang.srt.utils.is_xpu": lambda: False,
    "sglang.srt.utils.ceil_align": lambda size, step: -(-size // step) * step,
    "sglang.srt.runtime_context.get_parallel": lambda: SimpleNamespace(attn_cp_size=1),
    "sglang.srt.runtime_context.get_platform": lambda: SimpleNamespace(is_sm120=True),
    "sglang.srt.model_executor.runner_utils.capture_mode.skip_low_ratio_indexer": lambda ratio: False,
    f"{LAYERS}.dsv4.dsv41_sparse.token_req_indices": lambda batch: batch.req_pool_indices,
}
HEADS, TOPK, DRAFT = 3, 512, 4
LAYER = DSV4Layer(0.4, sinks=torch.arange(HEADS, dtype=torch.float32))

sglang = sglang_fixture(*REAL, names=NAMES)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernels run on tensors of a GPU; here Triton interprets them. FlashInfer, whose call is noted, is not loaded."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)


def new_backend(load: Load, pool: KVPool, ratios: tuple[int, ...]) -> Any:
    """Make the backend without its constructor, which wants a model runner."""
    cls = load(BACKEND).DeepseekV4TrtllmAttnBackend
    backend = cls.__new__(cls)
    buckets = load(f"{LAYERS}.deepseek_v4_backend")._GraphBucket
    vars(backend).update(
        device=pool.device,
        cuda_int32_kwargs={"device": pool.device, "dtype": torch.int32},
        page_size=pool.page_size,
        req_to_token=pool.req_to_token,
        req_to_token_pool=pool,
        MAX_SEQ_LEN_FOR_CAPTURE=pool.req_to_token.shape[1],
        present_ratios=ratios,
        low_ratios=tuple(ratio for ratio in ratios if ratio in (1, 2)),
        has_c4=4 in ratios,
        has_c128=128 in ratios,
        is_dsv41=False,
        index_topk=TOPK,
        topk=0,
        mtp_enabled=False,
        speculative_num_steps=1,
        speculative_step_id=0,
        speculative_num_draft_tokens=DRAFT,
        extend_seq_lens_buffer=torch.zeros(64, dtype=torch.int32),
        extend_start_loc_buffer=torch.zeros(64, dtype=torch.int32),
        draft_extend_num_tokens_per_req=DRAFT,
        needs_cpu_seq_lens=False,
        is_dspark_draft=False,
        enable_decoder_swa_bounded_replay=False,
        builds_verify_metadata_early=False,
        _early_verify_metadata_ids=set(),
        _make_target_verify_c128_metadata=lambda *_: None,
        _activate_request_window=lambda: None,
        _snapshot_low_ratio_k_slots=lambda *_, **__: None,
        _compressor_out_loc=lambda batch, **_: batch.out_cache_loc,
        init_forward_metadata_indexer=lambda *_, **__: None,
        online_c128_mtp=SimpleNamespace(
            prepare_forward=lambda *_, **__: 0, state_slot_offset=lambda: 0, enabled=lambda: False, clear=lambda: None
        ),
        cuda_graph_swa_out_cache_loc=None,
        cuda_graph_metadata_of_bucket_and_bs={bucket: {} for bucket in buckets},
        trtllm_workspace_buffer=torch.zeros(1),
        softmax_scale=LAYER.softmax_scale,
        forward_metadata=None,
        token_to_kv_pool=SimpleNamespace(
            request_window=None,
            swa_req_ring_size=None,
            full_to_swa_index_mapping=pool.full_to_swa,
            translate_loc_from_full_to_swa=pool.swa_slots,
        ),
    )
    return backend


def dsv4_server_batch(load: Load, batch: ForwardBatch) -> Any:
    rows = batch.extend_seq_lens
    starts = None if rows is None else rows.cumsum(0) - rows
    return server_batch(
        load,
        batch,
        extend_start_loc=starts,
        max_seq_len_override=None,
        encoder_swa_replay=False,
        encoder_swa_row_floor=None,
        attn_cp_metadata=None,
        spec_algorithm=None,
    )


def selections(metadata: DSV4Metadata, ratio: int, topk: int, seed: int) -> Tensor:
    """Draw the groups that each row selects, as many as it has."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.full((len(metadata.seq_lens), topk), -1, dtype=torch.int32)
    for row, seen in zip(drawn, metadata.seq_lens.tolist(), strict=True):
        own = torch.randperm(seen // ratio, generator=generator)[:topk]
        row[: len(own)] = own.to(torch.int32)
    return drawn


def sglang_call(load: Load, backend: Any, server: Any, query: Tensor, cache: DSV4Cache, places: Tensor | None) -> Any:
    """Run one layer of SGLang's own forward; return what FlashInfer's call is handed, and as ``returned`` the output."""
    calls: list[dict[str, Any]] = []

    def record(**arguments: Any) -> Tensor:
        calls.append(arguments)
        out = arguments.get("out")
        return (torch.empty(arguments["query"].shape, dtype=torch.bfloat16) if out is None else out).fill_(2.0)

    module, ratio, metadata = load(BACKEND), cache.compress_ratio, backend.forward_metadata.core_attn_metadata
    module.trtllm_batch_decode_sparse_mla_dsv4 = record
    module._trtllm_semaphore_rows = 10_000
    if ratio in (1, 2, 4) and places is not None:
        metadata.sparse_page_indices(ratio)[: len(places), : places.shape[1]] = places
    flat = cache.compressed.storage.flatten(1)
    vars(backend.token_to_kv_pool).update(
        get_swa_key_buffer_radix=lambda _: cache.window.storage.flatten(1),
        swa_kv_pool=SimpleNamespace(page_size=cache.pool.page_size),
        get_extra_key_buffer=lambda _: flat,
        get_extra_key_page_size=lambda _: cache.compressed.page_size,
    )
    layer = SimpleNamespace(layer_id=0, k_scale_float=None, tp_q_head_num=HEADS)
    backend._move_to_device = lambda values: torch.tensor(values, dtype=torch.int32)
    backend.forward_metadata.late_layer_tail = None

    def matched(each: Tensor | None, value: int) -> Tensor | None:
        """As `_forward_attention` passes the tables."""
        if each is None or len(each) >= len(query):
            return None if each is None else each[: len(query)]
        return torch.nn.functional.pad(each, (0, 0) * (each.ndim - 1) + (0, len(query) - len(each)), value=value)

    extra = (None, None)
    if ratio:
        extra = metadata.sparse_page_indices(ratio), metadata.sparse_topk_lengths(ratio)
    returned = backend._forward_trtllm(
        q=query,
        layer=layer,
        compress_ratio=ratio,
        core_attn_metadata=metadata,
        forward_batch=server,
        attn_sink=LAYER.sinks,
        swa_page_indices=matched(metadata.swa_page_indices, 0),
        extra_indices=matched(extra[0], -1),
        extra_topk_lengths=matched(extra[1], 1),
    )
    (call,) = calls
    return call | {"returned": returned}


def hold_call(
    load: Load, batch: ForwardBatch, pool: KVPool, metadata: DSV4Metadata, backend: Any, ratio: int, seed: int
) -> None:
    """Compare the lab's call with SGLang's: each argument, and what becomes of padding's output."""
    query = torch.randn(batch.num_tokens, HEADS, 512).to(torch.bfloat16)
    cache = DSV4Cache.over(pool, 512, torch.float8_e4m3fn, ratio)
    topk = selections(metadata, ratio, TOPK, seed) if ratio in (1, 2, 4) else None
    places = None if topk is None else metadata.sparse_indices(ratio, topk)[:, 128:]
    theirs = sglang_call(load, backend, dsv4_server_batch(load, batch), query, cache, places)
    noted, out = NotedCalls(), torch.full(query.shape, 9.0, dtype=torch.bfloat16)
    layer, given = replace(LAYER, compress_ratio=ratio), {"topk_indices": topk}
    DSV4Backend(noted, TOPK).prepare_attention(batch, metadata, layer, query, cache, out=out, **given)()
    ((_, ours),) = noted.calls
    rows = len(ours["query"])
    caches, scales = ("swa_kv_cache", "compressed_kv_cache"), ("bmm1_scale", "bmm2_scale")
    lengths = ("sparse_indices", "sparse_topk_lens", "seq_lens", "cum_seq_lens_q", "max_q_len")
    for name in ("query", *caches, *lengths, "sinks", *scales):
        assert is_same(ours.get(name), theirs.get(name)), name
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in caches)
    assert not out[rows:].any()
    assert theirs["returned"].shape == out.shape
    assert not theirs["returned"][rows:].any()


def engine_case(case: Case) -> Case:
    """Return the case as an engine has it, with pages of whole groups and lengths beyond a window."""
    page_size, totals = 256 if case.page_size > 32 else 128, tuple(7 * total for total in case.total_lens)
    longest, padding = max(*totals, 1) + page_size + 3, case.num_padding_rows if case.mode in EXTENDS else 0
    sizes: dict[str, Any] = {"page_size": page_size, "max_context_len": longest, "num_padding_rows": padding}
    return with_drafts(replace(case, total_lens=totals, sliding_window=True, evict_before=0, **sizes), DRAFT)


MODES = [
    *(ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY, ForwardMode.DRAFT_EXTEND_V2),
    *EXTENDS,
]
DRAWN = drawn_cases(MODES).filter(lambda case: case.total_lens).map(engine_case)


@given(case=DRAWN, ratio=st.sampled_from(RATIOS))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_eager_passes(sglang: Load, case: Case, ratio: int) -> None:
    batch, pool = build(case)
    ratio = (
        0
        if case.mode is ForwardMode.DRAFT_EXTEND_V2 or (batch.spec_info and case.mode is ForwardMode.DECODE)
        else ratio
    )
    backend = new_backend(sglang, pool, (1, 2) if ratio in (1, 2) else (4, 128))
    backend.init_forward_metadata(dsv4_server_batch(sglang, batch))
    hold_call(sglang, batch, pool, build_dsv4_metadata(batch, pool), backend, ratio, case.seed)


def test_a_draft_extend_that_padding_outgrew(sglang: Load) -> None:
    """Two requests are padded to five after the metadata was built."""
    case = engine_case(Case(ForwardMode.DRAFT_EXTEND_V2, (130, 9), (4, 4)))
    batch, pool = build(case)
    batch = replace(batch, spec_info=SpecInfo(num_tokens_per_req=4))
    backend = new_backend(sglang, pool, (4, 128))
    backend.init_forward_metadata(dsv4_server_batch(sglang, batch))
    hold_call(sglang, pad_requests(batch, 5), pool, build_dsv4_metadata(batch, pool), backend, 0, seed=0)


GRAPH_MODES = [
    *((GraphMode(ForwardMode.DECODE), ratio) for ratio in (0, 2, 4, 128)),
    *((GraphMode(ForwardMode.TARGET_VERIFY, DRAFT), ratio) for ratio in (1, 4, 128)),
    (GraphMode.draft_decode(1), 0),
    (GraphMode(ForwardMode.DRAFT_EXTEND_V2, DRAFT), 0),
]


@pytest.mark.parametrize(("mode", "ratio"), GRAPH_MODES, ids=str)
def test_replays(sglang: Load, mode: GraphMode, ratio: int) -> None:
    """Batches that shrink and grow, padded to the captured size."""
    size, fields = 4, {"page_size": 128, "max_context_len": 700}
    first, pool = build(graph_case(mode, (650, 128, 270, 140), **fields))
    runner = GraphRunner(DSV4Backend(), mode, pool, (size,), lambda *_: lambda: None)
    captured = runner.captured[size]
    backend = new_backend(sglang, pool, (1, 2) if ratio in (1, 2) else (4, 128))
    backend.init_forward_metadata_out_graph(dsv4_server_batch(sglang, captured.view), in_capture=True)
    backend.init_forward_metadata_in_graph(dsv4_server_batch(sglang, captured.view))
    rows = first.req_pool_indices.tolist()
    every = ((650, 128, 270, 140), (131, 5), (127, 129, 8), (257,))
    for totals, admitted in zip(every, (rows, rows[::-1], rows[1:], rows), strict=True):
        batch, _ = build(graph_case(mode, totals, **fields))
        batch = replace(batch, req_pool_indices=torch.tensor(admitted[: len(totals)]))
        runner.replay(batch)
        server = dsv4_server_batch(sglang, captured.view)
        backend.init_forward_metadata_out_graph(server)
        backend.init_forward_metadata_in_graph(server)
        hold_call(sglang, captured.view, pool, captured.metadata, backend, ratio, seed=1)
