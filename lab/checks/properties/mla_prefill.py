"""Find a ragged context call that omits a key, or whose LSE is wrong for a merge: over new tokens, cached chunks, or both.

A prefill is right only if three results fit together: the causal call over its new tokens, the non-causal calls over chunks of
its cached prefix, and the LSEs by which the outputs are merged. The causal call is also made as a serving backend makes it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun, GivenCall, Result
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.k05_guards import expect_into_out
from lab.checks.properties.k06_workspace import counters_of, expect_any_scratch, expect_counters_zero, expect_left_alone
from lab.checks.run.support_protocol import output_and_lse
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mla.backend import MLALayer, merge_by_lse
from lab.metadata.mla.metadata import build_mla_prefill_metadata
from lab.metadata.mla.prefill import plan_prefix_chunks, prepare_mla_prefill, prepare_prefix_chunk
from lab.workloads.attention_case import Contents
from lab.workloads.forward_case import PASS_CONTENTS
from lab.workloads.inputs.contents import new_workspace, unwritten
from lab.workloads.inputs.ragged import TILE, Parts, RaggedCase, RaggedInputs, build_ragged, padded
from lab.workloads.requests import admit, new_pool

PAGE_SIZE = 64  # page size of the backend's pool, which the judged call does not read


def _cases(scope: Scope) -> Iterator[RaggedCase]:
    shapes = [
        ((0, 0, 0, 0), (1, TILE - 1, TILE + 1, 5)),
        ((TILE, 0, 3, TILE + 1), (7, 2 * TILE, 1, TILE)),
        ((130, 200, 0, 5), (3, 0, 0, 65)),
        ((1, 0, 2 * TILE + 2), (130, 1, 2)),
        ((9, 70), (0, 3)),
    ]
    dtypes = [dtype for dtype, _ in scope.ranges.dtypes]
    first = dtypes[0]
    for number, (prefix_lens, q_lens) in enumerate(shapes):
        for contents in PASS_CONTENTS:
            yield RaggedCase(prefix_lens, q_lens, dtype=first, contents=contents, seed=number)
    if torch.float16 in dtypes:
        yield RaggedCase((70, 9), (40, 20), dtype=torch.float16, contents=Contents.NEEDLES)
    yield RaggedCase((8,) * 40, tuple(range(1, 41)), num_heads=1, dtype=first)
    if scope.is_full:
        yield RaggedCase((0, 3), (4200, 2), num_heads=1, dtype=first)  # more than 64 tiles of 64 rows
        yield RaggedCase((0,) * 514, (*(128,) * 513, 9), num_heads=1, dtype=first)  # more than 65,535 rows
    for seed in range(scope.counted(0, 24)):
        generator = torch.Generator().manual_seed(seed)
        prefix_lens, q_lens = map(tuple, torch.randint(0, 300, (2, 5), generator=generator).tolist())
        yield RaggedCase(prefix_lens, q_lens, chunk=100, num_heads=1 + seed % 3, dtype=first, seed=seed)


def _judge(run: CaseRun) -> None:
    case = run.case
    every = build_ragged(case, run.device)  # all keys: the cached prefix and the new tokens
    new = replace(every, parts=_between(every.parts, case.prefix_lens, case.kv_lens))
    call = _call(new)
    inputs = {name: value for name, value in call.given.items() if isinstance(value, Tensor)}
    del inputs["workspace_buffer"]
    before = {name: value.clone() for name, value in inputs.items()}
    own = _with_lse(run, "new tokens", call) or run.call(call)
    run.expect_close("new tokens", own, new.truth())
    run.expect_unchanged(inputs, before)
    backend = _Backend(run)
    what = "new tokens as a backend calls it"
    with run.noting(what):
        run.expect_close(what, backend.new_tokens(new.query, new.parts), new.truth())
    has_needles = case.contents is Contents.NEEDLES  # which show each limit
    if has_needles:
        _variations(run, new, call)
        _workspaces(run, call)
    whole = every.truth()
    what = "all keys in one call"
    run.expect_close(what, _with_lse(run, what, _call(every)), whole)
    merged: Result | None = own
    for start in range(0, max(case.prefix_lens), case.chunk):
        ends = tuple(min(prefix, start + case.chunk) for prefix in case.prefix_lens)
        what = f"the chunk from {start} on"
        cached = replace(every, parts=_between(every.parts, (start,) * len(ends), ends), causal=False)
        chunk = _with_lse(run, what, _call(cached), o_sf_scale=-1.0)
        run.expect_close(what, chunk, cached.truth())
        merged = _merged(merged, chunk)
    if max(case.prefix_lens) and merged is not None:
        run.expect_close("all of them merged", merged._replace(out=merged.out.to(case.dtype)), whole, kind="merged")
    if max(case.prefix_lens) and has_needles:  # as the engine's planner cuts the prefix
        what = "the prefix in a backend's chunks, merged"
        with run.noting(what):
            run.expect_close(what, backend.merged(every.query, every.parts), whole, kind="merged")


def _between(parts: Parts, starts: Sequence[int], ends: Sequence[int]) -> Parts:
    return [
        (keys[:end][start:], values[:end][start:])
        for (keys, values), start, end in zip(parts, starts, ends, strict=True)
    ]


def _call(inputs: RaggedInputs) -> GivenCall:
    return GivenCall(inputs.interface, inputs.arguments(), rows=sum(inputs.q_lens))


class _Backend:
    """A serving engine's MLA backend with the requests of a case: it makes the calls of a prefill and merges their outputs."""

    def __init__(self, run: CaseRun) -> None:
        case = self.case = run.case
        self.pool = new_pool(
            case.kv_lens, page_size=PAGE_SIZE, max_context_len=max(case.kv_lens), seed=case.seed, device=run.device
        )
        self.batch = admit(self.pool, case.prefix_lens, case.q_lens).batch(ForwardMode.EXTEND)
        self.metadata = build_mla_prefill_metadata(self.batch, self.pool)
        self.layer = MLALayer(
            softmax_scale=case.softmax_scale,
            qk_rope_head_dim=case.head_dim // 3,
            qk_nope_head_dim=case.head_dim - case.head_dim // 3,
            v_head_dim=case.v_head_dim,
        )
        self.function = SimpleNamespace(
            **{AttentionCall.RAGGED_CONTEXT.value: run.function(AttentionCall.RAGGED_CONTEXT)}
        )
        self.workspace = {"workspace_buffer": new_workspace(run.device)}

    def new_tokens(self, query: Tensor, parts: Parts) -> Result:
        sides = (padded(torch.cat(sides)) for sides in zip(*parts, strict=True))
        batch, metadata, layer = self.batch, self.metadata, self.layer
        call = prepare_mla_prefill(self.function, batch, metadata, layer, padded(query), *sides, **self.workspace)
        return Result(*output_and_lse(AttentionCall.RAGGED_CONTEXT, call()))

    def merged(self, query: Tensor, histories: Parts) -> Result:
        batch, prefixes = self.batch, self.case.prefix_lens
        own = self.new_tokens(query, _between(histories, prefixes, self.case.kv_lens))
        assert own.lse is not None
        outs, lses = [own.out], [own.lse]
        slots = torch.cat(
            [self.pool.req_to_token[row, :at] for row, at in zip(batch.req_pool_indices, prefixes, strict=True)]
        )
        order = torch.argsort(slots)
        before = _between(histories, [0] * len(prefixes), prefixes)
        cached = [torch.cat(sides) for sides in zip(*before, strict=True)]
        for chunk in plan_prefix_chunks(batch, self.pool, self.case.chunk * batch.batch_size):
            tokens = order[torch.searchsorted(slots[order], chunk.kv_indices)]
            sides = (padded(side[tokens]) for side in cached)
            call = prepare_prefix_chunk(
                self.function, batch, self.metadata, chunk, self.layer, padded(query), *sides, **self.workspace
            )
            out, lse = call()
            outs.append(out)
            lses.append(lse)
        return Result(merge_by_lse(torch.stack(outs), torch.stack(lses)).to(self.case.dtype), None)


def _variations(run: CaseRun, inputs: RaggedInputs, call: GivenCall) -> None:
    case, scale = run.case, 0.7 * run.case.softmax_scale
    tensor = torch.tensor([scale], dtype=torch.float32, device=run.device)
    sinks = torch.linspace(1.0, 4.0, case.num_heads, device=run.device)
    # Changed arguments, and the changed rules of the expected result.
    probes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bmm1_scale": ({"bmm1_scale": scale}, {"bmm1_scale": scale}),
        "bmm1_scale as a tensor": ({"bmm1_scale": tensor}, {"bmm1_scale": scale}),
        "bmm2_scale": ({"bmm2_scale": 0.9}, {"bmm2_scale": 0.9}),
        "is_causal=False": ({"is_causal": False}, {"causal": False}),
        "larger bounds": ({"max_q_len": 999, "max_kv_len": 999}, {}),
    }
    if True in run.ranges.windows:
        probes["window_left"] = ({"window_left": 20}, {"window_left": 20})
    if True in run.ranges.sinks:
        probes["attention_sinks"] = ({"attention_sinks": sinks}, {"sinks": sinks})
    for what, (changes, rules) in probes.items():
        run.vary(what, call, inputs.truth(**rules), return_lse=True, **changes)
    shape = (*inputs.query.shape[:2], case.v_head_dim)
    out = unwritten(torch.empty(shape, dtype=case.dtype, device=run.device))
    expect_into_out(run, call, out, inputs.truth(), query=inputs.query)  # no row of padding, which a kernel may write


def _workspaces(run: CaseRun, call: GivenCall) -> None:
    query = torch.cat((call.given["query"], call.given["query"][:2]))  # two more padding rows, for a new shape
    call = replace(call, given=call.given | {"query": query, "workspace_buffer": new_workspace(run.device)})
    first = run.call(call).copied()
    expect_counters_zero(run, "a call", counters_of(run, call.given))
    scratch = expect_any_scratch(run, call, first)
    other = run.again(call, query=-query, workspace_buffer=new_workspace(run.device))
    kept = other.copied()
    run.expect_equal_bits("again, after other queries in another workspace", run.again(call), first)
    run.expect_equal_bits("the output of other queries, after a call", other, kept)
    expect_left_alone(run, call, first, scratch)


def _with_lse(run: CaseRun, what: str, call: GivenCall, **changes: Any) -> Result | None:
    result = run.vary(what, call, return_lse=True, **changes)
    if result is not None and result.lse is None:
        run.wrong(f"{what}: return_lse=True returned no LSE")
        return None
    return result


def _merged(left: Result | None, right: Result | None) -> Result | None:
    if left is None or right is None or left.lse is None or right.lse is None:
        return None
    lses = torch.stack((left.lse, right.lse)).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.stack((left.out, right.out)).double()
    return Result((weights * outs).sum(dim=0), total)


CHECK = Check("M3", __doc__, _cases, _judge, interfaces=(AttentionCall.RAGGED_CONTEXT,), quick=4)
