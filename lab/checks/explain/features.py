"""The table of all features of cases, calls and requests, with their texts. If two features of equal cost hold for the same
results, a rule uses the one that comes first in `FEATURES`.
"""

from lab.checks.explain.feature import LOADED_COLUMNS, SMALL_SCALE, CaseFeature, Choice, Condition, Cost, Number
from lab.workloads.attention_case import Contents, Dead, Entries, HeadPages, TableTail

# Keys that kernels load at a time, keys at which a window's loop can begin, query rows that kernels compute at a time
TILES, WINDOW_TILES, ROW_BLOCKS = (64, 128, 256, 512), (32, 64), (16, 64, 128)
ROW_TILES = (32, 64, 128)  # keys that kernels hide from a row at a time
COLUMN_BLOCKS = (32, 64)  # columns of selected entries that kernels skip at a time
OF_SIZES = {  # features of a request for each of these sizes, written #
    ("hidden_tile_of_#", "{#|fewer than #} keys of a request are before its last row's window"): TILES,
    ("windows_in_tiles_of_#", "windows of a request's rows begin in {several tiles|one tile} of # keys"): WINDOW_TILES,
    ("rows_in_tiles_of_#", "a request's rows lie in {several tiles|one tile} of # keys"): ROW_TILES,
    ("empty_block_of_#", "{an|no} aligned block of # columns before a row's entry has no used entry"): COLUMN_BLOCKS,
    ("late_block_of_#", "requests up to a request have {more|no more} blocks of # rows than all rows fill"): ROW_BLOCKS,
}
EMPTY_COLUMNS = 128  # columns of selected entries that kernels load at a time
POWER_OF_2 = "{not |}a power of two"
FAR_OR_NEAR = "{2**31 or more|fewer than 2**31}"
# Features of a call that are members of `lab.calls.Feature`, in lower case.
OF_PROBLEM = (
    *("skip_softmax", "block_scales", "rank_keys", "separate_tables", "block_sparse", "other_v_strides"),
    "interleaved_factors",
)
# Optional arguments that are features only as given or not. A function that requires one does not have its feature.
GIVEN = ("bmm1_scale_log2", "cum_seq_lens_q", "return_lse_base", "out", "lse", "q_seq_lens_cpu", "max_q_len")
# REMEMBERED: arguments whose values are compared with those of the first call of the same shapes. WATCHED: tensors whose writes
# between calls are noticed. Each has the beginning of its text.
REMEMBERED = {
    "bmm1_scale": "bmm1_scale was",
    "bmm2_scale": "bmm2_scale was",
    "window_left": "window_left was",
    "sinks": "sinks were",
    "mask": "the mask was",
    "seq_lens": "seq_lens were",
    "cum_seq_lens_q": "cum_seq_lens_q was",
    "block_tables": "the page table was",
}
WATCHED = {
    "seq_lens": "seq_lens were",
    "block_tables": "the page table was",
    "cum_seq_lens_q": "cum_seq_lens_q was",
    "bmm1_scale": "bmm1_scale was",
    "bmm2_scale": "bmm2_scale was",
    "sinks": "the sinks were",
    "mask": "the mask was",
    "workspace_buffer": "the workspace was",
    "query": "the query was",
    "kv_cache": "the cache was",
}

FEATURES: dict[str, CaseFeature] = {
    # Of a request.
    "kv_len": Number("a request has {} keys", Cost.VALUE, "keys tokens", is_divided=True),
    "q_len": Number("a request has {} query rows", Cost.VALUE, "rows tokens heads", is_divided=True),
    "pages": Number("a request has {} pages", Cost.DERIVED, "pages"),
    **{
        f"previous_{name}": Number(
            f"the number of {text} of the request before a request is {{}}",
            Cost.DERIVED,
            kind,
            noun=f"the number of {text} of the request before it",
        )
        for name, text, kind in (("kv_len", "keys", "keys"), ("q_len", "rows", "rows"))
    },
    "first_kv_len": Number("the first request's number of keys is {}", Cost.DERIVED, "keys"),
    "first_pages": Number("the first request's number of pages is {}", Cost.DERIVED, "pages"),
    "rows_so_far": Number("the number of rows up to a request's last one is {}", Cost.POSITION, is_divided=True),
    "rows_before": Number("the number of rows of earlier requests is {}", Cost.POSITION, is_divided=True),
    "keys_before": Number("the number of keys of earlier requests is {}", Cost.POSITION, is_divided=True),
    "prefix_len": Number("the number of keys before a request's rows is {}", Cost.DERIVED, "prefix", is_divided=True),
    "request": Number("a request's place in the batch, counted from 1, is {}", Cost.VALUE),
    "first_request": Condition("a request is {|not }the batch's first", Cost.DERIVED),
    "last_request": Condition("a request is {|not }the batch's last", Cost.DERIVED),
    "partial_page": Condition("a request's {last page is partly filled|keys fill its pages}", Cost.VALUE),
    **{
        name.replace("#", str(size)): Condition(text.replace("#", str(size)), Cost.POSITION)
        for (name, text), sizes in OF_SIZES.items()
        for size in sizes
    },
    "no_keys": Condition("a request has {no |}keys", Cost.VALUE),
    "no_rows": Condition("a request has {no |}query rows", Cost.VALUE),
    "fewer_keys": Condition("a request has {fewer|no fewer} keys than query rows", Cost.VALUE),
    "rows_before_keys": Condition("{rows|no rows} of a request with keys are before its first key", Cost.VALUE),
    "no_prefix": Condition("a request has {no |}keys before its rows", Cost.VALUE),
    "prefix": Condition("a request with rows has {|no }keys before them", Cost.VALUE),
    "rows_reach_page": Condition("a request's rows {|do not }reach a page after those of its prefix", Cost.DERIVED),
    "rows_in_pages": Condition("a request's rows lie in {several pages|one page}", Cost.DERIVED),
    "after_fewer_rows": Condition("an earlier request has {fewer|no fewer} query rows than another", Cost.DERIVED),
    "after_unread_keys": Condition("the request before a request has {keys but no|no keys or} query rows", Cost.VALUE),
    "after_no_rows": Condition("{an|no} earlier request has no query rows", Cost.VALUE),
    "after_inner_no_rows": Condition("{a|no} request without rows is between the first and a later one", Cost.VALUE),
    "fewer_rows_than_bound": Condition("a request has {fewer|no fewer} query rows than the bound of rows", Cost.VALUE),
    "at_kv_bound": Condition("a request is {|not }as long as the bound of keys", Cost.VALUE),
    "no_key_seen": Condition("a row of a request sees {no|a} key", Cost.VALUE),
    "table_row_apart": Condition(
        f"a request's row of the page table begins at {{no|a}} multiple of {LOADED_COLUMNS} elements", Cost.DERIVED
    ),
    "rows_in_block": Condition("the number of rows before a request is {no|a} multiple of a block's", Cost.VALUE),
    "keys_in_block": Condition("the number of keys before a request is {no|a} multiple of a block's", Cost.VALUE),
    "fewer_tiles": Condition("a request has {fewer|no fewer} tiles of 64 keys than another", Cost.DERIVED),
    "packed_rows": Number("a request's rows times query heads per K/V head are {}", Cost.DERIVED, is_divided=True),
    "work_items": Number("a request's place in the batch times num_kv_heads is {}", Cost.DERIVED),
    "hidden_keys": Condition("{a|no} window hides keys of a request", Cost.VALUE),
    "hidden_page": Condition("{a|no} page of a request is before its window", Cost.POSITION),
    "hidden_tile": Condition("{64|fewer than 64} keys of a request are before all its windows", Cost.POSITION),
    "hidden_rows": Condition("{a|no} window hides tokens of a request's own rows", Cost.VALUE),
    "window_in_page": Condition("{a|no} window begins within a page", Cost.POSITION),
    "first_window_with_page": Condition("{the|no} window of a request's first row begins with a page", Cost.POSITION),
    "window_with_page": Condition("{a|no} window begins with a page", Cost.POSITION),
    "window_at_page_end": Condition("{a|no} window begins with the last token of a page", Cost.POSITION),
    "after_shorter": Condition("{an|no} earlier request is shorter than a request", Cost.DERIVED),
    "after_empty": Condition("{an|no} earlier request has no rows or no keys", Cost.DERIVED),
    "after_no_keys": Condition("the request before a request has {no |}keys", Cost.DERIVED),
    "before_no_keys": Condition("the request after a request has {no |}keys", Cost.DERIVED),
    "repeated_page": Condition("{a|no} page is several times in a request's row of the page table", Cost.VALUE),
    "shared_page": Condition("a request has {a|no} page of an earlier request", Cost.VALUE),
    "consecutive_pages": Condition("{two|no two} neighbouring pages of a request have consecutive ids", Cost.DERIVED),
    "unordered_pages": Condition("the page ids of a request are {not |}in ascending order", Cost.DERIVED),
    "largest_page": Number("a request's largest page id is {}", Cost.DERIVED),
    "no_window_entry": Condition("a row selects {no|an} entry of recent tokens", Cost.VALUE),
    "no_compressed_entry": Condition("a row selects {no|a} compressed entry", Cost.VALUE),
    "no_entry": Condition("a row of a request selects {no|an} entry", Cost.VALUE),
    "empty_tile": Condition(
        f"the first {EMPTY_COLUMNS} columns of a request's row hold {{-1 alone|an entry}}", Cost.VALUE
    ),
    "gap": Condition("{a|no} column that a request's row uses holds -1", Cost.VALUE),
    "gap_before_entry": Condition("{a|no} column before an entry of a request's row holds -1", Cost.VALUE),
    "unordered_entries": Condition("the entries of a request's row are {not |}in ascending order", Cost.VALUE),
    "repeated_entry": Condition("{an|no} entry is in several columns of a request's row", Cost.VALUE),
    "entry_after_last": Condition("{an|no} entry follows the last column that a request's row uses", Cost.VALUE),
    "columns_differ": Condition("rows of a request use {different numbers|one number} of columns", Cost.VALUE),
    "unused_first_columns": Condition(
        f"{{an|no}} entry in the first {EMPTY_COLUMNS} columns of a row is not used", Cost.VALUE
    ),
    "num_entries": Number("the number of entries that a row reads is {}", Cost.DERIVED, "columns", is_divided=True),
    "fewest_columns": Number(
        "the smallest number of columns of a request's rows is {}", Cost.VALUE, "columns", is_divided=True
    ),
    "most_columns": Number(
        "the largest number of columns of a request's rows is {}", Cost.VALUE, "columns", is_divided=True
    ),
    "columns_after_row": Condition("a row of a request uses {more|no more} columns than it has keys", Cost.VALUE),
    "other_lens_at_request": Condition("a row's sparse_topk_lens {is not|is} that at its request's index", Cost.VALUE),
    "entry_past_window_pool": Condition(
        "a compressed index is {at least|below} the number of entries of the other pool", Cost.VALUE
    ),
    "entry_past_window_page": Condition("a compressed index is {at least|below} the other page size", Cost.VALUE),
    "largest_output": Number("the largest absolute value of a request's output is {}", Cost.POSITION, is_divided=True),
    "lse_above_zero": Number("an LSE of a request lies above zero by {}", Cost.POSITION, is_divided=True),
    "lse_below_zero": Number("an LSE of a request lies below zero by {}", Cost.POSITION, is_divided=True),
    # Of a batch.
    "page_size": Number(
        "page_size is {}", Cost.VALUE, "tokens prefix heads", "pages have several tokens", is_divisor=True
    ),
    "page_elements": Number("page_size times head_dim is {}", Cost.DERIVED, is_divided=True),
    "has_window": Condition("{a|no} window is set"),
    "window_left": Number("window_left is {}", Cost.VALUE, "tokens"),
    "requests": Number("a batch has {} requests", Cost.VALUE, "batch", is_divisor=True),
    "rows_of_batch": Number("the number of query rows of a batch is {}", Cost.DERIVED, "batch", is_divided=True),
    "longest_kv_len": Number("the longest request's number of keys is {}", Cost.VALUE, "keys", is_divided=True),
    "most_q_len": Number("the largest number of rows of a request is {}", Cost.DERIVED, "rows", is_divided=True),
    "max_q_len": Number("the bound of rows is {}", Cost.DERIVED, "rows bounds"),
    "max_kv_len": Number("the bound of keys is {}", Cost.DERIVED, "keys bounds"),
    "unequal_q_lens": Condition("requests have {different numbers|one number} of rows", Cost.VALUE),
    "mixed_prefixes": Condition("{some, but not all|all or no} requests have keys before their rows", Cost.VALUE),
    "first_no_prefix": Condition("the first request has {no |}keys before its rows", Cost.VALUE),
    "unequal_kv_lens": Condition("requests have {different lengths|one length}", Cost.DERIVED),
    "not_descending": Condition("requests are {not |}in descending order of length", Cost.DERIVED),
    "some_no_keys": Condition("{a|no} request of the batch has no keys", Cost.DERIVED),
    "all_no_keys": Condition("{no|a} request of the batch has keys", Cost.VALUE),
    "some_no_rows": Condition("{a|no} request of the batch has no rows", Cost.VALUE),
    "some_empty": Condition("{a|no} request of the batch has no rows or no keys", Cost.DERIVED),
    "padding_rows": Condition("{rows|no rows} follow the last request's", Cost.VALUE),
    # Of a call, and of a case whose tensors have them.
    "function": Choice("the function", Cost.VALUE),
    "kv_dtype": Choice("the cache's dtype", Cost.VALUE),
    "dtype": Choice("the query's dtype", Cost.VALUE),
    "kv_layout": Choice("the cache's layout", Cost.VALUE),
    "head_dim": Number("head_dim is {}", Cost.VALUE, "sizes"),
    "v_head_dim": Number("v_head_dim is {}", Cost.VALUE, "sizes"),
    "qk_rope_head_dim": Number("qk_rope_head_dim is {}", Cost.VALUE, "sizes"),
    "num_kv_heads": Number("num_kv_heads is {}", Cost.VALUE, "heads", "there are several K/V heads"),
    "num_qo_heads": Number("num_qo_heads is {}", Cost.DERIVED, "heads", "there are several query heads"),
    "group": Number("the number of query heads per K/V head is {}", Cost.VALUE, "heads"),
    "sinks": Condition("{sinks|no sinks} are given"),
    # Of a call.
    "mask": Condition("{a|no} draft mask is given"),
    "mask_not_causal": Condition("{a|no} draft mask is given that is not causal", Cost.VALUE),
    "masks_differ": Condition("requests have {different masks|one mask}", Cost.VALUE),
    "mask_words": Number("the number of 16-bit words in a mask's row is {}", Cost.DERIVED),
    "odd_mask_words": Condition("the mask has several rows, each of an {odd|even} number of 16-bit words", Cost.VALUE),
    "padding_fills_bound": Condition(
        "the query has batch_size * max_q_len rows, {some|none} of them padding", Cost.VALUE
    ),
    "uneven_shares": Condition(
        "the query has {a|no} whole number of rows per request, and a request has fewer", Cost.VALUE
    ),
    "sinks_list": Condition("sinks are {|not }given in a list"),
    "some_inf_sink": Condition("{a|no} sink is minus infinity", Cost.VALUE),
    "all_inf_sinks": Condition("{every|not every} sink is minus infinity", Cost.VALUE),
    "large_sink": Condition("{a|no} sink is larger than 8", Cost.DERIVED),
    "bmm1_scale_tensor": Condition("bmm1_scale is a {tensor|number}"),
    "bmm2_scale_tensor": Condition("bmm2_scale is a {tensor|number}"),
    "bmm1_scale_negative": Condition("bmm1_scale is {|not }negative"),
    "bmm2_scale_negative": Condition("bmm2_scale is {|not }negative"),
    "bmm1_scale_1": Condition("bmm1_scale is {|not }1", Cost.VALUE),
    "bmm1_scale_large": Condition("the absolute value of bmm1_scale is {|not }above 1", Cost.VALUE),
    "bmm2_scale_large": Condition("the absolute value of bmm2_scale is {|not }above 100", Cost.VALUE),
    "bmm1_scale_small": Condition(f"the absolute value of bmm1_scale is {{|not }}below {SMALL_SCALE}", Cost.VALUE),
    "bmm2_scale_small": Condition(f"the absolute value of bmm2_scale is {{|not }}below {SMALL_SCALE}", Cost.VALUE),
    "bmm1_scale_unusual": Condition("bmm1_scale is {not |}1 / sqrt(head_dim)", Cost.VALUE),
    "bmm2_scale_not_1": Condition("bmm2_scale is {not |}1"),
    "bmm2_scale_no_power_of_2": Condition(f"bmm2_scale is {POWER_OF_2}", Cost.VALUE),
    "skip_softmax": Condition("parts of the softmax {may|may not} be left out", Cost.VALUE),
    "block_scales": Condition("blocks of rows and of keys have {scales|no scales} (sage_attn_sfs)"),
    "rank": Number("cp_rank is {}", Cost.VALUE),
    "ranks": Number("cp_world is {}", Cost.VALUE, "heads"),
    "rank_keys": Condition("the keys are {one rank's|all keys}"),
    "unseen_keys": Condition("{a|no} row sees none of its request's keys on this rank", Cost.VALUE),
    "o_scale_not_1": Condition("the output is e4m3 and o_scale is {not |}1"),
    "o_sf_scale_not_1": Condition("o_sf_scale is {not |}1"),
    "transform_mode": Choice("bf16q_fp8kv_transform_mode"),
    "cute_dsl_impl": Choice("cute_dsl_impl"),
    **{f"{name}_given": Condition(f"{name} is {{|not }}given") for name in GIVEN},
    "top_k": Number("sparse_mla_top_k is {}", Cost.VALUE, "columns"),
    "selects_entries": Condition("rows select {entries|no entries}"),
    "top_k_lens": Condition("sparse_mla_top_k_lens is {|not }given"),
    "first_slot": Condition("the pool's first slot is {|not }selected", Cost.VALUE),
    "not_causal": Condition("the call is {not |}causal"),
    "return_lse": Condition("the LSE is {|not }requested"),
    "lse_base_e": Condition("the LSE is {|not }requested in base e"),
    "out_dtype": Choice("the output's dtype", Cost.VALUE),
    "other_out_dtype": Condition("the output's dtype is {not |}the query's", Cost.POSITION),
    "seq_lens_uint32": Condition("seq_lens is {uint32|int32}"),
    "lse_of_three_axes": Condition("the given lse has {three|two} axes", Cost.VALUE),
    "sage_rows": Number("the number of rows of a block with one scale is {}", Cost.VALUE),
    "sage_keys": Number("the number of keys of a block with one scale is {}", Cost.VALUE),
    "host_lengths": Choice("the dtype of the lengths on the host"),
    "one_cache_tensor": Condition("kv_cache is {one tensor|two tensors}"),
    "separate_tables": Condition("V has {a|no} page table of its own"),
    "interleaved_factors": Condition("scale factors of V are {|not }interleaved"),
    "block_sparse": Condition("K/V heads select {pages of their own|no pages}"),
    "head_lengths_differ": Condition("K/V heads select {different numbers of keys|equally many keys}", Cost.VALUE),
    "other_v_strides": Condition("K and V have {different|equal} strides", Cost.VALUE),
    **{
        f"{name}_heads_apart": Condition(f"heads of a row of the {text} {{do not |}}lie next to each other", Cost.VALUE)
        for name, text in (("query", "query"), ("key", "keys"), ("value", "values"))
    },
    "value_gaps": Condition("the values {do not |}lie next to each other", Cost.VALUE),
    "lse_gaps": Condition("the rows of the given lse {do not |}lie next to each other", Cost.VALUE),
    "query_gaps": Condition("the query's rows {do not |}lie next to each other", Cost.VALUE),
    "key_gaps": Condition("the keys {do not |}lie next to each other", Cost.VALUE),
    "block_tables_gaps": Condition("the rows of block_tables {do not |}lie next to each other", Cost.VALUE),
    **{
        f"{name}_far": Condition(f"the first and last row of {text} lie {FAR_OR_NEAR} elements apart", Cost.VALUE)
        for name, text in (
            *(("query", "the query"), ("key", "the keys"), ("value", "the values")),
            *(("lse", "the given lse"), ("block_tables", "block_tables")),
        )
    },
    "page_gaps": Condition("pages {do not |}lie next to each other", Cost.VALUE),
    "gaps_in_pages": Condition("there are {|no }gaps inside pages", Cost.DERIVED),
    "scale_factor_gaps": Condition("pages of scale factors {do not |}lie next to each other", Cost.VALUE),
    "other_factor_strides": Condition("strides of scale factors are {not |}1/8 of the cache's strides", Cost.VALUE),
    "one_factor_tensor": Condition("kv_cache_sf is {one tensor|two tensors}", Cost.VALUE),
    "one_first_page": Condition("all requests {|do not }share their first page", Cost.VALUE),
    "one_table": Condition("all requests {|do not }have the same pages", Cost.VALUE),
    "other_page_size": Condition("the two pools have {different page sizes|one page size}", Cost.VALUE),
    "table_beyond_bound": Condition(
        "the page table has {more|no more} columns than the bound of keys needs", Cost.VALUE
    ),
    "table_columns": Number("the number of columns of the page table is {}", Cost.DERIVED, "pages"),
    "pool_pages": Number("the number of pages in the pool is {}", Cost.DERIVED, "pages"),
    **{
        f"{name}_stride": Number(f"the stride between {text} is {{}}", Cost.DERIVED, "strides")
        for name, text in (("query", "query rows"), ("key", "keys"), ("value", "values"))
    },
    "pool_elements": Number("the number of elements in the pool is {}", Cost.SETTING),
    "used_scratch": Condition("the workspace's scratch is {not |}zero", Cost.DERIVED),
    # Of the fields of a case, where their names are not those of features of a call.
    "contents": Choice("the data of the case", Cost.VALUE, Contents),
    "dead": Choice("the lab's poison in cells that no request owns", Cost.POSITION, Dead),
    "table_tail": Choice("the content of unused columns of the page table", Cost.POSITION, TableTail),
    "entries": Choice("the entries that rows select", Cost.VALUE, Entries),
    "head_pages": Choice("the pages that K/V heads select", Cost.VALUE, HeadPages),
    "mode": Choice("the forward mode", Cost.VALUE),
    "forward_mode": Choice("the forward mode", Cost.VALUE),
    "draft_step": Number("the draft step is {}", Cost.VALUE),
    "sliding_window": Condition("the layer has {a|no} sliding window", Cost.VALUE),
    "attention": Choice("the attention of a draft step", Cost.VALUE),
    "num_heads": Number("the number of heads is {}", Cost.DERIVED),
    "topk": Number("topk is {}", Cost.VALUE, several="topk is more than 1"),
    "num_steps": Number("num_steps is {}", Cost.VALUE),
    "positions_differ": Condition("positions are {not |}the prefix lengths", Cost.VALUE),
    "steps_fill_pages": Condition(
        "keys and steps of a draft {|do not }fill a request's pages of several tokens", Cost.VALUE
    ),
    "steps_reach_page": Condition("a prefix's last page makes the steps need {more|no more} pages", Cost.VALUE),
    "shorter_than_window": Condition("a prefix is {|not }shorter than window_size and sink_size together", Cost.VALUE),
    "window_size": Number("window_size is {}", Cost.VALUE),
    "sink_size": Number("sink_size is {}", Cost.VALUE),
    "window_meets_sinks": Condition("a prefix has {|not }window_size to window_size + sink_size tokens", Cost.VALUE),
    "entries_are_pages": Condition("entries of req_to_token are {pages|slots}", Cost.VALUE),
    "translated": Condition("v2p is {|not }given", Cost.VALUE),
    "spare_capacity": Number("the spare capacity of a list is {}", Cost.VALUE),
    "sequence": Choice("the sequence of replays", Cost.VALUE),
    "layer": Choice("the layer of the model", Cost.VALUE),
    "replay": Number(
        "the call is replay {} of a CUDA graph", Cost.VALUE, several="the call is a later replay of a CUDA graph"
    ),
    "place": Choice("the place where the metadata is rebuilt", Cost.VALUE),
    "chunk": Number("the chunk size is {}", Cost.SETTING),
    "compress_ratio": Number("compress_ratio is {}", Cost.SETTING),
    "context_parallel": Number("the number of context-parallel GPUs is {}", Cost.SETTING),
    "dcp_size": Number("the number of decode-context-parallel GPUs is {}", Cost.SETTING),
    "decode_splits": Number("the number of decode calls of a pass is {}", Cost.SETTING),
    "draft_extend": Choice("the call of a draft extend", Cost.SETTING),
    "decode_threshold": Number("the most rows of a request in vLLM's decode call are {}", Cost.SETTING),
    "dtypes": Choice("the dtype of the integers", Cost.SETTING),
    "encoder_only": Condition("the layer is {|not }encoder-only", Cost.SETTING),
    "engine": Choice("the engine that makes the pass", Cost.SETTING),
    "far_rows": Condition(f"the first and last row of req_to_token lie {FAR_OR_NEAR} elements apart", Cost.SETTING),
    "first_cell": Number("the first cell of each tensor is {}", Cost.SETTING),
    "first_page": Number("the first page in use is {}", Cost.SETTING),
    "one_far": Condition("{|not }one of the used pages alone lies far from the others", Cost.SETTING),
    "gaps_in_scale_factors": Condition("scale factors {have|do not have} gaps", Cost.SETTING),
    "geometry": Choice("the geometry", Cost.SETTING),
    "index_topk": Number("the most positions that an indexer selects are {}", Cost.SETTING),
    "kv_lora_rank": Number("kv_lora_rank is {}", Cost.SETTING),
    "layout": Choice("the pool's layout", Cost.SETTING),
    "num_draft_tokens": Number("the number of draft tokens is {}", Cost.SETTING),
    "num_padding_requests": Number("the number of padding requests is {}", Cost.SETTING),
    "num_padding_rows": Number("the number of padding rows is {}", Cost.SETTING),
    "num_pages": Number("the number of pages of a request is {}", Cost.SETTING),
    "num_tokens_per_req": Number("num_tokens_per_req is {}", Cost.SETTING),
    "offsets": Condition("row offsets are {|not }given", Cost.SETTING),
    "padded_seq_len": Number("the padded seq_lens are {}", Cost.SETTING),
    "query_dtype": Choice("the dtype that the query is cast to", Cost.SETTING),
    "repeated": Condition("requests have {the same row|different rows} of req_to_token", Cost.SETTING),
    "row_gap": Number("the gap between rows of req_to_token is {}", Cost.SETTING),
    "spare_boundaries": Number("the number of spare boundaries is {}", Cost.SETTING),
    "spare_columns": Number("the number of spare columns is {}", Cost.SETTING),
    "split_mixed_tail": Condition("the tail of a mixed batch is {|not }split off", Cost.SETTING),
    "stacked": Condition("K and V are {|not }stacked in one tensor", Cost.SETTING),
    "tensor_parallel": Number("the number of tensor-parallel GPUs is {}", Cost.SETTING),
    "virtual_slots": Condition("the slots are {virtual|physical}", Cost.SETTING),
    # Of a forward mode.
    "leaves_out_tokens": Condition("seq_lens {leaves out tokens of the pass|counts all tokens}", Cost.VALUE),
    "uncounted": Choice("the kind of tokens that seq_lens leaves out", Cost.VALUE),
    "uncounted_reach_page": Condition("tokens that seq_lens leaves out {|do not }reach a new page", Cost.VALUE),
    "padding_reaches_page": Condition("rows of padding after a request's own {|do not }reach a new page", Cost.VALUE),
    "narrow_seq_lens": Condition("seq_lens of the batch is {|not }int32", Cost.VALUE),
    "query_rows": Choice("the kind of query rows", Cost.DERIVED),
    "extends_draft": Condition("the forward mode {extends|does not extend} a draft", Cost.VALUE),
    "prefill": Condition("the pass is {a|no} prefill", Cost.VALUE),
    # Of a call that is compared with earlier calls of its case.
    "later_call": Condition("a call is {not |}the first of its case", Cost.DERIVED),
    "same_seq_lens": Condition("seq_lens are {|not }those of the call before", Cost.DERIVED),
    "fewer_requests": Condition("the batch has {fewer|no fewer} requests than in an earlier call", Cost.DERIVED),
    "calls_before": Number("the number of earlier calls is {}", Cost.SETTING),
    "longer_request": Condition("{a|no} request is longer than in the first call of these shapes", Cost.DERIVED),
    "shorter_request": Condition("{a|no} request is shorter than in an earlier call", Cost.DERIVED),
    **{
        f"other_{name}": Condition(f"{text} {{different|the same}} in the first call of these shapes", Cost.DERIVED)
        for name, text in REMEMBERED.items()
    },
    **{
        f"written_{name}": Condition(f"{text} {{|not }}written since an earlier call", Cost.DERIVED)
        for name, text in WATCHED.items()
    },
    # Where no other feature says where a result is wrong.
    "result": Choice("the compared result", Cost.SETTING, is_negated=False),
}


class UnknownFeatureError(LookupError):
    """No feature has this name. Each field of a case and each argument of a call needs a row in `FEATURES`."""


def feature_named(name: str) -> CaseFeature:
    """Return the feature with this name. If the name is not in `FEATURES` but is a parameter with a value, such as
    "page_size=32", return a condition: that a case has this value. Raise UnknownFeatureError for any other name.
    """
    if name in FEATURES:
        return FEATURES[name]
    parameter, is_parameter, value = name.partition("=")
    if not is_parameter:
        raise UnknownFeatureError(f"no feature has the name {name!r}: add a row to a table of lab.checks.explain")
    return Condition(f"{parameter} is {{|not }}“{value}”", Cost.SETTING)
