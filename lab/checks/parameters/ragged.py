"""The model of the ragged context call: attention before absorption, over K/V of the requests end to end.

The first value of each axis is the plain one. Of `Ranges` it has the queries' dtypes, windows, sinks, large batches and long
requests; its heads and head_dims are its own, those of DeepSeek and its relatives among them.
"""

from typing import Any

from lab.checks.parameters.covering import Constraint, Model
from lab.checks.parameters.paged_axes import (
    FEWER,
    NAMES,
    NEGATIVE,
    PROMPTS,
    REQUESTS,
    RULES,
    SCALES,
    SINKS,
    VACUOUS,
    WHOLE_ONE,
    WINDOWS,
    WITHOUT,
)
from lab.ranges import Ranges

SHORT = 150  # keys of the longest request that is not long
FEW_KEYS = 50  # about, of a request in a large batch
LONGEST = 65_600  # keys: every one has a head of its own
MOST_HEADS = 256
MOST_KV_ELEMENTS = 2**25
MOST_PRODUCTS = 2**29  # of Q·K^T, in each of the three attentions that a case computes
DEEPSEEK_HEADS = 128
BELOW_ZERO = "below zero"  # every logit, and so far apart that exp of their differences overflows
OF_THE_NEXT = "as the next request's rows"  # as many keys as rows in all, but not of each request


def ragged_model(ranges: Ranges) -> Model:
    """Return the model of the ragged context call within ranges."""
    axes: dict[str, tuple[Any, ...]] = {
        "dtype": tuple(NAMES[query] for query, _ in ranges.widened("dtypes")),
        "head_dims": ("192/128", "128/128", "256/256", "80/64", "64/64", "64/128"),
        "num_kv_heads": (2, 1, 3, 16, DEEPSEEK_HEADS),
        "group": (1, 2, 7, 8, 16),
        "requests": (REQUESTS, 1, *ranges.widened("large_batches")),
        "rows": ("unequal", "one each", *PROMPTS),
        "lengths": (
            "longer",
            "as rows",
            OF_THE_NEXT,
            FEWER,
            *WITHOUT,
            *(min(kv_len, LONGEST) for kv_len in ranges.long_requests),
        ),
        "offsets": ("plain", *WITHOUT),
        "padding": ("none", "rows", "keys", "rows and keys", "rows and keys of NaN"),
        "causal": (True, False),
        "window_left": (-1, *(WINDOWS if True in ranges.windows else ())),
        "contents": ("random", "needles", BELOW_ZERO),
        "sinks": ("none", *(SINKS if True in ranges.sinks else ())),
        "bmm1_scale": (*SCALES, *NEGATIVE),
        "bmm2_scale": ("usual", *(f"0.9 as a {each}" for each in SCALES), *NEGATIVE, WHOLE_ONE),
        "o_sf_scale": (1.0, -1.0, 0.5),
        "out": ("none", "given", "a view", "given fp16", "given bf16", "given fp32"),
        "lse": ("none", "returned", "given", "given alone", "strided", "rows apart"),
        "seq_lens": ("int32", "uint32", "amid others"),
        "max_q_len": ("exact", "larger"),
        "max_kv_len": ("exact", "larger"),
        "mirrors": ("none", "int32", "int64"),
        "skip_all_rows_active_check": (True, False),
        "query": ("contiguous", "rows apart", "heads apart", "at 16 bytes", "at an element", "heads first"),
        "kv": (
            "contiguous",
            "tokens apart",
            "heads apart",
            "heads first",
            "at 16 bytes",
            "at an element",
            "far apart",
            "V apart",
            "V of a projection",
            "of one tensor",
        ),
    }
    return Model.of(axes, (*RULES, *RAGGED_RULES), TRIPLES, VACUOUS)


def head_dims_of(value: str) -> tuple[int, int]:
    """Return (head_dim, v_head_dim) of a value of their axis."""
    head_dim, v_head_dim = map(int, value.split("/"))
    return head_dim, v_head_dim


def _keys(requests: int, lengths: Any) -> int:
    """Return about how many keys a call has."""
    return (
        requests * FEW_KEYS if requests > REQUESTS else REQUESTS * SHORT + (lengths if isinstance(lengths, int) else 0)
    )


def _pairs(rows: Any, lengths: Any) -> int:
    """Return about how many pairs of a row and a key a call of few requests has."""
    prompt = rows if isinstance(rows, int) else {"one each": 1}.get(rows, 10)
    return prompt * max(prompt, lengths if isinstance(lengths, int) else SHORT)


RAGGED_RULES = (
    Constraint(lambda num_kv_heads, group: num_kv_heads * group <= MOST_HEADS, "more heads than a layer has"),
    Constraint(
        lambda requests, lengths, head_dims, num_kv_heads: (
            _keys(requests, lengths) * num_kv_heads * sum(head_dims_of(head_dims)) <= MOST_KV_ELEMENTS
        ),
        "what a test holds in memory",
    ),
    Constraint(
        lambda lengths, head_dims, num_kv_heads, group: (
            _keys(1, lengths) * sum(head_dims_of(head_dims)) * num_kv_heads * group <= 4 * MOST_KV_ELEMENTS
        ),
        "what a test holds in memory: of the control, K and V of each query head",
    ),
    Constraint(
        lambda rows, lengths, head_dims, num_kv_heads, group: (
            _pairs(rows, lengths) * num_kv_heads * group * head_dims_of(head_dims)[0] <= MOST_PRODUCTS
        ),
        "what a test can compute in float64",
    ),
    Constraint(
        lambda requests, num_kv_heads, group: requests * num_kv_heads * group <= 2**13,
        "what a test can compute in float64",
    ),
    Constraint(
        lambda kv, requests, lengths, rows: (
            kv != "far apart" or (requests <= REQUESTS and isinstance(lengths, str) and isinstance(rows, str))
        ),
        "tokens that each lie in memory of their own",
    ),
    Constraint(lambda kv, num_kv_heads: kv != "far apart" or num_kv_heads <= 3, "each token takes whole pages"),
    Constraint(
        lambda requests, offsets, lengths: requests > REQUESTS or offsets != "none twice" or lengths != OF_THE_NEXT,
        "no request would have both rows and keys",
    ),
    Constraint(
        lambda contents, sinks: contents != BELOW_ZERO or sinks == "none",
        "a sink beside logits below zero leaves nothing of a row",
    ),
    Constraint(
        lambda padding, mirrors: padding == "none" or mirrors == "none",
        "lengths on the host leave no row or key after the last offset",
    ),
)
TRIPLES = (
    ("causal", "sinks", "lse"),
    ("offsets", "causal", "lse"),
    ("dtype", "bmm1_scale", "bmm2_scale"),
    ("mirrors", "offsets", "causal"),
    ("mirrors", "lengths", "rows"),
    ("mirrors", "offsets", "lengths"),
)
