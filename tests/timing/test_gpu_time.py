"""The clock that pytest-benchmark reads, and the graph timer itself."""

import pytest
import torch

from lab.timing import DeviceClock, GpuTime, copy_bandwidth_gbps, graph_time


def test_the_clock_moves_only_when_told() -> None:
    clock = DeviceClock("some method")
    assert clock() == clock() == 0.0
    clock.advance(2.5e-6)
    assert clock() == 2.5e-6
    assert "some method" in repr(clock)


def test_median_of_samples() -> None:
    assert GpuTime((3.0, 1.0, 2.0)).median_us == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU, and there is none here")
def test_twice_the_work_takes_twice_the_time() -> None:
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    half = graph_time(lambda: torch.neg(source[: 2**27], out=target[: 2**27])).median_us
    whole = graph_time(lambda: torch.neg(source, out=target)).median_us
    assert 1.8 < whole / half < 2.2
    assert copy_bandwidth_gbps(source.device) == pytest.approx(2 * source.nbytes / whole / 1000, rel=0.1)
