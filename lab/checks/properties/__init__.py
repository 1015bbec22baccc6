"""The checks of the judge, which tests attention kernels for correctness. Each check, such as K4 (poison), is a module, whose
docstring says which errors the check finds.
"""

import functools
import importlib
import pkgutil

from lab.checks.properties.check import Check


@functools.cache
def checks() -> tuple[Check, ...]:
    """Return the checks, sorted by key, except R1 (recorded calls) and the checks of the module `invariance`.

    K1 to K15 judge single attention calls, K16 and K17 the metadata of a batch, and K18 combinations of arguments. L1 judges
    the KV index lists of a speculative draft, M1 to M3 forward passes, and S1 and S2 CUDA graph replays.
    """
    modules = (importlib.import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = (module.CHECK for module in modules if hasattr(module, "CHECK"))
    return tuple(sorted(found, key=lambda check: (check.key[0], int(check.key[1:]))))


@functools.cache
def checks_by_key() -> dict[str, Check]:
    recorded = importlib.import_module(f"{__name__}.recorded").RECORDED_CALLS
    factors = importlib.import_module(f"{__name__}.invariance").FACTORS
    return {check.key: check for check in (*checks(), recorded, *factors)}
