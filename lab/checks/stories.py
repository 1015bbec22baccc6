"""Stories of CUDA graphs: nothing that an earlier replay left may reach a result.

A story is a short sequence of replays, eager passes and poison over one runner. Whatever came before, each replay must give
the metadata that `lab.references.forward_metadata` works out and the output that the requests' histories give.
"""

from collections.abc import Callable

import torch

from lab.checks.case_run import CallForm, CaseRun
from lab.checks.graph_case import Story
from lab.checks.graph_stage import HUGE, Stage
from lab.checks.run.support_protocol import Unsupported
from lab.checks.scene import RunnerFactory, Scene, right_runner
from lab.gpus import capability_of
from lab.kernels.support.kernel import no_triton
from lab.metadata.engine.forward_batch import ForwardBatch


def tell(run: CaseRun, stage: type[Stage], make: RunnerFactory = right_runner) -> None:
    """Tell the run's case on a fresh scene, and note what is wrong.

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
        scene = Scene(run.case, run.engine(form), run.device, stage, make)
        try:
            wrong = STORIES[run.case.story](scene)
        except Unsupported as refusal:
            if not isinstance(refusal.__cause__, (ValueError, AssertionError)):
                raise
            wrong = f"a replay's arguments were refused: {refusal}"
        run.judged += 1
        run.worst_ratio = max(run.worst_ratio, scene.worst_ratio)
        run.hold_nothing_wrong(what, [wrong] if wrong else [], held="output")


def _all_right(scene: Scene, *batches: ForwardBatch) -> str:
    """Replay one after another and judge each."""
    for number, batch in enumerate(batches):
        if wrong := scene.wrongs(batch, scene.replay(batch)):
            return f"replay {number}: {wrong}"
    return ""


def _lengths(scene: Scene) -> tuple[int, int, int, int]:
    """Return four lengths: short, at a page's edge, across one, and as long as there is room for."""
    size, width = scene.case.page_size, scene.case.mode.num_tokens_per_req
    return width + 1, 2 * size, 3 * size + 1, scene.case.max_context_len


def _captured_below_q(scene: Scene) -> str:
    """A capture runs on padding's lengths, below a draft extend's rows: it gives no NaN, and a full batch is right after it."""
    short, edge, across, longest = _lengths(scene)
    if not bool(scene.out.isfinite().all()):
        return f"{int((~scene.out.isfinite()).any(-1).sum())} output vectors of the capture itself are not finite"
    return _all_right(scene, scene.batch(short, edge, across, longest))


def _eager_equals_replay(scene: Scene) -> str:
    """An eager pass, and a replay of the same batch at a captured size."""
    short, edge, across, longest = _lengths(scene)
    batch = scene.batch(across, short, longest, edge)
    return scene.wrongs(batch, scene.eager(batch)) or _all_right(scene, batch)


def _after_a_longer_batch(scene: Scene) -> str:
    """Tables and sums keep a longer batch's tails; random data in later pages would be read with a stale length."""
    short, edge, across, longest = _lengths(scene)
    return _all_right(
        scene, scene.batch(longest, longest, longest, longest), scene.batch(short, edge, short, across, first_request=1)
    )


def _a_b_a(scene: Scene) -> str:
    """The order of replays does not matter: the same batch gives the same bits again."""
    short, edge, across, longest = _lengths(scene)
    first, other = scene.batch(edge, across), scene.batch(longest, short, first_request=2)
    state = scene.generator.get_state()
    before = scene.replay(first)
    wrong = scene.wrongs(first, before) or _all_right(scene, other)
    scene.generator.set_state(state)
    again = scene.replay(first)
    if not wrong and not torch.equal(before.out, again.out):
        return f"the same batch gave {int((before.out != again.out).sum())} other elements after another one"
    return wrong or scene.wrongs(first, again)


def _two_captured_sizes(scene: Scene) -> str:
    """Sizes alias one storage: replay the small, the large, the small, and a padded large one."""
    short, edge, across, longest = _lengths(scene)
    return _all_right(
        scene,
        scene.batch(edge, short),
        scene.batch(longest, across, short, edge),
        scene.batch(across, longest, first_request=1),
        scene.batch(short, longest, edge, first_request=1),
        scene.batch(longest),
    )


def _eager_between_replays(scene: Scene) -> str:
    """An eager pass of more requests than any graph holds allocates and frees; the graph's buffers stay."""
    short, edge, across, longest = _lengths(scene)
    wrong = _all_right(scene, scene.batch(edge, across))
    larger = scene.batch(longest, short, across, edge, longest)
    wrong = wrong or scene.wrongs(larger, scene.eager(larger))
    if scene.device.type == "cuda":
        torch.cuda.empty_cache()
    return wrong or _all_right(scene, scene.batch(longest, short, first_request=2))


def _same_buffers(scene: Scene) -> str:
    """No replay moves a buffer."""
    short, edge, across, longest = _lengths(scene)
    before = scene.pointers()
    wrong = _all_right(scene, scene.batch(edge, across), scene.batch(longest, short, edge))
    moved = [name for name, address in scene.pointers().items() if address != before.get(name)]
    return f"{', '.join(moved)} moved after capture" if moved else wrong


def _poisoned(scene: Scene) -> str:
    """Finite-huge and NaN before each replay, in the sink, padded query rows, and metadata yet to be written."""
    short, edge, across, longest = _lengths(scene)
    for value in (HUGE, float("nan")):
        for batch in (
            scene.batch(across),
            scene.batch(longest, short, edge),
            scene.batch(edge, longest, across, short),
        ):
            scene.poison(value)
            if wrong := scene.wrongs(batch, scene.replay(batch, padding=value)):
                return f"with {value} around it: {wrong}"
    return ""


STORIES: dict[Story, Callable[[Scene], str]] = {
    Story.CAPTURED_BELOW_Q: _captured_below_q,
    Story.EAGER_EQUALS_REPLAY: _eager_equals_replay,
    Story.AFTER_A_LONGER_BATCH: _after_a_longer_batch,
    Story.A_B_A: _a_b_a,
    Story.TWO_CAPTURED_SIZES: _two_captured_sizes,
    Story.EAGER_BETWEEN_REPLAYS: _eager_between_replays,
    Story.SAME_BUFFERS: _same_buffers,
    Story.POISONED: _poisoned,
}
