"""Find a wrong output for a recorded call of an engine: the recorded output, or that of an implementation for the same inputs.

A recording has no K/V histories of the requests, so that the recorded page table and lengths define which keys a row sees. An
error in the page table or the lengths is not found. Requests that see a key with NaN or infinity are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

from lab.calls import PagedAttention, Problem
from lab.calls.problem import E4M3, HALF_DTYPES, AttentionCall
from lab.checks.case_run import CaseRun, GivenCall, Result
from lab.checks.properties.check import Check
from lab.checks.run.support_protocol import KernelError, Unjudgeable, output_and_lse
from lab.recorded.call import InvalidArgumentsError, RecordedCall, RecordingError
from lab.recorded.case import OUTPUTS, RecordedCase
from lab.recorded.suspicions import RecordedInputs
from lab.references.assertion import histories_of, truth_of_problem
from lab.references.errors import Truth
from lab.workloads.inputs.contents import new_workspace

FINDINGS = "results/nvidia-h200/findings.md"


def _judge(run: CaseRun) -> None:
    case: RecordedCase = run.case
    try:
        call, problem = case.posed()
    except RecordingError as error:
        if run.implementation is OUTPUTS and isinstance(error, InvalidArgumentsError):
            run.expect("the arguments", [f"the arguments are invalid: {error}"], kind="arguments")
            return
        raise Unjudgeable(str(error)) from error
    run.remarks += call.lost
    parts: Sequence[Problem] = problem.of_kv_heads() if isinstance(problem, PagedAttention) else [problem]
    inputs = [RecordedInputs(part, histories_of(part), call.pages, head) for head, part in enumerate(parts)]
    run.suspicions += [f"call {case.number}: {each}" for of_part in inputs for each in of_part.suspicions()]
    arithmetic = E4M3 if run.ranges.e4m3_arithmetic and problem.kv_dtype == E4M3 else None
    truth = Truth.of_heads([truth_of_problem(each.problem, arithmetic, histories=each.histories) for each in inputs])
    result = _result(run, call)
    if result.out[: len(truth.expected)].shape == truth.expected.shape:
        for of_part, out in zip(inputs, result.out.chunk(len(parts), dim=1), strict=True):
            run.suspicions += [f"call {case.number}: {each}" for each in of_part.origins_of_non_finite(out)]
    truth, out, lse = call.compared(truth, result.out, result.lse)
    if not len(truth.expected):
        raise Unjudgeable(f"call {case.number}: every request sees a key that is not finite")
    run.expect_close("the call", Result(out, lse, result.call), truth)
    if run.implementation is OUTPUTS:
        run.remarks += [f"call {case.number}: {each}" for each in _findings(call, problem, run)]


def _findings(call: RecordedCall, problem: Problem, run: CaseRun) -> list[str]:
    if call.function is not AttentionCall.DECODE or not call.versions.get("flashinfer"):
        return []
    lens, found = list(zip(problem.q_lens(), problem.kv_lens(), strict=True)), list[str]()
    if run.wrongs and float(problem.bmm2_scale) != 1 and problem.kv_dtype in HALF_DTYPES:
        found.append("1-xqa-with-bf16-kv-leaves-bmm2_scale-out-and-divides-qkt-by-it")
    wrong = [at for each in run.results for at, (_, is_wrong) in enumerate(each.requests) if is_wrong]
    if wrong and all(lens[at][1] < lens[at][0] for at in wrong):
        found.append("3-xqa-is-wrong-for-a-request-with-fewer-keys-than-query-tokens")
    return [f"wrong as FlashInfer's XQA is on an H100 or H200, a known failure: {FINDINGS}#{each}" for each in found]


def _result(run: CaseRun, call: RecordedCall) -> Result:
    interface: AttentionCall = run.case.interface
    if run.implementation is not OUTPUTS:
        arguments = call.arguments(run.device)
        result = run.call(GivenCall(interface, arguments | {"workspace_buffer": new_workspace(run.device)}))
        return result._replace(out=result.out.cpu(), lse=None if result.lse is None else result.lse.cpu())
    noted = run.note_call(interface, dict(call.given))
    if call.out is None:
        raise KernelError(f"it raised {call.raised}" if call.raised else "it did not return")
    return Result(*output_and_lse(interface, (call.out, call.lse)), noted)


# Without cases: `check_of` returns the check with the cases of a recording.
RECORDED_CALLS = Check("R1", __doc__, lambda _: (), _judge, interfaces=tuple(AttentionCall))


def check_of(cases: Sequence[RecordedCase]) -> Check:
    return replace(RECORDED_CALLS, fixed=lambda scope: [case for case in cases if case.interface is scope.interface])
