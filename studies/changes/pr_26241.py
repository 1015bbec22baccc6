"""SGLang's change 26241: draft steps get no ragged lists of K/V slots."""

from collections.abc import Sequence

from studies.changes.change import Change, Recordings, compared_pairs, pairs
from studies.changes.verdicts import Answer, Observation, aspects, microseconds
from studies.draft_steps import CLAIM, implied_saving_us
from studies.recording import Recorded, RecordedRow

LISTS_SKIPPED = ("common_template", "per_step")
STEPS_TOGETHER = ("per_step", "one_launch")


def judge_draft_steps(recordings: Recordings) -> Answer:
    """Compare a draft's metadata with and without the ragged lists, and the measured saving with the claimed one."""
    recording = recordings["draft_steps"]
    rows = recording["rows"]
    long = [row for row in rows if row["point"].endswith("x80k/steps3")]
    many_steps = [row for row in rows if not row["point"].endswith("/steps2")]
    implied = implied_saving_us(CLAIM)
    claimed = {
        "Without the ragged K/V lists, a draft's metadata takes less GPU time.": [
            *_saved(rows, "mla", LISTS_SKIPPED),
            *_saved(rows, "mha", LISTS_SKIPPED),
            *_saved(rows, "mha", LISTS_SKIPPED, " eager"),
        ],
        f"At 80K tokens and 3 draft steps, an iteration without the K/V lists takes over {microseconds(implied)} µs less GPU "
        "time, the saving that follows from the claimed TPOT.": _saved(
            long, "mla", LISTS_SKIPPED, least_saved_us=implied
        ),
    }
    aside = {
        "From 3 draft steps on, one launch for all steps takes less GPU time than one launch for each step.": (
            _saved(many_steps, "mla", STEPS_TOGETHER) + _saved(many_steps, "mha", STEPS_TOGETHER)
        )
    }
    setting = (
        "The timed work writes a draft's metadata, without attention and without a model. The metadata is written into static "
        "buffers, as in a graph, except at points named eager. "
        f"The points named *trace* are the batch at one moment of the trace {recording['trace']}. Pull request 26241 does "
        "not state the GPU and the batch size of its figures."
    )
    return Answer(aspects(claimed, aside), setting, _host_saving(recording))


def _saved(
    rows: Sequence[RecordedRow], attention: str, plans: tuple[str, str], form: str = "", *, least_saved_us: float = 0.0
) -> list[Observation]:
    name = f"{attention.upper()}{form and ','}{form}"

    def named(row: RecordedRow) -> tuple[str, str]:
        batch, _, steps = row["point"].partition("/steps")  # such as "64x8k/steps3"
        return name, f"{name}, {batch.replace('x', ' × ')}, {steps} steps"

    before, after = (f"{attention} {plan}{form}" for plan in plans)
    return compared_pairs(pairs(rows, "kernel", before, after, ("point",)), named, least_saved_us=least_saved_us)


def _host_saving(recording: Recorded) -> tuple[str, ...]:
    if "pr_26241" not in recording:
        return ()
    saved = recording["pr_26241"]["host_saving_us_per_draft"]
    figures = ", and ".join(f"{microseconds(us)} µs less ({form})" for form, us in saved.items())
    return (f"A draft without the ragged K/V lists takes less host time than with the lists: {figures}.",)


CHANGE = Change(
    26241,
    "No ragged lists for MLA's draft steps",
    "The TRT-LLM MLA backend reads no ragged K/V lists, so its draft steps need not make these lists: mean TPOT "
    f"{CLAIM['tpot_before_ms']} → {CLAIM['tpot_after_ms']} ms "
    f"({100 * (CLAIM['tpot_after_ms'] / CLAIM['tpot_before_ms'] - 1):+.1f} %) with 80K tokens, 3 steps and "
    f"{CLAIM['accept_length']} accepted tokens (Kimi-K2.5-NVFP4, TP4).",
    "description of sgl-project/sglang#26241",
    "How much time do a draft's ragged K/V lists take, and is this time the saving that follows from the claimed TPOT?",
    "draft_steps",
    judge_draft_steps,
)
