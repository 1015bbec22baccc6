"""Find a workspace whose counters are not zero after a call, or whose contents change a result.

An engine shares one workspace among layers, shapes and kernels. Its first 8 MiB are counters, which are zero before and after a
call; trtllm-gen's counters are in `multi_ctas_kv_counter_buffer`. The scratch memory after the counters may hold anything. A
test that zeroes the workspace before each call finds no error. A call must not write to the workspace of an earlier call.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.workspace import SEMAPHORE_BYTES, counts_in_workspace, semaphores_and_scratch
from lab.checks.case_run import CaseRun, GivenCall, Result
from lab.checks.properties.check import Check, itself
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.contents import new_workspace

LEFT = 0x5A  # the value of each byte of a workspace that no call may write any more


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    workspace = new_workspace(run.device)
    handed_out = {"multi_ctas_kv_counter_buffer": torch.zeros(SEMAPHORE_BYTES, dtype=torch.uint8, device=run.device)}
    call = GivenCall(inputs.interface, inputs.arguments() | {"workspace_buffer": workspace} | handed_out)
    counters = handed_out | counters_of(run, call.given)
    first = run.call(call)
    run.expect_close("a zeroed workspace", first, inputs.truth())
    expect_counters_zero(run, "a call", counters)

    other = run.build(_another_shape(run.case))
    run.vary("another shape", other, other.truth(), workspace_buffer=workspace, **handed_out)
    expect_counters_zero(run, "a call of another shape", counters)
    run.expect_equal_bits("again, after another shape", run.again(call), first)

    scratch = expect_any_scratch(run, call, first)
    out = inputs.new_out()
    into = run.vary("an unwritten output", inputs, out=out)
    if into is not None:
        run.expect_equal_bits(
            "an output that held NaN and huge values", into._replace(out=out.view(first.out.shape)), first
        )
    expect_left_alone(run, call, first, scratch)


def _another_shape(case: AttentionCase) -> AttentionCase:
    count = len(case.kv_lens)
    keep = 2 * count if case.seed % 2 else max(1, count // 2)
    longer = tuple(kv_len + 3 * case.page_size + 1 for kv_len in reversed(case.kv_lens))
    return replace(case, kv_lens=(longer * 2)[:keep], q_lens=(case.q_lens * 2)[:keep], seed=case.seed + 1)


def counters_of(run: CaseRun, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return {"the workspace": the counters in it} for a call; {} if the called kernel has no counters there."""
    counts = counts_in_workspace(arguments.get("backend", "auto"), run.device)
    return {"the workspace": semaphores_and_scratch(arguments["workspace_buffer"])[0]} if counts else {}


def expect_counters_zero(run: CaseRun, what: str, counters: dict[str, Tensor]) -> None:
    for name, buffer in counters.items():
        count = int(torch.count_nonzero(buffer))
        wrong = f"{what} left {count} of {name}'s first {SEMAPHORE_BYTES} bytes non-zero"
        run.expect(f"the counters after {what}", [wrong] if count else [])


def expect_any_scratch(run: CaseRun, call: GivenCall, first: Result) -> Tensor:
    """Repeat a call with NaN, and again with large values, in its workspace except the counters. Expect the bits of `first`.
    Return the part of the workspace that was filled.
    """
    scratch = scratch_of(run, call.given)
    for what in filled(scratch):
        run.expect_equal_bits(what, run.again(call), first)
    return scratch


def scratch_of(run: CaseRun, arguments: dict[str, Any]) -> Tensor:
    """Return a call's workspace without the bytes for counters; all of it if the kernel keeps other data in these bytes."""
    workspace: Tensor = arguments["workspace_buffer"]
    semaphores, scratch = semaphores_and_scratch(workspace)
    return workspace if not counters_of(run, arguments) and semaphores.any() else scratch


def filled(scratch: Tensor) -> Iterator[str]:
    for byte, name in ((0xFF, "NaN"), (0x7B, "large values")):
        scratch.fill_(byte)
        yield f"scratch that holds {name}"


def expect_left_alone(run: CaseRun, call: GivenCall, first: Result, scratch: Tensor) -> None:
    """Repeat a call with a new workspace. Expect the bits of `first`, and no write to `scratch`, a part of the old one."""
    scratch.fill_(LEFT)
    again = run.again(call, workspace_buffer=new_workspace(run.device))
    run.expect_equal_bits("another workspace", again, first)
    count = int(torch.count_nonzero(scratch != LEFT))
    wrong = f"a call with another workspace wrote {count} bytes of an earlier call's"
    run.expect("the workspace of earlier calls", [wrong] if count else [])


CHECK = Check("K6", __doc__, lambda scope: scope.balanced(6, 24, seed=8), _judge, drawn=itself)
