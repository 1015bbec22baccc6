"""Judge an implementation: every check of the catalogue, over every function that it has."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lab.checks.catalogue import checks
from lab.checks.check import Check, Level, same
from lab.checks.isolation import Isolation
from lab.checks.ledger import LEDGER, KnownFinding, known
from lab.checks.report import CaseVerdict, Report
from lab.checks.space import Space
from lab.checks.verdicts import Outcome
from lab.extras import require
from lab.gpus import capability_of
from lab.loading import load
from lab.provenance import environment
from lab.workloads.forward_case import ForwardCase
from lab.workloads.interfaces import Interface

DRAWN_CASES = {Level.SMOKE: 2, Level.FULL: 30}
CASES_PER_WORKER = 8  # handed out together: enough that workers seldom wait for the slowest of them
SMOKE_LONGEST = 200  # keys
MOST_SHRINKS = 60  # calls of the judge that Hypothesis may spend on making a failing case smaller
TIME_LIMIT_S = 120.0

Progress = Callable[[CaseVerdict], None]


def interfaces_of(implementation: Any) -> list[Interface]:
    """Return the functions that an implementation has."""
    return [interface for interface in Interface if callable(getattr(implementation, interface.value, None))]


def judge(
    implementation: Any,
    *,
    level: Level = Level.SMOKE,
    space: Space | None = None,
    only: Sequence[str] = (),
    functions: Sequence[str] = (),
    device: torch.device | str | None = None,
    isolated: bool = False,
    workers: int = 1,
    time_limit_s: float = TIME_LIMIT_S,
    most_seconds: float = math.inf,
    drawn: int | None = None,
    ledger: Sequence[KnownFinding] = LEDGER,
    progress: Progress | None = None,
) -> Report:
    """Find out whether an implementation is right.

    What it declines with NotImplementedError or ValueError, or for want of a parameter, is listed as declined; what it
    accepts must be right.

    Args:
        implementation: a module or object with one or more of the names of `lab.workloads.interfaces.Interface`, or the
            name of one to import: "package.module" or "package.module:attribute".
        level: SMOKE or FULL.
        space: the axes of the cases; narrow them to what a kernel was built for.
        only: keys or names of the checks to run, such as "K4" or "poison"; all if empty.
        functions: names of the functions to judge; all that it has if empty.
        device: where to run; a GPU if there is one.
        isolated: each case runs in a worker process that is replaced when it crashes or does not return; the
            implementation must then be given by name.
        workers: processes at a time, if isolated; kernels that compile for each case are judged sooner by several.
        time_limit_s: of one case, if isolated.
        most_seconds: after so long, no further case is begun; the report counts what was left out, and is not right. Checks
            take turns, so that each has judged some of its cases before any has judged all.
        drawn: cases that Hypothesis draws per check and function; the level's number if None.
        ledger: recorded findings that are told apart from new ones.
        progress: called with each verdict.

    Raises:
        ModuleNotFoundError: a package of the extra `judge` is not installed.
        ValueError: it has none of the names, a check does not exist, or isolation was asked for an object.
    """
    require("The judge", "hypothesis", "pebble", "rich")
    where = _device(device)
    capability = capability_of(where)
    if isolated and not isinstance(implementation, str):
        raise ValueError(f"an isolated judge imports the implementation by name; got {implementation!r}")
    name, loaded = _named(implementation)
    offered = [each for each in interfaces_of(loaded) if not functions or each.value in functions]
    if not offered:
        raise ValueError(f"{name} has none of {', '.join(functions or [interface.value for interface in Interface])}")
    chosen = _chosen(only)
    given = space or Space()
    axes = replace(given, longest=min(given.longest, SMOKE_LONGEST)) if level is Level.SMOKE else given
    count = DRAWN_CASES[level] if drawn is None else drawn

    def note(verdict: CaseVerdict) -> CaseVerdict:
        told = known(verdict, ledger, capability)
        if progress is not None:
            progress(told)
        return told

    end = time.monotonic() + most_seconds
    with Isolation(name if isolated else loaded, where, given, time_limit_s, workers) as isolation:
        turns = [
            _Bench(name, check, interface, isolation, note, end).turns(axes, level, count)
            for check, interface in itertools.product(chosen, offered)
            if interface in check.interfaces
        ]
        # In rounds, so that time that ends early leaves no check without a verdict.
        rounds = list(itertools.zip_longest(*turns, fillvalue=_Turn([], 0)))
    judged = [turn for of_bench in zip(*rounds, strict=True) for turn in of_bench]
    verdicts = tuple(verdict for turn in judged for verdict in turn.verdicts)
    left_out = sum(turn.left_out for turn in judged)
    numbered = tuple(replace(verdict, number=number) for number, verdict in enumerate(verdicts, 1))
    return Report(name, level, environment(), str(where), numbered, left_out, given)


def judge_case(
    implementation: Any,
    check: str,
    case: Any,
    device: torch.device | str | None = None,
    space: Space | None = None,
) -> CaseVerdict:
    """Judge one case of one check in this process, as a reproduction does.

    Args:
        implementation: as in `judge`.
        check: its key or name.
        case: of that check.
        device, space: as in `judge`.
    """
    where = _device(device)
    name, loaded = _named(implementation)
    (chosen,) = _chosen((check,))
    interface = getattr(case, "interface", chosen.interfaces[0])
    with Isolation(loaded, where, space or Space(), TIME_LIMIT_S) as isolation:
        return _Bench(name, chosen, interface, isolation).verdicts([case])[0]


def judge_forward(implementation: Any, case: ForwardCase, device: torch.device | str | None = None) -> CaseVerdict:
    """Judge one forward pass from each request's K/V history to a kernel's output, by the check `forward_modes`.

    The pool, the metadata and the kernel's arguments are built as an engine builds them, and what must not matter is poisoned.
    The truth is computed from the histories, as they were written token by token, and never from a page table, a length or an
    offset, so that a wrong one of these fails like a wrong kernel does.

    Args:
        implementation: as in `judge`, with the functions that the pass calls.
        case: the pass.
        device: as in `judge`.
    """
    return judge_case(implementation, "M1", case, device)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _named(implementation: Any) -> tuple[str, Any]:
    """Return an implementation's name, and itself: imported if it was given by name."""
    if isinstance(implementation, str):
        return implementation, load(implementation)
    return str(getattr(implementation, "__name__", type(implementation).__name__)), implementation


def _chosen(only: Sequence[str]) -> tuple[Check, ...]:
    catalogue = checks()
    named = {name: check for check in catalogue for name in (check.key, check.key.lower(), check.name)}
    missing = [name for name in only if name not in named]
    if missing:
        raise ValueError(f"there is no check {missing[0]!r}; there are {', '.join(check.name for check in catalogue)}")
    wanted = {named[name].key for name in only}
    return tuple(check for check in catalogue if not only or check.key in wanted)


class _Found(Exception):  # noqa: N818 - what Hypothesis is to make smaller
    """A drawn case is wrong."""

    def __init__(self, verdict: CaseVerdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


class _Turn(NamedTuple):
    """Verdicts of some cases, and the number of cases left out, time being over."""

    verdicts: list[CaseVerdict]
    left_out: int


@dataclass(frozen=True)
class _Bench:
    """One check of one function of an implementation.

    Attributes:
        name: of the implementation.
        check, interface: what is judged.
        isolation: where cases run.
        note: called with each verdict; returns it as it is reported.
        end: no case is begun after this time, of `time.monotonic`.
    """

    name: str
    check: Check
    interface: Interface
    isolation: Isolation
    note: Callable[[CaseVerdict], CaseVerdict] = same
    end: float = math.inf

    def turns(self, axes: Space, level: Level, count: int) -> Iterator[_Turn]:
        """Judge the fixed cases, first one for each worker and then several in each turn, and `count` drawn ones last."""
        cases = list(self.check.cases(self.interface, axes, level))
        first = self.isolation.workers
        yield self._in_time(cases[:first])
        for start in range(first, len(cases), self.at_once):
            yield self._in_time(cases[start : start + self.at_once])
        if self.check.adapt is not None and count:
            yield self._drawn(self.check.adapt, axes, count)

    @property
    def at_once(self) -> int:
        """Cases that are handed out together."""
        return CASES_PER_WORKER * self.isolation.workers

    def _in_time(self, cases: Sequence[Any], drawn: bool = False) -> _Turn:
        return _Turn([], len(cases)) if time.monotonic() > self.end else _Turn(self.verdicts(cases, drawn), 0)

    def verdicts(self, cases: Sequence[Any], drawn: bool = False) -> list[CaseVerdict]:
        """Return the verdict of each case, in order; several workers judge at a time."""
        start = time.perf_counter()
        waiting = [self.isolation.submit(self.check.key, case) for case in cases]
        return [
            self.note(
                CaseVerdict(
                    implementation=self.name,
                    check=self.check.key,
                    interface=self.interface,
                    case=case,
                    device=str(self.isolation.device),
                    space=self.isolation.space,
                    judged=wait(),
                    seconds=time.perf_counter() - start,
                    drawn=drawn,
                )
            )
            for case, wait in zip(cases, waiting, strict=True)
        ]

    def _drawn(self, adapt: Callable[[Any], Any], space: Space, count: int) -> _Turn:
        """Let Hypothesis draw cases, and several workers judge them.

        Returns:
            The verdicts of the right ones and of the first wrong one, as small as it gets.
        """
        from hypothesis import HealthCheck, Phase, given, settings

        if time.monotonic() > self.end:
            return _Turn([], count)
        cases: dict[Any, None] = {}
        seen: dict[Any, CaseVerdict] = {}
        failures = 0

        # Called twice, since Hypothesis draws the same cases for the same function alone: to hear them, then to make one
        # smaller.
        @settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(space.drawn(self.interface))
        def holds(drawn: Any) -> None:
            nonlocal failures
            case = adapt(drawn)
            if not seen:
                cases[case] = None
                return
            if case not in seen:
                if not failures or failures > MOST_SHRINKS:
                    return
                failures += 1
                seen[case] = self.verdicts([case], drawn=True)[0]
            if _is_fault(seen[case]):
                failures = failures or 1
                raise _Found(seen[case])

        holds()
        left_out = 0
        for start in range(0, len(cases), self.at_once):
            several = list(cases)[start : start + self.at_once]
            turn = self._in_time(several, drawn=True)
            seen |= zip(several, turn.verdicts, strict=bool(turn.verdicts))
            left_out += turn.left_out
        smallest = []
        try:
            if any(map(_is_fault, seen.values())):
                holds()
        except _Found as found:
            smallest = [found.verdict]
        return _Turn([verdict for verdict in seen.values() if not _is_fault(verdict)] + smallest, left_out)


def _is_fault(verdict: CaseVerdict) -> bool:
    return verdict.outcome in (Outcome.WRONG, Outcome.FAILED)
