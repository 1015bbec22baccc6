"""Diagnoses: rules over synthetic facts, and the regions of mutants and of a right implementation."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from corpus.mutants import MUTANTS, mutant
from lab import references
from lab.checks import AttentionCase, CaseVerdict, Interface, Outcome, Ranges, judge
from lab.checks.diagnosis import Diagnosis, diagnose
from lab.checks.phrases import PHRASES
from lab.checks.phrases import phrase as say
from lab.checks.regions import MOST_LITERALS, find_rules, weights_of
from lab.checks.run.verdicts import CheckedResult, Judged, WrongVector
from tests.checks.measure_regions import TRIGGERS, markdown, record_of

CASE = AttentionCase(Interface.DECODE, (20, 33), (1, 1))
SMALL = Ranges(
    dtypes=((torch.bfloat16, torch.bfloat16),),
    groups=(1, 2),
    num_kv_heads=(1, 2),
    head_dims=(64,),
    page_sizes=(16, 32),
    q_lens=(1, 2, 3),
    kv_layouts=("HND",),
    nvfp4=(False,),
    long_requests=(300,),
    large_batches=(5,),
    masked_rows=(4,),
    longest=100,
)


def units(is_wrong: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], Any]:
    """Facts of every combination of some axes, and which are wrong."""
    facts = [
        {"q_len": rows, "head_dim": dim, "contents": contents}
        | ({"window_left >= 0": True} if window else {})
        | ({"sinks": True} if sinks else {})
        for rows in (1, 2, 4)
        for dim in (64, 128, 256)
        for contents in ("random", "needles")
        for window in (False, True)
        for sinks in (False, True)
    ]
    return facts, np.array([is_wrong(each) for each in facts])


@pytest.mark.parametrize(
    ("is_wrong", "rules"),
    [
        (lambda facts: "sinks" in facts, ["sinks"]),
        (lambda facts: "sinks" not in facts, ["not sinks"]),
        (lambda facts: "window_left >= 0" in facts and facts["q_len"] > 1, ["window_left >= 0 and q_len >= 2"]),
        (lambda facts: facts["head_dim"] == 256, ["head_dim >= 256"]),
        (lambda facts: facts["contents"] == "needles" and "sinks" in facts, ["sinks and contents == 'needles'"]),
        (lambda facts: "sinks" in facts or facts["head_dim"] == 256, ["sinks", "head_dim >= 256"]),
        (lambda facts: True, [""]),
    ],
)
def test_the_shortest_rule_is_found(is_wrong: Callable[[dict[str, Any]], bool], rules: list[str]) -> None:
    facts, wrong = units(is_wrong)
    found = find_rules(facts, wrong, weights_of(range(len(facts))))
    assert [" and ".join(map(str, rule)) for rule in found] == rules
    assert all(len(rule) <= MOST_LITERALS for rule in found)


def test_not_every_result_of_a_region_must_show_it() -> None:
    facts, wrong = units(lambda facts: "sinks" in facts)
    wrong[np.flatnonzero(wrong)[:3]] = False
    assert [str(literal) for literal in find_rules(facts, wrong, weights_of(range(len(facts))))[0]] == ["sinks"]


@pytest.mark.parametrize(("without", "rule"), [(15, ["sinks"]), (1, [])])
def test_a_condition_is_named_where_nearly_all_is_wrong_if_results_without_it_tell(
    without: int, rule: list[str]
) -> None:
    facts = [{"n": number, "sinks": True} for number in range(300)] + [{"n": number} for number in range(without)]
    wrong = np.array([number % 20 > 0 for number in range(300)] + [False] * without)
    found = find_rules(facts, wrong, weights_of(range(len(facts))))
    assert [str(literal) for literal in found[0]] == rule


def test_every_phrase_can_be_said() -> None:
    for fact, phrase in PHRASES.items():
        assert phrase.holds
        assert fact == fact.strip()
        operators = ("==", "!=", ">=", "<=") if "{}" in phrase.holds else ("is", "is not")
        words = [say(fact, operator, 2) for operator in operators]
        assert not any(
            "{" in word or "not not" in word or "not no " in word or "not have no " in word for word in words
        )


def test_numbers_of_0_and_1_are_no_truths() -> None:
    wrong = np.array([n % 2 > 0 for n in range(40)])
    found = find_rules([{"request": n % 2} for n in range(40)], wrong, weights_of(range(40)))
    assert [literal.phrase for literal in found[0]] == ["a request's place in the batch is 1 or more"]


def test_one_key_is_no_plural() -> None:
    assert say("kv_len", "<=", 1) == "a request has 1 key or less"
    assert say("kv_len", ">=", 11) == "a request has 11 keys or more"


def verdict(number: int, *results: CheckedResult) -> CaseVerdict:
    outcome = Outcome.WRONG if any(result.wrong for result in results) else Outcome.RIGHT
    judged = Judged(outcome, ("off",) if outcome is Outcome.WRONG else (), judged=len(results), results=results)
    return CaseVerdict("somebody", "K1", Interface.DECODE, CASE, "cpu", judged, 0.1, number=number)


def result(rows: int, *, wrong: bool, held: str = "output", **facts: Any) -> CheckedResult:
    vector = WrongVector("row 0 (request 0), head 1", (1.0, 2.0), (3.0, 4.0)) if wrong else None
    given = {"held": held, "rows_of_batch": rows, **facts}
    return CheckedResult("the call", given, wrong, (({"q_len": rows}, wrong), ({"q_len": 1}, False)), vector)


def test_results_are_counted_and_the_smallest_is_shown() -> None:
    verdicts = [verdict(number, result(1 + number % 4, wrong=number % 4 > 0)) for number in range(40)]
    found = diagnose(verdicts)
    assert found.sentence == (
        "Wrong wherever a request has several query rows (30 of 30 results); everything else is right."
    )
    (region,) = found.regions
    assert (region.rule, region.wrong, region.results, region.right_outside, region.outside) == (
        "q_len >= 2",
        30,
        30,
        10,
        10,
    )
    assert region.counts == "wrong in 30 of 30 results with q_len >= 2, right in 10 of 10 others"
    record = json.loads(json.dumps(found.as_record()))
    assert record["smallest"]["case"] == 1
    assert record["smallest"]["got"] == ["3.0", "4.0"]
    assert found.follows == ("plain call already wrong, so no more is told: K1 of decode",)


def test_wrong_results_outside_every_region_are_counted_whatever_comes_first() -> None:
    failures = [verdict(99, *[result(4, wrong=True, held="return", mask=True)] * 9)]
    outputs = [verdict(n, result(1 + n % 4, wrong=n % 4 == 3 or n == 40)) for n in range(48)]
    found = diagnose(outputs + failures)
    assert [region.rule for region in found.regions] == ["mask", "q_len >= 4"]
    assert found.sentence.endswith("; another result is wrong too.")


def test_what_was_left_out_is_not_called_right() -> None:
    verdicts = [verdict(number, result(1 + number % 4, wrong=number % 4 > 0)) for number in range(40)]
    assert diagnose(verdicts, is_whole=False).sentence.endswith("; everything else that was judged is right.")


def test_a_kind_that_follows_from_another_has_no_region() -> None:
    pairs = [(result(1 + n % 4, wrong=n % 4 > 0), result(1 + n % 4, wrong=n % 4 > 1, held="bits")) for n in range(40)]
    assert [region.held for region in diagnose([verdict(n, *pair) for n, pair in enumerate(pairs)]).regions] == [
        "output"
    ]


def test_written_memory_and_failures_follow_from_nothing() -> None:
    triples = [
        (
            result(4, wrong=True),
            result(4, wrong=n % 2 > 0, held="memory", sinks=n % 2),
            result(4, wrong=True, held="bits"),
        )
        for n in range(40)
    ]
    failures = [result(4, wrong=True, held="return", mask=True)] * 9
    found = diagnose([verdict(n, *each) for n, each in enumerate(triples)] + [verdict(99, *failures)])
    assert [region.held for region in found.regions] == ["return", "output", "memory"]
    assert found.sentence.startswith("It fails wherever a draft mask is given")


def test_what_was_read_from_a_file_is_diagnosed_by_its_cases() -> None:
    shapes = [(20,), (20, 33), (33,), (20, 40), (7,), (1, 2), (9,), (9, 9)] * 3
    verdicts = [
        CaseVerdict(
            "somebody",
            "K1",
            Interface.DECODE,
            AttentionCase(Interface.DECODE, lens, (1,) * len(lens)),
            "cpu",
            Judged(Outcome.WRONG if len(lens) > 1 else Outcome.RIGHT, judged=1),
            0.1,
        )
        for lens in shapes
    ]
    assert "a batch has several requests" in diagnose(verdicts).sentence


def test_a_crash_is_told_by_its_case_and_not_by_what_a_call_alone_would_say() -> None:
    def judged(number: int, q_lens: tuple[int, ...], *, crashed: bool) -> CaseVerdict:
        case = AttentionCase(Interface.DECODE, (40,) * len(q_lens), q_lens)
        told = Judged(Outcome.FAILED) if crashed else Judged(Outcome.RIGHT, judged=1, results=(result(1, wrong=False),))
        return CaseVerdict("somebody", "K9", Interface.DECODE, case, "cpu", told, 0.1, number=number)

    verdicts = [judged(n, (1 + n % 4,) * (1 + n % 3), crashed=n % 4 == 3) for n in range(48)]
    assert [region.rule for region in diagnose(verdicts).regions] == ["q_len >= 4"]


def test_that_it_failed_is_no_region_of_what_fails() -> None:
    failed = replace(result(4, wrong=True, held="return", mask=True), name="it failed")
    verdicts = [verdict(n, result(1 + n % 4, wrong=False)) for n in range(40)] + [verdict(99, *[failed] * 9)]
    assert [region.rule for region in diagnose(verdicts).regions] == ["mask"]


def test_nothing_wrong_is_right_and_nothing_judged_is_not() -> None:
    assert diagnose([verdict(1, result(1, wrong=False))]).sentence.startswith("Right: 1 results of 1 cases")
    assert diagnose([]).sentence.startswith("Nothing could be judged")


def test_every_mutant_has_a_trigger_of_known_concepts() -> None:
    known = json.loads(TRIGGERS.read_text())
    assert set(known["triggers"]) == {each.name for each in MUTANTS}
    for alternatives in known["triggers"].values():
        assert alternatives
        assert {concept for trigger in alternatives for concept in trigger} <= set(known["concepts"])


def test_a_measured_record_says_which_region_names_the_trigger() -> None:
    record = record_of("branch_pages_ignored")
    assert record["named_by"] == [0]
    assert "topk >= 2 and page_size >= 16" in record["regions"][0]
    assert "names the trigger of 1 (100.0%)" in markdown([record])


def diagnosis_of(implementation: Any, *only: str) -> Diagnosis:
    return judge(implementation, ranges=SMALL, only=only, drawn=0, device="cpu").diagnosis


@pytest.mark.parametrize(
    ("name", "only", "words"),
    [
        ("window_of_first_row", ("K3", "K8"), ("a window", "a request has several query rows")),
        ("length_rounded_up_to_page", ("K1", "K13"), ("a request's last page is partly filled",)),
        ("tensor_scales_ignored", ("K10", "K11"), ("bmm1_scale is a tensor", "bmm2_scale is a tensor")),
        ("zeros", ("K1", "K13"), ("Wrong everywhere",)),
    ],
)
def test_the_region_of_a_mutant_names_its_trigger(name: str, only: tuple[str, ...], words: tuple[str, ...]) -> None:
    implementation = mutant(name).implementation()
    found = diagnosis_of(
        type(implementation)(**{Interface.DECODE.value: getattr(implementation, Interface.DECODE.value)}), *only
    )
    assert all(word in found.sentence for word in words), found.sentence


def test_the_references_are_right() -> None:
    decode = {Interface.DECODE.value: references.trtllm_batch_decode_with_kv_cache}
    found = diagnosis_of(type("Right", (), {name: staticmethod(function) for name, function in decode.items()})(), "K1")
    assert found.sentence.startswith("Right: ")
    assert not found.regions


def test_one_condition_that_explains_all_takes_the_place_of_several_rules() -> None:
    """A bug does not show in each result that meets its condition: what tells where it shows is no part of the rule."""
    report = judge(
        mutant("length_rounded_up_to_page").implementation(),
        functions=[Interface.DECODE.value],
        only=["K1", "K2", "K3", "K4", "K7", "K8", "K9", "K13"],
    )
    assert [region.rule for region in report.diagnosis.regions] == ["kv_len % page_size > 0"]
