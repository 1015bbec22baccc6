"""The model of the calls over a paged cache: decode, context and MLA decode.

The first value of each axis is its default. A field of `Ranges` that a caller narrowed gives its values alone; one that was
left as it is gives those beyond it too, which a kernel that was built for the usual sizes declines.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lab.calls.problem import E4M3, NVFP4
from lab.checks.parameters.covering import Constraint, Model
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3, "nvfp4": NVFP4}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
REQUESTS = 3
FEW = 8  # rows of a request, in a large batch
MOST_OUT_ELEMENTS = 2**22  # of a call: a large batch has few rows or heads
MOST_PRODUCTS = 2**29  # of Q·K^T, and so of P·V: a long request has few rows or heads
MOST_MLA_PRODUCTS = 1.4e9  # 128 heads over the longest request
MOST_KV_ELEMENTS = 2**26
MOST_POOL_ELEMENTS = 2**27  # of K, and so of V: a large batch has few heads or small pages
MOST_NVFP4_ELEMENTS = 2**20  # of a page of K
LEAST_KEYS = 64  # about, of a request's pages in a large batch

WINDOWS = (0, 1, 15, 20, 127, 1000, 5000, 2**31 - 1)
SCALES = ("number", "tensor [1]", "tensor []", "tensor [1, 1]")
NEGATIVE = ("negative", "negative tensor [1]")
WHOLE_ONE = "1 as a whole number"
SOME_MINUS_INFINITY = "some minus infinity"
SINKS = ("per head", SOME_MINUS_INFINITY, "a part of others")
AFTER = ("padding after", "padding of NaN")  # rows after the requests', which belong to none
NOTHING = "none at all"
WITHOUT = ("none first", "none last", "none twice", NOTHING)  # requests that have no rows, or no keys
FEWER = "fewer than rows"
EQUAL = 128  # keys of each request where lengths are equal
VACUOUS = frozenset({("lengths", NOTHING), ("offsets", NOTHING)})
OWN_BIT_CLEAR = "own bit clear"  # of each row: it sees the draft's tokens before it, and so the first row none
BITS_AFTER = "bits after the draft"
AT_A_WORD = "at a word"  # the mask begins at no multiple of 4 bytes
REQUESTS_APART = (
    "requests apart"  # rows of each request in a longer one: a query of four axes whose first two are not one
)
TWICE = "the last twice"  # the last page of a request of several is the one before it
ONE_TENSOR = ("one tensor", "one tensor of two halves")  # V's page after K's, or all of V after all of K
PROMPTS = (65, 300, 1040)  # rows of the prompt, in a context call


def paged_model(interface: Interface, ranges: Ranges) -> Model:
    """Return the model of a decode, context or MLA decode call within ranges."""
    axes = {
        **_sizes(interface, ranges),
        "requests": (REQUESTS, 1, *ranges.widened("large_batches")),
        "lengths": ("unequal", "equal", *WITHOUT, FEWER, *ranges.long_requests),
        **_rows(interface, ranges),
        "contents": ("random", "needles", "shaded"),
        "sinks": _sinks(interface, ranges),
        **_arguments(interface, ranges),
        **_tensors(interface, ranges),
    }
    return Model.of(axes, RULES, TRIPLES, VACUOUS)


def _sizes(interface: Interface, ranges: Ranges) -> dict[str, Sequence[Any]]:
    dtypes = [f"{NAMES[query]}/{NAMES[cache]}" for query, cache in ranges.widened("dtypes")]
    if interface is Interface.MLA_DECODE:
        dims = [f"{head_dim}/{v_head_dim}" for head_dim, v_head_dim in ranges.widened("mla_head_dims")]
        heads = ranges.widened("mla_heads")
        pages = ranges.widened("mla_page_sizes")
        return {"dtypes": dtypes, "head_dims": dims, "heads": heads, "page_size": pages}
    if True in ranges.nvfp4:
        dtypes += [
            f"{query}/nvfp4" for query in dict.fromkeys(each.split("/")[0] for each in dtypes) if query != "e4m3"
        ]
    return {
        "dtypes": dtypes,
        "group": ranges.widened("groups"),
        "num_kv_heads": ranges.widened("num_kv_heads"),
        "head_dim": ranges.widened("head_dims"),
        "page_size": ranges.widened("page_sizes"),
        "kv_layout": ranges.widened("kv_layouts"),
        "window_left": (-1, *(WINDOWS if True in ranges.windows else ())),
    }


def _rows(interface: Interface, ranges: Ranges) -> dict[str, Sequence[Any]]:
    ragged = (*WITHOUT, *AFTER)
    if interface is Interface.CONTEXT:
        return {
            "rows": ("unequal", "one each", *PROMPTS),
            "offsets": ("plain", *ragged),
            "max_q_len": ("exact", "larger"),
            "causal": (True, False),
        }
    rows: dict[str, Sequence[Any]] = {
        "q_len": ranges.widened("q_lens"),
        "offsets": ("none", "equal", "unequal", *ragged),
        "max_q_len": ("exact", "larger", *(("None",) if interface is Interface.MLA_DECODE else ())),
    }
    if interface is Interface.DECODE:
        rows["q_len"] = tuple(dict.fromkeys((*rows["q_len"], *ranges.widened("masked_rows"))))
        rows["mask"] = ("none", "causal", "full", "tree", "by request", OWN_BIT_CLEAR, BITS_AFTER, AT_A_WORD)
    return rows


def _sinks(interface: Interface, ranges: Ranges) -> Sequence[str]:
    if True not in ranges.sinks:
        return ("none",)
    forms = ("list", "tuple") if interface is Interface.MLA_DECODE else ()
    return ("none", *SINKS, *forms)


def _arguments(interface: Interface, ranges: Ranges) -> dict[str, Sequence[Any]]:
    out: tuple[str, ...] = ("none", "given", "a view", "given fp16", "given fp32")
    lse: tuple[str, ...] = ("none", "returned", "given", "given as the query", "base e")
    if interface is not Interface.MLA_DECODE:
        out = (*out, "dtype bf16", "dtype fp16", "dtype e4m3", "given e4m3")
        lse = ("none", "returned", "given", "given alone", "strided", "rows apart")
    log2 = (
        ("log2 tensor [1]", "log2 tensor [] beside a tensor", "log2 tensor below 0")
        if interface is Interface.DECODE
        else ()
    )
    return {
        "bmm1_scale": (*SCALES, *NEGATIVE, *log2),
        "bmm2_scale": ("usual", *(f"0.9 as a {each}" for each in SCALES), *NEGATIVE, WHOLE_ONE),
        "out": out,
        "lse": lse,
        "seq_lens": ("int32", "uint32", "amid others"),
        "bound": ("of the table", "exact", "4 times"),
        **({} if interface is Interface.CONTEXT else {"backend": ("auto", "trtllm-gen", "xqa")}),
        **({"qk_nope_head_dim": ("a quarter", "a half")} if interface is Interface.MLA_DECODE else {}),
    }


def _tensors(interface: Interface, ranges: Ranges) -> dict[str, Sequence[Any]]:
    query: tuple[str, ...] = ("contiguous", "rows apart", "heads apart", "at 16 bytes", "heads first")
    tables: tuple[str, ...] = (
        "plain",
        "rows apart",
        "at an element",
        "tail of -1",
        "tail far outside",
        "4,200 columns",
    )
    # An element apart: strides that are no whole loads of 16 bytes, nor of 16 elements, which a kernel may decline.
    no_loads = ("pages an element apart", "tokens an element apart")
    cache: tuple[str, ...] = ("plain", "pages apart", "tokens apart", "at 16 bytes", *no_loads)
    if interface is Interface.MLA_DECODE:
        query = (*query, REQUESTS_APART)
        cache = (*cache, "4-D", "4-D with odd strides")
    else:
        tables = (*tables, "separate", "separate with rows apart")
        cache = (*cache, "heads apart", "odd strides", "V otherwise", *ONE_TENSOR, "K is V")
    return {
        "query": query,
        "block_tables": tables,
        "pages": ("once each", TWICE),
        "cache": cache,
    }


def _is_long(lengths: Any) -> bool:
    return isinstance(lengths, int)


def _longest(lengths: Any) -> int:
    return lengths if _is_long(lengths) else 150


def _is_e4m3(dtypes: str, out: str) -> bool:
    """Tell whether the output is."""
    return "e4m3" in out or (dtypes.startswith("e4m3") and out in ("none", "given", "a view"))


def _dims(head_dim: Any) -> int:
    return int(str(head_dim).partition("/")[0])


def _prompt(rows: Any) -> int:
    """Return the most rows of a context call's request."""
    return rows if isinstance(rows, int) else {"one each": 1}.get(rows, 5)


RULES = (
    Constraint(
        lambda dtypes, out, contents, head_dim: contents != "shaded" or not _is_e4m3(dtypes, out),
        "an e4m3 output does not hold what small weights add",
    ),
    Constraint(
        lambda contents, head_dims: contents != "shaded" or len(set(head_dims.split("/"))) == 2,
        "the key that shades the others has zeros for a value, and its logit from an element that values lack",
    ),
    Constraint(
        lambda contents, cache: contents != "shaded" or cache != "K is V",
        "the key that shades the others has zeros for a value, and would have itself",
    ),
    Constraint(lambda requests, lengths: requests <= REQUESTS or not _is_long(lengths), "a long request is alone"),
    Constraint(lambda requests, q_len: requests <= REQUESTS or q_len <= FEW, "a large batch has few rows"),
    Constraint(
        lambda requests, rows: requests <= REQUESTS or isinstance(rows, str), "a large batch has no long prompt"
    ),
    Constraint(
        lambda requests, q_len, group, num_kv_heads, head_dim: (
            requests * q_len * group * num_kv_heads * head_dim <= MOST_OUT_ELEMENTS
        ),
        "the tensors would be too large for a test",
    ),
    Constraint(
        lambda requests, group, num_kv_heads, head_dim, rows: (
            requests * _prompt(rows) * group * num_kv_heads * head_dim <= 2 * MOST_OUT_ELEMENTS
        ),
        "the tensors would be too large for a test",
    ),
    Constraint(
        lambda requests, q_len, heads, head_dims: requests * q_len * heads * _dims(head_dims) <= 2 * MOST_OUT_ELEMENTS,
        "the tensors would be too large for a test",
    ),
    Constraint(
        lambda lengths, q_len, group, num_kv_heads, head_dim: (
            _longest(lengths) * q_len * group * num_kv_heads * head_dim <= MOST_PRODUCTS
        ),
        "the products would take a test too long in float64",
    ),
    Constraint(
        lambda lengths, rows, group, num_kv_heads, head_dim: (
            max(_longest(lengths), _prompt(rows)) * _prompt(rows) * group * num_kv_heads * head_dim <= 2 * MOST_PRODUCTS
        ),
        "the products would take a test too long in float64",
    ),
    Constraint(
        lambda lengths, q_len, heads, head_dims: (
            _longest(lengths) * q_len * heads * _dims(head_dims) <= MOST_MLA_PRODUCTS
        ),
        "the products would take a test too long in float64",
    ),
    Constraint(
        lambda lengths, num_kv_heads, head_dim: _longest(lengths) * num_kv_heads * head_dim <= MOST_KV_ELEMENTS,
        "the tensors would be too large for a test",
    ),
    Constraint(
        lambda requests, page_size, num_kv_heads, head_dim: (
            2 * requests * max(page_size, LEAST_KEYS) * num_kv_heads * head_dim <= MOST_POOL_ELEMENTS
        ),
        "the pool would be too large for a test",
    ),
    Constraint(
        lambda requests, page_size, block_tables: (
            requests <= REQUESTS or page_size < 256 or block_tables != "4,200 columns"
        ),
        "a bound of the table's width and of a large batch",
    ),
    Constraint(lambda lengths, rows: not (_is_long(lengths) and rows == 1040), "float64 takes too long"),
    Constraint(
        lambda offsets, max_q_len: offsets != "none" or max_q_len == "exact", "max_q_len goes with offsets of the rows"
    ),
    Constraint(lambda offsets, mask: offsets == "none" or mask == "none", "a mask goes without offsets"),
    Constraint(lambda q_len, query: query != REQUESTS_APART or q_len > 1, "of one row each, rows are requests"),
    Constraint(
        lambda offsets, query: query != REQUESTS_APART or offsets == "none",
        "a query with offsets has no axis of requests",
    ),
    Constraint(lambda q_len, mask: q_len > 1 or mask == "none", "one row needs no mask"),
    Constraint(lambda q_len, offsets: offsets != "unequal" or q_len > 1, "requests of one row each are not unequal"),
    Constraint(lambda causal, window_left: causal or window_left < 0, "a window is causal"),
    Constraint(
        lambda num_kv_heads, cache: cache != "odd strides" or num_kv_heads == 1,
        "odd strides are of one K/V head, an axis of size 1",
    ),
    Constraint(
        lambda dtypes, cache: "nvfp4" not in dtypes or cache in ("plain", "pages apart", "V otherwise", *ONE_TENSOR),
        "scale factors lie as the cache does",
    ),
    Constraint(
        lambda dtypes, backend: "nvfp4" not in dtypes or backend != "xqa",
        "a backend orders V's scale factors in its own way, and is named with them: XQA's is the plain form",
    ),
    Constraint(
        lambda dtypes, requests: "nvfp4" not in dtypes or requests <= REQUESTS, "quantising to NVFP4 takes too long"
    ),
    Constraint(
        lambda dtypes, lengths: "nvfp4" not in dtypes or _longest(lengths) < 5000, "quantising to NVFP4 takes too long"
    ),
    Constraint(
        lambda dtypes, num_kv_heads, head_dim, page_size: (
            "nvfp4" not in dtypes or num_kv_heads * head_dim * page_size <= MOST_NVFP4_ELEMENTS
        ),
        "quantising to NVFP4 takes too long",
    ),
    Constraint(
        lambda dtypes, out, sinks: sinks == "none" or not _is_e4m3(dtypes, out),
        "a sink leaves outputs that are too small for e4m3",
    ),
    Constraint(
        lambda dtypes, page_size: "nvfp4" not in dtypes or page_size >= 16, "NVFP4 needs pages of at least 16 tokens"
    ),
    Constraint(
        lambda block_tables, cache: "separate" not in block_tables or cache not in (*ONE_TENSOR, "K is V"),
        "K and V with tables of their own lie apart",
    ),
    Constraint(
        lambda requests, offsets: requests > 1 or offsets in ("none", "equal", "plain", "none at all", *AFTER),
        "the only request has rows",
    ),
    Constraint(
        lambda requests, lengths: requests > 1 or lengths not in ("none first", "none last", "none twice"),
        "the only request has keys",
    ),
    Constraint(
        lambda requests, offsets, lengths: requests > REQUESTS or {offsets, lengths} != {"none twice", "none last"},
        "no request would have both rows and keys",
    ),
    Constraint(lambda q_len, lengths: q_len > 1 or lengths != FEWER, "fewer keys than one row are none"),
    Constraint(lambda rows, lengths: rows != "one each" or lengths != FEWER, "fewer keys than one row are none"),
    Constraint(lambda pages, lengths: pages != TWICE or lengths != FEWER, "so few keys need no two pages"),
    Constraint(
        lambda pages, requests, mask: pages != TWICE or requests > 1 or mask != OWN_BIT_CLEAR,
        "the only request has the draft's keys alone",
    ),
    Constraint(
        lambda pages, lengths, page_size: pages != TWICE or lengths != "equal" or page_size < EQUAL,
        "equal lengths fit in one page of this size",
    ),
    Constraint(
        lambda pages, requests, lengths, page_size: (
            pages != TWICE or requests <= REQUESTS or lengths != "none last" or page_size < 32
        ),
        "of a large batch, the last request alone has two pages of this size",
    ),
)
TRIPLES = (
    ("mask", "window_left", "sinks"),
    ("offsets", "window_left", "sinks"),
    ("bmm1_scale", "bmm2_scale", "dtypes"),
    ("block_tables", "window_left", "dtypes"),
    ("mask", "dtypes", "lse"),
    ("causal", "sinks", "lse"),
    ("requests", "num_kv_heads", "lengths"),
    ("dtypes", "head_dim", "page_size"),
    ("dtypes", "head_dims", "page_size"),
    ("dtypes", "head_dim", "backend"),
    ("causal", "offsets", "lengths"),
    ("lse", "offsets", "sinks"),
    ("window_left", "page_size", "dtypes"),
    ("cache", "block_tables", "dtypes"),
    ("out", "bmm2_scale", "dtypes"),
)
