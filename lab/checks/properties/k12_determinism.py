"""Find calls whose results differ when repeated: races between a kernel's thread blocks, or with other work on the GPU.

A single launch on an idle GPU hides a missing memory fence. Here the call is repeated with one workspace and, on a GPU, while
another stream keeps the multiprocessors busy. Every launch must give the same bits as the first.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, Scope, itself
from lab.checks.properties.variants import Variant
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.call import CallInputs

LAUNCHES = {"cpu": 3, "cuda": 200}


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    for case in scope.balanced(3, 12, seed=14):
        # Few requests, one of them long: its keys are split among many blocks, whose results must be merged.
        yield replace(case, kv_lens=(*case.kv_lens[:1], 3 * scope.ranges.longest + 1), q_lens=case.q_lens[:2])


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    arguments = inputs.arguments()
    first = run.call(inputs, **arguments).copied()
    run.expect_close("the first launch", first, inputs.truth())
    for variant in launches(run, inputs, arguments):
        run.expect_equal_bits(variant.what, run.again(variant.inputs, **variant.changes), first)
        if run.wrongs:
            return


def launches(run: CaseRun, inputs: CallInputs, arguments: dict[str, Any]) -> Iterator[Variant]:
    """Yield the same call `LAUNCHES` times. On a GPU, start matrix products on another stream before each call."""
    stream = matrix = None
    if run.device.type == "cuda":
        stream, matrix = torch.cuda.Stream(run.device), torch.randn(2048, 2048, device=run.device)
        stream.wait_stream(torch.cuda.current_stream(run.device))
    for launch in range(LAUNCHES[run.device.type]):
        if matrix is not None:
            with torch.cuda.stream(stream):
                for _ in range(launch % 4):
                    torch.mm(matrix, matrix)
        yield Variant(f"launch {launch + 2}", inputs, arguments)


CHECK = Check("K12", __doc__, _cases, _judge, drawn=itself)
