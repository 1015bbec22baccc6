"""The split of a mixed batch and the settings of an engine's calls, against SGLang's own forward passes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.calls.problem import E4M3, AttentionCall
from lab.metadata import ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.mha.calls import AttentionLayer, plan_calls
from lab.metadata.mha.quantised import call_dtypes
from lab.metadata.mha.settings import CallSettings, splits_mixed_tail
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import EXTENDS, Case, build, drawn_cases
from tests.metadata.sglang.mha import NAMES, REAL, assert_same, calls_of, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_modules

Load = Callable[[str], ModuleType]
DECODE, PREFILL = 2.0, 3.0  # thresholds
ENVIRONMENT = SimpleNamespace(
    SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: DECODE),
    SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR=SimpleNamespace(get=lambda: PREFILL),
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, E4M3), (FP16, E4M3))  # of the model, and of the cache


@pytest.fixture(scope="module")
def sglang() -> Iterator[Load]:
    with sglang_modules(*REAL, names=NAMES | {"sglang.srt.environ.envs": ENVIRONMENT}) as load:
        yield load


@IN_INTERPRETER
@given(
    case=drawn_cases([*EXTENDS, ForwardMode.DECODE]).filter(lambda case: bool(case.total_lens)),
    dtypes=st.sampled_from(DTYPES),
    is_decoder=st.booleans(),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_calls_and_their_settings(
    sglang: Load, case: Case, dtypes: tuple[torch.dtype, torch.dtype], is_decoder: bool
) -> None:
    """On trtllm-gen: which requests go to which call, by dtypes and layer, and what an engine sets in each."""
    (batch, pool), (dtype, kv_dtype) = build(case), dtypes
    counters, query = torch.zeros(64, dtype=torch.uint8), torch.zeros(batch.num_tokens, 4, 8, dtype=dtype)
    cache = pool.new_cache(2, 8, kv_dtype, KVLayout.NHD)
    backend = new_backend(sglang, pool, speculative_step_id=case.new - 1)
    server = server_batch(sglang, batch)
    backend.init_forward_metadata(server)
    theirs = calls_of(
        sglang,
        backend,
        server,
        AttentionLayer(0.25),
        query,
        cache,
        "DECODER" if is_decoder else "ENCODER_ONLY",
        _multi_ctas_kv_counter_buffer=counters,
    )
    given_query = call_dtypes(AttentionCall.CONTEXT, dtype, kv_dtype, trtllm_gen=True).query
    plan = plan_calls(batch, None, splits_mixed_tail(given_query, kv_dtype, is_decoder=is_decoder))
    lengths = build_mha_metadata(batch, pool).cache_seqlens_int32
    ours = CallSettings(counters, skip_softmax_decode=DECODE, skip_softmax_prefill=PREFILL)
    assert [planned.call.value for planned in plan] == [name for name, _ in theirs]
    for planned, (_, arguments) in zip(plan, theirs, strict=True):
        requests = slice(planned.first_request, planned.first_request + planned.num_requests)
        assert arguments["seq_lens"].tolist() == lengths[requests].tolist()
        assert arguments["query"].dtype == given_query
        set_by_us: dict[str, Any] = ours.arguments(planned.call)
        assert {name: arguments.get(name) for name in set_by_us} == set_by_us
        assert ("multi_ctas_kv_counter_buffer" in arguments) == ("multi_ctas_kv_counter_buffer" in set_by_us)


@IN_INTERPRETER
@given(case=drawn_cases(EXTENDS).filter(lambda case: bool(case.total_lens)))
@settings(deadline=None, derandomize=True, max_examples=20)
def test_no_list_of_prefixes_is_no_prefix(sglang: Load, case: Case) -> None:
    batch, pool = build(replace(case, new_lens=case.total_lens))
    unlisted = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    backend = new_backend(sglang, pool)
    backend.init_forward_metadata(server_batch(sglang, unlisted))
    assert_same(build_mha_metadata(unlisted, pool), backend.forward_metadata, pool.page_size)
