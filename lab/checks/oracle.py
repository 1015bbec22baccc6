"""Compare an output or LSE with the expected one (`Truth`), or the bits of two outputs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.checks.run.verdicts import WrongVector
from lab.references.errors import Truth
from lab.workloads.inputs.guards import as_integers

SHOWN_ELEMENTS = 4
SHOWN_ROWS = 8


@dataclass(frozen=True)
class OutputComparison:
    """The comparison of one output or LSE with the expected one: whether it is wrong, in which rows, and by how much."""

    failure: str  #: a sentence about what is wrong; "" if nothing is
    worst_ratio: float = 0.0  #: the largest ratio of an error to its bound
    #: bool [num_rows], True for wrong rows; None if rows could not be compared, for example because the shape is wrong
    wrong_rows: Tensor | None = None
    example: WrongVector | None = None  #: the (row, head) vector with the largest error


def compare_output(out: Tensor, truth: Truth, least_bound: float = 0.0) -> OutputComparison:
    """Compare each (row, head) vector of an output [num_rows, num_qo_heads, head_dim] with the expected one, by relative L2
    error, and all vectors together for a bias that is too small to see in one. An error up to `least_bound` is allowed.
    """
    if out.shape != truth.expected.shape:
        return OutputComparison(_other_shape(out, truth.expected))
    if not out.dtype.is_floating_point:
        return OutputComparison(f"the output is {out.dtype}, which is no floating-point dtype")
    found = truth.compare(out, least_bound)
    wrong_rows, worst_ratio = found.faulty.any(dim=1), found.worst_ratio
    if not bool(wrong_rows.any()):
        return OutputComparison("", worst_ratio, wrong_rows)
    ((row, head),) = found.worst(1)
    example = _vector(truth, row, head, truth.expected, out)
    return OutputComparison(truth.wrong_output(found, out), worst_ratio, wrong_rows, example)


def compare_lse(lse: Tensor, truth: Truth) -> OutputComparison:
    """Compare an LSE [num_rows, num_qo_heads] with log2 of the softmax's denominator; -inf for a row that sees no key."""
    failure = truth.wrong_lse(lse)
    if lse.shape != truth.lse_log2.shape or not lse.dtype.is_floating_point:
        return OutputComparison(failure)
    ratio = truth.lse_ratio(lse)
    is_wrong = ratio > 1
    example = None
    if failure:
        row, head = divmod(int(is_wrong.flatten().to(torch.int8).argmax()), lse.shape[1])
        example = _vector(truth, row, head, truth.lse_log2.unsqueeze(-1), lse.unsqueeze(-1))
    return OutputComparison(failure, max(0.0, *ratio.flatten().tolist(), 0.0), is_wrong.any(dim=1), example)


def compare_bits(out: Tensor, other: Tensor) -> OutputComparison:
    """Compare two outputs bit for bit."""
    if out.shape != other.shape:
        return OutputComparison(_other_shape(out, other))
    left, right = as_integers(out), as_integers(other)
    differ = (left != right).flatten(1).any(dim=1)
    if torch.equal(left, right):
        return OutputComparison("", wrong_rows=differ)
    rows = differ.nonzero().flatten().tolist()
    more = "…" if len(rows) > SHOWN_ROWS else ""
    return OutputComparison(f"the bits of rows {rows[:SHOWN_ROWS]}{more} differ", wrong_rows=differ)


def largest_ulps(out: Tensor, other: Tensor) -> float:
    """Return the largest difference between elements of two outputs, [num_rows, num_heads, head_dim] of one dtype, in units
    in the last place of the largest element in the same (row, head) vector; infinity if an element that differs is not
    finite.
    """
    limits = torch.finfo(out.dtype)
    left, right = out.double(), other.double()
    size = torch.maximum(left.abs(), right.abs()).nan_to_num(posinf=limits.max).amax(-1, keepdim=True)
    place = limits.eps * torch.exp2(size.clamp(min=limits.smallest_normal).log2().floor())
    found = ((left - right).abs() / place)[as_integers(out) != as_integers(other)]
    return float(found.where(found.isfinite(), math.inf).max()) if found.numel() else 0.0


def _other_shape(out: Tensor, expected: Tensor) -> str:
    return f"the output is {list(out.shape)}, not {list(expected.shape)}"


def _vector(truth: Truth, row: int, head: int, expected: Tensor, got: Tensor) -> WrongVector:
    right, computed = expected[row, head].double(), got[row, head].double()
    error = torch.where(computed.isfinite(), (computed - right).abs(), math.inf).nan_to_num(math.inf, posinf=math.inf)
    worst = error.topk(min(SHOWN_ELEMENTS, len(error))).indices.sort().values
    where = f"row {truth.row_of_call(row)} (request {int(truth.request_of_row[row])}), head {head}"
    of = f", elements {', '.join(map(str, worst.tolist()))}" if len(error) > 1 else ""
    return WrongVector(where + of, tuple(right[worst].tolist()), tuple(computed[worst].tolist()))
