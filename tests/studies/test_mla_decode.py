"""MLA decode's points, floors, judged variants, target and command line on a CPU; times on a GPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.kernels import support
from lab.kernels.peers import flashinfer_mla
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import GpuWork, roofline
from lab.workloads.mla_case import MLACase
from studies import study
from studies.mla_decode import (
    PLANNED,
    PORTABLE,
    TARGETS,
    WRAPPER,
    MLADecode,
    facts_of,
    point_of,
    variants_of,
)
from studies.passes import gpu_works, kernel_of, works_of
from studies.recording import table_of
from studies.targets import TIME_COLUMNS, Figure, Target, target_rows, target_text
from studies.variants import COLD, Point, PointRows, TimingPlan, Variant, measure_point
from tests.commands.command import run
from tests.devices import IN_INTERPRETER
from tests.studies.simulated import CEILINGS, SLOW, hold_right

CPU = torch.device("cpu")


def reference(case: MLACase) -> Variant:
    return Variant("reference", case, "lab.references")


def measure(point: Point, samples: int = 3) -> PointRows:
    """GPU times against a slow GPU's ceilings."""
    return measure_point(point, gpu_works, TimingPlan(SLOW, samples=samples), facts_of)


def small(q_len: int = 1, **changes: Any) -> MLACase:
    """Two requests of 70 keys, 2 heads, entries of 16 + 16."""
    (case,) = MLADecode(shapes=((2, 70),), heads=(2,), q_lens=(q_len,)).cases()
    return replace(case, kv_lora_rank=16, qk_rope_head_dim=16, **changes)


def test_the_default_points() -> None:
    cases = MLADecode().cases()
    assert [(len(case.q_lens), case.kv_lens[0], case.num_qo_heads) for case in cases] == [
        (64, 8192, 16),
        (64, 8192, 128),
        (8, 81920, 16),
        (8, 81920, 128),
    ]
    for case in cases:
        assert (case.mode, set(case.q_lens)) == (ForwardMode.DECODE, {1})
        assert (case.head_dim, case.kv_lora_rank, case.page_size) == (576, 512, 64)
        assert (case.dtype, case.kv_dtype) == (torch.bfloat16, torch.bfloat16)


def test_more_rows_verify_and_their_keys_count_the_new_tokens() -> None:
    decode, verify = MLADecode(shapes=((8, 81920),), heads=(16,), q_lens=(1, 4), kv_dtype="e4m3").cases()
    assert (decode.mode, decode.prefix_lens[0]) == (ForwardMode.DECODE, 81919)
    assert (verify.mode, verify.prefix_lens[0], verify.kv_lens[0]) == (ForwardMode.TARGET_VERIFY, 81916, 81920)
    assert {decode.kv_dtype, verify.kv_dtype} == {torch.float8_e4m3fn}
    assert point_of(verify).row == {
        "point": "8q4s80k/16 heads",
        "q_len": 4,
        "requests": 8,
        "kv_len": 81920,
        "heads": 16,
    }


@pytest.mark.parametrize(
    ("heads", "bytes_moved", "operations", "floor_us", "bound"),
    [
        # 64 · 8,192 entries of 1,152 bytes are 603,979,776; 64 rows of 16 heads, 576 + 512 elements of 2 bytes, are 2,228,224.
        (16, 606_208_000, 18_253_611_008, 151.552, "memory"),
        # 128 heads: 17,825,792 bytes of rows; 2 · 128 · 524,288 · 1,088 operations take longer than the bytes' 155.451 µs.
        (128, 621_805_568, 146_028_888_064, 182.536, "matrix"),
    ],
)
def test_floors_by_hand(heads: int, bytes_moved: int, operations: int, floor_us: float, bound: str) -> None:
    (case,) = MLADecode(shapes=((64, 8192),), heads=(heads,)).cases()
    assert (case.bytes_moved, case.operations) == (bytes_moved, operations)
    line = roofline(1000.0, case.bytes_moved, case.operations, CEILINGS)
    assert (line.floor_us, line.floor_bound) == (pytest.approx(floor_us, abs=1e-3), bound)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The wrapper's plans on an SM90; what is planned is the reference's call."""
    found: list[dict[str, Any]] = []

    def plan(**arguments: Any) -> Callable[[], Any]:
        found.append(arguments)
        return partial(references.trtllm_batch_decode_with_kv_cache_mla, **arguments)

    monkeypatch.setattr(flashinfer_mla, f"plan_{flashinfer_mla.NAME}", plan)
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))
    return found


@IN_INTERPRETER
@pytest.mark.parametrize("case", [small(), small(4), small(4, kv_dtype=torch.float8_e4m3fn)], ids=repr)
def test_every_variant_is_right_in_an_output_of_its_own(case: MLACase, plans: list[dict[str, Any]]) -> None:
    works = works_of((*variants_of(case), reference(case)), CPU)
    assert list(works) == [PORTABLE, WRAPPER, "reference"]
    for work in works.values():
        hold_right(work)
    assert len(plans) == 1  # for two calls
    assert len({work.arguments["out"].data_ptr() for work in works.values()}) == 3
    # What plans on the host has tensors of its own, whose lengths and page ids stay.
    assert len({work.arguments["cache"].storage.data_ptr() for work in works.values()}) == 2
    assert len({work.arguments["metadata"].block_kv_indices.data_ptr() for work in works.values()}) == 2


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu", "plans")
def test_a_point_makes_a_row_per_variant_with_its_floor_and_its_share_of_the_wrapper() -> None:
    point = measure(point_of(small()))
    assert (point.declined, point.wrong) == ([], [])
    assert {row["method"] for row in point.rows} == {str(COLD)}
    portable, wrapper = point.rows
    assert (portable["arm"], portable["kernel"], portable["plan"]) == (PORTABLE, "portable", None)
    assert (wrapper["arm"], wrapper["kernel"], wrapper["plan"]) == (
        WRAPPER,
        "BatchMLAPagedAttentionWrapper with FA3",
        PLANNED,
    )
    # 140 entries of 64 bytes, and 4 vectors of 32 + 16 elements of 2 bytes; 2 · 2 heads · 140 pairs · 48 operations.
    for row in point.rows:
        assert (row["mode"], row["point"], row["heads"], row["kv_tokens"]) == ("decode", "2q1s70/2 heads", 2, 140)
        assert (row["bytes_moved"], row["operations"]) == (8960 + 384, 26_880)
        assert (row["floor_us"], row["floor_bound"]) == (pytest.approx(2.336), "memory")
    assert (portable["median_us"], wrapper["median_us"]) == (10.0, 11.0)
    assert (portable["floor_percent"], wrapper["floor_percent"]) == (23.36, 21.236)
    assert (portable["baseline"], portable["speed_of_baseline"]) == (WRAPPER, 1.1)
    assert [(target["margin"], target["passed"]) for target in portable["targets"]] == [(0.3, True)]
    assert (wrapper["speed_of_baseline"], wrapper["targets"]) == (1.0, [])


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu", "plans")
def test_a_verification_counts_what_each_row_sees() -> None:
    row = measure(point_of(small(4)), samples=1).rows[0]
    # Rows of a request see 67, 68, 69 and 70 keys: 548 pairs of two requests, and 8 rows of 2 heads.
    assert (row["mode"], row["q_len"], row["query_tokens"]) == ("target_verify", 4, 8)
    assert (row["bytes_moved"], row["operations"]) == (8960 + 1536, 2 * 2 * 548 * 48)
    assert (row["floor_us"], row["floor_bound"]) == (pytest.approx(5.261, abs=1e-3), "matrix")


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
def test_a_declined_variant_is_listed_and_the_other_is_measured() -> None:
    point = measure(point_of(small()))  # FlashInfer's own plan declines a CPU
    assert [row["arm"] for row in point.rows] == [PORTABLE]
    (declined,) = point.declined
    assert (declined["arm"], declined["point"]) == (WRAPPER, "2q1s70/2 heads")
    assert "need a CUDA GPU" in declined["reason"]
    assert point.rows[0]["speed_of_baseline"] is None
    assert [(target["margin"], target["passed"]) for target in point.rows[0]["targets"]] == [(None, None)]


@IN_INTERPRETER
@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("right_calls", [0, 2])
def test_a_wrong_variant_has_no_time(right_calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first call, or only from the one after the timed ones."""

    def plan(**arguments: Any) -> Callable[[], Any]:
        def run() -> None:
            made.append(1)
            scale = arguments["bmm1_scale"] * (1 if len(made) <= right_calls else 3)
            references.trtllm_batch_decode_with_kv_cache_mla(**arguments | {"bmm1_scale": scale})

        return run

    made: list[int] = []
    monkeypatch.setattr(flashinfer_mla, f"plan_{flashinfer_mla.NAME}", plan)
    point = measure(point_of(small()))
    assert [row["arm"] for row in point.rows] == [PORTABLE]
    (wrong,) = point.wrong
    assert (wrong["arm"], wrong["kv_len"]) == (WRAPPER, 70)
    assert "4 of 4 output vectors are wrong" in wrong["reason"]
    assert point.rows[0]["speed_of_baseline"] is None


def test_the_wrapper_is_named_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((9, 0), "FA3"), ((10, 0), "FA2")):
        monkeypatch.setattr(support, "capability_of", lambda device, capability=capability: capability)
        portable, wrapper = variants_of(small())
        work = GpuWork.of(print, 1, query=SimpleNamespace(device=torch.device("cuda")))
        assert kernel_of(wrapper, work).endswith(name)
        assert kernel_of(portable, work) == "portable"


def row_of(variant: str, **times_us: float) -> dict[str, Any]:
    speed = times_us[WRAPPER] / times_us[variant] if WRAPPER in times_us else None
    targets = target_rows(TARGETS if variant == PORTABLE else (), {Figure.SPEED: speed}, WRAPPER)
    return {"arm": variant, "speed_of_baseline": speed, "targets": targets}


def test_the_target_says_by_how_much() -> None:
    assert (Target(Figure.SPEED, 0.8),) == TARGETS
    passed = row_of(PORTABLE, portable=200.0, wrapper=180.0)
    assert target_text(passed) == "0.8 x the speed of wrapper: passed by 0.1"
    missed = row_of(PORTABLE, portable=200.0, wrapper=130.0)
    assert target_text(missed) == "0.8 x the speed of wrapper: missed by 0.15"
    assert target_text(row_of(PORTABLE, portable=200.0)) == "0.8 x the speed of wrapper: nothing to compare with"
    assert target_text(row_of(WRAPPER, portable=200.0, wrapper=130.0)) == ""


def simulated_rows(case: MLACase) -> list[dict[str, Any]]:
    shared = {"kv_dtype": str(case.kv_dtype).removeprefix("torch."), "floor_us": 50.0, "floor_bound": "memory"}
    shared |= {"iqr_us": 1.25, "kernel": "some kernel"}
    shared |= point_of(case).row
    return [
        shared | row_of(variant, portable=100.0, wrapper=75.0) | {"median_us": time_us, "floor_percent": 5000 / time_us}
        for variant, time_us in ((PORTABLE, 100.0), (WRAPPER, 75.0))
    ]


def test_the_table_has_a_line_per_point_and_variant() -> None:
    rows = [row for case in MLADecode().cases() for row in simulated_rows(case)]
    table = table_of("times", TIME_COLUMNS, rows)
    assert len(table.rows) == 8
    assert [cell.text for cell in table.rows[0]] == [
        "64q1s8k/16 heads",
        PORTABLE,
        "some kernel",
        "bfloat16",
        "100.0",
        "1.2",
        "50.0",
        "memory",
        "50.0",
        "0.750",
        "0.8 x the speed of wrapper: missed by 0.05",
    ]


@pytest.mark.usefixtures("simulated_gpu")
def test_the_command_line_writes_every_point_and_prints_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mla.json"
    written_before: list[bool] = []

    def simulate(point: Point, make: Any, plan: TimingPlan, facts: Any) -> PointRows:
        case = point.variants[0].case
        assert (plan, case.kv_dtype) == (TimingPlan(CEILINGS, COLD, 5), torch.float8_e4m3fn)
        written_before.append(out.exists())
        declined = [point.row | {"arm": WRAPPER, "reason": "not [here]"}]
        return PointRows(simulated_rows(case), declined if case.q_lens[0] == 4 else [], [])

    monkeypatch.setattr(study, "measure_point", simulate)
    command = f"--shapes 2x1024 --heads 16 --q-lens 1,4 --kv-dtype e4m3 --samples 5 --out {out}"
    assert run(f"experiments mla-decode {command}") == 0
    recorded = json.loads(out.read_text())
    assert written_before == [False, True]
    assert [(row["point"], row["arm"]) for row in recorded["rows"]] == [
        (f"2q{q_len}s1k/16 heads", variant) for q_len in (1, 4) for variant in (PORTABLE, WRAPPER)
    ]
    assert [row["point"] for row in recorded["declined"]] == ["2q4s1k/16 heads"]
    assert (recorded["wrong"], recorded["samples"]) == ([], 5)
    assert recorded["targets"] == {"passed": 0, "missed": 2, "not_compared": 0}
    assert recorded["environment"]["ceilings"]["bandwidth_gbps"] == 4000.0
    assert "every request" in recorded["judged"]
    assert recorded["method"] == str(COLD)
    printed = capsys.readouterr().out
    assert "missed by 0.05" in printed
    assert "declined: 2q4s1k/16 heads, wrapper: not [here]" in printed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times GPU work, and there is none here")
def test_a_point_is_measured_on_a_gpu() -> None:
    (case,) = MLADecode(shapes=((4, 1024),), heads=(16,), q_lens=(4,)).cases()
    portable = variants_of(case)[0]
    both = (portable, replace(portable, name="again"))
    point = measure(replace(point_of(case), variants=both, baseline="again"))
    assert (point.declined, point.wrong) == ([], [])
    assert [row["arm"] for row in point.rows] == [PORTABLE, "again"]
    assert all(row["median_us"] > 0 and row["buffer_copies"] > 1 for row in point.rows)
