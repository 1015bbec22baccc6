"""The study's claim and its points; its GPU times are the benchmarks'."""

import pytest
import torch

from lab.workloads.traces import own_trace
from studies import draft_steps, variants
from studies.draft_scenarios import draft_scenario
from studies.draft_steps import (
    GRID,
    HOST_POINTS,
    LONG,
    TRACED,
    VARIANTS,
    facts_of,
    measure_host,
    point_of,
    works_of,
)
from studies.draft_work import draft_work
from studies.variants import WARM, TimingPlan, measure_all
from tests.devices import IN_INTERPRETER
from tests.studies.simulated import CEILINGS, measured_interleaved


def test_every_variant_is_a_scenario_at_every_point() -> None:
    assert len(GRID) == 64
    for point in (*GRID, *LONG, *TRACED, *HOST_POINTS):
        for variant in VARIANTS:
            draft_scenario(variant.format(point))


@IN_INTERPRETER
def test_a_point_makes_a_row_per_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(draft_steps, "draft_work", lambda scenario, device: draft_work(scenario, cpu))
    monkeypatch.setattr(variants, "measure_interleaved", measured_interleaved)
    point = point_of("2x63/steps3", own_trace())
    rows = measure_all(point, works_of, TimingPlan(CEILINGS, WARM, 3), facts_of)
    assert [row["scenario"] for row in rows] == [variant.format("2x63/steps3") for variant in VARIANTS]
    assert [row["median_us"] for row in rows] == [10.0 + place for place in range(len(VARIANTS))]
    assert {row["kernel"] for row in rows} >= {"serial", "mha one_launch", "mla per_step", "mha per_step eager"}
    assert all(row["bytes_moved"] > 0 and row["point"] == "2x63/steps3" for row in rows)
    assert {row["method"] for row in rows} == {str(WARM)}


@pytest.mark.gpu
def test_a_point_is_measured_and_the_lists_cost_launches() -> None:
    point = point_of("4x1k/steps3", own_trace())
    rows = measure_all(point, works_of, TimingPlan(CEILINGS, WARM, 3), facts_of)
    launches = {row["kernel"]: row["launches"] for row in rows}
    assert launches["serial"] == launches["spread"] == launches["mha one_launch"] == launches["mla one_launch"] == 1
    assert launches["mha per_step"] == launches["mla per_step"] == 2
    assert launches["mha common_template"] == launches["mla common_template"] == 3
    assert launches["mha common_template eager"] > launches["mha per_step eager"] > 2
    hosts = measure_host(point)
    assert len(hosts) == len(VARIANTS) + sum(not variant.endswith("/eager") for variant in VARIANTS)
    assert all(row["host_us"] > 0 for row in hosts)
