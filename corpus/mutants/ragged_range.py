"""Mutants of the ragged context call that are wrong for some sizes of logits alone."""

import torch
from torch import Tensor

from corpus.mutants.ragged import Ragged
from lab.calls.ragged_context import RaggedAttention

LEAST_MAXIMUM = -87.0  # e of it is about float32's least normal number


def _least_sinks(problem: RaggedAttention) -> Tensor:
    least = torch.full((problem.num_qo_heads,), LEAST_MAXIMUM, device=problem.query.device)
    return least if problem.sinks is None else problem.sinks.maximum(least)


class RaggedMaximumBeginsAtLeast(Ragged, instead={"sinks": _least_sinks}):
    """A softmax begins with a maximum of -87 and its weight of 1: a row of lower logits is lost."""


class RaggedBmm2WithoutSign(Ragged, instead={"bmm2_scale": lambda problem: abs(problem.bmm2_scale)}):
    """bmm2_scale is taken without its sign."""
