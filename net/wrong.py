"""Mutants under names that `lab judge` imports: `net.wrong:table_tail_read`. Made anew in each worker process."""

from corpus.kernels import kernel


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(name)
    return kernel(name).implementation()
