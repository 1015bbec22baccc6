"""Define the parameters (axes) of decode, context and MLA decode calls, their values, and rules between values.

The first value of an axis is its default. The last values of an axis are unusual ones, which many kernels refuse. If the user
chooses the values of a parameter in `Ranges`, the unusual values of its axis are omitted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lab.calls.problem import E4M3, NVFP4, AttentionCall
from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.values import (
    Bound,
    Cache,
    DtypePair,
    HeadDims,
    KeyOffsets,
    Lengths,
    LogitScale,
    LongestRequest,
    Lse,
    Mask,
    Offsets,
    Output,
    Pages,
    Rows,
    SeqLens,
    Sinks,
    Tables,
    ValueScale,
    Without,
    is_outside,
)
from lab.ranges import Ranges, dtype_of, text_of
from lab.workloads.attention_case import Entries, HeadPages
from lab.workloads.inputs.views import Layout

REQUESTS, SHORT = 3, 150  # of a usual batch: requests, and keys of the longest one
FEW = 8  # most query rows of a request in a large batch
# Most elements of an output. With 64 heads, the largest batch still has more than 65,535 (row, head) pairs.
MOST_OUT_ELEMENTS = 1040 * 64 * 64
MOST_PRODUCTS = 2**29  # most multiplications of Q·K^T: a long request has few rows or heads
MOST_MLA_PRODUCTS = 1.4e9  # most multiplications of Q·K^T in MLA: 128 heads over the longest request
MOST_KV_ELEMENTS = 2**26
MOST_POOL_ELEMENTS = 2**27  # most elements of the K pool: a large batch has few heads or small pages
MOST_NVFP4_ELEMENTS = 2**20  # most elements of one K page in NVFP4
LEAST_KEYS = 64  # estimate of the keys for which a request of a large batch has pages
HEADS_MOVED = {Layout.HEADS_APART, Layout.HEADS_FIRST, Lse.STRIDED}  # layouts of tensors of several heads
LSE = (Lse.NONE, Lse.RETURNED, Lse.GIVEN, Lse.ALONE, Lse.STRIDED, Lse.ROWS_APART)
OUT = (Output.NONE, Output.GIVEN, Output.VIEW, Output.GIVEN_FP16, Output.GIVEN_FP32)
QUERY = (
    *(Layout.CONTIGUOUS, Layout.ROWS_APART, Layout.HEADS_APART),
    *(Layout.AT_16_BYTES, Layout.AT_AN_ELEMENT, Layout.HEADS_FIRST),
)
WINDOWS = (0, 1, 15, 20, 127, 1000, 5000, 2**31 - 1)
# Factors of skip-softmax: INERT skips nothing (FlashInfer 0.7.2 probes with it, decode.py 4461). With SOME_SKIPPED, the longest
# request of most cases skips keys of less than 2 % of the largest weight.
INERT, SOME_SKIPPED = 1e-30, 3.0
# For each value of the axis "rank": (rank, number of ranks), or None for a call without context parallelism.
RANKS: dict[str, Any] = {"none": None, "0 of 2": (0, 2), "3 of 4": (3, 4), "0 of 1": (0, 1)}
USUAL, SPLIT_SCALES = "usual", (0.5, 1e-6, 300.0)  # values of o_scale that change no result
# Absolute values of the scales: 1, which a kernel may treat as no scale, and values far from 1.
BMM1_SIZES, BMM2_SIZES = (USUAL, 1.0, 1e-6, 16.0), (USUAL, 1.0, 1e-6, 300.0)
LARGE, MODERATE = BMM1_SIZES[1::2], BMM2_SIZES[:2]
# Output dtypes that hold results of any scale; None stands for the query's dtype.
WIDE = {torch.bfloat16, torch.float32, None}
NEAR = "nothing"  # default of the axis "far", which names the argument whose rows span more than 2**31 elements
EQUAL = 128  # keys of each request if lengths are equal; otherwise the most keys of requests except the longest
CONTIGUOUS_TABLES = (Tables.PLAIN, Tables.NEGATIVE_TAIL, Tables.FAR_TAIL, Tables.WIDE, Tables.SEPARATE)
VACUOUS = frozenset({("lengths", Without.ALL), ("offsets", Without.ALL)})
# For an axis: whether kernels decline a value, or compute it by separate code, so that it tests no pair of other values.
IS_APART: dict[str, Callable[[Any], bool]] = {
    "dtypes": lambda dtypes: dtypes.cache == NVFP4,
    "rank": lambda rank: rank != "none",
    "head_pages": lambda head_pages: head_pages != NO_SELECTION,
}
PROMPTS = (65, 300, 1040)  # query rows of the longest prompt in a context call
# The values of "cache" with which scale factors of NVFP4 can be stored too.
STORED_WITH_FACTORS = (Cache.PLAIN, Cache.PAGES_APART, Cache.V_OTHERWISE, Cache.ONE_TENSOR, Cache.HALVES)
NO_SELECTION = "none"  # of the axis "head_pages": the pages that the K/V heads of a block-sparse call select
HEAD_PAGES = {NO_SELECTION: None, **{each.name.lower().replace("_", " "): each for each in HeadPages}}
OF_SEVERAL_HEADS = [text for text, each in HEAD_PAGES.items() if each in (HeadPages.NOT_LAST, HeadPages.SOME_NONE)]
SOME_WITHOUT = [each for each in Without if each is not Without.ALL]
# Values of "lengths" with which no request is longer than all other requests.
WITHOUT_LONGEST = (Lengths.EQUAL, Lengths.FEWER, Lengths.AS_ROWS, Lengths.OF_THE_NEXT)
MOST_LONG = 64  # most requests of a batch in which all except one are long
ALL_KEYS = "all"  # value of "entries": rows see all keys instead of selected entries
WITH_GAPS = tuple(each.name.lower() for each in Entries if each.has_gaps)

# Axes that only some calls over a paged cache have, and these calls.
MHA, DECODES = (AttentionCall.DECODE, AttentionCall.CONTEXT), (AttentionCall.DECODE, AttentionCall.MLA_DECODE)
ONLY_IN: dict[str, tuple[AttentionCall, ...]] = {
    **dict.fromkeys(("group", "num_kv_heads", "head_dim", "kv_layout", "window_left"), MHA),
    **dict.fromkeys(("head_dims", "heads", "qk_nope_head_dim", "top_k", "entries", "top_k_lens"), DECODES[1:]),
    **dict.fromkeys(("rows", "causal", "key_offsets"), (AttentionCall.CONTEXT,)),
    **dict.fromkeys(("q_len", "backend", "hints", "rank"), DECODES),
    **dict.fromkeys(("mask", "o_scale", "head_pages"), (AttentionCall.DECODE,)),
}


def paged_model(call: AttentionCall, ranges: Ranges) -> Model:
    is_decode, is_context, is_mla = (call is each for each in (*MHA, AttentionCall.MLA_DECODE))
    pairs = ranges.widened("dtypes")
    queries = () if is_mla or True not in ranges.nvfp4 else dict.fromkeys(query for query, _ in pairs if query != E4M3)
    axes: dict[str, Sequence[Any]] = {
        "dtypes": [DtypePair(text_of(pair)) for pair in (*pairs, *((query, NVFP4) for query in queries))],
        "head_dims": [HeadDims(text_of(pair)) for pair in ranges.widened("mla_head_dims")],
        "heads": ranges.widened("mla_heads"),
        "group": ranges.widened("groups"),
        "num_kv_heads": ranges.widened("num_kv_heads"),
        "head_dim": ranges.widened("head_dims"),
        "page_size": ranges.widened("mla_page_sizes" if is_mla else "page_sizes"),
        "kv_layout": ranges.widened("kv_layouts"),
        "window_left": (-1, *(WINDOWS if True in ranges.windows else ())),
        "requests": (REQUESTS, 1, *ranges.widened("large_batches")),
        "lengths": (Lengths.UNEQUAL, Lengths.EQUAL, *Without, Lengths.FEWER, *ranges.long_requests),
        "longest_request": tuple(LongestRequest),
        "rows": (*Rows, *PROMPTS),
        "q_len": (*ranges.widened("q_lens"), *(ranges.widened("masked_rows") if is_decode else ())),
        "offsets": (
            *((Offsets.PLAIN,) if is_context else (Offsets.NONE, Offsets.EQUAL, Offsets.UNEQUAL)),
            *(*Without, Offsets.PADDED, Offsets.PADDED_WITH_NAN),
        ),
        "max_q_len": (Bound.EXACT, Bound.LARGER, *((Bound.NONE,) if is_mla else ())),
        "causal": (True, False),
        "mask": tuple(Mask),
        "top_k": tuple(dict.fromkeys((0, *ranges.widened("top_ks")))),
        "entries": (ALL_KEYS, *(each.name.lower() for each in Entries)),
        "top_k_lens": (False, True),
        "head_pages": tuple(HEAD_PAGES),
        "contents": ("random", "needles", "shaded"),
        **softmax_axes(call, ranges),
        "out": OUT if is_mla else (*OUT, Output.BF16, Output.FP16, Output.E4M3, Output.GIVEN_E4M3),
        "lse": (Lse.NONE, Lse.RETURNED, Lse.GIVEN, Lse.AS_THE_QUERY, Lse.BASE_E) if is_mla else LSE,
        "seq_lens": tuple(SeqLens),
        "key_offsets": tuple(KeyOffsets),
        "bound": (Bound.OF_THE_TABLE, Bound.EXACT, Bound.FOUR_TIMES, Bound.OF_A_MODEL),
        "backend": ("auto", "trtllm-gen", "xqa"),
        "hints": (False, True),
        "rank": tuple(RANKS),
        "o_scale": (1.0, None, *SPLIT_SCALES),
        "qk_nope_head_dim": ("a quarter", "a half"),
        "query": (*QUERY[:4], Layout.HEADS_FIRST, *((Layout.REQUESTS_APART,) if is_mla else ())),
        "block_tables": [each for each in Tables if not (is_mla and each.is_separate)],
        "pages": tuple(Pages),
        "far": (NEAR, "query", "block_tables", *(() if is_mla else ("lse",))),
        "cache": [each for each in Cache if each.is_of_mla in (None, is_mla)],
    }
    has = {name: values for name, values in axes.items() if call in ONLY_IN.get(name, (call,))}
    apart = (frozenset((name, each) for each in has.get(name, ()) if test(each)) for name, test in IS_APART.items())
    return Model.of(has, RULES, TRIPLES, VACUOUS, tuple(filter(None, apart)))


def softmax_axes(call: AttentionCall, ranges: Ranges) -> dict[str, Sequence[Any]]:
    sinks = [each for each in Sinks if call is AttentionCall.MLA_DECODE or each not in (Sinks.LIST, Sinks.TUPLE)]
    return {
        "sinks": sinks if True in ranges.sinks else (Sinks.NONE,),
        "bmm1_scale": [each for each in LogitScale if call is AttentionCall.DECODE or not each.is_log2],
        "bmm2_scale": tuple(ValueScale),
        "bmm1_size": BMM1_SIZES,
        "bmm2_size": BMM2_SIZES,
        "skip_softmax": (None, 0.0, INERT, SOME_SKIPPED),
    }


def _longest(lengths: Any) -> int:
    return lengths if isinstance(lengths, int) else SHORT


def _prompt(rows: Any) -> int:
    return rows if isinstance(rows, int) else 1 if rows == Rows.ONE_EACH else 5


ONE_ROW_OF_RANK = "of one row, a rank's keys are all that it has"
RULES = constraints(
    {
        "an e4m3 output does not hold what small weights add": lambda dtypes, out, contents, head_dim: (
            contents != "shaded" or not out.is_e4m3(dtypes)
        ),
        "the key that shades the others has zeros for a value, and its logit from an element that values lack": (
            lambda contents, head_dims: contents != "shaded" or head_dims.head_dim != head_dims.v_head_dim,
        ),
        "the key that shades the others has zeros for a value, and would have itself": lambda contents, cache: (
            contents != "shaded" or cache != Cache.K_IS_V
        ),
        "contents have logits of a size that they choose": (
            lambda contents, bmm1_size: bmm1_size == USUAL or contents not in ("shaded", "below zero"),
            lambda contents, bmm1_scale: bmm1_scale != LogitScale.SMALL or contents not in ("shaded", "below zero"),
        ),
        "a scale has one size": lambda bmm1_scale, bmm1_size: bmm1_scale != LogitScale.SMALL or bmm1_size == USUAL,
        "e4m3 holds no large query": lambda bmm1_scale, dtypes: bmm1_scale != LogitScale.SMALL or dtypes.query != E4M3,
        "a sink leaves nothing of far smaller logits, nor does e4m3": (
            lambda sinks, bmm1_size: bmm1_size not in LARGE or sinks == Sinks.NONE,
            lambda dtypes, bmm1_size: bmm1_size not in LARGE or dtypes.query != E4M3,
            lambda dtype, bmm1_size: bmm1_size not in LARGE or dtype_of(dtype) != E4M3,
        ),
        "results of few bits do not hold numbers of every size": (
            lambda dtypes, out, bmm2_size: bmm2_size in MODERATE or {dtypes.query, out.dtype} <= WIDE,
            lambda dtype, out, bmm2_size: bmm2_size in MODERATE or {dtype_of(dtype), out.dtype} <= WIDE,
        ),
        "the usual bmm2_scale is the number 1": lambda bmm2_scale, bmm2_size: (
            bmm2_size != 1.0 or bmm2_scale.shape is not None
        ),
        "a whole number has its own size": lambda bmm2_scale, bmm2_size: (
            bmm2_scale != ValueScale.WHOLE_ONE or bmm2_size == USUAL
        ),
        "a long request is alone": lambda requests, lengths: requests <= REQUESTS or isinstance(lengths, str),
        "a large batch has few rows": lambda requests, q_len: requests <= REQUESTS or q_len <= FEW,
        "a large batch has no long prompt": lambda requests, rows: requests <= REQUESTS or isinstance(rows, str),
        "the tensors would be too large for a test": (
            lambda requests, q_len, group, num_kv_heads, head_dim: (
                requests * q_len * group * num_kv_heads * head_dim <= MOST_OUT_ELEMENTS
            ),
            lambda requests, group, num_kv_heads, head_dim, rows: (
                requests * _prompt(rows) * group * num_kv_heads * head_dim <= 2 * MOST_OUT_ELEMENTS
            ),
            lambda requests, q_len, heads, head_dims: (
                requests * q_len * heads * head_dims.head_dim <= 2 * MOST_OUT_ELEMENTS
            ),
            lambda lengths, num_kv_heads, head_dim: _longest(lengths) * num_kv_heads * head_dim <= MOST_KV_ELEMENTS,
        ),
        "the products would take a test too long in float64": (
            lambda lengths, q_len, group, num_kv_heads, head_dim: (
                _longest(lengths) * q_len * group * num_kv_heads * head_dim <= MOST_PRODUCTS
            ),
            lambda lengths, rows, group, num_kv_heads, head_dim: (
                max(_longest(lengths), _prompt(rows)) * _prompt(rows) * group * num_kv_heads * head_dim
                <= 2 * MOST_PRODUCTS
            ),
            lambda lengths, q_len, heads, head_dims: (
                _longest(lengths) * q_len * heads * head_dims.head_dim <= MOST_MLA_PRODUCTS
            ),
        ),
        "the pool would be too large for a test": lambda requests, page_size, num_kv_heads, head_dim: (
            2 * requests * max(page_size, LEAST_KEYS) * num_kv_heads * head_dim <= MOST_POOL_ELEMENTS
        ),
        "a bound of the table's width and of a large batch": lambda requests, page_size, block_tables: (
            requests <= REQUESTS or page_size < 256 or block_tables != Tables.WIDE
        ),
        "float64 takes too long": lambda lengths, rows: isinstance(lengths, str) or rows != 1040,
        "max_q_len goes with offsets of the rows": lambda offsets, max_q_len: (
            offsets != Offsets.NONE or max_q_len == Bound.EXACT
        ),
        "FlashInfer excludes skip-softmax with selected entries and in block-sparse calls": (
            lambda top_k, skip_softmax: not top_k or skip_softmax is None,
            lambda head_pages, skip_softmax: head_pages == "none" or skip_softmax is None,
        ),
        ONE_ROW_OF_RANK: lambda rank, q_len: rank == "none" or q_len > 1,
        "FlashInfer excludes context parallelism with most other arguments": (
            lambda rank, window_left: rank == "none" or window_left < 0,
            lambda rank, mask: rank == "none" or mask == Mask.NONE,
            lambda rank, sinks: rank == "none" or sinks == Sinks.NONE,
            lambda rank, skip_softmax: rank == "none" or skip_softmax is None,
            lambda rank, top_k: rank == "none" or not top_k,
            lambda rank, head_pages: rank == "none" or head_pages == "none",
            lambda rank, o_scale: rank == "none" or o_scale not in SPLIT_SCALES,
            lambda rank, kv_layout: rank == "none" or kv_layout == "HND",
            lambda rank, block_tables: rank == "none" or not block_tables.is_separate,
            lambda rank, dtypes: rank == "none" or dtypes.cache != NVFP4,
            lambda rank, hints: rank == "none" or not hints,
            lambda rank, backend, num_kv_heads: rank == "none" or backend != "xqa",
            lambda rank, backend, heads: rank == "none" or backend == "auto",
            lambda rank, offsets, num_kv_heads: rank == "none" or offsets == Offsets.NONE,
            lambda rank, bmm1_scale, num_kv_heads: rank == "none" or bmm1_scale.shape is None,
            lambda rank, bmm2_scale, num_kv_heads: rank == "none" or bmm2_scale.shape is None,
        ),
        "the results of ranks are merged by their LSEs": lambda rank, lse: rank == "none" or lse != Lse.NONE,
        "a request has as many keys on all ranks as rows": (
            lambda rank, lengths: rank == "none" or lengths != Lengths.FEWER,
            lambda rank, lengths, q_len: rank == "none" or lengths not in (*Without,) or q_len <= RANKS[rank][0],
        ),
        "only an e4m3 output is divided by o_scale": lambda dtypes, out, o_scale: (
            o_scale not in SPLIT_SCALES or out.is_e4m3(dtypes)
        ),
        "only trtllm-gen has several kernels with equal results, and NVFP4 is XQA's where no backend is named": (
            lambda backend, hints: not hints or backend != "xqa",
            lambda dtypes, backend, hints: not hints or dtypes.cache != NVFP4 or backend == "trtllm-gen",
        ),
        "a mask goes without offsets": lambda offsets, mask: offsets == Offsets.NONE or mask == Mask.NONE,
        "far rows are several rows of a tensor without other gaps, whose rows may lie apart": (
            lambda far, requests: far == NEAR or requests > 1,
            lambda far, query: far != "query" or query == Layout.CONTIGUOUS,
            lambda far, lse: far != "lse" or lse in (Lse.GIVEN, Lse.ALONE),
            lambda far, block_tables: far != "block_tables" or block_tables in CONTIGUOUS_TABLES,
            lambda far, top_k: far != "block_tables" or not top_k,
            lambda far, head_pages: far != "block_tables" or head_pages == NO_SELECTION,
        ),
        "of one row each, rows are requests": lambda q_len, query: query != Layout.REQUESTS_APART or q_len > 1,
        "a query with offsets has no axis of requests": lambda offsets, query: (
            query != Layout.REQUESTS_APART or offsets == Offsets.NONE
        ),
        "FlashInfer excludes block-sparse attention with a window, separate tables and XQA, which alone reads a mask": (
            lambda head_pages, window_left: head_pages == NO_SELECTION or window_left < 0,
            lambda head_pages, mask: head_pages == NO_SELECTION or mask == Mask.NONE,
            lambda head_pages, backend: head_pages == NO_SELECTION or backend != "xqa",
            lambda head_pages, block_tables: head_pages == NO_SELECTION or not block_tables.is_separate,
        ),
        "block-sparse tables are contiguous": lambda head_pages, block_tables: (
            head_pages == NO_SELECTION or block_tables != Tables.ROWS_APART
        ),
        "that heads select different pages shows in several heads": lambda head_pages, num_kv_heads: (
            head_pages not in OF_SEVERAL_HEADS or num_kv_heads > 1
        ),
        "a head selects a page once": lambda head_pages, pages: head_pages == NO_SELECTION or pages == Pages.ONCE,
        "one row needs no mask": lambda q_len, mask: q_len > 1 or mask == Mask.NONE,
        "requests of one row each are not unequal": lambda q_len, offsets: offsets != Offsets.UNEQUAL or q_len > 1,
        "rows select entries with top_k": (
            lambda top_k, entries: (top_k > 0) == (entries != ALL_KEYS),
            lambda top_k, top_k_lens: top_k > 0 or not top_k_lens,
        ),
        "lengths count a row's entries, at least one": (
            lambda top_k_lens, entries: not (top_k_lens and entries in WITH_GAPS),
            lambda top_k_lens, lengths: not top_k_lens or lengths not in (*Without, Lengths.FEWER),
        ),
        "selected entries have top_k columns": lambda top_k, block_tables: not top_k or block_tables != Tables.WIDE,
        "a window is causal": lambda causal, window_left: causal or window_left < 0,
        "odd strides are of one K/V head, an axis of size 1": lambda num_kv_heads, cache: (
            cache != Cache.ODD_STRIDES or num_kv_heads == 1
        ),
        "scale factors lie as the cache does": lambda dtypes, cache: (
            dtypes.cache != NVFP4 or cache in STORED_WITH_FACTORS
        ),
        "a backend orders V's scale factors in its own way, and is named with them: XQA's is the plain form": (
            lambda dtypes, backend: dtypes.cache != NVFP4 or backend != "xqa",
        ),
        "quantising to NVFP4 takes too long": (
            lambda dtypes, requests: dtypes.cache != NVFP4 or requests <= REQUESTS,
            lambda dtypes, lengths: dtypes.cache != NVFP4 or _longest(lengths) < 5000,
            lambda dtypes, num_kv_heads, head_dim, page_size: (
                dtypes.cache != NVFP4 or num_kv_heads * head_dim * page_size <= MOST_NVFP4_ELEMENTS
            ),
        ),
        "a sink leaves outputs that are too small for e4m3": lambda dtypes, out, sinks: (
            sinks == Sinks.NONE or not out.is_e4m3(dtypes)
        ),
        "NVFP4 needs pages of at least 16 tokens": lambda dtypes, page_size: dtypes.cache != NVFP4 or page_size >= 16,
        "K and V with tables of their own lie apart": lambda block_tables, cache: (
            not block_tables.is_separate or not (cache.is_one_tensor or cache == Cache.K_IS_V)
        ),
        "a single head lies apart from no other": (
            lambda query, lse, group, num_kv_heads: group * num_kv_heads > 1 or not {query, lse} & HEADS_MOVED,
            lambda query, heads: heads > 1 or query not in HEADS_MOVED,
            lambda lse, heads: heads > 1 or lse not in (Lse.STRIDED, Lse.AS_THE_QUERY),
            lambda cache, num_kv_heads: num_kv_heads > 1 or cache != Cache.HEADS_APART,
        ),
        "the only request has rows": lambda requests, offsets: (
            requests > 1 or offsets not in (Offsets.UNEQUAL, *SOME_WITHOUT)
        ),
        "the only request has keys": lambda requests, lengths: requests > 1 or lengths not in SOME_WITHOUT,
        "the only request is the longest": lambda requests, longest_request: (
            requests > 1 or longest_request == LongestRequest.LAST
        ),
        "no request is longer than the others": lambda lengths, longest_request: (
            longest_request == LongestRequest.LAST or lengths not in WITHOUT_LONGEST
        ),
        "the longest request has rows and keys": (
            lambda requests, longest_request, offsets: is_outside(longest_request, offsets, requests),
            lambda requests, longest_request, lengths: is_outside(longest_request, lengths, requests),
        ),
        "a large batch would have too many long requests": lambda requests, longest_request: (
            requests <= MOST_LONG or longest_request != LongestRequest.ALL_BUT_ONE
        ),
        "fewer keys than one row are none": (
            lambda q_len, lengths: q_len > 1 or lengths != Lengths.FEWER,
            lambda rows, lengths: rows != Rows.ONE_EACH or lengths != Lengths.FEWER,
        ),
        "so few keys need no two pages": lambda pages, lengths: pages != Pages.TWICE or lengths != Lengths.FEWER,
        "the only request has the draft's keys alone": lambda pages, requests, mask: (
            pages != Pages.TWICE or requests > 1 or mask != Mask.OWN_BIT_CLEAR
        ),
        "equal lengths fit in one page of this size": lambda pages, lengths, page_size: (
            pages != Pages.TWICE or lengths != Lengths.EQUAL or page_size < EQUAL
        ),
        "of a large batch, the last request alone has two pages of this size": (
            lambda pages, requests, lengths, page_size: (
                pages != Pages.TWICE or requests <= REQUESTS or lengths != Without.LAST or page_size < 32
            ),
        ),
    }
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
    ("top_k", "entries", "top_k_lens"),
)
