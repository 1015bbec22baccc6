"""Find state that a kernel caches and wrongly reuses for another call: a module, a scale, a plan or an output.

Such state is never found if all calls of one configuration run in sequence, or in their own process. Here two calls A and B
alternate in one process: A, B, A. B differs from A in one argument, or is larger in every size. On a GPU, two calls also run on
two streams at the same time.
"""

import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters.calls import built_call, judge_built
from lab.checks.parameters.covering import Point
from lab.checks.parameters.models import FAMILIES, MODELS, Configuration
from lab.checks.parameters.values import Mask
from lab.checks.properties.check import Check, Scope, itself
from lab.checks.properties.k18_combinations import JUDGES
from lab.checks.run.support_protocol import Unsupported, output_and_lse
from lab.ranges import SEEDS, Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.interfaces import INTERFACES, PAGED_CALLS, Interface, MetadataFunction

LONGER, MORE_ROWS = 128, 64  # additional keys and rows of a request in a larger call, for more splits and tiles
LAUNCHES_AT_ONCE = 20  # on each of two streams
BUSY_SIZE = 8192  # rows of a square matrix whose product keeps the GPU busy until all these launches are queued
PARTS = 4  # cases over which the arguments are divided, since a kernel may be compiled for each value; it divides SEEDS
# Values of the first call with which all further settings of a metadata function have an effect.
STEP = {"draft_step": 1}
BASES: dict[Interface, dict[str, Any]] = {
    MetadataFunction.MHA_METADATA: STEP,
    MetadataFunction.MLA_METADATA: STEP,
    MetadataFunction.DRAFT_KV_INDICES: {"topk": 2, "page_size": 16},
}
# Axes that change sizes or data. They are not changed one by one here.
SIZES = frozenset(("dtype", "dtypes", "head_dim", "head_dims", "heads", "group", "num_kv_heads", "q_len", "requests"))
SIZES |= {"rows", "lengths", "contents", "prefixes", "spare_pages", "later"}


def _cases(scope: Scope) -> Iterator[Any]:
    if scope.interface in PAGED_CALLS:
        yield from scope.balanced(5, 32, seed=17)
    model = MODELS[scope.interface](scope.ranges)
    point = model.completed(BASES.get(scope.interface, {}))
    for part in range(PARTS):
        seed = SEEDS * scope.ranges.seed + part
        yield Configuration(scope.interface, model.default if point is None else point, seed)


def _judge(run: CaseRun) -> None:
    if isinstance(run.case, Configuration):
        _one_by_one(run)
        return
    inputs, _, first = run.base_call("A")
    kept = first.copied()
    scale = 0.75 * inputs.bmm1_scale
    run.vary("B, another bmm1_scale", inputs, inputs.truth(bmm1_scale=scale), bmm1_scale=scale)
    run.expect_equal_bits("A's output, after B", first, kept)
    for what, case in calls_between(run.case, run.ranges):
        other = run.build(case)
        run.vary(f"B, {what}", other, other.truth())
        run.expect_equal_bits(f"A again, after {what}", run.again(inputs), kept)
    if run.device.type == "cuda":
        stream = torch.cuda.Stream(run.device)
        stream.wait_stream(torch.cuda.current_stream(run.device))
        with torch.cuda.stream(stream):
            run.expect_equal_bits("A on another stream", run.again(inputs), kept)
        calls_at_once(run, inputs, run.build(replace(run.case, seed=run.case.seed + 7)))


def _one_by_one(run: CaseRun) -> None:
    first, model = run.case, MODELS[run.case.interface](run.ranges)
    built = built_call(first, run.ranges, run.device) if first.interface in FAMILIES else None
    _judge_one(run, "A", built)
    if run.wrongs:
        return
    # The part of an axis follows from its name, so that a case does not change when a model gets another axis.
    axes = [
        axis for axis in model.axes if axis not in SIZES and zlib.crc32(axis.encode()) % PARTS == first.seed % PARTS
    ]
    values = [(axis, value) for axis in axes for value in model.axes[axis]]
    for axis, value in values:
        near: Point = {**first.values, axis: value}
        point = near if model.fits(near) else model.completed({axis: value})
        # OWN_BIT_CLEAR is left out, because its rows without keys are judged elsewhere.
        if point is not None and value not in (first[axis], Mask.OWN_BIT_CLEAR):
            run.case = Configuration(first.interface, point, first.seed)
            # A refused call is not recorded: check K18 reports what is declined.
            with suppress(Unsupported), run.noting(what := f"B, {axis}={value}", needed=True):
                _judge_one(run, what, built)
                if axis == "mirrors":  # of the ragged call: a schedule may be kept by the sums of lengths
                    _judge_one(run, f"{what}, requests in reverse order", built, in_reverse=True)
    run.case = first
    _judge_one(run, "A again", built)


def _judge_one(run: CaseRun, what: str, first: BuiltCall | None, in_reverse: bool = False) -> None:
    known = len(run.wrongs)
    if first is None:
        JUDGES[run.case.interface](run)
    else:
        call = built_call(run.case, run.ranges, run.device, in_reverse)
        call.share(first)
        judge_built(run, call)
    run.wrongs[known:] = [f"{what}: {each}" for each in run.wrongs[known:]]


def calls_at_once(run: CaseRun, *inputs: AttentionInputs) -> None:
    """Make the calls at the same time, each on its own stream. Expect the bits of the same calls made one after another."""
    calls = [(each, each.arguments(), torch.cuda.Stream(run.device)) for each in inputs]
    results = [run.again(each, **arguments) for each, arguments, _ in calls]
    alone = [result.copied() for result in results]
    busy = torch.randn(BUSY_SIZE, BUSY_SIZE, device=run.device)
    torch.cuda.synchronize()
    busy = busy @ busy  # until both streams have their launches
    start = torch.cuda.current_stream(run.device).record_event()
    returned = []
    for launch in range(2 * LAUNCHES_AT_ONCE):
        _, arguments, stream = calls[launch % 2]
        with torch.cuda.stream(stream):
            stream.wait_event(start)
            returned.append(run.kernel.make("", run.case.interface, arguments))
    torch.cuda.synchronize()
    for launch, each in enumerate(returned):
        result = Result(*output_and_lse(run.case.interface, each))
        run.expect_equal_bits("a call at the same time as another stream's", result, alone[launch % 2])


def calls_between(case: AttentionCase, ranges: Ranges) -> Iterator[tuple[str, AttentionCase]]:
    """Yield cases that differ from `case` in one property, as pairs (the difference in words, the case)."""
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
    return axis[(axis.index(value) + 1) % len(axis)] if value in axis else axis[0]


CHECK = Check("K14", __doc__, _cases, _judge, interfaces=INTERFACES, drawn=itself)
