"""The checks. Each module is one check; its docstring says what it catches that random data would not show."""

import functools
import importlib
import pkgutil

from lab.checks.properties.check import Check


@functools.cache
def checks() -> tuple[Check, ...]:
    """Return the checks of all modules in this package, in the order of their keys: K1 to K18, L1, M1 to M3, R1, S1 and S2."""
    modules = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = (module.CHECK for module in modules if hasattr(module, "CHECK"))
    return tuple(sorted(found, key=lambda check: (check.key[0], int(check.key[1:]))))
