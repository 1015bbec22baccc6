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

from lab.checks.attention_inputs import new_workspace, running_sum
from lab.checks.catalogue.k05_guards import changed_bytes, guarded, wrong_guards
from lab.checks.check import Check, Level, counted, first_line
from lab.checks.needles import draw_histories, needle_positions
from lab.checks.space import Space
from lab.checks.trial import Result, Trial, as_result
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mla.calls import MLALayer, prepare_mla_prefill
from lab.metadata.mla.metadata import build_mla_prefill_metadata
from lab.references.truth import Rules, Truth, truth_of_requests
from lab.workloads.attention_case import Contents
from lab.workloads.interfaces import Interface
from lab.workloads.pass_case import PASS_CONTENTS
from lab.workloads.ragged_case import RaggedCase
from lab.workloads.requests import admit, new_pool

TILE = 64  # keys or rows that kernels take at a time, where a length of one more or less shows
PAGE_SIZE = 64  # of the pool; the call reads no page
PADDING = 3  # rows and keys after the last request's
PADDED = 1e4  # what they hold: large, and finite in float16


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[RaggedCase]:
    shapes = [
        ((0, 0, 0, 0), (1, TILE - 1, TILE + 1, 5)),
        ((TILE, 0, 3, TILE + 1), (7, 2 * TILE, 1, TILE)),
        ((130, 200, 0, 5), (3, 0, 0, 65)),
        ((1, 0, 2 * TILE + 2), (130, 1, 2)),
        ((9, 70), (0, 3)),
    ]
    dtypes = [dtype for dtype, _ in space.dtypes]
    first = dtypes[0]
    for number, (prefix_lens, q_lens) in enumerate(shapes):
        for contents in PASS_CONTENTS:
            yield RaggedCase(prefix_lens, q_lens, dtype=first, contents=contents, seed=number)
    if torch.float16 in dtypes:
        yield RaggedCase((70, 9), (40, 20), dtype=torch.float16, contents=Contents.NEEDLES)
    yield RaggedCase((8,) * 40, tuple(range(1, 41)), num_heads=1, dtype=first)
    for seed in range(counted(level, 0, 24)):
        lengths = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(seed)).tolist()
        yield RaggedCase(
            tuple(lengths[0]), tuple(lengths[1]), chunk=100, num_heads=1 + seed % 3, dtype=first, seed=seed
        )


def _judge(trial: Trial) -> None:
    case = trial.case
    query, histories = _draw(case, trial.device)
    new_tokens = [
        (keys[prefix:], values[prefix:]) for (keys, values), prefix in zip(histories, case.prefix_lens, strict=True)
    ]
    truth = _truth(case, query, new_tokens, causal=True)
    arguments = _arguments(case, query, new_tokens, causal=True)
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    own = _with_lse(trial, "new tokens", arguments)
    if own is None:
        own = _own_rows(trial.run(Interface.RAGGED_CONTEXT, arguments), case)
    trial.hold("new tokens", own, truth)
    inputs = {name: arguments[name] for name in before if name != "workspace_buffer"}
    trial.hold_nothing_wrong("the inputs", changed_bytes(inputs, before))
    what = "new tokens as a backend calls it"
    trial.hold(what, trial.attempted(what, lambda: _by_backend(trial, query, new_tokens)), truth)
    if case.contents is Contents.NEEDLES:  # which show each limit
        _variations(trial, arguments, query, new_tokens)
    whole = _truth(case, query, histories, causal=True)
    what = "all keys in one call"
    trial.hold(what, _with_lse(trial, what, _arguments(case, query, histories, causal=True)), whole)
    merged = own
    for start in range(0, max(case.prefix_lens), case.chunk):
        part = [
            (keys[: min(prefix, start + case.chunk)][start:], values[: min(prefix, start + case.chunk)][start:])
            for (keys, values), prefix in zip(histories, case.prefix_lens, strict=True)
        ]
        what = f"the chunk from {start} on"
        chunk = _with_lse(trial, what, _arguments(case, query, part, causal=False) | {"o_sf_scale": -1.0})
        trial.hold(what, chunk, _truth(case, query, part, causal=False))
        merged = _merged(merged, chunk)
    if max(case.prefix_lens) and merged is not None:
        trial.hold("all of them merged", merged._replace(out=merged.out.to(case.dtype)), whole)


def _by_backend(trial: Trial, query: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Result:
    """Return the output of the call that an MLA backend makes of a batch of these requests."""
    case = trial.case
    pool = new_pool(
        case.kv_lens, page_size=PAGE_SIZE, max_context_len=max(case.kv_lens), seed=case.seed, device=trial.device
    )
    batch = admit(pool, case.prefix_lens, case.q_lens).batch(ForwardMode.EXTEND)
    layer = MLALayer(
        softmax_scale=case.softmax_scale,
        qk_rope_head_dim=case.head_dim // 3,
        qk_nope_head_dim=case.head_dim - case.head_dim // 3,
        v_head_dim=case.v_head_dim,
    )
    call = prepare_mla_prefill(
        SimpleNamespace(**{Interface.RAGGED_CONTEXT.value: trial.function(Interface.RAGGED_CONTEXT)}),
        batch,
        build_mla_prefill_metadata(batch, pool),
        layer,
        _padded(query),
        *(_padded(torch.cat(sides)) for sides in zip(*parts, strict=True)),
        workspace_buffer=new_workspace(trial.device),
    )
    return as_result(call(), Interface.RAGGED_CONTEXT)


def _variations(trial: Trial, arguments: dict[str, Any], query: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Vary arguments away from what the engine passes: each must do what it says."""
    case = trial.case
    scale = case.softmax_scale
    tensor = torch.tensor([0.7 * scale], dtype=torch.float32, device=trial.device)
    probes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "bmm1_scale": ({"bmm1_scale": 0.7 * scale}, {"bmm1_scale": 0.7 * scale}),
        "bmm1_scale as a tensor": ({"bmm1_scale": tensor}, {"bmm1_scale": 0.7 * scale}),
        "bmm2_scale": ({"bmm2_scale": 0.9}, {"bmm2_scale": 0.9}),
        "is_causal=False": ({"is_causal": False}, {"causal": False}),
        "larger bounds": ({"max_q_len": 999, "max_kv_len": 999}, {}),
    }
    if True in trial.space.windows:
        probes["window_left"] = ({"window_left": 20}, {"window_left": 20})
    if True in trial.space.sinks:
        sinks = torch.linspace(1.0, 4.0, case.num_heads, device=trial.device)
        probes["attention_sinks"] = ({"attention_sinks": sinks}, {"sinks": sinks})
    for what, (changes, rules) in probes.items():
        result = trial.attempt_call(what, Interface.RAGGED_CONTEXT, arguments | changes | {"return_lse": True})
        trial.hold(what, _own_rows(result, case), _truth(case, query, parts, **{"causal": True} | rules))
    out, around = guarded(
        torch.full((*query.shape[:2], case.v_head_dim), math.nan, dtype=case.dtype, device=query.device)
    )
    exact = arguments | {"query": query}  # no row of padding, which a kernel may write
    if trial.attempt_call("out", Interface.RAGGED_CONTEXT, exact | {"out": out}) is not None:
        trial.hold("into out", Result(out, None), _truth(case, query, parts, causal=True))
        trial.hold_nothing_wrong("around out", wrong_guards("out", around))


def _with_lse(trial: Trial, what: str, arguments: dict[str, Any]) -> Result | None:
    """Call for output and LSE; None where that is refused or fails, or the LSE is missing."""
    result = trial.attempt_call(what, Interface.RAGGED_CONTEXT, arguments | {"return_lse": True})
    if result is not None and result.lse is None:
        trial.wrong(f"{what}: return_lse=True returned no LSE")
        return None
    return _own_rows(result, trial.case)


def _own_rows(result: Result | None, case: RaggedCase) -> Result | None:
    """Return a result without the rows of padding."""
    if result is None:
        return None
    rows = sum(case.q_lens)
    return Result(result.out[:rows], None if result.lse is None else result.lse[:rows])


def _arguments(case: RaggedCase, query: Tensor, parts: list[tuple[Tensor, Tensor]], *, causal: bool) -> dict[str, Any]:
    """Return the arguments of the call over each request's keys and values, with padding after the last."""
    kv_lens = tuple(len(keys) for keys, _ in parts)
    device = query.device
    return {
        "query": _padded(query),
        "key": _padded(torch.cat([keys for keys, _ in parts])),
        "value": _padded(torch.cat([values for _, values in parts])),
        "workspace_buffer": new_workspace(device),
        "seq_lens": torch.tensor(kv_lens, dtype=torch.int32, device=device),
        "max_q_len": max(case.q_lens),
        "max_kv_len": max(kv_lens),
        "bmm1_scale": case.softmax_scale,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(case.q_lens),
        "window_left": -1,
        "cum_seq_lens_q": running_sum(case.q_lens, device),
        "cum_seq_lens_kv": running_sum(kv_lens, device),
        "enable_pdl": None,
        "is_causal": causal,
        "return_lse": False,
    }


def _padded(rows: Tensor) -> Tensor:
    return torch.cat((rows, torch.full_like(rows[:1], PADDED).expand(PADDING, -1, -1))) if len(rows) else rows


def _truth(case: RaggedCase, query: Tensor, parts: list[tuple[Tensor, Tensor]], **rules: Any) -> Truth:
    given: dict[str, Any] = {
        "bmm1_scale": case.softmax_scale,
        "bmm2_scale": 1.0,
        "arithmetic": case.dtype,
        "out_dtype": case.dtype,
    }
    return truth_of_requests(query, parts, list(case.q_lens), Rules(**given | rules))


def _merged(left: Result | None, right: Result | None) -> Result | None:
    """Merge two attentions over different keys into one over both, in float64; a side of an LSE of -inf counts nothing."""
    if left is None or right is None or left.lse is None or right.lse is None:
        return None
    lses = torch.stack((left.lse, right.lse)).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0).unsqueeze(-1)
    outs = torch.stack((left.out, right.out)).double()
    return Result((weights * outs).sum(dim=0), total)


def _draw(case: RaggedCase, device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the query, [sum(q_lens), heads, head_dim], and each request's keys and values."""
    needles = [_limits(case, request) for request in range(len(case.q_lens))]
    query, histories = draw_histories(
        case,
        torch.Generator().manual_seed(case.seed),
        needles if case.contents is Contents.NEEDLES else None,
        case.num_heads,
        case.num_heads,
        (case.head_dim, case.v_head_dim),
        case.softmax_scale,
    )
    stored = [(keys.to(device, case.dtype), values.to(device, case.dtype)) for keys, values in histories]
    return query.to(device, case.dtype), stored


def _limits(case: RaggedCase, request: int) -> set[int]:
    """Return the positions at the limits of what a request's rows see, and at both ends of each chunk of its prefix."""
    kv_len, edges = case.kv_lens[request], range(0, case.prefix_lens[request] + 1, case.chunk)
    ends = {near for edge in edges for near in (edge - 1, edge) if 0 <= near < kv_len}
    return ends | set(needle_positions(kv_len, case.q_lens[request], TILE))


CHECK = Check("M3", "mla_prefill", first_line(__doc__), _cases, _judge, interfaces=(Interface.RAGGED_CONTEXT,))
