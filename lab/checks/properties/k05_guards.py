"""Find writes outside the given tensors, reads beyond the end of a vector that change a result, and changed inputs.

A test that ignores the memory after a tensor misses a store one row too far. Here output, LSE and workspace lie between guard
bytes. Sinks and lengths lie between values that would change the result. Every input must be unchanged after the call.
"""

from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun, Inputs
from lab.checks.properties.check import Check, itself
from lab.references.errors import Truth
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.contents import new_workspace, unwritten
from lab.workloads.inputs.guards import embedded, guarded, wrong_guards


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    given = BuiltCall({}, inputs, inputs.arguments())
    before = {name: tensor.clone() for name, tensor in given.read.items()}
    workspace, around_workspace = guarded(new_workspace(run.device))
    # Lengths and sinks are views of larger tensors. Their neighbours would change the result: too large lengths, and NaN.
    among = {"seq_lens": embedded(inputs.seq_lens, inputs.max_seq_len)}
    if inputs.sinks is not None:
        among["sinks"] = embedded(inputs.sinks, float("nan"))
    result = run.call(given, workspace_buffer=workspace, **among)
    run.expect_close("inputs among guards", result, truth)
    run.expect("around the workspace", wrong_guards("the workspace", around_workspace))

    expect_into_out(run, inputs, inputs.new_out(), truth)
    lse, around_lse = guarded(unwritten(torch.empty(truth.lse_log2.shape, device=run.device)))
    if run.vary("lse", inputs, lse=lse, return_lse=True) is not None:
        run.expect_lse("into lse", lse, truth)
        run.expect("around lse", wrong_guards("lse", around_lse))
    run.expect_unchanged(given.read, before)


def expect_into_out(run: CaseRun, inputs: Inputs, out: Tensor, truth: Truth, **changes: Any) -> None:
    """Make a call with `changes` and a copy of `out` between guard bytes. Expect the right output and unchanged guard bytes."""
    out, around = guarded(out)
    result = run.vary("out", inputs, out=out, **changes)
    if result is not None:
        run.expect_close("into out", result._replace(out=out.view(truth.expected.shape)), truth)
        run.expect("around out", wrong_guards("out", around))


CHECK = Check("K5", __doc__, lambda scope: scope.balanced(6, 32, seed=7), _judge, drawn=itself)
