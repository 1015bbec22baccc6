"""A wrapper of FlashInfer's that plans on the host from the lengths, under the name of one of the TRT-LLM calls."""

from collections.abc import Callable
from typing import Any

import torch

from lab.calls import made_at_once, takes
from lab.kernels.flashinfer_call import capability_for
from lab.kernels.support import Problem, refuse_unsupported
from lab.kernels.support.peers import BY_BACKEND, fa_backend

Plan = Callable[[Any, str], Callable[[], Any]]


class PlannedWrapper:
    """One of FlashInfer's wrappers with one of its backends, FA2 or FA3, as an implementation of a call.

    Each call copies lengths to the host and waits, and none can be captured in a CUDA graph. `plan_` before its name does
    that once, for lengths that stay (`lab.kernels.PlannedOnce`): it returns the same call, which may be made any number of
    times, in a CUDA graph too. Lengths, rows and page ids are those of the planning; the contents of the other tensors may
    change.
    """

    def __init__(self, module: str, function: str, call_type: type[Any], plan: Plan, backend: str = "") -> None:
        """Give the wrapper the call's name.

        Args:
            module: its module, after which it is named.
            function: FlashInfer's name of the call.
            call_type: `MLADecodeCall` or `RaggedContextCall`.
            plan: checks and plans a call for a backend, and returns it ready.
            backend: "fa2" or "fa3"; "" for FA3 on SM90 and FA2 elsewhere.
        """

        def planned(call: Any) -> Callable[[], Any]:
            """Return the call, checked and planned; shapes and errors are its type's, in `lab.calls`."""
            return plan(call, backend)

        self.__name__ = f"{module}:{backend}" if backend else module
        plan_it = takes(call_type)(planned)
        setattr(self, f"plan_{function}", plan_it)
        setattr(self, function, made_at_once(plan_it))


def supported_backend(backend: str, wrapper: str, problem: Problem) -> str:
    """Return the backend that runs a problem, the GPU's own where `backend` is "".

    Raises:
        NotImplementedError: off the GPU, inside a CUDA graph's capture, or for a problem that the backend does not take,
            with the reason of `lab.kernels.support.why_not`.
    """
    device = problem.query.device
    backend = backend or fa_backend(capability_for(device))
    refuse_unsupported(BY_BACKEND[problem.call][backend], problem)
    refuse_planning_in_capture(wrapper, device)
    return backend


def refuse_planning_in_capture(wrapper: str, device: torch.device) -> None:
    """Raise NotImplementedError where a wrapper would plan, from lengths on the host, inside a CUDA graph."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{wrapper} plans on the host from the lengths, which no CUDA graph can: call plan before"
        )
