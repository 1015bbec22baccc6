"""The table of features: what a rule can name of a case, of a call and of a request in it, with the text of each.

A cost is a rank for a reader: what a caller passes reads best, then the parameters of a case, then what only happened before.
"""

import math

import torch
from torch import Tensor

from lab.calls import Feature as Asked
from lab.checks.explain.feature import Choice, Condition, Feature, Number
from lab.checks.explain.subjects import Call, Request
from lab.metadata.engine.forward_mode import UncountedTokens
from lab.workloads.interfaces import Interface

SETTING = 4  # cost of a setting of a case that the function's caller does not see
POWER_OF_2 = "{not |}a power of two"


def _is_multiple(number: int, of: int) -> bool:
    return number > 0 and number % of == 0


def _is_no_power_of_2(number: int | None) -> bool:
    return bool(number and number & (number - 1))


def _begins_in_page(r: Request) -> bool:
    firsts = range(r.first_seen, r.first_seen + min(r.q_len, r.page_size))
    return r.last_seen > 0 and any(max(first, 0) % r.page_size for first in firsts)


def _begins_with_page(r: Request) -> bool:
    return r.last_seen // r.page_size * r.page_size >= max(r.first_seen, 1)


def _as_long_as_previous(r: Request) -> bool:
    return r.request > 0 and r.batch.kv_lens[r.request - 1] == r.kv_len


# Read from a `Request`.
OF_REQUEST: tuple[Feature, ...] = (
    Number("kv_len", "a request has {} keys", 0.8),
    Number("q_len", "a request has {} query rows", 0.5, several="a request has several query rows"),
    Number("pages", "a request has {} pages", 1, several="a request has several pages"),
    Number("request", "a request's place in the batch is {}", 0.8),
    Condition("last_request", "a request is {|not }the batch's last", 1.2),
    Condition(
        "partial_page",
        "a request's {last page is partly filled|keys fill its pages}",
        0.5,
        lambda r: r.kv_len % r.page_size > 0,
    ),
    Condition("full_page", "a request's last page is {|not }full", 1, lambda r: _is_multiple(r.kv_len, r.page_size)),
    Condition(
        "multiple_of_64_keys", "a request has {a|no} multiple of 64 keys", 1.2, lambda r: _is_multiple(r.kv_len, 64)
    ),
    Condition(
        "multiple_of_512_keys", "a request has {a|no} multiple of 512 keys", 0.8, lambda r: _is_multiple(r.kv_len, 512)
    ),
    Condition("no_keys", "a request has {no |}keys", 0.5, lambda r: r.kv_len == 0),
    Condition("no_rows", "a request has {no |}query rows", 0.8, lambda r: r.q_len == 0),
    Condition("fewer_keys", "a request has {fewer|no fewer} keys than query rows", 0.6, lambda r: r.kv_len < r.q_len),
    Condition("no_prefix", "a request has {no |}keys before its rows", 0.8, lambda r: r.kv_len == r.q_len),
    Condition(
        "q_len_no_power_of_2",
        f"a request's number of query rows is {POWER_OF_2}",
        1,
        lambda r: _is_no_power_of_2(r.q_len),
    ),
    Condition("hidden_keys", "{a|no} window hides keys of a request", 0.2, lambda r: r.last_seen > 0),
    Condition("hidden_page", "{a|no} page of a request is before its window", 3, lambda r: r.first_seen >= r.page_size),
    Condition("hidden_tile", "{64|fewer} keys of a request are before its window", 3.5, lambda r: r.first_seen >= 64),
    Condition("window_in_page", "{a|no} window begins within a page", 2.5, _begins_in_page),
    Condition("window_with_page", "{a|no} window begins with a page", 2, _begins_with_page),
    Condition("as_long_as_previous", "a request is {|not }as long as the one before it", 0.8, _as_long_as_previous),
)
# Read from a `Batch`.
OF_BATCH: tuple[Feature, ...] = (
    Number("page_size", "page_size is {}", 0.5),
    Condition("has_window", "{a|no} window is set", 0, lambda b: b.window_left >= 0),
    Number("window_left", "window_left is {}", 0.4, lambda b: b.window_left if b.window_left >= 0 else None),
    Number("requests", "a batch has {} requests", 0.6, lambda b: len(b.kv_lens), "a batch has several requests"),
    Number("rows_of_batch", "the number of query rows of a batch is {}", 1.5, lambda b: sum(b.q_lens)),
    Number("longest_kv_len", "the longest request's number of keys is {}", 0.5, lambda b: max(b.kv_lens, default=0)),
    Condition(
        "unequal_q_lens", "requests have {different numbers|one number} of rows", 0.6, lambda b: len(set(b.q_lens)) > 1
    ),
    Condition("unequal_kv_lens", "requests have {different lengths|one length}", 1, lambda b: len(set(b.kv_lens)) > 1),
    Condition("some_no_keys", "{a|no} request of the batch has no keys", 1, lambda b: 0 in b.kv_lens),
    Condition("all_no_keys", "{no|a} request of the batch has keys", 0.5, lambda b: not any(b.kv_lens)),
    Condition(
        "some_no_rows", "{a|no} request of the batch has no rows", 0.5, lambda b: 0 in b.q_lens and any(b.q_lens)
    ),
)
# Read from a `Call`, and from a `Case` whose tensors have them.
OF_TENSORS: tuple[Feature, ...] = (
    Choice("function", "the function", 0.4, lambda t: t.interface),
    Choice("dtype", "the query's dtype", 0.8),
    Choice("kv_dtype", "the cache's dtype", 0.5),
    Choice("kv_layout", "the cache's layout", 0.5),
    Number("head_dim", "head_dim is {}", 0.5),
    Number("v_head_dim", "v_head_dim is {}", 0.6),
    Number("num_kv_heads", "num_kv_heads is {}", 0.7, several="there are several K/V heads"),
    Number("num_qo_heads", "num_qo_heads is {}", 1),
    Number("group", "the number of query heads per K/V head is {}", 0.7),
    Condition(
        "group_no_power_of_2",
        f"the number of query heads per K/V head is {POWER_OF_2}",
        0.7,
        lambda t: _is_no_power_of_2(t.group),
    ),
    Condition("sinks", "{sinks|no sinks} are given", 0, lambda t: t.has_sinks),
)


def _is_given(name: str) -> Condition:
    return Condition(f"{name}_given", f"{name} is {{|not }}given", 0, lambda c: c.arguments.get(name) is not None)


def _is_tensor(name: str) -> Condition:
    return Condition(
        f"{name}_tensor", f"{name} is a {{tensor|number}}", 0, lambda c: isinstance(c.arguments.get(name), Tensor)
    )


def _is_negative(name: str) -> Condition:
    return Condition(f"{name}_negative", f"{name} is {{|not }}negative", 0, lambda c: float(getattr(c, name)) < 0)


def _has_gaps(name: str, what: str, cost: float) -> Condition:
    def read(c: Call) -> bool:
        given = c.arguments.get(name)
        return given is not None and not given.is_contiguous()

    return Condition(f"{name}_gaps", f"{what} {{do not |}}lie next to each other", cost, read)


def _has_usual_scale(c: Call) -> bool:
    return math.isclose(float(c.bmm1_scale), c.head_dim**-0.5, rel_tol=1e-6)


def _lie_apart(pool: Tensor | None) -> bool:
    """Tell whether a page of a pool does not begin where the one before it ends."""
    return pool is not None and pool.stride(0) > pool.shape[1:].numel()


def _shares_first_page(c: Call) -> bool:
    if c.block_tables is None or len(c.block_tables) < 2:
        return False
    return bool((c.block_tables[:, 0] == c.block_tables[0, 0]).all())


def _is_causal(mask: Tensor) -> bool:
    return torch.equal(mask, torch.ones_like(mask).tril())


def _has_offsets(c: Call) -> bool:
    """Tell whether a call that needs no row offsets has them."""
    return c.interface in (Interface.DECODE, Interface.MLA_DECODE) and c.cu_seqlens_q is not None


# Read from a `Call`.
OF_CALL: tuple[Feature, ...] = (
    Condition("mask", "{a|no} draft mask is given", 0, lambda c: c.arguments.get("mask") is not None),
    Condition(
        "mask_not_causal", "{a|no} draft mask is given that is not causal", 0.5, lambda c: not _is_causal(c.shown)
    ),
    Condition(
        "masks_differ", "requests have {different masks|one mask}", 0.5, lambda c: (c.shown != c.shown[:1]).any()
    ),
    Number("mask_words", "the number of 16-bit words in a mask's row is {}", 1, lambda c: c.mask_words),
    Condition(
        "sinks_list",
        "sinks are {|not }given in a list",
        0,
        lambda c: isinstance(c.arguments.get("sinks"), list | tuple),
    ),
    Condition("some_inf_sink", "{a|no} sink is minus infinity", 0.3, lambda c: (c.logits == -math.inf).any()),
    Condition(
        "all_inf_sinks", "{every|not every} sink is minus infinity", 0.5, lambda c: (c.logits == -math.inf).all()
    ),
    Condition("large_sink", "{a|no} sink is larger than 8", 1, lambda c: (c.logits > 8).any()),
    _is_tensor("bmm1_scale"),
    _is_tensor("bmm2_scale"),
    _is_negative("bmm1_scale"),
    _is_negative("bmm2_scale"),
    _is_given("bmm1_scale_log2"),
    Condition("bmm1_scale_unusual", "bmm1_scale is {not |}1 / sqrt(head_dim)", 0.3, lambda c: not _has_usual_scale(c)),
    Condition("bmm2_scale_not_1", "bmm2_scale is {not |}1", 0.2, lambda c: float(c.bmm2_scale) != 1),
    Condition(
        "bmm2_scale_no_power_of_2",
        f"bmm2_scale is {POWER_OF_2}",
        0.4,
        lambda c: abs(math.frexp(float(c.bmm2_scale))[0]) != 0.5,
    ),
    Condition("cum_seq_lens_q_given", "cum_seq_lens_q is {|not }given", 0, _has_offsets),
    Condition("not_causal", "the call is {not |}causal", 0, lambda c: not c.causal),
    _is_given("out"),
    _is_given("lse"),
    Condition("return_lse", "the LSE is {|not }requested", 0.2),
    Condition(
        "lse_base_e",
        "the LSE is {|not }requested in base e",
        0,
        lambda c: c.arguments.get("return_lse_base") == "basee",
    ),
    Choice("out_dtype", "the output's dtype", 0.9),
    Condition("other_out_dtype", "the output's dtype is {not |}the query's", 0, lambda c: c.out_dtype != c.dtype),
    Condition("seq_lens_uint32", "seq_lens is {uint32|int32}", 0, lambda c: c.seq_lens.dtype == torch.uint32),
    Choice("host_lengths", "the dtype of the lengths on the host", 0.2),
    Condition("one_cache_tensor", "kv_cache is {one tensor|two tensors}", 0, lambda c: c.has_one_cache),
    Condition("separate_tables", "V has {a|no} page table of its own", 0, lambda c: c.asks(Asked.SEPARATE_TABLES)),
    _has_gaps("query", "the query's rows", 0.3),
    _has_gaps("key", "the keys", 0.3),
    _has_gaps("value", "the values", 0.2),
    _has_gaps("lse", "the rows of the given lse", 0.2),
    _has_gaps("block_tables", "the page table's rows", 0.3),
    Condition("page_gaps", "pages {do not |}lie next to each other", 0.3, lambda c: _lie_apart(c.k_cache)),
    Condition(
        "scale_factor_gaps",
        "pages of scale factors {do not |}lie next to each other",
        0.3,
        lambda c: _lie_apart(c.k_scale_factors),
    ),
    Condition(
        "other_v_strides", "K and V have {different|equal} strides", 0.2, lambda c: c.asks(Asked.OTHER_V_STRIDES)
    ),
    Condition("one_first_page", "all requests {|do not }share their first page", 0.3, _shares_first_page),
    Condition(
        "page_size_is_num_kv_heads", "a page has {|not }as many tokens as K/V heads", 0.5, lambda c: c.has_square_page
    ),
    Number("table_columns", "the number of columns of the page table is {}", 1),
    Number("pool_pages", "the number of pages in the pool is {}", 1.2),
    Number("pool_elements", "the number of elements in the pool is {}", 1),
    Condition("used_scratch", "the workspace's scratch is {not |}zero", 1),
)
# Read from the fields of a `Case`, where their names are not those of features above.
OF_CASE: tuple[Feature, ...] = (
    Choice("contents", "the kind of numbers", 0.6),
    Choice("dead", "the content of cells that no request owns", 0.6),
    Choice("table_tail", "the content of unused columns of the page table", 0.8),
    Choice("mode", "the forward mode", 0.6),
    Choice("forward_mode", "the forward mode", 0.6),
    Number("draft_step", "the draft step is {}", 0.7),
    Condition("sliding_window", "the layer has {a|no} sliding window", 0.8),
    Choice("attention", "the attention of a draft step", 0.8),
    Number("num_heads", "the number of heads is {}", 0.9),
    Number("topk", "topk is {}", 0.5),
    Number("num_steps", "num_steps is {}", 0.5),
    Condition("positions_differ", "positions are {not |}the prefix lengths", 0.5),
    Number("window_size", "window_size is {}", 0.5),
    Number("sink_size", "sink_size is {}", 0.5),
    Condition("entries_are_pages", "entries of req_to_token are {pages|slots}", 0.5),
    Condition("translated", "v2p is {|not }given", 0.5),
    Number("spare_capacity", "the spare capacity of a list is {}", 0.8),
    Choice("sequence", "the sequence of replays", 0.8),
    Choice("place", "the place where the metadata is rebuilt", 0.8),
    Number("chunk", "the chunk size is {}", SETTING),
    Number("context_parallel", "the number of context-parallel GPUs is {}", SETTING),
    Number("dcp_size", "the number of decode-context-parallel GPUs is {}", SETTING),
    Number("decode_splits", "the number of decode calls of a pass is {}", SETTING),
    Choice("draft_extend", "the call of a draft extend", SETTING),
    Choice("dtypes", "the dtype of the integers", SETTING),
    Condition("encoder_only", "the layer is {|not }encoder-only", SETTING),
    Number("first_cell", "the first cell of each tensor is {}", SETTING),
    Number("first_page", "the first page in use is {}", SETTING),
    Condition("gaps_in_scale_factors", "scale factors {have|do not have} gaps", SETTING),
    Choice("geometry", "the geometry", SETTING),
    Number("kv_lora_rank", "kv_lora_rank is {}", SETTING),
    Choice("layout", "the pool's layout", SETTING),
    Number("num_draft_tokens", "the number of draft tokens is {}", SETTING),
    Number("num_padding_requests", "the number of padding requests is {}", SETTING),
    Number("num_padding_rows", "the number of padding rows is {}", SETTING),
    Number("num_pages", "the number of pages of a request is {}", SETTING),
    Number("num_tokens_per_req", "num_tokens_per_req is {}", SETTING),
    Condition("offsets", "row offsets are {|not }given", SETTING),
    Number("padded_seq_len", "the padded seq_lens are {}", SETTING),
    Number("qk_rope_head_dim", "qk_rope_head_dim is {}", SETTING),
    Choice("query_dtype", "the dtype that the query is cast to", SETTING),
    Condition("repeated", "requests have {the same row|different rows} of req_to_token", SETTING),
    Number("row_gap", "the gap between rows of req_to_token is {}", SETTING),
    Number("spare_boundaries", "the number of spare boundaries is {}", SETTING),
    Number("spare_columns", "the number of spare columns is {}", SETTING),
    Condition("split_mixed_tail", "the tail of a mixed batch is {|not }split off", SETTING),
    Condition("stacked", "K and V are {|not }stacked in one tensor", SETTING),
    Number("tensor_parallel", "the number of tensor-parallel GPUs is {}", SETTING),
    Condition("virtual_slots", "the slots are {virtual|physical}", SETTING),
)
# Read from the forward mode of a `Case`.
OF_MODE: tuple[Feature, ...] = (
    Condition(
        "leaves_out_tokens",
        "seq_lens {leaves out tokens of the pass|counts all tokens}",
        0.5,
        lambda c: c.uncounted not in (None, UncountedTokens.NONE),
    ),
    Choice("uncounted", "the kind of tokens that seq_lens leaves out", 0.8),
    Choice("query_rows", "the kind of query rows", 1, lambda c: c.forward_mode and c.forward_mode.query_rows),
    Condition(
        "extends_draft",
        "the forward mode {extends|does not extend} a draft",
        0.8,
        lambda c: c.forward_mode and c.forward_mode.extends_draft,
    ),
)


def _changed(name: str, what: str, cost: float) -> Condition:
    text = f"{what} {{different|the same}} in the first call of these shapes"
    return Condition(f"other_{name}", text, cost, lambda e: name in e.changed)


def _written(name: str, what: str, cost: float) -> Condition:
    text = f"{what} {{|not }}written since an earlier call"
    return Condition(f"written_{name}", text, cost, lambda e: name in e.written)


# Read from what a call has in common with earlier ones, `Earlier`.
OF_EARLIER: tuple[Feature, ...] = (
    Condition("later_call", "a call is {not |}the first of its case", 1, lambda e: e.calls_before > 0),
    Number("calls_before", "the number of earlier calls is {}", 4),
    Condition(
        "longer_request", "{a|no} request is longer than in the first call of these shapes", 0.9, lambda e: e.is_longer
    ),
    _changed("bmm1_scale", "bmm1_scale was", 1),
    _changed("bmm2_scale", "bmm2_scale was", 1),
    _changed("window_left", "window_left was", 1),
    _changed("sinks", "sinks were", 1),
    _changed("mask", "the mask was", 1),
    _changed("seq_lens", "seq_lens were", 1),
    _changed("cum_seq_lens_q", "cum_seq_lens_q was", 1),
    _changed("block_tables", "the page table was", 1.5),
    _written("query", "the query was", 1.3),
    _written("seq_lens", "seq_lens were", 1),
    _written("block_tables", "the page table was", 1.2),
    _written("cum_seq_lens_q", "cum_seq_lens_q was", 1),
    _written("bmm1_scale", "bmm1_scale was", 1),
    _written("bmm2_scale", "bmm2_scale was", 1),
    _written("sinks", "the sinks were", 1),
    _written("mask", "the mask was", 1),
    _written("kv_cache", "the cache was", 1),
    _written("workspace_buffer", "the workspace was", 1.3),
)
RESULT = Choice(
    "result", "the name of the result", 5, is_negated=False
)  # where no other feature says where it is wrong
TABLES = (OF_REQUEST, OF_BATCH, OF_TENSORS, OF_CALL, OF_CASE, OF_MODE, OF_EARLIER, (RESULT,))
FEATURES = {feature.name: feature for table in TABLES for feature in table}


class UnknownFeatureError(LookupError):
    """A name that no feature has: a new field of a case or a new argument of a call needs a row in the table."""


def feature_named(name: str) -> Feature:
    """Return a feature by its name; "parameter=value" is a configuration's that is not the parameter's default.

    Raises:
        UnknownFeatureError: no feature has the name.
    """
    if name in FEATURES:
        return FEATURES[name]
    parameter, is_parameter, value = name.partition("=")
    if not is_parameter:
        raise UnknownFeatureError(f"no feature has the name {name!r}: add a row to lab.checks.explain.features")
    return Condition(name, f"{parameter} is {{|not }}{value}", SETTING)
