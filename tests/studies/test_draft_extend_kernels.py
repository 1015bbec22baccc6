"""Where the context call overtakes the decode call."""

from typing import Any

from studies.draft_extend_kernels import (
    crossover_table,
    crossovers,
)
from studies.variants import COLD


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
