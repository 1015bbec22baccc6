"""The arithmetic of floors and shares, on numbers done by hand."""

import re
import sys

import pytest
import torch

from lab.gpus import Datasheet
from lab.timing import Ceilings, GpuTime, roofline
from lab.timing.roofline import least_us, measure_ceilings, why_impossible
from lab.timing.work import GpuWork

rooflines = sys.modules["lab.timing.roofline"]  # `lab.timing.roofline` is the function

CEILINGS = Ceilings(bandwidth_gbps=4000, matrix_rate_tflops=800)


@pytest.mark.parametrize(
    ("median_us", "work", "floor", "reached"),
    [
        # 400 MB at 4 TB/s are 100 µs; 8 GFLOP at 800 TFLOP/s are 10 µs.
        (125.0, (400_000_000, 8_000_000_000), (100.0, "memory", 80.0), (3200.0, 80.0, 64.0, 8.0)),
        # 4 MB are 1 µs; 160 GFLOP are 200 µs.
        (400.0, (4_000_000, 160_000_000_000), (200.0, "matrix", 50.0), (10.0, 0.25, 400.0, 50.0)),
        # 1 µs each.
        (1.0, (4_000_000, 800_000_000), (1.0, "memory", 100.0), (4000.0, 100.0, 800.0, 100.0)),
        (3.0, (4_000, 8), (0.001, "memory", 0.033), (1.333, 0.033, 0.0, 0.0)),
    ],
)
def test_the_floor_is_the_longer_of_two_times(
    median_us: float, work: tuple[int, int], floor: tuple[float, str, float], reached: tuple[float, ...]
) -> None:
    facts = roofline(median_us, *work, CEILINGS).facts()
    assert tuple(facts[name] for name in ("floor_us", "floor_bound", "floor_percent")) == floor
    names = ("bandwidth_gbps", "bandwidth_percent", "rate_tflops", "matrix_rate_percent")
    assert tuple(facts[name] for name in names) == reached


def test_an_unknown_gpu_has_no_datasheet_figures() -> None:
    assert CEILINGS.facts()["datasheet_bandwidth_gbps"] is None
    known = Ceilings(4000.06, 800.02, Datasheet(4800, 989, "a datasheet")).facts()
    assert (known["bandwidth_gbps"], known["matrix_rate_tflops"]) == (4000.1, 800.0)
    assert (known["datasheet_bandwidth_gbps"], known["datasheet_matrix_rate_tflops"]) == (4800, 989)


def test_least_times_are_by_both_rates_and_an_unknown_rate_bounds_nothing() -> None:
    assert least_us(8_000_000, 9_000_000_000, Datasheet(8000, 2250, "")) == (1.0, 4.0)
    assert least_us(8_000_000, 9_000_000_000, Datasheet(8000, None, "")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("bandwidth", "matrix_rate", "is_cold", "kv_dtype", "reason"),
    [
        (110.0, 0.0, True, "", ""),
        (111.0, 0.0, True, "", "its bytes at 111 % of the bandwidth .* only reads reaches 110 % at most"),
        (400.0, 0.0, False, "", ""),
        (401.0, 0.0, False, "", "at 401 % .* a warm L2 reaches 400 % at most"),
        (0.0, 130.0, True, "", ""),
        (0.0, 131.0, True, "bfloat16", "at 131 % of the matrix rate .* reach 130 % at most"),
        (0.0, 259.0, True, "float8_e4m3fn", ""),
        (0.0, 261.0, True, "float8_e4m3fn", "reach 260 % at most"),
        (0.0, 521.0, True, "uint8", "reach 520 % at most"),
    ],
)
def test_a_time_that_the_gpu_cannot_reach_has_a_reason(
    bandwidth: float, matrix_rate: float, is_cold: bool, kv_dtype: str, reason: str
) -> None:
    found = why_impossible(bandwidth, matrix_rate, is_cold=is_cold, kv_dtype=kv_dtype)
    assert re.search(reason, found) if reason else found == ""


def test_ceilings_are_bytes_and_operations_over_the_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**32 bytes in a millisecond, and a product of 8192 x 8192 matrices, 2 * 8192**3 operations, in another."""
    works: list[GpuWork] = []
    monkeypatch.setattr(
        rooflines, "measure", lambda work, method: works.append(work) or GpuTime((1000.0,), method, launches=1)
    )
    monkeypatch.setattr(rooflines.torch.cuda, "get_device_name", lambda device: "a GPU of tomorrow")
    assert measure_ceilings(torch.device("meta")) == Ceilings(pytest.approx(4294.967296), pytest.approx(1099.511627776))
    assert [work.bytes_moved for work in works] == [sum(t.nbytes for t in work.arguments.values()) for work in works]
    assert [work.operations for work in works] == [0, 2 * 8192**3]
