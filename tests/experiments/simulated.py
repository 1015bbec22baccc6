"""Simulated GPUs: what they reach, and times that are run and checked on a CPU."""

from collections.abc import Callable, Mapping

from lab.timing import Ceilings, GpuTime, GpuWork, Method
from lab.timing.host_time import HostTime

CEILINGS = Ceilings(bandwidth_gbps=4000.0, matrix_rate_tflops=800.0)
SLOW = Ceilings(bandwidth_gbps=4.0, matrix_rate_tflops=0.02)  # floors of µs for what a CPU can afford


def measured_in_turns(works: Mapping[str, GpuWork], method: Method, samples: int) -> dict[str, GpuTime]:
    """Run and check every arm, before and after; it takes as many µs as it has arms before it, and 10."""
    for work in works.values():
        call = work.call()
        for _ in ("before", "after"):
            call()
            if work.check is not None:
                work.check(work.arguments)
    return {name: GpuTime((10.0 + place,) * samples, method, 1) for place, name in enumerate(works)}


def quick_host_time(calls: Mapping[str, Callable[[], object]], **_: int) -> dict[str, HostTime]:
    """Run every call once; two samples of each."""
    for call in calls.values():
        call()
    return {name: HostTime((20.0 + 10 * place, 21.0 + 10 * place)) for place, name in enumerate(calls)}


def only_run(ran: list[object], run: Callable[[], object]) -> float:
    """Note a run, which takes 900 µs, in place of timing it."""
    ran.append(run())
    return 900.0
