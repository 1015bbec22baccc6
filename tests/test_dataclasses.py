"""Dataclasses are frozen, and what cannot be compared by value is compared by identity."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

WITHOUT_VALUE = ("Tensor", "Callable", "Mapping", "Any")  # in a field's type


def dataclasses_of(package: str) -> Iterator[Any]:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.name:
                yield each


def has_no_value(each: Any) -> bool:
    """Tell whether a dataclass has such a field, and does not leave it out of its hash."""
    held = [str(field.type) for field in fields(each) if field.hash is not False]
    return any(word in text for text in held for word in WITHOUT_VALUE)


@pytest.mark.parametrize(
    ("package", "growing"),
    [
        *((f"lab.{name}", []) for name in ("calls", "checks.explain", "kernels.support", "references")),
        ("lab.metadata", ["_Request"]),
        ("lab.timing", ["DeviceState"]),
    ],
)
def test_dataclasses_are_frozen_and_those_with_tensors_or_functions_are_compared_by_identity(
    package: str, growing: list[str]
) -> None:
    broken = (
        each.__name__
        for each in dataclasses_of(package)
        if not each.__dataclass_params__.frozen or each.__dataclass_params__.eq == has_no_value(each)
    )
    assert [*broken] == growing
