"""The report: rows, what is right, JSON, the table, and expressions that make each case again."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lab.calls.problem import E4M3, AttentionCall
from lab.checks import AttentionCase, CaseVerdict, Contents, Dead, Level, Outcome, Ranges, Report, Storage, TableTail
from lab.checks.properties import checks
from lab.checks.record import read_case, read_cases
from lab.checks.run.verdicts import CheckedResult, Judged, WrongVector
from lab.reports.judgement import check_table, notes, reproduction, show, summary
from lab.reports.tables import terminal_of
from tests.checks.small import SMALL

CASE = AttentionCase(AttentionCall.DECODE, (20, 33), (1, 1))


def verdict_of(outcome: Outcome, **changes: Any) -> CaseVerdict:
    wrongs = ("off by one",) if outcome in (Outcome.WRONG, Outcome.FAILED, Outcome.KNOWN) else ()
    judged = Judged(outcome, wrongs, judged=int(outcome is not Outcome.DECLINED))
    verdict = CaseVerdict("somebody.kernel", "K1", AttentionCall.DECODE, CASE, "cpu", judged)
    return replace(verdict, **changes)


def report_of(*verdicts: CaseVerdict, **changes: Any) -> Report:
    return replace(Report("somebody.kernel", Level.SMOKE, {"gpu": None}, "cpu", verdicts), **changes)


def test_the_quick_level_is_right_although_its_time_left_cases_out_if_each_function_was_judged() -> None:
    right = report_of(verdict_of(Outcome.RIGHT), left_out=3)
    assert not right.is_right
    assert replace(right, level=Level.QUICK).is_right
    assert "3 cases left out, the time was over" in str(replace(right, level=Level.QUICK))
    sent = replace(right, level=Level.QUICK, verdicts=(verdict_of(Outcome.RIGHT, sent_by=("sglang",)),))
    assert str(sent).startswith("Right in 1 of 1 case that SGLang 0.5.23 sends. Not judged: 3 cases left out")
    assert str(replace(sent, left_out=0)).startswith("Right for all that SGLang 0.5.23 sends.")
    assert not replace(right, level=Level.QUICK, unended=1).is_right  # it may hang
    both = (AttentionCall.DECODE, AttentionCall.CONTEXT)
    assert not replace(right, level=Level.QUICK, functions=both).is_right


def test_a_quick_run_that_compared_next_to_nothing_of_what_engines_send_is_no_answer() -> None:
    def quick(compared: int, refused: int, **changes: Any) -> Report:
        sent = [verdict_of(Outcome.RIGHT, sent_by=("sglang",))] * compared
        sent += [verdict_of(Outcome.DECLINED, sent_by=("sglang",))] * refused
        return report_of(*sent, *[verdict_of(Outcome.RIGHT)] * 20, **{"level": Level.QUICK, "left_out": 3} | changes)

    assert (quick(9, 9).exit_status, quick(9, 10).exit_status) == (0, 125)
    assert str(quick(1, 10)).startswith(
        "Not judged as a whole: 3 cases left out, the time was over; the kernel refused 10"
    )
    assert quick(1, 10, left_out=0).exit_status == quick(1, 10, left_out=0, level=Level.SMOKE).exit_status == 0
    (hint,) = (line for line in notes(quick(1, 22, refusals=("a.py:No",))) if "refuses most cases" in line)
    assert hint.endswith(
        "lab judge somebody.kernel --refusals a.py:No --functions trtllm_batch_decode_with_kv_cache --only K1 --drawn 0"
    )
    for other in (
        quick(1, 10),
        quick(1, 22, level=Level.SMOKE),
        quick(1, 22, narrowed=((AttentionCall.DECODE, SMALL),)),
    ):
        assert not any("refuses most cases" in line for line in notes(other))


def test_commands_of_the_notes_can_be_pasted_into_a_shell() -> None:
    report = report_of(
        verdict_of(Outcome.DECLINED), refusals=("a.py:No way",), narrowed=((AttentionCall.DECODE, SMALL),)
    )
    (hint,) = (line for line in notes(replace(report, implementation="it's [mine].py")) if "These options" in line)
    command = shlex.split(hint.partition("supports: ")[2])
    assert command[:5] == ["lab", "judge", "it's [mine].py", "--refusals", "a.py:No way"]


def test_what_all_failed_cases_share_stands_with_them_and_else_below() -> None:
    def failed(*remarks: str) -> CaseVerdict:
        verdict = verdict_of(Outcome.FAILED)
        return replace(verdict, judged=replace(verdict.judged, remarks=remarks))

    same, other = report_of(failed("perhaps", "a"), failed("perhaps")), report_of(failed("perhaps"), failed())
    assert ("  perhaps" in summary(same), "perhaps" in notes(same), "a" in notes(same)) == (True, False, True)
    assert ("  perhaps" in summary(other), "perhaps" in notes(other)) == (False, True)


@pytest.mark.parametrize(
    ("outcomes", "row", "is_right"),
    [
        ((Outcome.RIGHT, Outcome.DECLINED), Outcome.RIGHT, True),
        ((Outcome.RIGHT, Outcome.KNOWN), Outcome.KNOWN, True),
        ((Outcome.RIGHT, Outcome.KNOWN, Outcome.WRONG), Outcome.WRONG, False),
        ((Outcome.WRONG, Outcome.FAILED, Outcome.RIGHT), Outcome.WRONG, False),
        ((Outcome.DECLINED,), Outcome.DECLINED, False),
    ],
)
def test_a_row_is_as_bad_as_its_worst_case(outcomes: tuple[Outcome, ...], row: Outcome, is_right: bool) -> None:
    report = report_of(*map(verdict_of, outcomes))
    (only,) = report.rows
    assert only.outcome is row
    assert only.worst.outcome is row
    ((_, _, verdict, *_),) = check_table(report).rows
    assert verdict.text == ("1 wrong, 1 failed" if Outcome.FAILED in outcomes else row.value)
    assert only.counts == {outcome: outcomes.count(outcome) for outcome in outcomes}
    assert report.is_right is is_right


def test_a_recorded_case_is_reproduced_by_its_number() -> None:
    recorded = verdict_of(Outcome.WRONG, number=17, recorded_in="my report.json")
    assert reproduction(recorded) == "lab judge --case 'my report.json'#17"
    assert repr(CASE) in reproduction(replace(recorded, recorded_in=""))
    (case,) = report_of(recorded).as_record()["cases"]
    assert case["number"] == 17


def test_a_reproduction_is_legible_and_a_case_that_a_shell_would_misread_is_quoted() -> None:
    line = reproduction(verdict_of(Outcome.WRONG))
    assert line.endswith(f"print(judge_case('somebody.kernel', 'K1', {CASE!r}, 'cpu'))\"")
    strange = reproduction(verdict_of(Outcome.WRONG, implementation="a.b:$HOME"))
    assert shlex.split(strange)[-1].count("a.b:$HOME") == 1
    assert "'\"'\"'" in strange


RIGHT, WRONG, FAILED, KNOWN, DECLINED = map(
    verdict_of, (Outcome.RIGHT, Outcome.WRONG, Outcome.FAILED, Outcome.KNOWN, Outcome.DECLINED)
)
OF_CONTEXT = {"interface": AttentionCall.CONTEXT}
SENT, WRONG_SENT = (replace(each, sent_by=("sglang",)) for each in (RIGHT, WRONG))
BY_LAB = verdict_of(Outcome.DECLINED, judged=Judged(Outcome.DECLINED, declines=("no Triton",), by_lab=True))
NOT_COMPARED = verdict_of(Outcome.KNOWN, judged=Judged(Outcome.KNOWN, ("the guard is written",)))
CORNER, CORNERS, REFUSED = "1 documented corner", "2 documented corners", "the kernel refused 1 case"
KNOWN_IN_1 = "known failures in 1 case"
NOT_DECODE, NOT_CONTEXT = (
    f"Not judged as a whole: nothing of trtllm_batch_{each}_with_kv_cache" for each in ("decode", "context")
)
RIGHT_FOR_SGLANG = f"Right for all that SGLang 0.5.23 sends; wrong in 1 of {CORNER}."
LEFT_OUT = {"left_out": 7, "ended": "the run was interrupted", "interrupted": True}


@pytest.mark.parametrize(
    ("verdicts", "changes", "status", "sentence"),
    [
        ([RIGHT], {}, 0, f"Right in {CORNER}."),
        ([RIGHT, DECLINED, DECLINED], {}, 0, f"Right in {CORNER}. Not judged: the kernel refused 2 cases."),
        ([RIGHT, BY_LAB], {}, 0, f"Right in {CORNER}. Not judged: the lab cannot judge 1 case here."),
        ([RIGHT, KNOWN], {}, 0, f"Right, except for {KNOWN_IN_1}, in {CORNERS}."),
        ([KNOWN], {}, 0, f"Right, except for {KNOWN_IN_1}, in {CORNER}."),
        ([RIGHT, WRONG], {"left_out": 1}, 1, f"Wrong in 1 of {CORNERS}."),
        ([RIGHT, FAILED], {}, 1, f"Failed in 1 of {CORNERS}."),
        ([NOT_COMPARED, WRONG], {}, 1, f"Wrong in 1 of {CORNERS}."),
        ([], {}, 125, "Not judged: the options leave no case of the kernel's functions."),
        ([DECLINED], {}, 125, f"Not judged: {REFUSED}."),
        ([BY_LAB], {}, 125, "Not judged: the lab cannot judge 1 case here."),
        ([NOT_COMPARED], {}, 125, f"Not judged: no result was compared; {KNOWN_IN_1}."),
        ([NOT_COMPARED, DECLINED], {}, 125, f"Not judged: no result was compared; {KNOWN_IN_1}; {REFUSED}."),
        ([RIGHT, replace(NOT_COMPARED, **OF_CONTEXT)], {}, 125, f"{NOT_CONTEXT}. Right, except for known failures"),
        ([RIGHT, replace(DECLINED, **OF_CONTEXT)], {}, 125, f"{NOT_CONTEXT}; {REFUSED}. Right in 1"),
        ([RIGHT], {"left_out": 1}, 125, "Not judged as a whole: 1 case left out, the time was over. Right in 1"),
        (
            [RIGHT],
            LEFT_OUT,
            130,
            f"Not judged as a whole: 7 cases left out, the run was interrupted. Right in {CORNER}.",
        ),
        ([WRONG], {"interrupted": True}, 130, f"Wrong in 1 of {CORNER}."),
        ([SENT, WRONG], {}, 1, RIGHT_FOR_SGLANG),
        ([SENT, WRONG], {"profile": "sglang"}, 0, RIGHT_FOR_SGLANG),
        ([SENT, WRONG, WRONG_SENT], {"profile": "sglang"}, 1, "Wrong in 1 of 2 cases that SGLang 0.5.23 sends and 1"),
        ([SENT, WRONG, WRONG_SENT], {"profile": "vllm"}, 125, f"{NOT_DECODE} that vLLM 0.33.0 sends. Wrong in 2 of 3"),
        (
            [replace(DECLINED, sent_by=("sglang",)), WRONG],
            {"profile": "sglang"},
            125,
            f"{NOT_DECODE} that SGLang 0.5.23 sends; {REFUSED}. Wrong in 1 of 1",
        ),
    ],
)
def test_the_first_line_and_the_exit_status_agree(
    verdicts: list[CaseVerdict], changes: dict[str, Any], status: int, sentence: str
) -> None:
    report = report_of(*verdicts, **changes)
    assert (report.exit_status, report.diagnosis.answer[: len(sentence)]) == (status, sentence)
    assert report.is_right is (status == 0)


def test_the_json_marks_each_case() -> None:
    unjudged = verdict_of(Outcome.DECLINED, judged=Judged(Outcome.DECLINED, by_lab=True))
    record = report_of(verdict_of(Outcome.RIGHT, sent_by=("sglang",), number=1), unjudged, profile="sglang").as_record()
    assert record["engines"] == {"sglang": "SGLang 0.5.23", "vllm": "vLLM 0.33.0"}
    assert record["profile"] == "sglang"
    assert [(case.get("sent_by"), case.get("by_lab")) for case in record["cases"]] == [(["sglang"], None), (None, True)]
    (first, _) = read_cases(record | {"cases": [each | {"number": 1} for each in record["cases"]]})
    assert first.sent_by == ("sglang",)


def test_the_worst_of_the_right_cases_is_the_one_nearest_its_bound() -> None:
    ratios = [verdict_of(Outcome.RIGHT, judged=Judged(Outcome.RIGHT, worst_ratio=r, judged=1)) for r in (0.2, 0.7, 0.4)]
    assert report_of(*ratios).rows[0].worst is ratios[1]


def test_where_nothing_was_measured_no_error_is_shown() -> None:
    row, other = check_table(report_of(verdict_of(Outcome.DECLINED), verdict_of(Outcome.RIGHT, check="K4"))).rows
    assert (row[-1].text, other[-1].text) == ("–", "0%")


def test_checks_and_functions_have_rows_of_their_own() -> None:
    others = (verdict_of(Outcome.RIGHT, check="K4"), verdict_of(Outcome.RIGHT, interface=AttentionCall.CONTEXT))
    rows = report_of(verdict_of(Outcome.RIGHT), *others).rows
    assert [(row.check, row.interface.name) for row in rows] == [("K1", "DECODE"), ("K4", "DECODE"), ("K1", "CONTEXT")]


def declining(outcome: Outcome, *reasons: str) -> CaseVerdict:
    return verdict_of(outcome, judged=Judged(outcome, declines=reasons, judged=int(outcome is Outcome.RIGHT)))


def test_declines_are_listed_the_most_frequent_first() -> None:
    declined = [declining(Outcome.DECLINED, reason) for reason in ("no sinks", "no windows", "no windows")]
    assert list(notes(report_of(*declined))) == ["declined 2 times: no windows", "declined once: no sinks"]


def test_a_refused_call_that_was_judged_in_an_equivalent_form_is_not_called_declined() -> None:
    refused = ("out is needed: judged with an output handed out instead", "no sinks")
    verdict = declining(Outcome.RIGHT, *refused)
    found = [f"judged in an equivalent form once: {refused[0]}", "declined once: no sinks"]
    assert list(notes(report_of(verdict))) == found
    assert str(verdict).splitlines()[1:] == [f"  {line.replace(' once', '')}" for line in found]


def test_many_kinds_of_refusal_are_counted_and_long_ones_cut() -> None:
    declined = [declining(Outcome.DECLINED, f"no {number} {'x' * 300}") for number in range(9)]
    *shown, others = notes(report_of(*declined))
    assert len(shown) == 5
    assert all(len(line) < 200 for line in shown)
    assert others == "the report's file lists 4 further reasons of refusals"


def test_the_answer_comes_first_then_where_then_how_to_see_it_then_the_table() -> None:
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        wrong = verdict_of(Outcome.WRONG, recorded_in="report.json", number=3)
        show(report_of(wrong, verdict_of(Outcome.RIGHT)), console)
    shown = capture.get()
    places = [
        shown.index(word)
        for word in ("Wrong", "wrong in 1 of 2 results", "smallest case", "reproduce with: lab judge", "verdict")
    ]
    assert places == sorted(places)
    assert "report.json#3" in shown


@pytest.mark.parametrize(
    ("got", "features", "poison"),
    [
        ((1e30, 2.0), {}, "; got 1e+30 2 (1e+30 is the lab's poison, in memory that no row may read)"),
        ((-3.4e29, 2.0), {}, "(3e+29 is the lab's poison"),
        ((math.nan, 2.0), {"dead": "nan"}, "got nan 2 (NaN is the lab's poison"),
        ((math.nan, math.inf), {}, "got nan inf\n"),
        ((7.0, 2.0), {"dead": "nan"}, "got 7 2\n"),
    ],
)
def test_poison_in_a_wrong_result_is_named(got: tuple[float, float], features: dict[str, Any], poison: str) -> None:
    vector = WrongVector("row 0", (1.0, 2.0), got)
    judged = Judged(
        Outcome.WRONG, ("off",), judged=1, results=(CheckedResult("call", "output", features, True, (), vector),)
    )
    assert poison in "\n".join(summary(report_of(verdict_of(Outcome.WRONG, judged=judged))))


def test_each_region_has_a_command() -> None:
    names = ("mask", "sinks", "has_window", "not_causal", "out_given")
    verdicts = []
    for number in range(100):
        is_wrong, held = number % 10 < 5, "output" if number % 5 < 3 else "LSE"
        features = {names[number % 5]: True, "return_lse": True} if is_wrong else {}
        outcome = Outcome.WRONG if is_wrong else Outcome.RIGHT
        judged = Judged(outcome, judged=1, results=(CheckedResult("call", held, features, is_wrong),))
        verdicts.append(verdict_of(outcome, judged=judged, number=number, recorded_in="r.json"))
    report = report_of(*verdicts)
    lines = list(summary(report))
    assert len(report.diagnosis.regions) == sum("reproduce with: lab judge --case r.json#" in line for line in lines)


def test_what_is_wrong_over_an_e4m3_cache_alone_may_be_e4m3_arithmetic() -> None:
    """XQA computes in e4m3 there and says so; bf16 arithmetic is what a kernel is judged by that does not."""

    def verdicts(kv_dtype: torch.dtype, outcome: Outcome) -> list[CaseVerdict]:
        cases = [replace(CASE, kv_dtype=kv_dtype, seed=seed) for seed in range(5)]
        return [verdict_of(outcome, case=case) for case in cases]

    report = report_of(*verdicts(E4M3, Outcome.WRONG), *verdicts(torch.bfloat16, Outcome.RIGHT))
    assert any("--e4m3-arithmetic" in line for line in summary(report))
    alone = report_of(*verdicts(E4M3, Outcome.WRONG))  # no rule names the cache's dtype, as there is no other
    assert not any("kv_dtype" in region.rule for region in alone.diagnosis.regions)
    assert any("--e4m3-arithmetic" in line for line in summary(alone))
    assert not any("--e4m3-arithmetic" in line for line in summary(report_of(*verdicts(torch.bfloat16, Outcome.WRONG))))
    asked = replace(report, ranges=Ranges(e4m3_arithmetic=True))
    assert not any("--e4m3-arithmetic" in line for line in summary(asked))


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [
        (0.373, "37%"),
        (4.61, "461%"),
        (9.996, "10x"),
        (123.4, "123x"),
        (2.5e32, ">999x"),
        (math.inf, "inf"),
        (math.nan, "inf"),
    ],
)
def test_the_worst_error_takes_five_characters(ratio: float, shown: str) -> None:
    judged = Judged(Outcome.RIGHT, worst_ratio=ratio, judged=1)
    (row,) = check_table(report_of(verdict_of(Outcome.RIGHT, judged=judged))).rows
    assert row[-1].text == shown


def test_the_json_has_rows_and_cases(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report_of(verdict_of(Outcome.RIGHT), verdict_of(Outcome.WRONG)).write(path)
    record = json.loads(path.read_text())
    assert record["checks"] == [
        {
            "check": "K1",
            "interface": "trtllm_batch_decode_with_kv_cache",
            "outcome": "wrong",
            "counts": {"right": 1, "wrong": 1},
            "judged": 2,
            "worst_ratio": 0.0,
        }
    ]
    _, wrong = record["cases"]
    assert wrong["wrongs"] == ["off by one"]


@pytest.mark.parametrize("ratio", [math.inf, math.nan])
def test_an_infinite_error_is_valid_json_and_read_as_infinite(ratio: float, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    path = tmp_path / "report.json"
    report_of(verdict_of(Outcome.WRONG, number=1, judged=Judged(Outcome.WRONG, ("NaN",), worst_ratio=ratio))).write(
        path
    )
    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["checks"][0]["worst_ratio"] == record["cases"][0]["worst_ratio"] == "inf"
    assert read_case(path, 1).judged.worst_ratio == math.inf


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    poisoned = Judged(Outcome.DECLINED, worst_ratio=2.5e32, judged=29820)
    rows = [
        verdict_of(Outcome.DECLINED, check=check.key, interface=interface, judged=poisoned)
        for check in checks()
        for interface in check.interfaces
    ]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(terminal_of(check_table(report_of(*rows))))
    shown = capture.get()
    assert "…" not in shown
    assert "K8 decomposition" in shown
    assert "draft_kv_indices" in shown
    assert ">999x" in shown


def test_the_repr_of_a_case_names_what_is_not_at_its_default() -> None:
    storage = Storage(dead=Dead.NAN, table_tail=TableTail.FAR)
    assert repr(replace(CASE, contents=Contents.LOW, storage=storage)) == (
        "AttentionCase(interface=AttentionCall.DECODE, kv_lens=(20, 33), q_lens=(1, 1), contents=Contents.LOW, "
        "storage=Storage(dead=Dead.NAN, table_tail=TableTail.FAR))"
    )
    assert repr(Ranges(longest=40)) == "Ranges(longest=40)"
