"""The judge as its user meets it: what is right, wrong, declined or failed, and which mistakes it answers with a sentence."""

import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import E4M3, AttentionCall
from lab.checks import AttentionCase, CaseVerdict, Contents, Level, Outcome, judge, judge_case
from lab.checks.explain.diagnosis import diagnose
from lab.checks.properties import checks
from lab.checks.properties.recorded import RECORDED_CALLS
from lab.checks.record import read_cases, read_record
from lab.checks.report import Report
from lab.checks.run.audit import RIGHT_ALONE, confirmed
from lab.checks.run.judge_run import Progress
from lab.checks.run.known_failures import FailingKernel, KnownFailure
from lab.checks.run.verdicts import Judged
from lab.checks.run.workers import Pending, Workers
from lab.exit_status import ExitStatus
from lab.reports.judgement import reproduction
from lab.workloads.interfaces import INTERFACES
from tests.checks import someone_elses
from tests.checks.small import SMALL, declining_if, decoding, twice_as_large_if

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[3]
CASE = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1), group=2)
INSIDE = decoding(references.trtllm_batch_decode_with_kv_cache)


def judged(implementation: Any, *only: str, **how: Any) -> Report:
    usual = {"only": only or ("K1",), "ranges": SMALL, "device": "cpu", "drawn": 0}
    return judge(implementation, **usual | how)


def test_only_arithmetic_that_keeps_light_keys_is_asked_for_them() -> None:
    (oracle,) = (check for check in checks() if check.key == "K1")
    pairs = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.bfloat16, E4M3))

    def asked(**how: Any) -> set[torch.dtype]:
        cases = oracle.cases(AttentionCall.DECODE, replace(SMALL, dtypes=pairs, **how), Level.FULL)
        return {case.kv_dtype for case in cases if case.contents is Contents.OVERSHADOWED}

    assert asked() == {torch.bfloat16, E4M3}
    assert asked(e4m3_arithmetic=True) == {torch.bfloat16}


@pytest.mark.parametrize(
    "implementation",
    [references, "lab.references", "tests.checks.run.test_judge:INSIDE", INSIDE],
    ids=["module", "name", "name inside", "object"],
)
def test_a_module_a_name_and_an_object_are_judged_alike(implementation: Any) -> None:
    report = judged(implementation, functions=("decode",))
    assert report.is_right
    # Each case once, once more with the LSE, and those of loud values with a small e4m3 output.
    loud = sum(verdict.case.contents is Contents.LOUD for verdict in report.verdicts)
    assert sum(row.judged for row in report.rows) == 2 * len(report.verdicts) + loud


@pytest.mark.parametrize(
    ("implementation", "how", "sentence"),
    [
        (SimpleNamespace(), {}, "SimpleNamespace has none of trtllm_batch_decode_with_kv_cache, "),
        (INSIDE, {"level": "brief"}, "there is no level 'brief'; there are quick, smoke, full"),
        (INSIDE, {"workers": 0}, "workers=0 must be from 1 to "),
        (INSIDE, {"workers": 10**5}, "workers=100000 must be from 1 to "),
        (
            INSIDE,
            {"time_limit_s": math.inf},
            "time_limit_s=inf must be more than 0 and at most 604800 seconds",
        ),
        (INSIDE, {"drawn": 10**30}, "must be from 0 to 1000000 cases"),
        (INSIDE, {"drawn": -1}, "drawn=-1 must be from 0 to "),
        (INSIDE, {"most_seconds": -1}, "most_seconds=-1 must be at least 0"),
        (INSIDE, {"most_seconds": math.nan}, "most_seconds=nan must be at least 0"),
        (INSIDE, {"time_limit_s": 0}, "time_limit_s=0 must be more than 0 and at most "),
        (INSIDE, {"isolated": True}, "an isolated judge imports the implementation by name; got namespace"),
    ],
)
def test_a_mistake_of_the_user_is_told_in_a_sentence(implementation: Any, how: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        judge(implementation, **how)


def returning(changed: Callable[[torch.Tensor], torch.Tensor]) -> SimpleNamespace:
    """Return the reference decode with its output changed."""

    def decode(**arguments: Any) -> Any:
        returned = references.trtllm_batch_decode_with_kv_cache(**arguments)
        return (changed(returned[0]), returned[1]) if isinstance(returned, tuple) else changed(returned)

    return decoding(decode)


@pytest.mark.filterwarnings("error")
def test_an_output_may_require_a_gradient() -> None:
    kernel = returning(torch.Tensor.requires_grad_)
    assert judge_case(kernel, "K1", CASE, "cpu").outcome is Outcome.RIGHT


def raises_boom(**_: Any) -> None:
    raise TypeError("boom")


def of_two_parameters(query: torch.Tensor, kv_cache: Any) -> torch.Tensor:
    return query


@pytest.mark.parametrize(
    ("kernel", "outcome", "reason"),
    [
        (declining_if(lambda **_: True, "not on a Tuesday"), Outcome.DECLINED, "not on a Tuesday"),
        (decoding(of_two_parameters), Outcome.DECLINED, "unexpected keyword argument 'block_tables'"),
        (decoding(raises_boom), Outcome.FAILED, "it raised TypeError: boom"),
        (decoding(lambda **_: [1.0]), Outcome.FAILED, "returned list, not a tensor"),
        (returning(torch.Tensor.double), Outcome.WRONG, f"the output is torch.float64, and the call's is {CASE.dtype}"),
        (
            twice_as_large_if(lambda **_: True),
            Outcome.WRONG,
            "the call: 8 of 8 vectors are wrong, of requests [0, 1]: row",
        ),
    ],
)
def test_a_verdict_says_why(kernel: Any, outcome: Outcome, reason: str) -> None:
    """`test_support_protocol.py` has the errors that refuse a call and those that fail it."""
    verdict = judge_case(kernel, "K1", CASE, "cpu")
    assert verdict.outcome is outcome
    assert reason in verdict.reason


def test_a_refused_variation_is_listed_and_the_rest_is_judged() -> None:
    verdict = judge_case(someone_elses, "K1", CASE, "cpu")
    assert verdict.outcome is Outcome.RIGHT
    assert verdict.judged.judged == 1
    (declined,) = verdict.judged.declines
    assert declined.startswith("return_lse: it does not take these arguments")


@pytest.mark.parametrize("check", ["forward_modes", "metadata", "draft_lists"])
@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_every_kind_of_function_may_refuse(check: str, error: type[Exception]) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise error("no")

    implementation = SimpleNamespace(**{interface.value: refuse for interface in INTERFACES})
    assert {row.outcome for row in judged(implementation, check).rows} == {Outcome.DECLINED}


def test_a_drawn_case_is_made_as_small_as_can_be_wrong() -> None:
    wrong_beyond_100_keys = twice_as_large_if(lambda seq_lens, **_: int(seq_lens.max()) > 100)
    report = judged(wrong_beyond_100_keys, ranges=replace(SMALL, longest=300), drawn=10)
    (case,) = (verdict.case for verdict in report.wrong if verdict.drawn)
    assert (case.kv_lens, case.q_lens, case.seed) == ((101,), (1,), 0)


def test_so_many_cases_are_drawn_as_asked_for_at_most() -> None:
    report = judged(INSIDE, drawn=5)
    assert 1 < sum(verdict.drawn for verdict in report.verdicts) <= 5
    assert not any(verdict.drawn for verdict in judged(INSIDE, drawn=0).verdicts)


def test_a_check_a_function_and_a_level_go_by_their_names() -> None:
    for check, function in (("K5", "decode"), ("k5", AttentionCall.DECODE.value), ("guards", "decode")):
        report = judged(references, check, functions=[function], level="smoke")
        assert {(row.check, row.interface) for row in report.rows} == {("K5", AttentionCall.DECODE)}
        assert report.level is Level.SMOKE


def test_progress_has_each_verdict_and_counts_the_cases_and_the_time_left() -> None:
    told: list[Progress] = []
    report = judged(INSIDE, progress=told.append, drawn=2)
    assert [each.done for each in told] == list(range(1, len(report.verdicts) + 1))
    assert told[-1].total == told[-1].done == len(report.verdicts)
    unmarked = [replace(verdict, sent_by=()) for verdict in report.verdicts]  # the report says whom a verdict concerns
    assert [replace(each.verdict, number=number) for number, each in enumerate(told, 1)] == unmarked
    assert told[0].seconds_left is None
    assert told[-1].seconds_left == 0


def test_what_no_time_was_left_for_is_counted_and_not_right() -> None:
    report = judged(INSIDE, most_seconds=0.0, drawn=3)
    assert report.left_out == len(judged(INSIDE, drawn=0).verdicts) + 3
    assert not report.verdicts
    assert not report.is_right


def test_checks_take_turns_and_are_reported_one_after_another() -> None:
    """So that time that ends early leaves no check without a verdict."""
    told: list[CaseVerdict] = []
    report = judged(INSIDE, "K1", "K5", "M1", progress=lambda progress: told.append(progress.verdict))
    assert [verdict.check for verdict in told][:3] == ["K1", "K5", "M1"]
    assert [verdict.check for verdict in report.verdicts] == sorted(verdict.check for verdict in told)
    assert report.left_out == 0


def test_only_a_known_failure_lets_a_wrong_case_pass() -> None:
    entry = KnownFailure(FailingKernel(("SimpleNamespace",), None), ("K1",), "vectors are wrong")
    report = judged(twice_as_large_if(lambda **_: True), known_failures={"page#heading": (entry,)})
    assert {verdict.outcome for verdict in report.verdicts} == {Outcome.KNOWN}
    assert report.is_right


WINDOWS = replace(SMALL, windows=(True,))


def test_several_workers_say_the_same_in_the_same_order() -> None:
    window = "tests.checks.someone_elses_window"
    one, two = (judged(window, "K3", ranges=WINDOWS, **how) for how in ({}, {"isolated": True, "workers": 2}))
    found = ([(each.case, replace(each.judged, alone="")) for each in report.verdicts] for report in (one, two))
    assert next(found) == next(found)
    assert any(one.wrong)


def test_the_reproduction_of_a_wrong_case_shows_the_same_wrong_in_a_shell() -> None:
    report = judged("tests.checks.someone_elses_window", "K1", ranges=WINDOWS)
    wrong = next(report.wrong)
    line = reproduction(wrong).replace("python", sys.executable, 1)
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == str(wrong)


def test_a_check_may_vary_a_case_within_the_axes_alone_and_so_may_its_reproduction() -> None:
    """Which neighbours K14 calls in between is the ranges's, so a reproduction must name it."""
    kernel = twice_as_large_if(lambda q_len_per_req=1, **_: q_len_per_req > 1)
    wrong = next(judged(kernel, "K14").wrong)
    assert wrong.ranges == SMALL
    assert judge_case(kernel, "K14", wrong.case, "cpu", SMALL).judged == wrong.judged
    assert repr(SMALL) in reproduction(wrong)


def test_the_keys_and_names_of_checks_differ() -> None:
    names = [name for check in checks() for name in (check.key, check.name)]
    assert len(set(names)) == len(names)


def test_every_check_says_in_a_line_what_it_catches() -> None:
    assert all(20 < len(check.catches) < 140 and check.catches.endswith(".") for check in checks())


def test_the_page_of_checks_has_a_row_for_every_check() -> None:
    rows = re.findall(r"^\| ([KLMRS]\d+) \| (\w+) \|", (ROOT / "docs/checks.md").read_text(), re.MULTILINE)
    expected = sorted((check.key, check.name) for check in (*checks(), RECORDED_CALLS))
    assert sorted(rows) == expected, "the table of docs/checks.md has one row for each check"


def test_a_kernel_that_changes_torch_while_it_is_imported_is_dishonest_in_this_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.linalg, "vector_norm", torch.linalg.vector_norm)  # restored at the end
    kernel = tmp_path / "patches.py"
    kernel.write_text(
        "import torch\nfrom lab.references import trtllm_batch_decode_with_kv_cache\n"
        "torch.linalg.vector_norm = lambda *_, **__: torch.zeros(())\n"
    )
    report = judged(str(kernel))
    assert report.exit_status is ExitStatus.REFUSED
    assert "torch.linalg.vector_norm" in str(report)


def test_cases_begin_although_the_workers_start_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    moments = itertools.chain([now - 1000.0], itertools.repeat(now))  # the workers took 1000 seconds to start
    monkeypatch.setattr("lab.checks.run.judge.time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert judged(INSIDE, most_seconds=500.0).verdicts
    monkeypatch.setattr("lab.checks.run.judge.LEAST_SECONDS", -1.0)
    moments = itertools.chain([now - 1000.0], itertools.repeat(now))
    assert not judged(INSIDE, most_seconds=500.0).verdicts


STATEFUL = """
from lab import references

CALLS = []

def trtllm_batch_decode_with_kv_cache(**arguments):
    CALLS.append(1)
    if len(CALLS) > 12 or TWO_ROWS and arguments.get("q_len_per_req") == 2:
        arguments["bmm2_scale"] = 2 * arguments["bmm2_scale"]
    return references.trtllm_batch_decode_with_kv_cache(**arguments)
"""


@pytest.mark.parametrize("is_wrong_alone", [False, True])
def test_what_is_wrong_only_after_other_cases_is_no_part_of_a_failure_rule(
    tmp_path: Path, is_wrong_alone: bool
) -> None:
    """The kernel is wrong from its thirteenth call on and, if `is_wrong_alone`, also wherever a request has two rows."""
    kernel, out = tmp_path / "kernel.py", tmp_path / "report.json"
    kernel.write_text(STATEFUL.replace("TWO_ROWS", str(is_wrong_alone)))
    report = judged(str(kernel), "K1", "K2", isolated=True, out=out)
    alone = {key: [each for each in report.verdicts if each.judged.alone == key] for key in ("right", "wrong", "")}
    assert len(alone["right"]) > 5
    assert {each.outcome for each in alone["right"]} == {Outcome.WRONG}
    assert all(RIGHT_ALONE in each.reason for each in alone["right"])
    assert {each.case.q_lens[0] for each in alone["wrong"]} == ({2} if is_wrong_alone else set())
    number, total = len(alone["right"]), len(alone["right"]) + len(alone["wrong"])
    state = f"Of {total} wrong cases repeated in their own process, {number} are right: the implementation keeps state"
    assert state in report.diagnosis.broken
    assert report.diagnosis.broken.startswith("Of ") is not is_wrong_alone
    assert ("wherever a request has several query rows" in report.diagnosis.broken) is is_wrong_alone
    assert "every other result" not in report.diagnosis.broken
    assert state in diagnose([*read_cases(read_record(out))]).broken
    assert report.exit_status is ExitStatus.WRONG
    again = judged(str(kernel), "K1", "K2", isolated=True, out=out)  # takes the right cases from the file
    assert {each.key for each in again.verdicts if each.judged.alone == "right"} == {
        each.key for each in alone["right"]
    }
    assert again.exit_status is ExitStatus.WRONG


def test_a_case_that_is_repeated_has_the_verdict_of_its_own_process() -> None:
    before = CaseVerdict(
        "a kernel", "K1", AttentionCall.DECODE, CASE, "cpu", Judged(Outcome.WRONG, ("much",), worst_ratio=9)
    )
    right, wrong, declined, dishonest = (
        confirmed(before, Judged(outcome, wrongs, worst_ratio=0.5))
        for outcome, wrongs in (
            (Outcome.RIGHT, ()),
            (Outcome.WRONG, ("less",)),
            (Outcome.DECLINED, ()),
            (Outcome.DISHONEST, ("forged",)),
        )
    )
    assert (right.outcome, right.judged.wrongs, right.judged.worst_ratio) == (Outcome.WRONG, ("much", RIGHT_ALONE), 9)
    assert (right.judged.alone, right.is_wrong_alone) == ("right", False)
    assert (wrong.judged.alone, wrong.judged.wrongs, wrong.is_wrong_alone) == ("wrong", ("less",), True)
    assert declined is before
    assert dishonest.outcome is Outcome.DISHONEST


def test_no_worker_says_how_its_case_is_alone() -> None:
    assert not Pending(lambda: Judged(Outcome.WRONG, ("much",), alone="right"))().alone


def test_few_processes_judge_one_case_each_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    running, most, submit = set[int](), 0, Workers.submit_alone

    def counted(pool: Workers, *case: Any) -> Pending:
        nonlocal most
        pending, number = submit(pool, *case), len(running) + 1000 * most
        running.add(number)
        most = max(most, len(running))

        def result() -> Judged:
            running.discard(number)
            return pending.result()

        return Pending(result, pending.future)

    monkeypatch.setattr(Workers, "submit_alone", counted)
    kernel = tmp_path / "kernel.py"
    kernel.write_text(STATEFUL.replace("> 12", "> 0"))
    judged(str(kernel), "K1", "K2", "K3", isolated=True, workers=2)
    assert 0 < most <= 2


def test_few_cases_of_a_kernel_without_state_are_judged_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone, submit = list[Any](), Workers.submit_alone

    def counted(pool: Workers, *case: Any) -> Any:
        alone.append(case)
        return submit(pool, *case)

    monkeypatch.setattr(Workers, "submit_alone", counted)
    judged("lab.references", functions=("decode",), isolated=True)
    assert alone == []
    kernel = tmp_path / "kernel.py"
    kernel.write_text(STATEFUL.replace("> 12", "> 0").replace("TWO_ROWS", "True"))
    report = judged(str(kernel), isolated=True)
    assert not any(each.judged.alone == "right" for each in report.verdicts)
    assert 2 <= len(alone) <= 10 < sum(each.outcome is Outcome.WRONG for each in report.verdicts)
