"""The ragged context call of a configuration: its rows, keys and values, its arguments' forms, and what it must give."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun
from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.forms import (
    judge_call,
    set_lengths,
    set_lse,
    set_out,
    set_scales,
    with_minus_infinity,
)
from lab.checks.parameters.paged_axes import REQUESTS
from lab.checks.parameters.paged_call import PADDED
from lab.checks.parameters.paged_shape import (
    empty_requests,
    fewer_than_rows,
    longest_request,
    rows_of_prompts,
    rows_without_keys,
)
from lab.checks.parameters.ragged import BELOW_ZERO, SHORT
from lab.checks.parameters.values import DTYPES, KV, Bound, Lengths, SeqLens, Sinks
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.guards import embedded
from lab.workloads.inputs.needles import draw_histories, needle_positions
from lab.workloads.inputs.ragged import PADDING, TILE, RaggedInputs, joined
from lab.workloads.inputs.views import GAP, laid, with_nan
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


RaggedCall = BuiltCall[RaggedInputs]


def judge_ragged(run: CaseRun) -> None:
    """Judge the call of a run's configuration."""
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
    if lengths == Lengths.AS_ROWS:
        kv_lens = list(q_lens)
    elif lengths == Lengths.OF_THE_NEXT:
        kv_lens = [*q_lens[1:], q_lens[0]]
    elif lengths == Lengths.FEWER:
        kv_lens = fewer_than_rows(q_lens)
    elif isinstance(lengths, int):
        kv_lens[longest_request(of)] = lengths + rng.randrange(TILE)
    for request in empty_requests(lengths, count):
        kv_lens[request] = 0
    return RaggedLens(tuple(kv_len - rows for kv_len, rows in zip(kv_lens, q_lens, strict=True)), q_lens)


def _built(run: CaseRun) -> RaggedCall:
    call = _drawn(run)
    for form in (_stored, _lengths, set_scales, _visible, _sinks, set_out, set_lse):
        form(call)
    return call


def _drawn(run: CaseRun) -> RaggedCall:
    """Draw the requests' tensors, and padding after them."""
    of, device = run.case, run.device
    lens, dtype = ragged_lens(of), DTYPES[of["dtype"]]
    head_dims, heads = of["head_dims"], of["num_kv_heads"]
    scale = float(head_dims.head_dim**-0.5)
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
        (head_dims.head_dim, head_dims.v_head_dim),
        scale,
    )
    if of["contents"] == BELOW_ZERO:
        _lower(query, [keys for keys, _ in histories], scale)
    parts = [(keys.to(device, dtype), values.to(device, dtype)) for keys, values in histories]
    inputs = RaggedInputs(query.to(device, dtype), lens.q_lens, parts, scale, of["causal"])
    arguments = inputs.arguments(with_padding=False)
    for name, padding in (("query", "rows"), ("key", "keys"), ("value", "keys")):
        if padding in of["padding"].sides:
            arguments[name] = _padded(arguments[name], math.nan if of["padding"].is_nan else PADDED)
    return RaggedCall(of, inputs, arguments)


def _lower(query: Tensor, keys: Sequence[Tensor], scale: float) -> None:
    """Make the logits of each row, in place, about HIGHEST to LOWEST by one coordinate."""
    query[..., 0] = QUERY_COORDINATE
    for of_request in keys:
        steps = torch.linspace(HIGHEST, LOWEST, len(of_request)).roll(len(of_request) // 2)
        of_request[..., 0] = (steps / (QUERY_COORDINATE * scale)).unsqueeze(1)


def _padded(side: Tensor, value: float) -> Tensor:
    """Return a side with padding after it, where it has no token too."""
    return joined((side, torch.full((PADDING, *side.shape[1:]), value, device=side.device).to(side.dtype)))


def _stored(call: RaggedCall) -> None:
    """Lay query, keys and values out as the configuration says."""
    arguments = call.given
    keyless = rows_without_keys(call.inputs.q_lens, call.inputs.kv_lens)
    padding = len(arguments["query"]) - len(keyless)
    arguments["query"] = with_nan(arguments["query"], torch.nn.functional.pad(keyless, (0, padding)))
    arguments["query"] = laid(arguments["query"], call.forms["query"])
    form, key, value = call.forms["kv"], arguments["key"], arguments["value"]
    if form == KV.ONE_TENSOR:
        key, value = joined((key, value), dim=-1).split((key.shape[-1], value.shape[-1]), dim=-1)
    elif form == KV.V_OF_A_PROJECTION:  # which has the keys' elements without position before the values
        without_position = key.shape[-1] // 2 // GAP * GAP
        value = joined((key[..., :without_position], value), dim=-1)[..., without_position:]
    elif form == KV.V_APART:
        value = laid(value, KV.TOKENS_APART)
    else:
        key, value = laid(key, form), laid(value, form)
    arguments |= {"key": key, "value": value}


def _lengths(call: RaggedCall) -> None:
    arguments, of = call.given, call.forms
    set_lengths(call, arguments["max_kv_len"])
    if of["seq_lens"] == SeqLens.AMID_OTHERS:
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            arguments[name] = embedded(arguments[name], 0)
    for name in ("max_q_len", "max_kv_len"):
        if of[name] == Bound.LARGER:
            arguments[name] = 2 * arguments[name] + 1
    if of["mirrors"] != "none":
        dtype = getattr(torch, of["mirrors"])
        arguments["q_seq_lens_cpu"] = torch.tensor(call.inputs.q_lens, dtype=dtype)
        arguments["kv_seq_lens_cpu"] = torch.tensor(call.inputs.kv_lens, dtype=dtype)


def _visible(call: RaggedCall) -> None:
    call.rules["window_left"] = call.forms["window_left"]
    for name in ("window_left", "o_sf_scale", "skip_all_rows_active_check"):
        call.given[name] = call.forms[name]


def _sinks(call: RaggedCall) -> None:
    if call.forms["sinks"] == Sinks.NONE:
        return
    sinks = torch.linspace(1.0, 4.0, call.inputs.query.shape[1], device=call.device)
    if call.forms["sinks"] == Sinks.SOME_MINUS_INFINITY:
        sinks = with_minus_infinity(sinks)
    call.rules["sinks"] = sinks
    call.given["attention_sinks"] = embedded(sinks, math.nan) if call.forms["sinks"] == Sinks.A_PART else sinks
