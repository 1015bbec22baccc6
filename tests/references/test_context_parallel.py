"""One rank's part of context parallelism: the merge of all ranks' results is the result of the whole request."""

import math
from typing import Any

import pytest
import torch

from lab.calls import AttentionCall, DecodeCall, MLADecodeCall
from lab.metadata.mla.backend import merge_by_lse
from lab.references import (
    assert_close_to_reference,
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
)
from lab.workloads.attention_case import AttentionCase
from tests.cases import Batch, decode_arguments, mla_arguments, of_entries

PAGE, DIM, RANK_DIM = 4, 16, 12
LENS = (9, 3, 30)  # keys of the requests on all ranks; the second has fewer than some groups have ranks
GENERATOR = torch.Generator().manual_seed(1)
KEYS, VALUES = ([torch.randn(n, 2, DIM, generator=GENERATOR, dtype=torch.float64) for n in LENS] for _ in range(2))


QUERIES = torch.randn(len(LENS), 3, 4, DIM, generator=GENERATOR, dtype=torch.float64)


def decode(q_len: int, world: int = 1, rank: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the arguments of a decode call over the keys rank, rank + world, … of each request."""
    keys, values = ([side[rank::world] for side in sides] for sides in (KEYS, VALUES))
    batch = Batch(list(QUERIES[:, :q_len]), keys, values)
    return decode_arguments(batch, PAGE, poison=math.nan, bmm1_scale=0.3, **changes)


def rank_of(q_len: int, world: int, rank: int) -> dict[str, Any]:
    prefix = torch.tensor(LENS, dtype=torch.int32) - q_len
    return {"cp_world": world, "cp_rank": rank, "causal_seqlens_kv_global": prefix}


@pytest.mark.parametrize("q_len", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_the_merge_of_all_ranks_is_the_whole_decode(q_len: int, world: int) -> None:
    ranks = [
        trtllm_batch_decode_with_kv_cache(**decode(q_len, world, rank), **rank_of(q_len, world, rank))
        for rank in range(world)
    ]
    whole, lse = trtllm_batch_decode_with_kv_cache(**decode(q_len))
    outs, lses = (torch.stack(side) for side in zip(*ranks, strict=True))
    torch.testing.assert_close(merge_by_lse(outs, lses), whole.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.logsumexp(lses * math.log(2), 0) / math.log(2), lse, atol=1e-5, rtol=1e-5)


def latent(q_len: int, world: int = 1, rank: int = 0, is_ragged: bool = False) -> dict[str, Any]:
    rows = [q_len, max(q_len - 1, 1) if is_ragged else q_len, q_len]
    queries = [query[:count] for query, count in zip(QUERIES, rows, strict=True)]
    batch = of_entries(queries, [side[rank::world, 0] for side in KEYS], RANK_DIM)
    return mla_arguments(batch, PAGE, poison=math.nan, bmm1_scale=0.3, ragged=is_ragged)


def latent_rank(world: int, rank: int) -> dict[str, Any]:
    ends = torch.tensor(LENS, dtype=torch.int32)
    return {"enable_dcp": True, "cp_world": world, "cp_rank": rank, "causal_seqlens_kv_global": ends}


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("q_len", "world"), [(1, 2), (2, 2), (3, 4), (3, 8)])
def test_the_merge_of_all_ranks_is_the_whole_mla_decode(q_len: int, world: int, is_ragged: bool) -> None:
    ranks = [
        trtllm_batch_decode_with_kv_cache_mla(**latent(q_len, world, rank, is_ragged), **latent_rank(world, rank))
        for rank in range(world)
    ]
    whole, _ = trtllm_batch_decode_with_kv_cache_mla(**latent(q_len, is_ragged=is_ragged))
    outs = torch.stack([out.flatten(0, -3) for out, _ in ranks])
    merged = merge_by_lse(outs, torch.stack([lse for _, lse in ranks]))
    torch.testing.assert_close(merged, whole.flatten(0, -3).float(), atol=1e-5, rtol=1e-5)


def test_cute_dsls_lse_is_to_the_base_e() -> None:
    given = latent(2, 2, 1) | latent_rank(2, 1)
    _, lse = trtllm_batch_decode_with_kv_cache_mla(**given)
    for changes, factor in (
        ({"backend": "cute-dsl", "return_lse_base": None}, math.log(2.0)),
        ({"backend": "cute-dsl"}, 1.0),
        ({"return_lse_base": "basee"}, math.log(2.0)),
    ):
        _, other = trtllm_batch_decode_with_kv_cache_mla(**given | changes)
        torch.testing.assert_close(other, lse * factor)
    natural = {
        "query": given["query"].float(),
        "kv_cache": given["kv_cache"].float(),
        "out": None,
        "backend": "cute-dsl",
    }
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**given | natural | {"return_lse_base": None})
    assert_close_to_reference(out, lse=lse, **given | natural | {"return_lse_base": None})


@pytest.mark.parametrize("rank", [(0, 1), (0, 2), (3, 4), (6, 8)])
def test_a_case_of_a_rank_has_as_many_keys_as_the_rank_owns(rank: tuple[int, int]) -> None:
    for seed in range(9):
        case = AttentionCase(AttentionCall.DECODE, (4, 9, 30), (3, 3, 3), rank=rank, seed=seed)
        assert tuple(len(range(rank[0], end, rank[1])) for end in case.all_kv_lens) == case.kv_lens
        assert min(case.all_kv_lens) >= 3
    none = AttentionCase(AttentionCall.DECODE, (0, 9), (3, 3), rank=(3, 4))
    assert none.all_kv_lens[0] == 3


def test_a_row_sees_no_more_than_the_rank_has() -> None:
    more = {"cp_world": 2, "causal_seqlens_kv_global": torch.tensor([99, 99, 99], dtype=torch.int32)}
    seen = DecodeCall(**decode(1, 2), **more).problem().num_visible
    assert seen is not None
    assert seen.tolist() == [5, 2, 15]


def test_results_of_a_rank_are_compared_with_its_own_keys() -> None:
    given = decode(2, 4, 3) | rank_of(2, 4, 3)
    given["query"] = given["query"].float()
    given["kv_cache"] = tuple(side.float() for side in given["kv_cache"])
    out, lse = trtllm_batch_decode_with_kv_cache(**given)
    assert_close_to_reference(out, lse=lse, **given)
    with pytest.raises(AssertionError, match="vectors are wrong"):
        assert_close_to_reference(out.flip(0), **given)
    own = given | {"lse": torch.empty_like(lse), "return_lse": False}
    assert_close_to_reference(trtllm_batch_decode_with_kv_cache(**own), **own)
    with pytest.raises(AssertionError, match="LSEs are wrong"):
        assert_close_to_reference(out, **own | {"lse": torch.zeros_like(lse)})


def test_padding_rows_are_no_rows_of_a_request() -> None:
    given = latent(2, 2, 1, is_ragged=True)
    padded = given | {name: torch.cat((given[name], given[name][:2])) for name in ("query", "out")}
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**padded, **latent_rank(2, 1))
    rows, lse_of_rows = trtllm_batch_decode_with_kv_cache_mla(**given, **latent_rank(2, 1))
    assert torch.equal(out[: len(rows)], rows)
    assert torch.equal(lse[: len(rows)], lse_of_rows)
    assert not out[len(rows) :].any()


ENDS = torch.tensor(LENS, dtype=torch.int32)
RANK_KEYS = {"causal_seqlens_kv_global": ENDS}
NO_INTS: list[tuple[dict[str, Any], type[Exception], str]] = [  # though they equal a default
    ({"cp_world": True}, TypeError, "cp_world must be an int, got True"),
    ({"cp_world": 1.0}, TypeError, "cp_world must be an int, got 1.0"),
    ({"cp_rank": False}, TypeError, "cp_rank must be an int, got False"),
]
BAD = [
    *NO_INTS,
    ({"cp_world": 2}, ValueError, "cp_world=2 and cp_rank=0 need causal_seqlens_kv_global"),
    ({"cp_rank": 1}, ValueError, "cp_rank=1 need causal_seqlens_kv_global"),
    (RANK_KEYS | {"cp_world": 0}, ValueError, "cp_world must be at least 1, got 0"),
    (RANK_KEYS | {"cp_world": 2, "cp_rank": 2}, ValueError, "cp_rank=2 must be below cp_world=2"),
    ({"causal_seqlens_kv_global": ENDS.long()}, TypeError, "causal_seqlens_kv_global must be int32"),
    ({"causal_seqlens_kv_global": ENDS[:2]}, ValueError, r"causal_seqlens_kv_global must have shape \[3\]"),
    (RANK_KEYS | {"return_lse": False}, ValueError, "without an LSE.*return_lse=True"),
    (RANK_KEYS | {"window_left": 3}, ValueError, "window_left is 3 with causal_seqlens_kv_global"),
    (RANK_KEYS | {"sinks": torch.zeros(4)}, ValueError, "sinks is a tensor.*once for each rank"),
    (RANK_KEYS | {"backend": "xqa"}, ValueError, "backend is 'xqa'"),
    (RANK_KEYS | {"bmm2_scale": torch.ones(1)}, ValueError, "bmm2_scale is a tensor"),
    (RANK_KEYS | {"enable_pdl": True}, ValueError, "enable_pdl is True"),
]
BAD_MLA = [
    *NO_INTS,
    ({"enable_dcp": False}, ValueError, "need causal_seqlens_kv_global, and in an MLA decode enable_dcp=True"),
    ({"enable_dcp": 1}, TypeError, "enable_dcp must be True or False"),
    ({"causal_seqlens_kv_global": None}, TypeError, "causal_seqlens_kv_global must be a torch.Tensor"),
    ({"return_lse": False}, ValueError, "return_lse is False with enable_dcp=True"),
    ({"return_lse_base": None}, ValueError, "return_lse with enable_dcp needs return_lse_base"),
    ({"backend": "trtllm-gen"}, ValueError, "backend is 'trtllm-gen' with enable_dcp=True"),
    ({"sinks": torch.zeros(4)}, ValueError, "sinks is a tensor with enable_dcp=True"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, ValueError, "skip_softmax.* with enable_dcp=True"),
]


@pytest.mark.parametrize(
    ("is_mla", "changes", "error", "words"), [*((False, *row) for row in BAD), *((True, *row) for row in BAD_MLA)]
)
def test_wrong_arguments_are_refused(is_mla: bool, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    function = trtllm_batch_decode_with_kv_cache_mla if is_mla else trtllm_batch_decode_with_kv_cache
    good = latent(1, 2, 1) | latent_rank(2, 1) if is_mla else decode(1)
    with pytest.raises(error, match=words):
        function(**good | changes)


def test_a_wrong_row_is_named_with_its_request() -> None:
    arguments = decode(3, world=2, causal_seqlens_kv_global=torch.tensor(LENS, dtype=torch.int32), cp_world=2)
    out, lse = trtllm_batch_decode_with_kv_cache(**arguments)
    out[4] *= 2  # a row of the second request
    with pytest.raises(AssertionError, match=r"row 4 \(request 1\)"):
        assert_close_to_reference((out, lse), **arguments)


def test_padding_rows_without_a_request_see_no_key() -> None:
    nobody = torch.zeros(1, dtype=torch.int32)
    given = latent(1, 2, is_ragged=True) | latent_rank(2, 0) | {"cum_seq_lens_q": nobody}
    given |= dict.fromkeys(("seq_lens", "causal_seqlens_kv_global"), nobody[:0])
    num_visible = MLADecodeCall(**given | {"block_tables": given["block_tables"][:0]}).problem().num_visible
    assert num_visible is not None
    assert num_visible.tolist() == [0, 0, 0]
