"""Build the attention call that a `Configuration` describes, and judge its results and what it wrote."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lab.calls import CALL_TYPES
from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters.models import FAMILIES, Configuration
from lab.checks.parameters.paged_axes import NEAR, USUAL
from lab.checks.parameters.values import (
    Bound,
    KeyOffsets,
    Lse,
    Offsets,
    Output,
    RaggedPadding,
    SeqLens,
    Sinks,
    ValueScale,
)
from lab.checks.run.verdicts import RETURNED
from lab.metadata.engine.lengths import exclusive_cumsum, num_pages
from lab.ranges import Ranges
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.contents import unwritten
from lab.workloads.inputs.guards import embedded, guarded, same_bits, wrong_guards
from lab.workloads.inputs.ragged import padded
from lab.workloads.inputs.views import LEAST_ALIGNMENT_BYTES, Layout, with_nan

# The value of each element of padding rows, by the form of the offsets or of the padding.
PADDED_ROWS: dict[Any, float] = {
    **dict.fromkeys((Offsets.PADDED, RaggedPadding.ROWS, RaggedPadding.BOTH), 100.0),
    **dict.fromkeys((Offsets.PADDED_WITH_NAN, RaggedPadding.NAN), math.nan),
}
LONGEST_OF_A_MODEL = 2**18  # keys
# What lies in front of a scale or of sinks that are a part of a larger tensor: what a kernel reads that ignores the offset of
# the tensor. It is not NaN, because a kernel may refuse NaN.
OTHER_SCALE, OTHER_SINK = -3.0, 9.0


def judge_call(run: CaseRun) -> None:
    judge_built(run, built_call(run.case, run.ranges, run.device))


def judge_built(run: CaseRun, call: BuiltCall) -> None:
    """Make a call, and judge its output and LSE. Record an error if it changed an input, or memory around its output or LSE."""
    before = {name: value.clone() for name, value in call.read.items()}
    result = run.call(call)
    out, lse = call.given.get("out"), call.given.get("lse")
    out = result.out if out is None else out.view(-1, *out.shape[-2:])
    lse = result.lse if lse is None else lse.view(-1, lse.shape[-1])
    form = call.forms.get("lse", Lse.NONE)
    if lse is not None and form == Lse.BASE_E:
        lse = lse / math.log(2.0)
    if lse is None and form != Lse.NONE:
        run.wrong("return_lse=True returned no LSE")
    if rows := call.rows:
        run.expect_close("the call", Result(out[:rows], None if lse is None else lse[:rows], result.call), call.truth())
    run.judged += 1
    run.expect(RETURNED, wrong_returns(call, result), kind="other")
    expected = call.rules.get("out_dtype", call.inputs.out_dtype)
    if result.out.dtype != expected:
        run.wrong(f"the output is {result.out.dtype}, not {expected}")
    run.expect_unchanged(call.read, before)
    for name, around in call.guards.items():
        run.expect(f"around {name}", wrong_guards(name, around))
    for name, between in call.gaps.items():
        written = [f"{int((~between.isnan()).sum())} elements between those of {name} were written to"]
        run.expect(f"between elements of {name}", written if not bool(between.isnan().all()) else ())


def wrong_returns(call: BuiltCall, result: Result) -> Iterator[str]:
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


def built_call(of: Configuration, ranges: Ranges, device: torch.device, in_reverse: bool = False) -> BuiltCall:
    family = FAMILIES[AttentionCall(of.interface)]
    inputs = family.inputs(of, ranges, device)
    if in_reverse:
        inputs = inputs.in_reverse()
    sinks = inputs.sinks
    if of["sinks"] == Sinks.SOME_MINUS_INFINITY:  # which means no sink
        sinks = sinks.clone()
        sinks[::2] = -math.inf
    factors = of["bmm1_scale"].factor, of["bmm2_scale"].factor
    inputs = replace(inputs, sinks=sinks, causal=of.get("causal", True), factors=factors)
    if (factor := of["bmm1_scale"].query_factor) != 1.0:
        inputs = replace(inputs, query=inputs.query * factor)
    call = BuiltCall(of, inputs, inputs.arguments())
    forms = (_plain_values, family.set_forms, _query, _lengths, _bounds, _scales, _sinks, _out, _lse, _far)
    for form in forms:
        form(call)
    return call


def _plain_values(call: BuiltCall) -> None:
    for name, argument in CALL_TYPES[call.interface].__dataclass_fields__.items():
        value = call.forms.get(name, argument.default)
        if (value is None or isinstance(value, int | float)) and value != argument.default:
            call.given[name] = value


def _query(call: BuiltCall) -> None:
    # Rows of requests without keys are NaN. The expected result is made after the call, so the kernel gets a copy of the query.
    without, query = torch.tensor([kv_len == 0 for kv_len in call.inputs.kv_lens]), call.given["query"]
    if bool(without.any()):
        query = with_nan(query, without.repeat_interleave(torch.tensor(call.inputs.q_lens)))
    else:  # int8 has no NaN
        query = query.clone()
    padding = PADDED_ROWS.get(call.forms.get("padding", call.forms["offsets"]))
    query = query if padding is None else padded(query, padding)
    call.given["query"] = call.forms["query"].of(query)


def _lengths(call: BuiltCall) -> None:
    lengths, form = call.given["seq_lens"], call.forms.get("seq_lens")
    if call.forms.get("key_offsets") == KeyOffsets.PAGES:
        call.given["cum_seq_lens_kv"] = exclusive_cumsum(num_pages(lengths, call.inputs.case.page_size))
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
        given[name] = max(int(call.inputs.seq_lens.max()), 1)
    elif of.get("bound") == Bound.FOUR_TIMES:
        given[name] *= 4
    elif of.get("bound", of.get("max_kv_len")) == Bound.OF_A_MODEL:
        given[name] = LONGEST_OF_A_MODEL
    for each in ("max_q_len", "max_kv_len"):
        if of.get(each) == Bound.LARGER:
            given[each] = 2 * given[each] + 1
        elif of.get(each) == Bound.NONE:
            given[each] = None


def _scales(call: BuiltCall) -> None:
    for name in ("bmm1_scale", "bmm2_scale"):
        if (size := call.forms[name.replace("scale", "size")]) != USUAL:
            call.given[name] = call.rules[name] = math.copysign(size, call.given[name])
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
    if (factor := call.forms.get("skip_softmax")) is not None:
        call.given["skip_softmax_threshold_scale_factor"] = call.rules["skip_softmax"] = factor


def _scale(call: BuiltCall, value: float, shape: tuple[int, ...] | None) -> Tensor | float:
    if shape is None:
        return value
    return embedded(torch.tensor([value], dtype=torch.float32, device=call.device), math.nan, before=OTHER_SCALE).view(
        shape
    )


def _sinks(call: BuiltCall) -> None:
    if (sinks := call.inputs.sinks) is not None:
        forms = {Sinks.LIST: [sinks], Sinks.TUPLE: (sinks,), Sinks.A_PART: embedded(sinks, math.nan, before=OTHER_SINK)}
        name = "sinks" if "sinks" in call.given else "attention_sinks"
        call.given[name] = forms.get(call.forms["sinks"], sinks)


def _out(call: BuiltCall) -> None:
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
    form: Lse = call.forms.get("lse", Lse.NONE)
    query = call.given["query"]
    if form == Lse.NONE:
        return
    if form != Lse.ALONE:
        call.given["return_lse"] = True
    needs_base = call.interface is AttentionCall.MLA_DECODE and call.inputs.case.offsets
    if form == Lse.BASE_E or needs_base:
        call.given["return_lse_base"] = "basee" if form == Lse.BASE_E else "base2"
    if form.is_given:
        heads = query.shape[-2]
        shape = query.shape[:-1] if form == Lse.AS_THE_QUERY else (query.shape[:-2].numel(), heads)
        if form == Lse.STRIDED:
            # Neither stride is a multiple of the other stride, and the stride of the heads is the larger one.
            whole = torch.full((heads, 2 * shape[0] + 3), math.nan, device=query.device)
            lse, call.gaps["lse"] = unwritten(whole[:, : 2 * shape[0] : 2].T), whole[:, 1::2]
        elif form == Lse.ROWS_APART:
            whole = torch.full((shape[0], heads + 4), math.nan, device=query.device)
            lse, call.gaps["lse"] = unwritten(whole[:, :heads]), whole[:, heads:]
        else:
            lse = unwritten(torch.empty(shape, device=query.device))
            lse, call.guards["lse"] = guarded(lse, LEAST_ALIGNMENT_BYTES)
        call.given["lse"] = lse


def _far(call: BuiltCall) -> None:
    if (name := call.forms.get("far", NEAR)) != NEAR:
        call.given[name] = Layout.FAR_APART.of(call.given[name])
        call.guards.pop(name, None)
