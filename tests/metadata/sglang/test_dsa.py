"""DSA metadata and calls against SGLang's own class and kernels: no number here is the lab's."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.metadata import ForwardBatch, ForwardMode, KVPool
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.mla.backend import MLALayer
from lab.metadata.mla.dsa import DSABackend, DSAMetadata, Indexer, build_dsa_metadata
from lab.references.forward_metadata import dsa_forward_metadata
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import EXTENDS, Case, build, drawn_cases, graph_case, of_mla, with_drafts
from tests.metadata.noted import NotedCalls, is_same
from tests.metadata.sglang import mha
from tests.metadata.sglang.mha import Load, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

BACKEND = "sglang.srt.layers.attention.dsa_backend"
DSA, KERNELS = "sglang.srt.layers.attention.dsa", "sglang.kernels.ops.attention"
REAL = (
    BACKEND,
    f"{DSA}.dsa_backend_mtp_precompute",
    f"{DSA}.dsa_dcp",
    f"{DSA}.dsa_metadata_manager",
    f"{DSA}.dsa_topk_backend",
    f"{DSA}.utils",
    f"{KERNELS}.dsa.metadata",
    f"{KERNELS}.dsa.transform_index",
    f"{KERNELS}.pad",
    mha.FORWARD_BATCH,
)
PARALLEL = SimpleNamespace(attn_cp_size=1)
UTILS = "sglang.srt.utils"
NAMES: dict[str, object] = {
    **{f"{UTILS}.{name}": lambda: False for name in ("is_hip", "is_xpu", "is_musa", "is_gfx95_supported")},
    f"{UTILS}.get_bool_env_var": lambda *_: False,
    f"{UTILS}.is_cuda": lambda: True,
    f"{KERNELS}.dsv4.topk.plan_topk_v2": lambda lens: torch.zeros(1),
    f"{KERNELS}.fixup_zero_kv.fixup_zero_kv_rows": lambda *_: None,
    "sglang.srt.runtime_context.get_parallel": lambda: PARALLEL,
    "sglang.srt.runtime_context.get_platform": lambda: SimpleNamespace(is_sm100=True),
    "sglang.srt.environ.envs": SimpleNamespace(
        SGLANG_FP8_PAGED_MQA_LOGITS_TORCH=SimpleNamespace(get=lambda: False),
        SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: None),
    ),
}
LAYER = MLALayer(0.4, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=6)
DRAFT, HEADS = 4, 3

sglang = sglang_fixture(*REAL, names=NAMES)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's kernels assert that their tensors are on a GPU; here Triton interprets them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)


def new_backend(load: Load, pool: KVPool, indexer: Indexer, layer: MLALayer = LAYER) -> Any:
    """Make the backend without its constructor, which wants a model runner."""
    module = load(BACKEND)
    module.resolve_paged_mqa_logits_metadata_fn = lambda: lambda *_: torch.zeros(1)
    module.resolve_num_sms = lambda: 132
    cls = module.DeepseekSparseAttnBackend
    backend = cls.__new__(cls)
    kernels = load(f"{KERNELS}.dsa.metadata")
    unchanged = {
        name: lambda metadata, *_, **__: metadata
        for name in ("_init_kpool_metadata", "_init_kpool_metadata_capture", "_update_kpool_metadata_replay")
    }
    vars(backend).update(
        **unchanged,
        device=pool.device,
        physical_page_size=pool.page_size,
        req_to_token=pool.req_to_token,
        req_to_token_pool=pool,
        speculative_num_draft_tokens=DRAFT,
        dsa_index_topk=indexer.topk,
        dsa_index_kpool=indexer.group,
        dsa_prefill_impl="trtllm",
        dsa_decode_impl="trtllm",
        enable_auto_select_prefill_impl=False,
        supports_mha_one_shot=False,
        use_mha=False,
        use_fused_topk=False,
        dsa_kv_cache_store_fp8=False,
        experimental_kpool_metadata_fusion=False,
        dsa_topk_backend=SimpleNamespace(should_use_topk_v2=lambda: False),
        hisparse_coordinator=None,
        _kv_shard_pool=None,
        dcp_size=1,
        workspace_buffer=None,
        kv_cache_dtype=torch.float64,
        kv_cache_dim=layer.kv_lora_rank + layer.qk_rope_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        qk_nope_head_dim=layer.qk_nope_head_dim,
        _arange_buf=torch.arange(64, dtype=torch.int32),
        _is_in_breakable_cuda_graph=lambda: False,
        _is_in_tc_piecewise_cuda_graph=lambda: False,
        _get_device_sm=lambda: 100,
        _is_blackwell=lambda: True,
        _multi_ctas_kv_counter_for=lambda rows: None,
        _resolve_kpool_tail_backend=lambda _, implementation: implementation,
        _check_kpool_tail_backend=lambda *_: None,
        _memory_saver_adapter=SimpleNamespace(region=lambda **_: torch.no_grad()),
        _ensure_multi_ctas_kv_counter_capacity=lambda rows: None,
        _fused_decode_metadata=kernels.fused_dsa_decode_metadata,
        _fused_verify_metadata=kernels.fused_dsa_target_verify_metadata,
        _fused_draft_extend_metadata=kernels.fused_dsa_draft_extend_metadata,
    )
    return backend


def dsa_server_batch(load: Load, batch: ForwardBatch) -> Any:
    return server_batch(
        load,
        batch,
        global_num_tokens_cpu=None,
        extend_num_tokens=sum(batch.extend_seq_lens_cpu or ()),
        attn_cp_metadata=None,
    )


def selections(batch: ForwardBatch, pool: KVPool, width: int, seed: int, packed: bool = False) -> Tensor:
    """Draw positions for each row, as many as fit or fewer, -1 anywhere; packed: only at the end."""
    generator = torch.Generator().manual_seed(seed)
    seen, _ = dsa_forward_metadata(batch, pool, torch.empty(0, 1), index_topk=2**20)
    rows = torch.full((len(seen), width), -1, dtype=torch.int32)
    for row, count in zip(rows, seen, strict=True):
        own = torch.randperm(count, generator=generator)[: int(torch.randint(width + 1, (), generator=generator))]
        at = torch.randperm(width, generator=generator)[: len(own)]
        row[torch.arange(len(own)) if packed else at] = own.to(torch.int32)
    return rows


def sglang_call(backend: Any, server: Any, query: Tensor, cache: Tensor, topk: Tensor) -> dict[str, Any]:
    """Run one layer of SGLang's own forward; return what FlashInfer's call is handed, and as ``returned`` the output."""
    calls: list[dict[str, Any]] = []

    def record(**arguments: Any) -> Any:
        calls.append({name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()})
        out = arguments["query"][..., : LAYER.kv_lora_rank] + 1
        return (out, arguments["lse"]) if arguments.get("return_lse") else out

    flashinfer = ModuleType("flashinfer")
    flashinfer.decode = ModuleType("flashinfer.decode")  # type: ignore[attr-defined]
    flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla = record  # type: ignore[attr-defined]
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda _: cache.flatten(0, 1))
    layer = SimpleNamespace(
        tp_q_head_num=HEADS,
        head_dim=query.shape[-1],
        scaling=LAYER.softmax_scale,
        layer_id=0,
        is_cross_attention=False,
        k_scale_float=None,
    )
    forward = backend.forward_decode if server.forward_mode.is_decode_or_idle() else backend.forward_extend
    modules = {"flashinfer": flashinfer, "flashinfer.decode": flashinfer.decode}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        returned = forward(query, None, None, layer, server, save_kv_cache=False, topk_indices=topk)
    (call,) = calls
    return call | {"returned": returned}


def hold_call(
    batch: ForwardBatch, pool: KVPool, metadata: DSAMetadata, backend: Any, server: Any, topk: Tensor, layer: MLALayer
) -> None:
    """Compare the lab's call with SGLang's: each argument, and what becomes of padding's output."""
    dim = layer.kv_lora_rank + layer.qk_rope_head_dim
    query = torch.randn(batch.num_tokens, HEADS, dim, dtype=torch.float64)
    cache = pool.new_latent_cache(dim, torch.float64)
    theirs = sglang_call(backend, server, query, cache.storage, topk)
    noted = NotedCalls()
    out = torch.full((batch.num_tokens, HEADS, layer.kv_lora_rank), 9.0, dtype=torch.float64)
    DSABackend(noted).prepare_attention(batch, metadata, layer, query, cache, out=out, topk_indices=topk)()
    ((_, ours),) = noted.calls
    hold_arguments(ours, theirs)
    rows = len(ours["query"])
    assert not out[rows:].any()
    assert not theirs["returned"][rows:].any()


def hold_arguments(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    tensors = ("query", "kv_cache", "block_tables", "seq_lens", "sparse_mla_top_k_lens")
    sizes = ("max_seq_len", "sparse_mla_top_k", "qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim")
    for name in (*tensors, *sizes, "bmm1_scale"):
        assert is_same(ours.get(name), theirs.get(name)), name


MODES = [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2, *EXTENDS]


def engine_case(case: Case) -> Case:
    return with_drafts(replace(of_mla(replace(case, page_size=64)), num_padding_rows=0), DRAFT)


DRAWN = drawn_cases(MODES).filter(lambda case: case.total_lens).map(engine_case)


@given(case=DRAWN, topk=st.sampled_from([5, 8, 64]), group=st.sampled_from([1, 4]), rope=st.sampled_from([0, 4]))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_eager_passes(sglang: Load, case: Case, topk: int, group: int, rope: int) -> None:
    batch, pool = build(case)
    indexer, layer = Indexer(topk, group), MLALayer(0.4, kv_lora_rank=8, qk_rope_head_dim=rope, qk_nope_head_dim=6)
    backend, server = new_backend(sglang, pool, indexer, layer), dsa_server_batch(sglang, batch)
    backend.init_forward_metadata(server)
    metadata = build_dsa_metadata(batch, pool, indexer)
    selected = selections(batch, pool, topk + group - 1, case.seed, packed=rope == 0)
    hold_call(batch, pool, metadata, backend, server, selected, layer)


def test_a_decode_that_padding_outgrew(sglang: Load) -> None:
    """Two requests are padded to five after the metadata was built; the indexer selects for some of them."""
    case = Case(
        ForwardMode.DECODE, (130, 9), page_size=64, max_context_len=200, sliding_window=False, host_seq_lens=True
    )
    batch, pool = build(case)
    backend, indexer = new_backend(sglang, pool, Indexer(6)), Indexer(6)
    backend.init_forward_metadata(dsa_server_batch(sglang, batch))
    metadata, padded = build_dsa_metadata(batch, pool, indexer), pad_requests(batch, 5)
    topk = selections(batch, pool, 6, seed=0)
    hold_call(padded, pool, metadata, backend, dsa_server_batch(sglang, padded), topk, LAYER)


@pytest.mark.parametrize("rope", [0, 4])
@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        (ForwardMode.DECODE, {"total_lens": (1, 2, 33, 130)}),  # a row that one rank alone has entries of
        (ForwardMode.TARGET_VERIFY, {"total_lens": (5, 70), "new": DRAFT}),
        (ForwardMode.EXTEND, {"total_lens": (5, 70), "new_lens": (3, 6)}),
    ],
)
def test_each_ranks_call_with_context_parallelism(
    sglang: Load, mode: ForwardMode, fields: dict[str, Any], rope: int
) -> None:
    """Ranks of decode context parallelism see their own entries; a pool has pages of all ranks' tokens."""
    size, layer = 2, MLALayer(0.4, kv_lora_rank=8, qk_rope_head_dim=rope, qk_nope_head_dim=6)
    pages: dict[str, Any] = {"page_size": 64 * size, "max_context_len": 200, "sliding_window": False}
    batch, pool = build(Case(mode, **fields, **pages, host_seq_lens=True))
    dim, indexer = layer.kv_lora_rank + rope, Indexer(8)
    query = torch.randn(batch.num_tokens, HEADS, dim, dtype=torch.float64)
    cache = pool.new_sharded_latent_cache(dim, torch.float64, size)
    topk = selections(batch, pool, 8, 0, packed=rope == 0)
    ours, out = NotedCalls(SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=_with_lse)), torch.zeros_like(query)
    lab = DSABackend(ours, indexer, dcp_size=size)
    metadata = lab.build_metadata(batch, pool)
    lab.prepare_attention(batch, metadata, layer, query, cache, out=out[..., : layer.kv_lora_rank], topk_indices=topk)()
    for rank in range(size):
        backend, server = new_backend(sglang, pool, indexer, layer), dsa_server_batch(sglang, batch)
        backend.init_forward_metadata(server)
        vars(backend).update(
            dcp_size=size,
            dcp_rank=rank,
            physical_page_size=64,
            workspace_buffer=SimpleNamespace(numel=lambda: 2**30, element_size=lambda: 1),  # for all rows at once
            _dcp_page_table_cache=sglang(f"{DSA}.dsa_dcp").DcpPageTableCache(),
            get_device_int32_arange=lambda count: torch.arange(count, dtype=torch.int32),
        )
        theirs = sglang_call(backend, server, query, cache.storage[rank], topk)
        hold_arguments(ours.calls[rank][1], theirs)


def _with_lse(**arguments: Any) -> tuple[Tensor, Tensor]:
    query = arguments["query"]
    return query[..., : LAYER.kv_lora_rank] + 1, torch.zeros(query.shape[:-1])


GRAPH_MODES = [
    GraphMode(ForwardMode.DECODE),
    GraphMode.draft_decode(1),
    GraphMode(ForwardMode.TARGET_VERIFY, DRAFT),
    GraphMode(ForwardMode.DRAFT_EXTEND_V2, DRAFT),
]


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=str)
def test_replays(sglang: Load, mode: GraphMode, is_fused: bool) -> None:
    """Batches that shrink and grow, padded to the captured size: lengths of all rows, and places that they may select.

    With a fused top-k, a decode without speculation has pages alone.
    """
    size, indexer = 4, Indexer(70)
    first, pool = build(graph_case(mode, (190, 64, 135, 70), page_size=64, max_context_len=200, sliding_window=False))
    runner = GraphRunner(DSABackend(indexer=indexer), mode, pool, (size,), lambda *_: lambda: None)
    captured = runner.captured[size]
    backend = new_backend(sglang, pool, indexer)
    backend.use_fused_topk = is_fused
    backend.dsa_topk_backend = SimpleNamespace(should_use_topk_v2=lambda: is_fused)
    if is_fused and mode == GraphMode(ForwardMode.DECODE):
        backend.speculative_num_draft_tokens = None
    backend.init_cuda_graph_state(size, size * mode.num_tokens_per_req)
    backend.init_forward_metadata_out_graph(dsa_server_batch(sglang, captured.view), in_capture=True)
    rows = first.req_pool_indices.tolist()
    every = ((190, 64, 135, 70), (65, 5), (66, 67, 8), (129,))
    for totals, admitted in zip(every, (rows, rows[::-1], rows[1:], rows), strict=True):
        batch, _ = build(graph_case(mode, totals, page_size=64, max_context_len=200, sliding_window=False))
        batch = replace(batch, req_pool_indices=torch.tensor(admitted[: len(totals)]))
        runner.replay(batch)
        backend.init_forward_metadata_out_graph(dsa_server_batch(sglang, captured.view))
        ours, theirs = captured.metadata, backend.forward_metadata
        is_decode = mode.forward_mode is ForwardMode.DECODE
        lens = theirs.cache_seqlens_int32 if is_decode else theirs.dsa_cache_seqlens_int32
        assert (ours.seq_lens.dtype, ours.seq_lens.tolist()) == (lens.dtype, lens.tolist())
        assert ours.max_seq_len == theirs.max_seq_len_k
        for row, seen in enumerate((lens if is_decode else theirs.dsa_seqlens_expanded).tolist()):
            places = ours.page_table_1[row, :seen]
            assert (places[::64] // 64).tolist() == theirs.real_page_table[row, : -(-seen // 64)].tolist()
            if theirs.page_table_1 is not None:
                assert places.tolist() == theirs.page_table_1[row, :seen].tolist()
        assert (theirs.page_table_1 is None) == (is_fused and mode == GraphMode(ForwardMode.DECODE))
