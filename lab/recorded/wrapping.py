"""Replace functions in all modules of this process, also in modules that are imported later."""

import importlib.abc
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class Wrapping(importlib.abc.MetaPathFinder):
    """Replaces functions by wrappers, in the attributes of all modules, whatever the attribute's name.

    A module of the packages that is imported later is searched right after its code has run, so that all who import a function
    from it get the wrapper.

    Args:
        wrap: returns the wrapper of a function, made by `functools.wraps`, given the function's name and the function.
        names: names of the functions.
        packages: modules, or names of packages, that have the functions.
    """

    def __init__(
        self, wrap: Callable[[str, Function], Function], names: Sequence[str], packages: Sequence[Any]
    ) -> None:
        self._wrap, self._names = wrap, names
        self._packages = tuple(each if isinstance(each, str) else each.__name__ for each in packages)
        self._wrappers: dict[int, Any] = {}  # by the id of the function

    def install(self) -> None:
        """Wrap the functions in all modules, and begin to watch imports."""
        for module in filter(self._watches, list(sys.modules)):
            self._search(sys.modules[module])
        _replace(self._wrappers, *sys.modules.values())
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Put the functions back in all modules, and stop watching imports."""
        sys.meta_path.remove(self)
        _replace({id(wrapper): wrapper.__wrapped__ for wrapper in self._wrappers.values()}, *sys.modules.values())

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module of the packages as the other finders do, and let its loader search it after its code has run."""
        others = [each for each in sys.meta_path if each is not self and self._watches(fullname)]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_search(module: ModuleType) -> None:
                execute(module)
                self._search(module)
                _replace(self._wrappers, module)

            spec.loader.exec_module = execute_and_search  # type: ignore[method-assign]
        return spec

    def _watches(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def _search(self, module: ModuleType) -> None:
        """Make the wrappers of the functions that a module has."""
        wrappers = {*map(id, self._wrappers.values())}
        for name in self._names:
            function = getattr(module, "__dict__", {}).get(name)
            if callable(function) and id(function) not in wrappers | self._wrappers.keys():
                self._wrappers[id(function)] = self._wrap(name, function)


def _replace(new: Mapping[int, Function], *modules: ModuleType) -> None:
    """Replace attributes of modules: each whose id is a key."""
    for module in modules:
        space = getattr(module, "__dict__", {})
        for name, value in list(space.items()):
            if id(value) in new:
                space[name] = new[id(value)]
