"""A workspace that is not left as it must be found, or whose contents reach a result.

An engine shares one workspace among layers, shapes and kernels. Its first 8 MiB are counters: zero before a call, and zero
again after it. The scratch after them may hold anything, as may the output. A test that zeroes both each time sees nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lab.checks.attention_inputs import SEMAPHORE_BYTES, new_workspace
from lab.checks.check import Check, Level, counted, first_line, same
from lab.checks.space import Space
from lab.checks.trial import Trial, truth_of_call
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[AttentionCase]:
    yield from space.covering(interface, counted(level, 6, 24), seed=8)


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    truth = truth_of_call(inputs)
    workspace = new_workspace(trial.device)
    first = trial.call(inputs, workspace_buffer=workspace)
    trial.hold("a zeroed workspace", first, truth)
    _counters_are_zero(trial, "a call", workspace)

    other = trial.build(_another_shape(trial.case))
    trial.vary("another shape", truth_of_call(other), other, workspace_buffer=workspace)
    _counters_are_zero(trial, "a call of another shape", workspace)
    trial.same_bits("again, after another shape", trial.repeat(inputs, workspace_buffer=workspace), first)

    for byte, name in ((0xFF, "NaN"), (0x7B, "large values")):
        workspace[SEMAPHORE_BYTES:] = byte
        again = trial.repeat(inputs, workspace_buffer=workspace)
        trial.same_bits(f"scratch that holds {name}", again, first)
    out = torch.full_like(first.out, float("nan"))
    shape = (len(trial.case.q_lens), trial.case.q_lens[0], *out.shape[1:]) if trial.case.is_mla else out.shape
    into = trial.attempt("an output of NaN", inputs, out=out.view(shape))
    trial.same_bits("an output that held NaN", None if into is None else into._replace(out=out), first)


def _another_shape(case: AttentionCase) -> AttentionCase:
    """Longer requests in another order: fewer of them, or for odd seeds twice as many."""
    count = len(case.kv_lens)
    keep = 2 * count if case.seed % 2 else max(1, count // 2)
    longer = tuple(kv_len + 3 * case.page_size + 1 for kv_len in reversed(case.kv_lens))
    return replace(case, kv_lens=(longer * 2)[:keep], q_lens=(case.q_lens * 2)[:keep], seed=case.seed + 1)


def _counters_are_zero(trial: Trial, what: str, workspace: torch.Tensor) -> None:
    count = int(torch.count_nonzero(workspace[:SEMAPHORE_BYTES]))
    wrong = f"{what} left {count} of the workspace's first {SEMAPHORE_BYTES} bytes non-zero"
    trial.hold_nothing_wrong(f"the counters after {what}", [wrong] if count else [])


CHECK = Check("K6", "workspace", first_line(__doc__), _cases, _judge, adapt=same)
