from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab.calls.problem import AttentionCall
from lab.checks import Configuration, Outcome
from lab.checks.parameters.coverage import Reach, coverage, coverages, retried
from lab.checks.parameters.covering import Constraint, Model
from lab.checks.parameters.models import MODELS
from lab.checks.run.verdicts import CaseVerdict
from lab.workloads.interfaces import Interface
from tests.checks.small import SMALL
from tests.checks.test_report import verdict_of

LONG_IS_ALONE = Constraint(lambda lengths, requests: lengths == "short" or requests < 5, "a long request is alone")
MODEL = Model(
    {"lengths": ("short", "long"), "requests": (3, 40), "mask": (False, True), "sinks": (False, True)},
    (LONG_IS_ALONE,),
    (("lengths", "mask", "sinks"),),
)


def verdict_on(outcome: Outcome, **values: Any) -> CaseVerdict:
    return verdict_of(outcome, case=SimpleNamespace(values=MODEL.default | values))


def test_the_coverage_of_k18_has_no_cases_of_other_checks() -> None:
    case = Configuration(AttentionCall.DECODE, MODELS[AttentionCall.DECODE](SMALL).default)
    judged = verdict_of(Outcome.RIGHT, case=case, check="K18")
    (found,) = coverages([judged, verdict_of(Outcome.RIGHT)], SMALL)
    assert found.interface is AttentionCall.DECODE
    assert coverages([replace(judged, check="K14")], SMALL) == ()


def test_each_value_and_pair_is_judged_or_declined_or_left_out_or_impossible() -> None:
    verdicts = [
        verdict_on(Outcome.RIGHT),
        verdict_on(Outcome.WRONG, mask=True),
        verdict_on(Outcome.DECLINED, sinks=True),
    ]
    found = coverage(AttentionCall.DECODE, MODEL, verdicts)
    assert found.values["mask"] == {False: Reach.JUDGED, True: Reach.JUDGED}
    assert found.values["sinks"] == {False: Reach.JUDGED, True: Reach.DECLINED}
    assert found.values["requests"] == {3: Reach.JUDGED, 40: Reach.LEFT_OUT}
    assert sum(found.pairs.values()) == 6 * 4
    assert found.pairs[Reach.IMPOSSIBLE] == 1
    assert found.impossible == {"a long request is alone": 1}
    assert found.pairs[Reach.JUDGED] == 6 + 3  # the plain point's, and those that a mask adds
    assert found.pairs[Reach.DECLINED] == 3
    assert found.triples == {Reach.JUDGED: 2, Reach.DECLINED: 1, Reach.LEFT_OUT: 5}
    assert found.blind == ()
    assert found.counts == "5 of 8 values and 9 of 23 pairs of decode"


def test_a_call_that_computes_nothing_shows_nothing_of_its_other_values() -> None:
    model = replace(MODEL, vacuous=frozenset({("lengths", "long")}))
    found = coverage(AttentionCall.DECODE, model, [verdict_on(Outcome.RIGHT, lengths="long", mask=True)])
    assert found.values["lengths"] == {"short": Reach.LEFT_OUT, "long": Reach.JUDGED}
    assert found.values["mask"] == {False: Reach.LEFT_OUT, True: Reach.LEFT_OUT}
    assert found.pairs[Reach.JUDGED] == 3
    assert found.triples[Reach.JUDGED] == 1


MASKED = replace(MODEL, apart=(frozenset({("mask", True)}),))


def test_a_pair_that_a_case_of_separate_code_alone_has_is_left_out() -> None:
    verdicts = [verdict_on(Outcome.RIGHT), verdict_on(Outcome.RIGHT, mask=True, sinks=True, requests=40)]
    found = coverage(AttentionCall.DECODE, MASKED, verdicts)
    assert found.values["sinks"][True] is Reach.LEFT_OUT
    assert found.values["mask"][True] is Reach.JUDGED
    assert found.pairs[Reach.JUDGED] == 6 + 3
    assert found.triples[Reach.JUDGED] == 1 + 1


def test_a_kernel_that_takes_such_cases_alone_has_been_judged_in_them() -> None:
    verdicts = [verdict_on(Outcome.DECLINED), verdict_on(Outcome.RIGHT, mask=True, sinks=True)]
    found = coverage(AttentionCall.DECODE, MASKED, verdicts)
    assert found.values["sinks"][True] is Reach.JUDGED
    assert found.pairs[Reach.JUDGED] == 6
    taken, goals = retried(MASKED, verdicts)
    assert taken is not None
    assert taken.axes == {"lengths": ("short",), "requests": (3,), "mask": (True,), "sinks": (True,)}
    assert goals == []


def test_a_value_that_no_point_has_is_impossible() -> None:
    model = replace(MODEL, rules=(Constraint(lambda lengths: lengths != "long", "nothing is long"),))
    found = coverage(AttentionCall.DECODE, model, [verdict_on(Outcome.RIGHT)])
    assert found.values["lengths"] == {"short": Reach.JUDGED, "long": Reach.IMPOSSIBLE}
    assert found.counts == "4 of 7 values and 6 of 18 pairs of decode"


def test_a_blind_spot_is_a_pair_of_judged_values_that_was_not_judged() -> None:
    verdicts = [verdict_on(Outcome.RIGHT, **dict.fromkeys(names, True)) for names in ((), ("mask",), ("sinks",))]
    pair = (("mask", True), ("sinks", True))
    assert coverage(AttentionCall.DECODE, MODEL, verdicts).blind == ((pair, Reach.LEFT_OUT),)
    declined = verdict_on(Outcome.DECLINED, mask=True, sinks=True)
    assert coverage(AttentionCall.DECODE, MODEL, [*verdicts, declined]).blind == ((pair, Reach.DECLINED),)


@pytest.mark.parametrize("interface", MODELS)
def test_what_is_impossible_has_the_sentence_of_a_rule(interface: Interface) -> None:
    model = MODELS[interface](SMALL)
    whys = {rule.why for rule in model.rules} | {"several rules forbid it"}
    possible = [goal for goal, why in model.why_not.items() if not why]
    assert all(model.completed(dict(goal)) for goal in possible[::20])
    for goal, why in model.why_not.items():
        if why:
            values = dict(goal)
            assert model.completed(values) is None
            rules = [rule for rule in model.rules if set(rule.axes) <= set(values)]
            broken = {rule.why for rule in rules if not rule.fits(*(values[axis] for axis in rule.axes))}
            assert why in (broken or whys)


def test_a_report_has_the_coverage_as_a_line_and_as_data() -> None:
    model = MODELS[AttentionCall.MLA_DECODE](SMALL)
    cases = [Configuration(AttentionCall.MLA_DECODE, point) for point in model.alone()]
    found = coverage(AttentionCall.MLA_DECODE, model, [verdict_of(Outcome.RIGHT, case=case) for case in cases])
    record = found.as_record()
    assert set(record["values"]) == set(model.axes)
    assert record["pairs"]["judged"] + record["num_blind_spots"] + record["pairs"]["impossible"] == sum(
        found.pairs.values()
    )
    assert len(record["blind_spots"]) < record["num_blind_spots"]
