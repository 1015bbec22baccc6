"""MLA with decode context parallelism: each rank's lengths and pages against loops, and the merged attention of all."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lab.references
from lab.metadata import ForwardBatch, ForwardMode, KVPool
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mla.backend import TRTLLMMLABackend, merge_by_lse, merge_ranks, prepare_mla_dcp_attention
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.references.forward_metadata import mla_dcp_metadata
from tests.devices import DEVICES
from tests.metadata.batches import Case, build, mla_truth
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.served import HEADS, LAYER, MLA_WITH_OFFSET, RANK, ROPE, latent_attention

RANKS = [DecodeContextParallel(size, rank) for size in (2, 3, 4) for rank in range(size)]
PASSES = [(ForwardMode.DECODE, 0), (ForwardMode.DECODE, 3), (ForwardMode.TARGET_VERIFY, 4)]


def widened(
    dcp: DecodeContextParallel, mode: ForwardMode, new: int, page_size: int = 32
) -> tuple[ForwardBatch, KVPool]:
    """Lengths at the ends of rounds over the ranks, of pages, and of fewer tokens than there are ranks."""
    p = page_size * dcp.size
    totals = tuple(new + total for total in (1, 2, 3, p - 1, p, p + 1, 2 * p + dcp.rank, 2 * p + dcp.rank + 1))
    return build(
        Case(mode, totals, new=new, page_size=p, max_context_len=3 * p - 5, sliding_window=False, host_seq_lens=True)
    )


@pytest.mark.parametrize("dcp", RANKS, ids=repr)
@pytest.mark.parametrize(("mode", "new"), PASSES)
def test_a_ranks_metadata(dcp: DecodeContextParallel, mode: ForwardMode, new: int) -> None:
    batch, pool = widened(dcp, mode, new)
    with ForbidHostReads():
        got = build_mla_dcp_metadata(batch, pool, dcp, MLA_WITH_OFFSET)
    keys = mla_truth(batch, pool, MLA_WITH_OFFSET).seen_lens
    assert got.global_seq_lens_k.tolist() == keys
    for i, row in enumerate(batch.req_pool_indices.tolist()):
        own, pages = mla_dcp_metadata(keys[i], row, pool, dcp.size, dcp.rank)
        assert got.seq_lens_k[i].item() == own
        assert got.block_kv_indices[i].tolist() == pages + [-1] * (got.block_kv_indices.shape[1] - len(pages))
        assert got.max_seq_len_k >= max(own, 1)
    assert got.seq_lens_k.dtype == got.global_seq_lens_k.dtype == torch.int32
    assert got.max_seq_len_k == max(1, mla_dcp_metadata(max(keys), 0, pool, dcp.size, dcp.rank)[0])
    assert got.block_kv_indices.shape[1] == 4096 // 32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "mode",
    [GraphMode(ForwardMode.DECODE), GraphMode.draft_decode(1), GraphMode(ForwardMode.TARGET_VERIFY, 4)],
    ids=repr,
)
@pytest.mark.parametrize("max_context_len", [184, 4096])  # draft tokens after 4,096 begin another block of the table
def test_a_replay_is_the_eager_pass(mode: GraphMode, device: str, max_context_len: int) -> None:
    """A long batch, a short one after it, and padding; the same on each rank."""
    for dcp in RANKS[:2]:
        backend = TRTLLMMLABackend(attention=MLA_WITH_OFFSET, dcp=dcp)
        new = 4 if mode.draft_step is None else 2
        lens = (4 + new, 90 + new, 180)
        fields: dict[str, Any] = {"page_size": 64, "max_context_len": max_context_len, "sliding_window": False}
        new = 0 if mode == GraphMode(ForwardMode.DECODE) else new
        pool = build(Case(mode.forward_mode, lens, new=new, **fields), device)[1]
        runner = GraphRunner(backend, mode, pool, (4,), lambda *_: lambda: None)
        for totals in (lens[::-1], lens[:2]):
            batch = build(Case(mode.forward_mode, totals, new=new, **fields), device)[0]
            runner.replay(batch)
            got, eager = runner.captured[4].metadata, runner.eager(batch)
            assert got.seq_lens_k[: len(totals)].tolist() == eager.seq_lens_k.tolist()
            assert got.global_seq_lens_k[: len(totals)].tolist() == eager.global_seq_lens_k.tolist()
            eager_table = eager.block_kv_indices[:, : got.block_kv_indices.shape[1]]
            live = eager_table >= 0
            assert int(live.sum()) == int((eager.block_kv_indices >= 0).sum())
            assert torch.equal(got.block_kv_indices[: len(totals), : live.shape[1]][live], eager_table[live])


class StaleWhereEmpty:
    """The reference, and in rows that see no key of the rank whatever an older call left."""

    @staticmethod
    def trtllm_batch_decode_with_kv_cache_mla(**arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = lab.references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        out.flatten(0, -3)[lse == -torch.inf] = 7.0
        lse.unflatten(0, (len(arguments["seq_lens"]), -1))[arguments["seq_lens"] == 0] = 0.0
        return out, lse


GROUPS = [
    *[
        (
            Case(
                ForwardMode.DECODE, (1, 2, 33, 32 * size, 50 * size + 1), page_size=32 * size, max_context_len=64 * size
            ),
            size,
            lab.references,
            False,
        )
        for size in (2, 3)
    ],
    *[
        (Case(mode, (new + 1, 64, 97, 300), new=new, page_size=256, max_context_len=310), 8, implementation, True)
        for mode, new in ((ForwardMode.DECODE, 0), (ForwardMode.TARGET_VERIFY, 4))
        for implementation in (StaleWhereEmpty, lab.references)
    ],
]


@pytest.mark.parametrize(("case", "size", "implementation", "cute_dsl"), GROUPS)
def test_attention_of_a_group(case: Case, size: int, implementation: Any, cute_dsl: bool) -> None:
    """Every rank's call, merged, is attention over whole histories; what a rank has none of is neutral.

    CuTe DSL's kernel verifies several rows: each rank gets the keys of all ranks, from which its rows' last keys follow. Its
    LSEs are to the base e.
    """
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    batch, pool = build(replace(case, sliding_window=False))
    cache = pool.new_sharded_latent_cache(RANK + ROPE, torch.float64, size)
    cache.storage.fill_(1e30)
    histories = [draw(length, RANK + ROPE) for length in case.total_lens]
    for row, history in zip(batch.req_pool_indices.tolist(), histories, strict=True):
        cache.write(pool.slots(row, 0, len(history)), history)
    query, rows = draw(batch.num_tokens, HEADS, RANK + ROPE), max(case.new, 1)
    metadata = [build_mla_dcp_metadata(batch, pool, DecodeContextParallel(size, rank)) for rank in range(size)]
    out = torch.empty(len(query), HEADS, RANK, dtype=torch.float64)
    prepare_mla_dcp_attention(implementation, batch, metadata, LAYER, query, cache, out=out, cute_dsl=cute_dsl)()
    torch.testing.assert_close(out, latent_attention(query.split(rows), histories), rtol=1e-5, atol=1e-6)


def test_a_row_that_no_part_sees_is_zero() -> None:
    outs, lses = torch.full((2, 1, 1, 3), 7.0), torch.full((2, 1, 1), -torch.inf)
    assert merge_by_lse(outs, lses).tolist() == [[[0.0, 0.0, 0.0]]]


def test_what_the_group_has_not_is_refused() -> None:
    first = DecodeContextParallel(2, 0)
    batch, pool = widened(first, ForwardMode.TARGET_VERIFY, 4)
    metadata = [build_mla_dcp_metadata(batch, pool, DecodeContextParallel(2, rank)) for rank in range(2)]
    cache = pool.new_sharded_latent_cache(RANK + ROPE, torch.float64, 2)
    query, out = torch.zeros(batch.num_tokens, HEADS, RANK + ROPE), torch.zeros(batch.num_tokens, HEADS, RANK)
    with pytest.raises(ValueError, match="only CuTe DSL's kernel takes global lengths"):
        prepare_mla_dcp_attention(lab.references, batch, metadata, LAYER, query, cache, out=out)
    batch, pool = widened(first, ForwardMode.DECODE, 0)
    with pytest.raises(ValueError, match="1 ranks' metadata for a cache of 2"):
        prepare_mla_dcp_attention(lab.references, batch, metadata[:1], LAYER, query, cache, out=out)
    with pytest.raises(ValueError, match="one rank's output is a part"):
        TRTLLMMLABackend(dcp=first).prepare_attention(batch, metadata[0], LAYER, query, cache.of_rank(0), out=out)


def test_the_results_of_an_idle_batch_are_merged_to_none() -> None:
    out, lens = torch.empty(0, 4, 8), torch.empty(0, dtype=torch.int32)
    merge_ranks([lambda: (out.clone(), torch.empty(0, 4))] * 2, [lens] * 2, out)
    assert out.shape == (0, 4, 8)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, -1), (2, 2), (2, 3)])
def test_a_rank_outside_its_group_is_refused(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank} of size={size}: a group has 2 GPUs or more"):
        DecodeContextParallel(size, rank)
