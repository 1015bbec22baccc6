"""The error of an output vector, and the largest allowed error (bound): a multiple of the error of a control computation.

The error is the relative L2 error of the output vector of each row and head. The control is the same attention by plain
low-precision torch operations, with the same dtypes and inputs. The bound is its error times a small factor. There is no
absolute tolerance and no allowed number of wrong elements.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from lab.calls.entry import takes_fields_of
from lab.calls.problem import E4M3, Softmax
from lab.references.plain_arguments import check_plain
from lab.references.quantization import rounded
from lab.references.regression import Regression
from lab.references.softmax_attention import scales_as

# An output may be this many times as far from float64 as the control is. Tilings and split reductions of a right kernel
# differ from the control's one long sum by less. On normally distributed bf16 inputs that allows 0.010; losing one of n
# keys costs about 1/sqrt(n), 0.011 at 8,192, more or less with the key's weight. Beyond, only coded inputs can tell.
CONTROL_FACTOR = 4.0
# No control, however bad, allows an error near that of an output of zeros, which is 1; only the rounding of an output that
# underflows may.
LARGEST_BOUND = 0.5


def relative_l2(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ‖out - expected‖ / ‖expected‖ of each vector, float64 [num_rows, num_heads].

    If either vector has NaN or infinity, the error is infinity. If `expected` is zero, the error of an exact zero is 0, and of
    any other vector infinity.

    Args:
        out, expected: [num_rows, num_heads, head_dim], any float dtype.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out has shape {list(out.shape)}, but expected has {list(expected.shape)}")
    difference = (out.to(torch.float64) - expected.to(torch.float64)).norm(dim=-1)
    size = expected.to(torch.float64).norm(dim=-1)
    ratio = torch.where(size > 0, difference / size, torch.where(difference > 0, math.inf, 0.0))
    return torch.where(difference.isfinite(), ratio, math.inf)


@takes_fields_of(Softmax)
def eager_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    *,
    arithmetic: torch.dtype,
    out_dtype: torch.dtype,
    **softmax: Any,
) -> torch.Tensor:
    """Compute the control for the error bound: attention as a matrix unit computes it, operands in `arithmetic`, sums in
    float32.

    The query and the softmax's weights are rounded to `arithmetic` before each product (for e4m3, scaled to its range per row,
    as a kernel of that dtype does); scores, softmax and sums are float32; the output is in `out_dtype`.

    Args:
        query, keys, values, visible, softmax: as in `lab.references.attention`.
        arithmetic: dtype of the operands of both products: float16, bfloat16, e4m3 or float32.
        out_dtype: dtype of the result.

    Returns:
        [batch, q_len, num_qo_heads, v_head_dim] in `out_dtype`.

    Raises:
        TypeError, ValueError: see `lab.references.attention`.
    """
    terms = Softmax(**softmax)
    check_plain(query, keys, values, visible, terms)
    return unchecked_eager_attention(query, keys, values, visible, terms, arithmetic, out_dtype)


def unchecked_eager_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    softmax: Softmax,
    arithmetic: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Compute `eager_attention` without checking the arguments, for callers that have checked them."""
    keys, values = (side.to(torch.float32).transpose(1, 2) for side in (keys, values))
    rows = _as_operand(query.to(torch.float32), arithmetic).transpose(1, 2)  # [batch, num_qo_heads, q_len, head_dim]
    bmm1_scale, bmm2_scale = scales_as(rows, softmax)
    scores = _of_each_group(rows, keys.transpose(2, 3)).mul_(bmm1_scale).masked_fill(~visible.unsqueeze(1), -math.inf)
    if scores.shape[-1] == 0:  # no key at all
        return torch.zeros(*query.shape[:3], values.shape[-1], dtype=out_dtype, device=query.device)
    if softmax.sinks is not None:
        sink_logits = softmax.sinks.to(torch.float32).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink_logits), dim=-1)
    largest = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest.isfinite(), largest, torch.zeros_like(largest)))
    denominator = weights.sum(dim=-1, keepdim=True)
    weights = weights[..., : keys.shape[2]]
    sums = _of_each_group(_as_operand(weights, arithmetic), values)
    out = sums / torch.where(denominator == 0, 1.0, denominator)
    return rounded((out * bmm2_scale).transpose(1, 2), out_dtype)


def _of_each_group(rows: torch.Tensor, side: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each query head by the matrix of its K/V head. Query heads that share a K/V head are multiplied
    together.
    """
    q_len = rows.shape[2]
    by_head = rows.unflatten(1, (side.shape[1], -1)).flatten(2, 3) @ side
    return (
        by_head.unflatten(2, (-1, q_len)).flatten(1, 2) if q_len else by_head.new_zeros(*rows.shape[:3], side.shape[3])
    )


def _as_operand(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != E4M3:
        return values.to(dtype).to(torch.float32)
    largest = values.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
    return (values / scale).to(dtype).to(torch.float32) * scale


@dataclass(frozen=True, eq=False)
class Comparison:
    """Errors and bounds of one output.

    Attributes:
        error: relative L2 of each vector, float64 [num_rows, num_heads].
        bound: largest allowed relative L2 error of each vector, float64 [num_rows, num_heads].
        regression: regression of the output on the expected output; None if a vector exceeds its bound or there are no vectors.
    """

    error: torch.Tensor
    bound: torch.Tensor
    regression: Regression | None = None

    @property
    def passed(self) -> bool:
        return not bool(self.faulty.any())

    @property
    def faulty(self) -> torch.Tensor:
        """Return the vectors to report as wrong, bool [num_rows, num_heads]: those above their bounds or, if only a slope of
        the regression exceeds its bound, those of the worst group.
        """
        if self.regression is not None and self.regression.worst_ratio > 1:
            return self.wrong | self.regression.worst_group
        return self.wrong

    @property
    def wrong(self) -> torch.Tensor:
        """Return which vectors have an error above their bound, bool [num_rows, num_heads]. An infinite error is above every
        bound.
        """
        return ~(self.error <= self.bound) | self.error.isinf()

    @property
    def ratio(self) -> torch.Tensor:
        """Return each vector's error divided by its bound, float64 [num_rows, num_heads]; 0 for no error."""
        return torch.where(self.error == 0, torch.zeros_like(self.error), self.error / self.bound)

    @property
    def worst_ratio(self) -> float:
        """Return the largest ratio of an error to its bound, over all vectors and all slopes of the regression. It is at most 1
        if the output is right, and 0 if the output is empty.
        """
        of_slopes = 0.0 if self.regression is None else self.regression.worst_ratio
        return max(float(self.ratio.max()), of_slopes) if self.error.numel() else of_slopes

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Return (row, head) of the `count` vectors with the largest ratio of error to bound, the largest first; fewer if there
        are fewer.

        Wrong vectors come before right ones.
        """
        ranked = torch.where(self.faulty, self.ratio, self.ratio - self.ratio.amax() - 1)
        indices = ranked.flatten().topk(min(count, self.error.numel())).indices.tolist()
        return [divmod(index, self.error.shape[1]) for index in indices]


def compare(
    out: torch.Tensor, expected: torch.Tensor, control: torch.Tensor, groups: torch.Tensor | None = None
) -> Comparison:
    """Return the error of each vector of an output, and its bound: CONTROL_FACTOR times the control's error.

    One vector's control error is random, so all vectors of a group get the bound of the largest control error in the group. A
    group is the rows of one request, with all heads. A vector that is expected to be zero must be exactly zero, and the
    control's error in this vector does not count. A vector of tiny elements may always have the error of rounding to the
    control's dtype: half its smallest number in each element.

    Args:
        out, expected, control: [num_rows, num_heads, head_dim]; expected in float64.
        groups: int64 [num_rows], the request of each row; None: all rows are one group.

    Raises:
        ValueError: the shapes differ, or `expected` or `control` is not finite.
    """
    for name, values in (("expected", expected), ("control", control)):
        if not bool(values.to(torch.float64).isfinite().all()):
            raise ValueError(f"{name} must be finite to judge an output by; it holds NaN or infinity")
    error = relative_l2(out, expected)
    control_error = relative_l2(control, expected)
    allowed = torch.where(control_error.isfinite(), control_error, 0.0).amax(dim=1) * CONTROL_FACTOR
    allowed = allowed.clamp(max=LARGEST_BOUND)
    if groups is None:
        groups = torch.zeros(out.shape[0], dtype=torch.int64, device=out.device)
    if groups.shape != out.shape[:1]:
        raise ValueError(f"groups must name the request of each of the {out.shape[0]} rows, got {list(groups.shape)}")
    count = int(groups.max()) + 1 if groups.numel() else 0
    largest = torch.zeros(count, dtype=torch.float64, device=out.device)
    largest = largest.scatter_reduce(0, groups, allowed, reduce="amax")
    bound = largest[groups].unsqueeze(1).expand_as(error)
    return Comparison(error, torch.maximum(bound, _rounding_of_tiny_elements(expected, control.dtype)))


def _rounding_of_tiny_elements(expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return, for each vector, the largest relative L2 error of rounding its elements to multiples of the dtype's smallest
    number: float64 [num_rows, num_heads]; 0 for a vector of zeros.
    """
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps
    size = expected.to(torch.float64).norm(dim=-1)
    return torch.where(size > 0, smallest / 2 * math.sqrt(expected.shape[-1]) / size, 0.0)
