"""Decode divided by length: its points, judged variants, savings and command line on a CPU; times on a GPU."""

from dataclasses import replace
from typing import Any

import pytest

from lab import references
from lab.metadata.engine.forward_mode import ForwardMode
from lab.workloads.traces import TracedRequest
from studies.decode_split import SCENARIOS, DecodeSplitStudy, facts_of, point_of
from studies.passes import FLASHINFER_MODULE, gpu_works
from studies.variants import TimingPlan, measure_point
from tests.studies.simulated import SLOWER

TRACE = [TracedRequest(0.0, 1000 + 10 * number, 1000) for number in range(64)]
REFERENCES = "lab.references"


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


@pytest.mark.usefixtures("on_cpu")
def test_a_variant_that_is_wrong_in_several_calls_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes the first call's tables for all calls of a part is right in one call alone."""
    right, first = references.trtllm_batch_decode_with_kv_cache, {}

    def remembering(**arguments: Any) -> Any:
        shape = tuple(arguments["block_tables"].shape)
        if shape[0] < 4:  # of the requests
            arguments["block_tables"] = first.setdefault(shape, arguments["block_tables"].clone())
        return right(**arguments)

    monkeypatch.setattr(references, "trtllm_batch_decode_with_kv_cache", remembering)
    point = point_of("target_verify/tiny/q2s70_2q2s9_q2s33", REFERENCES, (2, 4))
    found = measure_point(point, gpu_works, TimingPlan(SLOWER, samples=3), facts_of)
    assert [row["arm"] for row in found.rows] == ["1 call"]
    assert [row["arm"] for row in found.wrong] == ["2 calls", "4 calls"]
    assert all("output vectors are wrong" in row["reason"] for row in found.wrong)
