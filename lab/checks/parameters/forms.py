"""The forms of arguments that all calls have: scales, sinks, an output and an LSE, as a configuration names them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun, Result
from lab.checks.parameters import paged_axes
from lab.checks.parameters.paged_axes import WHOLE_ONE
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.inputs.guards import embedded, guarded, same_bits, wrong_guards
from lab.workloads.inputs.views import LEAST_ALIGNMENT_BYTES

DTYPES = {"fp32": torch.float32, **paged_axes.DTYPES}  # fp32 of outputs alone
SCALE_SHAPES: dict[str, tuple[int, ...]] = {"tensor [1]": (1,), "tensor []": (), "tensor [1, 1]": (1, 1)}


def judge_call(run: CaseRun, call: BuiltCall[Any]) -> None:
    """Make a call once, and judge its results and all memory that it must not change."""
    before = {name: value.clone() for name, value in call.read.items()}
    result = run.call(call)
    out, lse = call.given.get("out"), call.given.get("lse")
    out = result.out if out is None else out.view(-1, *out.shape[-2:])
    lse = result.lse if lse is None else lse.view(-1, lse.shape[-1])
    if lse is not None and call.forms["lse"] == "base e":
        lse = lse / math.log(2.0)
    if lse is None and call.forms["lse"] != "none":
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
    form, scale, device = call.forms["bmm1_scale"], call.given["bmm1_scale"], call.device
    if form.startswith("log2"):  # which takes precedence over bmm1_scale
        of_call = call.rules["bmm1_scale"] = (-0.5 if "below 0" in form else 0.75) * scale
        shape = () if "[]" in form else (1,)
        call.given["bmm1_scale_log2"] = _tensor(of_call * math.log2(math.e), shape, device)
        call.given["bmm1_scale"] = _tensor(2.0, (1,), device) if "beside" in form else 2.0
    elif form != "number":
        _set_scale(call, "bmm1_scale", form, (-0.5 if "negative" in form else 0.75) * scale)
    form, scale = call.forms["bmm2_scale"], call.given["bmm2_scale"]
    if form == WHOLE_ONE:
        call.given["bmm2_scale"] = call.rules["bmm2_scale"] = 1
    elif form != "usual":
        # 0.9 is no sum of few powers of two: a scale that is rounded on its way shows.
        _set_scale(call, "bmm2_scale", form, (-0.5 if "negative" in form else 0.9) * scale)


def _set_scale(call: BuiltCall[Any], name: str, form: str, scale: float) -> None:
    """Give a scale a value, as the tensor that a form ends with, or else as a number."""
    call.rules[name] = scale
    shape = next((shape for words, shape in SCALE_SHAPES.items() if form.endswith(words)), None)
    device = call.device
    call.given[name] = scale if shape is None else _tensor(scale, shape, device)


def _tensor(value: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return one element of a larger tensor, as each layer has its own: NaN before it and after it."""
    return embedded(torch.full((1,), value, dtype=torch.float32, device=device), math.nan).view(shape)


def with_minus_infinity(sinks: Tensor) -> Tensor:
    """Return sinks with every second one minus infinity, which means no sink."""
    sinks = sinks.clone()
    sinks[::2] = -math.inf
    return sinks


def set_lengths(call: BuiltCall[Any], other: int) -> None:
    """Give `seq_lens` its form; `other` is the length on both sides of lengths that are a part of a larger tensor."""
    lengths, form = call.given["seq_lens"], call.forms["seq_lens"]
    if form == "uint32":
        call.given["seq_lens"] = lengths.to(torch.uint32)
    elif form == "amid others":
        call.given["seq_lens"] = embedded(lengths, other)


def set_out(call: BuiltCall[Any]) -> None:
    """Give the output's dtype, or a buffer of NaN for it; a view lies between guards."""
    kind, _, name = call.forms["out"].rpartition(" ")
    if call.forms["out"] == "none":
        return
    dtype = call.rules["out_dtype"] = DTYPES.get(name, call.inputs.out_dtype)
    if kind == "dtype":
        call.given["out_dtype"] = dtype
        return
    out = call.new_out(dtype)
    if call.forms["out"] == "a view":
        out, call.guards["out"] = guarded(out, LEAST_ALIGNMENT_BYTES)
    call.given["out"] = out


def set_lse(call: BuiltCall[Any]) -> None:
    """Request the LSE, and give a buffer of NaN for it where the form says so, between guards unless it has gaps."""
    form, query = call.forms["lse"], call.given["query"]
    if form == "none":
        return
    if form != "given alone":
        call.given["return_lse"] = True
    if form.startswith("given") or form in ("strided", "rows apart"):
        heads = query.shape[-2]
        shape = query.shape[:-1] if form == "given as the query" else (query.shape[:-2].numel(), heads)
        if form == "strided":
            # No stride is a multiple of the other, and the larger one is that of the heads.
            whole = torch.full((heads, 2 * shape[0] + 3), math.nan, device=query.device)
            lse, call.gaps["lse"] = whole[:, : 2 * shape[0] : 2].T, whole[:, 1::2]
        elif form == "rows apart":
            whole = torch.full((shape[0], heads + 4), math.nan, device=query.device)
            lse, call.gaps["lse"] = whole[:, :heads], whole[:, heads:]
        else:
            lse, call.guards["lse"] = guarded(torch.full(shape, math.nan, device=query.device), LEAST_ALIGNMENT_BYTES)
        call.given["lse"] = lse
