"""Judge one forward pass end to end: from each request's K/V history to a kernel's output.

The pool, the metadata and the kernel's arguments are built as an engine builds them. The truth is computed from the
histories, as they were written token by token, and never from a page table, a length or an offset; so a wrong one of
these fails like a wrong kernel does. Everything that must not matter is poisoned.
"""

import enum
import os
import shlex
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.checks.forward_case import ForwardCase
from lab.checks.forward_pass import ForwardPass, build_forward
from lab.references.errors import Comparison, compare, eager_attention
from lab.references.paged_attention import attention, piece_elements, visible_keys

GUARD_ROWS = 8  # rows before and after the output that must stay as they were
SHOWN_FINDINGS = 8


class Outcome(enum.Enum):
    """What became of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "declined"


@dataclass(frozen=True)
class Finding:
    """One output vector that is wrong: whose it is, its relative L2 error, and what was allowed."""

    request: int
    row: int  # among the request's rows
    head: int
    error: float
    bound: float

    def __str__(self) -> str:
        return f"request {self.request} row {self.row} head {self.head}: error {self.error:.3g}, bound {self.bound:.3g}"


@dataclass(frozen=True)
class Verdict:
    """What the judge says of one case.

    Attributes:
        case: what was run.
        implementation: its module name.
        device: where it ran.
        outcome: RIGHT, WRONG, or DECLINED (it raised NotImplementedError before doing anything).
        worst_ratio: largest error over its bound; at most 1 if right.
        worst_error: that vector's error, relative L2.
        num_wrong: output vectors beyond their bound.
        findings: the worst of them.
        reason: what was declined, or was wrong besides the vectors.
    """

    case: ForwardCase
    implementation: str
    device: str
    outcome: Outcome
    worst_ratio: float = 0.0
    worst_error: float = 0.0
    num_wrong: int = 0
    findings: tuple[Finding, ...] = field(default=())
    reason: str = ""

    @property
    def reproduce(self) -> str:
        """A shell line that judges the case again."""
        program = (
            "import torch, importlib; from lab.checks import *; from lab.metadata import *; "
            f"print(judge_forward(importlib.import_module({self.implementation!r}), {self.case!r}, {self.device!r}))"
        )
        interpreted = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
        return f"{interpreted}python -c {shlex.quote(program)}"

    def __str__(self) -> str:
        lines = [f"{self.implementation} is {self.outcome.value}: {self.case!r}"]
        if self.outcome is not Outcome.DECLINED:
            lines.append(f"  worst error {self.worst_error:.3g}, {self.worst_ratio:.3g} of what is allowed")
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {finding}" for finding in self.findings]
        if self.num_wrong > len(self.findings):
            lines.append(f"  … and {self.num_wrong - len(self.findings)} more vectors")
        if self.outcome is Outcome.WRONG:
            lines.append(f"  reproduce: {self.reproduce}")
        return "\n".join(lines)


def judge_forward(implementation: Any, case: ForwardCase, device: torch.device | str | None = None) -> Verdict:
    """Judge one forward pass of an implementation.

    Args:
        implementation: any module or object with FlashInfer's two names.
        case: the pass.
        device: where to run; a GPU if there is one.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = getattr(implementation, "__name__", type(implementation).__name__)
    forward = build_forward(case, where)
    guarded = torch.full(
        (forward.query.shape[0] + 2 * GUARD_ROWS, *forward.query.shape[1:]),
        float("nan"),
        dtype=case.dtype,
        device=where,
    )
    out = guarded[GUARD_ROWS : GUARD_ROWS + forward.query.shape[0]]
    try:
        forward.run(implementation, out)
    except NotImplementedError as declined:
        return Verdict(case, name, str(where), Outcome.DECLINED, reason=str(declined))
    guards = torch.cat((guarded[:GUARD_ROWS], guarded[GUARD_ROWS + out.shape[0] :]))
    reason = "" if bool(guards.isnan().all()) else "it wrote outside its output"
    return _verdict(forward, name, compare_with_truth(forward, out), reason)


def compare_with_truth(forward: ForwardPass, out: torch.Tensor) -> Comparison:
    """Errors and bounds of an output of the pass, from its histories alone."""
    expected, control = [], []
    first_row = 0
    for request, q_len in enumerate(forward.case.q_lens):
        rows_at_once = max(1, piece_elements(out.device) // (forward.query.shape[1] * forward.case.kv_lens[request]))
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            query = forward.query[first_row + rows.start : first_row + rows.stop]
            exact, rounded = _truth_and_control(forward, request, rows, query)
            expected.append(exact)
            control.append(rounded)
        first_row += q_len
    return compare(out, torch.cat(expected), torch.cat(control), _request_of_row(forward.case, out.device))


def _truth_and_control(
    forward: ForwardPass, request: int, rows: range, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What some rows of one request must give, in float64, and what low-precision arithmetic makes of them."""
    case, layer = forward.case, forward.layer
    kv_len = case.kv_lens[request]
    first = kv_len - case.q_lens[request]
    keys, values = (side[: first + rows.stop].to(torch.float32).unsqueeze(0) for side in forward.histories[request])
    visible = visible_keys(
        torch.arange(first + rows.start, first + rows.stop, device=query.device).unsqueeze(0),
        torch.arange(keys.shape[1], device=query.device).unsqueeze(0),
        torch.tensor([kv_len], device=query.device),
        causal=True,
        window_left=case.window_left,
    )
    scales: dict[str, Any] = {
        "bmm1_scale": layer.softmax_scale * layer.k_scale,
        "bmm2_scale": layer.v_scale,
        "sinks": layer.sinks,
    }
    arithmetic = case.dtype if case.arithmetic is None else case.arithmetic
    exact, _ = attention(query.unsqueeze(0), keys, values, visible, **scales)
    rounded = eager_attention(
        query.unsqueeze(0), keys, values, visible, arithmetic=arithmetic, out_dtype=case.dtype, **scales
    )
    return exact[0], rounded[0]


def _request_of_row(case: ForwardCase, device: torch.device) -> torch.Tensor:
    requests = [request for request, q_len in enumerate(case.q_lens) for _ in range(q_len)]
    return torch.tensor(requests, dtype=torch.int64, device=device)


def _verdict(forward: ForwardPass, name: str, comparison: Comparison, reason: str) -> Verdict:
    case = forward.case
    row, head = comparison.worst()
    right = comparison.passed and not reason
    return Verdict(
        case=case,
        implementation=name,
        device=str(forward.query.device),
        outcome=Outcome.RIGHT if right else Outcome.WRONG,
        worst_ratio=comparison.worst_ratio,
        worst_error=float(comparison.error[row, head]),
        num_wrong=int(comparison.wrong.sum()),
        findings=_worst_findings(case, comparison),
        reason=reason,
    )


def _worst_findings(case: ForwardCase, comparison: Comparison) -> tuple[Finding, ...]:
    ratio = torch.where(comparison.wrong, comparison.error / comparison.bound, torch.zeros_like(comparison.error))
    starts = [sum(case.q_lens[:request]) for request in range(len(case.q_lens))]
    requests = _request_of_row(case, torch.device("cpu")).tolist()
    findings = []
    for index in ratio.flatten().topk(min(SHOWN_FINDINGS, int(comparison.wrong.sum()))).indices.tolist():
        row, head = divmod(index, ratio.shape[1])
        error, bound = float(comparison.error[row, head]), float(comparison.bound[row, head])
        findings.append(Finding(requests[row], row - starts[requests[row]], head, error, bound))
    return tuple(findings)
