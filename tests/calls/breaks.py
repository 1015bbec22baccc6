"""Ways to break a good call, and the one thing that is asked of a broken one: words that help, and nothing written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

POISON = 7.0

Arguments = dict[str, Any]
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


def each_of(bad: list[Bad]) -> pytest.MarkDecorator:
    """Parametrize a test with (breaks, error, says)."""
    return pytest.mark.parametrize(("breaks", "error", "says"), [pytest.param(*row[1:], id=row[0]) for row in bad])


def assert_refused(
    function: Callable[..., Any], good: Arguments, breaks: Breaks, error: type[Exception], says: tuple[str, ...]
) -> None:
    """Break the good call: the error has the words, and neither `out` nor `lse` is written."""
    out = good["out"]
    lse = torch.full((4, 4), POISON)
    with pytest.raises(error) as raised:
        function(**good | {"lse": lse} | breaks(good))
    missing = [words for words in says if words not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (out == POISON).all()
    assert (lse == POISON).all()
