"""Decode divided by length: its points, judged variants, savings and command line on a CPU; times on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import references
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import Ceilings, measure_ceilings
from lab.workloads.traces import TracedRequest
from studies.decode_split import SCENARIOS, DecodeSplitStudy, facts_of, point_of, savings, variant_name
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE, gpu_works, works_of
from studies.variants import Point, PointRows, TimingPlan, Variant, measure_point
from tests.commands.command import run
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.simulated import SLOWER, hold_right

CPU = torch.device("cpu")
TRACE = [TracedRequest(0.0, 1000 + 10 * number, 1000) for number in range(64)]
REFERENCES = "lab.references"


def small_point(module: str = REFERENCES, name: str = "target_verify/tiny/q2s70_2q2s9_q2s33") -> Point:
    return point_of(name, module, (2, 4))


def test_the_default_points_are_a_trace_an_unequal_batch_and_an_equal_one() -> None:
    points = [point_of(name, FLASHINFER_MODULE, DecodeSplitStudy.splits, TRACE) for name in SCENARIOS]
    assert [(len(point.variants[0].case.q_lens), point.row["q_len"]) for point in points] == [(64, 1), (64, 4)] * 3
    assert [point.row["longest_kv_len"] for point in points[2:]] == [81920, 81920, 4096, 4096]
    for point in points:
        assert [variant.case.decode_splits for variant in point.variants] == [1, *DecodeSplitStudy.splits]
        assert [variant.name for variant in point.variants] == ["1 call", "2 calls", "4 calls", "8 calls"]
        assert point.baseline == "1 call"
        assert {replace(variant.case, decode_splits=1) for variant in point.variants} == {point.variants[0].case}
    assert {point.variants[0].case.mode for point in points} == {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY}


@IN_INTERPRETER
@pytest.mark.parametrize("module", [REFERENCES, PORTABLE_MODULE])
@pytest.mark.parametrize("name", ["target_verify/tiny/q2s70_2q2s9_q2s33", "decode/tiny/q1s70_2q1s9_q1s33"])
def test_every_variant_is_right_in_an_output_of_its_own(name: str, module: str) -> None:
    works = works_of(small_point(module, name).variants, CPU)
    for work in works.values():
        hold_right(work)
    assert len({work.arguments["out"].data_ptr() for work in works.values()}) == 3
    assert len({work.arguments["cache"].storage.data_ptr() for work in works.values()}) == 1
    splits = [work.prepare.__self__.settings.decode_splits for work in works.values()]  # type: ignore[attr-defined]
    assert [each > 1 for each in splits] == [False, True, True]


def measure(point: Point, ceilings: Ceilings = SLOWER) -> PointRows:
    return measure_point(point, gpu_works, TimingPlan(ceilings, samples=3), facts_of)


@pytest.mark.usefixtures("on_cpu")
def test_rows_say_the_calls_and_the_speed_of_one() -> None:
    found = measure(small_point())
    assert [(row["arm"], row["calls"], row["median_us"]) for row in found.rows] == [
        ("1 call", 1, 10.0),
        ("2 calls", 2, 11.0),
        ("4 calls", 4, 12.0),
    ]
    assert [row["speed_of_baseline"] for row in found.rows] == [1.0, 0.909, 0.833]
    assert not found.declined
    assert not found.wrong


@pytest.mark.usefixtures("on_cpu")
def test_an_variant_that_is_wrong_in_several_calls_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the first call's tables for all calls of a part is right in one call alone."""
    right, first = references.trtllm_batch_decode_with_kv_cache, {}

    def remembering(**arguments: Any) -> Any:
        shape = tuple(arguments["block_tables"].shape)
        if shape[0] < 4:  # of the requests
            arguments["block_tables"] = first.setdefault(shape, arguments["block_tables"].clone())
        return right(**arguments)

    monkeypatch.setattr(references, "trtllm_batch_decode_with_kv_cache", remembering)
    found = measure(small_point())
    assert [row["arm"] for row in found.rows] == ["1 call"]
    assert [row["arm"] for row in found.wrong] == ["2 calls", "4 calls"]
    assert all("output vectors are wrong" in row["reason"] for row in found.wrong)


def test_savings_are_of_the_fastest_number_of_calls() -> None:
    def row(point: str, calls: int, median_us: float) -> dict[str, Any]:
        return {"point": point, "arm": variant_name(calls), "calls": calls, "median_us": median_us}

    rows = [row("a", 1, 200.0), row("a", 2, 150.0), row("a", 4, 160.0), row("b", 1, 100.0), row("b", 2, 110.0)]
    assert savings([*rows, row("c", 2, 5.0)]) == [
        {"point": "a", "calls": 2, "whole_us": 200.0, "saved_us": 50.0, "saved_percent": 25.0},
        {"point": "b", "calls": 1, "whole_us": 100.0, "saved_us": 0.0, "saved_percent": 0.0},
    ]


def test_the_command_records_points_and_savings(command: Command) -> None:
    def measured(point: Point) -> PointRows:
        def row(variant: Variant) -> dict[str, Any]:
            number = variant.case.decode_splits
            times = {"median_us": 100.0 / number, "iqr_us": 1.0, "floor_percent": 50.0, "speed_of_baseline": number}
            return point.row | {"arm": variant.name, "calls": number, "kernel": "k", **times}

        return PointRows([row(variant) for variant in point.variants])

    only = "decode/tiny/2q1s70"
    done = command(f"decode-split lab.references --splits 1,2,2 --only {only}", measured)
    assert done.status == 0
    assert [row["arm"] for row in done.recorded["rows"]] == ["1 call", "2 calls"]
    assert done.recorded["rows"][0]["point"] == f"{only} on lab.references"
    assert done.recorded["savings"] == [
        {"point": f"{only} on lab.references", "calls": 2, "whole_us": 100.0, "saved_us": 50.0, "saved_percent": 50.0}
    ]


@pytest.mark.parametrize("wrong", ["--splits 0", "--only extend/tiny/q5s70", "--only decode/nobody/q1s70"])
def test_a_scenario_that_is_not_divided_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"experiments decode-split {wrong}") == 2
    assert "Error" in (said := capsys.readouterr().err) or "lab: " in said


@pytest.mark.gpu
def test_on_a_gpu_every_number_of_calls_is_right_and_has_a_time() -> None:
    found = measure(small_point(PORTABLE_MODULE, "decode/tiny/q1s2k_7q1s99"), measure_ceilings(torch.device("cuda")))
    assert [row["arm"] for row in found.rows] == ["1 call", "2 calls", "4 calls"]
    assert not found.wrong
