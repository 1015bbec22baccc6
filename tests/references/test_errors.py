"""The judge: what it must find, and what it must let pass."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.references import Comparison, attention, compare, eager_attention, relative_l2

LOW = torch.bfloat16


def problem(kv_len: int = 256, rows: int = 4, seed: int = 0, low: torch.dtype = LOW) -> dict[str, Any]:
    """`rows` requests of one row each, 4/2 heads of 64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": (rows, 1, 4, 64), "keys": (rows, kv_len, 2, 64), "values": (rows, kv_len, 2, 64)}
    inputs: dict[str, Any] = {name: torch.randn(shape, generator=generator).to(low) for name, shape in shapes.items()}
    return inputs | {"visible": torch.ones(rows, 1, kv_len, dtype=torch.bool), "bmm1_scale": 64**-0.5}


def truth_and_control(inputs: dict[str, Any], out_dtype: torch.dtype = LOW) -> tuple[Tensor, Tensor]:
    truth, _ = attention(**inputs)
    control = eager_attention(**inputs, arithmetic=LOW, out_dtype=out_dtype)
    return truth.squeeze(1), control.squeeze(1)


def test_relative_l2_by_hand() -> None:
    expected = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[3.0, 4.0], [0.0, 0.0]]])
    out = torch.tensor([[[3.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1e-30]]])
    assert relative_l2(out, expected).tolist() == [[pytest.approx(0.2), 0.0], [1.0, math.inf]]


def test_the_ratio_of_no_error_is_0_whatever_its_bound() -> None:
    errors, bounds = torch.tensor([[0.0, 0.0, 1.0, 3.0]]), torch.tensor([[0.0, 0.5, 0.5, 4.0]])
    assert Comparison(errors, bounds).ratio.tolist() == [[0.0, 0.0, 2.0, 0.75]]


@pytest.mark.parametrize("power", [-20, -3, 6])
def test_an_e4m3_control_scales_each_row_to_its_whole_range(power: int) -> None:
    inputs = problem()
    inputs["query"][1] = 0
    scaled = inputs | {"query": inputs["query"] * 2.0**power, "bmm1_scale": inputs["bmm1_scale"] * 2.0**-power}
    controls = [
        eager_attention(**each, arithmetic=torch.float8_e4m3fn, out_dtype=torch.float32) for each in (inputs, scaled)
    ]
    assert bool(controls[0].isfinite().all())
    assert torch.equal(*controls)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_relative_l2_of_what_is_not_finite(bad: float) -> None:
    values, broken = torch.ones(1, 1, 4), torch.tensor([[[1.0, bad, 1.0, 1.0]]])
    for pair in ((broken, values), (values, broken), (broken, broken), (broken, torch.zeros(1, 1, 4))):
        assert relative_l2(*pair).tolist() == [[math.inf]]


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 4\].*\[3, 2, 4\]"):
        relative_l2(torch.ones(1, 2, 4), torch.ones(3, 2, 4))
    with pytest.raises(ValueError, match="shape"):
        compare(torch.ones(3, 2, 4), torch.ones(3, 2, 4), torch.ones(1, 2, 4))
    with pytest.raises(ValueError, match="groups must name the request of each of the 3 rows"):
        compare(torch.ones(3, 2, 4), torch.ones(3, 2, 4), torch.ones(3, 2, 4), groups=torch.tensor([0]))


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ([1.0], TypeError, "{} must be a torch.Tensor, got list"),
        (torch.ones(3, 2, 4, dtype=torch.int32), TypeError, "{} must be of a float dtype, got torch.int32"),
        (torch.ones(3, 2, 4, device="meta"), ValueError, " is on meta"),
        (torch.ones(3, 2), ValueError, "[3, 2]"),
    ],
)
def test_what_cannot_be_compared_is_named(bad: Any, error: type[Exception], says: str) -> None:
    for name in ("out", "expected", "control"):
        given = dict.fromkeys(("out", "expected", "control"), torch.ones(3, 2, 4)) | {name: bad}
        with pytest.raises(error, match=re.escape(says.format(name))):
            compare(**given)
    with pytest.raises(ValueError, match=r"expected must be \[num_rows, num_heads, head_dim\]"):
        compare(*[torch.ones(3, 2)] * 3)


def test_the_rounded_truth_passes_and_so_does_the_control() -> None:
    truth, control = truth_and_control(problem())
    assert compare(truth.to(LOW), truth, control).passed
    assert compare(control, truth, control).passed
    assert compare(truth, truth, control).worst_ratio == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_element_that_is_not_finite_is_found(bad: float) -> None:
    truth, control = truth_and_control(problem())
    out = truth.to(LOW)
    out[2, 3, 5] = bad
    verdict = compare(out, truth, control)
    assert not verdict.passed
    assert verdict.worst(1) == [(2, 3)]
    assert int(verdict.wrong.sum()) == 1


def test_zeros_never_pass_whatever_the_control() -> None:
    truth, control = truth_and_control(problem())
    for useless in (control, torch.zeros_like(control), control * 1e6):
        assert not compare(torch.zeros_like(truth), truth, useless).passed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("elements", [0.3, 0.499, 0.6, 3.4])  # in units of the dtype's smallest number
def test_a_rounded_output_that_underflows_is_right_and_others_are_not(dtype: torch.dtype, elements: float) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    truth = torch.full((1, 2, 64), elements * smallest, dtype=torch.float64)
    control = truth.to(dtype)
    assert compare(control, truth, control).passed
    assert not compare(control.double() + (1 if elements < 1 else 3) * smallest, truth, control).passed
    assert compare(torch.zeros_like(truth), truth, control).passed == (elements < 0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_control_or_truth_that_is_not_finite_is_refused(bad: float) -> None:
    truth, control = truth_and_control(problem())
    broken = truth.clone()
    broken[0, 0, 0] = bad
    with pytest.raises(ValueError, match="control must be finite"):
        compare(truth, truth, broken)
    with pytest.raises(ValueError, match="expected must be finite"):
        compare(truth, broken, control)


def test_no_bound_allows_an_infinite_error() -> None:
    infinite = torch.tensor([[math.inf]])
    assert not Comparison(error=infinite, bound=infinite).passed
    assert not Comparison(error=infinite * 0, bound=infinite).passed


def test_one_wrong_head_of_one_row_is_found() -> None:
    truth, control = truth_and_control(problem(rows=8))
    out = truth.to(LOW)
    out[5, 2] = out[5, 1]
    verdict = compare(out, truth, control)
    assert verdict.wrong.nonzero().tolist() == [[5, 2]]
    assert verdict.worst(1) == [(5, 2)]
    assert verdict.worst_ratio > 10


def test_the_bound_scales_with_the_control() -> None:
    truth, control = truth_and_control(problem())
    wide = truth + 2 * (control.double() - truth)
    bounds = [compare(truth, truth, each).bound for each in (control, wide)]
    torch.testing.assert_close(bounds[1], 2 * bounds[0])
    assert (bounds[0] == 4 * relative_l2(control, truth).max()).all()


def test_each_group_has_its_own_bound() -> None:
    truth, control = truth_and_control(problem())
    control = control.double()
    control[:2] = truth[:2]
    bound = compare(truth, truth, control, groups=torch.tensor([0, 0, 1, 1])).bound
    assert (bound[:2] == 0).all()
    assert (bound[2:] > 0).all()


def test_a_zero_truth_must_be_zero_and_allows_the_others_nothing() -> None:
    truth, control = truth_and_control(problem())
    truth[0], control[0] = 0.0, 1e-3
    verdict = compare(torch.where(truth == 0, 0.0, truth.to(LOW).double()), truth, control)
    assert verdict.passed
    assert float(verdict.bound.max()) < 0.05
    assert compare(control, truth, control).wrong[0].all()


@pytest.mark.parametrize("defect", ["last key lost", "first key lost", "one key twice"])
def test_one_key_of_8192_is_caught(defect: str) -> None:
    inputs = problem(kv_len=8192, rows=2)
    truth, control = truth_and_control(inputs)
    assert compare(truth.to(LOW), truth, control).passed
    visible = inputs["visible"].clone()
    if defect == "one key twice":
        inputs["keys"][:, 7], inputs["values"][:, 7] = inputs["keys"][:, 8], inputs["values"][:, 8]
    else:
        visible[:, :, -1 if defect == "last key lost" else 0] = False
    out, _ = attention(**inputs | {"visible": visible})
    assert not compare(out.squeeze(1).to(LOW), truth, control).passed


@pytest.mark.parametrize("arithmetic", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_the_control_is_attention_but_for_rounding(arithmetic: torch.dtype) -> None:
    inputs = problem() | {"bmm2_scale": 0.5, "sinks": torch.tensor([0.0, 2.0, -math.inf, 5.0])}
    inputs["visible"][1, :, 100:] = False
    inputs["visible"][2] = False
    truth, _ = attention(**inputs)
    control = eager_attention(**inputs, arithmetic=arithmetic, out_dtype=torch.float32)
    error = relative_l2(control.squeeze(1), truth.squeeze(1))
    roundoff = torch.finfo(arithmetic).eps / 2
    assert float(error.max()) < 4 * roundoff + 1e-6
    assert (control[2] == 0).all()
    assert arithmetic == torch.float32 or float(error.max()) > roundoff / 16


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0, 2, 4)
    verdict = compare(empty, empty, empty)
    assert verdict.passed
    assert verdict.worst_ratio == 0.0


@pytest.mark.parametrize("arithmetic", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("sinks", [None, torch.ones(4)], ids=["no sinks", "sinks"])
def test_the_control_of_no_keys_is_zero(sinks: Tensor | None, arithmetic: torch.dtype) -> None:
    nothing, visible = torch.zeros(1, 0, 2, 16), torch.zeros(1, 2, 0, dtype=torch.bool)
    options: dict[str, Any] = {"arithmetic": arithmetic, "out_dtype": torch.bfloat16, "sinks": sinks}
    control = eager_attention(torch.ones(1, 2, 4, 16), nothing, nothing, visible, **options)
    assert control.equal(torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16))
