"""Decide from two sets of time samples whether the second is FASTER, SLOWER, the SAME or UNSURE.

The samples of one run have buffers, clocks and warm-up in common, so that two runs of the same code differ by more than the
samples within a run differ, and a rank test alone would call this significant. So there is a minimum effect: 3 %, or 1 % for
variants that are interleaved within one process.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.timing.gpu_time import interquartile_range

# With 5 samples per side the rank test can reach p = 2 / binomial(10, 5) = 0.008; with 4 per side only 0.029.
FEWEST_SAMPLES = 5
# With at least this number of runs on each side, a run counts as one sample. Runs are independent, so the rank test is exact.
FEWEST_RUNS = 5
RESAMPLES = 5000
SEED = 0


@dataclass(frozen=True)
class Rule:
    """The rule that decides whether a change is faster or slower. Raises ValueError for numbers out of range."""

    minimum_effect_percent: float = 3.0  #: a smaller change of the median is ignored; at least 0
    #: significance level of the rank test and error probability of the interval; above 0, at most 0.5
    significance: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.minimum_effect_percent) and self.minimum_effect_percent >= 0):
            raise ValueError(f"the minimum effect must be at least 0 %, not {self.minimum_effect_percent}")
        if not 0 < self.significance <= 0.5:
            raise ValueError(f"the significance must be above 0 and at most 0.5, not {self.significance}")

    @property
    def confidence_percent(self) -> float:
        return 100 * (1 - self.significance)


BETWEEN_RUNS = Rule()
INTERLEAVED = Rule(minimum_effect_percent=1.0)  # variants that are interleaved within one process


class Speed(enum.Enum):
    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNSURE = "unsure"


@dataclass(frozen=True)
class Times:
    """Recorded times of one call in µs: the median, the interquartile range or None, and the samples or ()."""

    median_us: float
    iqr_us: float | None = None
    samples_us: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples_us: Sequence[float]) -> "Times":
        return cls(float(np.median(samples_us)), interquartile_range(samples_us), tuple(samples_us))

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "Times":
        return cls.of(row["samples_us"]) if row.get("samples_us") else cls(row["median_us"], row["iqr_us"])

    @property
    def quartiles_us(self) -> tuple[float, float] | None:
        """Return (median - iqr / 2, median + iqr / 2), where iqr is the interquartile range; None if it is unknown."""
        if self.iqr_us is None:
            return None
        return self.median_us - self.iqr_us / 2, self.median_us + self.iqr_us / 2

    def plus(self, added_us: float) -> "Times":
        return Times(self.median_us + added_us, self.iqr_us, tuple(sample + added_us for sample in self.samples_us))


@dataclass(frozen=True)
class SampleComparison:
    """The result of comparing two sets of time samples: a verdict (`speed`), and the change of the median."""

    speed: Speed
    before_us: float  #: the median
    after_us: float
    effect_percent: float  #: the second median over the first, minus 1, in percent; positive is slower
    #: confidence interval of the effect, at confidence 1 - significance; None with too few samples
    interval_percent: tuple[float, float] | None
    p_value: float | None  #: of the two-sided rank test; None without samples
    reason: str = ""  #: the reason for UNSURE, in words; empty for other verdicts

    @property
    def ratio(self) -> float:
        return self.after_us / self.before_us


def compare_samples(
    before_us: Sequence[float], after_us: Sequence[float], rule: Rule = BETWEEN_RUNS
) -> SampleComparison:
    """Compare two sets of samples of one call's time. The effect is the ratio of their medians.

    FASTER or SLOWER: the rank test (Mann-Whitney U, two-sided) is significant, and the whole interval of the effect is
    beyond the minimum effect. SAME: the whole interval lies within the minimum effect, even if the test is significant.
    UNSURE: everything else, such as an interval that contains the minimum effect, or fewer than 5 samples on a side. The
    whole interval counts, because an estimate near the minimum effect changes its verdict from run to run. The rank test is
    needed because the interval of few samples is too narrow.

    The interval is the percentile bootstrap of the ratio of medians (Efron and Tibshirani 1993, chapter 13). Each side is
    resampled independently, from a fixed seed. Medians ignore outliers and a slow mode of fewer than half the samples; a
    slow mode of about half gives a wide interval, and so UNSURE.

    Raises:
        ValueError: there are no samples, or a sample is no time (NaN, infinite, zero, negative).
    """
    before, after = _checked(before_us, "before"), _checked(after_us, "after")
    p_value = _rank_test(before, after)
    interval, speed = None, Speed.UNSURE
    reason = f"{len(before)} and {len(after)} samples; fewer than {FEWEST_SAMPLES} on a side cannot tell"
    if min(len(before), len(after)) >= FEWEST_SAMPLES:
        interval = _interval_percent(before, after, rule.significance)
        speed, reason = _speed(interval, p_value, rule)
    before_median, after_median = float(np.median(before)), float(np.median(after))
    return SampleComparison(
        speed, before_median, after_median, _percent(after_median / before_median), interval, p_value, reason
    )


def compare_times(before: Times, after: Times, rule: Rule = BETWEEN_RUNS) -> SampleComparison:
    """Compare recorded times, by `compare_samples` if both have samples. If both have only quartiles, the effect's interval
    is from (lower quartile of `after`) / (upper quartile of `before`) to (upper of `after`) / (lower of `before`). For normal
    samples, it is as wide as the 99 % interval of 11 samples a side. If a time has only a median, the verdict is UNSURE.
    """
    if before.samples_us and after.samples_us:
        return compare_samples(before.samples_us, after.samples_us, rule)
    _checked([before.median_us], "before"), _checked([after.median_us], "after")
    effect_percent = _percent(after.median_us / before.median_us)
    if before.quartiles_us is None or after.quartiles_us is None:
        reason = "recorded without samples or quartiles: a median alone cannot tell"
        return SampleComparison(Speed.UNSURE, before.median_us, after.median_us, effect_percent, None, None, reason)
    (before_lower, before_upper), (after_lower, after_upper) = before.quartiles_us, after.quartiles_us
    most = after_upper / before_lower if before_lower > 0 else math.inf
    interval = _percent(after_lower / before_upper), _percent(most)
    speed, reason = _speed(interval, None, rule)
    return SampleComparison(speed, before.median_us, after.median_us, effect_percent, interval, None, reason)


def compare_runs(
    before_runs_us: Sequence[Sequence[float]], after_runs_us: Sequence[Sequence[float]], rule: Rule = BETWEEN_RUNS
) -> SampleComparison:
    """Compare repeated runs of one measurement by `compare_samples`. With at least 5 runs on each side, each run's median is
    one sample, so that the interval includes the differences between runs; with fewer, all samples of a side are pooled.
    """
    if min(len(before_runs_us), len(after_runs_us)) >= FEWEST_RUNS:
        before_us = [float(np.median(_checked(run, "before"))) for run in before_runs_us]
        after_us = [float(np.median(_checked(run, "after"))) for run in after_runs_us]
    else:
        before_us = [sample for run in before_runs_us for sample in run]
        after_us = [sample for run in after_runs_us for sample in run]
    return compare_samples(before_us, after_us, rule)


def _checked(samples_us: Sequence[float], side: str) -> np.ndarray:
    times = np.asarray(samples_us, dtype=np.float64)
    if not times.size:
        raise ValueError(f"no samples {side}")
    wrong = times[~(np.isfinite(times) & (times > 0))]
    if wrong.size:
        raise ValueError(f"a sample {side} is {wrong[0]:g}, which is not a time")
    return times


def _rank_test(before: np.ndarray, after: np.ndarray) -> float:
    from scipy.stats import mannwhitneyu

    p_value = float(mannwhitneyu(before, after, alternative="two-sided").pvalue)
    return 1.0 if math.isnan(p_value) else p_value  # if all samples are equal, scipy 1.17 returns 1 and scipy 1.18 NaN


def _interval_percent(before: np.ndarray, after: np.ndarray, significance: float) -> tuple[float, float]:
    random = np.random.default_rng(SEED)
    ratios = _resampled_medians(random, after) / _resampled_medians(random, before)
    lower, upper = np.quantile(ratios, [significance / 2, 1 - significance / 2])
    return _percent(float(lower)), _percent(float(upper))


def _percent(ratio: float) -> float:
    return 100 * ratio - 100


def _resampled_medians(random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    return np.median(random.choice(times, size=(RESAMPLES, times.size)), axis=1)


def _speed(interval_percent: tuple[float, float], p_value: float | None, rule: Rule) -> tuple[Speed, str]:
    (lower, upper), least = interval_percent, rule.minimum_effect_percent
    if -least <= lower and upper <= least:
        return Speed.SAME, ""
    if lower <= least and upper >= -least:
        return Speed.UNSURE, f"the interval reaches across the minimum effect of {least:g} %"
    if p_value is not None and p_value >= rule.significance:
        return Speed.UNSURE, f"the rank test is not significant at {rule.significance:g}"
    return (Speed.SLOWER if lower > 0 else Speed.FASTER), ""
