"""An `lse` of the caller's is taken unless several of its elements lie at one address."""

import re
from types import SimpleNamespace

import pytest
import torch

from lab.calls.arguments import check_lse


def call(rows: int, heads: int, lse: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(query=torch.zeros(rows, heads, 8), lse=lse)


@pytest.mark.parametrize(
    ("rows", "heads", "shape"), [(3, 2, (3, 2)), (1, 2, (1, 2)), (3, 1, (3, 1)), (1, 1, (1, 1)), (0, 2, (0, 2))]
)
def test_one_element_may_have_a_stride_of_zero(rows: int, heads: int, shape: tuple[int, int]) -> None:
    lse = torch.zeros(rows, heads)
    lse = lse.as_strided(
        shape, tuple(0 if size == 1 else stride for size, stride in zip(shape, (heads, 1), strict=True))
    )
    assert check_lse(call(rows, heads, lse)) is lse


@pytest.mark.parametrize("strides", [(0, 1), (1, 0), (0, 0), (1, 1), (1, 2)])
def test_shared_elements_are_refused(strides: tuple[int, int]) -> None:
    lse = torch.zeros(6).as_strided((3, 2), strides)
    with pytest.raises(ValueError, match=re.escape(f"stride {strides}")):
        check_lse(call(3, 2, lse))


def test_a_row_of_two_elements_is_several() -> None:
    with pytest.raises(ValueError, match="share memory"):
        check_lse(call(1, 2, torch.zeros(1).expand(1, 2)))
