"""Build calls with optional arguments, such as scales as tensors, and change their contents for replays of a CUDA graph."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.named_enum import NamedEnum
from lab.references.errors import Truth
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.contents import unwritten
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.ragged import RaggedInputs

WRITTEN = ("out", "lse", "workspace_buffer")  # arguments that a call writes
SCALES = (0.75, 0.9)  # factors by which `rewritten` changes bmm1_scale and bmm2_scale

CallInputs = AttentionInputs | RaggedInputs


@dataclass(eq=False)
class BuiltCall:
    """A call that is ready to be made: its arguments, and what is needed to compute and check its results."""

    forms: Any  # the optional arguments of the call: `Forms`, or a `Configuration`
    inputs: Any  # one of `CallInputs`
    given: dict[str, Any] = field(default_factory=dict)  # the arguments by name
    # Fields of `Rules` by which the expected result differs from the expected result of the inputs
    rules: dict[str, Any] = field(default_factory=dict)
    guards: dict[str, Tensor] = field(default_factory=dict)  # name of a `guarded` buffer -> memory with both guards
    gaps: dict[str, Tensor] = field(default_factory=dict)  # name of a buffer with gaps -> the NaN elements in its gaps

    @property
    def interface(self) -> AttentionCall:
        return self.inputs.interface

    @property
    def device(self) -> torch.device:
        return self.inputs.query.device

    @property
    def rows(self) -> int:
        return sum(self.inputs.q_lens)

    @property
    def read(self) -> dict[str, Tensor]:
        """Return the tensor arguments that the kernel must not change, by name."""
        found: dict[str, Tensor] = {}
        for name, value in self.given.items():
            parts = value if isinstance(value, tuple | list) else (value,)
            for number, part in enumerate(() if name in WRITTEN else parts):
                if isinstance(part, Tensor):
                    found[name if len(parts) == 1 else f"{name}[{number}]"] = part
        return found

    def arguments(self) -> dict[str, Any]:
        return self.given

    def share(self, other: "BuiltCall") -> None:
        """Use the workspace of `other`, and each tensor of `other` that equals this call's tensor of the same name."""
        for name, value in self.given.items():
            mine, others = (each if isinstance(each, tuple) else (each,) for each in (value, other.given.get(name)))
            alike = name not in WRITTEN and len(mine) == len(others) and all(map(_alike, mine, others))
            self.given[name] = other.given[name] if alike or name == "workspace_buffer" else value

    def truth(self) -> Truth:
        return self.inputs.truth(**self.rules)

    def new_out(self, dtype: torch.dtype | None = None) -> Tensor:
        query = self.given["query"]
        shape = (*query.shape[:-1], self.inputs.out_head_dim)
        return unwritten(torch.empty(shape, dtype=dtype or self.inputs.out_dtype, device=query.device))


def _alike(value: Any, other: Any) -> bool:
    if not (isinstance(value, Tensor) and isinstance(other, Tensor) and value.dtype == other.dtype):
        return False
    places = [(each.stride(), each.storage_offset()) for each in (value, other)]
    return places[0] == places[1] and same_bits(value, other)


class Form(NamedEnum):
    """An optional argument or result of a call. A member's text is its name in reports."""

    BMM1 = "bmm1_scale as a tensor"
    BMM1_LOG2 = "bmm1_scale_log2"
    BMM2 = "bmm2_scale as a tensor"
    SINKS = "sinks"
    MASK = "a draft mask"
    OUT = "an output handed out"
    LSE = "the LSE"
    PDL = "enable_pdl=True"
    TABLES = "a page table of V's own"
    NO_BOUND = "no max_q_len"  # the call then reads the offsets on the host, so it is not captured


Forms = frozenset[Form]


def in_forms(inputs: CallInputs, forms: Forms) -> BuiltCall:
    """Return a call with the optional arguments and results in `forms`. Without Form.SINKS, sinks of `inputs` are left out."""
    fields_of = {Form.SINKS: "sinks", Form.MASK: "shown"}
    without: dict[str, Any] = {name: None for form, name in fields_of.items() if form not in forms}
    inputs = replace(inputs, **without)
    if isinstance(inputs, AttentionInputs) and Form.TABLES in forms:
        arguments = inputs.with_separate_tables().arguments()
    else:
        arguments = inputs.arguments()
    call = BuiltCall(forms, inputs, arguments)
    on_device = functools.partial(torch.tensor, dtype=torch.float32, device=call.device)
    scales = {name: on_device([arguments[name]]) for name in ("bmm1_scale", "bmm2_scale")}
    in_form: dict[Form, tuple[str, Any]] = {
        Form.BMM1: ("bmm1_scale", scales["bmm1_scale"]),
        Form.BMM1_LOG2: ("bmm1_scale_log2", scales["bmm1_scale"] * math.log2(math.e)),
        Form.BMM2: ("bmm2_scale", scales["bmm2_scale"]),
        Form.OUT: ("out", call.new_out() if Form.OUT in forms else None),
        Form.LSE: ("return_lse", True),
        Form.PDL: ("enable_pdl", True),
        Form.NO_BOUND: ("max_q_len", None),
    }
    arguments |= dict(in_form[form] for form in in_form if form in forms)
    return call


def random_mask(case: AttentionCase) -> Tensor:
    """Draw a mask over the draft tokens of each request, bool [batch_size, q_len, q_len]. Each token sees itself."""
    q_len = max(case.q_lens)
    drawn = torch.rand(len(case.q_lens), q_len, q_len, generator=torch.Generator().manual_seed(case.seed)) < 0.6
    return drawn | torch.eye(q_len, dtype=torch.bool)


def rewritten(call: BuiltCall, other: BuiltCall, moved: BuiltCall) -> Iterator[tuple[str, BuiltCall]]:
    """Yield (what changed, changed call) after each step that changes tensors of a call, such as ("the query", call). Changes
    of earlier steps stay. A check runs the changed calls by one CUDA graph or prepared call, which must read the new contents.

    1. Scales in tensors get new values, one scale in each step.
    2. Sinks, mask and query become those of `other`, one argument in each step, and then K and V (with the selected entries).
    3. K, V and the page table become those of `moved`, which may use other pages than `call`.

    Optional arguments that `call` lacks have no step. All three calls have the same lengths and `forms`.
    """
    inputs, forms = call.inputs, call.forms
    if forms & {Form.BMM1, Form.BMM1_LOG2}:
        inputs = replace(inputs, factors=(SCALES[0], 1.0))
        yield "bmm1_scale", in_forms(inputs, forms)
    if Form.BMM2 in forms:
        inputs = replace(inputs, factors=(inputs.factors[0], SCALES[1]))
        yield "bmm2_scale", in_forms(inputs, forms)
    for form, name, what in ((Form.SINKS, "sinks", "the sinks"), (Form.MASK, "shown", "the mask")):
        if form in forms:
            inputs = replace(inputs, **{name: getattr(other.inputs, name)})
            yield what, in_forms(inputs, forms)
    inputs = replace(inputs, query=other.inputs.query)
    yield "the query", in_forms(inputs, forms)
    kept = {name: getattr(inputs, name) for name in ("query", "sinks", "shown", "factors")}
    has_pages = isinstance(inputs, AttentionInputs)
    selects = has_pages and inputs.selected is not None
    contents = "K, V and the selected entries" if selects else "K and V"
    yield contents, in_forms(replace(other.inputs, **kept), forms)
    yield ("K, V and the page table" if has_pages else "K and V again", in_forms(replace(moved.inputs, **kept), forms))
