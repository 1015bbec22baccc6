"""MLA over quantised caches: what the query becomes, which scale counts, and a prefill's e4m3 tensors."""

from functools import partial

import pytest
import torch

import lab.references
from lab.calls.problem import E4M3
from lab.metadata import ForwardMode, build_mla_decode_metadata, build_mla_prefill_metadata
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.calls import (
    MLALayer,
    mla_call_arguments,
    mla_query,
    mla_query_dtype,
    prepare_mla_prefill,
    quantised_prefill,
    ragged_context_arguments,
)
from tests.metadata.batches import Case, build, of_mla
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
    query.fill_(1e3)
    attend()
    queries = [arguments["query"] for _, arguments in noted.calls]
    assert [query.dtype for query in queries] == [E4M3, E4M3]
    assert [query.float().max().item() for query in queries] == [0.3125, 448.0]
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
    expected = prepare_mla_prefill(lab.references, batch, metadata, LAYER, query, key, value)()
    torch.testing.assert_close(got.float(), expected, rtol=0.15, atol=0.15)
    assert quantised_prefill(LAYER, query, key * 1e6, value)[1].float().abs().max() == 448.0
