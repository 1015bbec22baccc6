"""The forms of arguments that all calls have: scales, sinks, an output and an LSE, as a configuration names them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters.values import LogitScale, Lse, Output, SeqLens, ValueScale
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.guards import embedded, guarded, same_bits, wrong_guards
from lab.workloads.inputs.views import LEAST_ALIGNMENT_BYTES


def judge_call(run: CaseRun, call: BuiltCall[Any]) -> None:
    """Make a call once, and judge its results and all memory that it must not change."""
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


def wrong_returns(call: BuiltCall[Any], result: Result) -> Iterator[str]:
    """Yield a sentence for each wrong return value: an LSE that was not requested, another shape, other bits than it wrote."""
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


def set_scales(call: BuiltCall[Any]) -> None:
    """Give both scales their forms, other values with them: a scale that is not read shows."""
    form: LogitScale = call.forms["bmm1_scale"]
    if form.is_log2:  # which takes precedence over bmm1_scale
        scale = call.rules["bmm1_scale"] = form.factor * call.given["bmm1_scale"]
        call.given["bmm1_scale_log2"] = _scale(call, scale * math.log2(math.e), form.shape)
        call.given["bmm1_scale"] = _scale(call, 2.0, (1,) if form.is_beside else None)
    elif form != LogitScale.NUMBER:
        _set_scale(call, "bmm1_scale", form)
    if call.forms["bmm2_scale"] == ValueScale.WHOLE_ONE:
        call.given["bmm2_scale"] = call.rules["bmm2_scale"] = 1
    elif call.forms["bmm2_scale"] != ValueScale.USUAL:
        _set_scale(call, "bmm2_scale", call.forms["bmm2_scale"])


def _set_scale(call: BuiltCall[Any], name: str, form: LogitScale | ValueScale) -> None:
    """Give a scale the value of its form, as a tensor or as a number."""
    scale = call.rules[name] = form.factor * call.given[name]
    call.given[name] = _scale(call, scale, form.shape)


def _scale(call: BuiltCall[Any], value: float, shape: tuple[int, ...] | None) -> Tensor | float:
    """Return a number, or one element of a larger tensor, as each layer has its own: NaN before it and after it."""
    if shape is None:
        return value
    return embedded(torch.full((1,), value, dtype=torch.float32, device=call.device), math.nan).view(shape)


def with_minus_infinity(sinks: Tensor) -> Tensor:
    """Return sinks with every second one minus infinity, which means no sink."""
    sinks = sinks.clone()
    sinks[::2] = -math.inf
    return sinks


def set_lengths(call: BuiltCall[Any], other: int) -> None:
    """Give `seq_lens` its form; `other` is the length on both sides of lengths that are a part of a larger tensor."""
    lengths, form = call.given["seq_lens"], call.forms["seq_lens"]
    if form == SeqLens.UINT32:
        call.given["seq_lens"] = lengths.to(torch.uint32)
    elif form == SeqLens.AMID_OTHERS:
        call.given["seq_lens"] = embedded(lengths, other)


def set_out(call: BuiltCall[Any]) -> None:
    """Give the output's dtype, or a buffer of NaN for it; a view lies between guards."""
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


def set_lse(call: BuiltCall[Any]) -> None:
    """Request the LSE, and give a buffer of NaN for it where the form says so, between guards unless it has gaps."""
    form: Lse = call.forms["lse"]
    query = call.given["query"]
    if form == Lse.NONE:
        return
    if form != Lse.ALONE:
        call.given["return_lse"] = True
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
