"""The two functions that each module of `trtllm` and `peers` offers for a call."""

import functools
from collections.abc import Callable
from typing import Any

from lab.calls import made_at_once, takes
from lab.kernels.flashinfer_call import returning

Ready = Callable[[], Any]  # a call, ready to be made


def entries(kind: str, call_type: type[Any], make_ready: Callable[[Any, Any], Ready]) -> tuple[Callable[..., Any], ...]:
    """Return `<kind>_<name>`, which prepares a call of FlashInfer's function `<name>`, and `<name>`, which prepares and runs
    it.

    Args:
        kind: "prepare" (`lab.kernels.prepare`), or "plan" if the host reads lengths and tables (`lab.kernels.PlannedOnce`).
        call_type: the class of the call in `lab.calls`.
        make_ready: takes a call that has query rows and its checked arguments (the problem), and returns a function that runs
            the call any number of times. Its docstring is that of both functions.
    """

    @functools.wraps(make_ready)
    def entry(call: Any) -> Ready:
        problem = call.problem()
        if problem.has_no_rows:
            return returning(problem, getattr(call, "returned", problem.returned))
        return make_ready(call, problem)

    entry.__name__ = entry.__qualname__ = f"{kind}_{call_type.function.value}"
    ready = takes(call_type)(entry)
    return ready, made_at_once(ready)
