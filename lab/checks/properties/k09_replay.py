"""State frozen in the first call: lengths, tables or pointers that a replayed CUDA graph would not see change.

No attention test of FlashInfer replays a graph with other lengths. Here one set of tensors is kept and its contents change. The
call is captured on padding alone, within host bounds that allow more. Then requests come, each thing that lies on the device is
written by itself, and requests, rows and keys grow in number, shrink, and are again what they were, with an eager call of
another shape in between. On a GPU the call is captured and replayed; elsewhere it is made again with the same tensors. At last
other tensors are kept for eager calls, whose bounds on the host grow as the requests do.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CallForm, CaseRun, GivenCall, Result, as_result
from lab.checks.parameters.attention import drawn_cases
from lab.checks.properties.check import Check, Scope
from lab.checks.run.support_protocol import KernelError, Unsupported
from lab.metadata.engine.capture import capturing
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.attention import AttentionInputs
from lab.workloads.inputs.call import BuiltCall, CallInputs, Form, Forms, in_forms, random_mask, rewritten
from lab.workloads.inputs.ragged import TILE, RaggedInputs, build_ragged
from lab.workloads.interfaces import ATTENTION, Interface
from lab.workloads.ragged_case import RaggedCase

LONG = (4096, 32768)  # keys of a request that was captured on a page
MOST_BETWEEN = 1024  # keys of a request in the eager call, and two pages more


@dataclass(frozen=True)
class Lens:
    """Keys and query rows of each request."""

    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


Make = Callable[..., CallInputs]  # of Lens and a seed; `moved` if pages lie elsewhere
KEPT = ("workspace_buffer", "out")  # arguments that nobody loads


def _cases(scope: Scope) -> Iterator[AttentionCase | RaggedCase]:
    longest = LONG[: scope.counted(1, 2)]
    if scope.interface is Interface.RAGGED_CONTEXT:
        yield from _ragged_cases(scope, longest)
        return
    yield from map(_roomy, scope.balanced(4, 24, seed=11))
    for most_keys, case in zip(longest, scope.balanced(1, 2, seed=26), strict=True):
        yield _long(scope.on_fewest_heads(case), most_keys, min(scope.ranges.q_lens))
    yield from map(_roomy, scope.balanced_nvfp4(1, 4, seed=28))


def _ragged_cases(scope: Scope, longest: Sequence[int]) -> Iterator[RaggedCase]:
    dtypes = [dtype for dtype, _ in scope.ranges.dtypes]
    shapes = [((TILE, 2 * TILE, 3, 5), (7, 2 * TILE, 1, TILE)), ((0, 200, 130, 0), (130, 0, 3, 131))]
    for number in range(scope.counted(2, 8)):
        dtype = dtypes[number % len(dtypes)]
        yield RaggedCase(*shapes[number % 2], num_heads=1 + number % 3, dtype=dtype, seed=number + 1)
    for most_keys in longest:
        yield RaggedCase((most_keys, 9), (5, 2), num_heads=1, dtype=dtypes[0], seed=1)


def _roomy(case: AttentionCase) -> AttentionCase:
    """Every request has room for any other's rows; rows of some decode calls are told by offsets."""
    offsets = case.interface is not Interface.CONTEXT and case.seed % 3 == 0
    return replace(
        case, kv_lens=tuple(max(kv_len, *case.q_lens) for kv_len in case.kv_lens), offsets=case.offsets or offsets
    )


def _long(case: AttentionCase, most_keys: int, q_len: int) -> AttentionCase:
    """Return a request of many splits, on as few rows as there are, for the time that it takes."""
    kv_lens = (most_keys + case.page_size // 2 + 1, TILE + 1)
    return replace(case, kv_lens=kv_lens, q_lens=(q_len,) * 2, window_left=-1)


def _judge(run: CaseRun) -> None:
    case = run.case
    room = Lens(case.kv_lens, case.q_lens)
    is_ragged = isinstance(case, RaggedCase)
    make = maker_of(run, case)
    forms = frozenset({Form.SINKS} if not is_ragged and case.sinks else ())
    waits = is_ragged or case.has_offsets
    short = in_forms(make(_short(room, waits)), forms)
    if waits and run.vary("rows that wait for requests", short) is None:
        waits = False
        if not is_ragged and case.interface is not Interface.CONTEXT:
            make = maker_of(run, replace(case, offsets=False))
    forms = _taken(run, make(_short(room, waits), seed=1), forms, _wanted(run, waits))
    tell(run, make, forms, room, waits)


def tell(run: CaseRun, make: Make, forms: Forms, room: Lens, waits: bool) -> None:
    """Tell a run the story, in tensors that have room for these lengths; `waits`: rows may be fewer."""

    def call_of(lens: Lens, seed: int = 0, moved: bool = False, **changes: Any) -> BuiltCall[Any]:
        return in_forms(replace(make(lens, seed, moved), **changes), forms)

    first = call_of(_padding(room, waits))
    short = call_of(_short(room, waits), seed=1, sinks=first.inputs.sinks, shown=first.inputs.shown)
    replay = Replay(run, call_of(room), first)
    replay.hold("the first replay, of padding alone", first)
    kept = replay.hold("a replay with requests", short)
    last = short
    for what, last in rewritten(short, *(call_of(_short(room, waits), seed=2, moved=moved) for moved in (False, True))):
        replay.hold(f"a replay after {what} changed", last)
    grown = call_of(room, seed=3, moved=True, factors=last.inputs.factors)
    before = replay.hold("a replay with more and longer requests", grown)
    between = in_forms(make(another(room), seed=4), forms - {Form.OUT})
    result = run.vary("an eager call", between)
    if result is not None:
        out = result.out[: between.rows]
        run.expect_close("an eager call between replays", result._replace(out=out, lse=None), between.truth())
    run.expect_equal_bits("a replay after an eager call", replay.again(), before)
    replay.hold("a replay with shorter requests", call_of(shrunk(room), seed=5))
    run.expect_equal_bits("the first requests again", replay.of(short), kept)
    eager = Replay(run, call_of(room), short, is_eager=True)
    eager.bounded("an eager call, bounded by short requests", short)
    eager.bounded("the next in the same tensors, bounded by longer requests", grown)
    for form in run.forms[1:]:
        if hasattr(run.implementation, form.value + short.interface.value):
            moves = (False, form is CallForm.PREPARED)
            others = [call_of(_short(room, waits), seed=2, moved=moved) for moved in moves]
            tell_made(run, form, call_of(room), short, others, grown)


def tell_made(
    run: CaseRun,
    form: CallForm,
    room: BuiltCall[Any],
    short: BuiltCall[Any],
    others: Sequence[BuiltCall[Any]],
    grown: BuiltCall[Any],
) -> None:
    """Tell what a call may find changed that was made ready once.

    That is all contents where it was prepared, and where it was planned, all but lengths, rows, page ids and masks.

    Args:
        run, form: whose call, and how it is made ready.
        room: a call as large as any.
        short: what it is made ready with.
        others: two calls of the same lengths, the second in other pages where those may change.
        grown: a call of more keys and rows.
    """
    words = f"{form.name.lower()} once"
    with run.noting(words, needed=True):
        try:
            made = MadeReplay(run, room, short, form)
        except Unsupported as declined:
            run.decline(f"{words}: {declined}")
            return
        if form is CallForm.PLANNED:
            mask = {"shown": short.inputs.shown}
            others = [in_forms(replace(other.inputs, **mask), short.forms) for other in others]
        for what, batch in rewritten(short, *others):
            made.hold(f"{words}, after {what} changed", batch)
        if form is CallForm.PREPARED:
            made.hold(f"{words}, with more and longer requests", grown)


def maker_of(run: CaseRun, case: AttentionCase | RaggedCase) -> Make:
    """Return what makes a case's tensors with other lengths and contents, sinks and a mask among them."""

    def make_paged(lens: Lens, seed: int = 0, moved: bool = False) -> AttentionInputs:
        assert isinstance(case, AttentionCase)
        has_sinks = case.sinks or (case.is_mla and True in run.ranges.sinks)
        storage = replace(case.storage, page_seed=case.storage.page_seed + moved)
        shown = replace(
            case, kv_lens=lens.kv_lens, q_lens=lens.q_lens, seed=case.seed + seed, sinks=has_sinks, storage=storage
        )
        return replace(run.build(shown), shown=random_mask(shown).to(run.device))

    def make_ragged(lens: Lens, seed: int = 0, moved: bool = False) -> RaggedInputs:
        assert isinstance(case, RaggedCase)
        prefix_lens = tuple(kv_len - q_len for kv_len, q_len in zip(lens.kv_lens, lens.q_lens, strict=True))
        drawn = replace(case, prefix_lens=prefix_lens, q_lens=lens.q_lens, seed=10 * case.seed + seed + 6 * moved)
        sinks = torch.randn(case.num_heads, generator=torch.Generator().manual_seed(drawn.seed)) + 2.0
        return replace(build_ragged(drawn, run.device), sinks=sinks.to(run.device))

    return make_ragged if isinstance(case, RaggedCase) else make_paged


def _wanted(run: CaseRun, waits: bool) -> Iterator[Form]:
    """Yield the forms to try, another few from case to case."""
    case = run.case
    is_decode = isinstance(case, AttentionCase) and case.interface is Interface.DECODE
    if is_decode and case.seed % 2 == 0:
        yield Form.BMM1_LOG2
    yield Form.BMM1
    yield Form.BMM2
    if is_decode and not waits and case.q_lens[0] > 1 and case.seed % 3 == 1:
        yield Form.MASK
    if case.seed % 2 and True in run.ranges.sinks and (isinstance(case, RaggedCase) or case.is_mla):
        yield Form.SINKS
    if isinstance(case, AttentionCase) and not case.is_mla and case.seed % 4 == 0:
        yield Form.TABLES
    yield Form.OUT if case.seed // 2 % 2 else Form.PDL
    if isinstance(case, AttentionCase) and case.is_mla and waits and case.seed % 2 == 0:
        yield Form.NO_BOUND
    if case.seed % 3 == 2 and isinstance(case, AttentionCase) and not (case.is_mla and waits):  # without a base's name
        yield Form.LSE


def _taken(run: CaseRun, inputs: CallInputs, forms: Forms, wanted: Iterator[Form]) -> Forms:
    """Return the forms, and those of the wanted ones that the implementation takes."""
    for form in wanted:
        call = in_forms(inputs, forms | {form})
        if run.vary(form.value, call) is not None:
            forms |= {form}
    return forms


def _padding(room: Lens, waits: bool) -> Lens:
    """As an engine captures: each request is nothing but its rows, one where there may be fewer."""
    q_lens = tuple(min(q_len, 1) if waits else q_len for q_len in room.q_lens)
    return Lens(tuple(max(q_len, 1) for q_len in q_lens), q_lens)


def _short(room: Lens, waits: bool) -> Lens:
    """Every other request is live, on less than a tile of keys; the others are padding, without rows where it may be."""
    kv_lens, q_lens = [], []
    for request, (most_keys, most_rows) in enumerate(zip(room.kv_lens, room.q_lens, strict=True)):
        is_live = request % 2 == 0
        q_len = min(most_rows, (1 + request) * is_live) if waits else most_rows
        kv_lens.append(min(most_keys, max(q_len, 17 + 20 * request % 47 if is_live else 1)))
        q_lens.append(q_len)
    return Lens(tuple(kv_lens), tuple(q_lens))


def shrunk(room: Lens) -> Lens:
    """Rows shared out in another order, and half the keys."""
    q_lens = room.q_lens[::-1]
    return Lens(tuple(max(q_len, kv_len // 2) for kv_len, q_len in zip(room.kv_lens, q_lens, strict=True)), q_lens)


def another(room: Lens) -> Lens:
    """Twice as many requests, the second half longer."""
    kv_lens = tuple(
        max(q_len, min(kv_len, MOST_BETWEEN)) for kv_len, q_len in zip(room.kv_lens, room.q_lens, strict=True)
    )
    return Lens((*kv_lens, *(kv_len + 2 * TILE for kv_len in kv_lens)), room.q_lens * 2)


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

    def __init__(self, run: CaseRun, room: BuiltCall[Any], first: BuiltCall[Any], is_eager: bool = False) -> None:
        self.run, self.interface, self.arguments = run, room.interface, room.given
        self._load(first)
        self._has_run = False
        is_captured = run.device.type == "cuda" and Form.NO_BOUND not in room.forms and not is_eager
        self._replay = self._captured() if is_captured else self._run

    def hold(self, what: str, batch: BuiltCall[Any]) -> Result:
        """Load a batch, replay, and hold the rows of its requests to its truth; return them."""
        result = self.of(batch)
        self.run.expect_close(what, result, batch.truth())
        return result

    def bounded(self, what: str, batch: BuiltCall[Any]) -> None:
        """Load a batch, make its call eagerly with a bound of its own, and hold the rows of its requests to its truth."""
        self._load(batch)
        self._clear_out()
        bound = {batch.inputs.kv_bound: max(*batch.inputs.kv_lens, 1)}
        result = self.run.call(GivenCall(self.interface, self.arguments | bound))
        lse = None if result.lse is None else result.lse[: self._rows]
        self.run.expect_close(what, result._replace(out=result.out[: self._rows], lse=lse), batch.truth())

    def of(self, batch: BuiltCall[Any]) -> Result:
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

    def _load(self, batch: BuiltCall[Any]) -> None:
        """Write a batch's contents over the tensors' own, where they differ; what is beyond them stays."""
        self._rows = batch.rows
        for name, new in batch.given.items():
            if name not in KEPT:
                for kept, part in zip(_tensors(self.arguments[name]), _tensors(new), strict=True):
                    _overwrite(kept, part)

    def _run(self) -> Result:
        call = GivenCall(self.interface, self.arguments)
        result = self.run.again(call) if self._has_run else self.run.call(call)
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

    def __init__(self, run: CaseRun, room: BuiltCall[Any], first: BuiltCall[Any], form: CallForm) -> None:
        self.run, self.interface, self.arguments = run, room.interface, room.given
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


CHECK = Check(
    "K9",
    "replay",
    __doc__,
    _cases,
    _judge,
    interfaces=(*ATTENTION, Interface.RAGGED_CONTEXT),
    draw=drawn_cases(_roomy),
)
