"""A forward pass as timed work: what it must move and compute, and the judge of every output that was timed."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lab.checks.forward_pass import EnginePass, ForwardPass, build_forward
from lab.kernels import PlannedOnce
from lab.kernels.support import kernel_names
from lab.references.truth import Truth
from lab.timing.gpu_time import GpuTime, Staged, measure_staged, rounded_us, stage
from lab.timing.host_time import CALLS_PER_BATCH, host_time
from lab.timing.method import Method
from lab.timing.roofline import Ceilings, roofline
from lab.timing.work import Check, GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.mla_case import MLACase

HOST_BATCHES = 20
PLAN_BATCHES = 10
HOST_GPU_BUDGET_US = 500_000


def forward_work(forward: EnginePass, implementation: Any, truth: Truth | None = None) -> GpuWork:
    """Return the pass on an implementation, into an output of NaN, and judged by the truth of its histories.

    Args:
        truth: `forward.truth()`, where it was made before.
    """
    case, arguments = forward.case, forward.arguments(forward.new_out())
    prepare = partial(forward.prepare, implementation)
    check = _output_check(forward.truth() if truth is None else truth)
    return GpuWork(prepare, arguments, case.bytes_moved, case.operations, check)


def _output_check(truth: Truth) -> Check:
    def check(arguments: Mapping[str, Any]) -> None:
        comparison = truth.compare(arguments["out"][: len(truth.expected)])
        if not comparison.passed:
            raise AssertionError(
                f"{int(comparison.faulty.sum())} of {comparison.faulty.numel()} output vectors are wrong, the worst "
                f"{comparison.worst_ratio:.3g} times what is allowed: a time of this is worth nothing"
            )
        arguments["out"].fill_(float("nan"))

    return check


class DeclinedError(Exception):
    """An implementation declines a pass; the message is its reason."""


TimedPass = tuple[GpuTime, dict[str, Any]]


def time_forward(case: ForwardCase, implementation: Any, method: Method) -> TimedPass:
    """Build, check, time and check again one pass; see `time_in_turns`, whose errors it raises."""
    (found,) = time_in_turns(case, [implementation], method)
    if isinstance(found, Exception):
        raise found
    return found


def time_in_turns(case: ForwardCase, implementations: Sequence[Any], method: Method) -> list[TimedPass | Exception]:
    """Build one pass, and check, time and check it again on each implementation: samples and host times are taken in turns.

    What an implementation plans on the host (`lab.kernels.PlannedOnce`) is done before, and its host time is `plan_us`. All
    read the same tensors, and each writes an output of its own.

    Returns:
        For each implementation its GPU time and the facts of a recorded row but the ceilings'; or why it has none:
        DeclinedError, AssertionError where its output is wrong, or whatever else its own code raised.

    Raises:
        AssertionError: an output that was right before it was timed is wrong afterwards.
    """
    forward = build_forward(case, torch.device("cuda"))
    truth = forward.truth()
    found: dict[int, TimedPass | Exception] = {}
    works: dict[str, GpuWork] = {}
    staged: dict[str, Staged] = {}
    for place, implementation in enumerate(implementations):
        work = forward_work(forward, PlannedOnce(implementation), truth)
        try:
            staged[str(place)] = stage(work, method)
            works[str(place)] = work
        except NotImplementedError as error:
            found[place] = DeclinedError(str(error))
        except Exception as error:  # other people's code may raise anything, and the others are timed all the same
            found[place] = error
    times = measure_staged(staged, method) if staged else {}
    calls = {name: each.calls[0] for name, each in staged.items()}
    slowest_us = max((time.median_us for time in times.values()), default=1.0)
    # So many calls that all batches keep the GPU busy for half a second at most.
    most_calls = int(HOST_GPU_BUDGET_US / HOST_BATCHES / slowest_us)
    hosts = host_time(calls, batches=HOST_BATCHES, calls_per_batch=max(1, min(CALLS_PER_BATCH, most_calls)))
    for name, time in times.items():
        implementation = implementations[int(name)]
        facts = _facts(forward, implementation) | hosts[name].facts() | {"host_method": hosts[name].method}
        found[int(name)] = time, facts | _plan_facts(forward, implementation, works[name])
    return [found[place] for place in range(len(implementations))]


def _facts(forward: ForwardPass, implementation: Any) -> dict[str, Any]:
    return case_facts(forward.case) | {
        "implementation": implementation.__name__,
        "kernel": kernel_names(implementation, _functions(forward), forward.query.device),
        "pool_bytes": forward.cache.storage.nbytes,
    }


def _functions(forward: ForwardPass) -> list[str]:
    return [planned.call.value for planned in forward.plan]


def _plan_facts(forward: ForwardPass, implementation: Any, work: GpuWork) -> dict[str, Any]:
    """Return the host time of planning a pass, its copies from the GPU included; {} for what plans nothing."""
    if not any(hasattr(implementation, f"plan_{function}") for function in _functions(forward)):
        return {}
    plan = host_time({"": work.call}, batches=PLAN_BATCHES, calls_per_batch=1)[""]
    return {"plan_us": round(plan.median_us, 1)}


def case_facts(case: ForwardCase | MLACase) -> dict[str, Any]:
    """Return what a row says of its pass, units in the keys; of latent attention the sizes of a layer, else its geometry."""
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


def time_facts(time: GpuTime, ceilings: Ceilings, bytes_moved: int, operations: int) -> dict[str, Any]:
    """Return what a row says of its time, units in the keys: the samples, their median, and both beside the ceilings."""
    facts: dict[str, Any] = {
        "clock": time.method.clock.value,
        "l2": time.method.l2.value,
        "method": str(time.method),
        "calls_per_sample": time.calls_per_sample,
        "buffer_copies": time.buffer_copies,
        "launches": time.launches,
        "median_us": round(time.median_us, 3),
        "iqr_us": round(time.iqr_us, 3),
        "samples_us": rounded_us(time.samples_us),
    }
    if time.busy_us is not None:
        facts |= {"busy_us": round(time.busy_us, 3), "kernels": list(time.kernels)}
    facts |= roofline(time.median_us, bytes_moved, operations, ceilings).facts()
    return facts | time.device.facts()
