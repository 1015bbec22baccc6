"""Rules for the dataclasses of a package: they are frozen, and what cannot be compared by value is compared by identity."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

WITHOUT_VALUE = ("Tensor", "Callable", "Mapping", "Any")  # in a field's type


def broken_rules(package: ModuleType) -> list[str]:
    """Return the names of the package's dataclasses that can be changed, or that compare tensors, functions or mappings."""
    return [
        each.__name__
        for each in _dataclasses(package)
        if not each.__dataclass_params__.frozen or each.__dataclass_params__.eq == _has_no_value(each)
    ]


def _dataclasses(package: ModuleType) -> Iterator[Any]:
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for each in vars(importlib.import_module(module.name)).values():
            if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.name:
                yield each


def _has_no_value(each: Any) -> bool:
    """Tell whether a dataclass has such a field, and does not leave it out of its hash."""
    held = [str(field.type) for field in fields(each) if field.hash is not False]
    return any(word in text for text in held for word in WITHOUT_VALUE)
