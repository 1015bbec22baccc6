"""MLA decode's points, floors, judged variants, target and command line on a CPU; times on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.kernels import support
from lab.kernels.peers import flashinfer_mla
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import Ceilings, GpuWork, measure_ceilings, roofline
from lab.workloads.mla_case import MLACase
from studies.mla_decode import (
    PLANNED,
    PORTABLE,
    WRAPPER,
    MLADecode,
    facts_of,
    point_of,
    variants_of,
)
from studies.passes import gpu_works, kernel_of, works_of
from studies.targets import Figure, target_rows
from studies.variants import COLD, Point, PointRows, TimingPlan, Variant, measure_point
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.simulated import CEILINGS, SLOW, hold_right

CPU = torch.device("cpu")


def reference(case: MLACase) -> Variant:
    return Variant("reference", case, "lab.references")


def measure(point: Point, samples: int = 3, ceilings: Ceilings = SLOW) -> PointRows:
    """GPU times against a slow GPU's ceilings."""
    return measure_point(point, gpu_works, TimingPlan(ceilings, samples=samples), facts_of)


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


def test_the_wrapper_is_named_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((9, 0), "FA3"), ((10, 0), "FA2")):
        monkeypatch.setattr(support, "capability_of", lambda device, capability=capability: capability)
        portable, wrapper = variants_of(small())
        work = GpuWork.of(print, 1, query=SimpleNamespace(device=torch.device("cuda")))
        assert kernel_of(wrapper, work).endswith(name)
        assert kernel_of(portable, work) == "portable"


def test_the_command_line_writes_every_point_and_prints_the_target(command: Command) -> None:
    def measured(point: Point) -> PointRows:
        case = point.variants[0].case
        assert case.kv_dtype is torch.float8_e4m3fn
        shared = dict.fromkeys(("kernel", "kv_dtype", "floor_bound"), "some") | dict.fromkeys(
            ("iqr_us", "floor_us"), 1.0
        )
        rows = [
            point.row
            | shared
            | {"arm": variant.name, "median_us": 100.0, "floor_percent": 1.0, "speed_of_baseline": 0.75}
            | {"targets": target_rows(variant.targets, {Figure.SPEED: 0.75}, WRAPPER)}
            for variant in point.variants
        ]
        declined = [point.row | {"arm": WRAPPER, "reason": "not [here]"}]
        return PointRows(rows, declined if case.q_lens[0] == 4 else [], [])

    done = command("mla-decode --shapes 2x1024 --heads 16 --q-lens 1,4 --kv-dtype e4m3 --samples 5", measured)
    assert (done.status, done.plans) == (0, [TimingPlan(CEILINGS, COLD, 5)] * 2)
    assert [(row["point"], row["arm"]) for row in done.recorded["rows"]] == [
        (f"2q{q_len}s1k/16 heads", variant) for q_len in (1, 4) for variant in (PORTABLE, WRAPPER)
    ]
    assert [row["point"] for row in done.recorded["declined"]] == ["2q4s1k/16 heads"]
    assert (done.recorded["wrong"], done.recorded["samples"]) == ([], 5)
    assert done.recorded["targets"] == {"passed": 0, "missed": 2, "not_compared": 0}
    assert "every request" in done.recorded["judged"]
    assert done.recorded["method"] == str(COLD)
    assert "0.8 x the speed of wrapper: missed by 0.05" in " ".join(done.printed.split())


@pytest.mark.gpu
def test_a_point_is_measured_on_a_gpu() -> None:
    (case,) = MLADecode(shapes=((4, 1024),), heads=(16,), q_lens=(4,)).cases()
    portable = variants_of(case)[0]
    both = (portable, replace(portable, name="again"))
    point = measure(
        replace(point_of(case), variants=both, baseline="again"), ceilings=measure_ceilings(torch.device("cuda"))
    )
    assert (point.declined, point.wrong) == ([], [])
    assert [row["arm"] for row in point.rows] == [PORTABLE, "again"]
    assert all(row["median_us"] > 0 and row["buffer_copies"] > 1 for row in point.rows)
