"""torch's settings in the tests of other projects: none of them may change a result of the references."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls import CALL_TYPES
from lab.calls.problem import E4M3
from lab.references import assert_close_to_reference
from tests.cases import BATCHES, arguments_of
from tests.references.test_dsv4 import arguments_of as dsv4_arguments
from tests.references.test_dsv4 import drawn, two_pools


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": lambda: torch.device("meta"),  # stands for "cuda"
    "default dtype": lambda: default_dtype(torch.float16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
}


def call(function: str, dtype: torch.dtype) -> dict[str, Any]:
    if function not in BATCHES:
        pools = two_pools([2, 2], [3, 40], dtype)
        return dsv4_arguments(pools, drawn(*pools), bmm1_scale=0.3)
    return arguments_of(function, BATCHES[function]([2, 2], [3, 30], dtype=dtype), bmm1_scale=0.3)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("function", [each.value for each in CALL_TYPES])
def test_settings_change_no_result(
    function: str, dtype: torch.dtype, settings: Callable[[], AbstractContextManager[Any]]
) -> None:
    arguments = call(function, dtype)
    expected = getattr(references, function)(**arguments)
    with settings():
        found = getattr(references, function)(**arguments)
        assert_close_to_reference(found, **arguments)
    for ours, theirs in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert torch.equal(ours, theirs)


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_autocast_does_not_make_the_control_worse() -> None:
    query, keys, values = torch.randn(3, 1, 9, 2, 16, generator=torch.Generator().manual_seed(1)).unbind()
    given = query, keys, values, torch.ones(1, 9, 9, dtype=torch.bool)
    control = references.eager_attention(*given, arithmetic=torch.float32, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(
            references.eager_attention(*given, arithmetic=torch.float32, out_dtype=torch.float32), control
        )
