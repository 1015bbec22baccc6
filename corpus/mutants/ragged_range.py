"""Mutants of the ragged context call that are wrong for some sizes of logits alone."""

import torch
from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.wrong import wrong
from lab.calls.ragged_context import RaggedAttention

LEAST_MAXIMUM = -87.0  # e of it is about float32's least normal number


def _least_sinks(problem: RaggedAttention) -> Tensor:
    least = torch.full((problem.num_qo_heads,), LEAST_MAXIMUM, device=problem.query.device)
    return least if problem.sinks is None else problem.sinks.maximum(least)


class RaggedRange(Ragged):
    """Kernels of the ragged context call that are wrong for some sizes of logits alone."""

    ragged_maximum_begins_at_least = wrong(instead={"sinks": _least_sinks})(
        "A softmax begins with a maximum of -87 and its weight of 1: a row of lower logits is lost."
    )
    ragged_bmm2_without_sign = wrong(instead={"bmm2_scale": lambda problem: abs(problem.bmm2_scale)})(
        "bmm2_scale is taken without its sign."
    )
