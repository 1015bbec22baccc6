"""Host time of calls: what Python, checks and launches cost before the GPU has anything to do.

Small differences are the point, so the calls take turns, a batch each, and a machine's slow spells fall on all of them.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

METHOD = "perf_counter around a batch of calls, batches of all calls in turn, GPU queue drained before each"
BATCHES = 40
CALLS_PER_BATCH = 50  # far fewer launches than the driver queues, about a thousand, before one has to wait for the GPU


@dataclass(frozen=True)
class HostTime:
    """One call's host time in microseconds, a mean per batch, and how it was taken."""

    samples_us: tuple[float, ...]
    method: str = METHOD

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def facts(self) -> dict[str, Any]:
        """Return what a row says of it, in microseconds: the median, and the samples, by which rows are compared."""
        samples_us = [round(sample, 3) for sample in self.samples_us]
        return {"host_us": round(self.median_us, 2), "host_samples_us": samples_us}


def host_time(
    calls: Mapping[str, Callable[[], object]],
    *,
    batches: int = BATCHES,
    calls_per_batch: int = CALLS_PER_BATCH,
    timer: Callable[[], int] = time.perf_counter_ns,
) -> dict[str, HostTime]:
    """Measure the host time of each call in µs: Python and launches, not the GPU's work, which is waited for between batches.

    Each call runs once before, so that whatever it builds at first use exists. Without a GPU it times calls that need
    none. Compare the calls of one measurement, not of two.

    Args:
        batches: samples of each call, at least 1.
        calls_per_batch: calls in one sample, at least 1; all their launches must fit into the driver's queue.
        timer: a clock in nanoseconds.
    """
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
    """Wait until the current GPU has nothing to do; a process that has not used one has nothing to wait for."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
