"""Dtypes and scales of the calls over quantised caches, against those that SGLang's own backend hands FlashInfer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4
from lab.metadata import ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache
from lab.metadata.mha.backend import AttentionLayer, CallDtypes, attention_call, call_arguments, call_dtypes, plan_calls
from tests.metadata.batches import Case, build
from tests.metadata.sglang.mha import BACKEND, NAMES, REAL, Load, calls_of, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

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


sglang = sglang_fixture(
    *REAL,
    names=NAMES
    | {
        "sglang.kernels.ops.kvcache.fused_fp8_qkv_kv_cache.fused_fp8_qkv_kv_cache": fused_write,
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc": SimpleNamespace(for_batch=lambda *_, **__: None),
    },
)


def cache_of(pool: Any, kv_dtype: torch.dtype, trtllm_gen: bool) -> PagedKVCache:
    cache = pool.new_cache(KV_HEADS, DIM // 2 if kv_dtype == NVFP4 else DIM, kv_dtype, KVLayout.NHD)
    return NVFP4KVCache.over(cache, trtllm_gen=trtllm_gen) if kv_dtype == NVFP4 else cache


@pytest.mark.parametrize("scales", [(0.25, 0.0625), (0.0, -1.0)], ids=str)
@pytest.mark.parametrize("saves", [True, False], ids=["saves K and V", "K and V are there"])
@pytest.mark.parametrize("trtllm_gen", [True, False], ids=["trtllm-gen", "XQA and fmha_v2"])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, NVFP4], ids=str)
@pytest.mark.parametrize("mode", CASES, ids=repr)
def test_what_a_call_is_handed(
    sglang: Load, mode: ForwardMode, kv_dtype: torch.dtype, trtllm_gen: bool, saves: bool, scales: tuple[float, float]
) -> None:
    batch, pool = build(CASES[mode])
    if kv_dtype == NVFP4 and not trtllm_gen and mode is not ForwardMode.DECODE:
        pytest.skip("SGLang refuses an extend when it starts; finding 8 has the others")
    cache, layer = cache_of(pool, kv_dtype, trtllm_gen), AttentionLayer(0.5, *scales)
    query, (planned,) = torch.zeros(batch.num_tokens, HEADS, DIM, dtype=BF16), plan_calls(batch)
    ours = call_arguments(
        planned, batch, build_mha_metadata(batch, pool), layer, query, cache, max_context_len=pool.max_context_len
    )
    theirs = handed(sglang, batch, pool, cache, layer, trtllm_gen=trtllm_gen, saves=saves)
    out_dtype = theirs["out_dtype"] if theirs.get("out") is None else theirs["out"].dtype
    expected = call_dtypes(attention_call(mode), BF16, kv_dtype, trtllm_gen=trtllm_gen)
    assert CallDtypes(theirs["query"].dtype, out_dtype) == expected
    for name in ("bmm1_scale", "bmm2_scale", "q_len_per_req", "max_q_len"):
        assert ours.get(name, 1) == theirs.get(name, 1), name
    assert (theirs.get("kv_cache_sf") is None) == ("kv_cache_sf" not in ours)


def handed(
    load: Load, batch: Any, pool: Any, cache: Any, layer: AttentionLayer, *, trtllm_gen: bool, saves: bool
) -> dict[str, Any]:
    """Run SGLang's backend on a batch of zeros, and return the keyword arguments of its one call."""
    is_nvfp4 = cache.storage.dtype == NVFP4
    native = is_nvfp4 and trtllm_gen
    sides = [side.reshape(-1, *side.shape[2:]) for side in (cache.k_cache, cache.v_cache)]
    factors = [torch.zeros(len(sides[0]), KV_HEADS, DIM // 16, dtype=torch.uint8).view(E4M3) for _ in sides]
    load(BACKEND)._trtllm_native_nvfp4_kv_buffer = lambda *_: (*sides, *factors)  # type: ignore[attr-defined]
    backend = new_backend(load, pool, is_xqa_impl=not trtllm_gen, use_fmha_v2=not trtllm_gen)
    server = server_batch(load, batch)
    backend.init_forward_metadata(server)
    (call,) = calls_of(
        load,
        backend,
        server,
        layer,
        torch.zeros(batch.num_tokens, HEADS, DIM, dtype=BF16),
        cache,
        new=torch.zeros(batch.num_tokens, KV_HEADS, DIM, dtype=BF16) if saves else None,
        is_nvfp4_kvcache=is_nvfp4,
        uses_trtllm_gen_native_fp4=native,
        prefill_uses_native_fp4=native,
        decode_uses_native_fp4=is_nvfp4,
        _kv_write_scales=lambda layer: (None, None),
        _nvfp4_fp8_output=torch.zeros(64, HEADS, DIM).to(E4M3) if native else None,
        _default_kv_scale=torch.ones(1),
        _fmha_v2_paged_inputs=lambda q, **_: ((q,), None),
        kv_cache_quant_method=SimpleNamespace(get_bmm_scales=lambda layer_id: (layer.k_scale, layer.v_scale)),
        token_to_kv_pool=SimpleNamespace(
            get_kv_buffer=lambda layer_id: sides,
            get_raw_kv_buffer=lambda layer_id: (*sides, *factors),
            set_kv_buffer=lambda *_: None,
        ),
    )
    return call[1]
