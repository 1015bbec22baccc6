"""Time two kernels, or one kernel with two settings, in one process on this GPU. Their samples are interleaved."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lab.exit_status import ExitStatus
from lab.kernels import PlannedOnce
from lab.reports.compare import comparison_record
from lab.reports.tables import Columns, TableReport, make_table, number, words
from lab.timing.forward import TimedCase, TimedPasses, case_facts, time_facts
from lab.timing.gpu_time import GpuTime, measure_interleaved
from lab.timing.method import Method
from lab.timing.roofline import measure_ceilings
from lab.timing.statistics import INTERLEAVED, Rule, Speed, compare_samples


def measure_sides(
    names: Sequence[tuple[str, str]],
    cases: Sequence[TimedCase],
    modules: Sequence[Any],
    method: Method,
    num_samples: int,
    seed: int | None = None,
) -> list[tuple[GpuTime, dict[str, Any]]]:
    """Time two forward passes or recorded calls on this GPU, and compare their outputs with the reference before and after the
    timing. Return for each of the two its GPU time, and its facts by name: "scenario", "implementation" (the kernel's module),
    and those of `lab.timing.forward.time_facts`, such as the median and the floor.

    Args:
        names: for each of the two, the scenario's name or the recorded call's address, and the name of the kernel's module.
        seed: seed of the tensors' contents; None draws a new seed.

    Raises:
        NotImplementedError, ValueError: a module does not support its call, a recorded call cannot be read, or `method` cannot
            time a call.
        AssertionError: an output is wrong.
        RefusedTimeError: a measured time is shorter than the GPU can reach, or two clocks disagree about it.
        RuntimeError: a call cannot be captured in a CUDA graph, or CUPTI cannot be used.
    """
    device = torch.device("cuda")
    ceilings = measure_ceilings(device)
    passes = {case: TimedPasses.of(case, device) for case in cases}
    works = {
        side: passes[case].work(PlannedOnce(module))
        for side, case, module in zip(("first", "second"), cases, modules, strict=True)
    }
    times = measure_interleaved(works, method, num_samples, seed)
    sides = []
    for (scenario, module), case, time in zip(names, cases, times.values(), strict=True):
        facts = {"scenario": scenario, "implementation": module, **case_facts(passes[case].forward.case)}
        facts |= time_facts(time, ceilings, facts["bytes_moved"], facts["operations"], facts["kv_dtype"])
        sides.append((time, facts))
    return sides


def ab_report(sides: Sequence[tuple[GpuTime, Mapping[str, Any]]], rule: Rule = INTERLEAVED) -> TableReport:
    """Return a table with one row for each of the two sides, and a line that says whether the second is faster or slower."""
    (first, second), facts = zip(*sides, strict=True)
    found = compare_samples(first.samples_us, second.samples_us, rule)
    method = f"{first.method}; {len(first.samples_us)} samples each, in turns; {first.device.facts()}"
    interval = "({:+.2f} to {:+.2f} %)".format(*found.interval_percent) if found.interval_percent else ""
    effect = f"{found.effect_percent:+.2f} % {interval}".rstrip()
    reason = f"; {found.reason}" if found.reason else ""
    return TableReport(
        above=(),
        table=make_table(COLUMNS, facts, say_once=()),
        below=(f"GPU time: {method}", f"The second is {found.speed.name}: {effect}, p = {found.p_value:.1g}{reason}"),
        record={
            **comparison_record(found),
            "sides": facts,
            "method": method,
        },
        exit_status=ExitStatus.WRONG if found.speed is Speed.SLOWER else ExitStatus.DONE,
    )


COLUMNS: Columns = {
    "scenario": lambda facts: words(facts["scenario"]),
    "implementation": lambda facts: words(facts["implementation"]),
    "median, µs": lambda facts: number(facts["median_us"], 2),
    "IQR, µs": lambda facts: number(facts["iqr_us"], 2),
    "floor, µs": lambda facts: number(facts["floor_us"], 2),
    "floor / median, %": lambda facts: number(facts["floor_percent"]),
    "launches": lambda facts: number(facts["launches"]),
}
