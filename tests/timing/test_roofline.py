"""The arithmetic of floors and shares, on numbers done by hand."""

import pytest

from lab.gpus import Datasheet
from lab.timing import Ceilings, roofline
from lab.timing.roofline import least_us

CEILINGS = Ceilings(bandwidth_gbps=4000, matrix_rate_tflops=800)


def test_work_bound_by_memory() -> None:
    """400 MB at 4 TB/s are 100 µs; 8 GFLOP at 800 TFLOP/s are 10 µs; it took 125."""
    line = roofline(125.0, 400_000_000, 8_000_000_000, CEILINGS)
    assert (line.floor_us, line.floor_bound) == (pytest.approx(100), "memory")
    assert line.floor_percent == pytest.approx(80)
    assert line.bandwidth_gbps == pytest.approx(3200)
    assert line.bandwidth_percent == pytest.approx(80)
    assert line.rate_tflops == pytest.approx(64)
    assert line.matrix_rate_percent == pytest.approx(8)


def test_work_bound_by_the_matrix_units() -> None:
    """4 MB are 1 µs; 160 GFLOP are 200 µs; it took 400."""
    line = roofline(400.0, 4_000_000, 160_000_000_000, CEILINGS)
    assert (line.floor_us, line.floor_bound) == (pytest.approx(200), "matrix")
    assert line.floor_percent == pytest.approx(50)
    assert line.matrix_rate_percent == pytest.approx(50)
    assert line.bandwidth_percent == pytest.approx(0.25)


def test_an_unknown_gpu_has_no_datasheet_figures() -> None:
    assert CEILINGS.facts()["datasheet_bandwidth_gbps"] is None
    known = Ceilings(4000, 800, Datasheet(4800, 989, "a datasheet")).facts()
    assert (known["datasheet_bandwidth_gbps"], known["datasheet_matrix_rate_tflops"]) == (4800, 989)


def test_least_times_are_by_both_rates_and_an_unknown_rate_bounds_nothing() -> None:
    assert least_us(8_000_000, 9_000_000_000, Datasheet(8000, 2250, "")) == (1.0, 4.0)
    assert least_us(8_000_000, 9_000_000_000, Datasheet(8000, None, "")) == (1.0, 0.0)
