"""Writes outside what was handed out, reads past the end of a vector that reach a result, and changed inputs.

A store one row too far lands in memory that no test looks at. Here output, LSE and workspace lie between guard bytes, sinks
and lengths between values that would show, and every input must be what it was.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.checks.attention_inputs import AttentionInputs, new_workspace
from lab.checks.check import Check, covering, first_line, same
from lab.checks.refusals import same_bits
from lab.checks.trial import Trial, truth_of_call

AROUND = 33  # elements before and after a part of a vector: it begins at no multiple of 16 bytes
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5  # throughout: a number that no kernel computes


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    truth = truth_of_call(inputs)
    before = {name: tensor.clone() for name, tensor in inputs.tensors().items()}
    workspace, around_workspace = guarded(new_workspace(trial.device))
    arguments = inputs.arguments() | {"workspace_buffer": workspace} | _embedded(inputs)
    result = trial.run(inputs.case.interface, arguments)
    trial.hold("inputs among guards", result, truth)
    _unchanged(trial, "the workspace", around_workspace)

    out, around_out = guarded(_empty_out(inputs))
    into_out = trial.attempt("out", inputs, out=out)
    if into_out is not None:
        trial.hold("into out", into_out._replace(out=out.view(result.out.shape)), truth)
        _unchanged(trial, "out", around_out)
    lse, around_lse = guarded(torch.zeros(truth.lse_log2.shape, dtype=torch.float32, device=trial.device))
    if trial.attempt("lse", inputs, lse=lse, return_lse=True) is not None:
        trial.hold_lse("into lse", lse, truth)
        _unchanged(trial, "lse", around_lse)
    trial.hold_nothing_wrong("the inputs", changed_bits(inputs.tensors(), before))


def _empty_out(inputs: AttentionInputs) -> Tensor:
    case, query = inputs.case, inputs.query
    shape = (*query.shape[:2], case.out_head_dim)
    if case.is_mla:
        shape = (len(case.q_lens), case.q_lens[0], *shape[1:])
    return torch.full(shape, float("nan"), dtype=torch.bfloat16 if case.is_mla else case.dtype, device=query.device)


def _embedded(inputs: AttentionInputs) -> dict[str, Any]:
    """Small vectors amid values that would show: NaN around sinks, long lengths around lengths."""
    embedded: dict[str, Any] = {"seq_lens": amid(inputs.seq_lens, inputs.max_seq_len)}
    if inputs.sinks is not None:
        embedded["sinks"] = amid(inputs.sinks, float("nan"))
    return embedded


def amid(vector: Tensor, value: float) -> Tensor:
    """The vector as part of a larger one that holds `value` before and after it, at no multiple of 16 bytes."""
    whole = torch.full((len(vector) + 2 * AROUND,), value, dtype=vector.dtype, device=vector.device)
    part = whole[AROUND : AROUND + len(vector)]
    part.copy_(vector)
    return part


def guarded(tensor: Tensor, at_byte: int = 0) -> tuple[Tensor, Tensor]:
    """A copy of the tensor in the middle of guard bytes, so many bytes after a page, and all of these bytes, uint8."""
    size = tensor.nbytes
    room = size + 2 * GUARD_BYTES + at_byte
    whole = torch.full((room,), GUARD_BYTE, dtype=torch.uint8, device=tensor.device)[at_byte:]
    part = whole[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype).view(tensor.shape)
    part.copy_(tensor)
    return part, whole


def _unchanged(trial: Trial, what: str, whole: Tensor) -> None:
    trial.hold_nothing_wrong(f"around {what}", wrong_guards(what, whole))


def wrong_guards(what: str, whole: Tensor) -> Iterator[str]:
    """Yield a sentence for each side of a `guarded` tensor that was written to."""
    for side, guard in (("before", whole[:GUARD_BYTES]), ("after", whole[-GUARD_BYTES:])):
        if not bool((guard == GUARD_BYTE).all()):
            yield f"it wrote {side} {what}"


def changed_bits(tensors: dict[str, Tensor], before: dict[str, Tensor]) -> Iterator[str]:
    """Yield a sentence for each tensor that differs from its earlier copy."""
    for name, tensor in tensors.items():
        if not same_bits(tensor, before[name]):
            yield f"it changed its {name}"


CHECK = Check("K5", "guards", first_line(__doc__), covering(6, 32, seed=7), _judge, adapt=same)
