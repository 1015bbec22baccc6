"""Regress an output on the expected output. This finds a common error (bias) that is within the bound of every single vector.

A vector's slope is sum(out * expected) / sum(expected ** 2), which is the factor by which the vector is too large. The slope of
a group is the mean of its vectors' slopes, so that long and short vectors count equally. For a right kernel this mean differs
from 1 only by rounding. Rounding errors of different vectors are independent, so the mean's error falls with the square root of
the number of vectors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.calls.problem import E4M3

# Allowed distance of a slope from 1, in standard deviations of the rounding error. results/bias.md has the measured distances.
DEVIATIONS = 4.0
# ... and by a common error of float32 sums. Tensor cores cut their sums (Fasi et al. 2021, 10.7717/peerj-cs.330), by
# up to 2**-24 of them in the mean, at each of the 8,192 steps of 16 that 131,072 keys take: 3e-4, as earlier sums are smaller.
COMMON = 3e-4
# Standard deviation of one rounding to nearest, in units of eps / 2: uniform in its interval, of numbers that are
# log-uniform. A vector may meet one as a whole, that of a weight which outweighs all others.
ROUNDING_DEVIATION = 0.42
# Rows whose LSEs (base e) agree so far, in units of eps, may have weights that agree, and these then one rounding in common:
# two roundings are independent from a fifth of their interval on, which is eps or half of it.
EQUAL_LSE = 1 / 8
LN2 = math.log(2.0)


@dataclass(frozen=True, eq=False)
class Regression:
    """The mean slope of each group of vectors in one output. The five kinds of groups are: all vectors; those of one head;
    those of one request; those of the rows with one index in their request, counted from its first row; and the same counted
    from its last row.

    Attributes:
        words: the name of each group for a sentence, such as " of head 3"; the group of all vectors has an empty name.
        labels: int64 [num_kinds, num_rows, num_heads], the index of each vector's group in `slope`, for each kind of groups.
        slope: float64 [num_groups], the mean slope of each group.
        bound: float64 [num_groups], largest allowed |slope - 1|.
    """

    words: tuple[str, ...]
    labels: Tensor
    slope: Tensor
    bound: Tensor

    @property
    def ratio(self) -> Tensor:
        """Return each group's |slope - 1| divided by its bound, float64 [num_groups]."""
        return (self.slope - 1).abs() / self.bound

    @property
    def worst_ratio(self) -> float:
        """Return the largest |slope - 1| / bound of all groups; 0 if there is no group."""
        return float(self.ratio.max()) if self.words else 0.0

    @property
    def worst_group(self) -> Tensor:
        """Return which vectors are in the group with the largest |slope - 1| / bound, bool [num_rows, num_heads]."""
        return (self.labels == int(self.ratio.argmax())).any(dim=0)

    def sentence(self) -> str:
        """Return a sentence about the group with the largest |slope - 1| / bound: by how much its outputs are too large or too
        small.
        """
        worst = int(self.ratio.argmax())
        slope, bound = float(self.slope[worst]), float(self.bound[worst])
        above = slope > 1
        return (
            f"all outputs{self.words[worst]} are {abs(slope - 1):.2%} too {'large' if above else 'small'}: factor "
            f"{slope:.4f}, {'at most' if above else 'at least'} {1 + bound if above else 1 - bound:.4f} is rounding"
        )


def regress(
    out: Tensor, expected: Tensor, control: Tensor, lse_log2: Tensor, request_of_row: Tensor, arithmetic: torch.dtype
) -> Regression:
    """Return the mean slopes of all groups of vectors (`Regression` names the groups), with the bounds of the slopes.

    A slope's bound is `DEVIATIONS` times the standard deviation of the group's mean. One vector's standard deviation is that of
    one rounding, in `arithmetic` or the control's dtype, plus that of the control's slopes; the mean divides it by the square
    root of the number of vectors. Vectors with equal LSE count as one vector, because their weights may be equal. The bias of
    the control is added to the bound. Vectors of zeros are in no group. There are no groups if e4m3 rounds the weights: its few
    bits cause a bias of some percent, which differs from kernel to kernel.

    Args:
        out, expected, control: [num_rows, num_heads, head_dim]; expected in float64.
        lse_log2: float64 [num_rows, num_heads].
        request_of_row: int64 [num_rows], the request of each row. Rows of a request are consecutive.
        arithmetic: dtype of the control's operands.
    """
    size = expected.square().sum(dim=-1)
    counted = size > 0
    if arithmetic == E4M3 or not bool(counted.any()):
        nothing = expected.new_zeros(0)
        return Regression((), counted.new_zeros(0, *counted.shape, dtype=torch.int64), nothing, nothing)
    slopes, control_slopes = (
        (side.to(torch.float64) * expected).sum(dim=-1)[counted] / size[counted] for side in (out, control)
    )
    words: list[str] = []
    kinds = []
    for kind_words, groups in _kinds(request_of_row, counted.shape[1]):
        kinds.append(len(words) + groups.expand_as(counted))
        words += kind_words
    labels = torch.stack(kinds)
    of_vectors = labels[:, counted]
    count, total, control_total = (
        slopes.new_zeros(len(words)).index_add(0, of_vectors.flatten(), side.expand_as(of_vectors).flatten())
        for side in (torch.ones_like(slopes), slopes - 1, control_slopes - 1)
    )
    eps = max(torch.finfo(arithmetic).eps, torch.finfo(control.dtype).eps)
    _, equal = (lse_log2[counted] * LN2 / (EQUAL_LSE * eps)).round().to(torch.int64).unique(return_inverse=True)
    pairs, together = (of_vectors * len(equal) + equal).unique(return_counts=True)
    squares = slopes.new_zeros(len(words)).index_add(0, pairs // len(equal), together.to(torch.float64).square())
    independent = count.square() / squares.clamp(min=1)
    count = count.clamp(min=1)  # a group may have vectors of zeros alone
    of_one_vector = ROUNDING_DEVIATION * eps / 2 + (control_slopes - 1).square().mean().sqrt()
    bound = COMMON + (control_total / count).abs() + DEVIATIONS * of_one_vector / independent.clamp(min=1).sqrt()
    return Regression(tuple(words), labels, 1 + total / count, bound)


def _kinds(request_of_row: Tensor, num_heads: int) -> Iterator[tuple[list[str], Tensor]]:
    """Yield, for each kind of groups, the groups' names, and the number of each vector's group, broadcastable to [num_rows,
    num_heads].
    """
    device = request_of_row.device
    yield [""], torch.zeros(1, 1, dtype=torch.int64, device=device)
    yield [f" of head {head}" for head in range(num_heads)], torch.arange(num_heads, device=device).unsqueeze(0)
    requests, index, q_lens = request_of_row.unique_consecutive(return_inverse=True, return_counts=True)
    yield [f" of request {request}" for request in requests.tolist()], index.unsqueeze(1)
    row = torch.arange(len(index), device=device) - (q_lens.cumsum(0) - q_lens)[index]
    longest = int(q_lens.max())
    yield [f" of row {each} of each request" for each in range(longest)], row.unsqueeze(1)
    from_end = q_lens[index] - 1 - row
    yield [f" of row -{each + 1} of each request" for each in range(longest)], from_end.unsqueeze(1)
