"""Change 25925: verify planned on a second stream."""

from collections.abc import Sequence
from operator import itemgetter

from lab.reports.changes.change import Change, Recordings, Row, compared_loops, pairs
from lab.reports.changes.verdicts import Answer, Aspect, Observation, microseconds, stated
from lab.reports.tables import counted


def judge_plan_stream(recordings: Recordings) -> Answer:
    """Count what is mended after the draft, and compare iterations planned beside the draft with those planned in line."""
    recording = recordings["plan_stream"]
    arms = recording["arms"]
    aspects = (
        Aspect(
            "A chain's verify is handed right metadata with nothing written again after the draft.",
            tuple(_fix_up(row) for row in arms if row["drafts"] == "chains"),
        ),
        Aspect(
            "Planning a chain's verify beside the draft makes the iteration shorter.",
            tuple(_planned(arms, "chains", "after the inputs")),
        ),
        Aspect(
            "So it does for trees, whose mask is written after the draft.",
            tuple(_planned(arms, "trees", "after the inputs")),
            of_claim=False,
        ),
        Aspect(
            "A plan on a second stream that waits for the draft, as in 0.5.11, 0.5.12 and 0.5.23, makes it shorter.",
            tuple(_planned(arms, "chains", "after the draft") + _planned(arms, "trees", "after the draft")),
            of_claim=False,
        ),
    )
    first = arms[0]
    setting = (
        f"A loop of speculative iterations with stand-ins for draft and target, {counted(first['batch_size'], 'request')} of "
        f"{first['seq_len']:,} tokens, {first['num_draft_tokens']} draft tokens, pages of {first['page_size']}; first times "
        "from a profile, second ones by the host's clock without it. A time is recorded only if verify was handed right "
        "metadata before and after."
    )
    missing = ("a plan of MLA's metadata.",)
    return Answer(aspects, setting, _tree_masks(arms), missing)


def _plan_group(row: Row) -> str:
    return f"MHA, {row['drafts']}, {row['builder']}"


def _plan_where(row: Row) -> str:
    return f"{row['drafts']}, {row['builder']}, a draft of {row['draft_us']:g} µs"


def _fix_up(row: Row) -> Observation:
    launches = row["medians"]["fix_up_launches"]
    where = f"{_plan_where(row)}, planned {row['start']}"
    return stated(_plan_group(row), where, launches == 0, f"{launches:g} launches after the draft")


def _planned(arms: Sequence[Row], drafts: str, start: str) -> list[Observation]:
    loops = pairs(arms, itemgetter("draft_us", "verify_us", "drafts", "builder"), "start", "in line", start)
    return [
        compared_loops(_plan_group(rows[0]), _plan_where(rows[0]), rows, "iteration")
        for rows in loops
        if rows[0]["drafts"] == drafts
    ]


def _tree_masks(arms: Sequence[Row]) -> tuple[str, ...]:
    times = [row["medians"] for row in arms if row["drafts"] == "trees"]
    if not times:
        return ()
    least, most = (microseconds(of(each["fix_up_us"] for each in times)) for of in (min, max))
    launches = " or ".join(f"{count:g}" for count in sorted({each["fix_up_launches"] for each in times}))
    return (f"A tree's mask is written after the draft: {least} to {most} µs in {launches} launches.",)


CHANGE = Change(
    25925,
    "Verify planned on a second stream",
    "TRT-LLM MHA's verify metadata does not depend on the draft, so a plan on a second stream needs no mending after it. "
    "The lab asks besides what the plan stream is for: a shorter iteration.",
    "description of sgl-project/sglang#25925; off unless SGLANG_ENABLE_OVERLAP_PLAN_STREAM is set",
    "Is there nothing to mend, and when does a plan beside the draft make an iteration shorter?",
    "plan_stream",
    judge_plan_stream,
)
