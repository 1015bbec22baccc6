"""Simulated GPUs: what they reach, and times that are run and checked on a CPU."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lab.timing import Ceilings, GpuTime, GpuWork, Method
from lab.timing.gpu_time import check_named
from lab.timing.host_time import HostTime
from lab.timing.staging import renew
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.redraw import Seeds
from lab.workloads.mla_case import MLACase
from studies.kv_read_once import FLASHINFER, PORTABLE
from studies.mla_decode import MLADecode
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE
from studies.targets import Figure, Target
from studies.variants import Point, Variant

CEILINGS = Ceilings(bandwidth_gbps=4000.0, matrix_rate_tflops=800.0)
SLOWER = Ceilings(bandwidth_gbps=8.0, matrix_rate_tflops=0.042)  # floors about what is simulated, for some requests
SLOW = Ceilings(bandwidth_gbps=4.0, matrix_rate_tflops=0.02)  # floors of µs for what a CPU can afford


def measured_interleaved(works: Mapping[str, GpuWork], method: Method, samples: int) -> dict[str, GpuTime]:
    """Run and check every variant, before and after; it takes as many µs as it has variants before it, and 10."""
    for name, work in works.items():
        call = work.call()
        for seeds in (Seeds(1, 2), Seeds(3, 8)):  # before and after; the second on shorter requests
            renew(work, seeds)
            call()
            check_named(name, [work], seeds)
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


SPEED, BANDWIDTH = (Target(figure, bound) for figure, bound in ((Figure.SPEED, 1.05), (Figure.BANDWIDTH, 30.0)))


def small_kv(case: ForwardCase, *targets: Target, group: str = "small") -> Point:
    """A pass on the portable kernel and on FlashInfer's."""
    both = (
        Variant(PORTABLE, case, PORTABLE_MODULE, targets),
        Variant(FLASHINFER, case, FLASHINFER_MODULE, needs_flashinfer=True),
    )
    return Point("2q2s70", both, {"group": group}, FLASHINFER)


def small_mla(q_len: int = 1, **changes: Any) -> MLACase:
    """Two requests of 70 keys, 2 heads, entries of 16 + 16."""
    (case,) = MLADecode(shapes=((2, 70),), heads=(2,), q_lens=(q_len,)).cases()
    return replace(case, kv_lora_rank=16, qk_rope_head_dim=16, **changes)
