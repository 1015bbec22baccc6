"""State that is stored under an incomplete key: a module, a scale, a plan or an output that is reused for another call.

A test suite that runs all calls of a configuration in sequence, or in its own process, never finds such state. Here calls that
differ in one argument, or are larger in every size, alternate in one process: A, B, A. On a GPU the last A runs on another
stream.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import Check, balanced_cases, itself
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs

LONGER, MORE_ROWS = 128, 64  # keys and rows of a request in a larger call: more splits and tiles


def _judge(run: CaseRun) -> None:
    inputs = run.build()
    truth = inputs.truth()
    first = run.call(inputs)
    run.expect_close("A", first, truth)
    kept = first._replace(out=first.out.clone())
    scale = 0.75 * inputs.bmm1_scale
    run.vary("B, another bmm1_scale", inputs, inputs.truth(bmm1_scale=scale), bmm1_scale=scale)
    run.expect_equal_bits("A's output, after B", first, kept)
    for what, other in calls_between(run):
        run.vary(f"B, {what}", other, other.truth())
        run.expect_equal_bits(f"A again, after {what}", run.again(inputs), kept)
    if run.device.type == "cuda":
        stream = torch.cuda.Stream(run.device)
        stream.wait_stream(torch.cuda.current_stream(run.device))
        with torch.cuda.stream(stream):
            run.expect_equal_bits("A on another stream", run.again(inputs), kept)


def calls_between(run: CaseRun) -> Iterator[tuple[str, AttentionInputs]]:
    """Yield calls that differ in one property from the case's, each with the property's name."""
    for what, case in _neighbours(run.case, run.ranges):
        yield what, run.build(case)


def _neighbours(case: AttentionCase, ranges: Ranges) -> Iterator[tuple[str, AttentionCase]]:
    """Yield cases that differ in one property from `case`, each with the property's name."""
    if case.interface is not AttentionCall.CONTEXT:
        q_len = _next(ranges.q_lens, case.q_lens[0])
        yield "other query rows", case.with_rows(*[q_len] * len(case.q_lens))
    yield "other contents", replace(case, seed=case.seed + 7)
    yield "requests in another order", replace(case, kv_lens=case.kv_lens[::-1], q_lens=case.q_lens[::-1])
    yield "fewer requests", replace(case, kv_lens=case.kv_lens[:2], q_lens=case.q_lens[:2])
    kv_lens = tuple(kv_len + LONGER + case.page_size for kv_len in (*case.kv_lens, *case.kv_lens[:2]))
    more = MORE_ROWS if case.interface is AttentionCall.CONTEXT else 0
    q_lens = tuple(q_len + more for q_len in (*case.q_lens, *case.q_lens[:2]))
    yield "more and longer requests", replace(case, kv_lens=kv_lens, q_lens=q_lens, seed=case.seed + 8)
    if case.has_window_argument:
        if len(set(ranges.windows)) > 1:
            yield "the other window", replace(case, window_left=-1 if case.window_left >= 0 else case.page_size)
        if len(set(ranges.sinks)) > 1:
            yield "the other sinks", replace(case, sinks=not case.sinks)
    if not case.is_mla:
        page_size = _next(ranges.page_sizes, case.page_size)
        yield "another page size", replace(case, storage=replace(case.storage, page_size=page_size))


def _next(axis: tuple[int, ...], value: int) -> int:
    """Return the value after `value` on an axis; the first value follows the last."""
    return axis[(axis.index(value) + 1) % len(axis)] if value in axis else axis[0]


CHECK = Check("K14", "interleaving", __doc__, balanced_cases(5, 32, seed=17), _judge, drawn=itself)
