"""Ways to break a good call, and the one thing that is asked of a broken one: words that help, and nothing written."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Arguments

POISON = 7.0

Breaks = Callable[[Arguments], Arguments]  # from good arguments to those that replace them
# name, what breaks the good call, error, words of its message
Bad = tuple[str, Breaks, type[Exception], tuple[str, ...]]


def value(**changes: Any) -> Breaks:
    return lambda good: changes


def tensor(name: str, change: Callable[[Tensor], Any]) -> Breaks:
    return lambda good: {name: change(good[name])}


def entry(name: str, index: tuple[int, ...], number: int) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        changed = good[name].clone()
        changed[index] = number
        return {name: changed}

    return breaks


def together(*parts: Breaks) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        changes: Arguments = {}
        for part in parts:
            changes |= part(good | changes)
        return changes

    return breaks


def to(where: torch.dtype | str) -> Callable[[Tensor], Tensor]:
    return lambda given: given.to(where)


def stretched(given: Tensor) -> Tensor:
    """Same values, every other element of the last dimension of a tensor twice as wide."""
    return given.repeat_interleave(2, dim=-1)[..., ::2]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bad_scales(*names: str) -> list[Bad]:
    """Scales that are no finite number and no tensor of one float32 element."""
    return [
        row
        for name in names
        for row in (
            (f"{name} is a string", value(**{name: "1"}), TypeError, (name, "'1'")),
            (f"{name} is None", value(**{name: None}), TypeError, (name, "None")),
            (f"{name} is NaN", value(**{name: math.nan}), ValueError, (name, "nan", "finite")),
            (f"{name} is infinite", value(**{name: math.inf}), ValueError, (name, "inf", "finite")),
            (f"{name} dtype", value(**{name: torch.ones(1).double()}), TypeError, (name, "float32", "float64")),
            (f"{name} per head", value(**{name: torch.ones(4)}), TypeError, (name, "one element", "[4]")),
        )
    ]


SKIP = "skip_softmax_threshold_scale_factor"
BAD_SKIP_SOFTMAX: list[Bad] = [
    ("skip below 0", value(**{SKIP: -1.0}), ValueError, (SKIP, "at least 0", "-1.0")),
    ("skip is NaN", value(**{SKIP: math.nan}), ValueError, (SKIP, "finite")),
    ("skip is text", value(**{SKIP: "1"}), TypeError, (SKIP, "'1'")),
    ("skip is a tensor", value(**{SKIP: torch.ones(1)}), TypeError, (SKIP, "tensor")),
]


def elsewhere(*names: str) -> list[Bad]:
    """Tensors on another device than the others."""
    return [
        (f"{name} elsewhere", tensor(name, to("meta")), ValueError, (f"{name} is on meta", "cpu")) for name in names
    ]


def not_modelled(**arguments: Any) -> list[Bad]:
    """Values of arguments that FlashInfer takes and the lab refuses, with a reason and what to pass."""
    return [
        (name, value(**{name: given}), NotImplementedError, (f"{name}=", "not modelled", "pass"))
        for name, given in arguments.items()
    ]


def each_of(bad: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", bad, ids=[row[0] for row in bad])


def assert_refused(function: Callable[..., Any], good: Arguments, row: Bad) -> None:
    """Break the good call: the error has the words, and neither `out` nor `lse` is written."""
    _, breaks, error, says = row
    out = good["out"]
    lse = torch.full((4, 4), POISON)
    with pytest.raises(error) as raised:
        function(**good | {"lse": lse} | breaks(good))
    missing = [words for words in says if words not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (out == POISON).all()
    assert (lse == POISON).all()
