"""The fewest query rows at which the context call is faster than the decode call."""

from studies.draft_extend_kernels import crossovers


def test_a_call_of_the_same_time_is_not_faster() -> None:
    times_us = {1: (10.0, 20.0), 2: (10.0, 10.0), 4: (20.0, 10.0), 8: (30.0, 10.0)}
    rows = [
        {"requests": 1, "kv_len": 64, "q_len": q_len, "arm": arm, "median_us": median_us}
        for q_len, both in times_us.items()
        for arm, median_us in zip(("decode", "context"), both, strict=True)
    ]
    (found,) = crossovers(rows)
    assert found["context_faster_from_q_len"] == 4
