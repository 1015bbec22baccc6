"""Variants that decline are named with their reason; wrong ones have no time, and the others are measured without them."""

from collections.abc import Mapping
from typing import Any

import pytest

from lab.timing import GpuTime, GpuWork
from lab.timing.gpu_time import check_named
from lab.timing.method import L2, Clock, Method
from lab.workloads.inputs.redraw import Seeds
from studies import variants
from studies.variants import (
    Point,
    PointFailedError,
    TimingPlan,
    Variant,
    Works,
    declined_by,
    measure_all,
    measure_right_ones,
)
from tests.studies.simulated import CEILINGS

METHOD = Method(Clock.GRAPH, L2.COLD_ROTATION)


def test_a_kernel_that_declines_is_named_with_its_reason() -> None:
    def declines() -> Any:
        raise NotImplementedError("not on this GPU")

    works = {"runs": GpuWork.of(lambda: None, 1), "declines": GpuWork(lambda: declines, {}, 1)}
    listed = [Variant(name, case=None) for name in works]
    assert declined_by(listed, works) == {"declines": "not on this GPU"}
    with pytest.raises(KeyError):
        declined_by([Variant("nobody's", case=None)], works)


def checked(check: Any) -> GpuWork:
    return GpuWork(lambda: lambda: None, {}, 1, check=check)


def test_a_study_that_needs_all_variants_says_which_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "measure_interleaved", lambda works, method, samples: measured(works))
    point = Point("2q4", (Variant("one", None), Variant("two", None)))

    def rows(**works: GpuWork) -> list[dict[str, Any]]:
        return measure_all(point, lambda _: works, TimingPlan(CEILINGS), lambda variant, work: {"case": variant.case})

    right = checked(lambda arguments: None)
    assert [(row["point"], row["arm"], row["median_us"]) for row in rows(one=right, two=right)] == [
        ("2q4", "one", 2.0),
        ("2q4", "two", 2.0),
    ]
    with pytest.raises(PointFailedError, match="2q4: WrongWorkError: two: 3 output vectors are wrong"):
        rows(one=right, two=checked(fails))


def test_where_all_variants_are_needed_none_is_called_before_it_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call wrote would pass the check of a call that writes nothing."""
    called: list[str] = []
    work = GpuWork.of(lambda: called.append("too early"), 1)
    monkeypatch.setattr(variants, "measure_interleaved", lambda works, method, samples: measured(works))
    measure_all(Point("2q4", (Variant("one", None),)), lambda _: {"one": work}, TimingPlan(CEILINGS), lambda *_: {})
    assert not called


def fails(arguments: Mapping[str, Any]) -> None:
    raise AssertionError("3 output vectors are wrong")


def measured(works: Works) -> dict[str, GpuTime]:
    for name, work in works.items():
        check_named(name, [work], Seeds(0, 0))
    return {name: GpuTime((float(len(works)),), METHOD, 1) for name in works}


def test_a_wrong_variant_has_no_time_and_the_others_are_measured_without_it() -> None:
    works = {"right": checked(lambda arguments: None), "wrong": checked(fails), "unchecked": checked(None)}
    times, wrong = measure_right_ones(works, measured)
    assert {name: time.median_us for name, time in times.items()} == {"right": 2.0, "unchecked": 2.0}
    assert wrong == {"wrong": "3 output vectors are wrong"}
    assert measure_right_ones({"wrong": checked(fails)}, measured) == ({}, wrong)
    assert measure_right_ones({}, measured) == ({}, {})


def test_an_error_of_another_kind_is_nobodys_verdict() -> None:
    def breaks(arguments: Mapping[str, Any]) -> None:
        raise RuntimeError("no such address")

    with pytest.raises(RuntimeError, match="no such address"):
        measure_right_ones({"breaks": checked(breaks)}, measured)
    assert not issubclass(PointFailedError, AssertionError)
