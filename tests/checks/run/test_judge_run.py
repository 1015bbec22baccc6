"""A run plans each case once, judges rounds and random cases, and estimates the time left; its cases are numbers here."""

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from lab.calls.problem import AttentionCall
from lab.checks import CaseVerdict, Level, Outcome, Ranges, Report
from lab.checks.properties.check import Check, Scope
from lab.checks.run import audit, judge_run
from lab.checks.run.judge_run import LEAST_DONE, CheckRun, Progress, Run
from lab.checks.run.verdicts import Judged, Key
from lab.checks.run.workers import Pending, in_turns
from lab.workloads.attention_case import AttentionCase

RANGES = Ranges(longest=100)


def a_check(**changes: Any) -> Check:
    """A check whose cases are the numbers below a tenth of `longest`."""
    return replace(Check("K99", "", lambda scope: range(scope.ranges.longest // 10), lambda run: None), **changes)


def drawing(check: Check, monkeypatch: pytest.MonkeyPatch, *cases: int) -> Check:
    monkeypatch.setattr(Check, "draw", lambda *_: [SimpleNamespace(case=case) for case in cases])
    monkeypatch.setattr(judge_run, "shrunk", lambda sample, stays_wrong: sample)
    return check


def run_of(
    check: Check,
    outcome: Callable[[Any], Outcome] = lambda case: Outcome.RIGHT,
    earlier: dict[Key, CaseVerdict] | None = None,
    progress: Callable[[Progress], None] | None = None,
    drawn: int = 0,
    level: Level = Level.SMOKE,
) -> Run:
    """A run in which the outcome of a case follows from the case."""

    def submit(check: str, case: Any, ranges: Ranges, end: float) -> Pending:
        return Pending(lambda: Judged(outcome(case), judged=1))

    pool: Any = SimpleNamespace(workers=1, submit=submit, is_apart=False)
    report = Report("kernel", level, {}, "cpu", (), ranges=RANGES)
    end = time.monotonic() + 60
    return Run(pool, report, [check], drawn, end, False, earlier or {}, None, lambda verdict: verdict, progress)


def judged(run: Run, random_until: float = 0.0) -> Sequence[CaseVerdict]:
    return run.judge([AttentionCall.DECODE], False, random_until).verdicts


def cases_of(verdicts: Sequence[CaseVerdict]) -> list[Any]:
    return [verdict.case for verdict in verdicts]


def test_the_time_left_is_estimated_from_verdicts_of_this_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check, told = a_check(), list[Progress]()
    earlier = {each.key: each for each in judged(run_of(check))[: LEAST_DONE - 1]}
    run = run_of(check, earlier=earlier, progress=told.append)
    run._start = float(round(run._start))  # so that exactly 20 s have passed, without a rounding error
    monkeypatch.setattr(judge_run, "time", SimpleNamespace(monotonic=lambda: run._start + 20.0))
    judged(run)
    assert [each.is_new for each in told] == [False] * 4 + [True] * 6
    assert [each.seconds_left for each in told] == [None] * 8 + [20.0 / 5 * 1, 0.0]


def test_what_the_lab_could_not_judge_is_judged_again() -> None:
    check, told = a_check(), list[Progress]()
    refused, unjudged, *right = judged(run_of(check))
    refused = replace(refused, judged=Judged(Outcome.DECLINED))
    unjudged = replace(unjudged, judged=Judged(Outcome.DECLINED, by_lab=True))
    verdicts = judged(
        run_of(check, earlier={each.key: each for each in (refused, unjudged, *right)}, progress=told.append)
    )
    assert [each.verdict.case for each in told if each.is_new] == [unjudged.case]
    assert [each.case for each in verdicts if each.outcome is Outcome.DECLINED] == [refused.case]


def test_a_case_is_planned_once_although_narrower_ranges_have_it_too() -> None:
    run = run_of(a_check())
    of_check = CheckRun(run, run.checks[0], AttentionCall.DECODE, turn=0)
    of_check._run._runs = {("K99", AttentionCall.DECODE): of_check}
    for ranges, planned in ((RANGES, 10), (replace(RANGES, longest=120), 12)):
        assert in_turns([of_check.plan(ranges)]) == 0
        assert of_check.planned == of_check.judged == planned
    assert cases_of(of_check.verdicts) == [*range(12)]


def test_rounds_follow_before_the_random_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    def following(_: Any, verdicts: Sequence[CaseVerdict]) -> list[int]:
        return [100 + len(verdicts)]

    check = drawing(a_check(more={Level.FULL: (following, following)}), monkeypatch, 7, 8)
    verdicts = judged(run_of(check, drawn=2, level=Level.FULL))
    assert cases_of(verdicts) == [*range(10), 110, 111, 7, 8]


def test_no_round_follows_where_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    check = drawing(a_check(more={Level.FULL: (lambda *_: [100],)}), monkeypatch, 7)
    run = run_of(check, drawn=1, level=Level.FULL)
    run.end = 0.0
    assert judged(run) == ()
    assert run._report_so_far().left_out == 11


def test_the_quick_level_begins_with_the_telling_check_and_goes_on_with_the_smoke_level() -> None:
    telling = a_check(key="K98", fixed=lambda scope: [20] if scope.level is Level.QUICK else [20, 21])
    telling = replace(telling, more={Level.QUICK: (lambda *_: [22],)})
    run = run_of(a_check(quick=3), level=Level.QUICK)
    run.checks = [a_check(quick=3), telling]
    told = list[Any]()
    run.progress = lambda progress: told.append(progress.verdict.case)
    judged(run)
    assert told[0] == 20
    assert [case for case in told if case < 20] == [0, 3, 6, 1, 2, 4, 5, 7, 8, 9]
    assert [case for case in told if case >= 20] == [20, 22, 21]
    assert told.index(21) < told.index(1)  # the smoke cases of others follow


def test_a_case_that_runs_on_after_the_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_run, "GRACE_S", 0.05)
    run = run_of(a_check(), level=Level.QUICK)
    run.pool.submit = lambda *_: Pending(lambda: Judged(Outcome.RIGHT), Future())  # type: ignore[method-assign]
    run.end = time.monotonic()
    runs = CheckRun(run, a_check(), AttentionCall.DECODE, turn=0)
    run._runs = {("K99", AttentionCall.DECODE): runs}
    run.end = time.monotonic() + 0.05
    run._take_turns([runs.plan(RANGES)])
    assert time.monotonic() - run.end < 5
    assert run._report_so_far().left_out == 2
    assert run._report_so_far().unended == 0
    begun = Future[Judged]()
    begun.set_running_or_notify_cancel()
    run.pool.submit = lambda *_: Pending(lambda: Judged(Outcome.RIGHT), begun)  # type: ignore[method-assign]
    run.pool.stop = lambda: None  # type: ignore[method-assign]
    run.end = time.monotonic() + 0.05
    run._take_turns([runs.plan(Ranges(longest=200))])
    assert run._report_so_far().unended == 1
    assert run._report_so_far().ended == "the time was over while 1 of them ran"


@pytest.mark.parametrize("workers", [1, 2])
def test_neighbours_begin_apart_if_there_are_several_workers(workers: int) -> None:
    """Two workers at once would compile the kernel that two neighbours need. The verdicts keep the order of the plan."""
    begun = list[int]()

    def submit(check: str, case: Any, ranges: Ranges, end: float) -> Pending:
        begun.append(case)
        return Pending(lambda: Judged(Outcome.RIGHT, judged=1))

    run = run_of(a_check(fixed=lambda scope: range(18)))
    run.pool.submit, run.pool.workers = submit, workers  # type: ignore[method-assign, assignment]
    assert cases_of(judged(run)) == list(range(18))
    assert sorted(begun) == list(range(18))
    gaps = [abs(first - second) for first, second in itertools.pairwise(begun[workers:])]
    assert set(gaps) == {1} if workers == 1 else min(gaps) > 1


def test_of_the_levels_random_cases_one_wrong_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    check = drawing(a_check(fixed=lambda scope: ()), monkeypatch, 1, 2, 3)
    verdicts = judged(run_of(check, lambda case: Outcome.WRONG if case > 1 else Outcome.RIGHT, drawn=3))
    assert cases_of(verdicts) == [1, 2]


def test_further_random_cases_end_with_so_many_different_wrong_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_run, "MOST_WRONG", 2)
    monkeypatch.setattr(judge_run, "CASES_PER_WORKER", 1)
    drawn = [SimpleNamespace(case=case) for case in (1, 2, 2, 3, 4, 5)]
    check = drawing(a_check(fixed=lambda scope: (), draw_on=lambda *_: iter(drawn)), monkeypatch)
    run = run_of(check, lambda case: Outcome.WRONG if case > 1 else Outcome.RIGHT)
    assert cases_of(judged(run, random_until=time.monotonic() + 60)) == [1, 2, 3]
    assert run._report_so_far().num_random == 4


def test_a_round_knows_which_cases_the_profile_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(sends=lambda _, case: case > 1, concerns=lambda _: True)
    monkeypatch.setattr(judge_run, "profiles", lambda: {"engine": engine})
    scopes = list[Scope]()

    def note(scope: Scope, _: Sequence[CaseVerdict]) -> list[Any]:
        scopes.append(scope)
        return []

    run = run_of(a_check(fixed=lambda scope: [1, 2], more={Level.SMOKE: (note,)}))
    run.report = replace(run.report, profile="engine")
    assert cases_of(judged(run)) == [2]
    assert [*map(scopes[0].is_chosen, (1, 2))] == [False, True]


def test_numbers_do_not_depend_on_which_check_is_judged_first() -> None:
    """As it does on the number of workers."""

    def numbers(slow: str) -> dict[tuple[str, Any], int]:
        run = run_of(a_check())
        run.checks = [a_check(), a_check(key="K98")]

        def submit(check: str, case: Any, ranges: Ranges, end: float) -> Pending:
            future = Future[Judged]()
            Timer(0.01 if check == slow else 0.0, future.set_result, [Judged(Outcome.RIGHT, judged=1)]).start()
            return Pending(future.result, future)

        run.pool.submit = submit  # type: ignore[method-assign, assignment]
        return {(verdict.check, verdict.case): verdict.number for verdict in judged(run)}

    assert numbers("K98") == numbers("K99")
    assert sorted(numbers("").values()) == [*range(1, 21)]


RIGHT, TOO_LARGE = Judged(Outcome.RIGHT, judged=1), Judged(Outcome.DECLINED)
PREVENTED = Judged(Outcome.DECLINED, by_lab=True)


@pytest.mark.parametrize(
    ("found", "audits", "outcomes"),
    [
        ((RIGHT, RIGHT), 1, []),
        ((TOO_LARGE, RIGHT), 1, []),
        ((PREVENTED, RIGHT), 2, []),
        ((PREVENTED, PREVENTED), 2, [Outcome.FAILED]),
        ((PREVENTED, TOO_LARGE), 2, [Outcome.FAILED]),
    ],
)
def test_an_audit_goes_on_though_the_time_is_over_until_it_has_confirmed_something(
    found: Sequence[Judged], audits: int, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = run_of(a_check()), list[CaseVerdict]()
    right = judged(run)[:2]

    def note(_: object, verdict: CaseVerdict) -> Judged:
        made.append(verdict)
        return found[len(made) - 1]

    monkeypatch.setattr(audit, "chosen", lambda verdicts: [right])
    monkeypatch.setattr(audit, "audit", note)
    run.pool.is_apart = True
    run.end = time.monotonic() - 1.0
    run._audit()
    assert len(made) == audits
    assert [each.outcome for each in run._report_so_far().verdicts if each.outcome is not Outcome.RIGHT] == outcomes


def test_one_audited_case_confirms_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((RIGHT, PREVENTED))
    monkeypatch.setattr(audit, "chosen", lambda verdicts: [verdicts])
    monkeypatch.setattr(audit, "audit", lambda *_: next(found))
    again = audit.audited(Mock(), judged(run_of(a_check()))[:2], lambda: False)
    assert [each.outcome for each in again] == [Outcome.RIGHT, Outcome.DECLINED]


def test_an_audit_has_a_case_of_each_check_and_confirms_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def right(check: str, function: AttentionCall, kv_len: int = 20) -> CaseVerdict:
        case = AttentionCase(function, (kv_len,), (1,))
        return CaseVerdict("it", check, function, case, "cpu", Judged(Outcome.RIGHT, judged=1))

    decode, context = AttentionCall.DECODE, AttentionCall.CONTEXT
    verdicts = [right("K1", decode, kv_len) for kv_len in range(1, 31)]
    verdicts += [right("K4", decode), right("K2", decode), right("K1", context)]
    of_decode, of_context = audit.chosen(verdicts)
    assert sorted(each.check for each in of_decode) == [*["K1"] * 7, "K4"]  # K2 is not audited
    assert len({each.case.seed for each in (*of_decode, *of_context)} | {0}) == 10

    def audited(_: object, verdict: CaseVerdict) -> Judged:
        return verdict.judged if verdict.interface is decode else Judged(Outcome.DECLINED, by_lab=True)

    monkeypatch.setattr(audit, "audit", audited)
    found = [(each.interface, each.outcome) for each in audit.audited(Mock(), verdicts, lambda: True)]
    assert found == [(decode, Outcome.RIGHT), (context, Outcome.FAILED)]


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_memory_that_the_lab_lacks_in_an_audit_is_not_blamed_on_the_implementation(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "build_attention", Mock(side_effect=error))
    found = audit.judge_output(AttentionCase(AttentionCall.DECODE, (20,), (1,)), "cpu", None)
    assert (found.outcome, found.wrongs, found.by_lab) == (Outcome.DECLINED, (), True)
    (why,) = found.declines
    assert why.startswith("a part of the lab failed, and not the implementation: no memory was left (")
    monkeypatch.setattr(audit, "build_attention", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        audit.judge_output(AttentionCase(AttentionCall.DECODE, (20,), (1,)), "cpu", None)
