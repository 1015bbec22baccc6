"""A forward pass as timed work: what it must move and compute, and the judge of every output that was timed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from lab.checks.forward import truth_of
from lab.checks.forward_pass import ForwardPass, build_forward
from lab.kernels.support import capability_of, context_kernel, decode_kernel
from lab.metadata.dispatch import AttentionCall, attention_call, prepare_attention
from lab.timing.gpu_time import GpuTime, measure
from lab.timing.host_time import host_time
from lab.timing.method import Method
from lab.timing.roofline import Ceilings, roofline
from lab.timing.work import Check, GpuWork
from lab.workloads.forward_case import ForwardCase


def forward_work(forward: ForwardPass, implementation: Any) -> GpuWork:
    """The pass on an implementation, into an output of NaN, and judged by the truth of its histories."""
    case = forward.case
    arguments = forward.arguments(torch.full_like(forward.query, float("nan")))
    prepare = partial(prepare_attention, implementation)
    return GpuWork(prepare, arguments, case.bytes_moved, case.operations, _output_check(forward))


def _output_check(forward: ForwardPass) -> Check:
    truth = truth_of(forward)

    def check(arguments: Mapping[str, Any]) -> None:
        comparison = truth.compare(arguments["out"])
        if not comparison.passed:
            raise AssertionError(
                f"{int(comparison.wrong.sum())} of {comparison.wrong.numel()} output vectors are wrong, the worst "
                f"{comparison.worst_ratio:.3g} times what is allowed: a time of this is worth nothing"
            )
        arguments["out"].fill_(float("nan"))

    return check


def time_forward(case: ForwardCase, implementation: Any, method: Method) -> tuple[GpuTime, dict[str, Any]]:
    """Build, check, time and check again one pass; returns its GPU time and the facts of a recorded row but the ceilings'.

    Raises:
        NotImplementedError: the implementation declines the pass, with the reason.
        AssertionError: its output is wrong, before or after it was timed.
    """
    device = torch.device("cuda")
    forward = build_forward(case, device)
    work = forward_work(forward, implementation)
    time = measure(work, method)
    host_us = host_time({"": work.call()})[""].median_us
    facts = case_facts(case) | {
        "implementation": implementation.__name__,
        "kernel": kernel_name(case, implementation, device),
        "pool_bytes": forward.cache.storage.nbytes,
        "host_us": round(host_us, 2),
    }
    return time, facts


def case_facts(case: ForwardCase) -> dict[str, Any]:
    """What a row says of its pass, units in the keys."""
    return {
        "mode": case.mode.name.lower(),
        "geometry": case.geometry,
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
    """What a row says of its time, units in the keys."""
    facts: dict[str, Any] = {
        "clock": time.method.clock.value,
        "l2": time.method.l2.value,
        "method": str(time.method),
        "calls_per_sample": time.calls_per_sample,
        "buffer_copies": time.buffer_copies,
        "launches": time.launches,
        "median_us": round(time.median_us, 3),
        "iqr_us": round(time.iqr_us, 3),
    }
    if time.busy_us is not None:
        facts |= {"busy_us": round(time.busy_us, 3), "kernels": list(time.kernels)}
    facts |= roofline(time.median_us, bytes_moved, operations, ceilings).facts()
    return facts | time.device.facts()


def kernel_name(case: ForwardCase, implementation: Any, device: torch.device) -> str:
    """What runs behind the adapter's names on this GPU; an implementation's own name elsewhere."""
    capability = capability_of(device)
    if implementation.__name__ != "lab.kernels.trtllm" or capability is None:
        return str(implementation.__name__).rpartition(".")[2]
    decodes = attention_call(case.mode, case.draft_extend) is AttentionCall.DECODE
    return (decode_kernel(capability) if decodes else context_kernel(capability)).value
