"""Deliberate mutants: implementations that are right but for one defect, which prove that the judge's checks can fail.

`split_kv` is the right model that most of them change one stage of. Nothing here is for use.
"""

from lab.checks.mutants import (
    batching,
    caching,
    draft_indices,
    lse,
    masks,
    memory,
    merging,
    metadata,
    mla,
    mla_metadata,
    pages,
    ragged,
    scales,
)
from lab.checks.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *masks.MUTANTS,
    *scales.MUTANTS,
    *pages.MUTANTS,
    *merging.MUTANTS,
    *batching.MUTANTS,
    *memory.MUTANTS,
    *caching.MUTANTS,
    *lse.MUTANTS,
    *mla.MUTANTS,
    *ragged.MUTANTS,
    *draft_indices.MUTANTS,
    *metadata.MUTANTS,
    *mla_metadata.MUTANTS,
)


def mutant(name: str) -> Mutant:
    """The mutant of that name.

    Raises:
        ValueError: there is none.
    """
    named = {each.name: each for each in MUTANTS}
    if name not in named:
        raise ValueError(f"no mutant is called {name!r}; there are {', '.join(sorted(named))}")
    return named[name]


__all__ = ["MUTANTS", "Mutant", "mutant"]
