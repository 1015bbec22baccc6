"""A forward pass as timed work: what it must move and compute, and the judge of every output that was timed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from lab.checks.forward_pass import EnginePass, build_forward
from lab.kernels.support import kernel_names
from lab.references.truth import Truth
from lab.timing.gpu_time import GpuTime, measure, rounded_us
from lab.timing.host_time import CALLS_PER_BATCH, host_time
from lab.timing.method import Method
from lab.timing.roofline import Ceilings, roofline
from lab.timing.work import Check, GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.mla_case import MLACase

HOST_BATCHES = 20
HOST_GPU_BUDGET_US = 500_000


def forward_work(forward: EnginePass, implementation: Any) -> GpuWork:
    """Return the pass on an implementation, into an output of NaN, and judged by the truth of its histories."""
    case, arguments = forward.case, forward.arguments(forward.new_out())
    prepare = partial(forward.prepare, implementation)
    return GpuWork(prepare, arguments, case.bytes_moved, case.operations, _output_check(forward.truth()))


def _output_check(truth: Truth) -> Check:
    def check(arguments: Mapping[str, Any]) -> None:
        comparison = truth.compare(arguments["out"])
        if not comparison.passed:
            raise AssertionError(
                f"{int(comparison.faulty.sum())} of {comparison.faulty.numel()} output vectors are wrong, the worst "
                f"{comparison.worst_ratio:.3g} times what is allowed: a time of this is worth nothing"
            )
        arguments["out"].fill_(float("nan"))

    return check


class DeclinedError(Exception):
    """An implementation declines a pass; the message is its reason."""


def time_forward(case: ForwardCase, implementation: Any, method: Method) -> tuple[GpuTime, dict[str, Any]]:
    """Build, check, time and check again one pass; return its GPU time and the facts of a recorded row but the ceilings'.

    Raises:
        DeclinedError: the implementation's first call raised NotImplementedError.
        AssertionError: its output is wrong, before or after it was timed.
    """
    forward = build_forward(case, torch.device("cuda"))
    work = forward_work(forward, implementation)
    try:
        call = work.call()
        call()
    except NotImplementedError as error:
        raise DeclinedError(str(error)) from error
    time = measure(work, method)
    host = host_time({"": call}, batches=HOST_BATCHES, calls_per_batch=_host_calls(time.median_us))[""]
    facts = case_facts(case) | {
        "implementation": implementation.__name__,
        "kernel": kernel_names(implementation, [planned.call.value for planned in forward.plan], forward.query.device),
        "pool_bytes": forward.cache.storage.nbytes,
        **host.facts(),
        "host_method": host.method,
    }
    return time, facts


def _host_calls(median_us: float) -> int:
    """Return the calls of a batch of host times: so many that all batches keep the GPU busy for half a second at most."""
    return max(1, min(CALLS_PER_BATCH, int(HOST_GPU_BUDGET_US / HOST_BATCHES / median_us)))


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
