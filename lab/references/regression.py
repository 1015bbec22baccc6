"""The regression of an output on the truth: a bias that no vector shows by itself is the slope of many together.

A vector's slope is sum(out * exact) / sum(exact ** 2); that of a group of vectors is the mean of theirs, so that long and short
vectors count equally. For a right kernel it differs from 1 by rounding alone. Rounding errors of different vectors are
independent, so the mean's error falls with the square root of their number.
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
    """Slopes of the groups of vectors of one output, the plainest groups first.

    Attributes:
        words: of each group: "of head 3"; empty for all vectors.
        labels: int64 [num_kinds, num_rows, num_heads]: of each kind, the vector's group.
        slope: float64 [num_groups].
        bound: float64 [num_groups], what |slope - 1| may be.
    """

    words: tuple[str, ...]
    labels: Tensor
    slope: Tensor
    bound: Tensor

    @property
    def ratio(self) -> Tensor:
        """Return each slope's distance from 1 over its bound, float64 [num_groups]."""
        return (self.slope - 1).abs() / self.bound

    @property
    def worst_ratio(self) -> float:
        """Return the largest ratio; 0 if there is no group."""
        return float(self.ratio.max()) if self.words else 0.0

    @property
    def worst_group(self) -> Tensor:
        """Return the vectors of the group with the largest ratio, bool [num_rows, num_heads]."""
        return (self.labels == int(self.ratio.argmax())).any(dim=0)

    def sentence(self) -> str:
        """Return a sentence: by which factor the group with the largest ratio is off."""
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
    """Return the slopes of all vectors, of each head, of each request, and of each row by its place in its request.

    A slope's bound is `DEVIATIONS` of a mean's standard deviation, that of one vector over the square root of their number:
    one rounding, in `arithmetic` or the control's dtype, and the control's own slopes' deviation. Vectors of equal LSE count
    as one, for their weights may be equal. What the control is off in common is allowed besides. Vectors of zeros are in no
    group, and there are no groups where e4m3 rounds the weights, whose few bits make a bias of percent, another in each kernel.

    Args:
        out, expected, control: [num_rows, num_heads, head_dim]; expected in float64.
        lse_log2: float64 [num_rows, num_heads].
        request_of_row: int64 [num_rows], rows of a request together.
        arithmetic: of the control.
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
    """Yield for each kind of group (the groups' names, the groups' vectors broadcastable to [num_rows, num_heads])."""
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
