"""The truth of a few keys, worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.references.errors import Truth
from lab.references.softmax_attention import PIECE_ELEMENTS, Rules
from lab.references.truth import truth_of_requests

LN2 = math.log(2.0)
NO_KEY = "rows that see no key have -inf"


def truth(logits: list[list[float]], values: list[list[float]], q_lens: list[int] | None = None, **rules: Any) -> Truth:
    """Requests of one head and head_dim 1: queries of 1, keys that are their logits."""
    q_lens = q_lens or [1] * len(logits)
    histories = [
        (torch.tensor(each).view(-1, 1, 1), torch.tensor(side).view(-1, 1, 1))
        for each, side in zip(logits, values, strict=True)
    ]
    usual = {"bmm1_scale": 1.0, "bmm2_scale": 1.0, "arithmetic": torch.float32, "out_dtype": torch.float32}
    return truth_of_requests(torch.ones(sum(q_lens), 1, 1), histories, q_lens, Rules(**usual | rules))


def outs(told: Truth) -> list[float]:
    assert torch.allclose(told.control.double(), told.expected, rtol=1e-5)
    return told.expected.flatten().tolist()


@pytest.mark.parametrize("elements", [2**26, 1])
def test_a_mask_says_which_of_the_newest_keys_a_row_sees(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest key is before the draft and seen by all; row 0 sees the draft's second token, row 1 its first. Also if the
    rows are computed one by one.
    """
    monkeypatch.setitem(PIECE_ELEMENTS, "cpu", elements)
    shown = torch.tensor([[[False, True], [True, False]]])
    assert outs(truth([[0.0] * 3], [[2.0, 4.0, 8.0]], [2], shown=shown)) == pytest.approx([5.0, 3.0])
    assert outs(truth([[0.0] * 2], [[4.0, 8.0]], [2], shown=shown)) == pytest.approx([8.0, 4.0])  # all keys are drafts


def test_the_control_rounds_operands_as_its_arithmetic_does() -> None:
    """1 + 2**-10 is 1 in bf16: the control's logit is 2, the truth's a thousandth more."""
    histories = [(torch.tensor([0.0, 64.0]).view(2, 1, 1), torch.tensor([0.0, 1.0]).view(2, 1, 1))]
    rules = Rules(bmm1_scale=1 / 32, arithmetic=torch.bfloat16, out_dtype=torch.float32)
    told = truth_of_requests(torch.full((1, 1, 1), 1.0 + 2**-10), histories, [1], rules)
    assert told.expected.item() == pytest.approx(1 / (1 + math.exp(-2.0 * (1 + 2**-10))), rel=1e-9)
    assert told.control.item() == pytest.approx(1 / (1 + math.exp(-2.0)), rel=1e-6)


@pytest.mark.parametrize(("scale", "shared"), [(0.25, 0.0), (torch.tensor(-2.0), 0.0), (0.9, 2.0**-9)])
def test_values_of_a_quantised_cache_may_be_rounded_after_they_are_scaled(scale: Any, shared: float) -> None:
    sides = torch.ones(3, 1, 1)
    rules = Rules(bmm2_scale=scale, arithmetic=torch.bfloat16, out_dtype=torch.bfloat16)
    query = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    for dtype, allowed in ((torch.bfloat16, 0.0), (torch.float8_e4m3fn, shared)):
        assert truth_of_requests(query, [(sides.to(dtype), sides.to(dtype))], [1], rules).shared_error == allowed


def test_requests_of_the_same_lengths_have_rows_where_they_stand_among_the_others() -> None:
    """Equal weights: means of the first keys up to each row's own; the third request is as long as the first."""
    told = truth([[0.0] * 2, [0.0] * 3, [0.0] * 2, []], [[2.0, 4.0], [1.0, 2.0, 9.0], [6.0, 0.0], []], [2, 1, 2, 1])
    assert outs(told) == pytest.approx([2.0, 3.0, 4.0, 6.0, 3.0, 0.0])
    assert told.lse_log2.flatten().tolist() == pytest.approx([0.0, 1.0, math.log2(3.0), 0.0, 1.0, -math.inf])
    assert told.request_of_row.tolist() == [0, 0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[1.0], [-math.inf]], ""),
        ([[1.5], [-math.inf]], "1 LSEs are wrong: row 0 head 0 is 1.5, not 1 (base 2)"),
        ([[LN2], [-math.inf]], "1 LSEs are wrong: row 0 head 0 is 0.693147, not 1 (base 2)"),
        ([[-math.inf], [-math.inf]], "1 LSEs are wrong: row 0 head 0 is -inf, not 1 (base 2)"),
        ([[math.nan], [0.0]], "2 LSEs are wrong: row 0 head 0 is nan, not 1 (base 2)"),
        *(
            ([[1.0], [value]], f"1 LSEs are wrong: row 1 head 0 is {value:g}, not -inf (base 2): {NO_KEY}")
            for value in (3.0, 0.0, math.nan, math.inf, -1e30)
        ),
        ([[1.0]], "the LSE is [1, 1], not [2, 1]"),
    ],
)
def test_a_wrong_lse_is_described(wrong: list[list[float]], message: str) -> None:
    """Two keys of one logit, whose LSE is 1 in base 2, and a request without keys."""
    told = truth([[0.0, 0.0], []], [[1.0, 1.0], []])
    assert told.wrong_lse(torch.tensor(wrong)) == message
    assert told.lse_ratio(told.lse_log2).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("least_bound", "bound"), [(0.0, 2.0**-24 + 2.0**-8), (0.1, 0.1)])
def test_two_roundings_are_always_allowed(least_bound: float, bound: float) -> None:
    """One to the dtype of the products, here float32, and one to the output's."""
    told = truth([[0.0, 0.0]], [[1.0, 1.0]])
    exact = replace(told, control=told.expected.bfloat16())
    assert exact.compare(exact.expected, least_bound).bound.item() == bound


def test_an_lse_may_differ_by_its_bound() -> None:
    """The LSE is 1; the bound is 0.004 and 1e-5 of the LSE."""
    told = truth([[0.0, 0.0]], [[1.0, 1.0]])
    assert told.wrong_lse(torch.tensor([[1.004]])) == ""
    assert told.wrong_lse(torch.tensor([[1.0041]])).startswith("1 LSEs are wrong")


def test_large_scores_that_float32_rounds_make_a_bound_larger() -> None:
    """Two keys of scores of about 2 ** 14 in base 2: float32 has multiples of 2 ** -10 there. A request of two small scores."""
    large = truth([[2.0**14 * LN2, 2.0**14 * LN2], [0.0, 0.0]], [[1.0, -0.5], [1.0, -0.5]])

    def bounds(error: float) -> list[float]:
        control = (large.expected * (1 + error)).float()
        return (
            replace(large, control=control, arithmetic=torch.float16).compare(large.expected).bound.flatten().tolist()
        )

    least = 2.0**-11 + 2.0**-24
    assert bounds(0.0) == [least, least]  # no rounding changes the result
    assert bounds(2.0**-12) == pytest.approx([4 * 2.0**-24 * LN2 * (2**14 + 1), 2.0**-10])
    assert bounds(2.0**-14) == pytest.approx([2.0**-10, least])
    assert bounds(0.2) == [0.5, 0.5]
