"""Test whether the bits of an output depend on a factor, such as the batch size. Each factor has a check.

A case makes a base call, and variants of this call that differ from it only in the factor. If the bits of a variant's output
differ, a `BitDifference` is recorded. The result is wrong only if its error exceeds the bound. Except for the factor "bounds",
all calls of a case have the same `max_seq_len`, the upper bound of the lengths. The first request is always the longest.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, cycle
from typing import Any

import torch

from lab.calls import CALL_TYPES
from lab.calls.allowed import CHOICES
from lab.calls.problem import LATENT_CALLS
from lab.checks.case_run import CaseRun, GivenCall, Result
from lab.checks.parameters.models import FAMILIES, MODELS
from lab.checks.parameters.paged_axes import DECODES
from lab.checks.properties.check import NVFP4_CACHE, Check, Scope
from lab.checks.properties.k06_workspace import filled, scratch_of
from lab.checks.properties.k07_batch import another_query, batch_sizes, positions
from lab.checks.properties.k08_decomposition import halves, several_rows, single_rows
from lab.checks.properties.k09_replay import captured
from lab.checks.properties.k10_metamorphic import bounds, other_pages, page_sizes
from lab.checks.properties.k12_determinism import launches
from lab.checks.properties.k14_interleaving import calls_between
from lab.checks.properties.variants import Variant, part
from lab.checks.run.support_protocol import Unjudgeable, Unsupported
from lab.checks.run.verdicts import BitDifference, largest_ulps
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.call import CallInputs
from lab.workloads.inputs.contents import new_workspace
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.ragged import RaggedCase, build_ragged
from lab.workloads.interfaces import PAGED_CALLS, Interface

WINDOW = 127  # long enough that a kernel splits the keys in the window
Variants = Callable[[CaseRun, CallInputs], Iterator[Variant]]


def _cases(factor: str, scope: Scope) -> Iterator[Any]:
    ranges, short = scope.ranges, 3 * scope.ranges.longest + 1
    lengths = (short, *ranges.long_requests[: scope.counted(1, 2)])
    if scope.interface not in PAGED_CALLS:
        for dtype in dict.fromkeys(query for query, _ in ranges.dtypes):
            for number, keys in zip(range(scope.counted(3, 8)), cycle(lengths), strict=False):
                yield RaggedCase((keys, 70, 9), (40, 17, 5), num_heads=1 + number % 2, dtype=dtype, seed=number)
        return
    of_dtypes = [replace(scope, ranges=replace(ranges, dtypes=(pair,))) for pair in ranges.dtypes]
    drawn = [each.balanced(3, 8, seed=80) for each in of_dtypes]
    nvfp4 = chain.from_iterable(NVFP4_CACHE.cases([case], ranges, 1) for case in of_dtypes[0].balanced(3, 8, seed=80))
    for cases in (*drawn, nvfp4):
        for case, keys in zip(cases, cycle(lengths), strict=False):
            fast = case if keys == short else replace(scope.on_fewest_heads(case), window_left=-1)
            fast = replace(fast, window_left=WINDOW if fast.window_left >= 0 else -1)
            q_lens = sorted(case.q_lens[:3], reverse=True)
            case = replace(fast, kv_lens=(keys, *case.kv_lens[1:3]), q_lens=tuple(q_lens)).with_rows(*q_lens)
            yield several_rows(case) if factor == "rows-per-call" else case


def _judge(run: CaseRun, variants: Variants) -> None:
    inputs = build_ragged(run.case, run.device) if isinstance(run.case, RaggedCase) else run.build()
    truth, found = inputs.truth(), list[tuple[Variant, Result]]()
    held = {} if variants is bounds else {inputs.kv_bound: max(*inputs.kv_lens, 1)}

    def result_of(variant: Variant) -> Result:
        arguments = variant.inputs.arguments() | held | variant.changes
        call = GivenCall(inputs.interface, arguments, sum(variant.inputs.q_lens))
        result = variant.make(run, call)()
        return result._replace(out=result.out.clone(), lse=None)

    same = Variant("the base call", inputs)
    base, *again = result_of(same), result_of(same)
    for variant in variants(run, inputs):
        with run.noting(variant.what):
            found.append((variant, result_of(variant)))
    if not found:
        raise Unsupported("no call was accepted that differs in this factor from one that was accepted")
    again.append(result_of(same))
    if variants is not _repeats and not all(same_bits(each.out, base.out) for each in again):
        raise Unjudgeable("the same call has other bits when it is repeated")
    run.expect_close("the base call", base, truth)
    for variant, result in found:
        rows = torch.arange(len(base.out), device=run.device) if variant.rows is None else variant.rows
        if (result.out.dtype, result.out.shape) != (base.out.dtype, (len(rows), *base.out.shape[1:])):
            run.wrong(f"{variant.what}: the output is {result.out.dtype} {list(result.out.shape)}")
            continue
        out = base.out.clone()  # with the variant's rows in place of the base call's
        out[rows[rows >= 0]] = result.out[rows >= 0]
        run.judged += 1
        if not same_bits(out, base.out):
            run.differences.append(BitDifference(variant.what, largest_ulps(out, base.out)))
            run.expect_close(variant.what, base._replace(out=out), truth)


def _batch_sizes(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    return batch_sizes(inputs, (2, *(-(-size // len(inputs.q_lens)) for size in run.ranges.large_batches)))


def _neighbours(_: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    yield another_query(inputs)
    every = [*range(len(inputs.q_lens))]
    for what, others in (("reversed", every[:0:-1]), ("replaced by request 0", [0] * len(every[1:]))):
        variant = part(inputs, f"the requests after request 0 {what}", [0, *others])
        assert variant.rows is not None
        variant.rows[inputs.q_lens[0] :] = -1
        yield variant


def _workspaces(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    changes = {"workspace_buffer": new_workspace(run.device)}
    yield Variant("another workspace", inputs, changes)
    for what in filled(scratch_of(run, inputs.arguments() | changes)):
        yield Variant(what, inputs, changes)


def _repeats(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    yield from launches(run, inputs, {"workspace_buffer": new_workspace(run.device)})
    for what, case in calls_between(run.case, run.ranges) if isinstance(run.case, AttentionCase) else ():
        if run.vary(f"a call with {what}", run.build(case)) is not None:
            yield Variant(f"after a call with {what}", inputs)


def _graphs(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    if run.device.type != "cuda":
        raise Unjudgeable("no GPU")
    yield Variant("a replayed CUDA graph", inputs, make=captured)


def _tactics(run: CaseRun, inputs: CallInputs) -> Iterator[Variant]:
    values = {name: CHOICES[name] for name in CALL_TYPES[inputs.interface].__dataclass_fields__ if name in CHOICES}
    if "backend" not in inputs.arguments():  # an NVFP4 cache is stored as one backend reads it
        values["backend"] = tuple(MODELS[inputs.interface](run.ranges).axes["backend"])
    for name, (_, *others) in values.items():
        yield from (Variant(f"{name}={value!r}", inputs, {name: value}) for value in others)


# Functions with attention cases or ragged cases.
_EVERY: tuple[Interface, ...] = tuple(call for call in FAMILIES if call in PAGED_CALLS or call not in LATENT_CALLS)
_ROWS_PER_CALL = (
    "how many query rows of a request one call has: a verification of n tokens or n decodes, a whole prefill or the chunks of "
    "this prefill"
)
_REPEATED = "how often the same call was made before, and which other calls were made before"


def _factor(name: str, meaning: str, variants: Variants, interfaces: tuple[Interface, ...] = _EVERY) -> Check:
    return Check(name, meaning, partial(_cases, name), partial(_judge, variants=variants), interfaces, kinds=())


FACTORS = (
    _factor("batch-size", "the number of requests in the batch", _batch_sizes),
    _factor("position", "the place of a request in the batch", lambda _, inputs: positions(inputs)),
    _factor("neighbours", "the contents and lengths of the other requests", _neighbours),
    _factor("bounds", "max_seq_len or max_kv_len, max_q_len, and the width of the page table", bounds),
    _factor("page-order", "which pages hold the keys", lambda run, _: iter([other_pages(run)]), PAGED_CALLS),
    _factor("page-size", "the number of tokens in a page", lambda run, _: page_sizes(run), PAGED_CALLS),
    _factor("rows-per-call", _ROWS_PER_CALL, lambda _, inputs: chain(single_rows(inputs), halves(inputs))),
    _factor("cuda-graph", "whether the call is eager, or replayed in a CUDA graph", _graphs),
    _factor("workspace", "the contents of the workspace", _workspaces),
    _factor("repeated-runs", _REPEATED, _repeats),
    _factor("tactic", "the backend, and the other arguments that select one of several kernels", _tactics, DECODES),
)
