"""The expected results of query rows, computed from K/V histories only, and the low-precision control for the error bound."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lab.references.errors import Comparison, compare, regress
from lab.references.quantization import rounded, saturated
from lab.references.softmax_attention import Rules, solved_requests

SHOWN_VECTORS = 3
# Scores are float32 sums of exact products, so the softmax's denominator is known to far better than 0.3 % (0.004 in base
# 2) by any kernel that sums weights before it rounds them; e4m3 queries of up to 448 sum to larger scores.
LSE_LOG2_BOUND = 0.004
LSE_LOG2_RELATIVE_BOUND = 1e-5


@dataclass(frozen=True, eq=False)
class Truth:
    """The expected results of a call or a pass, and the control: a low-precision result whose error bounds the kernel's error.

    Attributes:
        expected: float64 [num_rows, num_qo_heads, head_dim].
        control: the same output computed in low precision, in the output's dtype.
        lse_log2: float64 [num_rows, num_qo_heads], -inf where a row sees no key.
        request_of_row: int64 [num_rows], the request of each row.
        arithmetic: dtype of the control's operands.
        shared_error: relative bias, common to all vectors, that a right kernel may have.
    """

    expected: Tensor
    control: Tensor
    lse_log2: Tensor
    request_of_row: Tensor
    arithmetic: torch.dtype
    shared_error: float = 0.0

    def of_rows(self, chosen: Tensor) -> "Truth":
        """Return the expected results of the rows that are True in `chosen`, bool [num_rows]."""
        of_rows = ("expected", "control", "lse_log2", "request_of_row")
        return replace(self, **{name: getattr(self, name)[chosen] for name in of_rows})

    def compare(self, out: Tensor, least_bound: float = 0.0) -> Comparison:
        """Compare an output by `lab.references.errors.compare`, with a bound of at least one rounding. If all vectors are
        within their bounds, check the output for a bias too (`lab.references.errors.regress`).

        The bound is at least one rounding, because the control may have almost no error, while a right kernel such as FA3's MLA
        rounds the results of its splits.

        Args:
            out: the output, in the shape of `expected`.
            least_bound: relative error that is always allowed.
        """
        comparison = compare(out, self.expected, self.control, self.request_of_row)
        one_rounding = torch.finfo(self.arithmetic).eps / 2
        comparison = replace(comparison, bound=comparison.bound.clamp(min=max(one_rounding, least_bound)))
        if not comparison.passed:
            return comparison
        found = regress(out, self.expected, self.control, self.lse_log2, self.request_of_row, self.arithmetic)
        bound = (found.bound + self.shared_error).clamp(min=least_bound)
        return replace(comparison, regression=replace(found, bound=bound))

    def wrong_output(self, comparison: Comparison, out: Tensor) -> str:
        """Return a sentence about the wrong vectors of an output (their number, their requests, the largest errors), or about
        the output's bias.
        """
        count = int(comparison.wrong.sum())
        if comparison.regression is not None:
            return comparison.regression.sentence()
        requests = self.request_of_row[comparison.wrong.any(dim=1)].unique().tolist()
        vectors = "; ".join(
            f"row {row} (request {int(self.request_of_row[row])}) head {head}"
            + self._wrong_vector(comparison, out, row, head)
            for row, head in comparison.worst(min(count, SHOWN_VECTORS))
        )
        return f"{count} of {comparison.wrong.numel()} vectors are wrong, of requests {requests}: {vectors}"

    def _wrong_vector(self, comparison: Comparison, out: Tensor, row: int, head: int) -> str:
        """Return words about one wrong vector: its error, or that it is not finite or not zero."""
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
        """Return the error of an LSE in base 2 divided by its bound, float64 [num_rows, num_qo_heads].

        The LSE is log2 of the softmax's denominator, including the sink; -inf where a row sees no key.
        """
        expected, lse = self.lse_log2, lse.to(torch.float64)
        bound = LSE_LOG2_BOUND + LSE_LOG2_RELATIVE_BOUND * expected.abs().nan_to_num(posinf=0.0)
        ratio = ((lse - expected).abs() / bound).nan_to_num(nan=math.inf, posinf=math.inf)
        return torch.where(expected == -math.inf, torch.where(lse == expected, 0.0, math.inf), ratio)

    def wrong_lse(self, lse: Tensor) -> str:
        """Return a sentence about the errors of an LSE, by `lse_ratio`; empty if it is right."""
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
            f"{int(wrong.sum())} LSEs are wrong: row {row} head {head} is {float(lse[row, head]):.6g}, "
            f"not {float(expected[row, head]):.6g} (base 2){why}"
        )


def truth_of_requests(query: Tensor, histories: list[tuple[Tensor, Tensor]], q_lens: list[int], rules: Rules) -> Truth:
    """Return the expected results of the rows of consecutive requests.

    Args:
        query: [num_rows, num_qo_heads, head_dim]. Rows after the requests' rows have no expected results.
        histories: (K, V) of each request, [kv_len, num_kv_heads, head_dim]. V's head_dim may differ from K's.
        q_lens: query rows of each request, which belong to its newest tokens.
        rules: how rows attend to keys.
    """
    pieces = list(solved_requests(query, histories, q_lens, rules, with_control=True))
    places, exact, lse_log2, control = map(torch.cat, zip(*pieces, strict=True))
    order = places.argsort()
    requests = torch.arange(len(q_lens), device=query.device)
    request_of_row = requests.repeat_interleave(torch.tensor(q_lens, device=query.device))
    shared_error = _error_of_scaled_values(query, histories, rules)
    expected, control = saturated(exact[order], rules.out_dtype), rounded(control[order], rules.out_dtype)
    return Truth(expected, control, lse_log2[order], request_of_row, rules.arithmetic, shared_error)


def _error_of_scaled_values(query: Tensor, histories: list[tuple[Tensor, Tensor]], rules: Rules) -> float:
    """Return a relative error that all outputs may share: that of a kernel which multiplies a quantised cache's values by
    bmm2_scale and rounds the products.

    A quantised cache's values have few different mantissas, so their roundings do not average out. Half of the largest rounding
    error is allowed: with normally distributed values in e4m3 or NVFP4 and any bmm2_scale, the mean error was at most 2.0e-3 in
    bfloat16. A scale that is a power of two causes no rounding.
    """
    is_quantised = any(values.dtype != query.dtype for _, values in histories)
    is_power_of_two = abs(math.frexp(float(rules.bmm2_scale))[0]) == 0.5
    return torch.finfo(rules.arithmetic).eps / 4 if is_quantised and not is_power_of_two else 0.0
