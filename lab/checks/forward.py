"""Judge one forward pass end to end: from each request's K/V history to a kernel's output.

The pool, the metadata and the kernel's arguments are built as an engine builds them. The truth is computed from the
histories, as they were written token by token, and never from a page table, a length or an offset; so a wrong one of
these fails like a wrong kernel does. Everything that must not matter is poisoned.
"""

import os
import shlex
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lab.checks.forward_pass import ForwardPass, build_forward
from lab.checks.truth import Rules, Truth, truth_of_requests
from lab.checks.verdicts import Outcome
from lab.references.errors import Comparison
from lab.workloads.forward_case import ForwardCase

GUARD_ROWS = 8  # rows before and after the output that must stay as they were
GUARD_BYTE = 0xA5  # throughout: a number that no kernel computes
SHOWN_FINDINGS = 8


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
        outcome: RIGHT, WRONG, DECLINED (a call raised NotImplementedError), or, in a survey, FAILED (another error).
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
        if self.outcome in (Outcome.RIGHT, Outcome.WRONG):
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
    given = forward.inputs()
    before = {what: tensor.clone() for what, tensor in given.items()}
    guarded = torch.empty(
        (forward.query.shape[0] + 2 * GUARD_ROWS, *forward.query.shape[1:]), dtype=case.dtype, device=where
    )
    guarded.view(torch.uint8).fill_(GUARD_BYTE)
    out = guarded[GUARD_ROWS : GUARD_ROWS + forward.query.shape[0]].fill_(float("nan"))
    declined = None
    try:
        forward.run(implementation, out)
    except NotImplementedError as error:
        declined = str(error)
    wrongs = [f"it changed its {what}" for what in given if not _same_bytes(given[what], before[what])]
    if not _is_guard(guarded[:GUARD_ROWS]) or not _is_guard(guarded[GUARD_ROWS + out.shape[0] :]):
        wrongs.append("it wrote outside its output")
    if declined is not None and len(forward.plan) == 1 and not bool(out.isnan().all()):
        wrongs.append(f"it declined, after it had written ({declined})")
    if declined is not None:
        outcome = Outcome.WRONG if wrongs else Outcome.DECLINED
        return Verdict(case, name, str(where), outcome, reason="; ".join(wrongs) or declined)
    as_given = replace(forward, query=before["query"])
    return _verdict(as_given, name, truth_of(as_given).compare(out), "; ".join(wrongs))


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _is_guard(rows: torch.Tensor) -> bool:
    return bool((rows.view(torch.uint8) == GUARD_BYTE).all())


def truth_of(forward: ForwardPass) -> Truth:
    """The truth of a pass, from its histories; worth keeping where several outputs of it are compared."""
    case, layer = forward.case, forward.layer
    rules = Rules(
        bmm1_scale=layer.softmax_scale * layer.k_scale,
        bmm2_scale=layer.v_scale,
        arithmetic=case.dtype if case.arithmetic is None else case.arithmetic,
        out_dtype=case.dtype,
        window_left=case.window_left,
        sinks=layer.sinks,
    )
    histories = [
        (keys[:kv_len], values[:kv_len]) for (keys, values), kv_len in zip(forward.histories, case.kv_lens, strict=True)
    ]
    return truth_of_requests(forward.query, histories, list(case.q_lens), rules)


def _request_of_row(case: ForwardCase, device: torch.device) -> torch.Tensor:
    requests = [request for request, q_len in enumerate(case.q_lens) for _ in range(q_len)]
    return torch.tensor(requests, dtype=torch.int64, device=device)


def _verdict(forward: ForwardPass, name: str, comparison: Comparison, reason: str) -> Verdict:
    num_wrong = int(comparison.wrong.sum())
    (worst,) = comparison.worst(1)
    return Verdict(
        case=forward.case,
        implementation=name,
        device=str(forward.query.device),
        outcome=Outcome.RIGHT if num_wrong == 0 and not reason else Outcome.WRONG,
        worst_ratio=comparison.worst_ratio,
        worst_error=float(comparison.error[worst]),
        num_wrong=num_wrong,
        findings=_findings(forward.case, comparison, min(num_wrong, SHOWN_FINDINGS)),
        reason=reason,
    )


def _findings(case: ForwardCase, comparison: Comparison, count: int) -> tuple[Finding, ...]:
    starts = [sum(case.q_lens[:request]) for request in range(len(case.q_lens))]
    requests = _request_of_row(case, torch.device("cpu")).tolist()
    findings = []
    for row, head in comparison.worst(count):
        error, bound = float(comparison.error[row, head]), float(comparison.bound[row, head])
        findings.append(Finding(requests[row], row - starts[requests[row]], head, error, bound))
    return tuple(findings)
