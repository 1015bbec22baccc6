"""Rules over synthetic features."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from lab.checks.explain import failure_rules
from lab.checks.explain.failure_rules import MOST_RULES, find_rules, sampled, sharpened, supported
from lab.checks.explain.feature import Cost
from lab.checks.explain.literal import Literal, literals_of


def units(is_wrong: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], Any]:
    """Features of every combination of some axes, and which are wrong."""
    features = [
        {"q_len": rows, "head_dim": dim, "contents": contents}
        | ({"has_window": True} if window else {})
        | ({"sinks": True} if sinks else {})
        for rows in (1, 2, 4)
        for dim in (64, 128, 256)
        for contents in ("random", "needles")
        for window in (False, True)
        for sinks in (False, True)
    ]
    return features, np.array([is_wrong(each) for each in features])


@pytest.mark.parametrize(
    ("is_wrong", "rules"),
    [
        (lambda features: "sinks" in features, ["sinks"]),
        (lambda features: "sinks" not in features, ["not sinks"]),
        (lambda features: "has_window" in features and features["q_len"] > 1, ["has_window and q_len >= 2"]),
        (lambda features: features["head_dim"] == 256, ["head_dim >= 256"]),
        (
            lambda features: features["contents"] == "needles" and "sinks" in features,
            ["sinks and contents == 'needles'"],
        ),
        (lambda features: "sinks" in features or features["head_dim"] == 256, ["sinks", "head_dim >= 256"]),
        (lambda features: True, [""]),
    ],
)
def test_the_shortest_rule_is_found(is_wrong: Callable[[dict[str, Any]], bool], rules: list[str]) -> None:
    features, wrong = units(is_wrong)
    found = find_rules(features, wrong, range(len(features)))
    assert [" and ".join(map(str, rule)) for rule in found] == rules
    assert all(len(rule) <= 3 for rule in found)


def test_not_every_result_of_a_region_must_show_it() -> None:
    features, wrong = units(lambda features: "sinks" in features)
    wrong[np.flatnonzero(wrong)[:3]] = False
    assert [str(literal) for literal in find_rules(features, wrong, range(len(features)))[0]] == ["sinks"]


@pytest.mark.parametrize(
    ("without", "is_wrong", "rule"),
    [
        # Results without a condition are right by chance as rarely as 10**-6.01 or, where 3 of 300 with it are, 10**-5.64.
        (15, lambda number: number % 20 > 0, ["sinks"]),
        (1, lambda number: number % 20 > 0, []),
        (1, lambda number: number % 150 > 0, ["sinks"]),
        (1, lambda number: number % 100 > 0, []),
        # Where most is wrong, a rule leaves out a tenth: 83 or 84 % of all are wrong.
        (2, lambda number: number % 100 < 85, []),
        (60, lambda number: True, ["sinks"]),
    ],
)
def test_a_condition_is_named_where_nearly_all_is_wrong_if_results_without_it_tell(
    without: int, is_wrong: Callable[[int], bool], rule: list[str]
) -> None:
    features = [{"kv_len": number, "sinks": True} for number in range(300)]
    features += [{"kv_len": number} for number in range(without)]
    wrong = np.array([is_wrong(number) for number in range(300)] + [False] * without)
    found = find_rules(features, wrong, range(len(features)))
    assert [str(literal) for literal in found[0]] == rule


@pytest.mark.parametrize(
    ("counts", "rule"),
    [
        # What a rule leaves out says only where the bug does not show.
        ({"sinks": (91, 1), "sinks has_window": (0, 8), "has_window": (0, 100), "": (0, 100)}, "sinks"),
        # A condition that all wrong results share takes the place of several rules, not of one that is purer.
        (
            {"sinks has_window": (91, 1), "sinks": (0, 20), "has_window": (0, 100), "": (0, 100)},
            "sinks and has_window",
        ),
        # It takes the place of a rule that leaves out wrong results, if three quarters of its own are wrong.
        ({"sinks has_window": (90, 0), "sinks": (5, 31), "has_window": (0, 100), "": (0, 100)}, "sinks"),
        ({"sinks has_window": (90, 0), "sinks": (5, 32), "has_window": (0, 100), "": (0, 100)}, "sinks and has_window"),
        # Few exceptions of a shorter rule are worth a second condition that is plain, but no setting and no third condition.
        ({"sinks has_window": (10, 0), "sinks": (0, 1), "has_window": (0, 100), "": (0, 100)}, "sinks and has_window"),
        ({"sinks virtual_slots": (10, 0), "sinks": (0, 1), "virtual_slots": (0, 100), "": (0, 100)}, "sinks"),
        ({"sinks": (10, 0), "sinks virtual_slots": (0, 1), "virtual_slots": (0, 100), "": (0, 100)}, "sinks"),
        (
            {"sinks has_window mask": (5, 0), "sinks has_window": (0, 1), "sinks mask": (0, 50)}
            | {"has_window mask": (0, 50), "": (0, 100)},
            "has_window and sinks",
        ),
        # A condition that all wrong results share must be wrong mostly.
        ({"sinks has_window": (40, 0), "sinks": (2, 58), "has_window": (0, 40), "": (0, 40)}, "has_window and sinks"),
        # A negation stays where results without it are right.
        (
            {"sinks": (40, 2), "sinks has_window": (0, 40), "has_window": (0, 40), "": (0, 40)},
            "sinks and not has_window",
        ),
        # The first rule may hold for right results too.
        ({"sinks has_window": (40, 10), "sinks": (0, 60), "has_window": (0, 60), "": (0, 60)}, "has_window and sinks"),
        # A later rule of two conditions may not.
        ({"mask": (40, 0), "sinks has_window": (16, 8), "sinks": (0, 60), "has_window": (0, 60), "": (0, 60)}, "mask"),
        # Where fewer are wrong than most, a rule need not leave out a tenth.
        ({"sinks": (70, 20), "": (0, 2)}, "sinks"),
    ],
)
def test_a_rule_leaves_out_or_keeps_a_second_condition(counts: dict[str, tuple[int, int]], rule: str) -> None:
    assert rules_of(counts) == [rule]


@pytest.mark.parametrize(
    ("counts", "rules"),
    [
        # A rule of two conditions costs 12 bits; of one case's results each is worth little, but 16 times as much at last.
        ({"sinks has_window": (1, 0), "sinks": (0, 45), "has_window": (0, 45), "": (0, 45)}, ["has_window and sinks"]),
        ({"sinks has_window": (1, 0), "sinks": (0, 46), "has_window": (0, 46), "": (0, 46)}, [""]),
        # After the first rule 4 times as much.
        ({"sinks": (5, 0), "mask": (1, 0), "": (0, 5)}, ["sinks", "mask"]),
        ({"sinks": (6, 0), "mask": (1, 0), "": (0, 6)}, ["sinks"]),
    ],
)
def test_results_of_one_case_are_worth_little(counts: dict[str, tuple[int, int]], rules: list[str]) -> None:
    assert rules_of(counts, is_one_case=True) == rules


def test_what_separates_most_alone_comes_first_in_a_rule() -> None:
    """There are fewer wrong results without a mask than without sinks."""
    counts = {"sinks mask": (10, 0), "sinks": (0, 20), "mask": (0, 40), "": (0, 45)}
    counts |= {"has_window sinks": (5, 0), "has_window mask": (20, 0), "has_window sinks mask": (5, 0)}
    assert rules_of(counts) == ["has_window", "mask and sinks"]


def rules_of(counts: dict[str, tuple[int, int]], *, is_one_case: bool = False) -> list[str]:
    """The rules over as many wrong and right results as have these conditions."""
    units = [dict.fromkeys(names.split(), True) for names, (bad, good) in counts.items() for _ in range(bad + good)]
    wrong = [is_wrong for bad, good in counts.values() for is_wrong in [True] * bad + [False] * good]
    found = find_rules(units, np.array(wrong), [0] * len(units) if is_one_case else range(len(units)))
    return [" and ".join(map(str, rule)) for rule in found]


@pytest.mark.parametrize(
    "names",
    [
        # From what a reader understands easily to what only the lab sees.
        "has_window hidden_keys after_empty window_in_page virtual_slots",
        # Of equally easy ones, the first of the tables.
        "no_keys no_rows all_no_keys one_first_page",
    ],
)
def test_of_features_that_hold_for_the_same_results_the_plainest_is_named(names: str) -> None:
    wrong = np.array([n % 2 > 0 for n in range(40)])
    for plainer, other in pairwise(names.split()):
        for order in ((plainer, other), (other, plainer)):
            found = find_rules([dict.fromkeys(order, True) if each else {} for each in wrong], wrong, range(40))
            assert [str(literal) for literal in found[0]] == [plainer]
    assert min(Cost) == 0


def test_of_equal_pairs_the_plainest_is_named() -> None:
    """Among the results with a window, sinks and a mask are given in the same ones."""
    counts = {"has_window sinks mask": (10, 0), "has_window": (0, 30), "sinks": (0, 30), "mask": (0, 30)}
    (rule,) = rules_of(counts | {"sinks mask": (0, 30), "": (0, 30)})
    assert set(rule.split(" and ")) == {"has_window", "sinks"}


@pytest.mark.parametrize(
    ("num_long", "num_wrong", "rule"),
    [
        (3, 0, "sinks"),  # it would exclude few right results
        (60, 0, "kv_len <= 248 and sinks"),
        (50, 0, "kv_len <= 248 and sinks"),
        (50, 6, "sinks"),  # above it results are wrong too
    ],
)
def test_an_upper_limit_that_excludes_few_right_results_or_some_wrong_ones_is_not_named(
    num_long: int, num_wrong: int, rule: str
) -> None:
    """Beside thousands of keys, most errors of a sink are too small to be seen."""
    short = [{"sinks": True, "kv_len": kv_len} for kv_len in (100, 248)]
    units = [*short * 95, *[{"sinks": True, "kv_len": 4100}] * num_long, *[{"kv_len": 248}, {"kv_len": 4100}] * 100]
    (found, *_) = find_rules(units, np.arange(len(units)) < 190 + num_wrong, range(len(units)))
    assert " and ".join(sorted(map(str, found))) == rule


def test_numbers_of_0_and_1_are_no_truths() -> None:
    wrong = np.array([n % 2 > 0 for n in range(40)])
    found = find_rules([{"request": n % 2} for n in range(40)], wrong, range(40))
    assert [literal.phrase for literal in found[0]] == ["a request's place in the batch, counted from 1, is 1 or more"]


@pytest.mark.parametrize(
    ("literal", "meets", "fails"),
    [
        (Literal("sinks", "is"), {"sinks": True}, {}),
        (Literal("sinks", "is not"), {}, {"sinks": True}),
        (Literal("kv_len", ">=", 3), {"kv_len": 3}, {"kv_len": 2}),
        (Literal("kv_len", "<=", 3), {"kv_len": 3}, {"kv_len": 4}),
        (Literal("kv_len", "<=", 3), {"kv_len": 0}, {}),
        (Literal("kv_len", "==", 3), {"kv_len": 3}, {"kv_len": 4}),
        (Literal("dtype", "!=", "fp16"), {"dtype": "bf16"}, {"dtype": "fp16"}),
        (Literal("dtype", "!=", "fp16"), {"dtype": "bf16"}, {}),
    ],
)
def test_features_meet_a_literal_or_not(literal: Literal, meets: dict[str, Any], fails: dict[str, Any]) -> None:
    assert literal.holds([meets, fails]).tolist() == [True, False]


def test_a_unit_of_a_large_case_weighs_less() -> None:
    numbers, weights = sampled(np.array([True] * 5), [0, 1, 1, 1, 1])
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert weights.tolist() == pytest.approx([3.0, *[12**0.5 / 4] * 4])


def test_of_very_many_units_those_that_stay_weigh_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_rules, "MOST_UNITS", 2)
    numbers, weights = sampled(np.array([True, False, False, False, False, False]), range(6))
    assert numbers.tolist() == [0, 1, 4]
    assert weights.tolist() == pytest.approx([3.0, 9.0, 9.0])


def test_of_very_many_causes_the_first_are_named() -> None:
    causes = ("sinks", "has_window", "no_keys", "partial_page", "mask")
    features = [{name: True} for name in causes for _ in range(40)] + [{"q_len": number} for number in range(300)]
    found = find_rules(features, np.arange(len(features)) < 200, range(len(features)))
    assert len(found) == MOST_RULES < len(causes)


@pytest.mark.parametrize(("spared", "rule"), [(30, "sinks"), (300, "mask")])
def test_a_condition_of_all_wrong_results_replaces_no_rule_that_tells_far_more(spared: int, rule: str) -> None:
    """Three wrong results have no sinks. Where more results without a mask are right, the mask tells as much as the sinks."""
    wrong = [{"sinks": True, "mask": True}] * (200 if spared == 30 else 40) + [{"mask": True}] * 3
    right = [{"mask": True}] * (30 if spared == 30 else 1) + [{"num_kv_heads": 2}] * spared
    features = [*map(dict, (*wrong, *right))]
    found = find_rules(features, np.arange(len(features)) < len(wrong), range(len(features)))
    assert [str(literal) for literal in found[0]] == [rule]


def test_an_interval_ends_at_a_power_of_2_and_begins_after_one() -> None:
    features = [{"kv_len": number} for number in range(1, 301)]
    for is_wrong, rule in (
        (lambda number: number <= 128, "kv_len <= 128"),
        (lambda number: number > 128, "kv_len >= 129"),
    ):
        wrong = np.array([is_wrong(each["kv_len"]) for each in features])
        assert [str(literal) for literal in find_rules(features, wrong, range(300))[0]] == [rule]


HALF, SMALL = "dtypes=fp16/fp16", "bmm1_scale=small"  # values of parameters of a configuration


@pytest.mark.parametrize(
    ("wrong", "right", "rule", "kept"),
    [
        # Each value alone is right: both are needed. Features that are no parameters may differ.
        ([f"{HALF} {SMALL}"], [f"{HALF} partial_page", SMALL], (HALF, SMALL), [HALF, SMALL]),
        # The right results differ from the wrong one in two values.
        ([f"{HALF} {SMALL}"], [f"{HALF} out=given", f"{SMALL} out=given"], (HALF, SMALL), [HALF]),
        ([f"{HALF} {SMALL}"], [f"{HALF} out=given", SMALL], (HALF, SMALL), [HALF]),
        ([f"{HALF} {SMALL}"], [HALF, f"{SMALL} out=given"], (HALF, SMALL), [SMALL]),
        # The result with a value less is wrong too, or is one of a wrong result outside the rule.
        ([f"{HALF} {SMALL}", HALF], [], (HALF, SMALL), [HALF]),
        ([f"{HALF} {SMALL} out=given lse=given", f"{HALF} out=given"], [HALF], (HALF, SMALL), [HALF]),
        # The rule holds for the right result too, or no test of the rule.
        (["sinks mask out=given lse=given"], ["sinks mask lse=given"], ("sinks", "mask"), ["sinks"]),
        (["sinks mask out=given"], [""], ("sinks", "mask"), ["sinks"]),
        (["sinks mask out=given"], ["sinks"], ("sinks", "mask"), ["sinks"]),  # perhaps of a check without parameters
    ],
)
def test_of_few_wrong_results_a_right_one_without_a_single_parameter_value_supports_a_test(
    wrong: list[str], right: list[str], rule: tuple[str, ...], kept: list[str]
) -> None:
    units = [dict.fromkeys(names.split(), True) for names in (*wrong, *right, "requests=3 out=given far=query")]
    is_wrong = np.arange(len(units)) < len(wrong)
    found = supported(tuple(Literal(name, "is") for name in rule), units, is_wrong, np.arange(len(units)))
    assert list(map(str, found)) == kept


@pytest.mark.parametrize(
    ("right", "of_wrong_results", "is_kept"),
    [
        (2, False, True),  # two results without a mask are right, a twentieth of the forty wrong ones with it
        (1, False, False),
        (9, True, False),  # in the results without a mask another request is wrong
    ],
)
def test_a_literal_of_many_wrong_results_excludes_a_twentieth_as_many_right_ones(
    right: int, of_wrong_results: bool, is_kept: bool
) -> None:
    units = [*[{"sinks": True, "mask": True}] * 40, *[{"mask": True}] * 20, *[{"sinks": True}] * right * 2]
    is_wrong = np.array([True] * 40 + [False] * 20 + [of_wrong_results, False] * right)
    result_of = np.array([*range(60), *np.arange(2 * right) // 2 + 60])
    found = supported((Literal("sinks", "is"), Literal("mask", "is")), units, is_wrong, result_of)
    assert [str(each) for each in found] == ["sinks", "mask"][: 1 + is_kept]


def test_a_literal_that_two_cases_prove_stays_in_a_rule_of_many_wrong_results() -> None:
    units: list[dict[str, Any]] = [dict.fromkeys((HALF, SMALL), True)] * 20 + [{HALF: True}, {SMALL: True}]
    rule = (Literal(HALF, "is"), Literal(SMALL, "is"))
    assert supported(rule, units, np.arange(22) < 20, np.arange(22)) == rule


@pytest.mark.parametrize(
    ("right", "added"),
    [
        # Variants: cases with one parameter value less, or more, than a wrong case.
        (["sinks mask", "sinks mask k=1 q=2"], ["not mask"]),
        (["sinks mask k=1 q=2", "sinks mask k=1 q=3"], ["not mask"]),
        (["sinks mask k=1 q=2 x=3", "sinks mask k=1 q=3 x=3"], ["not mask"]),  # a value may need a second one
        ([f"sinks mask {kind} y=4" for kind in ("q=2", "q=3", "x=2", "x=3")], []),  # negated, and without a variant
        (["sinks mask", "sinks mask partial_page"], []),  # cases without parameters are no variants
        (["sinks mask k=1 contents=low", "sinks mask k=1 pages=once"], []),  # values that can hide the error
        (["sinks k=1 q=2"], []),  # only the parameter value tells it from the wrong cases
        (
            [
                "sinks mask k=1 q=2",
                "sinks mask k=1 q=3",
                "sinks mask_not_causal k=1 x=1",
                "sinks mask_not_causal k=1 y=1",
            ],
            ["not mask", "not mask_not_causal"],
        ),
        (["sinks k=1 x=1", "sinks k=1 y=1", "sinks k=2"], ["has_window"]),
    ],
)
def test_right_cases_inside_a_rule_show_a_condition_that_it_lacks(right: list[str], added: list[str]) -> None:
    wrong = ["sinks has_window k=1"] * 20 if added == ["has_window"] else ["sinks k=1"] * 20
    units = [dict.fromkeys(names.split(), True) for names in (*wrong, *right, "mask k=1 q=2")]
    numbers, rule = np.arange(len(units)), (Literal("sinks", "is"),)
    found = sharpened(rule, units, numbers < 20, numbers, numbers.tolist())
    assert sorted(map(str, found[1:])) == added
    assert sharpened((), units, numbers < 20, numbers, numbers.tolist()) == ()


def test_a_condition_that_no_variant_shows_is_added_only_if_it_is_sure_and_holds_for_all_wrong_results() -> None:
    def added(num_wrong: int, num_right: int, *, without: int = 0, one_case: bool = False) -> list[str]:
        wrong = [{"sinks": True, "window_in_page": True}] * (num_wrong - without) + [{"sinks": True}] * without
        units = [*wrong, *[{"sinks": True}] * num_right]
        numbers = np.arange(len(units))
        cases = [min(number, num_wrong) if one_case else number for number in numbers.tolist()]
        found = sharpened((Literal("sinks", "is"),), units, numbers < num_wrong, numbers, cases)
        return [str(literal) for literal in found[1:]]

    assert added(40, 4) == ["window_in_page"]
    assert added(40, 2) == []
    # The probability that chance excludes all three right cases of 31 or 30, and none of the wrong ones: 1 of 4,495 or 4,060.
    assert added(28, 3) == ["window_in_page"]
    assert added(27, 3) == []
    assert added(40, 4, without=1) == []
    assert added(40, 4, one_case=True) == []  # four results of one case are one piece of evidence


def test_a_condition_without_a_variant_may_be_a_least_number_but_not_a_largest() -> None:
    rule, numbers = (Literal("sinks", "is"),), np.arange(44)
    for pages, added in ((2, ["pages >= 3"]), (4, [])):
        units = [{"sinks": True, "pages": 3}] * 40 + [{"sinks": True, "pages": pages}] * 4
        found = sharpened(rule, units, numbers < 40, numbers, numbers.tolist())
        assert [str(literal) for literal in found[1:]] == added


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("shift", range(4))
def test_a_condition_holds_also_for_wrong_results_outside_of_the_sample(
    place: int, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_rules, "MOST_UNITS", 2)  # every second wrong result is in the sample
    numbers, rule = np.arange(36), (Literal("sinks", "is"),)
    for names, added in (("sinks k=1", ["not mask"]), ("sinks k=1 mask", [])):
        given = [f"sinks mask k=1 q={number}" for number in range(32)]
        given[shift:shift] = [names if number == place else "sinks k=1" for number in range(4)]
        units = [dict.fromkeys(each.split(), True) for each in given]
        found = sharpened(rule, units, (numbers >= shift) & (numbers < shift + 4), numbers, numbers.tolist())
        assert [str(literal) for literal in found[1:]] == added


@pytest.mark.parametrize(
    ("values", "of_wrong", "is_variant"),
    [
        ("a=1", "a=1 b=1", True),
        ("a=1 b=1", "a=1", True),
        ("a=1 b=1 c=1", "a=1", True),  # a value may need a second one
        ("a=1", "", True),
        ("a=1", "a=1", False),
        ("", "a=1", False),  # also cases of other checks have no parameter values
        ("a=1 b=1 c=1 d=1", "a=1", False),
        ("a=1", "a=1 b=1 c=1", False),
        ("a=2", "a=1", False),
        ("a=1 contents=low", "a=1", False),
        ("a=1 b=1 contents=low", "a=1", False),
        ("a=1", "a=1 contents=low", False),
        ("a=1 contents=low", "a=1 b=1 contents=low", True),
    ],
)
def test_a_variant_has_one_parameter_value_less_or_at_most_two_more(
    values: str, of_wrong: str, is_variant: bool
) -> None:
    right, wrong = frozenset(values.split()), frozenset(of_wrong.split())
    assert (right in failure_rules._variants({right}, {wrong})) is is_variant


def test_a_right_request_of_a_wrong_result_shows_no_missing_condition() -> None:
    units = [{"sinks": True, "k=1": True}, {"sinks": True, "mask": True, "k=1": True, "q=2": True}] * 20
    numbers, rule = np.arange(40), (Literal("sinks", "is"),)
    of_results = sharpened(rule, units, numbers % 2 == 0, numbers, numbers.tolist())
    assert [str(literal) for literal in of_results] == ["sinks", "not mask"]
    assert sharpened(rule, units, numbers % 2 == 0, numbers, (numbers // 2).tolist()) == of_results  # of one case
    assert sharpened(rule, units, numbers % 2 == 0, numbers // 2, numbers.tolist()) == rule


def test_a_rule_gets_at_most_five_conditions_and_each_feature_once() -> None:
    names = ("mask", "sinks_list", "block_scales", "rank_keys", "separate_tables")
    right = [{"sinks": True, "k=1": True, name: True, value: True} for name in names for value in ("q=1", "q=2")]
    units = [*[{"sinks": True, "k=1": True}] * 20, *right]
    numbers = np.arange(len(units))
    assert len(sharpened((Literal("sinks", "is"),), units, numbers < 20, numbers, numbers.tolist())) == 5
    lens = [*[8, 9, 10] * 7, 6, 7]
    units = [{"kv_len": length, "k=1": True} | ({} if length > 7 else {f"q={length}": True}) for length in lens]
    numbers, rule = np.arange(23), (Literal("kv_len", ">=", 5),)
    assert sharpened(rule, units, numbers < 21, numbers, numbers.tolist()) == rule
    assert len(sharpened((Literal("k=1", "is"),), units, numbers < 21, numbers, numbers.tolist())) == 2


@pytest.mark.parametrize(
    ("contents", "name", "wrong", "shows"),
    [
        ("needles", "sinks", 0, False),
        ("needles", "sinks", 1, True),  # as large a share is wrong as without these contents
        ("counted", "sinks", 0, True),
        ("random", "sinks", 0, True),
        ("random", "bmm1_size=16.0", 0, False),
        ("random", "bmm1_size=16.0", 2, True),
    ],
)
def test_contents_and_values_with_which_less_is_wrong_hide_errors(
    contents: str, name: str, wrong: int, shows: bool
) -> None:
    plain, other = {"contents": "random"}, {"contents": contents, name: True}
    found = failure_rules._shows([plain] * 2 + [other] * 2, np.array([True, False, wrong > 0, wrong > 1]))
    assert found.tolist() == [True, True, shows, shows]


def test_right_results_whose_data_hides_errors_add_no_condition() -> None:
    """Eight right cases have large logits, and windows by chance."""
    wrong = [{"sinks": True, "mask": True}] * 40
    others = [{}, {"sinks": True}, {"mask": True}] * 30

    def rule(**also: bool) -> list[str]:
        features = [*wrong, *[{"has_window": True, **wrong[0], **also}] * 8, *others]
        is_wrong = np.arange(len(features)) < len(wrong)
        return [str(literal) for literal in find_rules(features, is_wrong, range(len(features)))[0]]

    assert {*rule()} == {"sinks", "mask", "not has_window"}
    assert {*rule(**{"bmm1_size=16.0": True})} == {"sinks", "mask"}


NUMBERS = [{"kv_len": kv_len, "page_size": page_size} for kv_len, page_size in ((0, 16), (16, 16), (33, 16), (32, 64))]


@pytest.mark.parametrize(
    ("literal", "formula", "held"),
    [
        (Literal("kv_len", ">", "page_size"), "kv_len > page_size", [False, False, True, False]),
        (Literal("kv_len", "<", "page_size"), "kv_len < page_size", [True, False, False, True]),
        (Literal("kv_len", "==", "page_size"), "kv_len == page_size", [False, True, False, False]),
        (Literal("kv_len", "differs", "page_size"), "kv_len != page_size", [True, False, True, True]),
        (Literal("kv_len", "multiple", "page_size"), "kv_len % page_size == 0", [False, True, False, False]),
        (Literal("kv_len", "no multiple", "page_size"), "kv_len % page_size > 0", [False, False, True, True]),
        (Literal("kv_len", "after multiple", "page_size"), "kv_len % page_size == 1", [False, False, True, False]),
        (Literal("kv_len", "multiple", 32), "kv_len % 32 == 0", [False, False, False, True]),
        (Literal("kv_len", "no multiple", 32), "kv_len % 32 > 0", [False, True, True, False]),
        (Literal("kv_len", "after multiple", 32), "kv_len % 32 == 1", [False, False, True, False]),
        (Literal("kv_len", "no power", 2), "kv_len is no power of 2", [False, False, True, False]),
    ],
)
def test_a_number_is_compared_with_another_number_or_a_divisor(
    literal: Literal, formula: str, held: list[bool]
) -> None:
    assert str(literal) == formula
    assert literal.holds([*NUMBERS, {}]).tolist() == [*held, False]
    assert literal.features == (("kv_len", "page_size") if "page" in formula else ("kv_len",))


def test_a_rule_may_compare_two_numbers_that_count_the_same() -> None:
    units = [
        {"kv_len": n, "window_left": w, "head_dim": 64, "page_size": p}
        for n in (20, 50, 90)
        for w in (16, 40, 64)
        for p in (8, 64)
    ]
    wrong = np.array([each["window_left"] % each["page_size"] == 0 for each in units])
    assert [str(each) for each in find_rules(units * 4, np.tile(wrong, 4), range(72))[0]] == [
        "window_left % page_size == 0"
    ]
    wrong = np.array([each["kv_len"] > each["window_left"] for each in units])
    assert [str(each) for each in find_rules(units * 4, np.tile(wrong, 4), range(72))[0]] == ["kv_len > window_left"]
    names = {(each.feature, each.value) for each in literals_of(units)[0] if each.other}
    assert ("kv_len", "window_left") in names
    assert not any("head_dim" in pair for pair in names)


def test_a_rule_may_name_the_remainder_of_a_number_that_it_limits() -> None:
    units = [{"packed_rows": rows} for rows in (40, 64, 65, 70, 96, 128, 160, 150, 192, 256)] * 3
    wrong = np.array([each["packed_rows"] > 64 and each["packed_rows"] % 64 > 0 for each in units])
    cases = np.arange(len(units))
    rule = (Literal("packed_rows", ">=", 65),)
    assert [str(each) for each in sharpened(rule, units, wrong, cases, cases)] == [
        "packed_rows >= 65",
        "packed_rows % 64 > 0",
    ]
