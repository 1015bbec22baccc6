"""Two kernels, or two settings, against each other on this GPU: in one process, their samples in turns.

::

    lab ab decode/llama-3.1-8b/64q1s4k lab.kernels.trtllm lab.kernels.portable
    lab ab draft_extend_v2/llama-3.1-8b/64q4s4k/on_context lab.kernels.trtllm \\
        --against draft_extend_v2/llama-3.1-8b/64q4s4k

Both are right before and after, or nothing is said.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lab.checks.forward_pass import ForwardCase, build_forward
from lab.exit_status import ExitStatus
from lab.reports.compare import comparison_record
from lab.reports.tables import Columns, TableReport, make_table, number, words
from lab.timing.forward import forward_work
from lab.timing.gpu_time import GpuTime, measure_interleaved
from lab.timing.method import Method
from lab.timing.statistics import IN_TURNS, Rule, SampleComparison, Speed, compare_samples

Side = tuple[str, str]  # scenario, module


def measure_sides(
    cases: Sequence[ForwardCase], modules: Sequence[Any], method: Method, num_samples: int
) -> tuple[GpuTime, GpuTime]:
    """Time two forward passes on this GPU, their samples in turns, each judged before and after.

    Raises:
        NotImplementedError, ValueError: one is refused.
        AssertionError: one is wrong.
        RuntimeError: one cannot be timed by this method.
    """
    works = {
        side: forward_work(build_forward(case, torch.device("cuda")), module)
        for side, case, module in zip(("first", "second"), cases, modules, strict=True)
    }
    times = measure_interleaved(works, method, num_samples)
    return times["first"], times["second"]


def ab_report(sides: Sequence[Side], times: Sequence[GpuTime], rule: Rule = IN_TURNS) -> TableReport:
    """Compare the second side's time with the first's.

    Args:
        sides: scenario and module of each.
        times: of each, as `measure_sides` returns them.
    """
    first, second = times
    comparison = compare_samples(first.samples_us, second.samples_us, rule)
    timed = list(zip(sides, times, strict=True))
    method = f"{first.method}; {len(first.samples_us)} samples each, in turns; {first.device.facts()}"
    return TableReport(
        above=(),
        table=make_table(COLUMNS, timed, say_once=()),
        below=(f"GPU time: {method}", in_words(comparison)),
        record={
            **comparison_record(comparison),
            "sides": [
                {
                    "scenario": scenario,
                    "implementation": module,
                    "median_us": time.median_us,
                    "iqr_us": time.iqr_us,
                    "launches": time.launches,
                    "samples_us": time.samples_us,
                }
                for (scenario, module), time in timed
            ],
            "method": method,
        },
        exit_status=ExitStatus.WRONG if comparison.speed is Speed.SLOWER else ExitStatus.DONE,
    )


COLUMNS: Columns = {
    "scenario": lambda timed: words(timed[0][0]),
    "implementation": lambda timed: words(timed[0][1]),
    "median, µs": lambda timed: number(timed[1].median_us, 2),
    "IQR, µs": lambda timed: number(timed[1].iqr_us, 2),
    "launches": lambda timed: number(timed[1].launches),
}


def in_words(comparison: SampleComparison) -> str:
    """Return the verdict, the size of the difference and its certainty, in one line."""
    interval = comparison.interval_percent
    within = "" if interval is None else f" ({interval[0]:+.2f} to {interval[1]:+.2f} %)"
    verdict = f"The second is {comparison.speed.name}: {comparison.effect_percent:+.2f} %{within}"
    reason = f"; {comparison.reason}" if comparison.reason else ""
    return f"{verdict}, p = {comparison.p_value:.1g}{reason}"
