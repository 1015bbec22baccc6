"""Kernels that are known to be wrong, right or dishonest, and what finds them. Nothing of the lab imports it.

    lab judge corpus:blind149
    python -m corpus --workers 32 --only 'blind14*'

`corpus.wrong` says what form a wrong kernel has. Each is an attribute here, so that the judge loads it by its name. Those
called blind are from writers who had not seen the judge: [results/blind.md](../results/blind.md) says which were found as they
were handed over. The others, the mutants, were made for the judge's checks: `lab mutants` records which of them each check
finds. `corpus.right` has right kernels of other arithmetic, `corpus.dishonest` kernels that want a time or a verdict.
"""

import functools
import importlib.util
from typing import Any


@functools.cache
def __getattr__(name: str) -> Any:
    """Return the implementation of the wrong kernel of that name, one for this process."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(name)
    from corpus.kernels import KERNELS

    if name not in KERNELS:
        raise AttributeError(f"no wrong kernel is called {name!r}")
    return KERNELS[name].implementation()
