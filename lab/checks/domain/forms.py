"""The forms of arguments that all calls have: scales, sinks, an output and an LSE, as a combination names them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.checks.catalogue.k05_guards import amid, guarded
from lab.checks.domain.combination import Combination
from lab.checks.refusals import bytes_of
from lab.checks.trial import Result

LEAST_ALIGNMENT_BYTES = 16
SCALE_SHAPES: dict[str, tuple[int, ...]] = {"tensor [1]": (1,), "tensor []": (), "tensor [1, 1]": (1, 1)}


def wrong_returns(call: "FormedCall", result: Result, rows: int) -> Iterator[str]:
    """Yield a sentence for each thing that a call returned and should not have: not what it wrote, or an LSE unasked.

    Args:
        call: that was made.
        result: what it returned.
        rows: of its requests; padding follows them.
    """
    if result.lse is not None and not call.arguments.get("return_lse"):
        yield "it returned an LSE without return_lse=True"
    heads = list(call.arguments["query"].shape[-2:-1])
    if list(result.out.shape[:-1]) != [call.arguments["query"].shape[:-2].numel(), *heads]:
        yield f"it returned an output of {list(result.out.shape)} for a query of {list(call.arguments['query'].shape)}"
    for name, returned in (("out", result.out), ("lse", result.lse)):
        given = call.arguments.get(name)
        if given is None or returned is None:
            continue
        given = given.view(-1, *given.shape[-2:]) if name == "out" else given.flatten(0, -2)
        if given.shape != returned.shape:
            yield f"the {name} that it returned is {list(returned.shape)}, not the given {list(given.shape)}"
        elif not torch.equal(bytes_of(returned[:rows]), bytes_of(given[:rows])):
            yield f"the {name} that it returned is not what it wrote into the given one"


@dataclass(eq=False)
class FormedCall:
    """A call in the making.

    Attributes:
        of: the combination.
        arguments: by name.
        rules: fields of `lab.references.truth.Rules` that differ from the inputs' own.
        guards: names of buffers that were handed out, and all memory around each (`guarded`).
    """

    of: Combination
    arguments: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    guards: dict[str, Tensor] = field(default_factory=dict)


def set_scales(call: FormedCall) -> None:
    """Give both scales their forms, other values with them: a scale that is not read shows."""
    form, scale, device = call.of["bmm1_scale"], call.arguments["bmm1_scale"], call.arguments["query"].device
    if form == "negative":
        call.arguments["bmm1_scale"] = call.rules["bmm1_scale"] = -0.5 * scale
    elif form != "number":
        call.rules["bmm1_scale"] = 0.75 * scale
        if form.startswith("log2"):  # which takes precedence over what stands beside it
            shape = (1,) if "[1]" in form else ()
            call.arguments["bmm1_scale_log2"] = _tensor(0.75 * scale * math.log2(math.e), shape, device)
            call.arguments["bmm1_scale"] = _tensor(2.0, (1,), device) if "beside" in form else 2.0
        else:
            call.arguments["bmm1_scale"] = _tensor(0.75 * scale, SCALE_SHAPES[form], device)
    form = call.of["bmm2_scale"].removeprefix("0.9 as a ")
    if form != "usual":
        # 0.9 is no sum of few powers of two: a scale that is rounded on its way shows.
        scale = call.rules["bmm2_scale"] = 0.9 * call.arguments["bmm2_scale"]
        call.arguments["bmm2_scale"] = _tensor(scale, SCALE_SHAPES[form], device) if form in SCALE_SHAPES else scale


def _tensor(value: float, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.full(shape, value, dtype=torch.float32, device=device)


def with_minus_infinity(sinks: Tensor) -> Tensor:
    """Return sinks of which every other one is minus infinity, as none is."""
    sinks = sinks.clone()
    sinks[::2] = -math.inf
    return sinks


def set_lengths(call: FormedCall, other: int) -> None:
    """Give `seq_lens` its form; `other` is the length on both sides of lengths that are a part of a larger tensor."""
    lengths, form = call.arguments["seq_lens"], call.of["seq_lens"]
    if form == "uint32":
        call.arguments["seq_lens"] = lengths.to(torch.uint32)
    elif form == "amid others":
        call.arguments["seq_lens"] = amid(lengths, other)


def set_out(call: FormedCall, v_head_dim: int, dtype: torch.dtype) -> None:
    """Hand out a buffer of NaN for the output, amid guards for a view."""
    query = call.arguments["query"]
    out = torch.full((*query.shape[:-1], v_head_dim), math.nan, device=query.device).to(dtype)
    if call.of["out"] == "a view":
        out, call.guards["out"] = guarded(out, LEAST_ALIGNMENT_BYTES)
    call.arguments["out"] = out


def set_lse(call: FormedCall) -> None:
    """Ask for the LSE, and hand out a buffer of NaN for it where the form says so, amid guards unless it has gaps."""
    form, query = call.of["lse"], call.arguments["query"]
    if form == "none":
        return
    if form != "given alone":
        call.arguments["return_lse"] = True
    if form.startswith("given") or form == "strided":
        heads = query.shape[-2]
        shape = query.shape[:-1] if form == "given as the query" else (query.shape[:-2].numel(), heads)
        if form == "strided":
            lse = torch.full((shape[0], 2 * heads), math.nan, device=query.device)[:, ::2]
        else:
            lse, call.guards["lse"] = guarded(torch.full(shape, math.nan, device=query.device), LEAST_ALIGNMENT_BYTES)
        call.arguments["lse"] = lse
