"""The slope of many vectors: by hand, what it must find, and what it must let pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.references import attention, eager_attention
from lab.references.errors import COMMON, DEVIATIONS, Regression, Truth, regress

ROWS = torch.arange(24).reshape(4, 6)  # four requests of six rows each
HEADS = 8


def truth(low: torch.dtype = torch.bfloat16, *, equal_weights: bool = False) -> Truth:
    """Requests of 40 keys, 6 rows of 8/2 heads of 64."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (4, 6, HEADS, 64), "keys": (4, 40, 2, 64), "values": (4, 40, 2, 64)}
    inputs: dict[str, Any] = {name: torch.randn(shape, generator=generator).to(low) for name, shape in shapes.items()}
    if equal_weights:
        inputs["query"].zero_()
    inputs |= {"visible": torch.ones(4, 6, 40, dtype=torch.bool), "bmm1_scale": 0.125}
    expected, lse_log2 = (side.flatten(0, 1) for side in attention(**inputs))
    control = eager_attention(**inputs, arithmetic=low, out_dtype=low).flatten(0, 1)
    return Truth(expected, control, lse_log2, torch.arange(4).repeat_interleave(6), low)


def regression(told: Truth, out: Tensor) -> Regression:
    return regress(out, told.expected, told.control, told.lse_log2, told.request_of_row, told.arithmetic)


def test_slopes_by_hand() -> None:
    """Two vectors, 2 and 0.5 times what they should be: each counts the same, whatever its length."""
    expected = torch.tensor([[[3.0, 4.0]], [[0.3, 0.0]]], dtype=torch.float64)
    out = torch.tensor([[[6.0, 8.0]], [[0.15, 7.0]]])
    found = regress(out, expected, expected, torch.tensor([[1.0], [9.0]]), torch.tensor([5, 5]), torch.float16)
    slopes = dict(zip(found.words, found.slope.tolist(), strict=True))
    assert slopes == pytest.approx(
        {
            "": 1.25,
            " of head 0": 1.25,
            " of request 5": 1.25,
            " of row 0 of each request": 2.0,
            " of row 1 of each request": 0.5,
            " of row -1 of each request": 0.5,
            " of row -2 of each request": 2.0,
        }
    )
    assert found.worst_group.tolist() == [[True], [False]]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_only_rounded_passes(low: torch.dtype) -> None:
    told = truth(low)
    for out in (told.expected, told.expected.to(low), told.control):
        comparison = told.compare(out)
        assert comparison.passed
        assert regression(told, out).worst_ratio < 0.6


@pytest.mark.parametrize("factor", [1.005, 0.995])
@pytest.mark.parametrize(
    ("rows", "heads", "words"),
    [
        (ROWS, slice(None), "all outputs are"),
        (ROWS, slice(3, 4), "all outputs of head 3 are"),
        (ROWS[2], slice(None), "all outputs of request 2 are"),
        (ROWS[:, 0], slice(None), "all outputs of row 0 of each request are"),
        (ROWS[:, 5], slice(None), "all outputs of row 5 of each request are"),
    ],
    ids=["everywhere", "one head", "one request", "first rows", "last rows"],
)
def test_a_bias_of_half_a_percent_is_found(rows: Tensor, heads: slice, words: str, factor: float) -> None:
    told = truth()
    out = told.expected.clone()
    out[rows.flatten(), heads] *= factor
    comparison = told.compare(out.to(torch.bfloat16))
    assert not comparison.wrong.any()
    assert not comparison.passed
    assert comparison.worst_ratio > 1
    sentence = told.wrong_output(comparison, out)
    assert sentence.startswith(words)
    assert f"too {'large' if factor > 1 else 'small'}: factor" in sentence
    wrong = torch.zeros(24, HEADS, dtype=torch.bool)
    wrong[rows.flatten(), heads] = True
    assert comparison.faulty.equal(wrong)
    assert wrong[comparison.worst(1)[0]]


def test_last_rows_of_requests_of_different_widths_are_a_group() -> None:
    told = truth()
    told = Truth(
        told.expected[:15],
        told.control[:15],
        told.lse_log2[:15],
        torch.arange(5).repeat_interleave(torch.arange(1, 6)),
        told.arithmetic,
    )
    out = told.expected.clone()
    out[[0, 2, 5, 9, 14]] *= 1.005
    assert told.wrong_output(told.compare(out), out).startswith(
        "all outputs of row -1 of each request are 0.50% too large"
    )


def test_what_a_check_allows_is_allowed() -> None:
    told = truth()
    out = told.expected * 1.005
    assert not told.compare(out).passed
    assert told.compare(out, least_bound=0.006).passed


def test_a_wrong_vector_is_told_and_no_slope() -> None:
    told = truth()
    out = told.expected * 1.005
    out[3, 2] = 0.0
    comparison = told.compare(out)
    assert comparison.regression is None
    assert told.wrong_output(comparison, out).startswith("1 of 192 vectors are wrong")


def test_vectors_of_zeros_are_in_no_group() -> None:
    told = truth()
    told.expected[6:12] = 0.0
    told.control[6:12] = 0.0
    found = regression(told, told.expected)
    assert found.worst_ratio == 0.0
    zeros = Truth(told.expected * 0, told.control * 0, told.lse_log2, told.request_of_row, told.arithmetic)
    assert regression(zeros, zeros.expected).words == ()
    assert zeros.compare(zeros.expected).passed


def test_e4m3_weights_are_not_judged() -> None:
    told = truth()
    told = Truth(told.expected, told.control, told.lse_log2, told.request_of_row, torch.float8_e4m3fn)
    assert regression(told, told.expected * 1.02).words == ()


def test_more_vectors_allow_less() -> None:
    """As one over the square root of their number, but for what all have in common."""
    found = regression(told := truth(), told.expected)
    bounds = dict(zip(found.words, found.bound.tolist(), strict=True))
    assert bounds[""] < 0.0012
    assert bounds[" of head 0"] < 0.003
    assert all(COMMON < bound < 0.005 for bound in bounds.values())


def test_rows_of_equal_weights_count_as_one() -> None:
    """All weights of all vectors are 1/40: a kernel that rounds it is off by one rounding everywhere."""
    told = truth(equal_weights=True)
    bound = float(regression(told, told.expected).bound[0])
    assert bound > DEVIATIONS * 0.42 * torch.finfo(torch.bfloat16).eps / 2
    rounded = told.expected * 40.0 * float(torch.tensor(1 / 40).to(torch.bfloat16))
    assert told.compare(rounded.to(torch.bfloat16)).passed
