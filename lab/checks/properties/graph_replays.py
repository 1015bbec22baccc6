"""Find a pass that is right eagerly and wrong in a graph replay: old lengths or pages, moved buffers, padding that is used.

A case is a short sequence of graph replays, eager passes and overwritten buffers, in a forward mode that engines capture. Each
replay must give the metadata of `lab.references.forward_metadata`, and the output that follows from the requests' K/V
histories, whatever ran before. On a CPU, a replay makes the captured calls again.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import torch

from lab.calls.problem import AttentionCall
from lab.checks.case_run import CallForm, CaseRun
from lab.checks.parameters.paged_axes import MHA
from lab.checks.properties.check import Check, Scope
from lab.checks.run.support_protocol import Unjudgeable, Unsupported
from lab.gpus import capability_of
from lab.kernels.support.kernel import no_triton
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.workloads.geometries import geometry
from lab.workloads.graph_case import GraphCase, ReplaySequence, graph_modes, vllm_graph_modes
from lab.workloads.inputs.replay_backends import new_fixture
from lab.workloads.inputs.replay_fixture import HUGE, ReplayFixture, RunnerFactory, right_runner

REAL = ("gpt-oss-120b",)  # real geometries of the full level; this one has sliding-window layers and sinks
WITH_BLOCKS = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)  # modes of block-sparse attention
WIDTHS = (2, 4, 8)  # query rows per request in verifications and draft extends


def replayed_modes(scope: Scope, *more: GraphMode) -> Iterator[tuple[GraphMode, ReplaySequence, int]]:
    """Yield (graph mode, replay sequence, turn) for each case of the scope's level. `more` are additional graph modes. The
    number `turn` differs from case to case: a caller uses it to alternate further settings.
    """
    ranges = scope.ranges
    if (torch.bfloat16, torch.bfloat16) not in ranges.dtypes:
        return
    widths = tuple(width for width in WIDTHS if width in ranges.q_lens) or ranges.q_lens[-1:]
    if scope.is_full:
        several = (mode for width in widths for mode in graph_modes(width))
        modes = tuple(dict.fromkeys((*several, GraphMode.draft_decode(0), GraphMode.draft_decode(2), *more)))
    else:
        modes = (*graph_modes(4 if 4 in widths else widths[-1]), *more)
    for (m, mode), (s, sequence) in product(enumerate(modes), enumerate(ReplaySequence)):
        if scope.is_full:
            yield mode, sequence, m + s
        elif (place := (m + s) % len(modes)) in (0, 3):
            yield mode, sequence, s + place


def _cases(scope: Scope) -> Iterator[GraphCase]:
    ranges, is_full = scope.ranges, scope.is_full
    names = [name for name in REAL if is_full and name in ranges.geometries and ranges.holds(geometry(name))]
    for name in (ranges.tiny, *names):
        page_size = (
            max(ranges.page_sizes, key=lambda size: (size == 64, size)) if name in REAL else min(ranges.page_sizes)
        )
        settings = list(product(MetadataPlace, ranges.windows_of(geometry(name))))
        for mode, sequence, turn in replayed_modes(scope, GraphMode.draft_decode(FROZEN_KV_STEP)):
            case = GraphCase(mode, sequence, geometry=name, page_size=page_size)
            if case.interface is not scope.interface:
                continue
            is_divided = case.interface is AttentionCall.DECODE and mode.forward_mode.query_rows.are_uniform
            chosen = settings if is_full and name == ranges.tiny else [settings[turn % len(settings)]]
            for number, (place, window) in enumerate(chosen, start=turn):
                splits = 3 if is_divided and number % 4 == 0 else 1
                virtual = splits == 1 and number % 3 == 1
                yield replace(case, place=place, sliding_window=window, decode_splits=splits, virtual_slots=virtual)
            placed = replace(case, place=list(MetadataPlace)[turn % 2])
            if mode.forward_mode is ForwardMode.TARGET_VERIFY:
                yield replace(placed, encoder_only=True)
            if mode in vllm_graph_modes(mode.num_tokens_per_req):
                yield replace(case, padded_seq_len=0)
            if name == ranges.tiny and mode.forward_mode in WITH_BLOCKS and mode.draft_step is None:
                yield replace(placed, page_size=128, num_pages=18, block_sparse=True)


def judge_sequence(run: CaseRun, make: RunnerFactory = right_runner) -> None:
    """Run the replay sequence of a case, and record its first error. `make` returns the graph runner that captures and replays
    the passes.

    Raises:
        Unsupported: the implementation refuses a call at capture.
        Unjudgeable: the lab's Triton kernels for metadata do not run on the device.
    """
    if why := no_triton(capability_of(run.device)):
        raise Unjudgeable(f"graphs rebuild their metadata in Triton kernels: {why}")
    forms = {"the replays": CallForm.PREPARED}
    if CallForm.PREPARED in run.forms:
        forms["the replays, by whole calls"] = CallForm.WHOLE
    for what, form in forms.items():
        fixture = new_fixture(run.case, run.engine(form), run.device, make)
        try:
            wrong = [*islice(_wrongs(run.case.sequence, fixture), 1)]
        except Unsupported as refusal:
            if not isinstance(refusal.__cause__, (ValueError, AssertionError)):
                raise
            # The metadata of a replay has given the call invalid arguments.
            wrong = [f"a replay's arguments were refused: {refusal}"]
        run.judged += 1
        run.worst_ratio = max(run.worst_ratio, fixture.worst_ratio)
        run.expect(what, wrong, kind="output")


def _wrongs(sequence: ReplaySequence, fixture: ReplayFixture) -> Iterator[str]:

    def replayed(*batches: ForwardBatch) -> Iterator[str]:
        for number, batch in enumerate(batches):
            for wrong in fixture.wrongs(batch, fixture.replay(batch)):
                yield f"replay {number}: {wrong}"

    batch_of, (short, edge, across, longest) = fixture.batch, fixture.lengths
    match sequence:
        case ReplaySequence.CAPTURED_BELOW_Q:
            # A graph is captured with padding requests only, which may have fewer keys than query rows.
            if wrong := int((~fixture.out.isfinite()).any(-1).sum()):
                yield f"{wrong} output vectors of the capture itself are not finite"
            yield from replayed(batch_of(short, edge, across, longest))
        case ReplaySequence.EAGER_EQUALS_REPLAY:
            batch = batch_of(across, short, longest, edge)
            yield from fixture.wrongs(batch, fixture.eager(batch))
            yield from replayed(batch)
        case ReplaySequence.AFTER_A_LONGER_BATCH:
            # Page tables and running sums keep the long batch's values after the cells that the shorter batch uses.
            yield from replayed(batch_of(*[longest] * 4), batch_of(short, edge, short, across, first_request=1))
        case ReplaySequence.A_B_A:
            first, other = batch_of(edge, across), batch_of(longest, short, first_request=2)
            state = fixture.generator.get_state()
            before = fixture.replay(first)
            yield from fixture.wrongs(first, before)
            yield from replayed(other)
            fixture.generator.set_state(state)
            again = fixture.replay(first)
            if differing := int((before.out != again.out).sum()):
                yield f"the same batch gave {differing} other elements after another one"
            yield from fixture.wrongs(first, again)
        case ReplaySequence.TWO_CAPTURED_SIZES:
            small, large = batch_of(edge, short), batch_of(longest, across, short, edge)
            moved = batch_of(across, longest, first_request=1), batch_of(short, longest, edge, first_request=1)
            yield from replayed(small, large, *moved, batch_of(longest))
        case ReplaySequence.EAGER_BETWEEN_REPLAYS:
            yield from replayed(batch_of(edge, across))
            larger = batch_of(longest, short, across, edge, longest)  # more requests than any graph has
            yield from fixture.wrongs(larger, fixture.eager(larger))
            if fixture.device.type == "cuda":
                torch.cuda.empty_cache()
            yield from replayed(batch_of(longest, short, first_request=2))
        case ReplaySequence.SAME_BUFFERS:
            pointers = fixture.pointers()
            wrongs = [*replayed(batch_of(edge, across), batch_of(longest, short, edge))]
            names = [name for name, address in fixture.pointers().items() if address != pointers.get(name)]
            yield from [f"{', '.join(names)} moved after capture"] if names else wrongs
        case ReplaySequence.POISONED:
            batches = ((across,), (longest, short, edge), (edge, longest, across, short))
            for value, lens in product((HUGE, float("nan")), batches):
                batch = batch_of(*lens)
                fixture.poison(value)
                for each in fixture.wrongs(batch, fixture.replay(batch, padding=value)):
                    yield f"with {value} around it: {each}"


CHECK = Check("S1", __doc__, _cases, judge_sequence, MHA)
