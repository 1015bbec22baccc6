"""Make the cases and the calls of the ragged context call: of a configuration, and of replays."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.call_cases import (
    SHORT,
    Chosen,
    emptied,
    fewer_than_rows,
    generator,
    longest_request,
    rows_of_prompts,
)
from lab.checks.parameters.paged_axes import REQUESTS
from lab.checks.parameters.ragged import BELOW_ZERO
from lab.checks.parameters.values import KV, Lengths, RaggedPadding, Sinks
from lab.ranges import Ranges, dtype_of
from lab.workloads.attention_case import Contents
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.ragged import TILE, RaggedInputs, build_ragged, joined, padded
from lab.workloads.inputs.views import GAP, Layout
from lab.workloads.ragged_case import RaggedCase

# Of logits below zero: e of each, and e of the difference of both, are beyond float32's ends, e**-103 and e**88.7.
HIGHEST, LOWEST = -110.0, -210.0
QUERY_COORDINATE = 16.0
# The value of each element of the keys' padding, which no row may read.
PADDED_KEYS: dict[Any, float] = {RaggedPadding.KEYS: 100.0, RaggedPadding.BOTH: 100.0, RaggedPadding.NAN: math.nan}


def ragged_inputs(of: Chosen, ranges: Ranges, device: torch.device) -> RaggedInputs:
    """Return the tensors of a configuration, with its sinks and without padding, which `RAGGED_FORMS` adds."""
    inputs = build_ragged(ragged_case(of), device)
    inputs = _below_zero(inputs) if of["contents"] == BELOW_ZERO else inputs
    sinks = None if of["sinks"] == Sinks.NONE else torch.linspace(1.0, 4.0, inputs.query.shape[1], device=device)
    return replace(inputs, sinks=sinks, with_padding=False)


def ragged_case(of: Chosen) -> RaggedCase:
    """Return the case of a ragged call's configuration: its sizes, dtype, lengths and contents."""
    q_lens, dims = rows_of_prompts(of), of["head_dims"]
    kv_lens = _ragged_kv_lens(of, q_lens)
    return RaggedCase(
        tuple(kv_len - rows for kv_len, rows in zip(kv_lens, q_lens, strict=True)),
        q_lens,
        chunk=max(*kv_lens, 1),
        num_heads=of["num_kv_heads"],
        group=of["group"],
        head_dim=dims.head_dim,
        v_head_dim=dims.v_head_dim,
        dtype=dtype_of(of["dtype"]),
        window_left=of["window_left"],
        contents=Contents.NEEDLES if of["contents"] == "needles" else Contents.RANDOM,
        seed=of.seed,
    )


def _ragged_kv_lens(of: Chosen, q_lens: Sequence[int]) -> tuple[int, ...]:
    """Return the number of keys of each request in a ragged call, as the axis "lengths" says."""
    lengths, rng = of["lengths"], generator(of)
    if len(q_lens) > REQUESTS:
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
    return emptied(kv_lens, lengths)


def _below_zero(inputs: RaggedInputs) -> RaggedInputs:
    """Return the inputs with one coordinate of queries and keys replaced, so that all logits of a row lie between LOWEST and
    HIGHEST.
    """
    query, parts = inputs.query.float(), []
    query[..., 0] = QUERY_COORDINATE
    for keys, values in inputs.parts:
        steps = torch.linspace(HIGHEST, LOWEST, len(keys)).roll(len(keys) // 2)
        lowered = keys.float()
        lowered[..., 0] = (steps / (QUERY_COORDINATE * inputs.softmax_scale)).unsqueeze(1)
        parts.append((lowered.to(keys.dtype), values))
    return replace(inputs, query=query.to(inputs.query.dtype), parts=parts)


def _keys_and_values(call: BuiltCall) -> None:
    """Pass the keys and values of a ragged call in the layout that the axis "kv" names, with padding after them."""
    given, form, padding = call.given, call.forms["kv"], PADDED_KEYS.get(call.forms["padding"])
    key, value = (given[name] if padding is None else padded(given[name], padding) for name in ("key", "value"))
    if form == KV.ONE_TENSOR:
        key, value = joined((key, value), dim=-1).split((key.shape[-1], value.shape[-1]), dim=-1)
    elif form == KV.V_OF_A_PROJECTION:  # which has the keys' elements without position before the values
        without_position = key.shape[-1] // 2 // GAP * GAP
        value = joined((key[..., :without_position], value), dim=-1)[..., without_position:]
    elif form == KV.V_APART:
        value = Layout.TOKENS_APART.of(value)
    else:
        key, value = form.of(key), form.of(value)
    given |= {"key": key, "value": value}


def _host_lengths(call: BuiltCall) -> None:
    """Pass the lengths as CPU tensors too, if the configuration says so. Also pass `o_sf_scale` and
    `skip_all_rows_active_check`.
    """
    for name in ("o_sf_scale", "skip_all_rows_active_check"):
        call.given[name] = call.forms[name]
    if call.forms["mirrors"] != "none":
        dtype = getattr(torch, call.forms["mirrors"])
        call.given["q_seq_lens_cpu"] = torch.tensor(call.inputs.q_lens, dtype=dtype)
        call.given["kv_seq_lens_cpu"] = torch.tensor(call.inputs.kv_lens, dtype=dtype)


RAGGED_FORMS: tuple[Callable[[BuiltCall], None], ...] = (_keys_and_values, _host_lengths)


def replayed_cases(ranges: Ranges, count: int, longest: Sequence[int]) -> Iterator[RaggedCase]:
    """Yield `count` cases for replays, and one with each number of keys in `longest`."""
    dtypes = [dtype for dtype, _ in ranges.dtypes]
    shapes = [((TILE, 2 * TILE, 3, 5), (7, 2 * TILE, 1, TILE)), ((0, 200, 130, 0), (130, 0, 3, 131))]
    for number in range(count):
        dtype = dtypes[number % len(dtypes)]
        yield RaggedCase(*shapes[number % 2], num_heads=1 + number % 3, dtype=dtype, seed=number + 1)
    for most_keys in longest:
        yield RaggedCase((most_keys, 9), (5, 2), num_heads=1, dtype=dtypes[0], seed=1)


def redrawn(
    case: RaggedCase, device: torch.device, kv_lens: Sequence[int], q_lens: Sequence[int], seed: int = 0
) -> RaggedInputs:
    """Return the inputs of a case with other lengths and another seed. They include sinks, and the call returns the LSE."""
    prefix_lens = tuple(kv_len - q_len for kv_len, q_len in zip(kv_lens, q_lens, strict=True))
    drawn = replace(case, prefix_lens=prefix_lens, q_lens=tuple(q_lens), seed=10 * case.seed + seed)
    sinks = torch.randn(case.num_heads, generator=torch.Generator().manual_seed(drawn.seed)) + 2.0
    return replace(build_ragged(drawn, device), sinks=sinks.to(device), return_lse=True)
