"""Kernels that are known to be wrong, right or dishonest, for tests of the judge. The lab does not import this package.

    lab judge corpus:blind149
    python -m corpus --workers 32 --only 'blind14*'

`corpus.wrong` defines the form of a wrong kernel. Each wrong kernel is an attribute of this package, so that the judge can load
it by its name. Kernels named blind... are from writers who had not seen the judge; [results/blind.md](../results/blind.md)
lists which of them the judge found at their delivery. The other wrong kernels, the mutants, were made for the judge's checks;
`lab mutants` records which mutants each check finds. `corpus.right` has right kernels with other arithmetic. `corpus.dishonest`
has kernels that try to get a false time or verdict.
"""

import functools
import importlib.util
from typing import Any


@functools.cache
def __getattr__(name: str) -> Any:
    """Return the implementation of the wrong kernel with this name; each process has one instance."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(name)
    from corpus.kernels import KERNELS

    if name not in KERNELS:
        raise AttributeError(f"no wrong kernel is called {name!r}")
    return KERNELS[name].implementation()
