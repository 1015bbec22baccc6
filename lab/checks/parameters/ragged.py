"""Define the parameters and rules of the ragged context call, and build its tensors. The call is MLA without absorption, over
contiguous K and V.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.paged_axes import (
    LSE,
    NEAR,
    OUT,
    PROMPTS,
    QUERY,
    REQUESTS,
    RULES,
    SHORT,
    VACUOUS,
    WINDOWS,
    softmax_axes,
)
from lab.checks.parameters.paged_calls import Lens, fitted, generator, rows_of_prompts, short_lens, with_long
from lab.checks.parameters.values import (
    KV,
    Bound,
    Chosen,
    HeadDims,
    Lengths,
    LogitScale,
    LongestRequest,
    Offsets,
    Output,
    RaggedPadding,
    Rows,
    SeqLens,
    Sinks,
    Without,
)
from lab.ranges import Ranges, dtype_of, text_of
from lab.workloads.attention_case import Contents
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.ragged import TILE, RaggedCase, RaggedInputs, build_ragged, padded, quantised_inputs
from lab.workloads.inputs.views import GAP, Layout

FEW_KEYS = 50  # estimate of the keys of a request in a large batch
LONGEST = 65_600  # most keys of a long request: K and V have up to 128 heads
MOST_HEADS = 256
MOST_KV_ELEMENTS = 2**25
MOST_PRODUCTS = 2**29  # most multiplications of Q·K^T in one of the attentions that a case computes
# Most pairs of a request and a head in a case whose two rows per request make more than MOST_OF_GRID pairs of a row and a head.
MOST_PARTS = 34_000
MOST_OF_GRID = 65_535  # most programs on the second and third axis of a CUDA grid
DEEPSEEK_HEADS = 128
HEAD_DIMS = ("192/128", "128/128", "256/256", "80/64", "64/64", "64/128")
KEYS_AND_VALUES = (
    *(Layout.CONTIGUOUS, Layout.TOKENS_APART, Layout.HEADS_APART, Layout.HEADS_FIRST),
    *(Layout.AT_16_BYTES, Layout.AT_AN_ELEMENT, Layout.FAR_APART, *KV),
)
BELOW_ZERO = "below zero"  # value of "contents": all logits of a row lie between LOWEST and HIGHEST
# exp of these logits underflows in float32 (below e**-103), and exp of their difference overflows (above e**88.7).
HIGHEST, LOWEST = -110.0, -210.0
QUERY_COORDINATE = 16.0
# For each value of the axis "sage": dtype of query and key, rows of a block, keys of a block. None: no scales of blocks.
SAGE: dict[str, Any] = {"none": None, "int8, 16 keys": (torch.int8, 1, 16), "e4m3, 4 keys": (E4M3, 1, 4)}
# The value of each element of padding after K and V, which no row may read.
PADDED_KEYS: dict[Any, float] = {RaggedPadding.KEYS: 100.0, RaggedPadding.BOTH: 100.0, RaggedPadding.NAN: math.nan}


def ragged_model(ranges: Ranges) -> Model:
    axes: dict[str, Sequence[Any]] = {
        "dtype": tuple(text_of(query) for query, _ in ranges.widened("dtypes")),
        "head_dims": tuple(map(HeadDims, HEAD_DIMS)),
        "num_kv_heads": (2, 1, 3, 16, DEEPSEEK_HEADS),
        "group": (1, 2, 7, 8, 16, 32),
        "requests": (REQUESTS, 1, *ranges.widened("large_batches")),
        "rows": (*Rows, *PROMPTS),
        "lengths": (
            Lengths.LONGER,
            Lengths.AS_ROWS,
            Lengths.OF_THE_NEXT,
            Lengths.FEWER,
            *Without,
            *(min(kv_len, LONGEST) for kv_len in ranges.long_requests),
        ),
        "longest_request": tuple(LongestRequest),
        "offsets": (Offsets.PLAIN, *Without),
        "padding": tuple(RaggedPadding),
        "causal": (True, False),
        "window_left": (-1, *(WINDOWS if True in ranges.windows else ())),
        "contents": ("random", "needles", BELOW_ZERO),
        "sage": tuple(SAGE),
        **softmax_axes(AttentionCall.RAGGED_CONTEXT, ranges),
        "o_sf_scale": (1.0, -1.0, 0.5),
        "out": (*OUT[:4], Output.GIVEN_BF16, Output.GIVEN_FP32),
        "lse": LSE,
        "seq_lens": tuple(SeqLens),
        "max_q_len": (Bound.EXACT, Bound.LARGER),
        "max_kv_len": (Bound.EXACT, Bound.LARGER, Bound.OF_A_MODEL),
        "mirrors": ("none", "int32", "int64"),
        "skip_all_rows_active_check": (True, False),
        "query": QUERY,
        "kv": KEYS_AND_VALUES,
        "far": (NEAR, "query", "lse"),
    }
    return Model.of(axes, (*RULES, *RAGGED_RULES), TRIPLES, VACUOUS)


def _keys(requests: int, lengths: Any) -> int:
    return (
        requests * FEW_KEYS if requests > REQUESTS else REQUESTS * SHORT + (lengths if isinstance(lengths, int) else 0)
    )


def _pairs(rows: Any, lengths: Any) -> int:
    prompt = rows if isinstance(rows, int) else 1 if rows == Rows.ONE_EACH else 10
    return prompt * max(prompt, lengths if isinstance(lengths, int) else SHORT)


RAGGED_RULES = constraints(
    {
        "more heads than a layer has": lambda num_kv_heads, group: num_kv_heads * group <= MOST_HEADS,
        "what a test holds in memory": lambda requests, lengths, head_dims, num_kv_heads: (
            _keys(requests, lengths) * num_kv_heads * (head_dims.head_dim + head_dims.v_head_dim) <= MOST_KV_ELEMENTS
        ),
        "what a test holds in memory: of the control, K and V of each query head": (
            lambda lengths, head_dims, num_kv_heads, group: (
                _keys(1, lengths) * (head_dims.head_dim + head_dims.v_head_dim) * num_kv_heads * group
                <= 4 * MOST_KV_ELEMENTS
            ),
        ),
        "what a test can compute in float64": (
            lambda rows, lengths, head_dims, num_kv_heads, group: (
                _pairs(rows, lengths) * num_kv_heads * group * head_dims.head_dim <= MOST_PRODUCTS
            ),
            lambda requests, num_kv_heads, group: (
                requests * num_kv_heads * group <= 2**13
                or (num_kv_heads == 1 and MOST_OF_GRID < 2 * requests * group <= 2 * MOST_PARTS)
            ),
        ),
        "a grid of many rows and heads that is cut shows with several rows each, and not where needles leave them zero": (
            lambda requests, group, contents: requests * group <= 2**13 or contents != "needles",
            lambda requests, group, rows: requests * group <= 2**13 or rows != Rows.ONE_EACH,
        ),
        "tokens that each lie in memory of their own": lambda kv, requests, lengths, rows: (
            kv != Layout.FAR_APART or (requests <= REQUESTS and isinstance(lengths, str) and isinstance(rows, str))
        ),
        "several far tensors take too much memory": lambda kv, far: kv != Layout.FAR_APART or far == NEAR,
        "each token takes whole pages": lambda kv, num_kv_heads: kv != Layout.FAR_APART or num_kv_heads <= 3,
        "no request would have both rows and keys": lambda requests, offsets, lengths: (
            lengths != Lengths.OF_THE_NEXT
            or (offsets != Without.ALL_BUT_ONE and (requests > REQUESTS or offsets != Without.TWICE))
        ),
        "e4m3 holds no large query": lambda bmm1_scale, dtype: bmm1_scale != LogitScale.SMALL or dtype != "e4m3",
        "a sink beside logits below zero leaves nothing of a row": lambda contents, sinks: (
            contents != BELOW_ZERO or sinks == Sinks.NONE
        ),
        "the kernels with scales of blocks are for heads of 128 and not causal": (
            lambda sage, head_dims: sage == "none" or head_dims == "128/128",
            lambda sage, causal: sage == "none" or not causal,
        ),
        "FlashInfer refuses empty requests with scales of blocks": (
            lambda sage, lengths: sage == "none" or lengths not in (*Without, Lengths.FEWER),
            lambda sage, offsets: sage == "none" or offsets == Offsets.PLAIN,
        ),
        "K and V of two dtypes lie apart": lambda sage, kv: (
            not sage.startswith("int8") or kv not in (KV.ONE_TENSOR, KV.V_OF_A_PROJECTION)
        ),
        "tensors of bf16 or fp16 are quantised, without padding": (
            lambda sage, dtype: sage == "none" or dtype != "e4m3",
            lambda sage, padding: sage == "none" or padding == RaggedPadding.NONE,
            lambda sage, contents: sage == "none" or contents == "random",
            lambda sage, bmm1_scale: sage == "none" or bmm1_scale != LogitScale.SMALL,
        ),
        "lengths on the host leave no row or key after the last offset": lambda padding, mirrors: (
            padding == RaggedPadding.NONE or mirrors == "none"
        ),
    }
)
TRIPLES = (
    ("causal", "sinks", "lse"),
    ("offsets", "causal", "lse"),
    ("dtype", "bmm1_scale", "bmm2_scale"),
    ("mirrors", "offsets", "causal"),
    ("mirrors", "lengths", "rows"),
    ("mirrors", "offsets", "lengths"),
)


def ragged_inputs(of: Chosen, ranges: Ranges, device: torch.device) -> RaggedInputs:
    inputs = build_ragged(ragged_case(of), device)
    inputs = _below_zero(inputs) if of["contents"] == BELOW_ZERO else inputs
    sinks = None if of["sinks"] == Sinks.NONE else torch.linspace(1.0, 4.0, inputs.query.shape[1], device=device)
    inputs = replace(inputs, sinks=sinks, with_padding=False)
    return inputs if of["sage"] == "none" else quantised_inputs(inputs, *SAGE[of["sage"]])


def ragged_case(of: Chosen) -> RaggedCase:
    q_lens, dims, lengths, rng = rows_of_prompts(of), of["head_dims"], of["lengths"], generator(of)
    kv_lens = short_lens(rng, TILE, q_lens)
    longest = lengths if isinstance(lengths, int) else SHORT - 20  # long enough that a window hides keys
    with_long(kv_lens, of, lambda: longest + rng.randrange(20))
    fitting = fitted(kv_lens, q_lens, lengths)
    return RaggedCase(
        tuple(kv_len - rows for kv_len, rows in zip(fitting, q_lens, strict=True)),
        q_lens,
        chunk=max(*fitting, 1),
        num_heads=of["num_kv_heads"],
        group=of["group"],
        head_dim=dims.head_dim,
        v_head_dim=dims.v_head_dim,
        dtype=dtype_of(of["dtype"]),
        window_left=of["window_left"],
        contents=Contents.NEEDLES if of["contents"] == "needles" else Contents.RANDOM,
        seed=of.seed,
    )


def _below_zero(inputs: RaggedInputs) -> RaggedInputs:
    query, parts = inputs.query.float(), []
    query[..., 0] = QUERY_COORDINATE
    for keys, values in inputs.parts:
        steps = torch.linspace(HIGHEST, LOWEST, len(keys)).roll(len(keys) // 2)
        lowered = keys.float()
        lowered[..., 0] = (steps / (QUERY_COORDINATE * inputs.softmax_scale)).unsqueeze(1)
        parts.append((lowered.to(keys.dtype), values))
    return replace(inputs, query=query.to(inputs.query.dtype), parts=parts)


def set_ragged_forms(call: BuiltCall) -> None:
    given, form, padding = call.given, call.forms["kv"], PADDED_KEYS.get(call.forms["padding"])
    key, value = (given[name] if padding is None else padded(given[name], padding) for name in ("key", "value"))
    if form == KV.ONE_TENSOR:
        key, value = torch.cat((key, value), dim=-1).split((key.shape[-1], value.shape[-1]), dim=-1)
    elif form == KV.V_OF_A_PROJECTION:  # V is a view of the output of MLA's up-projection, [..., key part, value]
        without_position = key.shape[-1] // 2 // GAP * GAP
        value = torch.cat((key[..., :without_position], value), dim=-1)[..., without_position:]
    elif form == KV.V_APART:
        value = Layout.TOKENS_APART.of(value)
    else:
        key, value = form.of(key), form.of(value)
    given |= {"key": key, "value": value}
    if call.forms["mirrors"] != "none":
        dtype = getattr(torch, call.forms["mirrors"])
        given["q_seq_lens_cpu"] = torch.tensor(call.inputs.q_lens, dtype=dtype)
        given["kv_seq_lens_cpu"] = torch.tensor(call.inputs.kv_lens, dtype=dtype)


def replayed_cases(ranges: Ranges, count: int, longest: Sequence[int]) -> Iterator[RaggedCase]:
    """Yield cases for graph replays: `count` with short requests, then for each n in `longest` one with n keys in a request."""
    dtypes = [dtype for dtype, _ in ranges.dtypes]
    shapes = [((TILE, 2 * TILE, 3, 5), (7, 2 * TILE, 1, TILE)), ((0, 200, 130, 0), (130, 0, 3, 131))]
    for number in range(count):
        dtype = dtypes[number % len(dtypes)]
        yield RaggedCase(*shapes[number % 2], num_heads=1 + number % 3, dtype=dtype, seed=number + 1)
    for most_keys in longest:
        yield RaggedCase((most_keys, 9), (5, 2), num_heads=1, dtype=dtypes[0], seed=1)


def redrawn_ragged(
    case: RaggedCase, _: Ranges, device: torch.device, lens: Lens, seed: int = 0, moved: bool = False
) -> RaggedInputs:
    """Return the tensors of a case for a graph replay, with the lengths `lens`, sinks and LSE. `seed` and `moved` change the
    seed of the data: a ragged call has no pages that could move.
    """
    prefix_lens = tuple(kv_len - q_len for kv_len, q_len in zip(lens.kv_lens, lens.q_lens, strict=True))
    drawn = replace(case, prefix_lens=prefix_lens, q_lens=lens.q_lens, seed=10 * case.seed + seed + 6 * moved)
    sinks = torch.randn(case.num_heads, generator=torch.Generator().manual_seed(drawn.seed)) + 2.0
    return replace(build_ragged(drawn, device), sinks=sinks.to(device), return_lse=True)
