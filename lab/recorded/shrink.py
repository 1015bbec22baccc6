"""Shrink a recorded call whose output or LSE is wrong: search for a smaller call that is wrong for the same reason."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.named_enum import NamedEnum
from lab.recorded.call import RecordedCall, RecordingError
from lab.recorded.reductions import OF_OUTPUTS, REDUCTIONS, contents_of, drawn
from lab.references.assertion import truth_of_problem
from lab.shrinking import smallest
from lab.workloads.inputs.contents import new_workspace

SHOWN_ELEMENTS = 4


class Reason(NamedEnum):
    ARGUMENTS = "the arguments are invalid"
    RAISED = "the call raises an error"
    NO_RETURN = "the call did not return"
    NOT_FINITE = "the output is not finite"
    OUTPUT = "the output is wrong"
    LSE = "the LSE is wrong"
    BIAS = "the output has a bias"


@dataclass(frozen=True)
class Fault:
    """Why the result of a call is wrong."""

    reason: Reason
    sentence: str
    error: str = ""  #: the name of the type of the exception that was raised
    vector: str = ""  #: the place and the first elements of the worst output vector


Find = Callable[[RecordedCall], Fault | None]  # returns the fault of a call; None if the call's result is right


def fault_by_calling(function: Callable[..., Any], device: torch.device) -> Find:
    """Return a function that makes a recorded call again, of `function` on a device, and returns the fault of the new result.
    It raises torch.AcceleratorError if the call crashes the GPU's context, because then no further call is possible.
    """

    def find(call: RecordedCall) -> Fault | None:
        try:
            returned = function(**call.arguments(device) | {"workspace_buffer": new_workspace(device)})
            results = [each.cpu() for each in (returned if isinstance(returned, tuple) else (returned,))]
        except torch.AcceleratorError:
            raise
        except Exception as error:  # foreign code may raise anything
            return Fault(Reason.RAISED, f"{type(error).__name__}: {error}", type(error).__name__)
        return fault_of(call, results[0], results[1] if len(results) > 1 else None)

    return find


def recorded_fault(call: RecordedCall) -> Fault | None:
    if call.raised:
        return Fault(Reason.RAISED, call.raised, call.raised.partition(":")[0])
    if call.out is None:
        return Fault(Reason.NO_RETURN, "neither a result nor an error was recorded")
    return fault_of(call, call.out, call.lse)


def fault_of(
    call: RecordedCall, out: Tensor, lse: Tensor | None, arithmetic: torch.dtype | None = None
) -> Fault | None:
    """Return the fault of an output and LSE, by the judge's bounds. Requests that see a non-finite key are not compared.
    `arithmetic` is the dtype in which the bound's control computes; None: the query's.
    """
    truth, out, lse = call.compared(truth_of_problem(call.problem(), arithmetic), out, lse)
    if not len(truth.expected):
        return None
    compared = truth.compare(out)
    if bool(compared.wrong.any()):
        ((row, head),) = compared.worst(1)
        shown = (side[row, head, :SHOWN_ELEMENTS].double().tolist() for side in (truth.expected, out))
        expected, got = (", ".join(f"{value:.5g}" for value in values) for values in shown)
        place = f"request {int(truth.request_of_row[row])}, row {truth.row_of_call(row)}, head {head}"
        vector = f"{place}: expected in float64 {expected} …, got {got} …"
        reason = Reason.OUTPUT if bool(out.isfinite().all()) else Reason.NOT_FINITE
        return Fault(reason, truth.wrong_output(compared, out), "", vector)
    if lse is not None and (sentence := truth.wrong_lse(lse)):
        return Fault(Reason.LSE, sentence)
    return None if compared.passed else Fault(Reason.BIAS, truth.wrong_output(compared, out))


def shrunk(call: RecordedCall, find: Find, synthetic: bool = False) -> tuple[RecordedCall, Fault | None]:
    """Search for a smaller call whose result is wrong for the same reason. Ctrl-C ends the search, and the smallest call found
    until then is returned.

    Args:
        find: `recorded_fault`, with which a call that did not return is not shrunk, or a result of `fault_by_calling`.
        synthetic: replace all contents by random values at the end, even if the result is then right.

    Returns:
        The smallest call and its fault; with `synthetic` None if the new result is right or `find` is `recorded_fault`.

    Raises:
        RecordingError: the result is right or has only a bias, the call cannot be judged, it crashes the GPU's context, or it
            raises an error and the recorded call did not.
    """
    call.refuse_block_sparse("shrunk")
    try:
        fault = find(call)
        if fault is None:
            engine = f": the engine called {call.module}" if call.module else ""
            raise RecordingError(f"the result of the call is right, so that there is nothing to shrink{engine}")
        if fault.reason is Reason.RAISED and call.out is not None:
            raise RecordingError(f"the recorded call returned, but here it raises {fault.sentence}")
        if fault.reason is Reason.BIAS:
            few = "the call cannot be shrunk, since a smaller one has too few vectors"
            raise RecordingError(f"{few}: {fault.sentence}")
        kind = fault.reason, fault.error

        def stays_wrong(smaller: RecordedCall) -> bool:
            nonlocal call, fault
            try:
                smaller.problem()
            except RecordingError:
                return False
            found = find(smaller)
            if found is None or (found.reason, found.error) != kind:
                return False
            call, fault = smaller, found
            return True

        if find is not recorded_fault or call.out is not None:
            with suppress(KeyboardInterrupt, torch.AcceleratorError):  # then the smallest call so far is returned
                smallest(call, OF_OUTPUTS if find is recorded_fault else REDUCTIONS, stays_wrong)
        if synthetic and not call.drawn >= {*contents_of(call)}:
            call = drawn(call, contents_of(call))
            return call, None if find is recorded_fault else find(call)
    except torch.AcceleratorError as error:
        raise RecordingError(f"the call cannot be shrunk: {error}") from error
    return call, fault
