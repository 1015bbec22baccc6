"""GPU time of a call by graph replay, and a clock that carries it into pytest-benchmark.

A CUDA graph of several calls is replayed between two events; a sample is that time over the number of calls. No host time
is in it: the calls are recorded once. What it contains besides the kernels is the gap between them inside a graph.
"""

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

METHOD = "cuda graph replay between events, the same buffers each call, L2 not flushed"
CALLS_PER_GRAPH = 5
SAMPLES = 30
WARM_UP_REPLAYS = 3
COPY_BYTES = 2**32  # read plus written: far beyond any L2, a millisecond


class DeviceClock:
    """A clock for pytest-benchmark that moves only when it is told to, in seconds."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def __repr__(self) -> str:
        return f"DeviceClock({self.method!r})"


@dataclass(frozen=True)
class GpuTime:
    """Samples of one call's GPU time in microseconds, and how they were taken."""

    samples_us: tuple[float, ...]
    method: str = METHOD

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def graph_time(call: Callable[[], object]) -> GpuTime:
    """Measure a call that can be captured. It runs once before, so that whatever it builds at first use exists.

    Raises:
        RuntimeError: from torch, if the call cannot be captured.
    """
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(CALLS_PER_GRAPH):
            call()
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(SAMPLES)]
    for start, end in pairs:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return GpuTime(tuple(start.elapsed_time(end) * 1000 / CALLS_PER_GRAPH for start, end in pairs))


@functools.cache
def _side_stream(device_index: int) -> torch.cuda.Stream:
    """One stream for all captures: what a kernel keeps per stream, such as a workspace, is then kept once."""
    return torch.cuda.Stream(device_index)


def copy_bandwidth_gbps(device: torch.device) -> float:
    """Bandwidth of a large elementwise kernel on this GPU now, bytes read plus bytes written, in GB/s (10**9).

    A kernel, because a copy inside a graph runs on a copy engine: 2.8 TB/s on an H200 whose kernels reach 4.2.
    """
    source = torch.randn(COPY_BYTES // 8, device=device)
    target = torch.empty_like(source)
    return COPY_BYTES / graph_time(lambda: torch.neg(source, out=target)).median_us / 1000
