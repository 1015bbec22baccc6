"""Masks over draft tokens: shapes, the words that XQA reads, and what a call with one must give."""

from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, truth_of_call
from lab.workloads.inputs.masks import draft_masks, packed_mask, tree

WINDOW = 20  # keys to the left of a row: some of the draft and some before it, or, for many rows, of the draft alone


def hold_masks(run: CaseRun, case: AttentionCase) -> None:
    """Calls of the case's rows: without a mask, with each shape of mask, and with a tree's beside what else limits a row."""
    inputs = run.build(case)
    rows = f"of {case.q_lens[0]} rows"
    run.vary(f"no mask {rows}", inputs, truth_of_call(inputs))
    for name, shown in draft_masks(case).items():
        _hold(run, f"{name} {rows}", inputs, shown)
    shown = tree(case.q_lens[0]).expand(len(case.q_lens), -1, -1)
    for name, changes in _beside(run, inputs).items():
        _hold(run, f"tree mask {rows} {name}", inputs, shown, changes)


def _hold(
    run: CaseRun, what: str, inputs: AttentionInputs, shown: Tensor, changes: dict[str, Any] | None = None
) -> None:
    changes = changes or {}
    result = run.vary(what, inputs, mask=packed_mask(shown).to(run.device), **changes)
    rules = {name: value for name, value in changes.items() if name != "return_lse"}
    run.expect_close(what, result, truth_of_call(inputs, shown=shown.to(run.device), **rules))


def _beside(run: CaseRun, inputs: AttentionInputs) -> dict[str, dict[str, Any]]:
    """Arguments that limit or weigh what a row sees, too; those that a kernel may have been built without where it has them."""
    beside: dict[str, dict[str, Any]] = {"and the LSE": {"return_lse": True}}
    if True in run.ranges.windows:
        beside["within a window"] = {"window_left": WINDOW}
    if True in run.ranges.sinks:
        beside["with sinks"] = {"sinks": unequal_sinks(inputs)}
    return beside


def unequal_sinks(inputs: AttentionInputs) -> Tensor:
    """As large as the logits of needles, and another for each head: float32 [num_qo_heads]."""
    return torch.linspace(8.0, 14.0, inputs.case.num_qo_heads, device=inputs.query.device)
