"""Time a forward pass, check every output that was timed, and return the results as fields of a recorded row."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lab.kernels import PlannedOnce
from lab.kernels.support import kernel_names
from lab.recorded.call import RecordingError
from lab.recorded.case import RecordedCase
from lab.recorded.timed import CallRedraw, RecordedPass
from lab.timing.gpu_time import GpuTime, measure_staged, rounded_us
from lab.timing.host_time import CALLS_PER_BATCH, METHOD, host_time
from lab.timing.method import L2, Method
from lab.timing.roofline import Ceilings, roofline, why_impossible
from lab.timing.sampling import RefusedTimeError
from lab.timing.staging import Staged, stage
from lab.timing.work import GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import EnginePass, build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.inputs.redraw import PassRedraw
from lab.workloads.mla_case import MLACase

TimedCase = ForwardCase | MLACase | RecordedCase

HOST_BATCHES = 20
PLAN_BATCHES = 10
HOST_GPU_BUDGET_US = 500_000


@dataclass(frozen=True)
class TimedPasses:
    """One forward pass or recorded call, with the input tensors that its timed implementations share."""

    forward: EnginePass | RecordedPass
    #: draws new contents for implementations that read lengths and page ids from the GPU
    plain: PassRedraw | CallRedraw
    #: draws new contents, without other page ids and lengths, on its own tensors, for implementations that plan on the host
    planned: PassRedraw | CallRedraw

    @classmethod
    def of(cls, case: TimedCase, device: torch.device) -> "TimedPasses":
        if isinstance(case, ForwardCase):
            return cls.over(build_forward(case, device))
        if isinstance(case, MLACase):
            return cls.over(build_mla_pass(case, device))
        call = RecordedPass.of(case, device)
        return cls(call, CallRedraw(call), CallRedraw(call, keeps_metadata=True))

    @classmethod
    def over(cls, forward: EnginePass) -> "TimedPasses":
        bare = replace(forward, histories=())  # K/V histories take memory, and nothing reads them
        return cls(bare, PassRedraw(bare), PassRedraw(bare, keeps_metadata=True))

    def work(self, implementation: Any) -> GpuWork:
        forward, case = self.forward, self.forward.case
        redraw = self.planned if is_planned(implementation, forward) else self.plain
        arguments = redraw.inputs(0) | {"out": forward.new_out()}
        prepare = partial(forward.prepare, implementation)
        return GpuWork(prepare, arguments, case.bytes_moved, case.operations, redraw=redraw)


def is_planned(implementation: Any, forward: EnginePass | RecordedPass) -> bool:
    return isinstance(implementation, PlannedOnce) and any(map(implementation.plans, forward.functions))


class DeclinedError(Exception):
    """An implementation does not support a forward pass, or a recorded call cannot be read. The message is the reason."""


TimedPass = tuple[GpuTime, dict[str, Any]]


def time_forward(case: ForwardCase, implementation: Any, method: Method) -> TimedPass:
    (found,) = time_interleaved(case, [implementation], method)
    if isinstance(found, Exception):
        raise found
    return found


def time_interleaved(
    case: TimedCase, implementations: Sequence[Any], method: Method, seed: int | None = None
) -> list[TimedPass | Exception]:
    """Build one forward pass or read one recorded call, and time it on several implementations with interleaved samples.
    Those that plan on the host share one set of input tensors, all other implementations a second set.

    Return for each implementation (GPU time, further facts such as {"page_size": 16}), or the error that prevented the time:
    DeclinedError, AssertionError for a wrong output, RefusedTimeError, or an error of the implementation. The field `plan_us`
    is the host time of planning (`lab.kernels.PlannedOnce`), which is not part of the GPU time.
    """
    try:
        passes = TimedPasses.of(case, torch.device("cuda"))
    except RecordingError as error:
        return [DeclinedError(str(error)) for _ in implementations]
    forward = passes.forward
    by_name = {str(place): implementation for place, implementation in enumerate(implementations)}
    found: dict[str, TimedPass | Exception] = {}
    staged: dict[str, Staged] = {}
    for name, implementation in by_name.items():
        work = passes.work(PlannedOnce(implementation))
        try:
            staged[name] = stage(work, method)
        except NotImplementedError as error:
            found[name] = DeclinedError(str(error))
        except Exception as error:  # a foreign kernel may raise anything; the other kernels are still timed
            found[name] = error
    measured = measure_staged(staged, method, seed=seed) if staged else {}
    found |= {name: time for name, time in measured.items() if isinstance(time, Exception)}
    times = {name: time for name, time in measured.items() if not isinstance(time, Exception)}
    calls = {name: staged[name].calls[0] for name in times}
    slowest_us = max((time.median_us for time in times.values()), default=1.0)
    # The largest number of calls for which all batches keep the GPU busy for half a second at most.
    most_calls = int(HOST_GPU_BUDGET_US / HOST_BATCHES / slowest_us)
    hosts = host_time(calls, batches=HOST_BATCHES, calls_per_batch=max(1, min(CALLS_PER_BATCH, most_calls)))
    for name, time in times.items():
        implementation = by_name[name]
        facts = case_facts(forward.case) | {
            "implementation": implementation.__name__,
            "kernel": kernel_names(implementation, forward.functions, forward.query.device),
            "pool_bytes": forward.pool_bytes,
            **hosts[name].facts(),
            "host_method": METHOD,
        }
        if is_planned(PlannedOnce(implementation), forward):  # the plan's time includes its copies from the GPU
            plan = host_time({"": staged[name].buffers[0].call}, batches=PLAN_BATCHES, calls_per_batch=1)[""]
            facts["plan_us"] = round(plan.median_us, 1)
        found[name] = time, facts
    return [found[name] for name in by_name]


def case_facts(case: ForwardCase | MLACase | SimpleNamespace) -> dict[str, Any]:
    names = ("num_qo_heads", "kv_lora_rank", "qk_rope_head_dim") if isinstance(case, MLACase) else ("geometry",)
    return {
        "mode": case.mode.name.lower(),
        **{name: getattr(case, name) for name in names},
        "page_size": case.page_size,
        "requests": len(case.q_lens),
        "query_tokens": sum(case.q_lens),
        "kv_tokens": sum(case.kv_lens),
        "dtype": str(case.dtype).removeprefix("torch."),
        "kv_dtype": str(case.kv_dtype).removeprefix("torch."),
        "bytes_moved": case.bytes_moved,
        "operations": case.operations,
    }


def time_facts(
    time: GpuTime, ceilings: Ceilings, bytes_moved: int, operations: int, kv_dtype: str = ""
) -> dict[str, Any]:
    """Return facts about the time of a call, such as {"median_us": 12.3}. `kv_dtype` is torch's name of the cache's dtype, ""
    without a cache. Raises RefusedTimeError if the GPU cannot move the bytes or do the operations in this time.
    """
    limits = roofline(time.median_us, bytes_moved, operations, ceilings)
    if why := why_impossible(
        limits.bandwidth_percent, limits.matrix_rate_percent, is_cold=time.method.l2 is not L2.WARM, kv_dtype=kv_dtype
    ):
        raise RefusedTimeError(f"{time.median_us:,.2f} µs, with a floor of {limits.floor_us:,.2f} µs: {why}")
    facts: dict[str, Any] = {
        "clock": time.method.clock.value,
        "l2": time.method.l2.value,
        "method": str(time.method),
        "calls_per_sample": time.calls_per_sample,
        "buffer_copies": time.buffer_copies,
        "contents_seed": time.contents_seed,
        "launches": time.launches,
        "median_us": round(time.median_us, 3),
        "iqr_us": round(time.iqr_us, 3),
        "samples_us": rounded_us(time.samples_us),
    }
    if time.busy_us is not None:
        facts |= {"busy_us": round(time.busy_us, 3), "kernels": list(time.kernels)}
    return facts | limits.facts() | time.device.facts()
