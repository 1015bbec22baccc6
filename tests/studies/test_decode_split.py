"""A decode that is divided by length is judged in each of its calls."""

from typing import Any

import pytest

from lab import references
from studies.decode_split import facts_of, point_of
from studies.passes import gpu_works
from studies.variants import TimingPlan, measure_point
from tests.studies.simulated import SLOWER

REFERENCES = "lab.references"


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
