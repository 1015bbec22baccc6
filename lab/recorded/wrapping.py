"""Replace functions in all modules of this process, also in modules that are imported later."""

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


class Wrapping(importlib.abc.MetaPathFinder):
    """Replaces functions by wrappers.

    A function is found by its name in the modules of some packages. It is replaced in every module's attributes, whatever the
    attribute's name. A module of the packages that is imported later is searched right after its code has run, so that all who
    import the function from it get the wrapper.

    Args:
        wrap: returns the wrapper of a function, given the function's name and the function.
        names: names of the functions.
        packages: modules, or names of packages, that define the functions.
    """

    def __init__(
        self, wrap: Callable[[str, Function], Function], names: Sequence[str], packages: Sequence[Any]
    ) -> None:
        self._wrap, self._names = wrap, names
        self._modules = [each for each in packages if not isinstance(each, str)]
        self._packages = tuple(each if isinstance(each, str) else each.__name__ for each in packages)
        self._wrapper_of: dict[int, tuple[Function, Function]] = {}  # id of a function -> the function and its wrapper

    def install(self) -> None:
        """Wrap the functions in all modules, and begin to watch imports."""
        for module in [*self._modules, *_loaded()]:
            self._search(module)
        self._replace({id(function): wrapper for function, wrapper in self._wrapper_of.values()})
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Put the functions back in all modules, and stop watching imports."""
        sys.meta_path.remove(self)
        self._replace({id(wrapper): function for function, wrapper in self._wrapper_of.values()})

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module of the packages as the other finders do, and let its loader search it after its code has run."""
        if not self._watches(fullname):
            return None
        others = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_search(module: ModuleType) -> None:
                execute(module)
                self._search(module)
                _replace_in(module, {key: wrapper for key, (_, wrapper) in self._wrapper_of.items()})

            spec.loader.exec_module = execute_and_search  # type: ignore[method-assign]
        return spec

    def _watches(self, name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    def _search(self, module: ModuleType) -> None:
        """Make a wrapper of each function that a module of the packages has."""
        if not self._watches(module.__name__):
            return
        wrappers = {id(wrapper) for _, wrapper in self._wrapper_of.values()}
        for name in self._names:
            function = vars(module).get(name)
            if callable(function) and id(function) not in self._wrapper_of and id(function) not in wrappers:
                self._wrapper_of[id(function)] = function, self._wrap(name, function)

    def _replace(self, new: dict[int, Function]) -> None:
        for module in [*self._modules, *_loaded()]:
            _replace_in(module, new)


def _loaded() -> list[ModuleType]:
    return [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]


def _replace_in(module: ModuleType, new: dict[int, Function]) -> None:
    space = vars(module)
    for name, value in list(space.items()):
        if id(value) in new:
            space[name] = new[id(value)]
