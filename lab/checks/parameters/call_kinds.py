"""Define special kinds of attention calls, such as calls over an NVFP4 cache, which checks judge in addition to usual calls."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from lab.calls.problem import NVFP4, AttentionCall
from lab.checks.parameters.paged_axes import DECODES, MHA, RANKS
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Entries, HeadPages

Change = Callable[[AttentionCase], AttentionCase]  # raises ValueError for a case that cannot have the form


@dataclass(frozen=True)
class CallKind:
    interfaces: tuple[AttentionCall, ...]  # the functions that have calls of this kind
    forms: Callable[[Ranges], Sequence[Change]]  # returns for each form the change from a plain case to a special one

    def cases(self, plain: Sequence[AttentionCase], ranges: Ranges, count: int | None) -> Iterator[AttentionCase]:
        """Yield special calls: cases of `plain`, each changed by one function of `forms`, at most `count` (None: no limit)."""
        # The seed of the first usual case selects the form to begin with, so that different checks begin with different forms.
        forms = self.forms(ranges) if plain and plain[0].interface in self.interfaces else ()
        first = plain[0].seed % len(forms) if forms else 0
        turns = enumerate((*forms[first:], *forms[:first]))
        made = (_changed(change, [*plain[turn % len(plain) :], *plain]) for turn, change in turns)
        yield from islice(filter(None, made), count)


def _changed(change: Change, plain: Sequence[AttentionCase]) -> AttentionCase | None:
    for case in plain:
        with suppress(ValueError):
            return change(case)
    return None


def _selected_entries(ranges: Ranges) -> list[Change]:
    top_ks = cycle([top_k for top_k in ranges.top_ks if top_k] or [0])
    forms = [(entries, lens) for lens in (False, True) for entries in Entries if not (lens and entries.has_gaps)]
    return [
        partial(replace, top_k=top_k, entries=entries, top_k_lens=lens)
        for (entries, lens), top_k in zip(forms, top_ks, strict=False)
        if top_k
    ]


def of_rank(rank: tuple[int, int], case: AttentionCase) -> AttentionCase:
    """Return the case as the call of one context-parallel rank, without arguments that FlashInfer excludes in such calls.
    `rank` is (rank, number of ranks). Raises ValueError if no call of this rank has the case's lengths.
    """
    storage = replace(case.storage, kv_layout="HND")
    return replace(case, rank=rank, window_left=-1, sinks=False, offsets=False, storage=storage)


NVFP4_CACHE = CallKind(
    MHA, lambda ranges: [partial(replace, kv_dtype=NVFP4, arithmetic=None)] if True in ranges.nvfp4 else []
)
SELECTED_ENTRIES = CallKind((AttentionCall.MLA_DECODE,), _selected_entries)
BLOCK_SPARSE = CallKind(MHA[:1], lambda _: [partial(replace, head_pages=each, window_left=-1) for each in HeadPages])
ONE_RANK = CallKind(DECODES, lambda _: [partial(of_rank, rank) for rank in RANKS.values() if rank])
WITHOUT_RANKS = (NVFP4_CACHE, SELECTED_ENTRIES, BLOCK_SPARSE)
KINDS = (*WITHOUT_RANKS, ONE_RANK)
