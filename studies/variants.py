"""Measure variants: different ways to do the same work, whose calls are interleaved. The variants that are measured together
form a *point*.

A variant that declines a point, or whose results are wrong, has no time. The remaining variants are measured without it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from lab.timing.forward import time_facts
from lab.timing.gpu_time import GpuTime, WrongWorkError, measure_interleaved
from lab.timing.method import L2, Clock, Method
from lab.timing.roofline import Ceilings, roofline
from lab.timing.sampling import RefusedTimeError
from lab.timing.work import GpuWork
from studies.targets import Figure, Target, target_rows

COLD = Method(Clock.GRAPH, L2.COLD_ROTATION)
WARM = Method(Clock.GRAPH, L2.WARM)
SAMPLES = 15
OUTCOMES = ("rows", "declined", "wrong")  # the lists of `PointRows`
JUDGED = "every output vector of every request, before and after it was timed, on every buffer"
# What FlashInfer raises where a module cannot be imported, built or loaded, a function is lacking, or a call is refused.
MISSING_MODULE = (ImportError, OSError, RuntimeError, TypeError, ValueError)

Works = Mapping[str, GpuWork]  # by the name of the variant
Time = TypeVar("Time")  # such as GpuTime or HostTime
Named = TypeVar("Named")


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a point (variants that are measured together).

    Attributes:
        case: the case from which the study makes the work, such as a forward pass or a draft's scenario.
        planned: the module's `plan` takes the call's arguments and returns the call that is timed.
        needs_flashinfer: FlashInfer may be unable to load or build its kernel here, which is then a reason to decline.
    """

    name: str
    case: Any
    module: str = ""
    targets: tuple[Target, ...] = ()
    planned: bool = False
    needs_flashinfer: bool = False


@dataclass(frozen=True)
class Point:
    """Variants that are measured together. The speed of each is compared with the variant `baseline`, or if "" with none."""

    name: str
    variants: tuple[Variant, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = ""

    @property
    def row(self) -> dict[str, Any]:
        return {"point": self.name, **self.facts}


MakeWorks = Callable[[Sequence[Variant]], Works]
FactsOf = Callable[[Variant, GpuWork], Mapping[str, Any]]
RowOf = Callable[[Variant, GpuWork, Mapping[str, Time]], Mapping[str, Any]]


@dataclass(frozen=True)
class TimingPlan:
    """The method of GPU times, the samples of each variant, and the ceilings of the GPU."""

    ceilings: Ceilings
    method: Method = COLD
    samples: int = SAMPLES

    def measure(self, works: Works) -> dict[str, GpuTime]:
        return measure_interleaved(works, method=self.method, samples=self.samples)

    def row(
        self, point: Point, facts_of: FactsOf, variant: Variant, work: GpuWork, times: Mapping[str, GpuTime]
    ) -> dict[str, Any]:
        facts, time = dict(facts_of(variant, work)), times[variant.name]
        floor = (facts.get("floor_bytes", work.bytes_moved), work.operations)
        facts |= time_facts(time, self.ceilings, *floor, str(facts.get("kv_dtype", "")))
        if not point.baseline:
            return facts
        speed = times[point.baseline].median_us / time.median_us if point.baseline in times else None
        bandwidth = roofline(time.median_us, *floor, self.ceilings).bandwidth_percent
        reached = {Figure.SPEED: speed, Figure.BANDWIDTH: bandwidth}
        return facts | {
            "baseline": point.baseline,
            "speed_of_baseline": None if speed is None else round(speed, 3),
            "targets": target_rows(variant.targets, reached, point.baseline),
        }


def chosen(points: Iterable[Named], only: Sequence[str], name_of: Callable[[Named], str]) -> list[Named]:
    """Return the points with these names, in the order of `points`; without names, all. Raises ValueError."""
    listed = list(points)
    unknown = sorted(set(only) - {name_of(point) for point in listed})
    if unknown:
        raise ValueError(f"no point is called {unknown[0]!r}; there are {', '.join(map(name_of, listed))}")
    return [point for point in listed if not only or name_of(point) in only]


class PointFailedError(Exception):
    """The measurement of a point failed, and not because of a refusal. The message names the point."""


@contextmanager
def named_in_failures(point: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise PointFailedError(f"{point}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class PointRows:
    """The rows of a point's variants: rows with times, and rows with the reason why a variant has no time."""

    rows: Sequence[dict[str, Any]] = ()
    declined: Sequence[dict[str, Any]] = ()
    wrong: Sequence[dict[str, Any]] = ()

    def by_list(self, rows: str = "rows") -> dict[str, Sequence[dict[str, Any]]]:
        return {rows: self.rows, "declined": self.declined, "wrong": self.wrong}


def declined_by(variants: Sequence[Variant], works: Works) -> dict[str, str]:
    """Call each variant once. Return the reason for each variant whose call is refused or whose module is missing."""
    reasons = {}
    for variant in variants:
        try:
            works[variant.name].call()()
        except NotImplementedError as error:
            reasons[variant.name] = str(error)
        except MISSING_MODULE as error:
            if not variant.needs_flashinfer:
                raise
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # raises anew what is no missing module, such as a wrong address
            reasons[variant.name] = f"FlashInfer cannot run it here: {type(error).__name__}: {str(error).strip()[:500]}"
    return reasons


def measure_variants(
    point: Point, make: MakeWorks, measure: Callable[[Works], dict[str, Time]], row_of: RowOf[Time]
) -> PointRows:
    """Measure interleaved variants of a point by any clock. For a variant without a time, record the reason.

    `measure` checks every result before and after the timing. If a variant is wrong, the other variants are measured again
    without it.

    Raises:
        PointFailedError: an error that is no refusal, no missing module and no wrong result.
    """
    with named_in_failures(point.name):
        works = make(point.variants)
        declined = declined_by(point.variants, works)
        right = {name: work for name, work in works.items() if name not in declined}
        times: dict[str, Time] = {}
        wrong: dict[str, str] = {}
        while right and not times:
            try:
                times = measure(right)
            except WrongWorkError as error:
                wrong[error.name] = error.reason
                del right[error.name]
    rows = []
    for variant in point.variants:
        if variant.name in times:
            try:
                rows.append(point.row | {"arm": variant.name} | dict(row_of(variant, works[variant.name], times)))
            except RefusedTimeError as error:
                wrong[variant.name] = f"its time is refused: {error}"
    untimed = (
        [{**point.row, "arm": name, "reason": reason} for name, reason in reasons.items()]
        for reasons in (declined, wrong)
    )
    return PointRows(rows, *untimed)


def measure_point(point: Point, make: MakeWorks, plan: TimingPlan, facts_of: FactsOf) -> PointRows:
    """Measure the variants of a point on the GPU. The floor is computed from "floor_bytes" of `facts_of`, if it is there."""
    return measure_variants(point, make, plan.measure, partial(plan.row, point, facts_of))


def measure_all(point: Point, make: MakeWorks, plan: TimingPlan, facts_of: FactsOf) -> list[dict[str, Any]]:
    """Measure the GPU times of the interleaved variants of a point. Return one row per variant; each must have a time.

    No variant is called before it is captured, so the first check sees only what the captured call has written. Raises
    PointFailedError if a variant declines, is wrong, or cannot be measured.
    """
    with named_in_failures(point.name):
        works = make(point.variants)
        times = plan.measure(works)
    return [
        point.row | {"arm": each.name} | plan.row(point, facts_of, each, works[each.name], times)
        for each in point.variants
    ]
