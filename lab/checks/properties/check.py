"""Define the checks of the judge: a check has a key such as K4, test cases, and a function that judges a kernel on a case."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from lab.calls.problem import NVFP4, AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import NUM_BUILDS, balanced, drawn_cases
from lab.checks.parameters.covering import Shard
from lab.checks.parameters.paged_axes import DECODES, MHA, RANKS
from lab.checks.parameters.sampling import DrawnPoint
from lab.checks.run.verdicts import CaseVerdict
from lab.named_enum import NamedEnum
from lab.names import CHECKS
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Entries, HeadPages
from lab.workloads.interfaces import PAGED_CALLS, Interface

WHOLE = Shard()
NEARBY_ROUNDS = 10  # rounds of `Check.nearby`: in most runs, five make wrong cases simpler, and further ones vary them
QUICK_BUILDS = 8  # kernels that the quick level compiles: as many as there are groups, and numbers of rows


class Level(NamedEnum):
    QUICK = "quick"  # the most informative cases, then the cases of SMOKE until the time is over
    SMOKE = "smoke"  # few cases
    FULL = "full"  # many cases


@dataclass(frozen=True)
class Scope:
    """What determines the fixed (not random) cases of a check: the judged function, its parameter values, and the level."""

    interface: Interface  # the function to judge
    ranges: Ranges  # the values that each parameter may have
    level: Level
    shard: Shard = WHOLE  # the part of a run on several machines; only K18 reads it
    is_chosen: Callable[[Any], bool] = lambda _: True  # False for a case that the run's profile leaves out

    @property
    def is_full(self) -> bool:
        return self.level is Level.FULL

    def counted(self, smoke: int, full: int) -> int:
        return full if self.is_full else smoke

    def balanced(self, smoke: int, full: int, seed: int) -> Iterator[AttentionCase]:
        """Yield random cases with equally frequent values of each parameter: `full` cases at level FULL, else `smoke`."""
        num_builds = QUICK_BUILDS if self.level is Level.QUICK else NUM_BUILDS
        return balanced(self.ranges, self.interface, self.counted(smoke, full), seed, num_builds)

    def on_fewest_heads(self, case: AttentionCase) -> AttentionCase:
        if case.is_mla:
            return replace(case, group=min(self.ranges.mla_heads))
        return replace(case, group=min(self.ranges.groups), num_kv_heads=min(self.ranges.num_kv_heads))


Change = Callable[[AttentionCase], AttentionCase]  # raises ValueError for a case that cannot have the form


@dataclass(frozen=True)
class CallKind:
    """A special kind of attention calls, such as calls over an NVFP4 cache, which checks judge in addition to usual calls."""

    interfaces: tuple[AttentionCall, ...]  # the functions that have calls of this kind
    forms: Callable[[Ranges], Sequence[Change]]  # returns for each form the change from a plain case to a special one

    def cases(self, plain: Sequence[AttentionCase], ranges: Ranges, count: int | None) -> Iterator[AttentionCase]:
        """Yield cases of this kind: cases of `plain`, each changed by a function of `forms`; at most `count`, if given."""
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
    top_ks = cycle(filter(None, ranges.top_ks))
    forms = [(entries, lens) for lens in (False, True) for entries in Entries if not (lens and entries.has_gaps)]
    return [
        partial(replace, top_k=top_k, entries=entries, top_k_lens=lens)
        for (entries, lens), top_k in zip(forms, top_ks, strict=False)
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

Following = Callable[[Scope, Sequence[CaseVerdict]], Iterable[Any]]  # from the verdicts so far: further cases


def itself(case: AttentionCase) -> AttentionCase:
    return case


@dataclass(frozen=True)
class Check:
    """A check of the judge: cases that reveal one kind of kernel error, and a function that judges a kernel on a case."""

    key: str  #: the check's short name, such as "K4"
    doc: str | None  #: the docstring of the check's module. Its first line says which errors the check finds.
    #: yields the fixed cases. Equal scopes give equal cases.
    fixed: Callable[[Scope], Iterable[Any]]
    #: judges one case by calls and expectations of a `CaseRun`. It raises `Unsupported` if nothing could be judged.
    judge: Callable[[CaseRun], None]
    interfaces: tuple[Interface, ...] = PAGED_CALLS  #: the functions that the check judges
    #: turns a random attention case into a case of this check; None for a check without random cases
    drawn: Callable[[AttentionCase], Any] | None = None
    #: for a level: functions that each return one further round of cases, from the verdicts on all earlier rounds. At the full
    #: level, the rounds follow the fixed cases of the smoke level. At the quick level, these fixed cases are the last round.
    more: Mapping[Level, Sequence[Following]] = field(default_factory=dict, hash=False)
    #: at the smoke and the full level: returns the next of `NEARBY_ROUNDS` further rounds of cases, from the verdicts of all
    #: checks on all earlier cases of the function
    nearby: Following | None = None
    quick: int = 2  #: number of fixed cases at the quick level, for a check without `more`
    #: yields further random cases, which are judged after all other cases if the run has time left
    draw_on: Callable[[Scope, Sequence[CaseVerdict]], Iterable[DrawnPoint]] = lambda *_: ()
    #: the special kinds of calls, such as calls over an NVFP4 cache, that the check judges too: one case of each kind, at the
    #: full level one case of each form of the kind
    kinds: tuple[CallKind, ...] = KINDS

    @property
    def name(self) -> str:
        """Return the check's name in snake_case, such as "poison" for K4; its key if the check has no name."""
        return CHECKS.get(self.key, self.key)

    @property
    def catches(self) -> str:
        return (self.doc or "").split("\n", 1)[0].removeprefix("Find ")

    def cases(self, interface: Interface, ranges: Ranges, level: Level, shard: Shard = WHOLE) -> Iterable[Any]:
        """Return the fixed (not random) cases for a function. If machines share a run, only cases of check K18 are divided."""
        cases = self.fixed(Scope(interface, ranges, level, shard))
        if self.more:
            return cases
        cases = [*cases]
        plain = [case for case in cases if isinstance(case, AttentionCase)]
        for kind in self.kinds:
            cases += kind.cases(plain, ranges, None if level is Level.FULL else 1)
        if level is not Level.QUICK:
            return cases
        count = min(self.quick, len(cases))
        return [cases[at * len(cases) // count] for at in range(count)]

    def draw(self, interface: Interface, ranges: Ranges) -> Iterable[DrawnPoint]:
        return () if self.drawn is None else drawn_cases(interface, ranges, self.drawn)
