"""Facts in words, and their rank in a rule: what a caller passes reads best, then the axes, then what only happened before."""

import re
from typing import NamedTuple

from lab.checks.facts import Fact


class Phrase(NamedTuple):
    """A fact in words that follow "wherever".

    Attributes:
        rank: bits that it costs in a rule beyond those of the best facts.
        holds: of a fact that is true or, with "{}", of a number or name.
        fails: of a fact that is not true; "" for "it is not so that ...".
        fewer: of a number that is at most {}.
        several: of a number that is 2 or more.
    """

    rank: float
    holds: str
    fails: str = ""
    fewer: str = ""
    several: str = ""


def phrase(fact: str, operator: str, value: Fact) -> str:
    """Return a literal in words."""
    return re.sub(r"\b1 (key|query row|page|request)s\b", r"1 \1", _phrase(fact, operator, value))


def _phrase(fact: str, operator: str, value: Fact) -> str:
    known = PHRASES.get(fact)
    if known is None and operator in ("is", "is not") and ": " in fact:  # of a configuration's axis
        return f"{fact.replace(': ', ' is ' if operator == 'is' else ' is not ', 1)}"
    if known is None:
        return f"{fact} {operator} {value}" if operator not in ("is", "is not") else f"{fact} {operator} true"
    if operator == "is":
        return known.holds
    if operator == "is not":
        return known.fails or _not(known.holds)
    if operator == ">=" and value == 2 and known.several:
        return known.several
    shown = str(value)
    if "{}" not in known.holds:
        return f"{known.holds} {operator} {shown}"
    if operator == "<=":
        return known.fewer.format(shown) if known.fewer else f"{fact} is at most {shown}"
    told = known.holds.format(shown)
    if operator == "==":
        told = told.replace(" or more", "")
    return _not(told) if operator == "!=" else told


def _not(told: str) -> str:
    """Return the opposite of a sentence's part."""
    for verb in ("is", "are"):
        if f" {verb} not " in told:
            return told.replace(f" {verb} not ", f" {verb} ", 1)
    for verb in (" is ", " are ", " has "):
        if verb in told:
            return told.replace(verb, f"{verb}not " if verb != " has " else " does not have ", 1)
    return f"it is not so that {told}"


def _number(rank: float, name: str) -> Phrase:
    return Phrase(rank, f"{name} is {{}} or more", fewer=f"{name} is {{}} or less")


_AGAIN = "than the first call of these shapes"

PHRASES: dict[str, Phrase] = {
    # What a caller passes.
    "mask": Phrase(0, "a draft mask is given", "no draft mask is given"),
    "mask is not causal": Phrase(
        0.5, "a draft mask is given that is not causal", "no draft mask is given, or a causal one"
    ),
    "mask differs by request": Phrase(0.5, "requests have different draft masks"),
    "mask_words": _number(1, "the number of 16-bit words in a mask's row"),
    "window_left >= 0": Phrase(0, "a window is set", "no window is set"),
    "window_left < kv_len - 1": Phrase(0.2, "a window hides keys of a request", "no window hides a key"),
    "sinks": Phrase(0, "sinks are given", "no sinks are given"),
    "sinks is a list": Phrase(0, "sinks are given in a list"),
    "a sink is -inf": Phrase(0.3, "a sink is minus infinity", "no sink is minus infinity"),
    "every sink is -inf": Phrase(0.5, "every sink is minus infinity", "not every sink is minus infinity"),
    "a sink > 8": Phrase(1, "a sink is larger than 8", "no sink is larger than 8"),
    "bmm1_scale is a tensor": Phrase(0, "bmm1_scale is a tensor", "bmm1_scale is a number"),
    "bmm2_scale is a tensor": Phrase(0, "bmm2_scale is a tensor", "bmm2_scale is a number"),
    "bmm1_scale_log2 is given": Phrase(0, "bmm1_scale_log2 is given"),
    "bmm1_scale < 0": Phrase(0, "bmm1_scale is negative"),
    "bmm2_scale < 0": Phrase(0, "bmm2_scale is negative"),
    "bmm1_scale != 1 / sqrt(head_dim)": Phrase(0.3, "bmm1_scale is not 1 / sqrt(head_dim)"),
    "bmm2_scale != 1": Phrase(0.2, "bmm2_scale is not 1", "bmm2_scale is 1"),
    "bmm2_scale is no power of two": Phrase(0.4, "bmm2_scale is no power of two", "bmm2_scale is a power of two"),
    "cum_seq_lens_q is given": Phrase(0, "cum_seq_lens_q is given"),
    "causal is False": Phrase(0, "the call is not causal", "the call is causal"),
    "out is given": Phrase(0, "out is given"),
    "lse is given": Phrase(0, "lse is given"),
    "return_lse": Phrase(0.2, "the LSE is asked for"),
    "return_lse_base == 'basee'": Phrase(0, "the LSE is asked for in base e"),
    "out_dtype is not the query's": Phrase(0, "the output's dtype is not the query's"),
    "out_dtype": Phrase(0.5, "the output's dtype is {}"),
    "seq_lens is uint32": Phrase(0, "seq_lens is uint32"),
    "kv_cache is one tensor": Phrase(0, "kv_cache is one tensor"),
    "uses_shared_paged_kv_idx is False": Phrase(0, "V has a page table of its own"),
    "query is not contiguous": Phrase(0.3, "the query's rows do not lie next to each other"),
    "key is not contiguous": Phrase(0.3, "the keys do not lie next to each other"),
    "value is not contiguous": Phrase(0.2, "the values do not lie next to each other"),
    "lse is not contiguous": Phrase(0.2, "the given lse has gaps"),
    "lengths on the host": Phrase(0.2, "the host has the lengths too, in {}"),
    "block_tables is not contiguous": Phrase(0.3, "the page table's rows do not lie next to each other"),
    "pages lie apart": Phrase(0.3, "pages do not lie next to each other"),
    "K and V have other strides": Phrase(0.2, "K and V have different strides"),
    "scale factors lie apart": Phrase(0.3, "pages of scale factors do not lie next to each other"),
    "all requests have the same first page": Phrase(0.3, "all requests share their first page"),
    "as many tokens in a page as K/V heads": Phrase(0.5, "a page has as many tokens as K/V heads"),
    # Axes of a case.
    "kv_len % page_size > 0": Phrase(0.5, "a request's last page is partly filled", "a request's keys fill its pages"),
    "kv_len % page_size == 0": Phrase(1, "a request's last page is full", "a request's last page is not full"),
    "kv_len == 0": Phrase(0.5, "a request has no keys", "a request has keys"),
    "every kv_len == 0": Phrase(0.5, "no request has a key", "a request of the batch has keys"),
    "kv_len < q_len": Phrase(0.6, "a request has fewer keys than query rows"),
    "kv_len == q_len": Phrase(0.8, "a request has no keys before its rows", "a request has keys before its rows"),
    "q_len": Phrase(
        0.5,
        "a request has {} query rows or more",
        fewer="a request has {} query rows or less",
        several="a request has several query rows",
    ),
    "q_len is no power of two": Phrase(
        1, "a request's number of query rows is no power of two", "a request's number of query rows is a power of two"
    ),
    "q_len == 0": Phrase(0.8, "a request has no query rows", "a request has query rows"),
    "some q_len == 0": Phrase(
        0.5, "a request of the batch has no query rows", "each request of the batch has query rows"
    ),
    "some kv_len == 0": Phrase(1, "a request of the batch has no keys", "each request of the batch has keys"),
    "unequal q_lens": Phrase(0.6, "requests have different numbers of query rows", "requests have equally many rows"),
    "unequal kv_lens": Phrase(1, "requests have different lengths", "requests have one length"),
    "kv_dtype": Phrase(0.5, "the cache is {}"),
    "dtype": Phrase(0.8, "the query is {}"),
    "head_dim": _number(0.5, "head_dim"),
    "v_head_dim": _number(0.6, "v_head_dim"),
    "page_size": _number(0.5, "page_size"),
    "group": _number(0.7, "the number of query heads per K/V head"),
    "group is no power of two": Phrase(
        0.7,
        "the number of query heads per K/V head is no power of two",
        "the number of query heads per K/V head is a power of two",
    ),
    "num_kv_heads": _number(0.7, "num_kv_heads")._replace(several="there are several K/V heads"),
    "num_qo_heads": _number(1.0, "num_qo_heads"),
    "num_heads": _number(0.9, "the number of heads"),
    "kv_layout": Phrase(0.5, "the cache's layout is {}"),
    "kv_len": Phrase(0.8, "a request has {} keys or more", fewer="a request has {} keys or less"),
    "pages": Phrase(
        1,
        "a request has {} pages or more",
        fewer="a request has {} pages or less",
        several="a request has several pages",
    ),
    "longest kv_len": _number(0.5, "the longest request's number of keys"),
    "window_left": _number(0.4, "window_left"),
    "a page lies before the window": Phrase(3, "a page of a request lies before its window"),
    "a tile lies before the window": Phrase(3.5, "64 keys of a request lie before its window"),
    "the window begins in a page": Phrase(2.5, "a window begins within a page"),
    "the window begins with a page": Phrase(2, "a window begins with a page"),
    "sliding_window": Phrase(0.8, "the layer has a sliding window"),
    "requests": Phrase(
        0.6,
        "a batch has {} requests or more",
        fewer="a batch has {} requests or less",
        several="a batch has several requests",
    ),
    "request": Phrase(0.8, "a request's place in the batch is {} or more", fewer="a request's place is {} or less"),
    "last request": Phrase(1.2, "a request is the batch's last"),
    "rows_of_batch": _number(1.5, "the number of query rows of a batch"),
    "kv_len % 64 == 0": Phrase(1.2, "a request has a multiple of 64 keys"),
    "kv_len % 512 == 0": Phrase(0.8, "a request has a multiple of 512 keys"),
    "kv_len is the neighbour's": Phrase(
        0.8, "a request is as long as the one before it", "a request is not as long as the one before"
    ),
    "table_columns": _number(1.0, "the number of columns of the page table"),
    "pool_pages": _number(1.2, "the number of pages in the pool"),
    "pool_elements": _number(1.0, "the number of elements in the pool"),
    "contents": Phrase(0.6, "the numbers are of the kind {}"),
    "dead": Phrase(0.6, "cells that no request owns hold {}"),
    "table_tail": Phrase(0.8, "unused columns of the page table are of the kind {}"),
    "function": Phrase(0.4, "the function is {}"),
    # A pass, a draft, a story.
    "mode": Phrase(0.6, "the forward mode is {}"),
    "forward_mode": Phrase(0.6, "the forward mode is {}"),
    "draft_step": _number(0.7, "the draft step"),
    "seq_lens leaves out tokens": Phrase(0.5, "seq_lens leaves out tokens of the pass", "seq_lens counts all tokens"),
    "tokens that seq_lens leaves out": Phrase(0.8, "the tokens that seq_lens leaves out are of the kind {}"),
    "rows of a request": Phrase(1, "the rows of a request are of the kind {}"),
    "the mode extends a draft": Phrase(0.8, "the forward mode extends a draft"),
    "attention": Phrase(0.8, "a draft step counts keys as {}"),
    "topk": _number(0.5, "topk"),
    "num_steps": _number(0.5, "num_steps"),
    "positions_differ": Phrase(0.5, "positions are not the prefix lengths"),
    "window_size": _number(0.5, "window_size"),
    "sink_size": _number(0.5, "sink_size"),
    "entries_are_pages": Phrase(0.5, "entries of req_to_token are pages"),
    "translated": Phrase(0.5, "v2p is given"),
    "spare_capacity": _number(0.8, "the spare capacity of a list"),
    "story": Phrase(0.8, "the story is {}"),
    "place": Phrase(0.8, "the metadata is rebuilt {}"),
    # What happened before.
    "a later call": Phrase(1, "a call is not the first of its case"),
    "calls before": _number(4, "the number of earlier calls"),
    "the workspace's scratch is not zero": Phrase(1, "the workspace's scratch is not zero"),
    "another bmm1_scale than the first call of these shapes": Phrase(1, f"bmm1_scale is another {_AGAIN}"),
    "another bmm2_scale than the first call of these shapes": Phrase(1, f"bmm2_scale is another {_AGAIN}"),
    "another window_left than the first call of these shapes": Phrase(1, f"window_left is another {_AGAIN}"),
    "another sinks than the first call of these shapes": Phrase(1, f"sinks are others {_AGAIN}"),
    "another mask than the first call of these shapes": Phrase(1, f"the mask is another {_AGAIN}"),
    "another seq_lens than the first call of these shapes": Phrase(1, f"seq_lens are others {_AGAIN}"),
    "a request is longer than in the first call of these shapes": Phrase(
        0.9,
        "a request is longer than in the first call of these shapes",
        "no request is longer than in the first call of these shapes",
    ),
    "another cum_seq_lens_q than the first call of these shapes": Phrase(1, f"cum_seq_lens_q is another {_AGAIN}"),
    "another block_tables than the first call of these shapes": Phrase(1.5, f"the page table is another {_AGAIN}"),
    "query was written since an earlier call": Phrase(1.3, "the query was written since an earlier call"),
    "seq_lens was written since an earlier call": Phrase(1, "seq_lens were written since an earlier call"),
    "block_tables was written since an earlier call": Phrase(1.2, "the page table was written since an earlier call"),
    "cum_seq_lens_q was written since an earlier call": Phrase(1, "cum_seq_lens_q was written since an earlier call"),
    "bmm1_scale was written since an earlier call": Phrase(1, "bmm1_scale was written since an earlier call"),
    "bmm2_scale was written since an earlier call": Phrase(1, "bmm2_scale was written since an earlier call"),
    "sinks was written since an earlier call": Phrase(1, "the sinks were written since an earlier call"),
    "mask was written since an earlier call": Phrase(1, "the mask was written since an earlier call"),
    "kv_cache was written since an earlier call": Phrase(1, "the cache was written since an earlier call"),
    "workspace_buffer was written since an earlier call": Phrase(1.3, "the workspace was used before"),
    # Where no other fact tells.
    "result": Phrase(5, "the result is “{}”"),
}
