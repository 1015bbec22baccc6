"""Run checks on the functions of an implementation concurrently, and collect the verdicts on all cases in a report."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab.checks.parameters.attention import discover, is_mostly_declined
from lab.checks.parameters.covering import Shard
from lab.checks.parameters.profiles import profiles
from lab.checks.parameters.sampling import DrawnPoint, shrunk
from lab.checks.properties.check import NEARBY_ROUNDS, Check, Following, Level, Scope
from lab.checks.report import Report
from lab.checks.run.audit import audited, confirmed
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Judged, Key, Outcome, TooLate
from lab.checks.run.workers import Pending, Waits, Workers, in_turns
from lab.files import state_of
from lab.ranges import Ranges
from lab.workloads.interfaces import PAGED_CALLS, Interface

CASES_PER_WORKER = 8  # cases that are submitted at once, per worker
SMOKE_LONGEST = 200  # most keys of a short request at the smoke level
MOST_SHRINKS = 60  # most cases that are judged to find a smaller wrong case
MOST_KEPT = 2000  # most right random cases in the report
MOST_WRONG = 10  # number of different wrong random cases that ends the search for more
LEAST_DONE = 5  # number of judged cases from which the remaining time is estimated
FIRST_REPEATED = 8  # most wrong cases per function that are repeated in their own processes, to find state
MOST_REPEATED = 100  # most further ones, if there is state, and most after further cases
GRACE_S = 2.0  # time for cases that run at the end; cases that run longer are left out
WRITTEN_EVERY_S = 1.0  # least time between two writes of the report's file during the run
WRITING_SHARE = 0.05  # most time for these writes, as a share of the run


class Progress(NamedTuple):
    verdict: CaseVerdict  # the newest verdict
    done: int  # number of judged cases, without those that only shrink a wrong random case
    total: int  # number of planned cases, random cases included
    seconds_left: float | None  # estimate, or None for the first cases
    is_new: bool = True  # whether the case was judged in this run, not read from an earlier report


@dataclass
class Run:
    """One run of the judge: judges cases of several checks for several functions, and collects the verdicts."""

    pool: Workers
    report: Report  # the settings of the run, without verdicts
    checks: Sequence[Check]
    drawn: int  # number of random cases for each check and function
    end: float  # no case is begun after this time of `time.monotonic`
    stops_at_fault: bool  # whether the first wrong or failed case ends the run
    earlier: Mapping[Key, CaseVerdict]  # verdicts of an earlier run with equal settings; they keep their numbers
    path: Path | None  # file of the report, written during the run
    known: Callable[[CaseVerdict], CaseVerdict]  # returns the verdict, marked as KNOWN if known failures explain it
    progress: Callable[[Progress], None] | None  # called with each verdict
    _runs: "Mapping[tuple[str, Interface], CheckRun]" = field(default_factory=dict)
    _has_fault: bool = False  # whether a case was wrong or failed
    _is_deceived: bool = False  # whether a case was dishonest, so that no verdict of the run counts
    _num_new: int = 0  # number of cases that were judged in this run
    _next_write: float = -math.inf

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._file = None if self.path is None else self.path.absolute()  # a kernel may change the working folder
        self._file_state = state_of(self._file)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end or self.is_stopped

    @property
    def is_stopped(self) -> bool:
        return self._is_deceived or (self.stops_at_fault and self._has_fault)

    def judge(self, interfaces: Sequence[Interface], discovers: bool, random_until: float) -> Report:
        """Judge functions by the run's checks, and return the report. If `discovers`, a function that declines most cases is
        judged again with the parameter values that it accepts. Then random cases are judged until the time `random_until` of
        `time.monotonic`.
        """
        pairs = [(check, interface) for check in self.checks for interface in interfaces]
        self._runs = {
            (check.key, interface): CheckRun(self, check, interface, turn)
            for turn, (check, interface) in enumerate(pairs)
            if interface in check.interfaces
        }
        try:
            runs = sorted(self._runs.values(), key=lambda each: not each.is_telling)
            self._take_turns([each.plan(self.report.ranges) for each in runs])
            for interface in interfaces if discovers else ():
                self._narrow(interface)
            self._take_turns(each.rest() for each in runs)
            has_state = self._finds_state(FIRST_REPEATED * len(interfaces)) and self._finds_state(MOST_REPEATED)
            for each in reversed(runs):  # K18's before those of K1
                self._take_turns([each.near()])
            self._take_turns(each.go_on(random_until) for each in self._runs.values())
            if has_state:
                self._finds_state(MOST_REPEATED)
            self._audit()
        except KeyboardInterrupt:
            self.report = replace(self.report, interrupted=True, ended="the run was interrupted")
        finally:
            report = self._save()
        return report

    def _narrow(self, interface: Interface) -> None:
        runs = [each for each in self._runs.values() if each.interface is interface]
        verdicts = self.verdicts_of(interface)
        if interface not in PAGED_CALLS or self.is_over or not is_mostly_declined(verdicts):
            return
        taken = [verdict.case for verdict in verdicts if verdict.judged.judged]
        found = discover(self.pool.submit, interface, self.report.ranges, taken)
        if found is not None:
            self.report = replace(self.report, narrowed=(*self.report.narrowed, (interface, found)))
            self._take_turns([each.plan(found) for each in runs])

    def _finds_state(self, most: int) -> bool:
        """Repeat up to `most` wrong cases, each in its own process. Return whether one of them is right there: then the
        implementation probably keeps state between calls.
        """
        if self.is_over or not self.pool.is_apart:
            return False
        wrong = [
            (run, at)
            for run in self._runs.values()
            for at, each in enumerate(run.verdicts)
            if each.outcome is Outcome.WRONG and not each.judged.alone
        ]
        repeated = self._repeated_alone(wrong[:: math.ceil(len(wrong) / most) or 1])
        if in_turns([repeated], lambda: not self.is_stopped, self.end + GRACE_S):
            self.pool.stop()
        return any(each.judged.alone == "right" for run in self._runs.values() for each in run.verdicts)

    def _repeated_alone(self, wrong: "Sequence[tuple[CheckRun, int]]") -> Waits:
        # `wrong` has tuples (run of a check, index in its `verdicts`).
        for first in range(0, len(wrong), self.pool.workers):
            several = [(run, at, run.verdicts[at]) for run, at in wrong[first : first + self.pool.workers]]
            begun = [self.pool.submit_alone(each.check, each.case, each.ranges, self.end) for *_, each in several]
            for (run, at, verdict), pending in zip(several, begun, strict=True):
                yield pending
                with suppress(TooLate):
                    found = confirmed(verdict, pending())
                    run.verdicts[at] = self.noted(found) if found.outcome is Outcome.DISHONEST else found

    def verdicts_of(self, interface: Interface) -> list[CaseVerdict]:
        return [verdict for each in self._runs.values() if each.interface is interface for verdict in each.verdicts]

    def _audit(self) -> None:
        verdicts = [verdict for each in self._runs.values() for verdict in each.verdicts]
        is_audited = self.pool.is_apart and not self.is_stopped
        for verdict in audited(self.pool, verdicts, lambda: self.is_over) if is_audited else ():
            self.report = replace(self.report, audited=self.report.audited + verdict.judged.judged)
            if verdict.outcome in BROKEN:
                self._runs[verdict.check, verdict.interface].keep(self.known(verdict), is_planned=False)

    def _take_turns(self, waits_of_each: Iterable[Waits]) -> None:
        def goes_on() -> bool:
            if self._file is not None and not self.is_stopped and time.monotonic() > self._next_write:
                self._save(goes_on=True)
            return not self.is_stopped

        if unended := in_turns(waits_of_each, goes_on, self.end + GRACE_S):
            # These cases still run after the end: they are left out, because the kernel may hang.
            ended = f"the time was over while {unended} of them ran"
            self.report = replace(self.report, unended=unended, ended=ended)
            self.pool.stop()

    def _report_so_far(self) -> Report:
        runs = self._runs.values()
        # A case of the earlier report keeps its number.
        new = itertools.count(1 + max((verdict.number for verdict in self.earlier.values()), default=0))
        held = ((each, self.earlier.get(each.key) if self.earlier else None) for run in runs for each in run.verdicts)
        numbered = (replace(each, number=next(new) if earlier is None else earlier.number) for each, earlier in held)
        report = replace(
            self.report,
            verdicts=tuple(numbered),
            left_out=sum(each.planned - each.judged for each in runs),
            functions=tuple(dict.fromkeys(each.interface for each in runs if each.planned)),
            num_random=sum(each.num_random for each in runs),
        )
        if self._is_deceived:
            report = replace(report, ended="for the kernel changed what judges it")
        elif self.stops_at_fault and any(report.wrong) and not report.interrupted:
            report = replace(report, ended="the first wrong case ended the run")
        return report

    def _save(self, *, goes_on: bool = False) -> Report:
        if state_of(self._file) not in (None, self._file_state):
            self.report = replace(self.report, is_overwritten=True)
        report, start = self._report_so_far(), time.monotonic()
        if self._file is not None:
            report.write(self._file, is_diagnosed=not goes_on)
            self._file_state, end = state_of(self._file), time.monotonic()
            self._next_write = end + max(WRITTEN_EVERY_S, (end - start) / WRITING_SHARE)
        return report

    def show(self, verdict: CaseVerdict, is_new: bool) -> None:
        self._num_new += is_new
        if self.progress is not None:
            done, total = (sum(getattr(each, name) for each in self._runs.values()) for name in ("judged", "planned"))
            rate = (time.monotonic() - self._start) / max(self._num_new, 1)
            left = min(rate * (total - done), max(self.end - time.monotonic(), 0))
            self.progress(Progress(verdict, done, total, left if self._num_new >= LEAST_DONE else None, is_new))

    def noted(self, verdict: CaseVerdict) -> CaseVerdict:
        """Record a wrong, failed or dishonest case. Return the verdict with the names of the engines that send its case."""
        sent_by = tuple(name for name, engine in profiles().items() if engine.concerns(verdict))
        self._has_fault |= verdict.outcome in BROKEN and self.report.profile in ("", *sent_by)
        self._is_deceived |= verdict.outcome is Outcome.DISHONEST
        return replace(verdict, sent_by=sent_by)


class CheckRun:
    """One check of one function in a run of the judge: plans the check's cases, and collects their verdicts."""

    def __init__(self, run: Run, check: Check, interface: Interface, turn: int) -> None:
        self.interface, self.verdicts = interface, list[CaseVerdict]()
        # Numbers of planned cases, of planned cases that were judged, and of random cases that were judged after these.
        self.planned = self.judged = self.num_random = 0
        self._run, self._check, self._ranges = run, check, run.report.ranges
        self._reprs = set[str]()  # of the planned cases of all shards, without random cases
        self._shard = Shard.of(run.report.shard)
        self._turn = turn  # the shard that gets the first case of this check, modulo the number of shards

    @property
    def is_telling(self) -> bool:
        return self._run.report.level is Level.QUICK and bool(self._check.more)

    def plan(self, ranges: Ranges) -> Waits:
        """Plan the check's cases with parameter values from `ranges`, and return a generator that judges them."""
        level = self._run.report.level
        self._ranges = ranges
        rounds = [*self._check.more.get(level, ()), *([self._of_smoke] if self.is_telling else [])]
        first = Level.SMOKE if rounds and level is Level.FULL else level  # the rounds follow the smoke level's cases
        shard = self._shard if level is first else Shard()
        cases = self._check.cases(self.interface, self._ranges_of_cases, first, shard)
        draw = self._check.draw(self.interface, self._ranges_of_cases)
        drawn = self._shard.part(itertools.islice(draw, self._run.drawn), self._turn)
        samples = [sample for sample in drawn if self._is_chosen(sample.case)]
        self.planned += len(samples)
        return self._turns(self._planned(cases, is_divided=not rounds), rounds, samples)

    def rest(self) -> Waits:
        """If the run's level is QUICK, judge the smoke level's cases that are not planned yet; else do nothing."""
        if self._run.report.level is Level.QUICK:
            yield from self._turns((), [self._of_smoke], ())

    def near(self) -> Waits:
        """Unless the run's level is QUICK, judge further cases, which resemble wrong cases of any check (`Check.nearby`)."""
        if (nearby := self._check.nearby) is None or self._run.report.level is Level.QUICK:
            return
        for _ in range(NEARBY_ROUNDS):
            if not self._run.is_over:
                cases = self._planned(nearby(self._scope, self._run.verdicts_of(self.interface)))
                yield from self._judge(cases, self.keep)

    def _of_smoke(self, scope: Scope, _: Sequence[CaseVerdict]) -> Iterable[Any]:
        return self._check.cases(scope.interface, scope.ranges, Level.SMOKE)

    @property
    def _scope(self) -> Scope:
        return Scope(self.interface, self._ranges_of_cases, self._run.report.level, self._shard, self._is_chosen)

    @property
    def _ranges_of_cases(self) -> Ranges:
        level, ranges = self._run.report.level, self._ranges
        if level is Level.FULL:
            return ranges
        short = replace(ranges, longest=min(ranges.longest, max(SMOKE_LONGEST, *ranges.q_lens)))
        if level is Level.SMOKE:
            return short
        return replace(short, long_requests=(min(ranges.long_requests),), large_batches=(min(ranges.large_batches),))

    def _is_chosen(self, case: Any) -> bool:
        profile = self._run.report.profile
        return not profile or profiles()[profile].sends(self.interface, case)

    def _planned(self, cases: Iterable[Any], is_divided: bool = False) -> list[Any]:
        new = [case for case in cases if repr(case) not in self._reprs and self._is_chosen(case)]
        self._reprs |= set(map(repr, new))
        new = list(self._shard.part(new, self._turn)) if is_divided else new
        self.planned += len(new)
        return new

    def _turns(self, cases: Sequence[Any], rounds: Sequence[Following], samples: Sequence[DrawnPoint]) -> Waits:
        yield from self._judge(cases, self.keep)
        for following in rounds:
            if self.judged < self.planned - len(samples):  # the run is over
                return
            cases = self._planned(following(self._scope, self.verdicts))
            yield from self._judge(cases, self.keep)
        yield from self._judge_samples(samples, set(), 1)

    def go_on(self, end: float) -> Waits:
        """Judge random cases until the time `end` of `time.monotonic`, or until `MOST_WRONG` different cases were wrong. Yield
        each case that a worker judges, so that `in_turns` can wait for it.
        """
        samples = self._shard.part(self._check.draw_on(self._scope, self.verdicts))
        wrong = set[str]()
        while time.monotonic() < end and not self._run.is_over and len(wrong) < MOST_WRONG:
            several = list(itertools.islice(samples, CASES_PER_WORKER * self._run.pool.workers))
            if not several:
                return
            chosen = [sample for sample in several if self._is_chosen(sample.case)]
            yield from self._judge_samples(chosen, wrong, MOST_WRONG, is_planned=False)

    def _judge(self, cases: Sequence[Any], keep: Callable[[CaseVerdict, bool], None], drawn: bool = False) -> Waits:
        # `keep` gets each verdict, and False if it was read from an earlier report.
        first = self._run.pool.workers
        ends = [0, *(() if self.is_telling else range(first, len(cases), CASES_PER_WORKER * first)), len(cases)]
        for at, end in itertools.pairwise(ends):
            if self._run.is_over:
                return
            for pending, verdict in self._begun_apart(cases[at:end], drawn):
                if pending is not None:
                    if self._run.is_stopped:
                        return
                    yield pending
                with suppress(TooLate):
                    keep(verdict(), pending is not None)

    def _begun_apart(self, cases: Sequence[Any], drawn: bool) -> list[tuple[Pending | None, Callable[[], CaseVerdict]]]:
        # Neighbours often need the same compiled kernel. They begin at different times, so that one worker compiles it for all.
        step = 1 if self.is_telling or self._run.pool.workers == 1 else CASES_PER_WORKER
        order = sorted(range(len(cases)), key=lambda at: at % step)
        begun = {at: self._begun(cases[at], drawn, self._run.end) for at in order}
        return [begun[at] for at in range(len(cases))]

    def _judge_samples(
        self, samples: Sequence[DrawnPoint], wrong: set[str], most_wrong: int, is_planned: bool = True
    ) -> Waits:
        # Of the wrong cases, at most `most_wrong` are shrunk and kept; `wrong` collects their reprs.
        sample_of = {repr(sample.case): sample for sample in samples}

        def keep(verdict: CaseVerdict, is_new: bool) -> None:
            self.judged += is_planned
            self.num_random += not is_planned
            self._run.show(verdict, is_new)
            if verdict.outcome not in BROKEN:
                if self.num_random <= MOST_KEPT:
                    self.verdicts.append(self._run.noted(verdict))
            elif len(wrong) < most_wrong:
                small = self._shrunk(verdict, sample_of[repr(verdict.case)])
                if repr(small.case) not in wrong:
                    self.verdicts.append(self._run.noted(small))
                wrong.add(repr(small.case))

        yield from self._judge([sample.case for sample in sample_of.values()], keep, True)

    def _shrunk(self, verdict: CaseVerdict, sample: DrawnPoint) -> CaseVerdict:
        wrong, tried = {repr(verdict.case): verdict}, set[str]()

        def stays_wrong(case: Any) -> bool:
            if repr(case) not in tried and len(tried) < MOST_SHRINKS:
                tried.add(repr(case))
                pending, verdict_of_case = self._begun(case, True)
                found = verdict_of_case()
                self._run.show(found, pending is not None)
                if found.outcome in BROKEN:
                    wrong[repr(case)] = found
            return repr(case) in wrong

        try:
            return wrong[repr(shrunk(sample, stays_wrong).case)]
        except KeyboardInterrupt:
            self.verdicts.append(self._run.noted(list(wrong.values())[-1]))
            raise

    def _begun(self, case: Any, drawn: bool, end: float = math.inf) -> tuple[Pending | None, Callable[[], CaseVerdict]]:
        # Submit a case, and return its `Pending` and a function that waits for the verdict. If an earlier report has a right or
        # declined verdict on the case, return None and a function that returns this verdict. What the lab could not judge is
        # judged again: the GPU's memory may have been full.
        report, file = self._run.report, str(self._run.path or "")
        what = (report.implementation, self._check.key, self.interface, case, report.device)
        blank = CaseVerdict(*what, Judged(Outcome.DECLINED), self._ranges, drawn, recorded_in=file)
        earlier = self._run.earlier.get(blank.key)
        if earlier and _stays(earlier):
            return None, lambda: earlier
        pending = self._run.pool.submit(blank.check, case, blank.ranges, end)
        return pending, lambda: self._run.known(replace(blank, judged=replace(pending(), output=None)))

    def keep(self, verdict: CaseVerdict, is_new: bool = True, is_planned: bool = True) -> None:
        self.judged += is_planned
        self._run.show(verdict, is_new)
        self.verdicts.append(self._run.noted(verdict))


def _stays(earlier: CaseVerdict) -> bool:
    """Return whether a verdict of an earlier run counts: it is settled, or this run's processes may not show the error."""
    is_settled = earlier.outcome in (Outcome.RIGHT, Outcome.DECLINED) and not earlier.judged.by_lab
    return is_settled or earlier.judged.alone == "right"
