"""Pairs that occur in declined cases alone are judged again in smaller ones."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from corpus.kernels import kernel
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, Configuration, Level, Outcome, Ranges, judge
from lab.checks.explain.call_features import features_of_case
from lab.checks.parameters.coverage import Coverage, Reach, coverage
from lab.checks.parameters.models import MODELS
from lab.checks.properties.check import Scope
from lab.checks.properties.k01_oracle import CHECK as ORACLE
from lab.checks.properties.k18_combinations import CHECK, _resized, _varied
from lab.checks.run.verdicts import CaseVerdict, CheckedResult, Judged
from lab.workloads.interfaces import MetadataFunction
from tests.checks.parameters.rounds import declined_if, verdicts_in_rounds
from tests.checks.small import SMALL

SETTINGS: dict[str, Any] = {"only": "K18", "ranges": SMALL, "device": "cpu", "drawn": 0, "discover": False}


def coverage_of(verdicts: list[CaseVerdict]) -> Coverage:
    return coverage(AttentionCall.DECODE, MODELS[AttentionCall.DECODE](SMALL), verdicts)


def test_a_pair_in_declined_cases_alone_is_judged_in_smaller_ones() -> None:
    verdicts = verdicts_in_rounds(declined_if(lambda case: case["out"].is_given and case["lse"] != "none"))
    found = coverage_of(verdicts)
    assert found.blind
    # A call with a rank, or with far rows of an LSE, has an LSE: it was never judged with an output of the caller's either.
    pairs = {frozenset({"out", other}) for other in ("lse", "rank", "far")}
    assert {frozenset(name for name, _ in pair) for pair, _ in found.blind} == pairs
    assert {reach for _, reach in found.blind} == {Reach.DECLINED}
    fixed = len(list(CHECK.cases(AttentionCall.DECODE, SMALL, Level.FULL)))
    assert fixed < len(verdicts) < 4 * fixed
    assert len({repr(verdict.case) for verdict in verdicts}) == len(verdicts)


def test_a_defect_of_a_pair_that_all_arrays_were_declined_with_is_found() -> None:
    """It takes tables rows apart only beside few other arguments."""

    def is_apart(case: Configuration) -> bool:
        return case["block_tables"] == "rows apart"

    def outcome_of(case: Configuration) -> Outcome:
        others = {"out", "mask", "offsets", "sinks", "lse", "backend", "rank"}
        if is_apart(case) and not others.isdisjoint(case.non_default):
            return Outcome.DECLINED
        # Several short requests: the circumstances of check K18 have cases of no large array.
        is_usual = case["requests"] > 1 and isinstance(case["lengths"], str)
        is_wrong = is_apart(case) and case["bmm1_scale"].shape is not None and is_usual
        return Outcome.WRONG if is_wrong else Outcome.RIGHT

    fixed = {repr(case) for case in CHECK.cases(AttentionCall.DECODE, SMALL, Level.FULL)}
    verdicts = verdicts_in_rounds(outcome_of)
    wrong = {repr(verdict.case) for verdict in verdicts if verdict.outcome is Outcome.WRONG}
    assert wrong
    assert not fixed & wrong


def test_a_value_that_is_declined_by_itself_is_tried_beside_all_others() -> None:
    """An output is taken beside an LSE alone."""
    found = coverage_of(verdicts_in_rounds(declined_if(lambda case: case["out"].is_given and case["lse"] == "none")))
    assert set(found.values["out"].values()) == {Reach.JUDGED}
    never = {pair for pair, _ in found.blind if {name for name, _ in pair} == {"out", "lse"}}
    assert never
    assert len(found.blind) - len(never) < 0.02 * found.pairs[Reach.JUDGED]


def test_where_nothing_is_declined_nothing_follows_at_the_smoke_level() -> None:
    fixed = list(CHECK.cases(AttentionCall.DECODE, SMALL, Level.SMOKE))
    assert len(verdicts_in_rounds(lambda _: Outcome.RIGHT, Level.SMOKE)) == len(fixed)


def test_after_a_wrong_case_simpler_cases_show_what_it_needs_and_others_what_it_does_not_need() -> None:
    """The first cases have both an output and a scale that are not default only together with other such values."""
    axes, model = {"bmm1_scale", "out"}, MODELS[AttentionCall.DECODE](SMALL)

    def unusual(case: Configuration) -> set[str]:
        return {axis for axis in model.axes if case[axis] != model.default[axis]}

    def outcome_of(case: Configuration) -> Outcome:
        return Outcome.WRONG if axes <= unusual(case) else Outcome.RIGHT

    assert axes not in map(unusual, CHECK.cases(AttentionCall.DECODE, SMALL, Level.SMOKE))
    verdicts = verdicts_in_rounds(outcome_of, Level.SMOKE)
    wrong = [verdict.case for verdict in verdicts if verdict.outcome is Outcome.WRONG]
    simplest = next(case for case in wrong if unusual(case) == axes)
    near = [case for case in wrong if all(case[axis] == simplest[axis] for axis in axes)]
    for axis in model.axes.keys() - axes:
        fitting = {
            each for each in model.axes[axis] if model.completed({**simplest.non_default, axis: each}) is not None
        }
        assert {case[axis] for case in near} == fitting
    assert len({repr(verdict.case) for verdict in verdicts}) == len(verdicts)


def test_a_wrong_case_that_a_profile_makes_no_simpler_has_cases_with_other_values() -> None:
    function, model = AttentionCall.DECODE, MODELS[AttentionCall.DECODE](SMALL)
    wrong = Configuration(function, model.nearest["out", model.axes["out"][-1]])
    verdicts = [CaseVerdict("a kernel", "K18", function, wrong, "cpu", Judged(Outcome.WRONG, judged=1))]

    def near(scope: Scope) -> list[Configuration]:
        return list(CHECK.nearby(scope, verdicts))

    def is_sent(case: Configuration) -> bool:
        return case["out"] == wrong["out"]

    assert not any(map(is_sent, near(Scope(function, SMALL, Level.SMOKE))))
    found = near(Scope(function, SMALL, Level.SMOKE, is_chosen=is_sent))
    assert found
    assert all(map(is_sent, found))


def rounds_near(first: Sequence[Configuration], is_wrong: Callable[[Configuration], bool], scope: Scope) -> list[Any]:
    """Return the rounds of cases that check K18 judges near the wrong ones of the `first` cases."""
    verdicts, rounds = list[CaseVerdict](), [list(first)]
    while rounds[-1]:
        for case in rounds[-1]:
            judged = Judged(Outcome.WRONG if is_wrong(case) else Outcome.RIGHT, judged=1)
            verdicts.append(CaseVerdict("a kernel", "K18", scope.interface, case, "cpu", judged))
        rounds.append(list(CHECK.nearby(scope, verdicts)))
    return rounds[1:-1]


def test_variants_of_a_wrong_case_change_one_parameter_and_right_ones_are_judged_again() -> None:
    """The wrong cases have one value of "out" and, but for the numbers of pages, all values of other axes."""
    function, scope = AttentionCall.CONTEXT, Scope(AttentionCall.CONTEXT, Ranges(), Level.SMOKE)
    wrong = Configuration(function, {"offsets": "padding after"}, seed=3)

    def is_wrong(case: Configuration) -> bool:
        return wrong.non_default.items() <= case.non_default.items() and bool(case["causal"])

    # The first round has cases with all values of other axes.
    _, varied, again = rounds_near([wrong, Configuration(function)], is_wrong, scope)
    changed = [{axis for axis in case.values if case[axis] != wrong[axis]} for case in varied]
    assert {case.seed for case in varied} == {3}
    assert {"causal"} in changed
    assert all(len(each) == 1 for each in changed if "offsets" not in each)
    assert not any(axis in {"contents", "bmm1_size", "bmm2_size"} for each in changed for axis in each)
    assert len(varied) <= 20
    not_causal = next(case for case, each in zip(varied, changed, strict=True) if each == {"causal"})
    assert [case.seed for case in again if case.without_seed == not_causal.without_seed] == [4, 5]
    assert [case.seed for case in again if not case.non_default] == [1, 2]
    assert all(len(case.non_default.items() ^ wrong.non_default.items()) == 1 for case in again)
    assert not any(is_wrong(case) for case in again)


def test_a_right_case_near_two_wrong_ones_is_judged_again_once_with_each_seed() -> None:
    function, scope = AttentionCall.CONTEXT, Scope(AttentionCall.CONTEXT, Ranges(), Level.SMOKE)
    wrong = [Configuration(function, values) for values in ({"offsets": "padding after"}, {"causal": False})]
    *_, again = rounds_near([Configuration(function), *wrong], wrong.__contains__, scope)
    assert [case.seed for case in again if not case.non_default] == [1, 2]


def test_cases_that_a_profile_leaves_out_do_not_keep_variants_from_being_judged() -> None:
    function, wrong = AttentionCall.CONTEXT, Configuration(AttentionCall.CONTEXT, {"offsets": "padding after"})
    scope = Scope(function, Ranges(), Level.SMOKE, is_chosen=lambda case: len(case.non_default) <= 2)
    rounds = rounds_near([wrong, Configuration(function)], wrong.__eq__, scope)
    assert all(scope.is_chosen(case) for cases in rounds for case in cases)
    assert [case for case in rounds[-2] if case.non_default == wrong.non_default | {"causal": False}]


def test_a_wrong_case_with_a_long_request_has_variants_with_shorter_ones() -> None:
    function, scope = AttentionCall.DECODE, Scope(AttentionCall.DECODE, Ranges(), Level.SMOKE)
    for lengths, shorter in ((4100, [65, 129, 257, 513, 1025, 2049]), (129, [65]), (65, [])):
        subject = Configuration(function, {"lengths": lengths})
        found = {case["lengths"] for case in _varied(scope, subject, [subject])} - {lengths}
        assert sorted(each for each in found if type(each) is int and each % 64 == 1) == shorter


def test_a_wrong_case_has_at_most_eighty_variants_with_values_that_no_wrong_case_like_it_has() -> None:
    function, scope = AttentionCall.CONTEXT, Scope(AttentionCall.CONTEXT, Ranges(), Level.SMOKE)
    subject, groups = Configuration(function, {"offsets": "padding after"}), MODELS[function](Ranges()).axes["group"]

    def values(axis: str, *wrong: Configuration) -> set[Any]:
        found = [case[axis] for case in _varied(scope, subject, [subject, *wrong])]
        return {each for each in found if each != subject[axis]}

    assert 60 < len(_varied(scope, subject, [subject])) <= 80
    assert values("causal", Configuration(function, {"causal": False})) == {False}  # it lacks the padding
    assert values("causal", Configuration(function, {"offsets": "padding after", "causal": False})) == set()
    assert not values("contents") | values("bmm1_size") | values("bmm2_size")
    middle = sorted(groups)[len(groups) // 2]
    of_group = values("group", Configuration(function, {"offsets": "padding after", "group": middle}))
    assert of_group == {min(groups), max(groups)} - {subject["group"]}


def test_two_numbers_of_a_wrong_case_differ_in_further_variants() -> None:
    scope = Scope(AttentionCall.DECODE, Ranges(longest=200), Level.SMOKE)
    subject = Configuration(AttentionCall.DECODE, {"window_left": 1, "mask": "full", "q_len": 4})
    cases = _resized(scope, subject)
    assert len(cases) > 40
    for case in cases:
        changed = {axis for axis, value in case.values.items() if value != subject[axis]}
        assert len(changed) == 2
        assert changed & {"window_left", "q_len"}
        assert all(type(case[axis]) is int for axis in changed)
    assert any(1 < case["window_left"] < case["q_len"] - 1 for case in cases)
    assert any(case["window_left"] >= case["q_len"] for case in cases)
    assert {case["window_left"] for case in cases if case["q_len"] != 4} >= {0, 15}
    assert {case["q_len"] for case in cases if case["window_left"] != 1} >= {3, 5}
    assert not _resized(scope, Configuration(AttentionCall.DECODE, {"skip_softmax": 3.0}))


WRONG_IN_K1 = AttentionCase(AttentionCall.DECODE, (9, 9000), (4, 4), window_left=3, sinks=True)


def wrong_in(check: str, case: Any, *held: str, is_wrong: bool = True) -> CaseVerdict:
    """Return a verdict on a case with results of the kinds `held`, which have the features of `WRONG_IN_K1`."""
    of_case = features_of_case(WRONG_IN_K1)
    requests = tuple((each, is_wrong) for each in of_case.of_requests)
    results = tuple(CheckedResult("the call", each, of_case.features, is_wrong, requests) for each in held)
    outcome = Outcome.WRONG if is_wrong else Outcome.RIGHT
    return CaseVerdict("a kernel", check, AttentionCall.DECODE, case, "cpu", Judged(outcome, judged=1, results=results))


def test_where_other_checks_alone_are_wrong_k18_has_a_case_with_their_values() -> None:
    scope = Scope(AttentionCall.DECODE, Ranges(), Level.SMOKE)
    (alike,) = CHECK.nearby(scope, [wrong_in("K1", WRONG_IN_K1, "output", "output")])
    named = ("q_len", "window_left", "sinks", "lengths", "requests", "group", "lse")
    lengths = MODELS[AttentionCall.DECODE](Ranges()).axes["lengths"]
    below = max(each for each in lengths if isinstance(each, int) and each <= 9000)
    assert [alike[name] for name in named] == [4, 1, "per head", below, 1, 4, "none"]
    in_k14 = wrong_in("K14", Configuration(AttentionCall.DECODE, {"mask": "tree"}), "output")  # it has several calls
    assert list(CHECK.nearby(scope, [in_k14])) == [alike]
    judged = CaseVerdict("a kernel", CHECK.key, AttentionCall.DECODE, alike, "cpu", Judged(Outcome.RIGHT, judged=1))
    around = list(CHECK.nearby(scope, [in_k14, judged]))  # with all values of the other parameters
    assert len({case["page_size"] for case in around}) > 4
    assert all(case[name] == alike[name] for case in around for name in ("q_len", "window_left", "sinks"))
    assert not list(CHECK.nearby(scope, [wrong_in("K1", WRONG_IN_K1, "output", is_wrong=False)]))


@pytest.mark.parametrize("alone", ["", "wrong", "right"])
def test_a_case_that_is_wrong_only_after_other_cases_has_no_variants(alone: str) -> None:
    wrong = Configuration(AttentionCall.DECODE, MODELS[AttentionCall.DECODE](SMALL).nearest["mask", "tree"])
    judged = Judged(Outcome.WRONG, judged=1, alone=alone)
    verdict = CaseVerdict("a kernel", CHECK.key, AttentionCall.DECODE, wrong, "cpu", judged)
    near = list(CHECK.nearby(Scope(AttentionCall.DECODE, SMALL, Level.SMOKE), [verdict]))
    assert bool(near) is (alone != "right")


OFFSETS_GIVEN = {"cum_seq_lens_q_given": True}


@pytest.mark.parametrize(
    ("features", "values"),
    [
        ({"longest_kv_len": 150}, "lse=none backend=auto offsets=none max_q_len=exact rank=none lengths=unequal"),
        ({"return_lse": True}, "lse=returned"),
        ({"return_lse": True, "lse_base_e": True}, "lse=base e"),
        ({"interleaved_factors": True}, "backend=trtllm-gen"),
        (OFFSETS_GIVEN | {"max_q_len_given": True}, "offsets=equal max_q_len=exact"),
        (OFFSETS_GIVEN | {"unequal_q_lens": True, "max_q_len_given": True}, "offsets=unequal max_q_len=exact"),
        (OFFSETS_GIVEN, "offsets=equal max_q_len=None"),
        ({"rank": 3, "ranks": 4, "q_len": 2, "return_lse": True}, "rank=3 of 4"),
        ({"longest_kv_len": 151}, "lengths=4100"),
        ({"longest_kv_len": 16500}, "lengths=16500"),
        # Page tables are kept, and data that hide errors are not.
        (features_of_case(WRONG_IN_K1).features | {"separate_tables": True}, "block_tables=separate"),
        (features_of_case(WRONG_IN_K1).features | {"contents": "needles"}, "contents=random"),
    ],
)
def test_a_case_like_a_wrong_result_of_another_check_keeps_its_values(features: dict[str, Any], values: str) -> None:
    function = AttentionCall.DECODE if "window_left" in features else AttentionCall.MLA_DECODE
    result = CheckedResult("the call", "output", features, wrong=True)
    judged = Judged(Outcome.WRONG, judged=1, results=(result,))
    verdict = CaseVerdict("a kernel", "K1", function, WRONG_IN_K1, "cpu", judged)
    (alike,) = CHECK.nearby(Scope(function, Ranges(), Level.SMOKE), [verdict])
    for each in re.findall(r"\w+=.+?(?= \w+=|$)", values):
        axis, _, value = each.partition("=")
        assert (axis, str(alike[axis])) == (axis, value)


def test_where_k18_is_right_k1_has_plainer_cases() -> None:
    scope = Scope(AttentionCall.DECODE, Ranges(), Level.SMOKE)
    right = wrong_in("K18", Configuration(AttentionCall.DECODE), "output", is_wrong=False)
    wrong, longer = (
        wrong_in("K6", WRONG_IN_K1, "output"),
        replace(WRONG_IN_K1, kv_lens=(9, 9000, 9000), q_lens=(4, 4, 4)),
    )

    def plainer(*verdicts: CaseVerdict) -> list[AttentionCase]:
        return list(ORACLE.nearby(scope, verdicts))

    found = plainer(right, wrong, wrong_in("K7", longer, "output"))
    assert {(case.kv_lens, case.window_left, case.sinks) for case in found} == {
        *(((9, 9000), 3, True), ((9, 9000), -1, True), ((9, 9000), 3, False)),
        *(((9000,), 3, True), ((9,), 3, True)),
    }
    assert len(plainer(right, wrong, wrong_in("K1", longer, "output"))) == len(found) + 1  # its three requests
    many = plainer(right, wrong_in("K6", AttentionCase(AttentionCall.DECODE, (9,) * 9, (1,) * 9), "output"))
    assert {len(case.kv_lens) for case in many} == {9, 8, 7}
    assert not plainer(wrong)  # K18 is not in the run
    assert not plainer(wrong, wrong_in("K18", Configuration(AttentionCall.DECODE), "output"))
    assert not plainer(right, wrong_in("K6", WRONG_IN_K1))  # its first call is not known to be wrong


def test_the_judge_judges_cases_near_a_wrong_one() -> None:
    function = MetadataFunction.DRAFT_KV_INDICES
    fixed = Configuration(function, {"prefixes": 4100, "dtypes": "int32 pages"})

    def nearby(scope: Scope, verdicts: Sequence[CaseVerdict]) -> Iterable[Any]:
        return islice(CHECK.nearby(scope, verdicts), 2 if len(verdicts) == 1 else 0)

    few = replace(CHECK, fixed=lambda _: [fixed], more={Level.SMOKE: ()}, nearby=nearby)
    settings = SETTINGS | {"only": [few], "level": "smoke", "functions": [function.value]}
    report = judge(kernel("late_tokens_missing").implementation(), **settings)
    cases = [verdict.case for verdict in report.verdicts]
    assert [case.non_default for case in cases] == [fixed.non_default, {"prefixes": 4100}, {"dtypes": "int32 pages"}]


def test_the_judge_goes_through_these_rounds_and_a_second_run_takes_them_up(tmp_path: Path) -> None:
    function = MetadataFunction.MLA_PREFILL  # it has the fewest cases
    name, new = "tests.checks.parameters.declining_builder", list[bool]()
    how = SETTINGS | {"level": Level.FULL, "functions": [function.value], "out": tmp_path / "report.json"}
    outcome_of = declined_if(lambda case: case["prefix_cache"] == "not in chunks" and case["prefill_graph"])
    expected = [(repr(each.case), each.outcome) for each in verdicts_in_rounds(outcome_of, function=function)]
    for _ in range(2):
        new.clear()
        report = judge(name, progress=lambda progress: new.append(progress.is_new), **how)
        assert report.left_out == 0
        assert [(repr(each.case), each.outcome) for each in report.verdicts] == expected
    assert new
    assert not any(new)


def test_only_a_variant_of_a_wrong_call_of_a_rank_has_one_row() -> None:
    function, scope = AttentionCall.DECODE, Scope(AttentionCall.DECODE, Ranges(), Level.SMOKE)
    subject = Configuration(function, {"q_len": 2, "lse": "returned", "rank": "0 of 2"})
    one_row = [case for case in _varied(scope, subject, [subject]) if case["q_len"] == 1]
    assert [case["rank"] for case in one_row] == ["0 of 2"]
    assert not MODELS[function](Ranges()).fits(one_row[0].values)
