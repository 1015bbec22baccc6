"""A case that crashes, hangs or raises costs itself alone; `test_workers_gpu` has the twins that do it in a kernel."""

import os
import re
import signal
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import Value, forkserver
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Outcome, Ranges, Report, judge, judge_case
from lab.checks.run import workers as workers_module
from lab.checks.run.verdicts import Judged, TooLate
from lab.checks.run.workers import Pending, Waits, Workers, in_turns, kills_for_memory
from lab.loading import LoadError
from lab.reports.judgement import reproduction
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import interfaces_of
from tests.checks import hostile
from tests.checks.small import SMALL

RANGES = replace(SMALL, groups=Ranges().groups)
TIME_LIMIT_S = 3.0
RELATIVE = os.path.relpath(hostile.__file__)
LINE_OF_HANG = hostile.hang.__code__.co_firstlineno + 2


@pytest.fixture(scope="module")
def report() -> Report:
    """K1's fixed cases have all eight groups."""
    how: dict[str, Any] = {"only": ["K1"], "ranges": RANGES, "isolated": True, "time_limit_s": TIME_LIMIT_S, "drawn": 0}
    return judge("tests.checks.hostile", device="cpu", **how)


def case_of(group: int) -> AttentionCase:
    return AttentionCase(AttentionCall.DECODE, (20,), (1,), group=group)


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (2, f"it did not return within {TIME_LIMIT_S:g} s; it was in hang (hostile.py:{LINE_OF_HANG}), called by "),
        (3, "it crashed its process (exit status 7)"),
        (4, "it crashed its process (killed by signal 11, SIGSEGV)"),
        (5, "the call: it raised RuntimeError: an unspecified launch failure"),
        (6, "the call: it raised TypeError: object of type 'int' has no len()"),
        (8, "the call: it raised Odd: out of cheese"),
        (16, "the call: it raised SystemExit: 3"),
    ],
)
def test_a_failed_case_is_named_with_its_reproduction(report: Report, group: int, sentence: str) -> None:
    verdict = next(verdict for verdict in report.verdicts if verdict.case.group == group)
    assert verdict.outcome is Outcome.FAILED
    (wrong,) = verdict.judged.wrongs
    assert wrong.startswith(sentence) if group == 2 else wrong == sentence
    assert repr(verdict.case) in reproduction(verdict)


def test_what_came_before_and_after_stays_in_the_report(report: Report) -> None:
    outcomes = {(verdict.case.group, verdict.outcome) for verdict in report.verdicts}
    assert outcomes == {(1, Outcome.RIGHT)} | {(group, Outcome.FAILED) for group in hostile.DEEDS}
    assert not report.is_right


@pytest.mark.parametrize(
    ("deed", "sentence"),
    [
        ("ends_with_0", "it crashed its process (exit status 0)"),
        ("takes_all_descriptors", "it crashed its process, for no file can be opened: Too many open files"),
        ("closes_all_descriptors", "it crashed its process (exit status "),
        ("removes_scratch_folders", ""),
        ("changes_folder", ""),
        ("removes_folder", ""),
        ("raises_mute", "the call: it raised Mute: a message that cannot be made, for that raises KeyboardInterrupt"),
        ("kills_its_group", "it crashed its process (exit status 15)"),
        ("kills_its_parent", None),  # the case may be over before its worker is missed
        ("empties_modules", "its worker could not go on: PicklingError: "),
        ("breaks_len", "its worker died before it began, or broke its pipe: Unpicklable object from worker"),
    ],
)
def test_what_a_kernel_takes_from_its_process_or_machine_costs_its_case_alone(
    deed: str, sentence: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at once, not at the time limit."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    cases = [case_of(group) for group in (1, 3, 1)]
    start = time.monotonic()
    with Workers(f"{RELATIVE}:{deed}", torch.device("cpu"), Ranges(), 300.0) as pool:
        before, during, after = (wait() for wait in [pool.submit("K1", each) for each in cases])
    assert (before.outcome, after.outcome) == (Outcome.RIGHT, Outcome.RIGHT)
    if sentence is not None:
        assert during.outcome is (Outcome.FAILED if sentence else Outcome.RIGHT)
        assert "; ".join(during.wrongs).startswith(sentence)
    assert time.monotonic() - start < 200.0


@pytest.mark.parametrize(
    ("kills", "outcome", "sentence"),
    [
        (0, Outcome.FAILED, "it crashed its process (killed by signal 9, SIGKILL)"),
        (1, Outcome.DECLINED, "a part of the lab failed, and not the implementation: no memory was left (SIGKILL)"),
    ],
)
def test_a_worker_that_linux_kills_for_want_of_memory_is_no_failure(
    kills: int, outcome: Outcome, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([4, *[4 + kills] * 2])
    monkeypatch.setattr(workers_module, "kills_for_memory", lambda: next(counts))
    with Workers("tests.checks.hostile:kills_its_process", torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        judged = pool.submit("K1", case_of(3))()
    assert judged.outcome is outcome
    assert judged.by_lab is (kills > 0)
    assert "; ".join((*judged.wrongs, *judged.declines)).startswith(sentence)
    assert len(list(counts)) == 1 - kills  # the case was judged twice if memory was the cause


def test_the_count_of_kills_is_that_of_linux() -> None:
    with open("/proc/vmstat") as counters:
        assert f"oom_kill {kills_for_memory()}" in counters.read().splitlines()


def test_a_pipe_that_a_kernel_damages_costs_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool waits for the rest of a message, and then no time limit of its own holds."""
    monkeypatch.setattr(workers_module, "START_LIMIT_S", 0.5)
    monkeypatch.setattr(workers_module, "WATCHED_EVERY_S", 0.2)
    cases = [case_of(group) for group in (1, 3, 1)]
    with Workers("tests.checks.hostile:sends_half_a_message", torch.device("cpu"), Ranges(), 2.0) as pool:
        outcomes = [wait().outcome for wait in [pool.submit("K1", each) for each in cases]]
    assert outcomes == [Outcome.RIGHT, Outcome.FAILED, Outcome.RIGHT]


def test_a_kernel_that_damages_the_pipe_in_each_case_fails() -> None:
    """The import of the kernel has shown that workers can begin."""
    with Workers("tests.checks.hostile:breaks_len", torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        pool.call(interfaces_of)
        assert pool.submit("K1", case_of(3))().outcome is Outcome.FAILED


def test_the_audit_goes_on_after_the_end_of_the_process_of_which_all_are_forks() -> None:
    with Workers("lab.references", torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        assert pool.apart(_right).outcome is Outcome.RIGHT
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        time.sleep(1.0)
        assert pool.apart(_right).outcome is Outcome.RIGHT
        found = pool.apart(hostile.raise_odd)
    assert found.outcome is Outcome.FAILED
    assert found.wrongs[0].startswith("its output cannot be judged: ")


def test_a_function_that_an_implementation_lacks_is_its_failure() -> None:
    found = judge_case(Mapping, "K1", case_of(1), "cpu")
    assert found.outcome is Outcome.FAILED
    assert found.reason == "the call: it has no trtllm_batch_decode_with_kv_cache"


def test_a_worker_that_dies_between_cases_is_replaced_too() -> None:
    """What one case broke may kill the process later."""
    with Workers("tests.checks.hostile:dies_later", torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        for pause_s in (1.0, 0.0):
            assert pool.submit("K1", case_of(1))().outcome is Outcome.RIGHT
            time.sleep(pause_s)


@pytest.mark.parametrize("name", ["lab.references", None])
def test_no_case_is_begun_after_the_end(name: str | None) -> None:
    """A case may wait for others in a queue when its run is over; `name` is None for a judge in this process."""
    with Workers(name or references, torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        now = time.monotonic()
        late, in_time = (pool.submit("K1", case_of(1), None, end) for end in (now - 1.0, now + 60.0))
        assert in_time().outcome is Outcome.RIGHT
        with pytest.raises(TooLate):
            late()


def test_checks_judge_in_turns() -> None:
    """In one process a verdict is always ready: each bench has its first before one has its second."""
    kept = list[int]()

    def waits_of(number: int) -> Waits:
        for _ in range(2):
            yield Pending(_right)
            kept.append(number)

    assert in_turns(waits_of(number) for number in range(9)) == 0
    assert kept == [*range(9)] * 2


def test_a_slow_case_holds_up_its_own_check_alone() -> None:
    """The others go on to their last case; a bench that never went on ends with the run."""
    kept, ended = list[str](), list[str]()

    def waits_of(name: str, futures: list[Future[Judged]]) -> Waits:
        try:
            for future in futures:
                yield Pending(future.result, future)
                kept.append(name)
        finally:
            ended.append(name)

    slow, quick = Future[Judged](), [Future[Judged]() for _ in range(3)]
    quick[0].set_result(_right())

    def goes_on() -> bool:
        if 0 < len(kept) < len(quick):
            Timer(0.05, quick[len(kept)].set_result, [_right()]).start()  # while both benches wait
        return len(kept) < len(quick)

    assert in_turns([waits_of("slow", [slow]), waits_of("quick", quick)], goes_on) == 0
    assert kept == ["quick"] * 3
    assert sorted(ended) == ["quick", "slow"]


def _right() -> Judged:
    return Judged(Outcome.RIGHT)


def test_a_pool_whose_workers_never_begin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_begin", hostile.leave_at_once)
    with Workers("lab.references", torch.device("cpu"), Ranges(), TIME_LIMIT_S) as pool:
        waiting = pool.submit("K1", case_of(1))
        with pytest.raises(RuntimeError, match="no worker can begin: a script"):
            waiting()


@pytest.mark.parametrize(("broken", "outcome"), [(0, Outcome.RIGHT), (1, Outcome.RIGHT), (2, Outcome.FAILED)])
def test_a_case_whose_worker_dies_before_it_begins_is_begun_once_more(broken: int, outcome: Outcome) -> None:
    pool = Workers("lab.references", torch.device("cpu"), Ranges(), TIME_LIMIT_S)
    pool._has_worked = True
    futures = [Future[Judged]() for _ in range(3)]
    for number, future in enumerate(futures):
        if number < broken:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(_right())
    left = iter(futures[1:])
    pool._schedule = lambda work, arguments, limit_s=None: next(left)  # type: ignore[method-assign]
    assert pool._result(futures[0], ("", None, 0.0, Path())).outcome is outcome  # type: ignore[arg-type]
    assert len(list(left)) == 2 - min(broken, 1)


def test_workers_take_turns_with_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    begun = Value("i", 0)
    for _ in range(3):
        workers_module._take_gpu(begun)
    assert taken == [0, 1, 0]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import os\nos._exit(9)\n", "ends its process when it is imported (exit status 9)"),
        ("import time\ntime.sleep(60)\n", "was not imported within 0.5 s"),
        (
            "def __getattr__(name):\n    raise RuntimeError(name)\n",
            "cannot be judged: RuntimeError: trtllm_batch_decode_with_kv_cache",
        ),
        ("raise KeyboardInterrupt\n", "cannot be imported: KeyboardInterrupt"),
        (
            "class Mute(Exception):\n    def __str__(self):\n        raise ValueError\nraise Mute\n",
            "cannot be imported: Mute: a message that cannot be made, for that raises ValueError (kernel.py, line 4)",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, sentence: str
) -> None:
    limit_s = 0.5 if "sleep" in code else 60.0
    monkeypatch.setattr(workers_module, "IMPORT_LIMIT_S", limit_s)
    kernel = tmp_path / "kernel.py"
    kernel.write_text(code)
    with pytest.raises(LoadError, match=re.escape(sentence)):
        judge(str(kernel), device="cpu", isolated=True, time_limit_s=limit_s)
