"""All wrong kernels, by name."""

import importlib
import pkgutil
from types import ModuleType

import corpus.blind
import corpus.mutants
from corpus.wrong import KERNELS, WrongKernel


def _imported(package: ModuleType) -> dict[str, WrongKernel]:
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {
        name: kernel for name, kernel in KERNELS.items() if kernel.make.__module__.startswith(f"{package.__name__}.")
    }


BLIND = _imported(corpus.blind)
MUTANTS = _imported(corpus.mutants)


def kernel(name: str) -> WrongKernel:
    """Return the wrong kernel with this name.

    Raises:
        ValueError: there is no such kernel.
    """
    if name not in KERNELS:
        raise ValueError(f"no wrong kernel is called {name!r}; there are {', '.join(sorted(KERNELS))}")
    return KERNELS[name]
