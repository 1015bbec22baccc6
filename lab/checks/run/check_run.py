"""The cases of one check and one function, judged in turns: the fixed ones, what follows from them, and the drawn ones."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for_futures
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lab.checks.parameters.sampling import Sample, shrunk
from lab.checks.properties.check import Check, Level
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Judged, Outcome
from lab.checks.run.workers import Pending, TooLate, Workers
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface

CASES_PER_WORKER = 8  # of a turn
SMOKE_LONGEST = 200  # keys
MOST_SHRINKS = 60  # calls of the judge to make one wrong case smaller
MOST_KEPT = 2000  # right random cases in the report
MOST_WRONG = 10  # different wrong ones, after which no more are drawn

# Begins cases and keeps their verdicts; yields the case that it waits for next, so that other checks go on until it is ready.
Waits = Generator[Pending, None, None]
# What tells verdicts of a report apart: the check, the reprs of function, case and ranges, and whether the case was drawn.
Key = tuple[str, str, str, str, bool]


def key_of(check: str, interface: Interface, case: Any, ranges: Ranges, drawn: bool) -> Key:
    """Return a verdict's key."""
    return check, repr(interface), repr(case), repr(ranges), drawn


@dataclass
class RunState:
    """One run of the judge: where its cases run, what it knows already, and when it ends.

    Attributes:
        name: of the implementation.
        pool: where cases run.
        end: no case is begun after this time, of `time.monotonic`.
        stops_at_fault: nor after the first wrong or failed case.
        earlier: verdicts of an earlier run of the same, which keep their numbers.
        recorded_in: the report's file, or "".
        note: called with each verdict, and whether it is this run's; returns it as it is reported.
        is_deceived: a case was dishonest, after which no verdict of the run counts.
    """

    name: str
    pool: Workers
    end: float = math.inf
    stops_at_fault: bool = False
    earlier: dict[Key, CaseVerdict] = field(default_factory=dict)
    recorded_in: str = ""
    note: Callable[[CaseVerdict, bool], CaseVerdict] = lambda verdict, is_new: verdict
    is_deceived: bool = False
    _last_number: int = 0
    _has_fault: bool = False

    def __post_init__(self) -> None:
        self._last_number = max((verdict.number for verdict in self.earlier.values()), default=0)

    @property
    def is_over(self) -> bool:
        """Tell whether no further case is to be begun."""
        return time.monotonic() > self.end or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        """Tell whether a fault has ended the run: one that the kernel hid ends any."""
        return self.is_deceived or (self.stops_at_fault and self._has_fault)

    def numbered(self, verdict: CaseVerdict) -> CaseVerdict:
        """Return a verdict with its number in the report."""
        self._has_fault |= is_fault(verdict)
        self.is_deceived |= verdict.outcome is Outcome.DISHONEST
        key = key_of(verdict.check, verdict.interface, verdict.case, verdict.ranges, verdict.drawn)
        if key in self.earlier:
            number = self.earlier[key].number
        else:
            number = self._last_number = self._last_number + 1
        return replace(verdict, number=number, recorded_in=self.recorded_in)


class CheckRun:
    """One check of one function of an implementation.

    Attributes:
        check, interface: what is judged.
        verdicts: so far, as they are reported.
        planned: number of cases to be judged.
        judged: how many of them were.
        num_random: random cases that were judged after them.
    """

    def __init__(
        self,
        state: RunState,
        check: Check,
        interface: Interface,
        level: Level,
        ranges: Ranges,
        drawn: int,
        after: "CheckRun | None" = None,
    ) -> None:
        """Plan the cases.

        Args:
            state: of the run that it belongs to.
            check, interface: what is judged.
            level: of the fixed cases.
            ranges: the axes of the cases, and within which the check varies them.
            drawn: number of cases to draw.
            after: an earlier one of the same check and function, whose cases are left out.
        """
        self.check, self.interface, self.verdicts = check, interface, list[CaseVerdict]()
        self._state, self._ranges = state, ranges
        most = max(SMOKE_LONGEST, *ranges.q_lens) if level is Level.SMOKE else ranges.longest
        self._ranges_of_cases = replace(ranges, longest=min(ranges.longest, most))
        self._after, self._cases = after, list[Any]()
        self._more = check.more if level is Level.FULL else ()
        first = Level.SMOKE if self._more else level  # the rounds that follow are the full level's
        self._cases += self._new(check.cases(interface, self._ranges_of_cases, first))
        self._samples = list(itertools.islice(check.draw(interface, self._ranges_of_cases, ()), drawn))
        self.num_random = 0
        self.planned, self.judged = len(self._cases) + len(self._samples), 0

    @property
    def reprs(self) -> set[str]:
        """Return the reprs of the cases that were not drawn, those of the earlier run of the check too."""
        return {repr(case) for case in self._cases} | (self._after.reprs if self._after else set())

    def _new(self, cases: Iterable[Any]) -> list[Any]:
        before = self.reprs
        return [case for case in cases if repr(case) not in before]

    def turns(self) -> Waits:
        """Judge the fixed cases, what follows from their verdicts, and the random cases."""
        yield from self._judge(self._cases, self._keep)
        for following in self._more:
            if self.judged < len(self._cases):
                return
            cases = self._new(following(self.interface, self._ranges_of_cases, self._verdicts_so_far))
            self._cases, self.planned = [*self._cases, *cases], self.planned + len(cases)
            yield from self._judge(cases, self._keep)
        yield from self._judge_samples(self._samples, set(), 1)

    def go_on(self, end: float) -> Waits:
        """Judge random cases until a time of `time.monotonic`; keep the first right ones, and wrong ones made small."""
        samples = iter(self.check.draw_on(self.interface, self._ranges_of_cases, self._verdicts_so_far))
        wrong = set[str]()
        while time.monotonic() < end and not self._state.is_over and len(wrong) < MOST_WRONG:
            several = list(itertools.islice(samples, CASES_PER_WORKER * self._state.pool.workers))
            if not several:
                return
            yield from self._judge_samples(several, wrong, MOST_WRONG, is_planned=False)

    @property
    def _verdicts_so_far(self) -> list[CaseVerdict]:
        return [*(self._after.verdicts if self._after else ()), *self.verdicts]

    def _judge(
        self,
        cases: Sequence[Any],
        keep: Callable[[CaseVerdict], None],
        is_drawn: bool = False,
        is_planned: bool = True,
    ) -> Waits:
        """Judge cases in turns, one for each worker at first and then several, and keep each verdict, in order.

        A case with an earlier verdict that stands is not judged again. None is begun when the run is over.

        Args:
            cases: what is judged.
            keep: called with each verdict.
            is_drawn: as of `CaseVerdict`.
            is_planned: the cases count as planned ones.
        """
        first = self._state.pool.workers
        ends = [0, *range(first, len(cases), CASES_PER_WORKER * first), len(cases)]
        for at, end in itertools.pairwise(ends):
            if self._state.is_over:
                return
            begun = [
                (case, self._earlier(case, is_drawn) or self._submit(case, self._state.end)) for case in cases[at:end]
            ]
            for case, found in begun:
                if isinstance(found, Pending):
                    if self._state.is_stopped:
                        return
                    yield found
                with suppress(TooLate):
                    verdict = self._verdict(case, found(), is_drawn) if isinstance(found, Pending) else found
                    self.judged += is_planned
                    keep(self._state.note(verdict, isinstance(found, Pending)))

    def _judge_samples(
        self, samples: Sequence[Sample], wrong: set[str], most_wrong: int, is_planned: bool = True
    ) -> Waits:
        """Judge random cases; keep the first right ones, and wrong ones made small.

        Args:
            samples: the cases.
            wrong: the reprs of the smallest wrong cases so far, to which those of these samples are added.
            most_wrong: number of wrong cases of which no more are kept.
            is_planned: the cases count as planned ones.
        """
        sample_of = {repr(sample.case): sample for sample in samples}

        def keep(verdict: CaseVerdict) -> None:
            self.num_random += not is_planned
            if is_fault(verdict):
                if len(wrong) < most_wrong:
                    small = self._shrunk(verdict, sample_of[repr(verdict.case)])
                    if repr(small.case) not in wrong:
                        self._keep(small)
                    wrong.add(repr(small.case))
            elif self.num_random <= MOST_KEPT:
                self._keep(verdict)

        yield from self._judge([sample.case for sample in sample_of.values()], keep, True, is_planned)

    def _shrunk(self, verdict: CaseVerdict, sample: Sample) -> CaseVerdict:
        """Return the verdict of a smaller case that is wrong too."""
        wrong, tried = {repr(verdict.case): verdict}, set[str]()

        def stays_wrong(case: Any) -> bool:
            if repr(case) in tried or len(tried) == MOST_SHRINKS:
                return repr(case) in wrong
            tried.add(repr(case))
            found = self._judge_now(case)
            if is_fault(found):
                wrong[repr(case)] = found
            return is_fault(found)

        try:
            return wrong[repr(shrunk(sample, stays_wrong).case)]
        except KeyboardInterrupt:
            self._keep(list(wrong.values())[-1])
            raise

    def _submit(self, case: Any, end: float = math.inf) -> Pending:
        return self._state.pool.submit(self.check.key, case, self._ranges, end)

    def _judge_now(self, case: Any) -> CaseVerdict:
        """Return the verdict of a case that a wrong one was made smaller to, though the run may be over."""
        earlier = self._earlier(case, drawn=True)
        verdict = earlier or self._verdict(case, self._submit(case)(), drawn=True)
        return self._state.note(verdict, earlier is None)

    def _earlier(self, case: Any, drawn: bool) -> CaseVerdict | None:
        """Return an earlier verdict of a right or declined case. Wrong cases are judged again, for their reader."""
        key = key_of(self.check.key, self.interface, case, self._ranges, drawn)
        earlier = self._state.earlier.get(key)
        return earlier if earlier and earlier.outcome in (Outcome.RIGHT, Outcome.DECLINED) else None

    def _verdict(self, case: Any, judged: Judged, drawn: bool) -> CaseVerdict:
        name, where = self._state.name, str(self._state.pool.device)
        kept = replace(judged, output=None)
        return CaseVerdict(name, self.check.key, self.interface, case, where, kept, self._ranges, drawn)

    def keep(self, verdict: CaseVerdict) -> None:
        """Note and keep a verdict on a case that was not planned."""
        self._keep(self._state.note(verdict, True))

    def _keep(self, verdict: CaseVerdict) -> None:
        self.verdicts.append(self._state.numbered(verdict))


def in_turns(waits_of_each: Iterable[Waits]) -> Generator[None, None, None]:
    """Let checks run at the same time, and yield whenever one has kept a verdict; an early end leaves none without one.

    The check that goes on is one whose next verdict is ready. So a case that takes minutes holds up its own check alone.
    """
    with ExitStack() as stack:
        waiting = deque[tuple[Waits, Pending]]()
        for waits in waits_of_each:
            stack.enter_context(closing(waits))
            waiting.extend((waits, pending) for pending in itertools.islice(waits, 1))
        while waiting:
            futures = [pending.future for _, pending in waiting if pending.future is not None]
            if len(futures) == len(waiting):
                wait_for_futures(futures, return_when=FIRST_COMPLETED)
            ready = next(at for at, (_, pending) in enumerate(waiting) if pending.is_ready)
            waits, _ = waiting[ready]
            del waiting[ready]
            waiting.extend((waits, following) for following in itertools.islice(waits, 1))
            yield


def is_fault(verdict: CaseVerdict) -> bool:
    """Tell whether a verdict is wrong, failed or dishonest, and not known to be."""
    return verdict.outcome in BROKEN
