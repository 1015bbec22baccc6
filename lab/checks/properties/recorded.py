"""A recorded call of an engine: the output of its kernel, or the output of an implementation for the recorded inputs.

The expected result is computed in float64 from the recorded tensors. A recording has no histories of its requests. The recorded
page table and lengths therefore define the keys that a row sees, and an error in them is not found. Requests that see a
non-finite key are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.case_run import CaseRun, GivenCall, Result, as_result
from lab.checks.properties.check import Check
from lab.checks.run.support_protocol import Unjudgeable
from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase
from lab.recorded.suspicions import origins_of_non_finite, suspicions
from lab.references.assertion import histories_of, truth_of_problem
from lab.workloads.inputs.attention import new_workspace


def _judge(run: CaseRun) -> None:
    case: RecordedCase = run.case
    try:
        call = case.read()
        problem = call.problem()
    except (RecordingError, TypeError, ValueError, NotImplementedError) as error:
        raise Unjudgeable(f"call {case.number}: {error}") from error
    if problem.has_no_rows:
        raise Unjudgeable(f"call {case.number}: no request has a query row")
    for sentence in call.lost:
        run.remark(sentence)
    histories = histories_of(problem)
    for sentence in suspicions(problem, histories, call.pages):
        run.remark(f"call {case.number}: {sentence}")
    rounds_weights = run.ranges.e4m3_arithmetic and problem.kv_dtype == E4M3
    truth = truth_of_problem(problem, E4M3 if rounds_weights else None, histories=histories)
    result = _result(run, call)
    end = len(truth.expected)
    out, lse = result.out[:end], None if result.lse is None else result.lse[:end]
    has_rows = out.shape == truth.expected.shape
    for sentence in origins_of_non_finite(problem, histories, out, call.pages) if has_rows else ():
        run.remark(f"call {case.number}: {sentence}")
    finite = truth.expected.isfinite().flatten(1).all(dim=1)
    if not bool(finite.any()):
        raise Unjudgeable(f"call {case.number}: every request sees a key that is not finite")
    if not bool(finite.all()):
        truth, out, lse = truth.of_rows(finite), out[finite], None if lse is None else lse[finite]
    run.expect_close("the call", Result(out, lse, result.call), truth)


def _result(run: CaseRun, call: RecordedCall) -> Result:
    """Return the output and LSE to judge, on the CPU: those that were recorded, or those of an implementation for the recorded
    inputs. The LSE is in base 2.
    """
    interface: AttentionCall = run.case.interface
    if run.implementation is not OUTPUTS:
        arguments = call.arguments(run.device)
        result = run.call(GivenCall(interface, arguments | {"workspace_buffer": new_workspace(run.device)}))
        result = result._replace(out=result.out.cpu(), lse=None if result.lse is None else result.lse.cpu())
    else:
        if call.out is None:
            raise Unjudgeable(f"call {run.case.number}: it did not return: name an implementation to call")
        noted = run.note_call(interface, call.arguments())
        result = as_result((call.out, call.lse) if call.lse is not None else call.out, interface)._replace(call=noted)
    if result.lse is not None and call.given.get("return_lse_base") == "basee":
        result = result._replace(lse=result.lse.to(torch.float64) / math.log(2.0))
    return result


# A run without a recording has no recorded calls, and so no case.
RECORDED_CALLS = Check("R1", "recorded_calls", __doc__, lambda _: (), _judge, interfaces=tuple(AttentionCall))


def check_of(cases: Sequence[RecordedCase]) -> Check:
    """Return the check R1 (recorded_calls) with the given recorded calls as its cases."""
    return replace(RECORDED_CALLS, fixed=lambda scope: [case for case in cases if case.interface is scope.interface])
