"""Context parallelism in zigzag: each rank's rows and metadata against loops, and attention of all ranks against the whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lab.references
from lab.metadata import ForwardMode, KVLayout, build_mha_metadata
from lab.metadata.mha.backend import AttentionLayer, TRTLLMMHABackend
from lab.metadata.mha.context_parallel import prepare_zigzag, why_not_zigzag, zigzag_shard
from lab.workloads.inputs.expected_metadata import wrong_shard
from tests.metadata.batches import Case, build

EXTEND = Case(ForwardMode.EXTEND, (40, 17, 64), new_lens=(9, 17, 8), num_padding_rows=2)


@st.composite
def dealt_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """Extends with as many new tokens as blocks, or more, and prefixes or none."""
    ranks = draw(st.integers(2, 5))
    new = draw(st.lists(st.integers(2 * ranks, 45), min_size=1, max_size=4))
    totals = [draw(st.integers(length, 100)) for length in new]
    mode = draw(st.sampled_from([ForwardMode.EXTEND, ForwardMode.MIXED]))
    window, seed = draw(st.booleans()), draw(st.integers(0, 99))
    return Case(mode, tuple(totals), tuple(new), sliding_window=window, host_seq_lens=True, seed=seed), ranks


@given(dealt_cases())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_rank_is_as_the_loops_say(drawn: tuple[Case, int]) -> None:
    case, ranks = drawn
    batch, pool = build(case)
    metadata = build_mha_metadata(batch, pool)
    shards = [zigzag_shard(batch, metadata, ranks, rank) for rank in range(ranks)]
    for rank, shard in enumerate(shards):
        assert wrong_shard(batch, pool, shard, ranks, rank) == ""
    every_row = torch.cat([shard.rows for shard in shards]).sort().values
    assert every_row.tolist() == list(range(sum(case.new_lens)))


def test_a_wrong_share_is_told() -> None:
    batch, pool = build(EXTEND)
    shard = zigzag_shard(batch, build_mha_metadata(batch, pool), 2, 1)
    lengths = shard.metadata.cache_seqlens_int32
    changed = replace(shard, metadata=replace(shard.metadata, cache_seqlens_int32=lengths + 1))
    assert wrong_shard(batch, pool, changed, 2, 1).startswith("cache_seqlens is")
    assert wrong_shard(batch, pool, replace(shard, rows=shard.rows.flip(0)), 2, 1).startswith("rows is")
    assert wrong_shard(batch, pool, shard, 2, 0).startswith("rows is")


@pytest.mark.parametrize("window", [False, True])
def test_all_ranks_compute_what_the_whole_pass_does(window: bool) -> None:
    batch, pool = build(EXTEND)
    metadata, generator = build_mha_metadata(batch, pool), torch.Generator().manual_seed(1)
    cache = pool.new_cache(2, 8, torch.float32, KVLayout.NHD, sliding_window=window)
    cache.storage.copy_(torch.randn(cache.storage.shape, generator=generator))
    query = torch.randn(batch.num_tokens, 4, 8, generator=generator)
    layer = AttentionLayer(0.3, window_left=11 if window else -1, reads_swa_pool=window)
    whole, dealt = torch.full_like(query, 7.0), torch.full_like(query, 7.0)
    shards = [zigzag_shard(batch, metadata, 3, rank) for rank in range(3)]
    most = pool.max_context_len
    backend = TRTLLMMHABackend(lab.references)
    backend.prepare_attention(batch, metadata, layer, query, cache, max_context_len=most, out=whole)()
    run = prepare_zigzag(backend, batch, shards, layer, query, cache, max_context_len=most, out=dealt)
    assert run() is dealt
    torch.testing.assert_close(dealt, whole)
    query.neg_()
    again = run().clone()
    assert not torch.equal(again, whole), "the contents of the query may change between calls"


@pytest.mark.parametrize(
    ("case", "ranks", "message"),
    [
        (EXTEND, 1, "nothing is dealt to fewer than 2"),
        (EXTEND, 5, r"extend_seq_lens_cpu=\[9, 17, 8\]: with 5 ranks every request needs 10 new tokens"),
        (Case(ForwardMode.DECODE, (17, 20)), 2, "DECODE is run whole on every rank: EXTEND and MIXED alone"),
        (Case(ForwardMode.DRAFT_EXTEND_V2, (17, 20), new_lens=(4, 4)), 2, "DRAFT_EXTEND_V2 is run whole"),
    ],
)
def test_what_is_not_dealt_is_refused(case: Case, ranks: int, message: str) -> None:
    batch, pool = build(case)
    assert why_not_zigzag(batch, ranks)
    with pytest.raises(ValueError, match=message):
        zigzag_shard(batch, build_mha_metadata(batch, pool), ranks, 0)


def test_a_rank_that_is_none_and_missing_host_lists_are_refused() -> None:
    batch, pool = build(EXTEND)
    metadata = build_mha_metadata(batch, pool)
    with pytest.raises(ValueError, match="rank=2 must be 0 to 1"):
        zigzag_shard(batch, metadata, 2, 2)
    for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
        with pytest.raises(ValueError, match=f"needs {name}"):
            zigzag_shard(replace(batch, **{name: None}), metadata, 2, 0)


def test_no_list_of_prefixes_is_no_prefix() -> None:
    batch, pool = build(Case(ForwardMode.EXTEND, (9, 17), new_lens=(9, 17)))
    without = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    for rank in range(2):
        shard = zigzag_shard(without, build_mha_metadata(without, pool), 2, rank)
        assert wrong_shard(batch, pool, shard, 2, rank) == ""
