"""Each trace that an engine's mistake leaves in a call's inputs is named, with its place; a good call has none."""

import math
from typing import Any

import pytest
import torch

from lab.calls import DecodeCall, MLADecodeCall, PagedAttention, Problem, RaggedContextCall
from lab.recorded.suspicions import RecordedInputs
from lab.references.assertion import histories_of
from tests.recorded.record_calls import (
    HEAD_DIM,
    HEADS,
    LENGTHS,
    PAGE_SIZE,
    decode_arguments,
    ragged_arguments,
    rank_arguments,
    several_rows,
)


def _problem(**changes: Any) -> PagedAttention:
    return DecodeCall(**decode_arguments(**changes)).problem()


def _suspicions(problem: Problem) -> list[str]:
    return RecordedInputs(problem, histories_of(problem)).suspicions()


def _origins(problem: Problem, out: torch.Tensor) -> list[str]:
    return RecordedInputs(problem, histories_of(problem)).origins_of_non_finite(out)


def test_a_good_call_is_not_suspicious() -> None:
    assert _suspicions(_problem()) == []
    assert _origins(_problem(), torch.zeros(3, HEADS, HEAD_DIM)) == []


def test_a_page_that_two_requests_fill_is_named() -> None:
    tables = decode_arguments()["block_tables"].clone()
    tables[2, 2] = tables[1, 1]  # of 33 and of 17 keys: both have one key in it
    (found,) = _suspicions(_problem(block_tables=tables))
    assert found.startswith(f"page {tables[1, 1]} is the last page of requests 1, 2")


def test_a_full_page_may_be_shared() -> None:
    tables = decode_arguments()["block_tables"].clone()
    tables[2, 0] = tables[1, 0]
    assert _suspicions(_problem(block_tables=tables)) == []
    tables[2, 1] = tables[1, 1]  # request 2 has filled it
    assert _suspicions(_problem(block_tables=tables)) == []
    tables = decode_arguments()["block_tables"].clone()
    tables[1, 1] = tables[0, 1]  # behind the only page, which is full, of both requests
    lengths = torch.tensor([PAGE_SIZE, PAGE_SIZE, 33], dtype=torch.int32)
    assert _suspicions(_problem(block_tables=tables, seq_lens=lengths)) == []


@pytest.mark.parametrize(("name", "words"), [("bmm1_scale", "weights equal"), ("bmm2_scale", "the output zero")])
@pytest.mark.parametrize("zero", [0.0, torch.zeros(1)])
def test_a_scale_of_zero_is_named(name: str, words: str, zero: Any) -> None:
    (found,) = _suspicions(_problem(**{name: zero}))
    assert found.startswith(f"{name} is 0")
    assert words in found


def test_rows_of_no_request_are_named() -> None:
    offsets = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    (found,) = _suspicions(_problem(cum_seq_lens_q=offsets, max_q_len=1, q_len_per_req=None))
    assert found == "rows 2 to 2 of the query belong to no request"


def _spoilt(
    *tokens: tuple[int, int],
    side: int = 0,
    head: int = 1,
    value: float = math.nan,
    arguments: dict[str, Any] | None = None,
) -> PagedAttention:
    """Return a decode in which an element of some (request, token) of K or V is not finite."""
    given = decode_arguments() if arguments is None else arguments
    for request, token in tokens:
        page = int(given["block_tables"][request, token // PAGE_SIZE])
        given["kv_cache"][side][page, head, token % PAGE_SIZE, 7] = value
    return DecodeCall(**given).problem()


@pytest.mark.parametrize(("side", "value"), [(0, math.nan), (1, -math.inf)])
def test_a_non_finite_key_is_named_with_its_place(side: int, value: float) -> None:
    problem = _spoilt((2, 18), side=side, value=value)
    (found,) = _suspicions(problem)
    place = f"{'KV'[side]} of request 2, key 18 (page {problem.k_block_tables[2, 1]}, slot 2), K/V head 1 holds {value}"
    assert found == f"{place}, one of 1 non-finite keys of the request"
    out = torch.zeros(3, HEADS, HEAD_DIM)
    out[2, 2, 5] = math.inf
    assert _origins(problem, out) == [
        f"row 2 (request 2) head 2 is not finite: it sees {place.replace(' holds', ', which holds')}"
    ]


def _of_query() -> PagedAttention:
    query = decode_arguments()["query"].clone()
    query[1, 3, 0] = math.nan
    return _problem(query=query)


def _verified(*bits: int) -> PagedAttention:
    """Two draft tokens for each request; token t of the draft is the key at position L - 2 + t. Request 1's second is NaN."""
    mask = torch.tensor(bits, dtype=torch.uint16).view(1, 2, 1).repeat(3, 1, 2)
    return _spoilt((1, 16), arguments=several_rows(mask=mask))  # key 16 of 17


def _on_a_rank(slot: int) -> PagedAttention:
    """Rows 3 to 5 see 8, 9 and 10 keys of request 1, of which rank 1 holds 4, 4 and 5. One of these is NaN."""
    arguments = rank_arguments()
    arguments["kv_cache"][0, slot, 0] = math.nan
    return MLADecodeCall(**arguments).problem()


WINDOW = {"window_left": 4}  # the last 5 keys of 33


@pytest.mark.parametrize(
    ("problem", "row", "head", "words"),
    [
        (_spoilt((2, 0), arguments=decode_arguments(**WINDOW)), 2, 3, "it must not see K of request 2, key 0"),
        (_spoilt((2, 0), (2, 32), arguments=decode_arguments(**WINDOW)), 2, 3, "it sees K of request 2, key 32 "),
        (_of_query(), 1, 3, "so is its query"),
        (_spoilt((0, LENGTHS[0]), side=1), 0, 3, "non-finite V after the request's last key, which no row sees"),
        (_spoilt((2, 18)), 2, 0, "the keys and values that it sees are finite"),  # of K/V head 0
        (_verified(1, 3), 2, 3, "it must not see K of request 1, key 16"),
        (_verified(3, 3), 2, 3, "it sees K of request 1, key 16"),
        (_verified(3, 1), 2, 3, "it sees K of request 1, key 16"),
        (_on_a_rank(4), 3, 3, "it must not see K of request 1"),
        (_on_a_rank(3), 4, 3, "it sees K of request 1"),  # rows of one count see the same keys
        (_on_a_rank(3), 5, 3, "it sees K of request 1"),
        (_on_a_rank(4), 5, 3, "it sees K of request 1"),
    ],
)
def test_the_origin_of_a_non_finite_output_is_named(problem: PagedAttention, row: int, head: int, words: str) -> None:
    out = torch.zeros(problem.num_rows, HEADS, HEAD_DIM)
    out[row, head] = math.nan
    (found,) = _origins(problem, out)
    request = sum(row >= end for end in problem.row_offsets()[1:])
    assert found.startswith(f"row {row} (request {request}) head {head} is not finite: ")
    assert words in found


def test_a_request_without_keys_has_no_page_whose_rest_is_searched() -> None:
    arguments = decode_arguments(seq_lens=torch.tensor([0, 17, 33], dtype=torch.int32))
    arguments["kv_cache"][0][int(arguments["block_tables"][0, 2])] = math.nan
    out = torch.full((3, HEADS, HEAD_DIM), math.nan)
    found, *_ = _origins(DecodeCall(**arguments).problem(), out)
    assert found == "row 0 (request 0) head 0 is not finite: the keys and values that it sees are finite"


def test_a_ragged_call_has_keys_without_pages() -> None:
    arguments = ragged_arguments()
    arguments["key"][5, 1, 0] = math.nan
    problem = RaggedContextCall(**arguments, workspace_buffer=None).problem()
    (found,) = _suspicions(problem)
    assert found.startswith("K of request 1, key 1, K/V head 1 holds nan")
    out = torch.zeros(5, HEADS, 32)
    out[3:, 1] = math.nan
    (origin,) = _origins(problem, out)
    assert (
        origin == "row 3 (request 1) head 1 is not finite: it sees K of request 1, key 1, K/V head 1, which holds nan"
    )


def test_a_long_list_is_shortened() -> None:
    arguments = decode_arguments()
    arguments["kv_cache"][0][:] = math.nan
    found = _suspicions(DecodeCall(**arguments | {"bmm1_scale": 0.0, "bmm2_scale": 0.0}).problem())
    assert len(found) == 5
    assert "one of 34 non-finite keys" in found[3]
