"""Deliberate mutants: implementations that are right but for one defect, which prove that the judge's checks can fail.

A mutant is a class in a module here: its name in snake_case is the mutant's, its docstring says the defect. Most replace one
stage of the right model in `split_kv`. `mla=True` in the class statement makes a second mutant of the MLA decode call
(`mutant.Defective` lists the keywords). Nothing here is for use.
"""

from corpus.mutants import (
    batching,
    bias,
    caching,
    combined,
    draft_indices,
    forms,
    lse,
    masks,
    memory,
    merging,
    metadata,
    metadata_batches,
    mla,
    mla_metadata,
    mla_prefill_metadata,
    pages,
    ragged,
    ragged_range,
    ragged_tiles,
    rows,
    scales,
    sizes,
)
from corpus.mutants.mutant import Mutant, defects_of

_PAGED = defects_of(masks, scales, pages, merging, batching, memory, caching, lse, bias, combined, forms, rows, sizes)
MUTANTS: tuple[Mutant, ...] = (
    *map(Mutant.of, _PAGED),
    *(Mutant.of_mla(defective) for defective in _PAGED if defective.mla),
    *map(Mutant.of_mla, defects_of(mla)),
    *map(Mutant.of, defects_of(ragged, ragged_range, ragged_tiles, draft_indices)),
    *map(Mutant.of, defects_of(metadata, metadata_batches, mla_metadata, mla_prefill_metadata)),
)


def mutant(name: str) -> Mutant:
    """Return the mutant of that name.

    Raises:
        ValueError: there is none.
    """
    named = {each.name: each for each in MUTANTS}
    if name not in named:
        raise ValueError(f"no mutant is called {name!r}; there are {', '.join(sorted(named))}")
    return named[name]


__all__ = ["MUTANTS", "Mutant", "mutant"]
