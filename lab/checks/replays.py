"""A call whose tensors stay and whose contents change, as a serving engine replays it in a CUDA graph."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from lab.checks.case_run import CallForm, CaseRun, GivenCall, Result, Then, as_result
from lab.checks.run.support_protocol import KernelError, Unsupported
from lab.metadata.engine.capture import capturing
from lab.named_enum import NamedEnum
from lab.references.truth import Truth
from lab.workloads.inputs.attention import AttentionInputs, truth_of_call
from lab.workloads.inputs.masks import packed_mask
from lab.workloads.inputs.ragged import Parts, draw_ragged, ragged_arguments, truth_of_ragged
from lab.workloads.interfaces import Interface
from lab.workloads.ragged_case import RaggedCase

KEPT = ("workspace_buffer", "out")  # arguments that nobody loads
SCALES = (0.75, 0.9)  # factors of bmm1_scale and bmm2_scale in a batch of other scales


class Form(NamedEnum):
    """A form of a call with one thing more that a replay finds changed on the device, or must write there."""

    BMM1 = "bmm1_scale as a tensor"
    BMM1_LOG2 = "bmm1_scale_log2"
    BMM2 = "bmm2_scale as a tensor"
    SINKS = "sinks"
    MASK = "a draft mask"
    OUT = "an output handed out"
    LSE = "the LSE"
    PDL = "enable_pdl=True"
    TABLES = "a page table of V's own"
    NO_BOUND = "no max_q_len"  # which reads the offsets on the host, and so is not captured


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplayedBatch:
    """The contents of a replayed call's tensors. A subclass for each kind of call.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim].
        sinks: float32 [num_qo_heads], where SINKS is a form.
        shown: bool [batch_size, q_len, q_len], of the draft mask where MASK is one.
        forms: of the call.
        factors: of bmm1_scale and bmm2_scale; 1 where they are numbers.
    """

    query: Tensor
    sinks: Tensor | None
    shown: Tensor | None = None
    forms: frozenset[Form] = frozenset()
    factors: tuple[float, float] = (1.0, 1.0)

    name_of_sinks = "sinks"  # the argument's
    name_of_moved = "K, V and the page table"

    @property
    def interface(self) -> Interface:
        raise NotImplementedError

    @property
    def q_lens(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def kv_bound(self) -> dict[str, int]:
        """Return the argument that bounds the keys of a request, as close as it can be."""
        raise NotImplementedError

    def rules(self) -> dict[str, Any]:
        """Return the fields of `Rules` that the batch says."""
        bmm1, bmm2 = self.scales()
        rules = {"bmm1_scale": bmm1 * self.factors[0], "bmm2_scale": bmm2 * self.factors[1]}
        return rules | {
            "sinks": self.sinks if Form.SINKS in self.forms else None,
            "shown": self.shown if Form.MASK in self.forms else None,
        }

    def arguments(self) -> dict[str, Any]:
        """Return the call's arguments in its forms, in tensors of their own."""
        given, rules = self.plain_arguments(), self.rules()
        device = self.query.device
        bmm1, bmm2 = (
            torch.tensor([rules[name]], dtype=torch.float32, device=device) for name in ("bmm1_scale", "bmm2_scale")
        )
        in_forms: dict[Form, tuple[str, Callable[[], Any]]] = {
            Form.BMM1: ("bmm1_scale", lambda: bmm1),
            Form.BMM1_LOG2: ("bmm1_scale_log2", lambda: bmm1 * math.log2(math.e)),
            Form.BMM2: ("bmm2_scale", lambda: bmm2),
            Form.SINKS: (self.name_of_sinks, lambda: rules["sinks"].clone()),
            Form.MASK: ("mask", lambda: packed_mask(rules["shown"].cpu()).to(device)),
            Form.OUT: ("out", lambda: self.out_for(given["query"])),
            Form.LSE: ("return_lse", lambda: True),
            Form.PDL: ("enable_pdl", lambda: True),
            Form.NO_BOUND: ("max_q_len", lambda: None),
        }
        return given | {name: made() for form, (name, made) in in_forms.items() if form in self.forms}

    def with_contents_of(self, other: Self) -> Self:
        """Return the batch with the keys and values of another of its lengths."""
        raise NotImplementedError

    def scales(self) -> tuple[float, float]:
        """Return bmm1_scale and bmm2_scale before their factors."""
        raise NotImplementedError

    def plain_arguments(self) -> dict[str, Any]:
        """Return the arguments without any form."""
        raise NotImplementedError

    def out_for(self, query: Tensor) -> Tensor:
        """Return an output of NaN for the call's query."""
        raise NotImplementedError

    def truth(self) -> Truth:
        """Return what a replay over this batch must give."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedBatch(ReplayedBatch):
    """The contents of a paged call: those of `inputs`, but for the query and the sinks."""

    inputs: AttentionInputs

    @property
    def interface(self) -> Interface:
        return self.inputs.case.interface

    @property
    def q_lens(self) -> tuple[int, ...]:
        return self.inputs.case.q_lens

    @property
    def kv_bound(self) -> dict[str, int]:
        name = "max_kv_len" if self.interface is Interface.CONTEXT else "max_seq_len"
        return {name: max(*self.inputs.case.kv_lens, 1)}

    def _inputs(self) -> AttentionInputs:
        return replace(self.inputs, query=self.query, sinks=None)

    def with_contents_of(self, other: Self) -> Self:
        return replace(self, inputs=other.inputs)

    def scales(self) -> tuple[float, float]:
        return self.inputs.bmm1_scale, self.inputs.bmm2_scale

    def plain_arguments(self) -> dict[str, Any]:
        inputs = self._inputs()
        return (inputs.with_separate_tables() if Form.TABLES in self.forms else inputs).arguments()

    def out_for(self, query: Tensor) -> Tensor:
        case = self.inputs.case
        dtype = torch.bfloat16 if case.is_mla else case.dtype
        return query.new_full((*query.shape[:-1], case.out_head_dim), math.nan, dtype=dtype)

    def truth(self) -> Truth:
        return truth_of_call(self._inputs(), **self.rules())


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedBatch(ReplayedBatch):
    """The contents of a ragged context call over all keys of each request."""

    case: RaggedCase
    parts: Parts

    name_of_sinks = "attention_sinks"
    name_of_moved = "K and V again"  # there is no page table

    @property
    def interface(self) -> Interface:
        return Interface.RAGGED_CONTEXT

    @property
    def q_lens(self) -> tuple[int, ...]:
        return self.case.q_lens

    @property
    def kv_bound(self) -> dict[str, int]:
        return {"max_kv_len": max(*self.case.kv_lens, 1)}

    def with_contents_of(self, other: Self) -> Self:
        return replace(self, parts=other.parts)

    def scales(self) -> tuple[float, float]:
        return self.case.softmax_scale, 1.0

    def plain_arguments(self) -> dict[str, Any]:
        return ragged_arguments(self.case, self.query, self.parts, causal=True) | {"return_lse": True}

    def out_for(self, query: Tensor) -> Tensor:
        return query.new_full((*query.shape[:-1], self.case.v_head_dim), math.nan)

    def truth(self) -> Truth:
        return truth_of_ragged(self.case, self.query, self.parts, **self.rules())


def paged_batch(inputs: AttentionInputs, forms: frozenset[Form]) -> PagedBatch:
    """Return the batch of a call's inputs, with a draft mask of its own for each request."""
    case = inputs.case
    q_len = max(case.q_lens)
    drawn = torch.rand(len(case.q_lens), q_len, q_len, generator=torch.Generator().manual_seed(case.seed)) < 0.6
    shown = (drawn | torch.eye(q_len, dtype=torch.bool)).to(inputs.query.device)
    return PagedBatch(query=inputs.query, sinks=inputs.sinks, shown=shown, forms=forms, inputs=inputs)


def ragged_batch(case: RaggedCase, device: torch.device, forms: frozenset[Form]) -> RaggedBatch:
    """Return the batch of a prefill's new tokens over all keys."""
    query, parts = draw_ragged(case, device)
    sinks = torch.randn(case.num_heads, generator=torch.Generator().manual_seed(case.seed)) + 2.0
    return RaggedBatch(query=query, sinks=sinks.to(device), forms=forms, case=case, parts=parts)


def rewritten(batch: ReplayedBatch, other: ReplayedBatch, moved: ReplayedBatch) -> Iterator[tuple[str, ReplayedBatch]]:
    """Yield what is written, one thing after another, and the batch with it.

    Args:
        batch: as it is at first.
        other: of the same lengths and pages.
        moved: of the same lengths, in other pages where there are pages.
    """
    if batch.forms & {Form.BMM1, Form.BMM1_LOG2}:
        batch = replace(batch, factors=(SCALES[0], 1.0))
        yield "bmm1_scale", batch
    if Form.BMM2 in batch.forms:
        batch = replace(batch, factors=(batch.factors[0], SCALES[1]))
        yield "bmm2_scale", batch
    if Form.SINKS in batch.forms:
        batch = replace(batch, sinks=other.sinks)
        yield "the sinks", batch
    if Form.MASK in batch.forms:
        batch = replace(batch, shown=other.shown)
        yield "the mask", batch
    batch = replace(batch, query=other.query)
    yield "the query", batch
    yield "K and V", batch.with_contents_of(other)
    yield batch.name_of_moved, batch.with_contents_of(moved)


class Replay:
    """One call in tensors that stay: captured and replayed on a GPU, made again elsewhere and where it waits for the GPU.

    Args:
        run: whose implementation is called.
        room: a batch as large as any; its tensors stay.
        first: the batch that the call is first made and captured with.
        is_eager: whether the call is made again on a GPU too.

    Raises:
        Unsupported, KernelError: as `CaseRun.run`.
    """

    def __init__(self, run: CaseRun, room: ReplayedBatch, first: ReplayedBatch, is_eager: bool = False) -> None:
        self.run, self.interface = run, room.interface
        self.arguments = room.arguments()
        self._load(first)
        self._has_run = False
        is_captured = run.device.type == "cuda" and Form.NO_BOUND not in room.forms and not is_eager
        self._replay = self._captured() if is_captured else self._run

    def hold(self, what: str, batch: ReplayedBatch) -> Result:
        """Load a batch, replay, and hold the rows of its requests to its truth; return them."""
        result = self.of(batch)
        self.run.expect_close(what, result, batch.truth())
        return result

    def bounded(self, what: str, batch: ReplayedBatch) -> None:
        """Load a batch, make its call eagerly with a bound of its own, and hold the rows of its requests to its truth."""
        self._load(batch)
        self._clear_out()
        result = self.run.call(GivenCall(self.interface, self.arguments | batch.kv_bound))
        lse = None if result.lse is None else result.lse[: self._rows]
        self.run.expect_close(what, result._replace(out=result.out[: self._rows], lse=lse), batch.truth())

    def of(self, batch: ReplayedBatch) -> Result:
        """Load a batch, replay, and return copies of the rows of its requests."""
        self._load(batch)
        return self.again()

    def again(self) -> Result:
        """Replay what is loaded, and return copies of the rows of its requests."""
        self._clear_out()
        call = self.run.note_call(self.interface, self.arguments)
        out, lse, _ = self._replay()
        return Result(out[: self._rows].clone(), None if lse is None else lse[: self._rows].clone(), call)

    def _clear_out(self) -> None:
        if (out := self.arguments.get("out")) is not None:
            out.fill_(math.nan)

    def _load(self, batch: ReplayedBatch) -> None:
        """Write a batch's contents over the tensors' own, where they differ; what is beyond them stays."""
        self._rows = sum(batch.q_lens)
        for name, new in batch.arguments().items():
            if name not in KEPT:
                for kept, part in zip(_tensors(self.arguments[name]), _tensors(new), strict=True):
                    _overwrite(kept, part)

    def _run(self) -> Result:
        call = GivenCall(self.interface, self.arguments)
        result = self.run.call(call, on_refusal=Then.FAIL) if self._has_run else self.run.call(call)
        self._has_run = True
        return result

    def _captured(self) -> Callable[[], Result]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made once, is made before the capture, on its stream
            self.run.call(GivenCall(self.interface, self.arguments))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with capturing(graph, stream=stream):
                result = self.run.call(GivenCall(self.interface, self.arguments))
        torch.cuda.current_stream().wait_stream(stream)
        return partial(_replayed, graph, result)


class MadeReplay(Replay):
    """One call in tensors that stay, prepared or planned once and made again whenever their contents have changed.

    Args:
        run, room, first: as in `Replay`.
        form: PREPARED or PLANNED.
    """

    def __init__(self, run: CaseRun, room: ReplayedBatch, first: ReplayedBatch, form: CallForm) -> None:
        self.run, self.interface, self.arguments = run, room.interface, room.arguments()
        self._load(first)
        self._call = run.prepare(form, self.interface, self.arguments)
        self._replay = self._made_again

    def _made_again(self) -> Result:
        try:
            return as_result(self._call(), self.interface)
        except Unsupported as declined:
            raise KernelError(f"it refused a call that it had made ready: {declined}") from declined


def _replayed(graph: torch.cuda.CUDAGraph, result: Result) -> Result:
    graph.replay()
    torch.cuda.synchronize()
    return result


def _tensors(value: Any) -> tuple[Tensor, ...]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(each for each in values if isinstance(each, Tensor))


def _overwrite(kept: Tensor, new: Tensor) -> None:
    """Copy a tensor into the beginning of a larger one, unless it is there already."""
    if new.dtype.itemsize == 1:  # float8 has no comparison
        kept, new = kept.view(torch.uint8), new.view(torch.uint8)
    part = kept[tuple(map(slice, new.shape))]
    if not torch.equal(part, new):
        part.copy_(new)
