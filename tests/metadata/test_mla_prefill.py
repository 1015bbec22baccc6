"""MLA over quantised caches, and the chunks of a prefill's cached prefixes."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lab.references
from lab.calls.problem import E4M3
from lab.metadata import ForwardBatch, ForwardMode, KVPool, build_mla_decode_metadata, build_mla_prefill_metadata
from lab.metadata.mla.backend import (
    MLALayer,
    TRTLLMMLABackend,
    merge_by_lse,
    mla_call_arguments,
    mla_query,
    mla_query_dtype,
)
from lab.metadata.mla.prefill import (
    plan_prefix_chunks,
    prepare_mla_prefill,
    prepare_prefix_chunk,
    quantised_prefill,
    ragged_context_arguments,
)
from lab.references.forward_metadata import mla_prefix_chunks
from tests.cases import Batch, expected
from tests.metadata.batches import EXTENDS, Case, build, of_mla
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.noted import NotedCalls

BF16 = torch.bfloat16
LAYER = MLALayer(0.25, 0.5, v_scale=2.0, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=20, v_head_dim=24)


def test_the_querys_dtype() -> None:
    assert mla_query_dtype(BF16, E4M3) == E4M3
    assert mla_query_dtype(BF16, BF16) == BF16
    with pytest.raises(ValueError, match="no MLA kernel reads a cache of 4 bits"):
        mla_query_dtype(BF16, torch.uint8)


@pytest.mark.parametrize(("kv_dtype", "scale"), [(E4M3, 0.5), (BF16, 1.0)])
def test_the_scale_counts_over_e4m3_alone(kv_dtype: torch.dtype, scale: float) -> None:
    batch, pool = build(of_mla(Case(ForwardMode.DECODE, (40, 33))))
    metadata, query = build_mla_decode_metadata(batch, pool), torch.zeros(2, 3, 80, dtype=BF16)
    arguments = mla_call_arguments(
        batch, metadata, LAYER, mla_query(metadata, query), pool.new_latent_cache(80, kv_dtype)
    )
    assert (arguments["bmm1_scale"], arguments["bmm2_scale"]) == (0.25 * scale, scale)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.RAGGED_VERIFY])
def test_the_backend_casts_the_query_in_each_call(mode: ForwardMode) -> None:
    """Rows that a ragged verification pads are cast before; the query itself stays as it is, and may change."""
    ragged = mode is ForwardMode.RAGGED_VERIFY
    batch, pool = build(of_mla(Case(mode, (40, 33), (1, 3) if ragged else (), 4 if ragged else 0)))
    query = torch.full((batch.num_tokens, 3, 80), 0.3, dtype=BF16)
    noted = NotedCalls(fill=0.0)
    attend = TRTLLMMLABackend(noted).prepare_attention(
        batch,
        build_mla_decode_metadata(batch, pool),
        LAYER,
        query,
        pool.new_latent_cache(80, E4M3),
        out=torch.empty(batch.num_tokens, 3, 64, dtype=BF16),
    )
    attend()
    query.fill_(300.0)
    attend()
    queries = [arguments["query"] for _, arguments in noted.calls]
    assert [query.dtype for query in queries] == [E4M3, E4M3]
    assert [query.float().max().item() for query in queries] == [0.3125, 288.0]
    assert query.dtype == BF16


def test_a_prefill_over_e4m3() -> None:
    batch, pool = build(of_mla(Case(ForwardMode.EXTEND, (5, 9), (5, 9))))
    draw = partial(torch.randn, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    query, key, value = draw(14, 2, 36), draw(14, 2, 36), draw(14, 2, 24)
    metadata = build_mla_prefill_metadata(batch, pool)
    cast = quantised_prefill(LAYER, query, key, value)
    assert {side.dtype for side in cast} == {E4M3}
    arguments = ragged_context_arguments(batch, metadata, LAYER, *cast)
    assert (arguments["bmm1_scale"], arguments["bmm2_scale"]) == (0.125, 2.0)
    plain = ragged_context_arguments(batch, metadata, LAYER, query, key, value)
    assert (plain["bmm1_scale"], plain["bmm2_scale"]) == (0.25, 1.0)
    got = prepare_mla_prefill(lab.references, batch, metadata, LAYER, *cast)()
    exact = prepare_mla_prefill(lab.references, batch, metadata, LAYER, query, key, value)()
    torch.testing.assert_close(got.float(), exact, rtol=0.15, atol=0.15)
    assert quantised_prefill(LAYER, query, key * 1e6, value)[1].float().abs().max() == 448.0


HEADS, QK, V = 2, 6, 4


def prefill(prefixes: list[int], news: list[int], mode: ForwardMode = EXTENDS[0]) -> tuple[ForwardBatch, KVPool]:
    totals = tuple(prefix + new for prefix, new in zip(prefixes, news, strict=True))
    return build(Case(mode, totals, tuple(news), page_size=32, max_context_len=200, sliding_window=False))


@given(
    prefixes=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    each=st.integers(1, 200),
    extra=st.integers(0, 3),
    mode=st.sampled_from(EXTENDS),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_cached_token_is_in_one_chunk(prefixes: list[int], each: int, extra: int, mode: ForwardMode) -> None:
    batch, pool = prefill(prefixes, [3] * len(prefixes), mode)
    capacity = each * len(prefixes) + min(extra, len(prefixes) - 1)
    with ForbidHostReads():
        chunks = plan_prefix_chunks(batch, pool, capacity)
    for chunk, requests in zip(chunks, mla_prefix_chunks(batch, pool, capacity), strict=True):
        assert chunk.seq_lens.tolist() == chunk.cum_seq_lens.diff().tolist() == [len(slots) for slots in requests]
        assert chunk.cum_seq_lens[0] == 0
        assert chunk.kv_indices.tolist() == [slot for slots in requests for slot in slots]
        assert chunk.max_seq_len == max(map(len, requests))
        assert chunk.has_empty == (min(map(len, requests)) == 0)
        assert chunk.seq_lens.dtype == chunk.cum_seq_lens.dtype == chunk.kv_indices.dtype == torch.int32


@pytest.mark.parametrize(
    ("prefixes", "capacity"), [([0, 0, 0], 30), ([30, 0, 8], 30), ([7, 41, 8], 9), ([5, 5, 5], 1000)]
)
def test_the_parts_together_are_attention_over_the_whole(prefixes: list[int], capacity: int) -> None:
    """New tokens see each other, and with a prefix the call returns the LSE to merge its chunks by; padding stays."""
    news = [3, 1, 5]
    batch, pool = prefill(prefixes, news)
    batch = replace(batch, num_tokens=11)
    layer = MLALayer(0.5, qk_nope_head_dim=QK - 2, qk_rope_head_dim=2, v_head_dim=V)
    generator = torch.Generator().manual_seed(capacity)
    query = torch.randn(11, HEADS, QK, generator=generator)
    slots = pool.num_pages * pool.page_size
    keys, values = (torch.randn(slots, HEADS, dim, generator=generator) for dim in (QK, V))
    metadata, new = build_mla_prefill_metadata(batch, pool), torch.nn.functional.pad(batch.out_cache_loc, (0, 2))
    arguments = ragged_context_arguments(batch, metadata, layer, query, keys[new], values[new])
    facts = [arguments[name] for name in ("max_q_len", "max_kv_len", "batch_size", "is_causal", "return_lse")]
    assert facts == [5, 5, 3, True, any(prefixes)]
    out = torch.full((11, HEADS, V), 7.0)
    result = prepare_mla_prefill(lab.references, batch, metadata, layer, query, keys[new], values[new], out=out)()
    assert isinstance(result, tuple) is any(prefixes)
    assert (out[9:] == 7.0).all()
    got, parts = out, [result]
    for chunk in plan_prefix_chunks(batch, pool, capacity):
        cached = chunk.kv_indices.long()
        call = prepare_prefix_chunk(lab.references, batch, metadata, chunk, layer, query, keys[cached], values[cached])
        parts.append(call())
    if any(prefixes):
        outs, lses = zip(*parts, strict=True)
        got = merge_by_lse(torch.stack(outs), torch.stack(lses))
    lens = map(sum, zip(prefixes, news, strict=True))
    seen = [pool.req_to_token[row, :length].long() for row, length in zip(batch.req_pool_indices, lens, strict=True)]
    whole = Batch([*query[:9].split(news)], [keys[each] for each in seen], [values[each] for each in seen])
    torch.testing.assert_close(got[:9].double(), expected(whole, bmm1_scale=0.5)[0], rtol=1e-4, atol=1e-5)


class StaleWhereEmpty:
    """The reference, and in rows without a key what an older call left, as trtllm-gen has it."""

    @staticmethod
    def trtllm_ragged_attention_deepseek(**arguments: Any) -> Any:
        out, lse = lab.references.trtllm_ragged_attention_deepseek(**arguments)
        empty = torch.repeat_interleave(arguments["seq_lens"] == 0, arguments["cum_seq_lens_q"].diff())
        return out.masked_fill(empty[:, None, None], 7.0), lse.masked_fill(empty[:, None], 7.0)


def test_rows_without_a_key_are_neutral_whatever_the_kernel_wrote() -> None:
    batch, pool = prefill([9, 0], [2, 3])
    (chunk,) = plan_prefix_chunks(batch, pool, 100)
    layer = MLALayer(0.5, qk_nope_head_dim=QK - 2, qk_rope_head_dim=2, v_head_dim=V)
    query, key, value = torch.ones(5, HEADS, QK), torch.ones(9, HEADS, QK), torch.ones(9, HEADS, V)
    metadata = build_mla_prefill_metadata(batch, pool)
    out, lse = prepare_prefix_chunk(StaleWhereEmpty, batch, metadata, chunk, layer, query, key, value)()
    assert (out[:2] == 1).all()
    assert lse[:2].isfinite().all()
    assert (out[2:] == 0).all()
    assert (lse[2:] == -torch.inf).all()


def test_what_is_no_chunk_is_refused() -> None:
    batch, pool = prefill([9, 1], [2, 3])
    for plan in (plan_prefix_chunks, mla_prefix_chunks):
        with pytest.raises(ValueError, match=r"capacity=1 has no token for each of (the )?2 requests"):
            plan(batch, pool, 1)
    with pytest.raises(ValueError, match="needs extend_prefix_lens_cpu"):
        plan_prefix_chunks(replace(batch, extend_prefix_lens_cpu=None), pool)
    (chunk,) = plan_prefix_chunks(batch, pool)
    layer = MLALayer(0.5, qk_nope_head_dim=QK - 2, qk_rope_head_dim=2, v_head_dim=V)
    query, few = torch.ones(5, HEADS, QK), torch.ones(9, HEADS, QK)
    with pytest.raises(ValueError, match=r"key has shape \[9, 2, 6\], expected \[at least 10"):
        prepare_prefix_chunk(
            lab.references, batch, build_mla_prefill_metadata(batch, pool), chunk, layer, query, few, few[..., :V]
        )
