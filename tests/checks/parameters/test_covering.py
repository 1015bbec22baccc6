import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from lab.calls.problem import AttentionCall
from lab.checks.parameters import metadata_axes, paged_axes, ragged
from lab.checks.parameters.covering import Constraint, Model
from lab.checks.parameters.models import MODELS
from lab.ranges import Ranges
from tests.checks.small import SMALL

AXES = {"size": (1, 2, 3, 4), "form": ("plain", "view", "none"), "window": (-1, 0, 7), "mask": (False, True)}
RULE = Constraint(lambda window, mask: window < 0 or not mask, "a mask has no window")
TRIPLE = ("size", "form", "window")


def test_the_covering_array_has_every_pair_and_stated_triple_that_fits_the_rules() -> None:
    model = Model(AXES, (RULE,), (TRIPLE,))
    points = list(model.covering())
    for names in (*itertools.combinations(AXES, 2), TRIPLE):
        for values in itertools.product(*(AXES[name] for name in names)):
            wanted = dict(zip(names, values, strict=True))
            has = any(wanted.items() <= point.items() for point in points)
            assert has == (wanted.get("window", -1) < 0 or not wanted.get("mask", False)), wanted
    assert all(RULE.fits(point["window"], point["mask"]) for point in points)
    assert len(points) < 2 * 4 * 3 * 3  # of 72 points: the triples need 36


def test_an_array_of_pairs_is_small() -> None:
    model = Model({f"axis {number}": tuple(range(5)) for number in range(12)})
    assert len(list(model.covering())) < 60  # 25 at least; all points are 5**12


def test_an_array_of_values_is_small_and_has_each_value_in_a_point_that_covers_it() -> None:
    model = MODELS[AttentionCall.MLA_DECODE](SMALL)
    points = list(model.covering(goals=model.values()))
    assert len(points) < 25  # 11 at least: an axis has as many values
    covered = {each for point in points for each in model.tuples_of(point)}
    assert covered >= {goal for goal in model.values() if model.completed(dict(goal)) is not None}


def test_values_alone_depart_from_the_plain_point_as_little_as_rules_allow() -> None:
    needs = Constraint(lambda form, size: form != "view" or size > 2, "a view is of three")
    model = Model(AXES, (RULE, needs))
    points = list(model.alone())
    assert points[0] == model.default == {"size": 1, "form": "plain", "window": -1, "mask": False}
    assert len(points) == 1 + 3 + 2 + 2 + 1
    non_default = [sum(point[name] != model.default[name] for name in AXES) for point in points]
    assert non_default == [0, 1, 1, 1, 2, 1, 1, 1, 1]  # a view takes another size


def test_points_depend_on_the_seed_alone() -> None:
    model = Model(AXES, (RULE,))
    assert list(model.covering(3)) == list(model.covering(3)) != list(model.covering(4))


def test_goals_that_are_given_are_covered_alone() -> None:
    (point,) = Model(AXES).covering(goals=[(("size", 4), ("form", "none"))])
    assert (point["size"], point["form"]) == (4, "none")


def test_other_pairs_do_not_come_with_a_value_that_computes_nothing() -> None:
    axes = {"rows": ("some", "none"), **AXES}
    points = list(Model(axes, (RULE,), vacuous=frozenset({("rows", "none")})).covering())
    for one, other in itertools.combinations(axes, 2):
        for goal in itertools.product(*(((name, value) for value in axes[name]) for name in (one, other))):
            wanted = dict(goal)
            shown = [point for point in points if wanted.items() <= point.items()]
            if "rows" not in wanted:
                shown = [point for point in shown if point["rows"] == "some"]
            assert bool(shown) == RULE.fits(wanted.get("window", -1), wanted.get("mask", False)), wanted


APART = (frozenset({("form", "view"), ("form", "none")}), frozenset({("mask", True)}))


def test_a_pair_is_covered_by_a_point_that_has_no_value_of_another_group() -> None:
    points = list(Model(AXES, (RULE,), (TRIPLE,), apart=APART).covering())
    for names in (*itertools.combinations(AXES, 2), TRIPLE):
        for values in itertools.product(*(AXES[name] for name in names)):
            goal = set(zip(names, values, strict=True))
            present = [[group for group in APART if group & point.items()] for point in points if goal <= point.items()]
            is_covered = any(all(group & goal for group in groups) for groups in present)
            assert is_covered == RULE.fits(dict(goal).get("window", -1), dict(goal).get("mask", False)), goal
    assert len(points) < 2 * 4 * 3 * 3


def test_a_group_of_all_that_an_axis_has_is_not_apart() -> None:
    taken = [
        ((name, value),) for name, values in AXES.items() for value in values if (name, value) != ("form", "plain")
    ]
    views = Model(AXES, (RULE,), apart=APART).only(taken)
    assert views is not None
    point = {"size": 1, "form": "view", "window": 0, "mask": False}
    assert (("size", 1), ("window", 0)) in set(views.tuples_of(point))
    assert (("size", 1), ("window", 0)) not in set(views.tuples_of(point | {"mask": True}))
    assert (("size", 1), ("window", 0)) not in set(Model(AXES, (RULE,), apart=APART).tuples_of(point))
    assert len(list(views.covering())) < 4 * 3 * 2 * 2


def test_that_there_is_no_point_shows_without_trying_axes_that_do_not_matter() -> None:
    """Eight axes come between c and d, which never fit each other: 6**8 combinations of their values."""
    calls = []

    def never(c: int, d: int) -> bool:
        calls.append((c, d))
        return d == 6

    between = {f"b{number}": tuple(range(6)) for number in range(8)}
    near = Constraint(lambda a, c, b0, b1, b2, b3, b4, b5, b6, b7: True, "all but d are near a")
    axes = {"a": (0, 1), "c": tuple(range(6)), **between, "d": tuple(range(6))}
    rules = (near, Constraint(never, "c and d never fit"))
    assert Model(axes | {"d": (5, 6)}, rules).default["d"] == 6
    calls.clear()
    with pytest.raises(ValueError, match="no point of these axes fits"):
        Model(axes, rules)
    assert len(calls) == 6 * 6


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Model({"size": ()}), "axis 'size' has no value"),
        (lambda: Model(AXES, triples=(("size", "form", "heads"),)), "there is no axis 'heads'"),
        (lambda: Model(AXES, (Constraint(lambda size: False, "never"),)), "no point of these axes fits"),
    ],
)
def test_a_domain_that_is_none_is_refused(model: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model()  # type: ignore[operator]


@pytest.mark.parametrize("declared", [paged_axes, ragged, metadata_axes])
def test_every_rule_and_triple_is_of_some_function_s_model(declared: Any) -> None:
    """A model leaves out those of axes that it does not have, and would leave out a misspelt one too."""
    models = [model_of(Ranges()) for model_of in MODELS.values()]
    rules = declared.RAGGED_RULES if declared is ragged else declared.RULES
    assert set(rules) <= {rule for model in models for rule in model.rules}
    assert set(declared.TRIPLES) <= {triple for model in models for triple in model.triples}


def test_nvfp4_ranks_and_selected_pages_test_no_pair_of_other_values() -> None:
    apart = dict(_apart(MODELS[AttentionCall.DECODE](Ranges())))
    assert apart == {
        "dtypes": {"bf16/nvfp4", "fp16/nvfp4"},
        "rank": {"0 of 2", "3 of 4", "0 of 1"},
        "head_pages": set(paged_axes.HEAD_PAGES) - {"none"},
    }
    assert (
        MODELS[AttentionCall.DECODE](Ranges(nvfp4=(False,))).apart == MODELS[AttentionCall.DECODE](Ranges()).apart[1:]
    )
    assert not MODELS[AttentionCall.CONTEXT](Ranges(nvfp4=(False,))).apart


def _apart(model: Model) -> Iterator[tuple[str, set[Any]]]:
    for group in model.apart:
        (name,) = {name for name, _ in group}
        yield name, {value for _, value in group}
