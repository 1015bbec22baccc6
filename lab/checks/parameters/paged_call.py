"""The call of a paged configuration: its tensors and arguments in the forms that it names, and what the call must give."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lab.calls.problem import E4M3
from lab.checks.case_run import CaseRun
from lab.checks.parameters.forms import (
    judge_call,
    set_lengths,
    set_lse,
    set_out,
    set_scales,
    with_minus_infinity,
)
from lab.checks.parameters.paged_shape import PADDING, attention_case, rows_without_keys
from lab.checks.parameters.values import Bound, Cache, Lse, Mask, Offsets, Pages, Query, SeqLens, Sinks, Tables
from lab.metadata.mla.metadata import allocate_multi_ctas_kv_counters
from lab.workloads.inputs.attention import (
    AttentionInputs,
    as_one_tensor,
    build_attention,
    reversed_pages,
)
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.encoding import E4M3_K_SCALE
from lab.workloads.inputs.guards import embedded
from lab.workloads.inputs.masks import draft_masks, packed_mask, strictly_causal, with_bits_after
from lab.workloads.inputs.views import (
    GAP,
    LEAST_ALIGNMENT_BYTES,
    apart,
    at_bytes,
    in_halves,
    laid,
    raw,
    with_nan,
    with_odd_strides,
)
from lab.workloads.interfaces import Interface

PADDED = 100.0  # an element of a padding row, which no row may read
PADDED_AFTER = {Offsets.PADDED: PADDED, Offsets.PADDED_WITH_NAN: math.nan}
# Masks of `draft_masks`.
MASKS = {
    Mask.CAUSAL: "causal mask",
    Mask.FULL: "full mask",
    Mask.TREE: "tree mask",
    Mask.BY_REQUEST: "mask that differs by request",
    Mask.BITS_AFTER: "tree mask",
    Mask.AT_A_WORD: "tree mask",
}


PagedCall = BuiltCall[AttentionInputs]


def judge_paged(run: CaseRun) -> None:
    """Judge the call of a run's configuration."""
    judge_call(run, _built(run))


def _built(run: CaseRun) -> PagedCall:
    case = attention_case(run.case, run.ranges)
    call = PagedCall(run.case, build_attention(case, run.device))
    if call.forms["pages"] == Pages.TWICE:
        call.inputs = _with_page_twice(call.inputs)
    _store(call)
    call.given = call.inputs.arguments()
    if call.forms.get("backend", "auto") != "auto":
        call.given["backend"] = call.forms["backend"]
        if call.inputs.scale_factors is not None:
            call.given |= call.inputs.scale_factor_arguments(interleaved=True)
    if call.forms.get("qk_nope_head_dim") == "a half":
        call.given["qk_nope_head_dim"] *= 2
    for form in (_cache, _query, _tables, _lengths, _bounds, set_scales, _sinks, _visible, set_out, _lse):
        form(call)
    # As the engine gives them in every call. They must not be changed after the call, like tensors that a kernel only reads.
    # One SM, because the counters of the engine's 8,192 requests are more than any GPU has SMs.
    call.given["multi_ctas_kv_counter_buffer"] = allocate_multi_ctas_kv_counters(
        len(case.q_lens), case.num_qo_heads, sm_count=1, device=run.device
    )
    return call


def _with_page_twice(inputs: AttentionInputs) -> AttentionInputs:
    """Let the last page of each request that has several be the one before it."""
    size, block_tables = inputs.case.page_size, inputs.block_tables.clone()
    histories = list(inputs.histories)
    for request, kv_len in enumerate(inputs.case.kv_lens):
        last = (kv_len - 1) // size
        if last > 0:
            block_tables[request, last] = block_tables[request, last - 1]
            positions = torch.arange(kv_len, device=block_tables.device)
            positions[last * size :] -= size
            keys, values = (raw(side)[positions].view(side.dtype) for side in histories[request])
            histories[request] = keys, values
    return replace(inputs, block_tables=block_tables, histories=tuple(histories))


def _store(call: PagedCall) -> None:
    """Lay the cache out as the configuration says."""
    inputs, form = call.inputs, call.forms["cache"]
    tokens, heads = (1, 2) if call.inputs.case.is_mla or call.inputs.case.storage.kv_layout == "NHD" else (2, 1)
    layouts: dict[Cache, Callable[[Tensor], Tensor]] = {
        Cache.PAGES_APART: lambda pages: apart(pages, 0, pages[0].numel()),
        Cache.TOKENS_APART: lambda pages: apart(pages, tokens, GAP),
        Cache.HEADS_APART: lambda pages: apart(pages, heads, GAP),
        Cache.PAGES_AN_ELEMENT_APART: lambda pages: apart(pages, 0, 1),
        Cache.TOKENS_AN_ELEMENT_APART: lambda pages: apart(pages, tokens, 1),
        Cache.ODD_STRIDES: with_odd_strides,
        Cache.AT_16_BYTES: lambda pages: at_bytes(pages, LEAST_ALIGNMENT_BYTES),
    }
    if form in layouts:
        k_pages = layouts[form](inputs.k_pages)
        v_pages = k_pages if call.inputs.case.is_mla else layouts[form](inputs.v_pages)
        call.inputs = replace(inputs, k_pages=k_pages, v_pages=v_pages)
    elif form == Cache.V_OTHERWISE:
        call.inputs = replace(inputs, v_pages=apart(inputs.v_pages, 0, inputs.v_pages[0].numel()))
    elif form == Cache.K_IS_V:
        histories = tuple((keys, keys) for keys, _ in inputs.histories)
        call.inputs = replace(inputs, v_pages=inputs.k_pages, histories=histories)
        if call.inputs.case.is_quantised:
            call.rules["bmm2_scale"] = E4M3_K_SCALE


def _cache(call: PagedCall) -> None:
    """Give the cache in another shape."""
    form, pages = call.forms["cache"], call.inputs.k_pages
    if form.is_one_tensor:
        whole = as_one_tensor(call.inputs)
        call.given["kv_cache"] = in_halves(whole) if form == Cache.HALVES else whole
        # A decode takes scale factors as a pair alone.
        if call.inputs.scale_factors is not None and call.interface is Interface.CONTEXT:
            k, v = (each.view(torch.uint8) for each in call.given["kv_cache_sf"])
            call.given["kv_cache_sf"] = torch.stack((k, v), 1).view(E4M3)
    elif form == Cache.K_IS_V:
        call.given |= {"kv_cache": pages.unsqueeze(1), "bmm2_scale": call.rules.get("bmm2_scale", 1.0)}
    elif form in (Cache.FOUR_AXES, Cache.FOUR_AXES_ODD_STRIDES):
        cache = pages.unsqueeze(1)
        call.given["kv_cache"] = with_odd_strides(cache) if form == Cache.FOUR_AXES_ODD_STRIDES else cache


def _query(call: PagedCall) -> None:
    query = with_nan(call.given["query"], rows_without_keys(call.inputs.case.q_lens, call.inputs.case.kv_lens))
    if call.forms["offsets"] in PADDED_AFTER:
        padded = PADDED_AFTER[call.forms["offsets"]]
        rows = torch.full((PADDING, *query.shape[1:]), padded, device=query.device).to(query.dtype)
        query = torch.cat((raw(query), raw(rows))).view(query.dtype)
    of_request = query[:1, :1].numel()
    call.given["query"] = (
        apart(query, 0, of_request) if call.forms["query"] == Query.REQUESTS_APART else laid(query, call.forms["query"])
    )


def _tables(call: PagedCall) -> None:
    form, tables = call.forms["block_tables"], call.given["block_tables"]
    if form.is_separate:
        call.inputs = call.inputs.with_separate_tables()
        tables = call.inputs.block_tables
        sides = (call.inputs.k_pages, call.inputs.v_pages)
        call.given |= {"kv_cache": sides, "uses_shared_paged_kv_idx": False}
        if call.inputs.scale_factors is not None:
            k, v = call.given["kv_cache_sf"]
            call.given["kv_cache_sf"] = (k, reversed_pages(v))
    if form in (Tables.ROWS_APART, Tables.SEPARATE_ROWS_APART):
        tables = apart(tables, -2, GAP + 1)
    call.given["block_tables"] = at_bytes(tables, tables.element_size()) if form == Tables.AT_AN_ELEMENT else tables


def _lengths(call: PagedCall) -> None:
    set_lengths(call, call.inputs.max_seq_len)
    if call.forms["seq_lens"] == SeqLens.AMID_OTHERS:
        for name in {"cum_seq_lens_q", "cum_seq_lens_kv"} & set(call.given):
            offsets = call.given[name]
            call.given[name] = None if offsets is None else embedded(offsets, int(offsets[-1]) + 7)


def _bounds(call: PagedCall) -> None:
    name = call.inputs.kv_bound
    if call.forms["bound"] == Bound.EXACT:
        call.given[name] = max(*call.inputs.case.kv_lens, 1)
    elif call.forms["bound"] == Bound.FOUR_TIMES:
        call.given[name] *= 4
    if call.forms["max_q_len"] == Bound.LARGER:
        call.given["max_q_len"] *= 2
    elif call.forms["max_q_len"] == Bound.NONE:
        call.given["max_q_len"] = None


def _sinks(call: PagedCall) -> None:
    form, sinks = call.forms["sinks"], call.inputs.sinks
    if sinks is None:
        return
    if form == Sinks.SOME_MINUS_INFINITY:
        sinks = call.rules["sinks"] = with_minus_infinity(sinks)
    forms = {Sinks.LIST: [sinks], Sinks.TUPLE: (sinks,), Sinks.A_PART: embedded(sinks, math.nan)}
    call.given["sinks"] = forms.get(form, sinks)


def _visible(call: PagedCall) -> None:
    """Say what a row sees: a draft's mask, or all keys."""
    mask = call.forms.get("mask", Mask.NONE)
    if mask != Mask.NONE:
        case = call.inputs.case
        shown = strictly_causal(case) if mask == Mask.OWN_BIT_CLEAR else draft_masks(case)[MASKS[mask]]
        packed = packed_mask(shown)
        packed = (with_bits_after(packed) if mask == Mask.BITS_AFTER else packed).to(call.device)
        call.given["mask"] = at_bytes(packed, packed.element_size()) if mask == Mask.AT_A_WORD else packed
        call.rules["shown"] = shown.to(call.device)
    if not call.forms.get("causal", True):
        call.given["causal"] = call.rules["causal"] = False


def _lse(call: PagedCall) -> None:
    form = call.forms["lse"]
    set_lse(call)
    if form == Lse.BASE_E or (form != Lse.NONE and call.inputs.case.is_mla and call.inputs.case.offsets):
        call.given["return_lse_base"] = "basee" if form == Lse.BASE_E else "base2"
