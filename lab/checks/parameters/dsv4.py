"""Define the parameters and rules of DeepSeek-V4's decode call, and build its tensors. The call reads two K/V pools: a window
of the last tokens, and compressed entries of all tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lab.calls.dsv4_decode import DSV4DecodeCall
from lab.calls.problem import AttentionCall
from lab.calls.selection import WINDOW_COLUMNS
from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.paged_axes import (
    CONTIGUOUS_TABLES,
    MOST_OUT_ELEMENTS,
    NEAR,
    QUERY,
    REQUESTS,
    RULES,
    VACUOUS,
    softmax_axes,
)
from lab.checks.parameters.paged_calls import TAILS, Lens, lens_of
from lab.checks.parameters.values import (
    Bound,
    Cache,
    Chosen,
    DtypePair,
    Lengths,
    LongestRequest,
    Offsets,
    Output,
    Sinks,
    Tables,
    Without,
)
from lab.ranges import Ranges, text_of
from lab.workloads.attention_case import AttentionCase, Entries, Storage, TableTail
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.dsv4 import DSV4Inputs, build_dsv4
from lab.workloads.inputs.views import GAP, Layout, apart

POOLS = ("swa_kv_cache", "compressed_kv_cache")
COMPRESSION = 3  # tokens of one compressed entry in the cases; DeepSeek-V4 has 4 and 128, with fewer entries to select
HEAD_DIM, SMALL_HEAD_DIM = 512, 64  # of DeepSeek-V4, and of cases with large batches or lengths
ENTRIES = tuple(each.name.lower() for each in (Entries.SHUFFLED, *Entries))
# Backends differ on -1 in a column in use: the backend cake skips it, while trtllm-gen takes it as a key of zeros according to
# SGLang 0.5.23 (`deepseek_v4_backend.py` 591). So cases have -1 neither in window columns in use nor before a compressed entry.
FULL = ENTRIES[0], Entries.ORDERED.name.lower()


def dsv4_model(ranges: Ranges) -> Model:
    pairs = [pair for pair in ranges.widened("dtypes") if pair[0] == pair[1]] or [(torch.bfloat16,) * 2]
    page_sizes = ranges.widened("mla_page_sizes")
    axes: dict[str, Sequence[Any]] = {
        "dtypes": [DtypePair(text_of(pair)) for pair in pairs],
        "heads": ranges.widened("mla_heads"),
        "head_dim": (HEAD_DIM, SMALL_HEAD_DIM),
        "page_size": page_sizes,
        "compressed_page_size": (*page_sizes[1:], page_sizes[0]),  # by default another, of several tokens
        "kv_layout": ranges.kv_layouts,
        "requests": (REQUESTS, 1, *ranges.widened("large_batches")),
        "lengths": (Lengths.UNEQUAL, Lengths.EQUAL, *ranges.long_requests[:1]),
        "longest_request": tuple(LongestRequest),
        "q_len": ranges.widened("q_lens"),
        "offsets": (Offsets.NONE, Offsets.EQUAL, Offsets.UNEQUAL, *Without),
        "max_q_len": (Bound.EXACT, Bound.LARGER),
        "columns": (192, 128, 132, 640),
        "window_entries": FULL,
        "compressed_entries": ENTRIES,
        **softmax_axes(AttentionCall.DSV4_DECODE, ranges),  # without skip-softmax, which the call does not have
        "out": (Output.NONE, Output.GIVEN, Output.VIEW),
        "backend": ("auto", "trtllm-gen"),
        "query": (*QUERY[:4], Layout.HEADS_FIRST, Layout.REQUESTS_APART),
        "sparse_indices": (Tables.PLAIN, Tables.ROWS_APART, *TAILS),
        "cache": (
            *(Cache.PLAIN, Cache.FOUR_AXES, Cache.PAGES_APART, Cache.TOKENS_APART, Cache.AT_16_BYTES),
            Cache.ONE_TENSOR,  # both pools
        ),
        "far": (NEAR, "query", "sparse_indices", *POOLS),
    }
    del axes["skip_softmax"]
    return Model.of(axes, (*RULES, *DSV4_RULES), TRIPLES, VACUOUS)


DSV4_RULES = constraints(
    {
        "the tensors would be too large for a test": lambda requests, q_len, heads, head_dim: (
            requests * q_len * heads * head_dim <= MOST_OUT_ELEMENTS
        ),
        "a large batch or request is of few elements": (
            lambda requests, head_dim: requests <= REQUESTS or head_dim == SMALL_HEAD_DIM,
            lambda lengths, head_dim: isinstance(lengths, str) or head_dim == SMALL_HEAD_DIM,
        ),
        "without columns for compressed entries rows select none": lambda columns, compressed_entries: (
            columns > WINDOW_COLUMNS or compressed_entries == ENTRIES[0]
        ),
        "two pools in one tensor have pages of one size": lambda cache, page_size, compressed_page_size: (
            cache != Cache.ONE_TENSOR or page_size == compressed_page_size
        ),
        "far rows and pages lie in tensors without other gaps": (
            lambda far, sparse_indices: far != "sparse_indices" or sparse_indices in CONTIGUOUS_TABLES,
            lambda far, cache: far not in POOLS or cache in (Cache.PLAIN, Cache.FOUR_AXES),
        ),
    }
)
TRIPLES = (("columns", "window_entries", "compressed_entries"), ("q_len", "window_entries", "sparse_indices"))


def dsv4_inputs(
    of: Chosen, _: Ranges, device: torch.device, lens: Lens | None = None, seed: int = 0, moved: bool = False
) -> DSV4Inputs:
    """Return the tensors of DeepSeek-V4's decode call with the parameter values `of`. For a graph replay, `lens` replaces the
    lengths, and the call has sinks. `seed` is added to the seed of the data. If `moved`, the requests have other pages.
    """
    has_sinks = lens is not None or of["sinks"] != Sinks.NONE
    lengths, columns = lens or lens_of(of), of["columns"] - WINDOW_COLUMNS
    tail, page_seed = TAILS.get(of["sparse_indices"], TableTail.FOREIGN), of.seed + moved
    window = AttentionCase(
        AttentionCall.MLA_DECODE,
        lengths.kv_lens,
        lengths.q_lens,
        num_kv_heads=1,
        group=of["heads"],
        head_dim=of["head_dim"],
        v_head_dim=of["head_dim"],
        dtype=of["dtypes"].query,
        kv_dtype=of["dtypes"].cache,
        arithmetic=of["dtypes"].query,
        sinks=has_sinks,
        offsets=of["offsets"] != Offsets.NONE,
        top_k=WINDOW_COLUMNS,
        entries=Entries[of["window_entries"].upper()],
        seed=of.seed + 2 * seed,
        storage=Storage(of["page_size"], table_tail=tail, page_seed=page_seed),
    )
    compressed = replace(
        window,
        kv_lens=tuple(-(-kv_len // COMPRESSION) for kv_len in lengths.kv_lens),
        top_k=columns,
        entries=Entries[of["compressed_entries"].upper()] if columns else None,
        seed=window.seed + 1,
        storage=replace(window.storage, page_size=of["compressed_page_size"], page_seed=page_seed + 1),
    )
    return build_dsv4(window, compressed, device)


def set_dsv4_forms(call: BuiltCall) -> None:
    form, is_nhd = call.forms["cache"], call.forms["kv_layout"] == "NHD"
    if form == Cache.ONE_TENSOR:
        _join_pools(call.given)
    far = call.forms["far"]
    if far in POOLS:  # its last page is one that rows read
        call.given[far] = call.given[far][: _last_page(call, far == POOLS[0]) + 1]
    for name in POOLS:
        pages = call.given[name]
        pages = form.of(pages, 1)
        call.given[name] = pages.unsqueeze(2) if is_nhd else pages.unsqueeze(1) if form == Cache.FOUR_AXES else pages
    if is_nhd:
        call.given["kv_layout"] = "NHD"
    if form in (Cache.PAGES_APART, Cache.TOKENS_APART) or far in POOLS:
        call.given["sparse_indices_are_storage_offsets"] = False
    if call.forms["backend"] != "auto":
        call.given["backend"] = call.forms["backend"]
    if call.forms["sparse_indices"] == Tables.ROWS_APART:
        call.given["sparse_indices"] = apart(call.given["sparse_indices"], -2, GAP)


def _join_pools(given: dict[str, Any]) -> None:
    # One tensor has the pages of the window, and after them those of compressed entries.
    window, compressed = (given[name] for name in POOLS)
    places = given["sparse_indices"].clone()
    of_entries = places[:, WINDOW_COLUMNS:]
    of_entries += torch.where(of_entries < 0, 0, window.shape[0] * window.shape[1])
    given |= dict.fromkeys(POOLS, torch.cat((window, compressed))) | {"sparse_indices": places}


def _last_page(call: BuiltCall, of_window: bool) -> int:
    problem = DSV4DecodeCall(**call.given).problem()
    pool = problem.window_cache if of_window else problem.k_cache
    is_window = torch.arange(problem.selected.shape[1], device=problem.selected.device) < WINDOW_COLUMNS
    places = problem.selected.where(problem.columns_in_use() & (is_window == of_window), 0)
    return max(places.flatten().tolist(), default=0) // pool.shape[2]
