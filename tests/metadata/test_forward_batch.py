"""A batch that contradicts itself is refused with a sentence, and without reading the device."""

import dataclasses
from typing import Any

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, SpecInfo

DECODE, VERIFY, RAGGED = ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY
V1, V2 = ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2
EXTENDS = [mode for mode in ForwardMode if mode.query_rows.in_extend_seq_lens]
OF_REQUESTS = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens")
OF_REQUESTS += ("extend_seq_lens_cpu", "extend_prefix_lens_cpu")


def vector(*values: int, dtype: torch.dtype = torch.int64, device: str = "meta") -> torch.Tensor:
    """On ``meta`` any read of a tensor raises."""
    return torch.tensor(values, dtype=dtype, device=device)


def arguments(mode: ForwardMode = ForwardMode.EXTEND, **changes: Any) -> dict[str, Any]:
    """Two requests with 3 + 2 and 0 + 4 tokens."""
    whole: dict[str, Any] = {
        "spec_info": SpecInfo(num_draft_tokens=4) if mode is RAGGED else None,
        "forward_mode": mode,
        "req_pool_indices": vector(2, 1),
        "seq_lens": vector(5, 4),
        "out_cache_loc": vector(*range(6)),
        "num_tokens": 6,
        "extend_seq_lens": vector(2, 4),
        "extend_prefix_lens": vector(3, 0),
        "extend_seq_lens_cpu": [2, 4],
        "extend_prefix_lens_cpu": (3, 0),
        "seq_lens_cpu": [5, 4],
    }
    return whole | changes


def test_a_consistent_batch_is_accepted_frozen_and_no_tensor_is_read() -> None:
    batch = ForwardBatch(**arguments())
    assert (batch.batch_size, batch.spec_info) == (2, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.num_tokens = 7  # type: ignore[misc]
    for name in ("extend_seq_lens", "extend_prefix_lens", "extend_seq_lens_cpu", "seq_lens_cpu"):
        ForwardBatch(**arguments(**{name: None}))


WRONG = [
    ("forward_mode", 1, TypeError, "ForwardMode.DECODE"),
    ("req_pool_indices", [2, 1], TypeError, "req_pool_indices must be a torch.int32 or torch.int64 tensor, not list"),
    ("req_pool_indices", None, TypeError, "req_pool_indices must be"),
    ("req_pool_indices", vector(0, 0, 0, dtype=torch.int32), ValueError, "3 entries for the 2 requests"),
    ("req_pool_indices", vector(0, 0, device="cpu"), ValueError, "on cpu but seq_lens on meta"),
    ("seq_lens", vector(0, 0, dtype=torch.float32), TypeError, "seq_lens has dtype torch.float32"),
    ("seq_lens", vector(0, 0).view(2, 1), ValueError, r"shape \[2, 1\]"),
    ("out_cache_loc", vector(*range(6), dtype=torch.int32), TypeError, r"\.to\(torch.int64\)"),
    ("out_cache_loc", vector(*range(7)), ValueError, "7 slots for num_tokens=6"),
    ("num_tokens", -1, ValueError, "num_tokens=-1"),
    ("num_tokens", 6.0, ValueError, "num_tokens=6.0"),
    ("num_tokens", True, ValueError, "num_tokens=True"),
    ("extend_seq_lens", vector(0, 0, dtype=torch.float32), TypeError, "extend_seq_lens has dtype"),
    ("extend_seq_lens_cpu", torch.tensor([2, 4]), TypeError, r"tensor\.tolist\(\)"),
    ("extend_seq_lens_cpu", [2.0, 4.0], TypeError, "list or tuple of int"),
    ("extend_seq_lens_cpu", [2], ValueError, "extend_seq_lens_cpu has 1 entries for the 2 requests"),
    ("extend_seq_lens_cpu", [2, -4], ValueError, "must not be negative"),
    ("extend_seq_lens_cpu", [3, 4], ValueError, r"3 \+ 3, but seq_lens_cpu = 5"),
    ("seq_lens_cpu", [3, 4], ValueError, "seq_lens counts the new tokens"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_refuses(name: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ForwardBatch(**arguments(**{name: value}))


def test_refuses_more_new_tokens_than_query_rows() -> None:
    with pytest.raises(ValueError, match="adds up to 8 query rows, more than num_tokens=6"):
        ForwardBatch(**arguments(V2, extend_seq_lens_cpu=[4, 4]))


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
def test_every_new_token_of_an_extend_has_one_slot_and_rows_beyond_are_padding(mode: ForwardMode) -> None:
    assert ForwardBatch(**arguments(mode, num_tokens=8)).num_tokens == 8
    for slots in (5, 7):
        with pytest.raises(ValueError, match=f"{slots} slots, but extend_seq_lens_cpu adds up to 6 new tokens"):
            ForwardBatch(**arguments(mode, out_cache_loc=vector(*range(slots)), num_tokens=8))


@pytest.mark.parametrize(("mode", "num_tokens"), [(DECODE, 2), (VERIFY, 4)])
def test_leftover_extend_lengths_mean_nothing_in_other_modes(mode: ForwardMode, num_tokens: int) -> None:
    ForwardBatch(**arguments(mode, out_cache_loc=vector(*range(num_tokens)), num_tokens=num_tokens))


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_fixed_width_of_draft_extend_v2_holds_for_every_request(width: int) -> None:
    spec_info = SpecInfo(num_tokens_per_req=width)
    for rows in [[2, 4]] + [[3, 3]] * (width != 3):
        message = rf"\[{rows[0]}, {rows[1]}\], but SpecInfo.num_tokens_per_req={width}.*pad to that width"
        with pytest.raises(ValueError, match=message):
            ForwardBatch(**arguments(V2, extend_seq_lens_cpu=rows, spec_info=spec_info))
    if width == 3:
        ForwardBatch(**arguments(V2, extend_seq_lens_cpu=[3, 3], spec_info=spec_info))


@pytest.mark.parametrize(("mode", "spec_info"), [(V1, SpecInfo(num_tokens_per_req=4)), (V2, SpecInfo()), (V2, None)])
def test_widths_are_free_where_none_is_fixed(mode: ForwardMode, spec_info: SpecInfo | None) -> None:
    ForwardBatch(**arguments(mode, spec_info=spec_info))


def test_a_ragged_verification_has_no_more_rows_than_the_draft() -> None:
    ForwardBatch(**arguments(RAGGED))
    with pytest.raises(ValueError, match=r"\[2, 4\] has a request of more rows than SpecInfo.num_draft_tokens=3"):
        ForwardBatch(**arguments(RAGGED, spec_info=SpecInfo(num_draft_tokens=3)))
    with pytest.raises(ValueError, match=r"needs SpecInfo\.num_draft_tokens, the most rows"):
        ForwardBatch(**arguments(RAGGED, spec_info=None))


def test_decode_has_one_row_per_request() -> None:
    with pytest.raises(ValueError, match="DECODE has one query row per request, 2"):
        ForwardBatch(**arguments(DECODE))


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(2, 7), (2, 0), (1, 0), (0, 0)])
def test_a_verification_has_equal_rows_per_request_and_one_or_more(num_requests: int, num_tokens: int) -> None:
    fields = arguments(VERIFY, num_tokens=num_tokens, out_cache_loc=vector())
    fields |= {name: fields[name][:num_requests] for name in OF_REQUESTS}
    if num_requests == 0:
        assert ForwardBatch(**fields).batch_size == 0
        return
    with pytest.raises(
        ValueError, match=f"num_tokens={num_tokens} is no positive multiple of the {num_requests} requests"
    ):
        ForwardBatch(**fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens=0"),
        ({"num_tokens_per_req": 0}, ValueError, "num_tokens_per_req=0"),
        ({"num_tokens_per_req": -2}, ValueError, "num_tokens_per_req=-2"),
        ({"speculative_step_id": -2}, ValueError, "speculative_step_id=-2 must be 0 or more, -1 in a frozen-KV draft"),
        ({"num_accept_tokens": [1, 2]}, TypeError, "num_accept_tokens must be"),
    ],
)
def test_spec_info_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SpecInfo(**fields)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_accept_lengths_may_be_more_than_the_requests_and_not_fewer(count: int) -> None:
    spec_info = SpecInfo(num_accept_tokens=vector(*range(count), dtype=torch.int32))
    fields = arguments(V1, spec_info=spec_info)
    if count >= 2:
        assert ForwardBatch(**fields).spec_info is spec_info
    else:
        with pytest.raises(ValueError, match="num_accept_tokens has 1 entries, fewer than 2 requests"):
            ForwardBatch(**fields)
