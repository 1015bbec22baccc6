"""Dtypes and scales of the calls over quantised caches, against those that SGLang's own backend hands FlashInfer."""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.metadata import ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.engine.kv_cache import NVFP4KVCache
from lab.metadata.mha.calls import AttentionLayer, attention_call, call_arguments, plan_calls
from lab.metadata.mha.quantised import CallDtypes, call_dtypes
from tests.metadata.batches import Case, build
from tests.metadata.sglang.mha import BACKEND, NAMES, REAL, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_modules

Load = Callable[[str], ModuleType]
BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM = 4, 2, 64
CASES = {
    ForwardMode.DECODE: Case(ForwardMode.DECODE, (17, 32), sliding_window=False),
    ForwardMode.TARGET_VERIFY: Case(ForwardMode.TARGET_VERIFY, (17, 32), new=4, sliding_window=False),
    ForwardMode.DRAFT_EXTEND_V2: Case(ForwardMode.DRAFT_EXTEND_V2, (17, 32), new_lens=(4, 4), sliding_window=False),
    ForwardMode.EXTEND: Case(ForwardMode.EXTEND, (17, 32), new_lens=(9, 3), sliding_window=False),
}


def fused_write(q: Tensor | None, **_: object) -> Tensor | None:
    return None if q is None else q.to(E4M3)


@pytest.fixture(scope="module")
def sglang() -> Iterator[Load]:
    names = NAMES | {
        "sglang.kernels.ops.attention.utils.canonicalize_stride": lambda view: view,
        "sglang.kernels.ops.kvcache.fused_fp8_qkv_kv_cache.fused_fp8_qkv_kv_cache": fused_write,
        "sglang.srt.environ.envs": SimpleNamespace(
            SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: None),
            SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: None),
        ),
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc": SimpleNamespace(for_batch=lambda *_, **__: None),
    }
    with sglang_modules(*REAL, "sglang.srt.mem_cache.layout.paged_view", names=names) as load:
        yield load


@pytest.mark.parametrize("scales", [(0.25, 0.0625), (0.0, -1.0)], ids=str)
@pytest.mark.parametrize("saves", [True, False], ids=["saves K and V", "K and V are there"])
@pytest.mark.parametrize("trtllm_gen", [True, False], ids=["trtllm-gen", "XQA and fmha_v2"])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, NVFP4], ids=str)
@pytest.mark.parametrize("mode", CASES, ids=repr)
def test_what_a_call_is_handed(
    sglang: Load, mode: ForwardMode, kv_dtype: torch.dtype, trtllm_gen: bool, saves: bool, scales: tuple[float, float]
) -> None:
    batch, pool = build(CASES[mode])
    call = attention_call(mode)
    if kv_dtype == NVFP4 and not trtllm_gen and mode is not ForwardMode.DECODE:
        pytest.skip("SGLang refuses an extend when it starts; the others have their own test")
    width = DIM // 2 if kv_dtype == NVFP4 else DIM
    cache = pool.new_cache(KV_HEADS, width, kv_dtype, KVLayout.NHD)
    if kv_dtype == NVFP4:
        cache = NVFP4KVCache.over(cache, trtllm_gen=trtllm_gen)
    dtypes = call_dtypes(call, BF16, kv_dtype, trtllm_gen=trtllm_gen)
    query = torch.zeros(batch.num_tokens, HEADS, DIM, dtype=BF16)
    (planned,) = plan_calls(batch)
    layer = AttentionLayer(0.5, *scales)
    ours = call_arguments(
        planned, batch, build_mha_metadata(batch, pool), layer, query, cache, max_context_len=pool.max_context_len
    )
    theirs = handed(sglang, batch, pool, cache, query, trtllm_gen=trtllm_gen, saves=saves, scales=scales)
    assert CallDtypes(theirs["query"].dtype, out_dtype(theirs)) == dtypes
    for name in ("bmm1_scale", "bmm2_scale", "q_len_per_req", "max_q_len"):
        assert ours.get(name, 1) == theirs.get(name, 1), name
    assert (theirs.get("kv_cache_sf") is None) == ("kv_cache_sf" not in ours)


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2], ids=repr)
def test_a_verify_on_xqa_takes_packed_nvfp4_for_whole_heads(sglang: Load, mode: ForwardMode) -> None:
    """As observed: SGLang reads an NVFP4 cache on XQA in plain decodes alone, although nothing refuses to draft there."""
    batch, pool = build(CASES[mode])
    cache = NVFP4KVCache.over(pool.new_cache(KV_HEADS, DIM // 2, NVFP4, KVLayout.NHD), trtllm_gen=False)
    query = torch.zeros(batch.num_tokens, HEADS, DIM, dtype=BF16)
    with pytest.raises(RuntimeError, match="is invalid for input of size"):
        handed(sglang, batch, pool, cache, query, trtllm_gen=False, saves=True, scales=(0.25, 0.0625))


def out_dtype(arguments: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = arguments["out_dtype"] if arguments["out"] is None else arguments["out"].dtype
    return dtype


def handed(
    load: Load, batch: Any, pool: Any, cache: Any, query: Tensor, *, trtllm_gen: bool, saves: bool, scales: Any
) -> dict[str, Any]:
    """Run SGLang's backend on a batch, and return the keyword arguments of its one call."""
    calls: list[dict[str, Any]] = []

    def called(*positional: Any, **arguments: Any) -> Tensor:
        query = arguments["query"] if "query" in arguments else positional[0][0]
        calls.append({"query": query, "out": None, **arguments})
        return query.to(BF16)

    load(BACKEND).flashinfer = SimpleNamespace(  # type: ignore[attr-defined]
        decode=SimpleNamespace(trtllm_batch_decode_with_kv_cache=called),
        prefill=SimpleNamespace(trtllm_batch_context_with_kv_cache=called, trtllm_fmha_v2_prefill=called),
    )
    kv_dtype = cache.storage.dtype
    is_nvfp4 = kv_dtype == NVFP4
    native = is_nvfp4 and trtllm_gen
    sides = [side.reshape(-1, *side.shape[2:]) for side in (cache.k_cache, cache.v_cache)]
    factors = [torch.zeros(len(sides[0]), KV_HEADS, DIM // 16, dtype=torch.uint8).view(E4M3) for _ in sides]
    load(BACKEND)._trtllm_native_nvfp4_kv_buffer = lambda *_: (*sides, *factors)  # type: ignore[attr-defined]
    backend = new_backend(
        load,
        pool,
        is_xqa_impl=not trtllm_gen,
        use_fmha_v2=not trtllm_gen,
        data_type=kv_dtype,
        q_data_type=BF16,
        is_nvfp4_kvcache=is_nvfp4,
        uses_trtllm_gen_native_fp4=native,
        prefill_uses_native_fp4=native,
        decode_uses_native_fp4=is_nvfp4,
        decode_seq_len_splits=1,
        _kv_write_scales=lambda layer: (None, None),
        workspace_buffer=None,
        fmha_v2_workspace_buffer=None,
        _nvfp4_fp8_output=torch.zeros(64, HEADS, DIM).to(E4M3) if native else None,
        _multi_ctas_kv_counter_buffer=None,
        _default_kv_scale=torch.ones(1),
        _xqa_spec_dec_mask=None,
        _fmha_v2_paged_inputs=lambda q, **_: ((q,), None),
        kv_cache_quant_method=SimpleNamespace(get_bmm_scales=lambda layer_id: scales),
        token_to_kv_pool=SimpleNamespace(
            get_kv_buffer=lambda layer_id: sides,
            get_raw_kv_buffer=lambda layer_id: (*sides, *factors),
            set_kv_buffer=lambda *_: None,
        ),
    )
    layer = SimpleNamespace(
        layer_id=0, head_dim=DIM, scaling=0.5, sliding_window_size=-1, tp_q_head_num=HEADS, attn_type="decoder"
    )
    vars(layer).update(tp_k_head_num=KV_HEADS, tp_v_head_num=KV_HEADS, k_scale=None, v_scale=None)
    vars(layer).update(k_scale_float=scales[0], v_scale_float=scales[1])
    given = server_batch(load, batch, _attn_output=None)
    backend.init_forward_metadata(given)
    new = torch.zeros(batch.num_tokens, KV_HEADS, DIM, dtype=BF16)
    decodes = batch.forward_mode is ForwardMode.DECODE
    run = backend.forward_decode if decodes else backend.forward_extend
    run(query.flatten(1), new, new, layer, given, save_kv_cache=saves)
    (only,) = calls
    return only
