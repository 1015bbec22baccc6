"""The ragged context call of a configuration: its rows, keys and values, its arguments' forms, and what it must give."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.forms import (
    DTYPES,
    FormedCall,
    judge_call,
    set_lengths,
    set_lse,
    set_out,
    set_scales,
    with_minus_infinity,
)
from lab.checks.parameters.paged_axes import FEWER, REQUESTS, SOME_MINUS_INFINITY
from lab.checks.parameters.paged_call import PADDED
from lab.checks.parameters.paged_shape import (
    empty_requests,
    fewer_than_rows,
    longest_request,
    rows_of_prompts,
    rows_without_keys,
)
from lab.checks.parameters.ragged import BELOW_ZERO, OF_THE_NEXT, SHORT, head_dims_of
from lab.references.truth import Rules, Truth
from lab.workloads.inputs.expected import truth_of_requests
from lab.workloads.inputs.guards import amid
from lab.workloads.inputs.needles import draw_histories, needle_positions
from lab.workloads.inputs.ragged import PADDING, TILE, Parts, arguments_of
from lab.workloads.inputs.views import GAP, laid, raw, with_nan
from lab.workloads.requests import PassLens

# Of logits below zero: e of each, and e of the difference of both, are beyond float32's ends, e**-103 and e**88.7.
HIGHEST, LOWEST = -110.0, -210.0
QUERY_COORDINATE = 16.0


@dataclass(frozen=True)
class RaggedLens(PassLens):
    """The rows and keys of each request.

    Attributes:
        prefix_lens: keys before the rows of each request; below 0 where it has fewer keys than rows.
        q_lens: rows of each request.
    """

    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


@dataclass(eq=False)
class RaggedCall(FormedCall):
    """A ragged call in the making.

    Attributes:
        others: as in `FormedCall`.
        lens: of its requests.
        query: float of the call's dtype, [num_rows, num_qo_heads, head_dim], without padding.
        parts: each request's keys and values, likewise.
    """

    lens: RaggedLens = field(kw_only=True)
    query: Tensor = field(kw_only=True)
    parts: Parts = field(kw_only=True)

    @property
    def rows(self) -> int:
        return sum(self.lens.q_lens)

    def truth(self) -> Truth:
        given = {name: self.arguments[name] for name in ("bmm1_scale", "bmm2_scale") if name not in self.rules}
        rules = {"arithmetic": self.query.dtype, **given, "out_dtype": self.made_dtype, **self.rules}
        return truth_of_requests(self.query, self.parts, list(self.lens.q_lens), Rules(**rules))


def judge_ragged(run: CaseRun) -> None:
    """Make the call of a run's configuration once, and hold all that it gives to the truth, and what it must not touch."""
    judge_call(run, _built(run))


def ragged_lens(of: Configuration) -> RaggedLens:
    """Return the rows and keys of a configuration's requests."""
    rng = random.Random(repr((of.interface.name, of.seed)))
    count, lengths = of["requests"], of["lengths"]
    q_lens = rows_of_prompts(of, count)
    if count > REQUESTS:
        kv_lens = [rows + 3 * request % 47 for request, rows in enumerate(q_lens)]
    else:
        edges = edge_lengths(TILE, SHORT)
        kv_lens = [max(rng.choice(edges), rows) for rows in q_lens]
        kv_lens[-1] = max(SHORT - rng.randrange(20), q_lens[-1])  # a window hides something of it
    if lengths == "as rows":
        kv_lens = list(q_lens)
    elif lengths == OF_THE_NEXT:
        kv_lens = [*q_lens[1:], q_lens[0]]
    elif lengths == FEWER:
        kv_lens = fewer_than_rows(q_lens)
    elif isinstance(lengths, int):
        kv_lens[longest_request(of)] = lengths + rng.randrange(TILE)
    for request in empty_requests(lengths, count):
        kv_lens[request] = 0
    return RaggedLens(tuple(kv_len - rows for kv_len, rows in zip(kv_lens, q_lens, strict=True)), q_lens)


def _built(run: CaseRun) -> RaggedCall:
    call = _drawn(run)
    for form in (_stored, _lengths, set_scales, _visible, _sinks, _out, set_lse):
        form(call)
    return call


def _drawn(run: CaseRun) -> RaggedCall:
    """Draw the requests' tensors, and padding after them."""
    of, device = run.case, run.device
    lens, dtype = ragged_lens(of), DTYPES[of["dtype"]]
    head_dims, heads = head_dims_of(of["head_dims"]), of["num_kv_heads"]
    scale = float(head_dims[0] ** -0.5)
    needles = [
        needle_positions(kv_len, rows, TILE, of["window_left"])
        for kv_len, rows in zip(lens.kv_lens, lens.q_lens, strict=True)
    ]
    query, histories = draw_histories(
        lens,
        torch.Generator().manual_seed(of.seed),
        needles if of["contents"] == "needles" else None,
        heads * of["group"],
        heads,
        head_dims,
        scale,
    )
    if of["contents"] == BELOW_ZERO:
        _lower(query, [keys for keys, _ in histories], scale)
    key, value = (_padded(torch.cat(sides), of["padding"], "keys") for sides in zip(*histories, strict=True))
    query, key, value = (side.to(device, dtype) for side in (_padded(query, of["padding"], "rows"), key, value))
    tokens = sum(lens.kv_lens)
    parts = list(zip(*(side[:tokens].split(lens.kv_lens) for side in (key, value)), strict=True))
    arguments = arguments_of(query, key, value, lens.q_lens, lens.kv_lens, scale, causal=of["causal"])
    made_dtype = torch.bfloat16 if dtype == E4M3 else dtype
    return RaggedCall(of, made_dtype, arguments, lens=lens, query=query[: sum(lens.q_lens)], parts=parts)


def _lower(query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
    """Make the logits of each row, in place, about HIGHEST to LOWEST by one coordinate."""
    query[..., 0] = QUERY_COORDINATE
    for of_request in keys:
        steps = torch.linspace(HIGHEST, LOWEST, len(of_request)).roll(len(of_request) // 2)
        of_request[..., 0] = (steps / (QUERY_COORDINATE * scale)).unsqueeze(1)


def _padded(side: Tensor, padding: str, name: str) -> Tensor:
    """Return a side with the padding of that name after it, if the configuration has it."""
    if name not in padding:
        return side
    return torch.cat((side, torch.full((PADDING, *side.shape[1:]), math.nan if "NaN" in padding else PADDED)))


def _stored(call: RaggedCall) -> None:
    """Lay query, keys and values out as the configuration says."""
    arguments, lens = call.arguments, call.lens
    keyless = rows_without_keys(lens.q_lens, lens.kv_lens)
    padding = len(arguments["query"]) - len(keyless)
    arguments["query"] = with_nan(arguments["query"], torch.nn.functional.pad(keyless, (0, padding)))
    arguments["query"] = laid(arguments["query"], call.of["query"])
    form, key, value = call.of["kv"], arguments["key"], arguments["value"]
    if form == "of one tensor":
        key, value = _cat(key, value).split((key.shape[-1], value.shape[-1]), dim=-1)
    elif form == "V of a projection":  # which has the keys' elements without position beside the values
        without_position = key.shape[-1] // 2 // GAP * GAP
        value = _cat(key[..., :without_position], value)[..., without_position:]
    elif form == "V apart":
        value = laid(value, "tokens apart")
    else:
        key, value = laid(key, form), laid(value, form)
    arguments |= {"key": key, "value": value}


def _cat(left: Tensor, right: Tensor) -> Tensor:
    """Return both side by side in one tensor, of e4m3 too."""
    return torch.cat((raw(left), raw(right)), dim=-1).view(left.dtype)


def _lengths(call: RaggedCall) -> None:
    arguments, of, q_lens = call.arguments, call.of, call.lens.q_lens
    set_lengths(call, arguments["max_kv_len"])
    if of["seq_lens"] == "amid others":
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            arguments[name] = amid(arguments[name], 0)
    for name in ("max_q_len", "max_kv_len"):
        if of[name] == "larger":
            arguments[name] = 2 * arguments[name] + 1
    if of["mirrors"] != "none":
        dtype = getattr(torch, of["mirrors"])
        arguments["q_seq_lens_cpu"] = torch.tensor(q_lens, dtype=dtype)
        arguments["kv_seq_lens_cpu"] = torch.tensor(call.lens.kv_lens, dtype=dtype)


def _visible(call: RaggedCall) -> None:
    call.rules |= {name: call.of[name] for name in ("window_left", "causal")}
    for name in ("window_left", "o_sf_scale", "skip_all_rows_active_check"):
        call.arguments[name] = call.of[name]


def _sinks(call: RaggedCall) -> None:
    if call.of["sinks"] == "none":
        return
    sinks = torch.linspace(1.0, 4.0, call.query.shape[1], device=call.query.device)
    if call.of["sinks"] == SOME_MINUS_INFINITY:
        sinks = with_minus_infinity(sinks)
    call.rules["sinks"] = sinks
    call.arguments["attention_sinks"] = amid(sinks, math.nan) if call.of["sinks"] == "a part of others" else sinks


def _out(call: RaggedCall) -> None:
    set_out(call, head_dims_of(call.of["head_dims"])[1])
