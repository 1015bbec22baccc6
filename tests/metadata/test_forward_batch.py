"""A batch that contradicts itself is refused with a sentence, and without reading the device."""

import dataclasses
from typing import Any

import pytest
import torch

from lab.metadata import ForwardBatch, ForwardMode, SpecInfo


def arguments(mode: ForwardMode = ForwardMode.EXTEND, device: str = "meta") -> dict[str, Any]:
    """Two requests with 3 + 2 and 0 + 4 tokens. On ``meta`` any read of a tensor raises."""

    def vector(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    verifies = mode is ForwardMode.RAGGED_VERIFY
    return {
        "spec_info": SpecInfo(num_draft_tokens=4) if verifies else None,
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


def test_accepts_a_consistent_batch_and_reads_no_tensor() -> None:
    batch = ForwardBatch(**arguments())
    assert batch.batch_size == 2
    assert batch.spec_info is None


@pytest.mark.parametrize("name", ["extend_seq_lens", "extend_prefix_lens", "extend_seq_lens_cpu", "seq_lens_cpu"])
def test_what_only_some_modes_need_may_be_missing(name: str) -> None:
    ForwardBatch(**arguments() | {name: None})


def test_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ForwardBatch(**arguments()).num_tokens = 7  # type: ignore[misc]


WRONG = [
    ("forward_mode", 1, TypeError, "ForwardMode.DECODE"),
    ("req_pool_indices", [2, 1], TypeError, "req_pool_indices must be a torch.int32 or torch.int64 tensor, not list"),
    ("req_pool_indices", None, TypeError, "req_pool_indices must be"),
    ("req_pool_indices", torch.zeros(3, dtype=torch.int32, device="meta"), ValueError, "3 entries for the 2 requests"),
    ("req_pool_indices", torch.zeros(2, dtype=torch.int32), ValueError, "on cpu but seq_lens on meta"),
    ("seq_lens", torch.zeros(2, device="meta"), TypeError, "seq_lens has dtype torch.float32"),
    ("seq_lens", torch.zeros(2, 1, dtype=torch.int32, device="meta"), ValueError, r"shape \[2, 1\]"),
    ("out_cache_loc", torch.zeros(6, dtype=torch.int32, device="meta"), TypeError, r"\.to\(torch.int64\)"),
    ("out_cache_loc", torch.zeros(7, dtype=torch.int64, device="meta"), ValueError, "7 slots for num_tokens=6"),
    ("num_tokens", -1, ValueError, "num_tokens=-1"),
    ("num_tokens", 6.0, ValueError, "num_tokens=6.0"),
    ("num_tokens", True, ValueError, "num_tokens=True"),
    ("out_cache_loc", torch.zeros(5, dtype=torch.int64, device="meta"), ValueError, "5 slots, but .* 6 new tokens"),
    ("extend_seq_lens", torch.zeros(2, device="meta"), TypeError, "extend_seq_lens has dtype"),
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
        ForwardBatch(**arguments() | {name: value})


def test_refuses_more_new_tokens_than_query_rows() -> None:
    with pytest.raises(ValueError, match="adds up to 8 query rows, more than num_tokens=6"):
        ForwardBatch(**arguments(ForwardMode.DRAFT_EXTEND_V2) | {"extend_seq_lens_cpu": [4, 4]})


EXTENDS = [mode for mode in ForwardMode if mode.query_rows.in_extend_seq_lens]


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
@pytest.mark.parametrize("slots", [5, 7])
def test_every_new_token_of_an_extend_has_one_slot(mode: ForwardMode, slots: int) -> None:
    locations = torch.zeros(slots, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=f"{slots} slots, but extend_seq_lens_cpu adds up to 6 new tokens"):
        ForwardBatch(**arguments(mode) | {"out_cache_loc": locations, "num_tokens": 8})


@pytest.mark.parametrize("mode", EXTENDS, ids=repr)
def test_rows_beyond_the_new_tokens_are_padding(mode: ForwardMode) -> None:
    assert ForwardBatch(**arguments(mode) | {"num_tokens": 8}).num_tokens == 8


@pytest.mark.parametrize(("mode", "num_tokens"), [(ForwardMode.DECODE, 2), (ForwardMode.TARGET_VERIFY, 4)])
def test_leftover_extend_lengths_mean_nothing_in_other_modes(mode: ForwardMode, num_tokens: int) -> None:
    locations = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
    ForwardBatch(**arguments(mode) | {"out_cache_loc": locations, "num_tokens": num_tokens})


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_fixed_width_of_draft_extend_v2_holds_for_every_request(width: int) -> None:
    spec_info = SpecInfo(num_tokens_per_req=width)
    with pytest.raises(ValueError, match=rf"\[2, 4\], but SpecInfo.num_tokens_per_req={width}"):
        ForwardBatch(**arguments(ForwardMode.DRAFT_EXTEND_V2) | {"spec_info": spec_info})
    equal = {"extend_seq_lens_cpu": [3, 3], "spec_info": spec_info}
    if width == 3:
        ForwardBatch(**arguments(ForwardMode.DRAFT_EXTEND_V2) | equal)
    else:
        with pytest.raises(ValueError, match="pad to that width"):
            ForwardBatch(**arguments(ForwardMode.DRAFT_EXTEND_V2) | equal)


@pytest.mark.parametrize(
    ("mode", "spec_info"),
    [
        (ForwardMode.DRAFT_EXTEND, SpecInfo(num_tokens_per_req=4)),
        (ForwardMode.DRAFT_EXTEND_V2, SpecInfo()),
        (ForwardMode.DRAFT_EXTEND_V2, None),
    ],
)
def test_widths_are_free_where_none_is_fixed(mode: ForwardMode, spec_info: SpecInfo | None) -> None:
    ForwardBatch(**arguments(mode) | {"spec_info": spec_info})


def test_a_ragged_verification_has_no_more_rows_than_the_draft() -> None:
    whole = arguments(ForwardMode.RAGGED_VERIFY)
    ForwardBatch(**whole)
    with pytest.raises(ValueError, match=r"\[2, 4\] has a request of more rows than SpecInfo.num_draft_tokens=3"):
        ForwardBatch(**whole | {"spec_info": SpecInfo(num_draft_tokens=3)})
    with pytest.raises(ValueError, match=r"needs SpecInfo\.num_draft_tokens, the most rows"):
        ForwardBatch(**whole | {"spec_info": None})


def test_decode_has_one_row_per_request() -> None:
    with pytest.raises(ValueError, match="DECODE has one query row per request, 2"):
        ForwardBatch(**arguments(ForwardMode.DECODE))


@pytest.mark.parametrize("num_tokens", [7, 0])
def test_verification_has_equal_rows_per_request(num_tokens: int) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=f"num_tokens={num_tokens} is no positive multiple of the 2 requests"):
        ForwardBatch(
            **arguments(ForwardMode.TARGET_VERIFY) | {"num_tokens": num_tokens, "out_cache_loc": empty},
        )


@pytest.mark.parametrize("num_requests", [0, 1])
def test_a_request_verifies_a_row_or_more(num_requests: int) -> None:
    of_requests = {"req_pool_indices", "seq_lens", "seq_lens_cpu", "extend_seq_lens", "extend_prefix_lens"}
    of_requests |= {"extend_seq_lens_cpu", "extend_prefix_lens_cpu"}
    whole = arguments(ForwardMode.TARGET_VERIFY)
    fields = whole | {name: whole[name][:num_requests] for name in of_requests}
    fields |= {"num_tokens": 0, "out_cache_loc": torch.zeros(0, dtype=torch.int64, device="meta")}
    if num_requests == 0:
        assert ForwardBatch(**fields).batch_size == 0
    else:
        with pytest.raises(ValueError, match="num_tokens=0 is no positive multiple of the 1 requests"):
            ForwardBatch(**fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens=0"),
        ({"num_tokens_per_req": 0}, ValueError, "num_tokens_per_req=0"),
        ({"num_tokens_per_req": -2}, ValueError, "num_tokens_per_req=-2"),
        ({"speculative_step_id": -2}, ValueError, "speculative_step_id=-2"),
        ({"num_accept_tokens": [1, 2]}, TypeError, "num_accept_tokens must be"),
    ],
)
def test_spec_info_refuses(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SpecInfo(**fields)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_accept_lengths_may_be_more_than_the_requests_and_not_fewer(count: int) -> None:
    spec_info = SpecInfo(num_accept_tokens=torch.zeros(count, dtype=torch.int32, device="meta"))
    fields = arguments(ForwardMode.DRAFT_EXTEND) | {"spec_info": spec_info}
    if count >= 2:
        assert ForwardBatch(**fields).spec_info is spec_info
    else:
        with pytest.raises(ValueError, match="num_accept_tokens has 1 entries, fewer than 2 requests"):
            ForwardBatch(**fields)
