"""The model (parameters, their values and rules) of the ragged context call: MLA before absorption, over contiguous K/V.

The first value of each axis is its default. Query dtypes, windows, sinks, large batches and long requests come from `Ranges`.
Heads and head_dims are the model's own; they include those of DeepSeek and related models.
"""

from collections.abc import Sequence
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.paged_axes import LSE, OUT, PROMPTS, QUERY, REQUESTS, RULES, VACUOUS, WINDOWS, softmax_axes
from lab.checks.parameters.values import (
    KV,
    Bound,
    HeadDims,
    Lengths,
    Offsets,
    Output,
    RaggedPadding,
    Rows,
    SeqLens,
    Sinks,
    Without,
)
from lab.ranges import Ranges, text_of
from lab.workloads.inputs.views import Layout

SHORT = 150  # keys of the longest request that is not long
FEW_KEYS = 50  # about, of a request in a large batch
LONGEST = 65_600  # keys: every one has a head of its own
MOST_HEADS = 256
MOST_KV_ELEMENTS = 2**25
MOST_PRODUCTS = 2**29  # of Q·K^T, in each of the three attentions that a case computes
DEEPSEEK_HEADS = 128
HEAD_DIMS = ("192/128", "128/128", "256/256", "80/64", "64/64", "64/128")
KEYS_AND_VALUES = (
    *(Layout.CONTIGUOUS, Layout.TOKENS_APART, Layout.HEADS_APART, Layout.HEADS_FIRST),
    *(Layout.AT_16_BYTES, Layout.AT_AN_ELEMENT, Layout.FAR_APART, *KV),
)
BELOW_ZERO = "below zero"  # every logit, and so far apart that exp of their differences overflows


def ragged_model(ranges: Ranges) -> Model:
    """Return the axes and rules of the ragged context call, restricted to ranges."""
    axes: dict[str, Sequence[Any]] = {
        "dtype": tuple(text_of(query) for query, _ in ranges.widened("dtypes")),
        "head_dims": tuple(map(HeadDims, HEAD_DIMS)),
        "num_kv_heads": (2, 1, 3, 16, DEEPSEEK_HEADS),
        "group": (1, 2, 7, 8, 16),
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
        "offsets": (Offsets.PLAIN, *Without),
        "padding": tuple(RaggedPadding),
        "causal": (True, False),
        "window_left": (-1, *(WINDOWS if True in ranges.windows else ())),
        "contents": ("random", "needles", BELOW_ZERO),
        **softmax_axes(AttentionCall.RAGGED_CONTEXT, ranges),
        "o_sf_scale": (1.0, -1.0, 0.5),
        "out": (*OUT[:4], Output.GIVEN_BF16, Output.GIVEN_FP32),
        "lse": LSE,
        "seq_lens": tuple(SeqLens),
        "max_q_len": (Bound.EXACT, Bound.LARGER),
        "max_kv_len": (Bound.EXACT, Bound.LARGER),
        "mirrors": ("none", "int32", "int64"),
        "skip_all_rows_active_check": (True, False),
        "query": QUERY,
        "kv": KEYS_AND_VALUES,
    }
    return Model.of(axes, (*RULES, *RAGGED_RULES), TRIPLES, VACUOUS)


def _keys(requests: int, lengths: Any) -> int:
    """Estimate the number of keys of a call."""
    return (
        requests * FEW_KEYS if requests > REQUESTS else REQUESTS * SHORT + (lengths if isinstance(lengths, int) else 0)
    )


def _pairs(rows: Any, lengths: Any) -> int:
    """Estimate the number of (row, key) pairs of a call with few requests."""
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
            lambda requests, num_kv_heads, group: requests * num_kv_heads * group <= 2**13,
        ),
        "tokens that each lie in memory of their own": lambda kv, requests, lengths, rows: (
            kv != Layout.FAR_APART or (requests <= REQUESTS and isinstance(lengths, str) and isinstance(rows, str))
        ),
        "each token takes whole pages": lambda kv, num_kv_heads: kv != Layout.FAR_APART or num_kv_heads <= 3,
        "no request would have both rows and keys": lambda requests, offsets, lengths: (
            requests > REQUESTS or offsets != Without.TWICE or lengths != Lengths.OF_THE_NEXT
        ),
        "a sink beside logits below zero leaves nothing of a row": lambda contents, sinks: (
            contents != BELOW_ZERO or sinks == Sinks.NONE
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
