"""A pass that is right eagerly and wrong in a CUDA graph's replay: stale lengths or pages, moved buffers, padding that leaks.

Each case is one story: a short sequence of replays, eager passes and poison over one runner, of the modes that an engine
captures. Whatever came before, each replay must give the metadata that `lab.references.forward_metadata` works out and the
output that the requests' histories give. On a CPU a capture is simulated: the same calls are made again on the same buffers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch

from lab.checks.case_run import CallForm, CaseRun
from lab.checks.properties.check import Check, Level, first_line
from lab.checks.run.support_protocol import Unsupported
from lab.gpus import capability_of
from lab.kernels.support.kernel import no_triton
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.ranges import Ranges
from lab.workloads.geometries import geometry
from lab.workloads.graph_case import GraphCase, Story, graph_modes
from lab.workloads.inputs.replay_fixture import HUGE, MHAReplayFixture, ReplayFixture, RunnerFactory, right_runner
from lab.workloads.interfaces import Interface

REAL = ("gpt-oss-120b",)  # a geometry with sliding-window layers and sinks, as the lab's own has
WIDTHS = (2, 4, 8)  # query rows per request of verify and of the draft extends


def told_modes(ranges: Ranges, level: Level, *more: GraphMode) -> Iterator[tuple[GraphMode, Story, int]]:
    """The modes, the stories to tell of each, and a number by which settings take turns.

    The full level tells every story of every mode, width and draft step; the smoke level each story of two modes in turn. A
    backend has `more` modes than those that all have.
    """
    widths = tuple(width for width in WIDTHS if width in ranges.q_lens) or ranges.q_lens[-1:]
    if level is Level.SMOKE:
        modes = (*graph_modes(4 if 4 in widths else widths[-1]), *more)
    else:
        several = (mode for width in widths for mode in graph_modes(width))
        modes = tuple(dict.fromkeys((*several, GraphMode.draft_decode(0), GraphMode.draft_decode(2), *more)))
    for (m, mode), (s, story) in product(enumerate(modes), enumerate(Story)):
        if level is Level.FULL:
            yield mode, story, m + s
        elif (place := (m + s) % len(modes)) in (0, 3):
            yield mode, story, s + place


def _cases(interface: Interface, ranges: Ranges, level: Level) -> Iterator[GraphCase]:
    if (torch.bfloat16, torch.bfloat16) not in ranges.dtypes:  # a story's
        return
    is_full = level is Level.FULL
    names = [name for name in REAL if is_full and name in ranges.geometries and ranges.holds(geometry(name))]
    for name in (ranges.tiny, *names):
        page_size = (
            max(ranges.page_sizes, key=lambda size: (size == 64, size)) if name in REAL else min(ranges.page_sizes)
        )
        settings = list(product(MetadataPlace, ranges.windows_of(geometry(name))))
        for mode, story, turn in told_modes(ranges, level, GraphMode.frozen_kv_draft()):
            case = GraphCase(mode, story, geometry=name, page_size=page_size)
            every = is_full and name == ranges.tiny
            chosen = settings if every else [settings[turn % len(settings)]]
            is_divided = case.interface is Interface.DECODE and mode.forward_mode.query_rows.are_uniform
            for number, (place, window) in enumerate(chosen, turn):
                if case.interface is interface:
                    splits = 3 if is_divided and number % 4 == 0 else 1
                    told = replace(case, place=place, sliding_window=window, decode_splits=splits)
                    yield replace(told, virtual_slots=splits == 1 and number % 3 == 1)
            if case.interface is interface and mode.forward_mode is ForwardMode.TARGET_VERIFY:
                yield replace(case, place=list(MetadataPlace)[turn % 2], encoder_only=True)


def _judge(run: CaseRun) -> None:
    run_story(run, MHAReplayFixture)


def run_story(run: CaseRun, fixture: type[ReplayFixture], make: RunnerFactory = right_runner) -> None:
    """Run the story of the run's case on a fresh fixture, and note what is wrong.

    A call that is refused at its capture declines the case. One that is refused later, with ValueError or an assertion, was
    captured with arguments that only a replay can have made wrong. Where the lab's own metadata kernels do not run, the case
    is declined.
    """
    if why := no_triton(capability_of(run.device)):
        raise Unsupported(f"graphs rebuild their metadata in Triton kernels: {why}")
    forms = {"the story": CallForm.PREPARED}
    if CallForm.PREPARED in run.forms:
        forms["the story, by whole calls"] = CallForm.WHOLE
    for what, form in forms.items():
        replays = fixture(run.case, run.engine(form), run.device, make)
        try:
            wrong = STORIES[run.case.story](replays)
        except Unsupported as refusal:
            if not isinstance(refusal.__cause__, (ValueError, AssertionError)):
                raise
            wrong = f"a replay's arguments were refused: {refusal}"
        run.judged += 1
        run.worst_ratio = max(run.worst_ratio, replays.worst_ratio)
        run.expect(what, [wrong] if wrong else [], kind="output")


def _all_right(fixture: ReplayFixture, *batches: ForwardBatch) -> str:
    """Replay one after another and judge each."""
    for number, batch in enumerate(batches):
        if wrong := fixture.wrongs(batch, fixture.replay(batch)):
            return f"replay {number}: {wrong}"
    return ""


def _lengths(fixture: ReplayFixture) -> tuple[int, int, int, int]:
    """Return four lengths: short, at a page's edge, across one, and as long as there is room for."""
    size, width = fixture.case.page_size, fixture.case.mode.num_tokens_per_req
    return width + 1, 2 * size, 3 * size + 1, fixture.case.max_context_len


def _captured_below_q(fixture: ReplayFixture) -> str:
    """A capture runs on padding's lengths, below a draft extend's rows: it gives no NaN, and a full batch is right after it."""
    short, edge, across, longest = _lengths(fixture)
    if not bool(fixture.out.isfinite().all()):
        return f"{int((~fixture.out.isfinite()).any(-1).sum())} output vectors of the capture itself are not finite"
    return _all_right(fixture, fixture.batch(short, edge, across, longest))


def _eager_equals_replay(fixture: ReplayFixture) -> str:
    """An eager pass, and a replay of the same batch at a captured size."""
    short, edge, across, longest = _lengths(fixture)
    batch = fixture.batch(across, short, longest, edge)
    return fixture.wrongs(batch, fixture.eager(batch)) or _all_right(fixture, batch)


def _after_a_longer_batch(fixture: ReplayFixture) -> str:
    """Tables and sums keep a longer batch's tails; random data in later pages would be read with a stale length."""
    short, edge, across, longest = _lengths(fixture)
    return _all_right(
        fixture,
        fixture.batch(longest, longest, longest, longest),
        fixture.batch(short, edge, short, across, first_request=1),
    )


def _a_b_a(fixture: ReplayFixture) -> str:
    """The order of replays does not matter: the same batch gives the same bits again."""
    short, edge, across, longest = _lengths(fixture)
    first, other = fixture.batch(edge, across), fixture.batch(longest, short, first_request=2)
    state = fixture.generator.get_state()
    before = fixture.replay(first)
    wrong = fixture.wrongs(first, before) or _all_right(fixture, other)
    fixture.generator.set_state(state)
    again = fixture.replay(first)
    if not wrong and not torch.equal(before.out, again.out):
        return f"the same batch gave {int((before.out != again.out).sum())} other elements after another one"
    return wrong or fixture.wrongs(first, again)


def _two_captured_sizes(fixture: ReplayFixture) -> str:
    """Sizes alias one storage: replay the small, the large, the small, and a padded large one."""
    short, edge, across, longest = _lengths(fixture)
    return _all_right(
        fixture,
        fixture.batch(edge, short),
        fixture.batch(longest, across, short, edge),
        fixture.batch(across, longest, first_request=1),
        fixture.batch(short, longest, edge, first_request=1),
        fixture.batch(longest),
    )


def _eager_between_replays(fixture: ReplayFixture) -> str:
    """An eager pass of more requests than any graph holds allocates and frees; the graph's buffers stay."""
    short, edge, across, longest = _lengths(fixture)
    wrong = _all_right(fixture, fixture.batch(edge, across))
    larger = fixture.batch(longest, short, across, edge, longest)
    wrong = wrong or fixture.wrongs(larger, fixture.eager(larger))
    if fixture.device.type == "cuda":
        torch.cuda.empty_cache()
    return wrong or _all_right(fixture, fixture.batch(longest, short, first_request=2))


def _same_buffers(fixture: ReplayFixture) -> str:
    """No replay moves a buffer."""
    short, edge, across, longest = _lengths(fixture)
    before = fixture.pointers()
    wrong = _all_right(fixture, fixture.batch(edge, across), fixture.batch(longest, short, edge))
    moved = [name for name, address in fixture.pointers().items() if address != before.get(name)]
    return f"{', '.join(moved)} moved after capture" if moved else wrong


def _poisoned(fixture: ReplayFixture) -> str:
    """Finite-huge and NaN before each replay, in the sink, padded query rows, and metadata yet to be written."""
    short, edge, across, longest = _lengths(fixture)
    for value in (HUGE, float("nan")):
        for batch in (
            fixture.batch(across),
            fixture.batch(longest, short, edge),
            fixture.batch(edge, longest, across, short),
        ):
            fixture.poison(value)
            if wrong := fixture.wrongs(batch, fixture.replay(batch, padding=value)):
                return f"with {value} around it: {wrong}"
    return ""


STORIES: dict[Story, Callable[[ReplayFixture], str]] = {
    Story.CAPTURED_BELOW_Q: _captured_below_q,
    Story.EAGER_EQUALS_REPLAY: _eager_equals_replay,
    Story.AFTER_A_LONGER_BATCH: _after_a_longer_batch,
    Story.A_B_A: _a_b_a,
    Story.TWO_CAPTURED_SIZES: _two_captured_sizes,
    Story.EAGER_BETWEEN_REPLAYS: _eager_between_replays,
    Story.SAME_BUFFERS: _same_buffers,
    Story.POISONED: _poisoned,
}


CHECK = Check(
    "S1", "graph_stories", first_line(__doc__), _cases, _judge, interfaces=(Interface.DECODE, Interface.CONTEXT)
)
