"""Measure the errors that quantised K/V caches and right kernels have, and how many elements exceed the tolerance of a test.

The *quantisation error* is the difference of float64 attention on the stored K and V from float64 attention on the original K
and V. The *kernel's error* is the difference of a kernel's output from float64 attention on the stored K and V. A *control*
stands for a right kernel: attention by low-precision torch operations on the stored K and V. The judge's bound is a multiple of
the control's error (`lab.references.errors`).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.calls import AttentionCall, DecodeCall
from lab.calls.problem import HALF_DTYPES
from lab.ranges import DTYPES, dtype_of
from lab.recorded.case import RecordedCase
from lab.references import attention
from lab.references.assertion import histories_of, truth_of_problem
from lab.references.errors import Truth, relative_l2
from lab.references.quantization import E2M1_MAX, quantize_nvfp4
from lab.references.softmax_attention import E4M3_MAX, quantize_e4m3, rounded
from lab.wording import counted
from lab.workloads.inputs.contents import new_workspace

LEVEL = 1e-3  # a right kernel is excluded if the probability of its errors is below this
PAGE_SIZE = 16
LARGEST = {"e4m3": E4M3_MAX, "nvfp4": E4M3_MAX * E2M1_MAX}  # largest number of a quantised cache, in units of its scale
UNPACKED = ("", "bf16", "fp16", "e4m3")  # "": the default
# The scale of a quantised cache: 1, or a multiple of the least scale that represents the largest value ("amax").
SCALES = {"1": 0.0, "amax": 1.0, "4amax": 4.0, "amax/4": 0.25}
# K and V: N(0, 1); Student's t with 3 degrees of freedom; N(0, 1) with each 16th channel 10 times as large.
VALUES = ("normal", "heavy", "outliers")
MOST_AT_ONCE, MOST_DRAWN = 2**23, 2**28  # numbers of queries, K and V in one batch, and in a simulation


@dataclass(frozen=True)
class Setting:
    """The sizes, dtypes and random values of the decode calls whose rounding errors `budget` measures. Dtypes are names such as
    "bf16" or "nvfp4". Raises ValueError for an unknown name and for a number out of range.
    """

    kv: str  #: dtype of the cache
    keys: int = 1024  #: keys of a request. Recorded requests do not use `keys`, `values` and `v_std`
    scale: str = "amax"  #: of the cache, a name in `SCALES`
    values: str = "normal"  #: the distribution of K and V, a name in `VALUES`
    v_std: float = 1.0  #: V is multiplied by it
    query: str = ""  #: dtype of the query; "" for the dtype of the cache, or bf16 if the cache is quantised
    out: str = ""  #: dtype of the output; "" for the query's
    arithmetic: str = ""  #: dtype of the operands of Q·K^T and of P·V; "" for the query's
    head_dim: int = 64
    group: int = 8  #: query heads per K/V head

    def __post_init__(self) -> None:
        known = {"kv": tuple(DTYPES), "scale": tuple(SCALES), "values": VALUES}
        for name, names in {**known, "query": UNPACKED, "out": UNPACKED, "arithmetic": UNPACKED}.items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name} {getattr(self, name)!r} is none of {', '.join(filter(None, names))}")
        if self.kv not in LARGEST and self.query not in ("", self.kv):
            raise ValueError(f"a cache of {self.kv} goes with queries of {self.kv}, not {self.query}")
        if min(self.keys, self.head_dim, self.group) < 1 or self.head_dim % 16 or not 0 < self.v_std < math.inf:
            sizes = f"keys {self.keys}, group {self.group}, head_dim {self.head_dim}, v_std {self.v_std}"
            raise ValueError(f"{sizes}: each must be above 0, and head_dim a multiple of 16")


class UnstoredRequests(NamedTuple):
    """Decode requests of one K/V head before K and V are rounded to the cache's dtype: query [requests, query heads, head_dim],
    float32 keys and values [requests, keys, head_dim], and the scale of Q·K^T.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    softmax_scale: float

    def to(self, device: torch.device) -> "UnstoredRequests":
        return UnstoredRequests(self.query.to(device), self.keys.to(device), self.values.to(device), self.softmax_scale)


def drawn_requests(setting: Setting, elements: int, seed: int = 0) -> Iterator[UnstoredRequests]:
    """Yield batches of random requests that have at least `elements` output elements in all; fewer if all queries, keys and
    values together would have more than `MOST_DRAWN` (2**28) numbers.
    """
    size = (2 * setting.keys + setting.group) * setting.head_dim
    count = min(-(-elements // (setting.group * setting.head_dim)), max(MOST_DRAWN // size, 1))
    numbers, at_once = torch.Generator().manual_seed(seed), max(MOST_AT_ONCE // size, 1)
    for first in range(0, count, at_once):
        number = min(at_once, count - first)
        query = torch.randn(number, setting.group, setting.head_dim, generator=numbers)
        keys, values = torch.randn(2, number, setting.keys, setting.head_dim, generator=numbers)
        for side in (keys, values):
            if setting.values == "heavy":
                side /= torch.randn(3, *side.shape, generator=numbers).square_().mean(dim=0).sqrt_()
            elif setting.values == "outliers":
                side[..., ::16] *= 10
        dtype = dtype_of(setting.query or ("bf16" if setting.kv in LARGEST else setting.kv))
        yield UnstoredRequests(rounded(query, dtype), keys, values.mul_(setting.v_std), setting.head_dim**-0.5)


def recorded_requests(cases: Iterable[RecordedCase]) -> Iterator[UnstoredRequests]:
    """Yield decode requests that are made from recorded decode and context calls: for each request and K/V head of a call, the
    last query row of the request, and the request's keys (only those in the row's sliding window, if any). Sinks are ignored.

    Raises:
        ValueError: a call cannot be read, or its cache is quantised, so that the original K and V are not known.
    """
    for case in cases:
        if case.interface not in (AttentionCall.DECODE, AttentionCall.CONTEXT):
            continue
        _, problem = case.posed()
        if problem.kv_dtype not in HALF_DTYPES:
            sentence = "the original K and V are not known: record with a cache of bf16 or fp16"
            raise ValueError(f"call {case.number} has a cache of {problem.kv_dtype}, and {sentence}")
        for request, (start, end) in enumerate(itertools.pairwise(problem.row_offsets())):
            window = slice(-problem.window_left - 1 if problem.window_left >= 0 else None, None)
            k, v = (side[window].float().transpose(0, 1) for side in histories_of(problem, [request])[0])
            if start < end and k.shape[1]:
                query = problem.query[end - 1].unflatten(0, (len(k), -1))
                yield UnstoredRequests(query, k, v * float(problem.bmm2_scale), float(problem.bmm1_scale))


def call_of(requests: UnstoredRequests, setting: Setting) -> dict[str, Any]:
    """Round the K and V of requests to the dtype of a cache (`setting.kv`), put them into a paged cache, and return the keyword
    arguments of FlashInfer's decode call.
    """
    (count, keys, _), device = requests.keys.shape, requests.query.device
    pages = -(-keys // PAGE_SIZE)
    sides = (pad(side, (0, 0, 0, pages * PAGE_SIZE - keys)) for side in (requests.keys, requests.values))
    (k, k_scale), (v, v_scale) = (_stored(side, setting) for side in sides)
    k, v = ([each.view(count * pages, 1, PAGE_SIZE, -1) for each in side] for side in (k, v))
    arguments: dict[str, Any] = {
        "query": requests.query,
        "kv_cache": (k[0], v[0]),
        "workspace_buffer": new_workspace(device),
        "block_tables": torch.arange(count * pages, dtype=torch.int32, device=device).view(count, pages),
        "seq_lens": torch.full((count,), keys, dtype=torch.int32, device=device),
        "max_seq_len": keys,
        "bmm1_scale": requests.softmax_scale * k_scale,
        "bmm2_scale": v_scale,
    }
    arguments |= {"out_dtype": dtype_of(setting.out)} if setting.out else {}
    return arguments | ({"kv_cache_sf": (k[1], v[1]), "backend": "xqa"} if setting.kv == "nvfp4" else {})


def _stored(values: Tensor, setting: Setting) -> tuple[Sequence[Tensor], float]:
    """Round K or V to the cache's dtype. Return ([rounded values, for NVFP4 also block scales], scale of the cache)."""
    if setting.kv not in LARGEST:
        return [values.to(dtype_of(setting.kv))], 1.0
    scale = SCALES[setting.scale] * float(values.abs().max()) / LARGEST[setting.kv] or 1.0
    return quantize_nvfp4(values, scale) if setting.kv == "nvfp4" else [quantize_e4m3(values, scale)], scale


def _solved(requests: UnstoredRequests, setting: Setting) -> tuple[dict[str, Any], Tensor, Truth]:
    """Return (decode arguments, float64 output for the unrounded K and V, expected result for the rounded K and V)."""
    call = call_of(requests, setting)
    query, keys, values = requests.query.unsqueeze(1), requests.keys.unsqueeze(2), requests.values.unsqueeze(2)
    visible = torch.ones(len(query), 1, keys.shape[1], dtype=torch.bool, device=query.device)
    original, _ = attention(query, keys, values, visible, bmm1_scale=requests.softmax_scale)
    arithmetic = dtype_of(setting.arithmetic) if setting.arithmetic else None
    return call, original[:, 0], truth_of_problem(DecodeCall(**call).problem(), arithmetic)


def budget(
    requests: UnstoredRequests,
    setting: Setting,
    atol: float = 1e-2,
    rtol: float = 1e-2,
    kernel: Callable[..., Tensor] | None = None,
) -> dict[str, Any]:
    """Measure in one batch the relative errors that the rounding of K and V, a simulated right kernel, and `kernel` make.

    Args:
        atol, rtol: the tolerance of a test.
        kernel: a function with the arguments of FlashInfer's decode call.

    Returns a dict with the fields of the setting, and
        vectors: the number of output vectors.
        quantisation: the median relative error of a vector that the rounding of K and V to the cache's dtype makes.
        kernel, bound: the median error of the right kernel (not of `kernel`), and the median of the judge's error bounds.
        quantisation_over, kernel_over: the shares of elements where quantisation, or the right kernel, exceeds the tolerance.
        given, given_worst: the median error of `kernel`, and its largest ratio of error to bound; absent without `kernel`.
    """
    call, original, truth = _solved(requests, setting)
    control = truth.compare(truth.control)
    medians = {"quantisation": relative_l2(truth.expected, original), "kernel": control.error, "bound": control.bound}
    ratios = {}
    if kernel is not None:
        given = truth.compare(kernel(**call))
        medians["given"], ratios["given_worst"] = given.error, given.worst_ratio
    overs = {"quantisation_over": (truth.expected, original), "kernel_over": (truth.control.double(), truth.expected)}
    found = asdict(setting) | {"keys": requests.keys.shape[1], "vectors": control.error.numel()}
    found |= {name: float(each.median()) for name, each in medians.items()} | ratios
    return found | {name: float((~torch.isclose(*both, rtol, atol)).double().mean()) for name, both in overs.items()}


@dataclass(frozen=True)
class Explanation:
    """The verdict on a failed test, with the reason and the numbers on which it is based."""

    verdict: str  #: "noise", "bug" or "undecided"
    reason: str
    #: "simulated": simulated elements; "mean", "mean_at_bound": mean number of mismatches in a test of this size, of a right
    #: kernel and of one whose errors equal the judge's bound; "probability": of the test's mismatches; "largest": the largest
    #: simulated difference; "judge_allows": the largest difference that the judge allows
    numbers: Mapping[str, float]


def explain(
    setting: Setting,
    batches: Iterable[UnstoredRequests],
    *,
    mismatched: int,
    elements: int,
    atol: float,
    rtol: float,
    off_by: float | None = None,
    against: str = "stored",
) -> Explanation:
    """Decide whether a failed test shows a bug of a kernel, or noise that a right kernel has too.

    Two kernels are simulated for the requests in `batches`, whose values must be distributed like the test's: a right kernel,
    and a kernel whose errors equal the judge's error bounds. A *mismatch* is an element that exceeds the test's tolerance. For
    each kernel, P is the probability that a test of `elements` elements has `mismatched` or more mismatches. The verdict is::

        "bug"        if `off_by` exceeds the largest difference that the judge allows in one element; or if P of the kernel at
                     the bounds is below `LEVEL` (0.001)
        "noise"      if P of the right kernel is at least `LEVEL`, and the probability that its largest difference is `off_by`
                     or more is at least `LEVEL` too
        "undecided"  otherwise

    Args:
        mismatched, elements: the numbers of mismatches and of all elements in the failed test.
        atol, rtol: the tolerance of the test.
        off_by: the largest absolute difference of the test, if it is known.
        against: the expected result of the test: float64 attention on the K and V in the cache ("stored"), the "stored" result
            rounded to the output's dtype ("rounded"), or float64 attention on the unrounded K and V ("original").

    Raises:
        ValueError: the numbers contradict each other.
    """
    if not 1 <= mismatched <= elements:
        raise ValueError(f"{mismatched:,} mismatched of {elements:,} elements: at least 1, and at most all")
    if not (0 <= atol < math.inf and 0 <= rtol < math.inf):
        raise ValueError(f"atol {atol} and rtol {rtol} must be finite and at least 0")
    if off_by is not None and off_by <= atol:
        raise ValueError(f"a difference of {off_by} does not exceed atol {atol}: give the largest |got - want|")
    counts, at_bound, largest, most, simulated = _simulated(setting, batches, atol, rtol, against)
    reaching = counts.clamp(max=1) if off_by is None else (largest >= off_by).long()
    of_count, of_at_bound = (chance(mismatched, elements, each, simulated) for each in (counts, at_bound))
    of_largest = chance(1, elements, reaching, simulated)
    mean, mean_at_bound = (float(each.sum()) * elements / simulated for each in (counts, at_bound))
    reached, allowed_most = float(largest.max()), float(most.max())
    count = f"{mismatched:,} mismatches or more"
    if off_by is not None and not off_by <= allowed_most:  # or NaN
        ratio = f"{off_by / reached:,.3g} times that of a right kernel" if reached else "and a right kernel has none"
        verdict, reason = "bug", f"the largest difference is {off_by:.4g}, {ratio}, and more than the judge allows"
    elif of_at_bound < LEVEL:
        verdict, reason = "bug", f"{count} have a probability below {LEVEL:.1%} even at the judge's bound"
    elif counts.any() and reaching.any() and min(of_count, of_largest) >= LEVEL:
        verdict, reason = "noise", f"{count} have a probability of {of_count:.2g} for a right kernel"
        reason += "" if off_by is None else f", a difference of {off_by:.3g} or more one of {of_largest:.2g}"
    else:
        verdict, reason = "undecided", "it is more than the simulation shows, and not more than the judge allows"
    excess = f", {reached / atol - 1:.0%} over atol" if 0 < atol < reached else ""
    facts = (
        f"A right kernel exceeds the tolerance in {mean:,.3g} of {elements:,} elements in the mean, and one at the judge's "
        f"bound in {mean_at_bound:,.3g}. The largest difference of a right kernel is {reached:.3g}{excess}, and the judge "
        f"allows {allowed_most:.3g}. Simulated: {counted(simulated, 'element')}, {simulated / elements:,.3g} calls"
    )
    numbers = {"simulated": simulated, "mean": mean, "mean_at_bound": mean_at_bound, "probability": of_count}
    return Explanation(verdict, f"{reason}. {facts}", numbers | {"largest": reached, "judge_allows": allowed_most})


def _simulated(
    setting: Setting, batches: Iterable[UnstoredRequests], atol: float, rtol: float, against: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Return for each simulated request, as tensors [requests]: the number of mismatches of a right kernel, the number of
    mismatches of a kernel whose errors equal the judge's bounds, the largest difference of the right kernel, and the largest
    difference that the judge allows. The last value of the tuple is the number of simulated elements.
    """
    parts, simulated = [], 0
    for requests in batches:
        _, original, truth = _solved(requests, setting)
        exact, error = truth.expected, truth.control.double() - truth.expected
        want = {"stored": exact, "rounded": rounded(exact, truth.control.dtype).double(), "original": original}[against]
        allowed = truth.compare(truth.control).bound * exact.norm(dim=-1)
        enlarged = (error * (allowed / error.norm(dim=-1)).unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0)
        counts = [(~torch.isclose(exact + each, want, rtol, atol)).flatten(1).sum(dim=1) for each in (error, enlarged)]
        sizes = (exact + error - want).abs(), allowed + (exact - want).abs().amax(dim=-1)
        parts.append((*counts, *(each.flatten(1).amax(dim=1) for each in sizes)))
        simulated += exact.numel()
    of_control, at_bound, largest, most = map(torch.cat, zip(*parts, strict=True))
    return of_control, at_bound, largest, most, simulated


def chance(count: int, elements: int, counts: Tensor, simulated: int) -> float:
    """Return the probability that a test of `elements` elements has `count` or more events, such as mismatches. The rate of
    events is estimated from a simulation of `simulated` elements: `counts` [requests] are the events in its requests.

    This is the conditional test of two Poisson rates (Przyborowski and Wilenski 1940). Events of one request are not
    independent. So `count` and the sum of `counts` are divided by the ratio of the variance of `counts` to their mean, if this
    ratio exceeds 1. If the simulation has no events, this ratio is unknown, and `count` is replaced by 1.
    """
    from scipy.special import betainc

    total, each = int(counts.sum()), counts.double()
    together = max(1.0, float(each.var() / each.mean())) if total else count
    return float(betainc(count / together, total / together + 1, elements / (elements + simulated)))
