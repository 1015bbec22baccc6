"""The answer of a report: for which engines and corners it holds, and what was not judged, because of whom."""

from dataclasses import replace
from typing import Any

import pytest

from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, CaseVerdict, Outcome
from lab.checks.explain.answer import NotJudged, answer, not_judged, reach
from lab.checks.parameters.coverage import Coverage, Reach
from lab.checks.run.judging import failure_of_the_lab
from lab.checks.run.verdicts import Judged
from lab.extras import sentence
from lab.interpreter import _cure
from lab.recorded.case import RecordedCase

BOTH = ("sglang", "vllm")
CASE = AttentionCase(AttentionCall.DECODE, (20,), (1,))
OUTCOMES = {"R": Outcome.RIGHT, "W": Outcome.WRONG, "F": Outcome.FAILED, "K": Outcome.KNOWN, "D": Outcome.DECLINED}


def verdicts(outcomes: str, *sent_by: str, **judged: Any) -> list[CaseVerdict]:
    """One verdict for each letter, on a case that these engines send."""
    plain = CaseVerdict("kernel", "K1", AttentionCall.DECODE, CASE, "cpu", Judged(Outcome.RIGHT), sent_by=sent_by)
    counts = [0 if each == "D" else 3 for each in outcomes]
    return [
        replace(plain, judged=Judged(OUTCOMES[each], judged=count, **judged))
        for each, count in zip(outcomes, counts, strict=True)
    ]


SENT = "that SGLang 0.5.23 and vLLM 0.33.0 send"
BY_SGLANG = "that SGLang 0.5.23 sends"
OF_ALL = f"Right for all {SENT}"


@pytest.mark.parametrize(
    ("by_both", "by_sglang", "corners", "sentence"),
    [
        ("RR", "", "", f"{OF_ALL}."),
        ("R", "", "RR", f"{OF_ALL}, and in 2 documented corners."),
        ("", "R", "", f"Right for all {BY_SGLANG}."),
        ("", "", "R", "Right in 1 documented corner."),
        ("R", "", "WRW", f"{OF_ALL}; wrong in 2 of 3 documented corners."),
        ("RRW", "", "R", f"Wrong in 1 of 3 cases {SENT}; right in 1 documented corner."),
        ("R", "WR", "W", f"Wrong in 1 of 3 cases {BY_SGLANG} and 1 of 1 documented corner; right for all that vLLM"),
        ("FR", "", "F", f"Failed in 1 of 2 cases {SENT} and 1 of 1 documented corner."),
        ("FW", "", "", f"Wrong in 2 of 2 cases {SENT}."),
        ("R", "RD", "", f"Right for all that vLLM 0.33.0 sends, and in 2 of 3 cases {BY_SGLANG}."),
        ("K", "", "R", f"Right, except for known failures in 1 case, for all {SENT}, and in 1"),
        ("", "", "W", "Wrong in 1 of 1 documented corner."),
    ],
)
def test_the_answer_tells_engines_from_corners(by_both: str, by_sglang: str, corners: str, sentence: str) -> None:
    found = [*verdicts(by_both, *BOTH), *verdicts(by_sglang, "sglang"), *verdicts(corners)]
    assert answer(found, "", (), is_whole=True).startswith(sentence)


def test_of_a_profile_the_other_engine_is_a_corner() -> None:
    found = [*verdicts("R", *BOTH), *verdicts("W", "vllm")]
    said = f"Right for all {BY_SGLANG}; wrong in 1 of 1 documented corner."
    assert answer(found, "sglang", (), is_whole=True) == said


@pytest.mark.parametrize(
    ("outcomes", "missing", "is_whole", "sentence"),
    [
        ("R", "ab", True, f"Right for all {BY_SGLANG}. Not judged: a; b."),
        ("R", "a", False, f"Not judged as a whole: a. Right in 1 of 1 case {BY_SGLANG}."),
        ("W", "a", False, f"Wrong in 1 of 1 case {BY_SGLANG}. Not judged: a."),
        ("D", "a", False, "Not judged: a."),
        ("", "", True, "Not judged: the options leave no case of the kernel's functions."),
        ("", "a", False, "Not judged: no case began: a; to start the workers takes some of it."),
    ],
)
def test_what_was_not_judged_stands_in_the_same_line(
    outcomes: str, missing: str, is_whole: bool, sentence: str
) -> None:
    reasons = [NotJudged(f"{each} in full", each) for each in missing]
    assert answer(verdicts(outcomes, "sglang"), "", reasons, is_whole).startswith(sentence)


def test_recorded_calls_were_all_sent() -> None:
    call = RecordedCase(AttentionCall.DECODE, "calls", 1, "noon")
    recorded = [replace(each, case=call) for each in verdicts("RW")]
    assert answer(recorded, "", (), is_whole=True) == "Wrong: 1 of 2 cases."
    assert answer(recorded[:1], "", (), is_whole=True) == "Right: 1 case."


def test_a_dishonest_kernel_has_no_other_answer() -> None:
    deceived = replace(verdicts("W")[0], judged=Judged(Outcome.DISHONEST, ("torch.add was changed",)))
    said = "Dishonest, and not judged: torch.add was changed."
    assert answer([deceived], "", (NotJudged("a"),), is_whole=True) == said


def test_each_reason_says_because_of_whom() -> None:
    values = {"q_len": {1: Reach.JUDGED, 2: Reach.DECLINED, 3: Reach.IMPOSSIBLE, 4: Reach.LEFT_OUT}}
    pairs = {Reach.JUDGED: 5, Reach.LEFT_OUT: 3, Reach.IMPOSSIBLE: 1}
    coverage = Coverage(AttentionCall.DECODE, values, pairs, {}, (), {})
    found = [
        *verdicts("RDD", *BOTH),
        *verdicts("D", declines=("no Triton",), by_lab=True),
        *(replace(each, interface=AttentionCall.CONTEXT) for each in verdicts("D")),
    ]
    reasons = list(not_judged(found, [coverage], "7 cases left out", "the smoke level"))
    assert [each.full for each in reasons] == [
        "7 cases left out",
        "nothing of trtllm_batch_context_with_kv_cache",
        "the kernel refused 3 cases, and with them 1 of 3 values",
        "the lab cannot judge 1 case here (no Triton)",
        "the end of the run or the smoke level leaves out 1 of 3 values and 3 of 8 pairs of values",
    ]
    *_, last = not_judged([*found, *verdicts("F")], [coverage], "", "the smoke level")
    assert last.full == "a failed call or the smoke level leaves out 1 of 3 values and 3 of 8 pairs of values"
    assert answer(found, "", reasons, is_whole=True) == (
        f"Right in 1 of 3 cases {SENT}. Not judged: 7 cases left out; nothing of "
        "trtllm_batch_context_with_kv_cache; the kernel refused 3 cases; the lab cannot judge 1 case here."
    )
    assert reach(found, reasons[:1]) == "compared: 3 results of 1 case; 7 cases left out"
    assert list(not_judged(verdicts("R"), (), "", "the smoke level")) == []


@pytest.mark.parametrize("cure", ["pip install 'numpy<2.4'", "pip install '.[triton]' in the lab's checkout"])
def test_a_reason_of_the_lab_s_ends_with_what_to_install(cure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is missing, or two versions do not fit."""
    monkeypatch.setattr("lab.interpreter.version", {"triton": "3.6.0", "numpy": "2.5.0"}.get)
    numpys = "only 0-dimensional arrays can be converted to Python scalars"
    reasons = (
        failure_of_the_lab(f"not judged here, for Triton's interpreter cannot run it (TypeError: {numpys}): {_cure()}"),
        sentence("graphs rebuild their metadata in Triton kernels: lab.kernels", ["triton"]),
    )
    found = [each for reason in reasons for each in verdicts("D", declines=(reason,), by_lab=True)]
    assert any(each.full.endswith(f"{cure})") for each in not_judged(found, [], "", "the smoke level"))


def test_the_first_line_says_how_narrow_a_kernel_is_and_stays_short() -> None:
    taken = [*verdicts("R" * 41 + "D" * 192, *BOTH), *verdicts("DD", "vllm"), *verdicts("R" * 12)]
    refused = [replace(each, check=f"K{number}") for number in range(2, 18) for each in verdicts("D")]
    found = [*taken, *refused, *(replace(each, check="M1") for each in verdicts("R"))]
    reasons = list(not_judged(found, (), "249 cases left out, the time was over", "the quick level"))
    said = answer(found, "", reasons, is_whole=True)
    assert "; 16 of 18 checks compared nothing. Not judged: 249 cases left out" in said
    assert said.startswith(f"Right in 41 of 233 cases {BY_SGLANG}, 41 of 235 cases that vLLM 0.33.0 sends and 13 ")
    assert len(said) < 250


def test_the_first_line_counts_all_cases_that_the_lab_cannot_judge_once() -> None:
    found = [
        *(*verdicts("R"), *verdicts("DD", declines=("no Triton",), by_lab=True)),
        *verdicts("D", declines=("b",), by_lab=True),
    ]
    reasons = list(not_judged(found, (), "", "the smoke level"))
    assert answer(found, "", reasons, is_whole=True).endswith(". Not judged: the lab cannot judge 3 cases here.")
    assert reach(found, reasons).endswith("2 cases here (no Triton); the lab cannot judge 1 case here (b)")
