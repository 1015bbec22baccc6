"""The four verdicts, on samples whose truth is known."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from lab.timing.statistics import Rule, Speed, Times, compare_runs, compare_samples, compare_times
from tests.reports.recorded_runs import samples_us

SEEDS = range(80)


def run_us(seed: int, shift_percent: float = 0.0, noise_percent: float = 0.5) -> list[float]:
    """A run of its own: shifted from others of the same code by up to 1 %, more than its samples scatter."""
    random = np.random.default_rng(seed)
    median_us = 250 * (1 + shift_percent / 100) * (1 + random.uniform(-0.01, 0.01))
    return list(median_us * (1 + noise_percent / 100 * random.standard_normal(30)))


def test_two_runs_of_the_same_code_never_trip() -> None:
    """Of a minimum effect: a rank test alone would call most of them significant."""
    compared = [compare_samples(run_us(2 * seed), run_us(2 * seed + 1)) for seed in SEEDS]
    speeds = [each.speed for each in compared]
    assert set(speeds) <= {Speed.SAME, Speed.UNSURE}
    assert speeds.count(Speed.SAME) > 0.95 * len(SEEDS)
    assert sum(each.p_value is not None and each.p_value < 0.01 for each in compared) > len(SEEDS) / 2


@pytest.mark.parametrize(("shift_percent", "change"), [(10, Speed.SLOWER), (-10, Speed.FASTER)])
def test_ten_percent_is_always_seen(shift_percent: float, change: Speed) -> None:
    for seed in SEEDS:
        before = samples_us(250, noise_percent=1, seed=2 * seed)
        after = samples_us(250 * (1 + shift_percent / 100), noise_percent=1, seed=2 * seed + 1)
        assert compare_samples(before, after).speed is change


def test_noise_makes_unsure_and_never_the_opposite() -> None:
    changes = [
        compare_samples(samples_us(250, 15, 10, 2 * seed), samples_us(275, 15, 10, 2 * seed + 1)).speed
        for seed in SEEDS
    ]
    assert set(changes) == {Speed.UNSURE, Speed.SLOWER}
    assert changes.count(Speed.UNSURE) > 0.75 * len(SEEDS)


def test_a_significant_difference_below_the_minimum_effect_is_none() -> None:
    comparison = compare_samples(samples_us(100, 0.1, seed=1), samples_us(101, 0.1, seed=2))
    assert comparison.p_value < 1e-6
    assert comparison.speed is Speed.SAME
    assert compare_samples(samples_us(100, 0.1, seed=1), samples_us(101, 0.1, seed=2), Rule(0.5)).speed is Speed.SLOWER
    assert compare_samples(samples_us(100, 0.1, seed=1), samples_us(99.3, 0.1, seed=2), Rule(0.5)).speed is Speed.FASTER


@pytest.mark.parametrize("after_us", [103.0, 97.0])
def test_an_effect_of_just_the_minimum_is_none(after_us: float) -> None:
    assert compare_samples([100.0] * 5, [after_us] * 5, Rule(3.0)).speed is Speed.SAME


def test_a_rank_test_at_just_its_level_is_not_significant() -> None:
    before, after = [100.0, 101.0, 102.0, 103.0, 104.0], [200.0, 201.0, 202.0, 203.0, 204.0]
    p_value = compare_samples(before, after).p_value
    found = compare_samples(before, after, Rule(significance=p_value))
    assert (found.speed, found.reason) == (Speed.UNSURE, f"the rank test is not significant at {p_value:g}")
    assert compare_samples(before, after, Rule(significance=1.01 * p_value)).speed is Speed.SLOWER


def test_an_interval_across_the_minimum_effect_is_unsure_though_the_point_is_beyond_it() -> None:
    comparison = compare_samples(samples_us(100, 2, seed=1), samples_us(104, 2, seed=2))
    assert comparison.effect_percent > 3
    assert comparison.p_value < 0.01
    assert comparison.speed is Speed.UNSURE
    assert "reaches across the minimum effect of 3 %" in comparison.reason


def test_the_interval_covers_as_often_as_it_says() -> None:
    """With 30 normal samples, truth +5 %: about 99 % of the intervals hold it."""
    held = 0
    for seed in SEEDS:
        comparison = compare_samples(samples_us(100, 2, 30, 2 * seed), samples_us(105, 2, 30, 2 * seed + 1))
        assert comparison.interval_percent is not None
        held += comparison.interval_percent[0] <= 5 <= comparison.interval_percent[1]
    assert held >= 0.97 * len(SEEDS)


def test_constant_samples() -> None:
    same = compare_samples([5.0] * 30, [5.0] * 30)
    assert (same.speed, same.p_value, same.interval_percent) == (Speed.SAME, 1.0, (0.0, 0.0))
    slower = compare_samples([5.0] * 30, [6.0] * 30)
    assert slower.speed is Speed.SLOWER
    assert slower.interval_percent == pytest.approx((20.0, 20.0))


@pytest.mark.parametrize(("count", "other"), [(1, 1), (4, 4), (4, 30), (30, 2)])
def test_too_few_samples_say_how_few(count: int, other: int) -> None:
    comparison = compare_samples(samples_us(100, count=count), samples_us(300, count=other))
    assert comparison.speed is Speed.UNSURE
    assert comparison.interval_percent is None
    assert f"{count} and {other} samples" in comparison.reason


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -1.0])
@pytest.mark.parametrize("compare", [compare_samples, lambda before, after: compare_runs([before] * 5, [after] * 5)])
def test_what_is_no_time_is_refused(wrong: float, compare: Callable[..., object]) -> None:
    good = samples_us(100)
    with pytest.raises(ValueError, match=f"a sample after is {wrong:g}, which is not a time"):
        compare(good, [*good, wrong, -2.0])
    with pytest.raises(ValueError, match="a sample before is"):
        compare([*good, wrong], good)
    with pytest.raises(ValueError, match="not a time"):
        compare_times(Times(wrong), Times(1.0))
    with pytest.raises(ValueError, match="no samples before"):
        compare([], good)


@pytest.mark.parametrize(("effect", "significance"), [(-1, 0.01), (math.nan, 0.01), (3, 0), (3, 1), (3, math.nan)])
def test_thresholds_out_of_range_are_refused(effect: float, significance: float) -> None:
    with pytest.raises(ValueError, match="must"):
        Rule(effect, significance)


@pytest.mark.parametrize("runs", [4, 5])
def test_a_run_is_a_sample_where_there_are_five(runs: int) -> None:
    before, after = [run_us(seed) for seed in range(runs)], [run_us(seed, 10) for seed in range(runs, 2 * runs)]
    samples = [[us for run in side for us in run] for side in (before, after)]
    medians = [[float(np.median(run)) for run in side] for side in (before, after)]
    assert compare_runs(before, after) == compare_samples(*(medians if runs == 5 else samples))


def test_times_of_samples_have_their_quartiles() -> None:
    samples_us = (1.0, 2.0, 3.0, 4.0, 100.0)
    assert Times.of(samples_us) == Times(3.0, 2.0, samples_us)
    assert Times.of([7.0]) == Times(7.0, 0.0, (7.0,))
    assert Times(100.0, 6.0).quartiles_us == (97.0, 103.0)
    assert Times(100.0).quartiles_us is None
    assert Times(5.0, 1.0, (4.0, 6.0)).plus(2.0) == Times(7.0, 1.0, (6.0, 8.0))
    row = {"median_us": 3.0, "iqr_us": 2.0}
    assert Times.of_row(row) == Times(3.0, 2.0)
    assert Times.of_row(row | {"samples_us": [1.0, 2.0, 6.0]}).samples_us == (1.0, 2.0, 6.0)


def test_the_interval_is_that_of_its_level() -> None:
    """The 0.5 and 99.5 % quantiles of the bootstrap, by hand."""
    before, after = np.array(samples_us(100, 2, seed=1)), np.array(samples_us(104, 2, seed=2))
    random = np.random.default_rng(0)
    medians = [np.median(random.choice(side, size=(5000, side.size)), axis=1) for side in (after, before)]
    expected = 100 * np.quantile(medians[0] / medians[1], [0.005, 0.995]) - 100
    found = compare_samples(before, after)
    assert found.interval_percent == pytest.approx(tuple(expected))
    assert found.ratio == pytest.approx(np.median(after) / np.median(before))
    assert found.effect_percent == pytest.approx(100 * found.ratio - 100)
    assert Rule(significance=0.05).confidence_percent == pytest.approx(95)


@pytest.mark.parametrize(
    ("before", "after", "speed"),
    [
        ((100.0, 2.0), (90.0, 2.0), Speed.FASTER),
        ((90.0, 2.0), (100.0, 2.0), Speed.SLOWER),
        ((100.0, 2.0), (100.0, 2.0), Speed.SAME),
        ((100.0, 12.0), (90.0, 12.0), Speed.UNSURE),
        ((100.0, 0.0), (104.0, 2.0), Speed.UNSURE),  # from just the minimum effect on
        ((100.0, 0.0), (96.0, 2.0), Speed.UNSURE),
        ((100.0, 250.0), (10.0, 0.0), Speed.UNSURE),  # a quartile below 0: the ratio has no upper end
    ],
)
def test_without_samples_the_interval_is_that_of_the_quartiles(
    before: tuple[float, float], after: tuple[float, float], speed: Speed
) -> None:
    compared = compare_times(Times(*before), Times(*after))
    assert compared.speed is speed
    assert compared.p_value is None
    assert compared.interval_percent is not None
    lower, upper = compared.interval_percent
    assert lower <= compared.effect_percent <= upper
    assert bool(compared.reason) == (speed is Speed.UNSURE)


def test_a_median_alone_tells_nothing() -> None:
    for before, after in (
        (Times(10.0), Times(20.0)),
        (Times.of([10.0] * 9), Times(20.0)),
        (Times(10.0), Times(20.0, 0.1)),
    ):
        compared = compare_times(before, after)
        assert compared.speed is Speed.UNSURE
        assert compared.effect_percent == 100.0
        assert compared.reason == "recorded without samples or quartiles: a median alone cannot tell"


def test_with_samples_on_both_sides_they_decide() -> None:
    before, after = ([level_us * (1 + 0.001 * place) for place in range(20)] for level_us in (100, 90))
    assert compare_times(Times.of(before), Times.of(after)) == compare_samples(before, after)
    assert compare_times(Times.of(before), Times(90.0, 0.1)).p_value is None
