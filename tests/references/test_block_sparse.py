"""The decode reference of a block-sparse call against the second formula, one K/V head at a time."""

import math
from typing import Any

import pytest
import torch

from lab.calls import DecodeCall
from lab.calls.problem import E4M3
from lab.references import assert_close_to_reference, trtllm_batch_decode_with_kv_cache
from tests.cases import assert_same, block_sparse_arguments, decode_arguments, expected, of_kv_head, random_batch

decode = trtllm_batch_decode_with_kv_cache
KV_LENS = [50, 16, 37]
# Pages of two K/V heads: the last partly filled or left out, all, one, none.
PAGES = [[[0, 3], [0], [1]], [[1, 2], [], [0, 1, 2]]]


def by_head(batch: Any, pages: Any, **rules: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sinks = rules.pop("sinks", None)
    parts = []
    for head, of_head in enumerate(pages):
        part = of_kv_head(batch, head, of_head)
        group = part.queries[0].shape[1]
        own = None if sinks is None else sinks[head * group : (head + 1) * group]
        parts.append(expected(part, sinks=own, **rules))
    out, lse = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return out, lse


@pytest.mark.parametrize("q_len", [1, 4, 40])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 1.0])])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_each_head_sees_its_own_pages(q_len: int, sinks: torch.Tensor | None, kv_layout: str) -> None:
    batch = random_batch([q_len] * 3, KV_LENS)
    arguments = block_sparse_arguments(batch, PAGES, sinks=sinks, kv_layout=kv_layout, poison=math.nan)
    assert_same(decode(**arguments), by_head(batch, PAGES, sinks=sinks))


def test_requests_of_unequal_rows() -> None:
    batch = random_batch([2, 0, 5], KV_LENS)
    assert_same(decode(**block_sparse_arguments(batch, PAGES, ragged=True)), by_head(batch, PAGES))


def test_a_given_output_and_a_strided_lse_are_filled() -> None:
    batch = random_batch([2] * 3, KV_LENS)
    out, lse = torch.empty(6, 4, 16, dtype=torch.float64), torch.empty(6, 8)[:, ::2]
    arguments = block_sparse_arguments(batch, PAGES, out=out, lse=lse)
    assert decode(**arguments)[0] is out
    assert_same((out, lse), by_head(batch, PAGES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_the_assertion_takes_what_is_right_and_names_the_head_of_another_table(dtype: torch.dtype) -> None:
    batch = random_batch([2] * 3, KV_LENS, head_dim=64, kv_dtype=dtype)
    arguments = block_sparse_arguments(batch, PAGES, out_dtype=None, bmm1_scale=0.125)
    out, lse = decode(**arguments)
    assert_close_to_reference((out, lse), **arguments)
    tables, lengths = (arguments[name].flip(0) for name in ("block_tables", "seq_lens"))
    swapped, _ = decode(**arguments | {"block_tables": tables, "seq_lens": lengths})
    out[:, 3] = swapped[:, 3]
    with pytest.raises(AssertionError, match=r"6 of 24 vectors are wrong, .* head 3"):
        assert_close_to_reference(out, **arguments)


def test_a_wrong_page_is_named_with_its_head() -> None:
    arguments = block_sparse_arguments(random_batch([1] * 3, KV_LENS), PAGES)
    arguments["block_tables"][1, 0, 1] = -1
    with pytest.raises(ValueError, match=r"K/V head 1 of a block-sparse call: .*page id -1 of request 0, column 1"):
        DecodeCall(**arguments).problem()


def test_a_request_has_the_keys_of_its_longest_head() -> None:
    problem = DecodeCall(**block_sparse_arguments(random_batch([1] * 3, KV_LENS), PAGES)).problem()
    assert (problem.batch_size, problem.kv_lens()) == (3, [32, 16, 37])
    assert [each.seq_lens.tolist() for each in problem.of_kv_heads()] == [[18, 16, 16], [32, 0, 37]]
    assert {(each.num_qo_heads, each.k_cache.shape[1]) for each in problem.of_kv_heads()} == {(problem.group, 1)}
    plain = DecodeCall(**decode_arguments(random_batch([1] * 3, KV_LENS))).problem()
    assert plain.of_kv_heads() == [plain]
