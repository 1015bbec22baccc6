"""Variants that decline are named with their reason; wrong ones have no time, and the others are measured without them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lab.timing import GpuWork
from studies import variants
from studies.targets import Figure, Target, score, target_rows, target_text
from studies.variants import Point, PointFailedError, PointRows, TimingPlan, Variant, measure_all, measure_point
from tests.studies.simulated import CEILINGS, measured_interleaved

PLAN = TimingPlan(CEILINGS, samples=3)


@pytest.fixture(autouse=True)
def simulated_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "measure_interleaved", measured_interleaved)


def of(name: str, **more: Any) -> Variant:
    return Variant(name, case=None, **more)


def point(*named: Variant, baseline: str = "") -> Point:
    return Point("2q4", named, {"q_len": 2}, baseline)


def checked(check: Any) -> GpuWork:
    return GpuWork(lambda: lambda: None, {}, 1, check=check)


def fails(arguments: Mapping[str, Any]) -> None:
    raise AssertionError("3 output vectors are wrong")


def raises(error: Exception) -> GpuWork:
    def call() -> None:
        raise error

    return GpuWork.of(call, 1)


RIGHT = checked(lambda arguments: None)


def measured(made_for: Point, **works: GpuWork) -> PointRows:
    return measure_point(made_for, lambda _: works, PLAN, lambda variant, work: {"name": variant.name})


def test_a_variant_that_declines_is_a_row_with_the_reason_and_the_others_are_measured() -> None:
    both = point(of("one", targets=(Target(Figure.SPEED, 1.05),)), of("two"), baseline="two")
    found = measured(both, one=RIGHT, two=raises(NotImplementedError("not on this GPU")))
    assert found.declined == [{"point": "2q4", "q_len": 2, "arm": "two", "reason": "not on this GPU"}]
    (row,) = found.rows
    assert (row["point"], row["arm"], row["name"], row["median_us"]) == ("2q4", "one", "one", 10.0)
    assert row["speed_of_baseline"] is None
    assert target_text(row) == "1.05 x the speed of two: nothing to compare with"
    assert not found.wrong


@pytest.mark.parametrize("error", [ModuleNotFoundError, FileNotFoundError, RuntimeError, TypeError, ValueError])
def test_a_missing_module_is_a_reason_for_flashinfers_variant_alone(error: type[Exception]) -> None:
    works = {"one": RIGHT, "two": raises(error("no ninja"))}
    found = measured(point(of("one"), of("two", needs_flashinfer=True)), **works)
    assert [row["arm"] for row in found.rows] == ["one"]
    assert [row["reason"] for row in found.declined] == [f"FlashInfer cannot run it here: {error.__name__}: no ninja"]
    with pytest.raises((PointFailedError, ModuleNotFoundError), match="no ninja"):
        measured(point(of("one"), of("two")), **works)


def test_an_error_that_stays_on_the_device_is_no_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_again() -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fails_again)
    with pytest.raises(PointFailedError, match="2q4: RuntimeError: illegal memory access"):
        measured(point(of("two", needs_flashinfer=True)), two=raises(ValueError("some kernel failed")))


def test_a_wrong_variant_has_no_time_and_the_others_are_measured_without_it() -> None:
    named = point(of("wrong"), of("right"), of("unchecked"))
    found = measured(named, wrong=checked(fails), right=RIGHT, unchecked=checked(None))
    assert [(row["arm"], row["median_us"]) for row in found.rows] == [("right", 10.0), ("unchecked", 11.0)]
    assert [(row["arm"], row["reason"]) for row in found.wrong] == [("wrong", "3 output vectors are wrong")]
    alone = measured(point(of("wrong")), wrong=checked(fails))
    assert (alone.rows, len(alone.wrong)) == ([], 1)


def test_an_error_of_a_check_is_nobodys_verdict() -> None:
    def breaks(arguments: Mapping[str, Any]) -> None:
        raise RuntimeError("no such address")

    with pytest.raises(PointFailedError, match="no such address"):
        measured(point(of("breaks")), breaks=checked(breaks))
    assert not issubclass(PointFailedError, AssertionError)


def test_a_time_that_the_gpu_cannot_reach_is_refused() -> None:
    too_much = GpuWork(lambda: lambda: None, {}, 10**9)
    found = measured(point(of("one"), of("two")), one=too_much, two=RIGHT)
    assert [row["arm"] for row in found.rows] == ["two"]
    assert [row["reason"].startswith("its time is refused: 10.00 µs") for row in found.wrong] == [True]


def test_a_study_that_needs_all_variants_says_which_is_wrong() -> None:
    def rows(**works: GpuWork) -> list[dict[str, Any]]:
        return measure_all(point(of("one"), of("two")), lambda _: works, PLAN, lambda variant, work: {"q": 1})

    assert [(row["point"], row["arm"], row["q"], row["median_us"]) for row in rows(one=RIGHT, two=RIGHT)] == [
        ("2q4", "one", 1, 10.0),
        ("2q4", "two", 1, 11.0),
    ]
    with pytest.raises(PointFailedError, match="2q4: WrongWorkError: two: 3 output vectors are wrong"):
        rows(one=RIGHT, two=checked(fails))


def test_where_all_variants_are_needed_none_is_called_before_it_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier call wrote would pass the check of a call that writes nothing."""
    called: list[str] = []
    work = GpuWork.of(lambda: called.append("a call"), 1)
    measure_all(point(of("one")), lambda _: {"one": work}, PLAN, lambda *_: {})
    assert len(called) == 2  # both by the measurement
    called.clear()
    measured(point(of("one")), one=work)
    assert len(called) == 3


def test_a_target_is_passed_by_what_was_reached_and_not_by_what_it_rounds_to() -> None:
    for bound, reached, passed in ((1.02, 1.01996, False), (1.0, 1.0, True)):
        (target,) = target_rows((Target(Figure.SPEED, bound),), {Figure.SPEED: reached}, "two")
        assert target["passed"] is passed
    assert score([{"targets": [{"passed": None}, target]}]) == {"passed": 1, "missed": 0, "not_compared": 1}
