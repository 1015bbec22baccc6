"""Measure the host time of calls: the time of Python code, checks and launches."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

METHOD = "perf_counter around a batch of calls, batches of all calls in turn, GPU queue drained before each"
BATCHES = 40
# Far fewer launches than the driver's queue holds (about 1,000), so that no launch waits for the GPU
CALLS_PER_BATCH = 50


@dataclass(frozen=True)
class HostTime:
    samples_us: tuple[float, ...]  #: one sample is the mean over one batch of calls

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def facts(self) -> dict[str, Any]:
        samples_us = [round(sample, 3) for sample in self.samples_us]
        return {"host_us": round(self.median_us, 2), "host_samples_us": samples_us}


def host_time(
    calls: Mapping[str, Callable[[], object]],
    *,
    batches: int = BATCHES,
    calls_per_batch: int = CALLS_PER_BATCH,
    timer: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, HostTime]:
    """Measure the host time of each call, in interleaved batches. A batch longer than the driver's queue waits for the GPU."""
    if batches < 1 or calls_per_batch < 1:
        raise ValueError(f"batches={batches} and calls_per_batch={calls_per_batch} must be at least 1")
    for call in calls.values():
        call()
    samples_us: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(batches):
        for name, call in calls.items():
            drain()
            start_ns = timer()
            for _ in range(calls_per_batch):
                call()
            samples_us[name].append((timer() - start_ns) / calls_per_batch / 1000)
    drain()
    return {name: HostTime(tuple(samples)) for name, samples in samples_us.items()}


def drain() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
