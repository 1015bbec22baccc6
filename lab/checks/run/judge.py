"""Judge an implementation: every check of the catalogue, over every function that it has."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.checks.parameters.discovery import discover, is_mostly_declined
from lab.checks.properties import checks
from lab.checks.properties.check import Check, Level
from lab.checks.record import read_case, read_record, replaceable
from lab.checks.report import Report
from lab.checks.run.audit import audit, chosen
from lab.checks.run.check_run import CheckRun, RunState, Waits, in_turns
from lab.checks.run.known_failures import KNOWN_FAILURES, Findings, known
from lab.checks.run.progress import Progress, Stopwatch
from lab.checks.run.sources import digest_of_run, earlier_verdicts, offer_of
from lab.checks.run.support_protocol import resolve_refusals
from lab.checks.run.verdicts import BROKEN, CaseVerdict
from lab.checks.run.workers import Workers
from lab.gpus import capability_of
from lab.loading import load
from lab.provenance import environment
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase
from lab.workloads.interfaces import ATTENTION, Interface, interfaces_of

__all__ = ["TIME_LIMIT_S", "interfaces_of", "judge", "judge_case", "judge_forward", "judge_recorded"]

DRAWN_CASES = {Level.SMOKE: 2, Level.FULL: 16}
TIME_LIMIT_S = 120.0
WRITTEN_EVERY_S = 1.0  # the report's file, while the run goes on, or
WRITING_SHARE = 0.05  # of the time at most
VERDICT_PARTS = ("python", "packages", "gpu", "capability", "cuda")  # of the environment, which a verdict depends on


def judge(
    implementation: Any,
    *,
    level: Level | str = Level.SMOKE,
    ranges: Ranges | None = None,
    only: str | Sequence[str] = (),
    functions: Sequence[str] = (),
    device: torch.device | str | None = None,
    isolated: bool = False,
    workers: int = 1,
    time_limit_s: float = TIME_LIMIT_S,
    most_seconds: float = math.inf,
    drawn: int | None = None,
    refusals: Sequence[type[BaseException]] | None = None,
    known_failures: Findings = KNOWN_FAILURES,
    progress: Callable[[Progress], None] | None = None,
    out: Path | str | None = None,
    fresh: bool = False,
    first_failure: bool = False,
    discover: bool = True,
    seed: int | None = None,
    for_seconds: float = 0.0,
) -> Report:
    """Find out whether an implementation is right.

    What it refuses (`lab.checks.run.support_protocol`), also as an equivalent call (`lab.checks.run.equivalent_calls`), is
    declined; all else must be right.

    Args:
        implementation: a module or object with one or more of the names of `lab.workloads.interfaces.Interface`, or the
            name of one to import: "package.module" or "path/to/file.py", either with ":attribute" after it.
        level: SMOKE or FULL, or "smoke" or "full".
        ranges: the axes of the cases; narrow them to what a kernel was built for.
        only: keys or names of the checks to run, such as "K4" or "poison", or one of them; all if empty.
        functions: names of the functions to judge; all that it has if empty.
        device: where to run; a GPU if there is one.
        isolated: each case runs in a worker process, replaced when it crashes or hangs; give the implementation by name.
        workers: processes at a time, if isolated; kernels that compile for each case are judged sooner by several.
        time_limit_s: of one case, if isolated.
        most_seconds: after so long, no further case is begun; the report counts what was left out. Checks take turns.
        drawn: random cases per check and function; the level's number if None.
        refusals: exceptions that are refusals, instead of those of `lab.checks.run.support_protocol.invoke`.
        known_failures: recorded ones by finding, which are told apart from new ones.
        progress: called with each verdict, and with how far the run is.
        out: the report's file, written as the run goes. Right and declined cases that it holds, of the same run with the
            same sources of the implementation and the lab, are not judged again.
        fresh: judge them again.
        first_failure: no further case is begun after the first that is wrong or failed.
        seed: of what is drawn, instead of that of the ranges, 0 by default: another one gives other cases.
        for_seconds: random cases of K18 follow those of the level until the run has taken so long; a wrong one is made small.
        discover: where a function declines most cases, find out which values of the axes it takes, and judge it on those too.

    Returns:
        The report; also after Ctrl-C, which ends the run and keeps its verdicts.

    Raises:
        ValueError: it has none of the names; a check, level or device does not exist; a number makes no sense; isolation
            was asked for an object.
        lab.loading.LoadError: it cannot be imported.
    """
    start = time.monotonic()
    depth, where = level_named(level), device_of(device)
    _check_numbers(workers, time_limit_s, drawn)
    if isolated and not isinstance(implementation, str):
        raise ValueError(f"an isolated judge imports the implementation by name; got {implementation!r}")
    chosen, given = _chosen(only), _seeded(ranges or Ranges(), seed)
    count = DRAWN_CASES[depth] if drawn is None else drawn
    name, subject = (implementation, implementation) if isolated else _named(implementation)
    path, refused = None if out is None else replaceable(Path(out)), None if refusals is None else tuple(refusals)
    with Workers(subject, where, given, time_limit_s, workers, refused) as pool:
        offer = pool.ask(partial(offer_of, implementation if isinstance(implementation, str) else ""))
        offered = _offered(name, offer.interfaces, functions)
        about = environment()
        asked = (name, depth, given, [check.key for check in chosen], offered, count, discover, str(where), refused)
        digest = digest_of_run(offer, asked, [about.get(part) for part in VERDICT_PARTS])
        earlier = {} if fresh else earlier_verdicts(path, digest)
        state = RunState(name, pool, time.monotonic() + most_seconds, first_failure, earlier, str(path or ""))
        empty = Report(name, depth, about, str(where), (), 0, given, refusals=_names_of(refused or ()), run=digest)
        told = partial(known, findings=known_failures, capability=capability_of(where))
        return _Run(state, chosen, count, empty, path, told, discover, start + for_seconds).judged(
            offered, given, progress
        )


def _seeded(ranges: Ranges, seed: int | None) -> Ranges:
    return ranges if seed is None else replace(ranges, seed=seed)


@dataclass
class _Run:
    """A run of the judge and its report so far."""

    state: RunState
    checks: Sequence[Check]
    drawn: int
    empty: Report
    path: Path | None
    known: Callable[[CaseVerdict], CaseVerdict]
    discovers: bool
    end: float
    runs: list[CheckRun] = field(default_factory=list)
    _next_write: float = -math.inf

    def judged(
        self, interfaces: Sequence[Interface], ranges: Ranges, progress: Callable[[Progress], None] | None
    ) -> Report:
        """Judge functions over axes, and write the report as the run goes."""
        watch = Stopwatch()

        def note(verdict: CaseVerdict, is_new: bool) -> CaseVerdict:
            told = self.known(verdict)
            if progress is not None:
                done, total = (sum(getattr(each, part) for each in self.runs) for part in ("judged", "planned"))
                progress(watch.progress(told, done, total, is_new))
            return told

        self.state.note = note
        try:
            self._turns(run.turns() for run in self._plan(interfaces, ranges))
            for interface in interfaces if self.discovers else ():
                self._narrow(interface, ranges)
            last = {(run.check.key, run.interface): run for run in self.runs}
            self._turns(run.go_on(self.end) for run in last.values())
            self._audit()
        except KeyboardInterrupt:
            self.empty = replace(self.empty, interrupted=True, ended="the run was interrupted")
        finally:
            report = self._report()
            self._save(report)
        return report

    def _audit(self) -> None:
        """Judge some right cases again where the kernel's code never was; see `lab.checks.run.audit`."""
        state, runs = self.state, {(run.check.key, run.interface): run for run in self.runs}
        if not state.pool.is_apart:
            return
        for verdict in chosen([verdict for run in self.runs for verdict in run.verdicts]):
            if state.is_over:
                return
            judged = audit(state.pool, verdict)
            self.empty = replace(self.empty, audited=self.empty.audited + judged.judged)
            if judged.outcome in BROKEN:
                runs[verdict.check, verdict.interface].keep(replace(verdict, judged=judged))

    def _narrow(self, interface: Interface, ranges: Ranges) -> None:
        """Judge a function that declined most over the axes that it takes, if there are such."""
        verdicts = [verdict for run in self.runs if run.interface is interface for verdict in run.verdicts]
        if interface not in ATTENTION or self.state.is_over or not is_mostly_declined(verdicts):
            return
        taken = [verdict.case for verdict in verdicts if verdict.judged.judged]
        found = discover(self.state.pool.submit, interface, ranges, taken)
        if found is not None:
            self.empty = replace(self.empty, narrowed=(*self.empty.narrowed, (interface, found)))
            self._turns(run.turns() for run in self._plan([interface], found))

    def _plan(self, interfaces: Sequence[Interface], ranges: Ranges) -> list[CheckRun]:
        """Plan the runs of functions over axes, without the cases that were planned before."""
        before = {(run.check.key, run.interface): run for run in self.runs}
        planned = [
            CheckRun(
                self.state,
                check,
                interface,
                self.empty.level,
                ranges,
                self.drawn,
                after=before.get((check.key, interface)),
            )
            for check in self.checks
            for interface in interfaces
            if interface in check.interfaces
        ]
        self.runs += planned
        return planned

    def _turns(self, turns_of_each: Iterable[Waits]) -> None:
        for _ in in_turns(turns_of_each):
            if self.state.is_stopped:
                return
            if time.monotonic() > self._next_write:
                self._save(self._report(), goes_on=True)

    def _report(self) -> Report:
        verdicts = tuple(verdict for run in self.runs for verdict in run.verdicts)
        left_out = sum(run.planned - run.judged for run in self.runs)
        num_random = sum(run.num_random for run in self.runs)
        report = replace(self.empty, verdicts=verdicts, left_out=left_out, num_random=num_random)
        if self.state.is_deceived:
            report = replace(report, ended="for the kernel changed what judges it")
        elif self.state.stops_at_fault and any(report.wrong) and not report.interrupted:
            report = replace(report, ended="the first wrong case ended the run")
        return report

    def _save(self, report: Report, *, goes_on: bool = False) -> None:
        start = time.monotonic()
        if self.path is not None:
            report.write(self.path, is_diagnosed=not goes_on)
            end = time.monotonic()
            self._next_write = end + max(WRITTEN_EVERY_S, (end - start) / WRITING_SHARE)


def judge_case(
    implementation: Any,
    check: str,
    case: Any,
    device: torch.device | str | None = None,
    ranges: Ranges | None = None,
) -> CaseVerdict:
    """Judge one case of one check in this process, as a reproduction does.

    Args:
        implementation: as in `judge`.
        check: its key or name.
        case: of that check.
        device, ranges: as in `judge`.
    """
    where = device_of(device)
    name, loaded = _named(implementation)
    (chosen,) = _chosen((check,))
    interface = getattr(case, "interface", chosen.interfaces[0])
    with Workers(loaded, where, ranges or Ranges(), TIME_LIMIT_S) as pool:
        judged = pool.submit(chosen.key, case)()
    return CaseVerdict(name, chosen.key, interface, case, str(where), judged, ranges or Ranges())


def judge_recorded(
    path: Path | str,
    number: int,
    *,
    implementation: str | None = None,
    device: torch.device | str | None = None,
    isolated: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
) -> CaseVerdict:
    """Judge a case of a report again, by a worker that imports the implementation anew.

    Args:
        path, number: of the report, and of the case in it, from 1.
        implementation: another name than the report's.
        device: another than the report's.
        isolated, time_limit_s: as in `judge`.

    Returns:
        The verdict; its `exit_status` is what a command ends with. No known failures are looked up.

    Raises:
        lab.checks.record.ReportError: there is no such report or case.
        lab.loading.LoadError: the implementation cannot be imported.
    """
    was = read_case(Path(path), number)
    name, where = implementation or was.implementation, device_of(device or was.device)
    _check_numbers(1, time_limit_s, None)
    refused = resolve_refusals(",".join(names)) if (names := read_record(Path(path)).get("refusals")) else None
    with Workers(name if isolated else load(name), where, was.ranges, time_limit_s, refusals=refused) as pool:
        pool.ask(interfaces_of)
        judged = pool.submit(was.check, was.case)()
    return replace(was, implementation=name, device=str(where), judged=judged, finding="")


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


def level_named(level: Level | str) -> Level:
    """Return the level of that name.

    Raises:
        ValueError: there is none.
    """
    if level not in (*Level, *(each.value for each in Level)):
        raise ValueError(f"there is no level {level!r}; there are {', '.join(each.value for each in Level)}")
    return Level(level)


def device_of(device: torch.device | str | None) -> torch.device:
    """Return the device of that name; of None a GPU if there is one.

    Raises:
        ValueError: there is no such device here, or nothing can be judged on it.
    """
    count = torch.cuda.device_count()
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        named = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{device!r} is no device: cpu, cuda, or cuda:1 for the second GPU") from error
    if named.type not in ("cpu", "cuda"):
        raise ValueError(f"nothing is judged on {device!r}: cpu, cuda, or cuda:1 for the second GPU")
    if named.type == "cuda" and (named.index or 0) >= count:
        raise ValueError(f"there is no GPU {str(device)!r} here: torch finds {count or 'none'}")
    return named


def _offered(name: str, interfaces: Sequence[Interface], functions: Sequence[str]) -> list[Interface]:
    known = [each.value for each in Interface]
    if unknown := [function for function in functions if function not in known]:
        raise ValueError(f"there is no function {unknown[0]!r}; there are {', '.join(known)}")
    offered = [each for each in interfaces if not functions or each.value in functions]
    if not offered:
        raise ValueError(f"{name} has none of {', '.join(functions or [each.value for each in Interface])}")
    return offered


def _names_of(exceptions: Sequence[type[BaseException]]) -> tuple[str, ...]:
    return tuple(f"{each.__module__}.{each.__qualname__}" for each in exceptions)


def _check_numbers(workers: int, time_limit_s: float, drawn: int | None) -> None:
    """Raise ValueError for numbers that no run can have."""
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s={time_limit_s} must be more than 0 seconds for each case")
    if drawn is not None and drawn < 0:
        raise ValueError(f"drawn={drawn} must be 0 or more cases, or None for the level's number")


def _named(implementation: Any) -> tuple[str, Any]:
    """Return an implementation's name, and itself: imported if it was given by name."""
    if isinstance(implementation, str):
        return implementation, load(implementation)
    return str(getattr(implementation, "__name__", type(implementation).__name__)), implementation


def _chosen(only: str | Sequence[str]) -> tuple[Check, ...]:
    only = (only,) if isinstance(only, str) else only
    catalogue = checks()
    named = {name: check for check in catalogue for name in (check.key, check.key.lower(), check.name)}
    missing = [name for name in only if name not in named]
    if missing:
        raise ValueError(f"there is no check {missing[0]!r}; there are {', '.join(check.name for check in catalogue)}")
    wanted = {named[name].key for name in only}
    return tuple(check for check in catalogue if not only or check.key in wanted)
