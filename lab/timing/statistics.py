"""Two sets of samples: is the second faster, slower, the same, or can these samples not tell?

A rank test says whether there is a difference, an interval how large it can be, and a minimum effect whether anybody should
care. The last is needed because the samples of one run are not independent: they share buffers, clocks and a warm-up, so two
runs of the same code differ by more than the scatter within either, and a test alone would call that significant.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MINIMUM_EFFECT_PERCENT = 3.0
SIGNIFICANCE = 0.01
# With 5 and 5 samples the rank test can reach p = 2 / binomial(10, 5) = 0.008; with 4 and 4 never less than 0.029.
FEWEST_SAMPLES = 5
# From so many runs on each side a run counts as one sample; they are independent, and the rank test is then exact.
FEWEST_RUNS = 5
RESAMPLES = 5000
SEED = 0


class Change(enum.Enum):
    """What happened from before to after."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNSURE = "unsure"


@dataclass(frozen=True)
class SampleComparison:
    """What two sets of samples say about the change of the median time.

    Attributes:
        before_us, after_us: the medians.
        effect_percent: the second median over the first, less 1: positive is slower.
        interval_percent: where the effect lies with a confidence of 1 - significance; None with too few samples.
        p_value: of the two-sided rank test.
        reason: why it is UNSURE, in words; empty otherwise.
    """

    change: Change
    before_us: float
    after_us: float
    effect_percent: float
    interval_percent: tuple[float, float] | None
    p_value: float
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Time after over time before."""
        return self.after_us / self.before_us


def compare_samples(
    before_us: Sequence[float],
    after_us: Sequence[float],
    minimum_effect_percent: float = MINIMUM_EFFECT_PERCENT,
    significance: float = SIGNIFICANCE,
) -> SampleComparison:
    """Compare two sets of samples by their medians.

    FASTER or SLOWER: the rank test (Mann-Whitney U, two-sided) is significant *and* the whole interval of the effect lies
    beyond the minimum effect. SAME: the whole interval lies within it, however small p is. UNSURE: everything else, so an
    interval across the minimum effect, and fewer than 5 samples on a side. The whole interval, not the point: a point just
    beyond the line falls within it in the next run, and a gate that flips is switched off. The rank test guards where the
    interval alone is wrong: of a handful of samples it is too narrow.

    The interval is the percentile bootstrap of the ratio of medians (Efron and Tibshirani 1993, chapter 13), each side drawn
    for itself, from a fixed seed: the same samples always give the same answer. It speaks of medians. A slow mode of fewer than
    half the samples does not move one, nor does an outlier; one of about half gives a wide interval, and so UNSURE.

    Args:
        before_us, after_us: times of one call, any order, in one unit.
        minimum_effect_percent: what counts as a change; at least 0.
        significance: of the rank test, and the interval's error; between 0 and 1.

    Raises:
        ValueError: no samples, one that is not a time (NaN, infinite, zero, negative), or a parameter out of range.
    """
    if not (math.isfinite(minimum_effect_percent) and minimum_effect_percent >= 0):
        raise ValueError(f"the minimum effect must be at least 0 %, not {minimum_effect_percent}")
    if not 0 < significance < 1:
        raise ValueError(f"the significance must lie between 0 and 1, not {significance}")
    before, after = _times(before_us, "before"), _times(after_us, "after")
    p_value = _rank_test(before, after)
    interval = None
    if min(len(before), len(after)) >= FEWEST_SAMPLES:
        interval = _interval_percent(before, after, significance)
        change, reason = _change(interval, p_value, minimum_effect_percent, significance)
    else:
        change = Change.UNSURE
        reason = f"{len(before)} and {len(after)} samples; fewer than {FEWEST_SAMPLES} on a side cannot tell"
    before_median, after_median = float(np.median(before)), float(np.median(after))
    effect_percent = 100 * (after_median / before_median - 1)
    return SampleComparison(change, before_median, after_median, effect_percent, interval, p_value, reason)


def compare_runs(
    before_runs_us: Sequence[Sequence[float]],
    after_runs_us: Sequence[Sequence[float]],
    minimum_effect_percent: float = MINIMUM_EFFECT_PERCENT,
    significance: float = SIGNIFICANCE,
) -> SampleComparison:
    """Compare repeated runs of one measurement, each run its samples; see `compare_samples`.

    With at least 5 runs on each side, the median of each run is one sample: then the interval covers what differs from run to
    run, which no number of samples within a run shows. With fewer, all samples of a side are put together.
    """
    if min(len(before_runs_us), len(after_runs_us)) >= FEWEST_RUNS:
        before_us = [float(np.median(_times(run, "before"))) for run in before_runs_us]
        after_us = [float(np.median(_times(run, "after"))) for run in after_runs_us]
    else:
        before_us = [sample for run in before_runs_us for sample in run]
        after_us = [sample for run in after_runs_us for sample in run]
    return compare_samples(before_us, after_us, minimum_effect_percent, significance)


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean for ratios of times: half and twice average to 1."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


def _times(samples_us: Sequence[float], side: str) -> np.ndarray:
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
    return 1.0 if math.isnan(p_value) else p_value  # all samples equal: scipy 1.17 says 1, 1.18 nothing


def _interval_percent(before: np.ndarray, after: np.ndarray, significance: float) -> tuple[float, float]:
    random = np.random.default_rng(SEED)
    ratios = _resampled_medians(random, after) / _resampled_medians(random, before)
    lower, upper = np.quantile(ratios, [significance / 2, 1 - significance / 2])
    return 100 * (float(lower) - 1), 100 * (float(upper) - 1)


def _resampled_medians(random: np.random.Generator, times: np.ndarray) -> np.ndarray:
    return np.median(random.choice(times, size=(RESAMPLES, times.size)), axis=1)


def _change(
    interval_percent: tuple[float, float], p_value: float, minimum_effect_percent: float, significance: float
) -> tuple[Change, str]:
    lower, upper = interval_percent
    if -minimum_effect_percent <= lower and upper <= minimum_effect_percent:
        return Change.SAME, ""
    if lower <= minimum_effect_percent and upper >= -minimum_effect_percent:
        return Change.UNSURE, f"the interval reaches across the minimum effect of {minimum_effect_percent:g} %"
    if p_value >= significance:
        return Change.UNSURE, f"the rank test is not significant at {significance:g}"
    return (Change.SLOWER if lower > 0 else Change.FASTER), ""
