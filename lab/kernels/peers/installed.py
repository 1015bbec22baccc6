"""Look up functions of installed packages, and check their signatures before they are called."""

import functools
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lab.extras import require


@functools.cache
def installed_function(
    part: str, name: str, written_for: str, keywords: frozenset[str] = frozenset()
) -> Callable[..., Any]:
    """Return the function `name` after checking that it takes exactly `keywords`; with empty `keywords` the signature is not
    checked. Error messages name `part`, the module that needs the function, and `written_for`, the release for which the lab
    was written.

    Raises:
        ModuleNotFoundError: the package, or a package that it imports, is not installed.
        TypeError: the installed release lacks the function or a parameter, or requires a parameter that is not passed.
    """
    package = name.partition(".")[0]
    require(part, package)
    module, _, attribute = name.rpartition(".")
    here = f"the installed {package} {_version(package)}"
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise TypeError(f"{here} has no {name}; the lab is written for {written_for}") from error
    if keywords:
        try:
            inspect.signature(function).bind(**dict.fromkeys(keywords))
        except TypeError as error:
            raise TypeError(
                f"{name} of {here} does not take this call: {error}; the lab is written for {written_for}"
            ) from error
    return function


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a folder on the path
        return "of an unknown version"
