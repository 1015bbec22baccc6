"""Mutants under names that `lab judge` imports: `net.wrong:table_tail_read`. Made anew in each worker process."""

from corpus.mutants import mutant


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(name)
    return mutant(name).implementation()
