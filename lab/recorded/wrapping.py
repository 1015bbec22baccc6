"""Find functions of packages by name, and replace them in all modules of this process."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Function = Callable[..., Any]


def functions_of(names: Sequence[str], packages: Sequence[str]) -> dict[int, tuple[str, Function]]:
    """Import packages, and find the functions with these names in them and in their submodules that are already imported.
    Return (name, function) for each function, by its id().
    """
    for package in packages:
        importlib.import_module(package)
    modules = [
        module
        for name, module in list(sys.modules.items())
        if any(name == package or name.startswith(f"{package}.") for package in packages)
    ]
    found = ((name, getattr(module, "__dict__", {}).get(name)) for module in modules for name in names)
    return {id(function): (name, function) for name, function in found if callable(function)}


def replace_everywhere(new: Mapping[int, Function]) -> None:
    """In all imported modules, replace each attribute whose value has its id() in `new`, by `new[id(value)]`."""
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", {})
        for name, value in list(space.items()):
            if id(value) in new:
                space[name] = new[id(value)]
