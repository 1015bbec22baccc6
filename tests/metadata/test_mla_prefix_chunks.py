"""The chunks of an MLA prefill's cached prefixes: whose tokens each takes, and attention of all parts together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lab.references
from lab.metadata import ForwardBatch, ForwardMode, KVPool, build_mla_prefill_metadata
from lab.metadata.mla.calls import MLALayer, prepare_mla_prefill
from lab.metadata.mla.prefix_chunks import plan_prefix_chunks, prepare_prefix_chunk
from lab.metadata.mla.rows import merge_by_lse
from lab.references.forward_metadata import mla_prefix_chunks
from tests.metadata.batches import EXTENDS, Case, build
from tests.metadata.host_reads import ForbidHostReads

HEADS, QK, V = 2, 6, 4


def prefill(prefixes: list[int], news: list[int], mode: ForwardMode = EXTENDS[0]) -> tuple[ForwardBatch, KVPool]:
    totals = tuple(prefix + new for prefix, new in zip(prefixes, news, strict=True))
    return build(Case(mode, totals, tuple(news), page_size=32, max_context_len=200, sliding_window=False))


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
def test_chunks_by_hand(mode: ForwardMode) -> None:
    """Three requests share 12 tokens, so that a chunk takes four of each."""
    batch, pool = prefill([9, 0, 4], [1, 2, 3], mode)
    with ForbidHostReads():
        chunks = plan_prefix_chunks(batch, pool, 12)
    assert [chunk.seq_lens.tolist() for chunk in chunks] == [[4, 0, 4], [4, 0, 0], [1, 0, 0]]
    assert [chunk.cum_seq_lens.tolist() for chunk in chunks] == [[0, 4, 4, 8], [0, 4, 4, 4], [0, 1, 1, 1]]
    assert [(chunk.max_seq_len, chunk.has_empty) for chunk in chunks] == [(4, True), (4, True), (1, True)]
    assert plan_prefix_chunks(*prefill([0, 0], [3, 5]), 12) == []


def test_a_chunk_has_a_token_of_each_request() -> None:
    batch, pool = prefill([5, 4], [3, 3])
    with pytest.raises(ValueError, match="capacity=1 has no token for each of 2 requests"):
        mla_prefix_chunks(batch, pool, 1)


@given(
    prefixes=st.lists(st.integers(0, 150), min_size=1, max_size=5), each=st.integers(1, 200), extra=st.integers(0, 3)
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_cached_token_is_in_one_chunk(prefixes: list[int], each: int, extra: int) -> None:
    batch, pool = prefill(prefixes, [3] * len(prefixes))
    capacity = each * len(prefixes) + min(extra, len(prefixes) - 1)
    chunks, expected = plan_prefix_chunks(batch, pool, capacity), mla_prefix_chunks(batch, pool, capacity)
    assert len(chunks) == len(expected)
    for chunk, requests in zip(chunks, expected, strict=True):
        assert chunk.seq_lens.tolist() == [len(slots) for slots in requests]
        assert chunk.kv_indices.tolist() == [slot for slots in requests for slot in slots]
        assert chunk.max_seq_len == max(map(len, requests))
        assert chunk.has_empty == (min(map(len, requests)) == 0)
        assert chunk.seq_lens.dtype == chunk.cum_seq_lens.dtype == chunk.kv_indices.dtype == torch.int32


@pytest.mark.parametrize(("prefixes", "capacity"), [([30, 0, 8], 30), ([7, 41, 8], 9), ([5, 5, 5], 1000)])
def test_the_parts_together_are_attention_over_the_whole(prefixes: list[int], capacity: int) -> None:
    news = [3, 1, 5]
    batch, pool = prefill(prefixes, news)
    layer = MLALayer(0.5, qk_nope_head_dim=QK - 2, qk_rope_head_dim=2, v_head_dim=V)
    generator = torch.Generator().manual_seed(capacity)
    query = torch.randn(sum(news), HEADS, QK, generator=generator)
    slots = pool.num_pages * pool.page_size
    keys, values = (torch.randn(slots, HEADS, dim, generator=generator) for dim in (QK, V))
    metadata = build_mla_prefill_metadata(batch, pool)
    new = batch.out_cache_loc
    out, lse = prepare_mla_prefill(lab.references, batch, metadata, layer, query, keys[new], values[new])()
    outs, lses = [out], [lse]
    for chunk in plan_prefix_chunks(batch, pool, capacity):
        cached = chunk.kv_indices.long()
        call = prepare_prefix_chunk(lab.references, batch, metadata, chunk, layer, query, keys[cached], values[cached])
        out, lse = call()
        outs.append(out)
        lses.append(lse)
    got, first = merge_by_lse(torch.stack(outs), torch.stack(lses)), 0
    for row, prefix, count in zip(batch.req_pool_indices.tolist(), prefixes, news, strict=True):
        for j in range(count):
            seen = pool.req_to_token[row, : prefix + j + 1].long()
            scores = 0.5 * torch.einsum("hd,khd->hk", query[first + j], keys[seen])
            expected = torch.einsum("hk,khd->hd", torch.softmax(scores, dim=-1), values[seen])
            torch.testing.assert_close(got[first + j], expected, rtol=1e-4, atol=1e-5)
        first += count


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
    with pytest.raises(ValueError, match="capacity=1 has no token for each of the 2 requests"):
        plan_prefix_chunks(batch, pool, 1)
    with pytest.raises(ValueError, match="needs extend_prefix_lens_cpu"):
        plan_prefix_chunks(replace(batch, extend_prefix_lens_cpu=None), pool)
    (chunk,) = plan_prefix_chunks(batch, pool)
    layer = MLALayer(0.5, qk_nope_head_dim=QK - 2, qk_rope_head_dim=2, v_head_dim=V)
    query, few = torch.ones(5, HEADS, QK), torch.ones(9, HEADS, QK)
    with pytest.raises(ValueError, match=r"key has shape \[9, 2, 6\], expected \[at least 10"):
        prepare_prefix_chunk(
            lab.references, batch, build_mla_prefill_metadata(batch, pool), chunk, layer, query, few, few[..., :V]
        )
