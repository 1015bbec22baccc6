"""The expected results of a call (`Truth`), the error of each output vector, and the largest error that is allowed (its bound).

The error is the relative L2 error of the output vector of each row and head. The bound is a multiple of the control's error.
The control is the same attention by plain low-precision torch operations, with the same dtypes and inputs. There is no absolute
tolerance and no allowed number of wrong elements.

If all vectors are within their bounds, a regression of the output on the expected output finds an error (bias) that many
vectors have in common. A vector's slope, sum(out * expected) / sum(expected ** 2), is the factor by which the vector is too
large. The slope of a group of vectors is the mean of their slopes, so that long and short vectors count equally. For a right
kernel it differs from 1 only by rounding, whose effect on the mean falls with the square root of the number of vectors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.calls.arguments import check_tensor
from lab.calls.problem import E4M3

# An output's error may be this multiple of the control's error. The tiles and splits of a right kernel cause less. For normally
# distributed bf16 inputs the bound is 0.010. Without one of n keys the error is about 1/sqrt(n), 0.011 for 8,192 keys: among
# more keys, only inputs such as needles show a missing key.
CONTROL_FACTOR = 4.0
# Upper limit of a bound, whatever the control's error. An output of zeros has the error 1. Only the rounding of tiny elements
# may exceed it.
LARGEST_BOUND = 0.5
# Allowed distance of a slope from 1, in standard deviations of the rounding error. results/bias.md has the measured distances.
DEVIATIONS = 4.0
# Allowed bias of float32 sums, in addition. Tensor cores truncate their sums (Fasi et al. 2021, 10.7717/peerj-cs.330), on
# average by up to 2**-24 of the sum, at each of the 8,192 steps of 16 keys that 131,072 keys take: 3e-4, as earlier sums are
# smaller.
COMMON = 3e-4
# Standard deviation of one rounding to nearest, in units of eps / 2, for numbers with log-uniform sizes. If one weight
# outweighs all others, its rounding scales the whole vector.
ROUNDING_DEVIATION = 0.42
# Rows whose LSEs (base e) differ by less than this, in units of eps, count as rows with equal weights, whose roundings are
# equal. Roundings of two numbers are independent if the numbers differ by a fifth of the rounding interval, which is eps or eps
# / 2.
EQUAL_LSE = 1 / 8
LN2 = math.log(2.0)
# The control's error is also random where scores are large: float32 rounds scores of 14,000 (base 2) to multiples of 2**-10.
# So a bound may be LARGE_SCORES_FACTOR times as large, but not larger than the error of weights whose scores are rounded
# SCORE_ROUNDINGS times: by the sum of products and by its scaling, and twice, since a difference of two scores has the error
# of both.
SCORE_ROUNDINGS = 4.0
LARGE_SCORES_FACTOR = 4.0
SHOWN_VECTORS = 3
# Scores are float32 sums of exact products, so the softmax's denominator is known to far better than 0.3 % (0.004 in base
# 2) by any kernel that sums weights before it rounds them; e4m3 queries of up to 448 sum to larger scores.
LSE_LOG2_BOUND = 0.004
LSE_LOG2_RELATIVE_BOUND = 1e-5


def relative_l2(out: Tensor, expected: Tensor) -> Tensor:
    """Return ‖out - expected‖ / ‖expected‖ of each vector, float64 [num_rows, num_heads]. Both are [num_rows, num_heads,
    head_dim] of any float dtype; other shapes raise ValueError.

    If either vector has NaN or infinity, the error is infinity. If `expected` is zero, the error of an exact zero is 0, and of
    any other vector infinity.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out has shape {list(out.shape)}, but expected has {list(expected.shape)}")
    expected = expected.to(torch.float64)
    return _relative(out, expected, expected.norm(dim=-1))


def _relative(out: Tensor, expected: Tensor, size: Tensor) -> Tensor:
    difference = (out.to(torch.float64) - expected).norm(dim=-1)
    ratio = torch.where(size > 0, difference / size, torch.where(difference > 0, math.inf, 0.0))
    return torch.where(difference.isfinite(), ratio, math.inf)


@dataclass(frozen=True, eq=False)
class Regression:
    """For each group of output vectors, the mean factor (slope) by which they are too large: 1 is right, 1.02 is 2 % too large.
    The groups are: all vectors; those of each head; of each request; of the i-th row of every request, counted from the
    request's start, and from its end.
    """

    #: the name of each group for a sentence, such as " of head 3"; the group of all vectors has an empty name
    words: tuple[str, ...]
    #: int64 [num_kinds, num_rows, num_heads], the index of each vector's group in `slope`, for each kind of groups
    labels: Tensor
    slope: Tensor  #: float64 [num_groups], the mean slope of each group
    bound: Tensor  #: float64 [num_groups], largest allowed distance of the slope from 1

    @property
    def ratio(self) -> Tensor:
        """Return the distance of each group's slope from 1, divided by its bound, float64 [num_groups]."""
        return (self.slope - 1).abs() / self.bound

    @property
    def worst_ratio(self) -> float:
        return float(self.ratio.max()) if self.words else 0.0

    @property
    def worst_group(self) -> Tensor:
        """Return which vectors belong to the group with the largest `ratio`, bool [num_rows, num_heads]."""
        return (self.labels == int(self.ratio.argmax())).any(dim=0)

    def sentence(self) -> str:
        """Return a sentence that says by which factor the outputs of the `worst_group` are too large or too small."""
        worst = int(self.ratio.argmax())
        slope, bound = float(self.slope[worst]), float(self.bound[worst])
        size, limit = ("large", f"at most {1 + bound:.4f}") if slope > 1 else ("small", f"at least {1 - bound:.4f}")
        excess = f"{abs(slope - 1):.2%} too {size}"
        return f"all outputs{self.words[worst]} are {excess}: factor {slope:.4f}, {limit} is rounding"


@dataclass(frozen=True, eq=False)
class Comparison:
    """The relative L2 error of each output vector, its bound, and a test for a bias that many vectors have in common."""

    error: Tensor  #: relative L2 of each vector, float64 [num_rows, num_heads]
    bound: Tensor  #: largest allowed relative L2 error of each vector, float64 [num_rows, num_heads]
    #: regression of the output on the expected output; None if a vector exceeds its bound or there are no vectors
    regression: Regression | None = None

    @property
    def passed(self) -> bool:
        return not bool(self.faulty.any())

    @property
    def faulty(self) -> Tensor:
        """Return which output vectors are wrong, bool [num_rows, num_heads]: those whose error exceeds their bound. If
        groups of vectors (`Regression`) are too large or too small, all vectors of the worst group are wrong too.
        """
        if self.regression is not None and self.regression.worst_ratio > 1:
            return self.wrong | self.regression.worst_group
        return self.wrong

    @property
    def wrong(self) -> Tensor:
        """Return which vectors exceed their bounds, bool [num_rows, num_heads]. Infinite errors exceed all bounds."""
        return ~(self.error <= self.bound) | self.error.isinf()

    @property
    def ratio(self) -> Tensor:
        """Return each vector's error divided by its bound, float64 [num_rows, num_heads]; 0 for no error."""
        return torch.where(self.error == 0, torch.zeros_like(self.error), self.error / self.bound)

    @property
    def worst_ratio(self) -> float:
        """Return the largest `ratio` of a vector or, if it is larger, of a group (`Regression`); 0 for an empty output."""
        of_slopes = 0.0 if self.regression is None else self.regression.worst_ratio
        return max(float(self.ratio.max()), of_slopes) if self.error.numel() else of_slopes

    def worst(self, count: int) -> list[tuple[int, int]]:
        """Return (row, head) of the worst `count` vectors: the `faulty` ones first, then the rest, by descending `ratio`."""
        ranked = torch.where(self.faulty, self.ratio, self.ratio - self.ratio.amax() - 1)
        indices = ranked.flatten().topk(min(count, self.error.numel())).indices.tolist()
        return [divmod(index, self.error.shape[1]) for index in indices]


def compare(out: Tensor, expected: Tensor, control: Tensor, groups: Tensor | None = None) -> Comparison:
    """Return the error and the bound of each output vector. The bound is CONTROL_FACTOR (4) times the error of the control,
    which is the same attention in low precision (`eager_attention`), but at most LARGEST_BOUND (0.5).

    One vector's control error is random, so all vectors of a request have the same bound, from their largest control error. A
    vector that is expected to be zero must be exactly zero; its control error is ignored. A bound is never less than the error
    of rounding each element to a multiple of the smallest positive number of the control's dtype.

    Args:
        out, expected, control: [num_rows, num_heads, head_dim]; expected in float64.
        groups: int64 [num_rows], the request of each row; None: all rows are one group.

    Raises:
        TypeError: an argument is no tensor of a float dtype.
        ValueError: shapes or devices differ, or `expected` or `control` is not finite.
    """
    for name, values in (("expected", expected), ("out", out), ("control", control)):
        if not check_tensor(name, values).is_floating_point():
            raise TypeError(f"{name} must be of a float dtype, got {values.dtype}")
        if values.device != expected.device:
            raise ValueError(f"{name} is on {values.device}, but expected is on {expected.device}; move it there")
    if expected.ndim != 3:
        raise ValueError(f"expected must be [num_rows, num_heads, head_dim], got shape {list(expected.shape)}")
    return _compared(out, expected, control, groups)


def _compared(out: Tensor, expected: Tensor, control: Tensor, groups: Tensor | None) -> Comparison:
    dtype, expected, control = control.dtype, expected.to(torch.float64), control.to(torch.float64)
    for name, values in (("expected", expected), ("control", control)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"{name} must be finite to judge an output by; it holds NaN or infinity")
    for name, values in (("out", out), ("control", control)):
        if values.shape != expected.shape:
            raise ValueError(f"{name} has shape {list(values.shape)}, but expected has {list(expected.shape)}")
    size = expected.norm(dim=-1)
    error, control_error = _relative(out, expected, size), _relative(control, expected, size)
    allowed = torch.where(control_error.isfinite(), control_error, 0.0).amax(dim=1) * CONTROL_FACTOR
    allowed = allowed.clamp(max=LARGEST_BOUND)
    if groups is None:
        groups = torch.zeros(out.shape[0], dtype=torch.int64, device=out.device)
    if groups.shape != out.shape[:1]:
        raise ValueError(f"groups must name the request of each of the {out.shape[0]} rows, got {list(groups.shape)}")
    count = int(groups.max()) + 1 if groups.numel() else 0
    largest = allowed.new_zeros(count).scatter_reduce(0, groups, allowed, reduce="amax")
    bound = largest[groups].unsqueeze(1).expand_as(error)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the rounding of elements to its multiples
    of_tiny = torch.where(size > 0, smallest / 2 * math.sqrt(expected.shape[-1]) / size, 0.0)
    return Comparison(error, torch.maximum(bound, of_tiny))


def regress(
    out: Tensor, expected: Tensor, control: Tensor, lse_log2: Tensor, request_of_row: Tensor, arithmetic: torch.dtype
) -> Regression:
    """Return, for each group of output vectors such as one head, the mean slope and its largest allowed distance from 1. A
    vector's slope, sum(vector * expected) / sum(expected ** 2), is the factor by which the vector is too large. For a group of
    n vectors::

        bound = COMMON + |mean control slope of the group - 1| + DEVIATIONS * deviation / sqrt(n)
        deviation = ROUNDING_DEVIATION * eps / 2 + sqrt(mean of (control slope - 1) ** 2 over all vectors of the output)

    Here eps is the larger one of the eps of `arithmetic` and the eps of the control's dtype. In n, vectors with equal LSEs
    count as one, because their weights, and so their rounding errors, may be equal. Vectors that are expected to be zero are in
    no group. There are no groups if `arithmetic` is e4m3: its few bits cause a bias of some percent that differs from kernel to
    kernel.

    Args:
        out, expected, control: [num_rows, num_heads, head_dim], `expected` in float64.
        lse_log2: float64 [num_rows, num_heads].
        request_of_row: int64 [num_rows], the request of each row. Rows of a request must be consecutive.
        arithmetic: dtype of the operands with which the control was computed.
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
    for kind_words, groups in _groupings(request_of_row, counted.shape[1]):
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


def _groupings(request_of_row: Tensor, num_heads: int) -> Iterator[tuple[list[str], Tensor]]:
    """Yield `Regression`'s five groupings as (names of the groups, group indices that broadcast to [num_rows, num_heads])."""
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


@dataclass(frozen=True, eq=False)
class Truth:
    """The expected output and LSE of a call, and the control: the output of the same attention in low precision."""

    expected: Tensor  #: float64 [num_rows, num_qo_heads, head_dim]
    control: Tensor  #: the same output computed in low precision, in the output's dtype
    lse_log2: Tensor  #: float64 [num_rows, num_qo_heads], -inf where a row sees no key
    request_of_row: Tensor  #: int64 [num_rows], the request of each row
    arithmetic: torch.dtype  #: dtype of the control's operands
    shared_error: float = 0.0  #: relative bias, common to all vectors, that a right kernel may have
    #: float64 [num_rows, num_qo_heads, 2] or None: the share of the softmax's denominator that skip-softmax may leave out, and
    #: the relative L2 error that this may cause
    skipped: Tensor | None = None
    #: int64 [num_rows], the index of each row among the rows of the call; None if no row is left out
    rows: Tensor | None = None

    @classmethod
    def of_heads(cls, parts: Sequence["Truth"]) -> "Truth":
        """Concatenate the expected results of several parts of the heads. `parts` must be in the order of the heads."""
        if len(parts) == 1:
            return parts[0]
        by_head = [(part.expected, part.control, part.lse_log2) for part in parts]  # of block-sparse calls: none skip
        expected, control, lse_log2 = (torch.cat(side, dim=1) for side in zip(*by_head, strict=True))
        return replace(parts[0], expected=expected, control=control, lse_log2=lse_log2, skipped=None)

    def of_rows(self, chosen: Tensor) -> "Truth":
        """Return the expected results of the rows that are True in `chosen`, bool [num_rows]."""
        of_rows = ("expected", "control", "lse_log2", "request_of_row", "skipped")
        rows = chosen.nonzero().flatten() if self.rows is None else self.rows[chosen]
        parts = {name: each[chosen] for name in of_rows if (each := getattr(self, name)) is not None}
        return replace(self, rows=rows, **parts)

    def row_of_call(self, row: int) -> int:
        return row if self.rows is None else int(self.rows[row])

    def compare(self, out: Tensor, least_bound: float = 0.0) -> Comparison:
        """Return the error and the bound of each vector of an output and, if all vectors are within their bounds, the bias that
        many vectors have in common.

        Each bound is at least `least_bound` and at least the error of two roundings, one to `arithmetic` and one to the
        output's dtype. A right kernel may do both: it may round a weight or a partial result, and then the output. The
        control (low-precision attention, whose error makes the bound) may have no error, as in a row that sees one key. The
        rounding of scores to float32 makes a bound larger (SCORE_ROUNDINGS). The error that skip-softmax may cause is added
        to the bound.
        """
        comparison = _compared(out, self.expected, self.control, self.request_of_row)
        roundings = sum(torch.finfo(dtype).eps / 2 for dtype in (self.arithmetic, self.control.dtype))
        skipped = torch.zeros_like(comparison.bound) if self.skipped is None else self.skipped[..., 1]
        sizes = self.lse_log2.abs().nan_to_num(posinf=0.0)
        of_scores = sizes * LN2 * SCORE_ROUNDINGS * torch.finfo(torch.float32).eps / 2
        of_scores = torch.minimum(of_scores, comparison.bound * LARGE_SCORES_FACTOR).clamp(max=LARGEST_BOUND)
        bound = torch.maximum(comparison.bound.clamp(min=max(roundings, least_bound)), of_scores) + skipped
        comparison = replace(comparison, bound=bound)
        if not comparison.passed:
            return comparison
        found = regress(out, self.expected, self.control, self.lse_log2, self.request_of_row, self.arithmetic)
        bound = (found.bound + self.shared_error + skipped.max()).clamp(min=least_bound)
        return replace(comparison, regression=replace(found, bound=bound))

    def wrong_output(self, comparison: Comparison, out: Tensor) -> str:
        count = int(comparison.wrong.sum())
        if comparison.regression is not None:
            return comparison.regression.sentence()
        requests = self.request_of_row[comparison.wrong.any(dim=1)].unique().tolist()
        vectors = "; ".join(
            f"row {self.row_of_call(row)} (request {int(self.request_of_row[row])}) head {head}"
            + self._wrong_vector(comparison, out, row, head)
            for row, head in comparison.worst(min(count, SHOWN_VECTORS))
        )
        return f"{count} of {comparison.wrong.numel()} vectors are wrong, of requests {requests}: {vectors}"

    def _wrong_vector(self, comparison: Comparison, out: Tensor, row: int, head: int) -> str:
        got = out[row, head].to(torch.float64)
        bad = got[~got.isfinite()]
        must_be_zero = not bool(self.expected[row, head].any())
        if not must_be_zero and not len(bad):
            error, bound = float(comparison.error[row, head]), float(comparison.bound[row, head])
            return f": error {error:.3g}, bound {bound:.3g}"
        defect = f" is not finite ({float(bad[0]):.3g})" if len(bad) else f" is not zero ({float(got.abs().max()):.3g})"
        if not must_be_zero:
            return defect
        sees_no_key = bool(self.lse_log2[row, head] == -math.inf)
        return f"{defect}: {'rows that see no key' if sees_no_key else 'it'} must be zero"

    def lse_ratio(self, lse: Tensor) -> Tensor:
        """Return the error of an LSE (base 2) divided by its bound, float64 [num_rows, num_qo_heads]."""
        expected, lse = self.lse_log2, lse.to(torch.float64)
        bound = LSE_LOG2_BOUND + LSE_LOG2_RELATIVE_BOUND * expected.abs().nan_to_num(posinf=0.0)
        if self.skipped is not None:  # without a share s of the denominator, the LSE is -log2(1 - s) lower
            bound = torch.where(lse < expected, bound - torch.log1p(-self.skipped[..., 0]) / LN2, bound)
        ratio = ((lse - expected).abs() / bound).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where(expected == -math.inf, torch.where(lse == expected, 0.0, math.inf), ratio)

    def wrong_lse(self, lse: Tensor) -> str:
        """Return a sentence about the wrong elements of an LSE (base 2); "" if none is wrong."""
        expected = self.lse_log2
        if lse.shape != expected.shape:
            return f"the LSE is {list(lse.shape)}, not {list(expected.shape)}"
        if not lse.dtype.is_floating_point:
            return f"the LSE is {lse.dtype}, which is no floating-point dtype"
        wrong = self.lse_ratio(lse) > 1
        if not bool(wrong.any()):
            return ""
        row, head = divmod(int(wrong.flatten().to(torch.int8).argmax()), expected.shape[1])
        why = ": rows that see no key have -inf" if bool(expected[row, head] == -math.inf) else ""
        return (
            f"{int(wrong.sum())} LSEs are wrong: row {self.row_of_call(row)} head {head} is {float(lse[row, head]):.6g}, "
            f"not {float(expected[row, head]):.6g} (base 2){why}"
        )
