"""The crossover map's points, works, tables and command line on a CPU; times on a GPU."""

from typing import Any

import pytest
import torch

from lab.metadata import AttentionCall
from lab.timing import GpuWork
from lab.workloads.batches import parse_batch
from studies.draft_extend_kernels import (
    DraftExtendKernels,
    case_of,
    crossover_table,
    crossovers,
    facts_of,
    point_of,
)
from studies.passes import gpu_works, works_of
from studies.variants import COLD, Point, PointRows, TimingPlan, measure_point
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.simulated import CEILINGS, hold_right

DECODE, CONTEXT = AttentionCall.DECODE, AttentionCall.CONTEXT
# Implementations that run on a CPU in place of FlashInfer's.
ON_CPU = {
    "decode": (DECODE, "lab.references"),
    "context": (CONTEXT, "lab.references"),
    "portable decode": (DECODE, "lab.kernels.portable"),
}
SMALL = parse_batch("2q4s70")


def measure(point: Point) -> PointRows:
    return measure_point(point, gpu_works, TimingPlan(CEILINGS, samples=3), facts_of)


def test_the_default_map_is_a_full_grid_and_what_is_too_large_says_so() -> None:
    study = DraftExtendKernels()
    fitting, skipped = study.split
    assert len(fitting) + len(skipped) == 6 * 4 * 5
    assert {(row["requests"], row["kv_len"]) for row in skipped} == {(64, 65536), (64, 131072)}
    assert all(sum(batch.kv_lens) <= study.most_keys for batch in fitting)
    assert skipped[0] == {
        "point": "64q1s64k",
        "q_len": 1,
        "requests": 64,
        "kv_len": 65536,
        "reason": "4,194,304 keys, 8.6 GB of K and V, are more than the bound of 2,097,152 keys",
    }


def test_the_geometry_is_a_group_of_eight() -> None:
    case = case_of(parse_batch("4q2s1k"), CONTEXT)
    assert (case.model.num_qo_heads, case.model.num_kv_heads, case.model.head_dim, case.page_size) == (32, 4, 128, 64)
    assert (case.draft_extend, case.q_lens, case.kv_lens) == (CONTEXT, (2,) * 4, (1024,) * 4)
    assert case.bytes_moved == 2 * 4 * 1024 * 4 * 128 * 2 + 2 * 8 * 32 * 128 * 2


def tensors_of(work: GpuWork) -> dict[str, int]:
    arguments = work.arguments
    tensors = {
        "query": arguments["query"],
        "out": arguments["out"],
        "cache": arguments["cache"].storage,
        "table": arguments["metadata"].page_table,
    }
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@IN_INTERPRETER
def test_every_variant_is_right_in_an_output_of_its_own() -> None:
    point = point_of(SMALL, ON_CPU)
    works = works_of(point.variants, torch.device("cpu"))
    for variant in point.variants:
        work, (call, _) = works[variant.name], ON_CPU[variant.name]
        backend = work.prepare.__self__  # type: ignore[attr-defined]
        plan = backend.plan_calls(
            work.arguments["batch"], work.arguments["layer"], variant.case.dtype, variant.case.kv_dtype
        )
        assert [each.call for each in plan] == [call]
        assert variant.case.draft_extend is call
        hold_right(work)
    addresses = [tensors_of(work) for work in works.values()]
    assert len({id(work.redraw) for work in works.values()}) == 1  # one truth
    for name in addresses[0]:
        assert len({each[name] for each in addresses}) == (len(ON_CPU) if name == "out" else 1)


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_a_point_makes_a_row_per_variant_with_its_floor() -> None:
    outcome = measure(point_of(SMALL, ON_CPU))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert {row["method"] for row in outcome.rows} == {str(COLD)}
    assert [(row["arm"], row["call"], row["median_us"]) for row in outcome.rows] == [
        ("decode", DECODE.value, 10.0),
        ("context", CONTEXT.value, 11.0),
        ("portable decode", DECODE.value, 12.0),
    ]
    for row in outcome.rows:
        assert (row["point"], row["q_len"], row["requests"], row["kv_len"]) == ("2q4s70", 4, 2, 70)
        assert row["samples_us"] == [row["median_us"]] * 3
        assert row["floor_us"] == pytest.approx(row["bytes_moved"] / 4000.0 / 1e3, abs=1e-3)


def rows_at(requests: int, kv_len: int, times_us: dict[int, tuple[float | None, float | None]]) -> list[dict[str, Any]]:
    return [
        {"arm": variant, "requests": requests, "kv_len": kv_len, "q_len": q_len, "median_us": time_us}
        for q_len, pair in times_us.items()
        for variant, time_us in zip(("decode", "context"), pair, strict=True)
        if time_us is not None
    ]


def test_where_the_context_call_overtakes() -> None:
    rows = rows_at(1, 4096, {1: (10.0, 40.0), 4: (20.0, 30.0), 16: (50.0, 40.0), 32: (90.0, 45.0)})
    rows += rows_at(4, 4096, {1: (10.0, 40.0), 4: (20.0, None)}) + rows_at(64, 4096, {1: (None, 5.0)})
    assert crossovers(rows) == [
        {
            "requests": 1,
            "kv_len": 4096,
            "context_over_decode": {1: 4.0, 4: 1.5, 16: 0.8, 32: 0.5},
            "context_faster_from_q_len": 16,
        },
        {"requests": 4, "kv_len": 4096, "context_over_decode": {1: 4.0}, "context_faster_from_q_len": None},
    ]
    table = crossover_table(rows, str(COLD))
    assert (len(table.rows), len(table.columns)) == (2, 2 + 4)
    assert [row[4].text for row in table.rows] == ["50.0 / 40.0 (0.80)", ""]


def test_the_command_line_writes_every_point_and_what_was_left_out(command: Command) -> None:
    def measured(point: Point) -> PointRows:
        facts = point.facts
        rows = rows_at(facts["requests"], facts["kv_len"], {facts["q_len"]: (10.0, 30.0)})
        return PointRows(rows, [point.row | {"arm": "decode", "reason": "no"}])

    line = "draft-extend-kernels --q-lens 2,4 --requests 1,4 --keys 1024 --most-keys 2048 --samples 5"
    done = command(line, measured)
    recorded = done.recorded
    assert (done.status, done.plans) == (0, [TimingPlan(CEILINGS, COLD, 5)] * 2)
    assert [(row["q_len"], row["arm"]) for row in recorded["rows"]] == [
        (q_len, variant) for q_len in (2, 4) for variant in ("decode", "context")
    ]
    assert [row["point"] for row in recorded["skipped"]] == ["4q2s1k", "4q4s1k"]
    assert len(recorded["declined"]) == 2
    assert recorded["crossovers"][0]["context_over_decode"] == {"2": 3.0, "4": 3.0}
    assert recorded["most_keys"] == 2048
    assert "10.0 / 30.0 (3.00)" in done.printed
    assert "declined: q4s1k, decode: no" in done.printed
    assert "2 declined, 2 skipped" in done.printed


@pytest.mark.gpu
def test_a_point_is_measured_on_both_calls() -> None:
    both = {call.name.lower(): (call, "lab.kernels.portable") for call in (DECODE, CONTEXT)}
    outcome = measure(point_of(parse_batch("4q4s1k"), both))
    assert (outcome.declined, outcome.wrong) == ([], [])
    assert [row["arm"] for row in outcome.rows] == ["decode", "context"]
    assert all(row["median_us"] > 0 and row["buffer_copies"] > 1 for row in outcome.rows)
