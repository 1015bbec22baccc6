"""A check of a problem's contents: no input would make results NaN."""

import math
from typing import TypeVar

import torch

from lab.calls.problem import AttentionProblem

AnyProblem = TypeVar("AnyProblem", bound=AttentionProblem)


def checked(problem: AnyProblem) -> AnyProblem:
    """Return a problem. On a CPU its lengths, offsets, ids, scales and sinks are checked first."""
    if problem.query.device.type == "cpu":
        problem.check_values()
        refuse_nan(problem, in_query=False)
    return problem


def refuse_nan(problem: AttentionProblem, in_query: bool = True) -> None:
    """Raise ValueError if an input would make results NaN: a sink that is NaN or plus infinity, a scale that is not finite, or
    NaN in a query row.

    A call on CPU tensors checks its sinks and scales itself. It does not check its query, because a serving engine pads a CUDA
    graph's batch with rows that hold anything, and a call cannot distinguish these rows from requests' rows. In all other cases
    the caller decides whether to check: `in_query` is False to allow NaN in the query. Rows after the last request's rows and
    rows of requests without keys may always hold NaN.
    """
    for name, term in zip(("bmm1_scale", "bmm2_scale"), (problem.bmm1_scale, problem.bmm2_scale), strict=True):
        if isinstance(term, torch.Tensor) and not bool(term.isfinite().all()):
            raise ValueError(f"{name} must be finite, got {float(term)}")
    if problem.sinks is not None:
        unfit = problem.sinks.isnan() | (problem.sinks == math.inf)
        if bool(unfit.any()):
            head = int(unfit.nonzero()[0])
            value = float(problem.sinks[head])
            raise ValueError(f"sinks[{head}] is {value}: a sink is finite, or minus infinity for a head without one")
    if not in_query or problem.has_no_rows:
        return
    query = problem.query.to(torch.float32)  # a GPU has no isnan of e4m3
    rows = query.isnan().flatten(1).any(dim=1).tolist()
    offsets = problem.row_offsets()
    for request, kv_len in enumerate(problem.kv_lens()):
        for row in range(*offsets[request : request + 2]) if kv_len else ():
            if rows[row]:
                raise ValueError(f"query holds NaN in row {row}, of request {request}, which would make its output NaN")
