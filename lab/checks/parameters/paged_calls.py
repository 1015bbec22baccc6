"""Build the arguments of the calls over a paged cache in the forms that a configuration gives them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.call_cases import Chosen, Lens, attention_case
from lab.checks.parameters.values import Cache, Mask, Offsets, Pages, SeqLens, Tables
from lab.metadata.mla.metadata import allocate_multi_ctas_kv_counters
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs, as_one_tensor, build_attention
from lab.workloads.inputs.call import BuiltCall, random_mask
from lab.workloads.inputs.guards import embedded
from lab.workloads.inputs.masks import draft_masks, strictly_causal, with_bits_after
from lab.workloads.inputs.ragged import padded
from lab.workloads.inputs.views import GAP, LEAST_ALIGNMENT_BYTES, apart, at_bytes, in_halves, with_odd_strides

PADDED = (Offsets.PADDED, Offsets.PADDED_WITH_NAN)
FAR_ENTRY = 2**30  # far outside every pool


def paged_inputs(of: Chosen, ranges: Ranges, device: torch.device) -> AttentionInputs:
    """Return the tensors of a paged call's configuration, with its cache, page table, sinks and mask."""
    inputs = _stored(build_attention(attention_case(of, ranges), device), of)
    mask: Mask = of.get("mask", Mask.NONE)
    if mask == Mask.NONE:
        return inputs
    shown = strictly_causal(inputs.case) if mask.shown is None else draft_masks(inputs.case)[mask.shown]
    return replace(inputs, shown=shown.to(device))


def redrawn_paged(
    case: AttentionCase, ranges: Ranges, device: torch.device, lens: Lens, seed: int = 0, moved: bool = False
) -> AttentionInputs:
    """Return the inputs of a case with other lengths, another seed and, if `moved`, other pages. They include a random mask,
    and sinks if the case has them or an MLA call may have them.
    """
    has_sinks = case.sinks or (case.is_mla and True in ranges.sinks)
    storage = replace(case.storage, page_seed=case.storage.page_seed + moved)
    drawn = replace(
        case, kv_lens=lens.kv_lens, q_lens=lens.q_lens, seed=case.seed + seed, sinks=has_sinks, storage=storage
    )
    return replace(build_attention(drawn, device), shown=random_mask(drawn).to(device))


def _stored(inputs: AttentionInputs, of: Chosen) -> AttentionInputs:
    """Return the inputs with the cache's strides, and the page table's contents and form, as a configuration says."""
    if of["pages"] == Pages.TWICE:
        inputs = _with_page_twice(inputs)
    form, case = of["cache"], inputs.case
    tokens, heads = (1, 2) if case.is_mla or case.storage.kv_layout == "NHD" else (2, 1)
    layouts: dict[Cache, Callable[[Tensor], Tensor]] = {
        Cache.PAGES_APART: lambda pages: apart(pages, 0, pages[0].numel()),
        Cache.TOKENS_APART: partial(apart, axis=tokens, gap=GAP),
        Cache.HEADS_APART: partial(apart, axis=heads, gap=GAP),
        Cache.PAGES_AN_ELEMENT_APART: partial(apart, axis=0, gap=1),
        Cache.TOKENS_AN_ELEMENT_APART: partial(apart, axis=tokens, gap=1),
        Cache.ODD_STRIDES: with_odd_strides,
        Cache.AT_16_BYTES: partial(at_bytes, offset_bytes=LEAST_ALIGNMENT_BYTES),
    }
    k_pages, v_pages = inputs.k_pages, inputs.v_pages
    if form in layouts:
        k_pages = layouts[form](k_pages)
        v_pages = k_pages if case.is_mla else layouts[form](v_pages)
    elif form == Cache.V_OTHERWISE:
        v_pages = layouts[Cache.PAGES_APART](v_pages)
    elif form == Cache.V_INSIDE:
        v_pages = apart(v_pages, 2, GAP)
    elif form == Cache.K_IS_V:
        v_pages = k_pages
        inputs = replace(inputs, histories=tuple((keys, keys) for keys, _ in inputs.histories))
    inputs = replace(inputs, k_pages=k_pages, v_pages=v_pages)
    return inputs.with_separate_tables() if of["block_tables"].is_separate else inputs


def _with_page_twice(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs in which the last page of each request repeats the page before it, if there is one, in the page table and
    in the histories.
    """
    size, block_tables = inputs.case.page_size, inputs.block_tables.clone()
    histories = list(inputs.histories)
    for request, kv_len in enumerate(inputs.case.kv_lens):
        last = (kv_len - 1) // size
        if last > 0:
            block_tables[request, last] = block_tables[request, last - 1]
            positions = torch.arange(kv_len, device=block_tables.device)
            positions[last * size :] -= size
            keys, values = (side[positions] for side in histories[request])
            histories[request] = keys, values
    return replace(inputs, block_tables=block_tables, histories=tuple(histories))


def _backend(call: BuiltCall) -> None:
    """Pass the backend's name if it is not "auto", and arguments that an engine passes in every call, such as
    the counter buffer.
    """
    case = call.inputs.case
    if call.forms.get("backend", "auto") != "auto":
        call.given["backend"] = call.forms["backend"]
        if call.inputs.scale_factors is not None:
            call.given |= call.inputs.scale_factor_arguments(interleaved=True)
    if call.forms.get("qk_nope_head_dim") == "a half":
        call.given["qk_nope_head_dim"] *= 2
    if call.forms.get("hints"):
        call.given |= _hints(call)
    # As the engine gives them in every call. They must not be changed after the call, like tensors that a kernel only reads.
    # One SM, because the counters of the engine's 8,192 requests are more than any GPU has SMs.
    call.given["multi_ctas_kv_counter_buffer"] = allocate_multi_ctas_kv_counters(
        len(case.q_lens), case.num_qo_heads, sm_count=1, device=call.device
    )


def _hints(call: BuiltCall) -> dict[str, Any]:
    """Return arguments that select other kernels with equal results."""
    if call.interface is AttentionCall.DECODE:
        return {"bf16q_fp8kv_transform_mode": "k_only"}
    is_var_seq = len(set(call.inputs.kv_lens)) > 1
    return {"is_var_seq": is_var_seq, "cute_dsl_impl": "modular", "kv_scale_format": "arbitrary_fp32"}


def _cache(call: BuiltCall) -> None:
    """Pass the cache as one tensor for K and V, or with four axes, if the configuration says so."""
    form, pages = call.forms["cache"], call.inputs.k_pages
    if form.is_one_tensor:
        whole = as_one_tensor(call.inputs)
        call.given["kv_cache"] = in_halves(whole) if form == Cache.HALVES else whole
        # A decode takes scale factors as a pair alone.
        if call.inputs.scale_factors is not None and call.interface is AttentionCall.CONTEXT:
            k, v = (each.view(torch.uint8) for each in call.given["kv_cache_sf"])
            call.given["kv_cache_sf"] = torch.stack((k, v), 1).view(E4M3)
    elif form in (Cache.K_IS_V, Cache.FOUR_AXES, Cache.FOUR_AXES_ODD_STRIDES):
        cache = pages.unsqueeze(1)
        call.given["kv_cache"] = with_odd_strides(cache) if form == Cache.FOUR_AXES_ODD_STRIDES else cache


def _tables(call: BuiltCall) -> None:
    form, tables = call.forms["block_tables"], call.given["block_tables"]
    if form in (Tables.ROWS_APART, Tables.SEPARATE_ROWS_APART):
        call.given["block_tables"] = apart(tables, -2, GAP + 1)
    elif form == Tables.AT_AN_ELEMENT:
        call.given["block_tables"] = at_bytes(tables, tables.element_size())


def _mask(call: BuiltCall) -> None:
    form = call.forms.get("mask", Mask.NONE)
    if form == Mask.BITS_AFTER:
        call.given["mask"] = with_bits_after(call.given["mask"].cpu()).to(call.device)
    elif form == Mask.AT_A_WORD:
        call.given["mask"] = at_bytes(call.given["mask"], call.given["mask"].element_size())


def _selection(call: BuiltCall) -> None:
    """Add rows of entries far outside the pool for the query's rows of padding, and pass
    `sparse_mla_top_k_lens` as a part of a larger tensor.
    """
    if not call.inputs.case.top_k:
        return
    padding = {"block_tables": FAR_ENTRY, "sparse_mla_top_k_lens": call.inputs.case.top_k}
    for name, value in padding.items() if call.forms["offsets"] in PADDED else ():
        if name in call.given:
            call.given[name] = padded(call.given[name], value)
    if call.forms["seq_lens"] == SeqLens.AMID_OTHERS and "sparse_mla_top_k_lens" in call.given:
        call.given["sparse_mla_top_k_lens"] = embedded(call.given["sparse_mla_top_k_lens"], call.inputs.case.top_k)


PAGED_FORMS: tuple[Callable[[BuiltCall], None], ...] = (_backend, _cache, _selection, _tables, _mask)
