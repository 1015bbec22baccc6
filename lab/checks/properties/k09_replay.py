"""Find state that is kept from the first call: lengths, tables or pointers whose changes a replayed CUDA graph does not see.

No attention test of FlashInfer replays a graph with other lengths. Here the tensors stay the same and their contents change.
The call is captured with padding requests only. Then the inputs on the device change one after another, and the numbers of
requests, rows and keys grow, shrink and return to the first values. On a CPU the call is made again with the same tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab.calls.problem import LATENT_CALLS, AttentionCall
from lab.checks.case_run import CallForm, CaseRun, GivenCall, Result
from lab.checks.parameters.models import FAMILIES, MODELS, Configuration
from lab.checks.parameters.paged_calls import Lens, lens_of
from lab.checks.parameters.ragged import replayed_cases
from lab.checks.parameters.values import DtypePair, Lengths, Offsets, Tables
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.variants import Maker, made_again
from lab.checks.run.support_protocol import KernelError, Unsupported, output_and_lse
from lab.metadata.engine.capture import capturing
from lab.ranges import SEEDS
from lab.workloads.attention_case import AttentionCase
from lab.workloads.inputs.call import BuiltCall, CallInputs, Form, Forms, in_forms, rewritten
from lab.workloads.inputs.contents import unwritten
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.ragged import TILE
from lab.workloads.interfaces import PAGED_CALLS

LONG = (4096, 32768)  # keys of a long request, which is replayed in a graph that was captured with few keys
MOST_BETWEEN = 1024  # most keys of a request in the eager call between replays, apart from two tiles
# Configurations of DeepSeek-V4's call. The smoke level has the first three, and one with a long request.
OF_TWO_POOLS: tuple[dict[str, Any], ...] = (
    {"q_len": 2, "lengths": Lengths.EQUAL},
    {"q_len": 3, "offsets": Offsets.UNEQUAL, "columns": 640},
    {"dtypes": DtypePair("e4m3/e4m3"), "window_entries": "ordered", "compressed_entries": "edges"},
    {"columns": 128, "page_size": 8},
    {"q_len": 4, "offsets": Offsets.EQUAL, "compressed_entries": "none", "sparse_indices": Tables.FAR_TAIL},
    {"compressed_entries": "twice", "compressed_page_size": 32},
)
Make = Callable[..., CallInputs]  # make(lens, seed, moved) returns tensors; `moved` means other pages


def _cases(scope: Scope) -> Iterator[Any]:
    longest = LONG[: scope.counted(1, 2)]
    if scope.interface not in PAGED_CALLS:
        is_latent = scope.interface in LATENT_CALLS
        yield from _of_two_pools(scope) if is_latent else replayed_cases(scope.ranges, scope.counted(2, 8), longest)
        return
    yield from map(_roomy, scope.balanced(4, 24, seed=11))
    for most_keys, case in zip(longest, scope.balanced(1, 2, seed=26), strict=True):
        # A request of more than `most_keys` keys, and a short one.
        kv_lens, q_lens = (most_keys + case.page_size // 2 + 1, TILE + 1), (min(scope.ranges.q_lens),) * 2
        yield replace(scope.on_fewest_heads(case), kv_lens=kv_lens, q_lens=q_lens, window_left=-1)


def _of_two_pools(scope: Scope) -> Iterator[Configuration]:
    model = MODELS[scope.interface](scope.ranges)
    long = {"lengths": next((each for each in model.axes["lengths"] if isinstance(each, int)), Lengths.UNEQUAL)}
    wanted = OF_TWO_POOLS[: scope.counted(3, len(OF_TWO_POOLS))]
    for number, values in enumerate((*wanted, long), 1):
        allowed = {axis: value for axis, value in values.items() if value in model.axes[axis]}
        if (point := model.completed(allowed)) is not None:
            yield Configuration(scope.interface, point, SEEDS * scope.ranges.seed + number)


def _roomy(case: AttentionCase) -> AttentionCase:
    offsets = case.offsets or (case.interface is not AttentionCall.CONTEXT and case.seed % 3 == 0)
    # As many keys as any request has rows, so that requests may exchange their numbers of rows.
    return replace(case, kv_lens=tuple(max(kv_len, *case.q_lens) for kv_len in case.kv_lens), offsets=offsets)


def _judge(run: CaseRun) -> None:
    case, make = run.case, maker_of(run, run.case)
    is_paged = isinstance(case, AttentionCase)
    forms = frozenset({Form.SINKS} if is_paged and case.sinks else ())
    if isinstance(case, Configuration):
        room, waits = lens_of(case), case["offsets"] != Offsets.NONE
    else:
        room, waits = Lens(case.kv_lens, case.q_lens), not is_paged or case.has_offsets
    if waits and run.vary("rows that wait for requests", in_forms(make(_short(room, waits)), forms)) is None:
        waits = False
        if is_paged and case.interface is not AttentionCall.CONTEXT:
            make = maker_of(run, replace(case, offsets=False))
    inputs = make(_short(room, waits), seed=1)
    for form in _wanted(run, waits):
        if run.vary(form.value, in_forms(inputs, forms | {form})) is not None:
            forms |= {form}
    judge_replays(run, make, forms, room, waits)


def judge_replays(run: CaseRun, make: Make, forms: Forms, room: Lens, waits: bool) -> None:
    """Judge the replays of a captured call with several batches. Judge the same call also eagerly and, if the kernel has these
    functions, by `prepare_<name>` and `plan_<name>`, which return a function that makes the call.

    Args:
        make: builds the tensors of a batch.
        forms: the optional arguments that the call passes.
        room: the lengths of the largest batch.
        waits: whether the numbers of query rows of requests may differ between capture and replay.
    """

    def call_of(lens: Lens, seed: int = 0, moved: bool = False, **changes: Any) -> BuiltCall:
        return in_forms(replace(make(lens, seed, moved), **changes), forms)

    first = call_of(_padding(room, waits))
    short = call_of(_short(room, waits), seed=1, sinks=first.inputs.sinks, shown=first.inputs.shown)
    replay = Replay(run, call_of(room), first)
    replay.expect("the first replay, of padding alone", first)
    kept = replay.expect("a replay with requests", short)
    last = short
    for what, last in rewritten(short, *(call_of(_short(room, waits), seed=2, moved=moved) for moved in (False, True))):
        replay.expect(f"a replay after {what} changed", last)
    grown = call_of(room, seed=3, moved=True, factors=last.inputs.factors)
    before = replay.expect("a replay with more and longer requests", grown)
    between = in_forms(make(another(room), seed=4), forms - {Form.OUT})
    if (result := run.vary("an eager call", between)) is not None:
        result = result.leading(between.rows)._replace(lse=None)
        run.expect_close("an eager call between replays", result, between.truth())
    run.expect_equal_bits("a replay after an eager call", replay.again(), before)
    replay.expect("a replay with shorter requests", call_of(shrunk(room), seed=5))
    run.expect_equal_bits("the first requests again", replay.again(short), kept)
    eager = Replay(run, call_of(room), short, made_again)
    eager.expect_bounded("an eager call, bounded by short requests", short)
    eager.expect_bounded("the next in the same tensors, bounded by longer requests", grown)
    # Without max_q_len, a call reads the largest number of rows from the offsets when it is made ready.
    may_grow = short.given.get("max_q_len", 0) is not None
    for form in run.forms[1:]:
        if hasattr(run.implementation, form.value + short.interface.value):
            # Lengths, rows, page ids and masks must not change after a call was planned. After it was prepared, they may.
            is_planned, words = form is CallForm.PLANNED, f"{form.name.lower()} once"
            same = {"shown": short.inputs.shown} if is_planned else {}
            others = [call_of(_short(room, waits), 2, moved, **same) for moved in (False, not is_planned)]
            with run.noting(words):
                ready = Replay(run, call_of(room), short, partial(made_ready, form))
                for what, batch in rewritten(short, *others):
                    ready.expect(f"{words}, after {what} changed", batch)
                if not is_planned and may_grow:
                    ready.expect(f"{words}, with more and longer requests", grown)


def maker_of(run: CaseRun, case: Any) -> Make:
    return partial(FAMILIES[case.interface].redrawn, case, run.ranges, run.device)


def _wanted(run: CaseRun, waits: bool) -> list[Form]:
    case, seed = run.case, run.case.seed
    is_paged = isinstance(case, AttentionCase)
    is_mla = is_paged and case.is_mla
    is_decode = is_paged and case.interface is AttentionCall.DECODE
    wanted = {
        Form.BMM1_LOG2: is_decode and seed % 2 == 0,
        Form.BMM1: True,
        Form.BMM2: True,
        Form.MASK: is_decode and not waits and case.q_lens[0] > 1 and seed % 3 == 1,
        Form.SINKS: (is_mla or not is_paged) and seed % 2 == 1 and True in run.ranges.sinks,
        Form.TABLES: is_paged and not is_mla and seed % 4 == 0,
        Form.OUT: seed // 2 % 2 == 1,
        Form.PDL: seed // 2 % 2 == 0,
        Form.NO_BOUND: is_mla and waits and seed % 2 == 0,
        Form.LSE: is_paged and not (is_mla and waits) and seed % 3 == 2,  # MLA with offsets would need return_lse_base
    }
    return [form for form, is_wanted in wanted.items() if is_wanted]


def _padding(largest: Lens, waits: bool) -> Lens:  # as an engine captures a batch
    q_lens = tuple(min(q_len, 1) if waits else q_len for q_len in largest.q_lens)
    return Lens(tuple(max(q_len, 1) for q_len in q_lens), q_lens)


def _short(largest: Lens, waits: bool) -> Lens:
    kv_lens, q_lens = [], []  # every second request is short, and the remaining ones are padding
    for request, (most_keys, most_rows) in enumerate(zip(largest.kv_lens, largest.q_lens, strict=True)):
        is_live = request % 2 == 0
        q_len = min(most_rows, (1 + request) * is_live) if waits else most_rows
        kv_lens.append(min(most_keys, max(q_len, 17 + 20 * request % 47 if is_live else 1)))
        q_lens.append(q_len)
    return Lens(tuple(kv_lens), tuple(q_lens))


def shrunk(largest: Lens) -> Lens:
    q_lens = largest.q_lens[::-1]
    return Lens(tuple(map(max, q_lens, (kv_len // 2 for kv_len in largest.kv_lens))), q_lens)


def another(largest: Lens) -> Lens:
    kv_lens = tuple(map(max, largest.q_lens, (min(kv_len, MOST_BETWEEN) for kv_len in largest.kv_lens)))
    return Lens((*kv_lens, *(kv_len + 2 * TILE for kv_len in kv_lens)), largest.q_lens * 2)


def captured(run: CaseRun, call: GivenCall) -> Callable[[], Result]:
    """Capture a call in a CUDA graph, and return a function that replays it. On a CPU, this function makes the call eagerly."""
    if run.device.type != "cuda" or call.given.get("max_q_len", 0) is None:  # None: the call reads offsets on the host
        return made_again(run, call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first call compiles kernels and allocates memory, before the capture
        run.call(call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=stream):
            result = run.call(call)
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Result:
        graph.replay()
        torch.cuda.synchronize()
        return result

    return replay


def made_ready(form: CallForm, run: CaseRun, call: GivenCall) -> Callable[[], Result]:
    run.note_call(call.interface, call.given)
    ready = run.kernel.make(form.value, call.interface, call.given)

    def make() -> Result:
        try:
            return Result(*output_and_lse(call.interface, ready()))
        except Unsupported as declined:
            raise KernelError(f"it refused a call that it had made ready: {declined}") from declined

    return make


class Replay:
    """A call that is repeated for several batches, as in a CUDA graph: its tensors have the sizes of the largest batch
    (`room`), and the contents of each batch overwrite them.
    """

    def __init__(self, run: CaseRun, room: BuiltCall, first: BuiltCall, make: Maker = captured) -> None:
        self.run, self.call, self._inputs = run, GivenCall(room.interface, room.given), room.read
        self._load(first)
        self._replay = make(run, self.call)

    def expect(self, what: str, batch: BuiltCall) -> Result:
        result = self.again(batch)
        self.run.expect_close(what, result, batch.truth())
        return result

    def expect_bounded(self, what: str, batch: BuiltCall) -> None:
        # Make the call eagerly. The bound of the lengths, such as `max_seq_len`, is the longest length of the batch.
        self._load(batch)
        self._clear_out()
        bounds = {batch.inputs.kv_bound: max(*batch.inputs.kv_lens, 1)}
        result = self.run.call(self.call, **bounds if bounds.keys() <= self.call.given.keys() else {})
        self.run.expect_close(what, result.leading(self._rows), batch.truth())

    def again(self, batch: BuiltCall | None = None) -> Result:
        if batch is not None:
            self._load(batch)
        self._clear_out()
        call = self.run.note_call(self.call.interface, self.call.given)
        out, lse, _ = self._replay().leading(self._rows)
        return Result(out.clone(), None if lse is None else lse.clone(), call)

    def _clear_out(self) -> None:
        if (out := self.call.given.get("out")) is not None:
            unwritten(out)

    def _load(self, batch: BuiltCall) -> None:
        self._rows = batch.rows
        for name, new in batch.read.items():
            part = self._inputs[name][tuple(map(slice, new.shape))]
            if not same_bits(part, new):
                part.copy_(new)


CHECK = Check("K9", __doc__, _cases, _judge, tuple(FAMILIES), drawn=_roomy)
