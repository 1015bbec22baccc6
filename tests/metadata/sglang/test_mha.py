"""MHA metadata against SGLang's own class, on random batches: no number here is the lab's."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.calls.problem import E4M3
from lab.metadata import ForwardBatch, ForwardMode, KVLayout, KVPool, build_mha_metadata
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mha.backend import (
    AttentionLayer,
    attention_call,
    call_arguments,
    call_dtypes,
    plan_calls,
    splits_mixed_tail,
)
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import EXTENDS, Case, build, drawn_cases
from tests.metadata.sglang import mha
from tests.metadata.sglang.mha import Load
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = ((BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, E4M3), (FP16, E4M3))  # of the model, and of the cache
CASES = drawn_cases().filter(lambda case: case.mode is not ForwardMode.DRAFT_EXTEND and bool(case.total_lens))

sglang = sglang_fixture(*mha.REAL, names=mha.NAMES | mha.environment(mha.SETTINGS))


def is_taken(case: Case) -> bool:
    """Return True if the decode call gets whole requests of equal widths, as the lab asks; other calls take any rows."""
    takes_any = case.mode.is_prefill or case.mode is ForwardMode.RAGGED_VERIFY
    return takes_any or (case.num_padding_rows == 0 and len(set(case.new_lens)) <= 1)


def build_both(
    sglang: Load, case: Case, on_host: bool, encoder_only: bool = False
) -> tuple[ForwardBatch, KVPool, Any, Any]:
    """Return the lab's batch and pool, SGLang's batch, and its backend with the metadata of the pass.

    Args:
        sglang: the fixture.
        case: of one mode.
        on_host: the lengths of a ragged verification are known there, and an extend without a prefix lists its prefixes.
        encoder_only: the model has encoder-only layers.
    """
    batch, pool = build(case)
    if case.mode is ForwardMode.RAGGED_VERIFY and not on_host:
        batch = replace(batch, extend_seq_lens_cpu=None)
    if case.mode in EXTENDS and case.new_lens == case.total_lens and not on_host:
        batch = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    width = None if batch.spec_info is None else batch.spec_info.num_draft_tokens
    backend = mha.new_backend(
        sglang,
        pool,
        speculative_step_id=case.new - 1,
        speculative_num_draft_tokens=width,
        expand_encoder_only_verify=encoder_only,
    )
    server = mha.server_batch(sglang, batch)
    backend.init_forward_metadata(server)
    return batch, pool, server, backend


@given(case=CASES, on_host=st.booleans(), encoder_only=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=80)
def test_eager_passes(sglang: Load, case: Case, on_host: bool, encoder_only: bool) -> None:
    """Every mode of 0.5.23, with requests; SGLang launches nothing for a batch of none."""
    batch, pool, _, backend = build_both(sglang, case, on_host, encoder_only)
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=encoder_only)
    mha.assert_same(metadata, backend.forward_metadata, pool.page_size)


@given(
    case=CASES.filter(is_taken),
    on_host=st.booleans(),
    kind=st.sampled_from(["full", "window", "encoder", "encoder window"]),
    dtypes=st.sampled_from(DTYPES),
)
@settings(deadline=None, derandomize=True, max_examples=140)
def test_the_calls_of_a_layer(
    sglang: Load, case: Case, on_host: bool, kind: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """On trtllm-gen: calls, rows, tables and settings. A prefill's padding rows are in its call.

    Whether a tail of decodes is split off depends on dtypes and layer.
    """
    takes_encoders = case.mode.is_prefill or case.mode in (
        ForwardMode.TARGET_VERIFY,
        ForwardMode.DECODE,
        ForwardMode.IDLE,
    )
    encoder_only, is_window = "encoder" in kind and takes_encoders, "window" in kind
    batch, pool, server, backend = build_both(sglang, case, on_host, encoder_only)
    layer = AttentionLayer(
        0.25,
        window_left=20 if is_window else -1,
        reads_swa_pool=is_window and case.sliding_window and not encoder_only,
        encoder_only=encoder_only,
    )
    dtype, kv_dtype = dtypes
    cache = pool.new_cache(2, 8, kv_dtype, KVLayout.NHD, sliding_window=layer.reads_swa_pool)
    query = torch.zeros(batch.num_tokens, 4, 8, dtype=dtype)
    query[:, 0, 0] = torch.arange(len(query))
    metadata = build_mha_metadata(batch, pool, expand_encoder_only_verify=encoder_only)
    cast = call_dtypes(attention_call(case.mode), dtype, kv_dtype, trtllm_gen=True).query
    split = splits_mixed_tail(cast, kv_dtype, is_decoder=not encoder_only)
    ours = [
        (
            each.call.value,
            call_arguments(each, batch, metadata, layer, query.to(cast), cache, pool.max_context_len)
            | mha.SETTINGS.arguments(each.call),
        )
        for each in plan_calls(batch, split_mixed_tail=split, with_padding_rows=True)
    ]
    attn_type = "ENCODER_ONLY" if encoder_only else "DECODER"
    mha.assert_same_calls(ours, mha.calls_of(sglang, backend, server, layer, query, cache, attn_type))


@given(case=drawn_cases([ForwardMode.TARGET_VERIFY]).filter(lambda case: bool(case.total_lens)), more=st.integers(0, 2))
@settings(deadline=None, derandomize=True, max_examples=30)
def test_an_encoder_only_verification_in_a_graph(sglang: Load, case: Case, more: int) -> None:
    """A captured size's rows as requests, its padding's too."""
    batch, pool = build(case)
    size, width = batch.batch_size + more, case.new
    ours, view = mha.replayed(
        GraphMode(ForwardMode.TARGET_VERIFY, width), pool, batch, size, expand_encoder_only_verify=True
    )
    backend = mha.new_backend(sglang, pool, speculative_num_draft_tokens=width, expand_encoder_only_verify=True)
    server = mha.server_batch(sglang, view)
    theirs = mha.captured(backend, server, num_requests=size, num_tokens=size * width)
    mha.assert_same(ours, theirs, pool.page_size)


RAGGED = drawn_cases([ForwardMode.RAGGED_VERIFY]).filter(lambda case: bool(case.total_lens))


@given(case=RAGGED, padding_requests=st.integers(0, 3), on_host=st.booleans())
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_ragged_verification_in_a_graph(sglang: Load, case: Case, padding_requests: int, on_host: bool) -> None:
    """Requests have SGLang's rows, keys and pages. The rows that they leave are nobody's, where SGLang's padding takes them.

    Without padding the last request takes them, and as many keys more, which leaves its own rows what they are. So a request
    of SGLang's has more rows than the max_q_len that it hands over, d.
    """
    case = replace(case, num_padding_rows=0)
    batch, pool, _, _ = build_both(sglang, case, on_host)
    n = batch.batch_size
    size, width = n + padding_requests, case.new
    mine, view = mha.replayed(GraphMode(ForwardMode.RAGGED_VERIFY, width), pool, batch, size)
    backend = mha.new_backend(sglang, pool, speculative_num_draft_tokens=width)
    server = mha.server_batch(sglang, replace(batch, num_tokens=size * width), batch_size=size)
    server.seq_lens, server.req_pool_indices = view.seq_lens, view.req_pool_indices
    theirs = mha.captured(backend, server, num_requests=size, num_tokens=size * width)

    left = size * width - int(batch.extend_seq_lens.sum())
    at_last = torch.zeros(n, dtype=torch.int32)
    at_last[-1] = 0 if padding_requests else left
    assert theirs.max_seq_len_q == mine.max_seq_len_q == width
    assert torch.equal(theirs.cache_seqlens_int32[:n], mine.cache_seqlens_int32[:n] + at_last)
    assert torch.equal(theirs.cu_seqlens_q[1 : n + 1], mine.cu_seqlens_q[1 : n + 1] + at_last)
    assert int(theirs.cu_seqlens_q[-1]) == size * width
    lengths = mine.cache_seqlens_int32[:n].tolist()
    for name in ("page_table", "swa_page_table"):
        tables = (getattr(each, name) for each in (mine, theirs))
        mha.assert_same_live_pages(
            name, *(None if each is None else each[:n] for each in tables), lengths, pool.page_size
        )
    if theirs.swa_out_cache_loc is not None:
        assert torch.equal(theirs.swa_out_cache_loc, mine.swa_out_cache_loc)
