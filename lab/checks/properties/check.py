"""A check as data: its key, its cases, and the function that judges a case."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import NUM_BUILDS, balanced, drawn_cases
from lab.checks.parameters.call_kinds import KINDS, CallKind
from lab.checks.parameters.covering import Shard
from lab.checks.parameters.sampling import DrawnPoint
from lab.checks.run.verdicts import CaseVerdict
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import PAGED_CALLS, Interface

WHOLE = Shard()
QUICK_BUILDS = 8  # as many as there are groups and numbers of rows


class Level(NamedEnum):
    """The number of cases of a check: few at SMOKE, many at FULL. QUICK has those first that tell the most, then the others of
    SMOKE while there is time.
    """

    QUICK = "quick"
    SMOKE = "smoke"
    FULL = "full"


@dataclass(frozen=True)
class Scope:
    """The input from which a check makes its fixed cases: the function to judge, the ranges of its arguments, the level, and
    the shard, for a check that divides its cases itself.
    """

    interface: Interface
    ranges: Ranges
    level: Level
    shard: Shard = WHOLE

    @property
    def is_full(self) -> bool:
        return self.level is Level.FULL

    def counted(self, smoke: int, full: int) -> int:
        return full if self.is_full else smoke

    def balanced(self, smoke: int, full: int, seed: int) -> Iterator[AttentionCase]:
        """Yield random attention cases, `smoke` or `full` of them. All permitted values of a parameter occur equally often."""
        # The number of combinations that cases share of values for which a kernel is compiled.
        num_builds = QUICK_BUILDS if self.level is Level.QUICK else NUM_BUILDS
        return balanced(self.ranges, self.interface, self.counted(smoke, full), seed, num_builds)

    def on_fewest_heads(self, case: AttentionCase) -> AttentionCase:
        """Return the case with the fewest heads that the ranges allow, so that it runs faster."""
        if case.is_mla:
            return replace(case, group=min(self.ranges.mla_heads))
        return replace(case, group=min(self.ranges.groups), num_kv_heads=min(self.ranges.num_kv_heads))


# Cases of one shard that follow from its verdicts so far, and random ones within what the verdicts say that the implementation
# takes.
Following = Callable[[Interface, Ranges, Sequence[CaseVerdict], Shard], Iterable[Any]]
DrawOn = Callable[[Interface, Ranges, Sequence[CaseVerdict]], Iterable[DrawnPoint]]


def itself(case: AttentionCase) -> AttentionCase:
    return case


@dataclass(frozen=True)
class Check:
    """One check: the cases that show one kind of mistake, and the function that judges them."""

    key: str  #: the check's short name, such as "K4"
    name: str  #: the check's name in snake_case, such as "poison"
    doc: str | None  #: the docstring of the module, whose first line says what the check catches
    #: yields the fixed cases for a scope (function, ranges and level). They are the same in every run
    fixed: Callable[[Scope], Iterable[Any]]
    #: judges one case: it makes calls by the methods of a `CaseRun`, and gives it the expected results. It raises `Unsupported`
    #: if nothing could be judged
    judge: Callable[[CaseRun], None]
    interfaces: tuple[Interface, ...] = PAGED_CALLS  #: the functions that the check judges
    #: turns a random attention case into a case of this check; None for a check without random cases
    drawn: Callable[[AttentionCase], Any] | None = None
    #: by the level, one function for each further round of cases. A function gets the verdicts of all earlier rounds, and
    #: returns the cases of its round. At the full level the rounds follow the smoke level's cases, which at the quick level are
    #: the last round: each shard has all of them. Of other rounds a shard has the cases of its own goals
    more: Mapping[Level, Sequence[Following]] = field(default_factory=dict, hash=False)
    quick: int = 2  #: cases at the quick level, spread over the fixed ones; a check with `more` has its own
    #: yields further random cases, which are judged after the level's cases if the run has time left
    draw_on: DrawOn = lambda *_: ()
    #: the special kinds of calls that the check judges too, in cases made from its attention cases: one case of a kind, at the
    #: full level one of each form of it
    kinds: tuple[CallKind, ...] = KINDS

    @property
    def catches(self) -> str:
        return (self.doc or "").split("\n", 1)[0]

    def cases(self, interface: Interface, ranges: Ranges, level: Level, shard: Shard = WHOLE) -> Iterable[Any]:
        """Return the fixed cases of the check for one function, within the ranges, at a level. Only a check that divides its
        cases itself reads the shard; the cases of other checks are those of all shards.
        """
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
        """Return an endless series of random cases; no case if `drawn` is None."""
        return () if self.drawn is None else drawn_cases(interface, ranges, self.drawn)


def balanced_cases(smoke: int, full: int, seed: int) -> Callable[[Scope], Iterable[AttentionCase]]:
    """Return a function for `Check.fixed`, which yields the cases of `Scope.balanced` with these numbers and this seed."""
    return lambda scope: scope.balanced(smoke, full, seed)
