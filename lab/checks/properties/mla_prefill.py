"""A ragged context call that loses a key, or an LSE that does not merge: new tokens alone, cached chunks, and both together.

A prefill is right only if the causal call over its new tokens, the uncausal ones over chunks of its prefix and their LSEs say
the same thing. The first of them is judged as a serving backend makes it, too: from requests in a pool, by the backend's own
metadata. Requests without new tokens or without a chunk lie between the others, and large values after the last.
"""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lab.calls.workspace import counts_in_workspace, semaphores_and_scratch
from lab.checks.case_run import CaseRun, GivenCall, Result, as_result
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.k06_workspace import LEFT, expect_counters_zero, expect_left_alone
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mla.calls import MLALayer, prepare_mla_prefill
from lab.metadata.mla.metadata import build_mla_prefill_metadata
from lab.metadata.mla.prefix_chunks import plan_prefix_chunks, prepare_prefix_chunk
from lab.metadata.mla.rows import merge_by_lse
from lab.workloads.attention_case import Contents
from lab.workloads.inputs.attention import new_workspace
from lab.workloads.inputs.guards import guarded, wrong_guards
from lab.workloads.inputs.ragged import TILE, Parts, RaggedInputs, build_ragged, padded
from lab.workloads.interfaces import Interface
from lab.workloads.pass_case import PASS_CONTENTS
from lab.workloads.ragged_case import RaggedCase
from lab.workloads.requests import admit, new_pool

PAGE_SIZE = 64  # of the pool; the call reads no page


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
        lengths = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(seed)).tolist()
        yield RaggedCase(
            tuple(lengths[0]), tuple(lengths[1]), chunk=100, num_heads=1 + seed % 3, dtype=first, seed=seed
        )


def _judge(run: CaseRun) -> None:
    case = run.case
    every = build_ragged(case, run.device)  # all keys: the cached prefix and the new tokens
    histories = every.parts
    new = every.over(
        [(keys[prefix:], values[prefix:]) for (keys, values), prefix in zip(histories, case.prefix_lens, strict=True)]
    )
    truth, arguments = new.truth(), new.arguments()
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    own = _with_lse(run, "new tokens", arguments)
    if own is None:
        own = _own_rows(run.call(GivenCall(Interface.RAGGED_CONTEXT, arguments)), case)
    run.expect_close("new tokens", own, truth)
    inputs = {name: arguments[name] for name in before if name != "workspace_buffer"}
    run.expect_unchanged("the inputs", inputs, before)
    backend = _Backend(run)
    what = "new tokens as a backend calls it"
    with run.noting(what):
        run.expect_close(what, backend.new_tokens(new.query, new.parts), truth)
    if case.contents is Contents.NEEDLES:  # which show each limit
        _variations(run, new, arguments)
    whole = every.truth()
    what = "all keys in one call"
    run.expect_close(what, _with_lse(run, what, every.arguments()), whole)
    merged = own
    for start in range(0, max(case.prefix_lens), case.chunk):
        part = [
            (keys[: min(prefix, start + case.chunk)][start:], values[: min(prefix, start + case.chunk)][start:])
            for (keys, values), prefix in zip(histories, case.prefix_lens, strict=True)
        ]
        what = f"the chunk from {start} on"
        cached = every.over(part, causal=False)
        chunk = _with_lse(run, what, cached.arguments() | {"o_sf_scale": -1.0})
        run.expect_close(what, chunk, cached.truth())
        merged = _merged(merged, chunk)
    if max(case.prefix_lens) and merged is not None:
        run.expect_close("all of them merged", merged._replace(out=merged.out.to(case.dtype)), whole)
    if max(case.prefix_lens) and case.contents is Contents.NEEDLES:  # as the engine's planner cuts the prefix
        what = "the prefix in a backend's chunks, merged"
        with run.noting(what):
            run.expect_close(what, backend.merged(every.query, histories), whole)


class _Backend:
    """An MLA backend's calls for a batch of the case's requests."""

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
        self.function = SimpleNamespace(**{Interface.RAGGED_CONTEXT.value: run.function(Interface.RAGGED_CONTEXT)})
        self.workspace = {"workspace_buffer": new_workspace(run.device)}

    def new_tokens(self, query: Tensor, parts: Parts) -> Result:
        """Call attention over the new tokens; the result has an LSE if there is a prefix."""
        sides = (padded(torch.cat(sides)) for sides in zip(*parts, strict=True))
        batch, metadata, layer = self.batch, self.metadata, self.layer
        call = prepare_mla_prefill(self.function, batch, metadata, layer, padded(query), *sides, **self.workspace)
        return as_result(call(), Interface.RAGGED_CONTEXT)

    def merged(self, query: Tensor, histories: Parts) -> Result:
        """Merge the new tokens with the planned chunks of the prefix; a token's slot says whose key and value it is."""
        batch, prefixes = self.batch, self.case.prefix_lens
        own = self.new_tokens(
            query, [(keys[at:], values[at:]) for (keys, values), at in zip(histories, prefixes, strict=True)]
        )
        assert own.lse is not None
        outs, lses = [own.out], [own.lse]
        slots = torch.cat(
            [self.pool.req_to_token[row, :at] for row, at in zip(batch.req_pool_indices, prefixes, strict=True)]
        )
        order = torch.argsort(slots)
        cached = [
            torch.cat([side[:at] for side, at in zip(sides, prefixes, strict=True)])
            for sides in zip(*histories, strict=True)
        ]
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


def _variations(run: CaseRun, inputs: RaggedInputs, arguments: dict[str, Any]) -> None:
    """Vary arguments that an engine leaves at one value: each must do what it says."""
    case = run.case
    scale = case.softmax_scale
    tensor = torch.tensor([0.7 * scale], dtype=torch.float32, device=run.device)
    probes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bmm1_scale": ({"bmm1_scale": 0.7 * scale}, {"bmm1_scale": 0.7 * scale}),
        "bmm1_scale as a tensor": ({"bmm1_scale": tensor}, {"bmm1_scale": 0.7 * scale}),
        "bmm2_scale": ({"bmm2_scale": 0.9}, {"bmm2_scale": 0.9}),
        "is_causal=False": ({"is_causal": False}, {"causal": False}),
        "larger bounds": ({"max_q_len": 999, "max_kv_len": 999}, {}),
    }
    if True in run.ranges.windows:
        probes["window_left"] = ({"window_left": 20}, {"window_left": 20})
    if True in run.ranges.sinks:
        sinks = torch.linspace(1.0, 4.0, case.num_heads, device=run.device)
        probes["attention_sinks"] = ({"attention_sinks": sinks}, {"sinks": sinks})
    for what, (changes, rules) in probes.items():
        result = run.vary(what, GivenCall(Interface.RAGGED_CONTEXT, arguments | changes | {"return_lse": True}))
        run.expect_close(what, _own_rows(result, case), inputs.truth(**rules))
    out, around = guarded(
        torch.full((*inputs.query.shape[:2], case.v_head_dim), math.nan, dtype=case.dtype, device=run.device)
    )
    exact = arguments | {"query": inputs.query}  # no row of padding, which a kernel may write
    if run.vary("out", GivenCall(Interface.RAGGED_CONTEXT, exact | {"out": out})) is not None:
        run.expect_close("into out", Result(out, None), inputs.truth())
        run.expect("around out", wrong_guards("out", around))
    _workspaces(run, arguments)


def _workspaces(run: CaseRun, arguments: dict[str, Any]) -> None:
    """Expect the same bits whatever the workspace held and whatever was called before, and no write to another workspace."""
    workspace = new_workspace(run.device)
    semaphores, scratch = semaphores_and_scratch(workspace)
    query = torch.cat((arguments["query"], arguments["query"][:2]))  # two more rows of padding: no earlier call's shape
    arguments = arguments | {"query": query}
    mine = arguments | {"workspace_buffer": workspace}
    first = _kept(run, run.call(GivenCall(Interface.RAGGED_CONTEXT, mine)))
    if counts_in_workspace(arguments.get("backend", "auto"), run.device):
        expect_counters_zero(run, "a call", {"the workspace": semaphores})
    elif semaphores.any():  # the kernel writes all of it
        scratch = workspace
    for byte, name in ((0xFF, "NaN"), (0x7B, "large values")):
        scratch.fill_(byte)
        again = _again(run, mine)
        run.expect_equal_bits(f"scratch that holds {name}", again, first)
    others = arguments | {"query": -query, "workspace_buffer": new_workspace(run.device)}
    other = _again(run, others)
    kept = _kept(run, other)
    back = _again(run, mine)
    run.expect_equal_bits("again, after other queries in another workspace", back, first)
    run.expect_equal_bits("the output of other queries, after a call", other, kept)
    scratch.fill_(LEFT)
    elsewhere = arguments | {"workspace_buffer": new_workspace(run.device)}
    run.expect_equal_bits("another workspace", _again(run, elsewhere), first)
    expect_left_alone(run, scratch)


def _again(run: CaseRun, arguments: dict[str, Any]) -> Result | None:
    """Make a call that was taken before, with the same tensors or equal ones."""
    return _own_rows(run.again(GivenCall(Interface.RAGGED_CONTEXT, arguments)), run.case)


def _kept(run: CaseRun, result: Result | None) -> Result:
    """Return a copy of a result's own rows, which later calls cannot change."""
    own = _own_rows(result, run.case)
    assert own is not None
    return own._replace(out=own.out.clone())


def _with_lse(run: CaseRun, what: str, arguments: dict[str, Any]) -> Result | None:
    """Call for output and LSE; None where that is refused or fails, or the LSE is missing."""
    result = run.vary(what, GivenCall(Interface.RAGGED_CONTEXT, arguments | {"return_lse": True}))
    if result is not None and result.lse is None:
        run.wrong(f"{what}: return_lse=True returned no LSE")
        return None
    return _own_rows(result, run.case)


def _own_rows(result: Result | None, case: RaggedCase) -> Result | None:
    """Return a result without the rows of padding."""
    if result is None:
        return None
    rows = sum(case.q_lens)
    return Result(result.out[:rows], None if result.lse is None else result.lse[:rows])


def _merged(left: Result | None, right: Result | None) -> Result | None:
    """Merge two attentions over different keys into one over both, in float64; a side whose LSE is -inf has no weight."""
    if left is None or right is None or left.lse is None or right.lse is None:
        return None
    lses = torch.stack((left.lse, right.lse)).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.stack((left.out, right.out)).double()
    return Result((weights * outs).sum(dim=0), total)


CHECK = Check("M3", "mla_prefill", __doc__, _cases, _judge, interfaces=(Interface.RAGGED_CONTEXT,))
