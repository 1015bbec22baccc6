"""The crossover map's points, works, tables and command line on a CPU; times on a GPU."""

from typing import Any

from lab.metadata import AttentionCall
from lab.workloads.batches import parse_batch
from studies.draft_extend_kernels import (
    DraftExtendKernels,
    case_of,
    crossover_table,
    crossovers,
)
from studies.variants import COLD


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
    case = case_of(parse_batch("4q2s1k"), AttentionCall.CONTEXT)
    assert (case.model.num_qo_heads, case.model.num_kv_heads, case.model.head_dim, case.page_size) == (32, 4, 128, 64)
    assert (case.draft_extend, case.q_lens, case.kv_lens) == (AttentionCall.CONTEXT, (2,) * 4, (1024,) * 4)
    assert case.bytes_moved == 2 * 4 * 1024 * 4 * 128 * 2 + 2 * 8 * 32 * 128 * 2


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
