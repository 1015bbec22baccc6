"""Build the call that a configuration (a value for each parameter) describes, and judge its results.

The form of an argument is how it is passed: for example as a number or a tensor, with gaps, or with padding after it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters.call_cases import attention_case, ragged_case, rows_without_keys
from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.ragged import BELOW_ZERO
from lab.checks.parameters.values import (
    KV,
    Bound,
    Cache,
    Lse,
    Mask,
    Offsets,
    Output,
    Pages,
    RaggedPadding,
    SeqLens,
    Sinks,
    Tables,
    ValueScale,
)
from lab.metadata.mla.metadata import allocate_multi_ctas_kv_counters
from lab.ranges import Ranges
from lab.workloads.inputs.attention import AttentionInputs, as_one_tensor, build_attention
from lab.workloads.inputs.call import BuiltCall, CallInputs
from lab.workloads.inputs.guards import embedded, guarded, same_bits, wrong_guards
from lab.workloads.inputs.masks import draft_masks, strictly_causal, with_bits_after
from lab.workloads.inputs.ragged import RaggedInputs, build_ragged, joined, padded
from lab.workloads.inputs.views import (
    GAP,
    LEAST_ALIGNMENT_BYTES,
    Layout,
    apart,
    at_bytes,
    in_halves,
    raw,
    with_nan,
    with_odd_strides,
)

# Of logits below zero: e of each, and e of the difference of both, are beyond float32's ends, e**-103 and e**88.7.
HIGHEST, LOWEST = -110.0, -210.0
QUERY_COORDINATE = 16.0
# What each element of padding is, which no row may read.
PADDED_ROWS: dict[Any, float] = {
    **dict.fromkeys((Offsets.PADDED, RaggedPadding.ROWS, RaggedPadding.BOTH), 100.0),
    **dict.fromkeys((Offsets.PADDED_WITH_NAN, RaggedPadding.NAN), math.nan),
}
PADDED_KEYS: dict[Any, float] = {RaggedPadding.KEYS: 100.0, RaggedPadding.BOTH: 100.0, RaggedPadding.NAN: math.nan}


def judge_call(run: CaseRun) -> None:
    """Make the call of a run's configuration. Judge its results, and that it changed only outputs and scratch."""
    call = built_call(run.case, run.ranges, run.device)
    before = {name: value.clone() for name, value in call.read.items()}
    result = run.call(call)
    out, lse = call.given.get("out"), call.given.get("lse")
    out = result.out if out is None else out.view(-1, *out.shape[-2:])
    lse = result.lse if lse is None else lse.view(-1, lse.shape[-1])
    if lse is not None and call.forms["lse"] == Lse.BASE_E:
        lse = lse / math.log(2.0)
    if lse is None and call.forms["lse"] != Lse.NONE:
        run.wrong("return_lse=True returned no LSE")
    if rows := call.rows:
        run.expect_close("the call", Result(out[:rows], None if lse is None else lse[:rows], result.call), call.truth())
    run.judged += 1
    run.expect("what it returned", wrong_returns(call, result), kind="other")
    expected = call.rules.get("out_dtype", call.inputs.out_dtype)
    if result.out.dtype != expected:
        run.wrong(f"the output is {result.out.dtype}, not {expected}")
    run.expect_unchanged("the inputs", call.read, before)
    for name, around in call.guards.items():
        run.expect(f"around {name}", wrong_guards(name, around))
    for name, between in call.gaps.items():
        written = [f"{int((~between.isnan()).sum())} elements between those of {name} were written to"]
        run.expect(f"between elements of {name}", written if not bool(between.isnan().all()) else ())


def wrong_returns(call: BuiltCall, result: Result) -> Iterator[str]:
    """Yield a sentence for each error of the returned values: an LSE that was not requested, a wrong shape, or bits that differ
    from those in the caller's buffer.
    """
    if result.lse is not None and not call.given.get("return_lse"):
        yield "it returned an LSE without return_lse=True"
    heads = list(call.given["query"].shape[-2:-1])
    if list(result.out.shape[:-1]) != [call.given["query"].shape[:-2].numel(), *heads]:
        yield f"it returned an output of {list(result.out.shape)} for a query of {list(call.given['query'].shape)}"
    for name, returned in (("out", result.out), ("lse", result.lse)):
        given = call.given.get(name)
        if given is None or returned is None:
            continue
        given = given.view(-1, *given.shape[-2:]) if name == "out" else given.flatten(0, -2)
        if given.shape != returned.shape:
            yield f"the {name} that it returned is {list(returned.shape)}, not the given {list(given.shape)}"
        elif not same_bits(returned[: call.rows], given[: call.rows]):
            yield f"the {name} that it returned is not what it wrote into the given one"


def built_call(of: Configuration, ranges: Ranges, device: torch.device) -> BuiltCall:
    """Return the call that a configuration describes, with each argument in the form that the configuration gives it."""
    inputs = _inputs(of, ranges, device)
    if isinstance(inputs, RaggedInputs):
        call = BuiltCall(of, inputs, inputs.arguments(with_padding=False))
        forms: tuple[Callable[[BuiltCall], None], ...] = (_keys_and_values, _host_lengths)
    else:
        call = BuiltCall(of, inputs, inputs.arguments())
        forms = (_backend, _cache, _tables, _mask)
    for form in (*forms, _query, _lengths, _bounds, _scales, _sinks, _out, _lse):
        form(call)
    return call


def _inputs(of: Configuration, ranges: Ranges, device: torch.device) -> CallInputs:
    """Return what determines a configuration's expected results: tensors, scales, sinks, mask and causality."""
    changes: dict[str, Any] = {"factors": (of["bmm1_scale"].factor, of["bmm2_scale"].factor)}
    inputs: CallInputs
    if of.interface is AttentionCall.RAGGED_CONTEXT:
        inputs = build_ragged(ragged_case(of), device)
        inputs = _below_zero(inputs) if of["contents"] == BELOW_ZERO else inputs
        sinks = None if of["sinks"] == Sinks.NONE else torch.linspace(1.0, 4.0, inputs.query.shape[1], device=device)
    else:
        inputs = _stored(build_attention(attention_case(of, ranges), device), of)
        sinks, mask = inputs.sinks, of.get("mask", Mask.NONE)
        if mask != Mask.NONE:
            case = inputs.case
            shown = strictly_causal(case) if mask.shown is None else draft_masks(case)[mask.shown]
            changes["shown"] = shown.to(device)
    if of["sinks"] == Sinks.SOME_MINUS_INFINITY:  # which means no sink
        assert sinks is not None
        sinks = sinks.clone()
        sinks[::2] = -math.inf
    return replace(inputs, sinks=sinks, causal=of.get("causal", True), **changes)


def _below_zero(inputs: RaggedInputs) -> RaggedInputs:
    """Return the inputs with one coordinate of queries and keys replaced, so that all logits of a row lie between LOWEST and
    HIGHEST.
    """
    query, parts = inputs.query.float(), []
    query[..., 0] = QUERY_COORDINATE
    for keys, values in inputs.parts:
        steps = torch.linspace(HIGHEST, LOWEST, len(keys)).roll(len(keys) // 2)
        lowered = keys.float()
        lowered[..., 0] = (steps / (QUERY_COORDINATE * inputs.softmax_scale)).unsqueeze(1)
        parts.append((lowered.to(keys.dtype), values))
    return replace(inputs, query=query.to(inputs.query.dtype), parts=parts)


def _stored(inputs: AttentionInputs, of: Configuration) -> AttentionInputs:
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
            keys, values = (raw(side)[positions].view(side.dtype) for side in histories[request])
            histories[request] = keys, values
    return replace(inputs, block_tables=block_tables, histories=tuple(histories))


def _keys_and_values(call: BuiltCall) -> None:
    """Pass the keys and values of a ragged call in the layout that the axis "kv" names, with padding after them."""
    given, form, padding = call.given, call.forms["kv"], PADDED_KEYS.get(call.forms["padding"])
    key, value = (given[name] if padding is None else padded(given[name], padding) for name in ("key", "value"))
    if form == KV.ONE_TENSOR:
        key, value = joined((key, value), dim=-1).split((key.shape[-1], value.shape[-1]), dim=-1)
    elif form == KV.V_OF_A_PROJECTION:  # which has the keys' elements without position before the values
        without_position = key.shape[-1] // 2 // GAP * GAP
        value = joined((key[..., :without_position], value), dim=-1)[..., without_position:]
    elif form == KV.V_APART:
        value = Layout.TOKENS_APART.of(value)
    else:
        key, value = form.of(key), form.of(value)
    given |= {"key": key, "value": value}


def _host_lengths(call: BuiltCall) -> None:
    """Pass the lengths as CPU tensors too, if the configuration says so. Also pass `o_sf_scale` and
    `skip_all_rows_active_check`.
    """
    for name in ("o_sf_scale", "skip_all_rows_active_check"):
        call.given[name] = call.forms[name]
    if call.forms["mirrors"] != "none":
        dtype = getattr(torch, call.forms["mirrors"])
        call.given["q_seq_lens_cpu"] = torch.tensor(call.inputs.q_lens, dtype=dtype)
        call.given["kv_seq_lens_cpu"] = torch.tensor(call.inputs.kv_lens, dtype=dtype)


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
    # As the engine gives them in every call. They must not be changed after the call, like tensors that a kernel only reads.
    # One SM, because the counters of the engine's 8,192 requests are more than any GPU has SMs.
    call.given["multi_ctas_kv_counter_buffer"] = allocate_multi_ctas_kv_counters(
        len(case.q_lens), case.num_qo_heads, sm_count=1, device=call.device
    )


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


def _query(call: BuiltCall) -> None:
    """Pass the query in the layout that the axis "query" names, with padding after its rows. Rows of requests without keys are
    NaN.
    """
    query = with_nan(call.given["query"], rows_without_keys(call.inputs.q_lens, call.inputs.kv_lens))
    padding = PADDED_ROWS.get(call.forms.get("padding", call.forms["offsets"]))
    query = query if padding is None else padded(query, padding)
    call.given["query"] = call.forms["query"].of(query)


def _lengths(call: BuiltCall) -> None:
    """Pass `seq_lens` as uint32, or pass lengths and offsets as parts of larger tensors with wrong values around them, if the
    configuration says so.
    """
    lengths, form = call.given["seq_lens"], call.forms["seq_lens"]
    if form == SeqLens.UINT32:
        call.given["seq_lens"] = lengths.to(torch.uint32)
    elif form == SeqLens.AMID_OTHERS:
        call.given["seq_lens"] = embedded(lengths, call.given[call.inputs.kv_bound])
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            if (offsets := call.given.get(name)) is not None:
                call.given[name] = embedded(offsets, int(offsets[-1]) + 7)


def _bounds(call: BuiltCall) -> None:
    of, given, name = call.forms, call.given, call.inputs.kv_bound
    if of.get("bound") == Bound.EXACT:
        given[name] = max(*call.inputs.kv_lens, 1)
    elif of.get("bound") == Bound.FOUR_TIMES:
        given[name] *= 4
    for each in ("max_q_len", "max_kv_len"):
        if of.get(each) == Bound.LARGER:
            given[each] = 2 * given[each] + (call.interface is AttentionCall.RAGGED_CONTEXT)
        elif of.get(each) == Bound.NONE:
            given[each] = None


def _scales(call: BuiltCall) -> None:
    """Pass both scales as the configuration says: as numbers, as tensors, or in `bmm1_scale_log2`."""
    form, scale = call.forms["bmm1_scale"], call.given["bmm1_scale"]
    if form.is_log2:  # which takes precedence over bmm1_scale
        call.given["bmm1_scale_log2"] = _scale(call, scale * math.log2(math.e), form.shape)
        call.given["bmm1_scale"] = _scale(call, 2.0, (1,) if form.is_beside else None)
    else:
        call.given["bmm1_scale"] = _scale(call, scale, form.shape)
    if call.forms["bmm2_scale"] == ValueScale.WHOLE_ONE:
        call.given["bmm2_scale"] = call.rules["bmm2_scale"] = 1
    else:
        call.given["bmm2_scale"] = _scale(call, call.given["bmm2_scale"], call.forms["bmm2_scale"].shape)


def _scale(call: BuiltCall, value: float, shape: tuple[int, ...] | None) -> Tensor | float:
    """Return a scale as a number, or as one element of a larger tensor of NaN, as if a model had one scale per layer in a
    tensor.
    """
    if shape is None:
        return value
    return embedded(torch.full((1,), value, dtype=torch.float32, device=call.device), math.nan).view(shape)


def _sinks(call: BuiltCall) -> None:
    if (sinks := call.inputs.sinks) is not None:
        forms = {Sinks.LIST: [sinks], Sinks.TUPLE: (sinks,), Sinks.A_PART: embedded(sinks, math.nan)}
        name = "attention_sinks" if call.interface is AttentionCall.RAGGED_CONTEXT else "sinks"
        call.given[name] = forms.get(call.forms["sinks"], sinks)


def _out(call: BuiltCall) -> None:
    """Pass `out_dtype`, or a buffer of NaN as `out`, or neither. If the buffer is a view, the memory around it must stay
    unchanged.
    """
    form: Output = call.forms["out"]
    if form == Output.NONE:
        return
    dtype = call.rules["out_dtype"] = form.dtype or call.inputs.out_dtype
    if not form.is_given:
        call.given["out_dtype"] = dtype
        return
    out = call.new_out(dtype)
    if form == Output.VIEW:
        out, call.guards["out"] = guarded(out, LEAST_ALIGNMENT_BYTES)
    call.given["out"] = out


def _lse(call: BuiltCall) -> None:
    """Request the LSE, and pass a buffer of NaN for it, if the configuration says so. The memory around the buffer, and gaps in
    it, must stay unchanged.
    """
    form: Lse = call.forms["lse"]
    query = call.given["query"]
    if form == Lse.NONE:
        return
    if form != Lse.ALONE:
        call.given["return_lse"] = True
    if call.interface is AttentionCall.MLA_DECODE and (form == Lse.BASE_E or call.inputs.case.offsets):
        call.given["return_lse_base"] = "basee" if form == Lse.BASE_E else "base2"
    if form.is_given:
        heads = query.shape[-2]
        shape = query.shape[:-1] if form == Lse.AS_THE_QUERY else (query.shape[:-2].numel(), heads)
        if form == Lse.STRIDED:
            # No stride is a multiple of the other, and the larger one is that of the heads.
            whole = torch.full((heads, 2 * shape[0] + 3), math.nan, device=query.device)
            lse, call.gaps["lse"] = whole[:, : 2 * shape[0] : 2].T, whole[:, 1::2]
        elif form == Lse.ROWS_APART:
            whole = torch.full((shape[0], heads + 4), math.nan, device=query.device)
            lse, call.gaps["lse"] = whole[:, :heads], whole[:, heads:]
        else:
            lse, call.guards["lse"] = guarded(torch.full(shape, math.nan, device=query.device), LEAST_ALIGNMENT_BYTES)
        call.given["lse"] = lse
