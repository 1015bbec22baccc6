"""Change 26241: no ragged lists for the draft steps."""

from collections.abc import Mapping, Sequence
from functools import partial

from lab.experiments.draft_steps import CLAIM, implied_saving_us
from lab.reports.changes.change import Change, Recording, Recordings, Row
from lab.reports.changes.verdicts import Answer, Observation, aspects, compared, microseconds
from lab.timing.statistics import Times


def _percent(before: float, after: float) -> str:
    return f"{100 * (after - before) / before:+.1f} %"


LISTS_SKIPPED = ("common_template", "per_step")
STEPS_TOGETHER = ("per_step", "one_launch")


def judge_draft_steps(recordings: Recordings) -> Answer:
    """Compare a draft's metadata with the ragged lists and without them, and what that saves with the claim's figures."""
    recording = recordings["draft_steps"]
    saved = partial(_saved, {row["scenario"]: row for row in recording["rows"]})
    points = list(dict.fromkeys(row["point"] for row in recording["rows"]))
    implied = implied_saving_us(CLAIM)
    many_steps = [point for point in points if not point.endswith("/steps2")]
    long = [point for point in points if point.endswith("x80k/steps3")]
    claimed = {
        "Without the lists a draft's metadata takes less GPU time.": (
            saved(points, LISTS_SKIPPED, "mla")
            + saved(points, LISTS_SKIPPED, "mha")
            + saved(points, LISTS_SKIPPED, "mha", eager=True)
        ),
        f"At 80K tokens and 3 steps the GPU time saved is more than the {microseconds(implied)} µs per iteration that the "
        "claim's figures come to.": saved(long, LISTS_SKIPPED, "mla", least_saved_us=implied),
    }
    aside = {
        "From 3 steps on, where two or more attend, one launch for all of them takes less again.": (
            saved(many_steps, STEPS_TOGETHER, "mla") + saved(many_steps, STEPS_TOGETHER, "mha")
        )
    }
    setting = (
        "A draft's metadata by itself, into buffers that stay as in a graph unless it says eager; no attention, no model. "
        f"Snapshots of a trace are of {recording['trace']}. The GPU and the batch size of the claim's figures are not stated."
    )
    return Answer(aspects(claimed, aside), setting, _host_saving(recording))


def _saved(
    rows: Mapping[str, Row],
    points: Sequence[str],
    plans: tuple[str, str],
    attention: str,
    *,
    eager: bool = False,
    least_saved_us: float = 0.0,
) -> list[Observation]:
    """Return what the second plan saves over the first at the points that have both."""
    name = f"{attention.upper()}{', eager' if eager else ''}"
    found = []
    for point in points:
        before, after = (
            rows.get(f"draft_steps/{attention}/{plan}/{point}{'/eager' if eager else ''}") for plan in plans
        )
        if before is not None and after is not None:
            clocks = {"": (Times.of_row(before), Times.of_row(after))}
            found.append(compared(name, f"{name}, {_point_in_words(point)}", clocks, least_saved_us=least_saved_us))
    return found


def _point_in_words(point: str) -> str:
    """Return "64 × 8k, 3 steps" for "64x8k/steps3"."""
    batch, _, steps = point.partition("/steps")
    return f"{batch.replace('x', ' × ')}, {steps} steps"


def _host_saving(recording: Recording) -> tuple[str, ...]:
    if "pr_26241" not in recording:
        return ()
    saved = recording["pr_26241"]["host_saving_us_per_draft"]
    return (
        f"Host time saved of a draft: {'; '.join(f'{form}, {microseconds(us)} µs' for form, us in saved.items())}.",
    )


CHANGE = Change(
    26241,
    "No ragged lists for MLA's draft steps",
    "The TRT-LLM MLA backend reads no ragged K/V lists, so its draft steps need not make them: mean TPOT "
    f"{CLAIM['tpot_before_ms']} → {CLAIM['tpot_after_ms']} ms "
    f"({_percent(CLAIM['tpot_before_ms'], CLAIM['tpot_after_ms'])}) with 80K tokens, 3 steps and "
    f"{CLAIM['accept_length']} accepted tokens (Kimi-K2.5-NVFP4, TP4).",
    "description of sgl-project/sglang#26241",
    "What do the lists cost, and is that what the claim's figures come to?",
    "draft_steps",
    judge_draft_steps,
)
