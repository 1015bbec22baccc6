"""SGLang's change 25925: a verify pass is planned on a second stream."""

from collections.abc import Sequence

from lab.wording import counted
from studies.changes.change import Change, Recordings, compared_pairs, pairs, two_clocks
from studies.changes.verdicts import Answer, Observation, aspects, microseconds, stated
from studies.recording import RecordedRow


def judge_plan_stream(recordings: Recordings) -> Answer:
    """Count the launches after the draft, and compare iterations that are planned during and after the draft."""
    recording = recordings["plan_stream"]
    variants = recording["arms"]
    claimed = {
        "The verify of a chain of draft tokens gets right metadata although no metadata is written again after the draft.": (
            [_fix_up(row) for row in variants if row["drafts"] == "chains"]
        ),
        "Planning a chain's verify during the draft makes the iteration shorter.": (
            _planned(variants, "after the inputs", "chains")
        ),
    }
    aside = {
        "Planning a tree's verify during the draft, before the tree's mask is written, makes the iteration shorter.": _planned(
            variants, "after the inputs", "trees"
        ),
        "A plan on a second stream after the draft, as in SGLang 0.5.11, 0.5.12 and 0.5.23, makes the iteration shorter.": (
            _planned(variants, "after the draft", "chains") + _planned(variants, "after the draft", "trees")
        ),
    }
    first = variants[0]
    setting = (
        "The timed loop makes speculative iterations. Kernels of a fixed time simulate the draft and the target model, with "
        f"{counted(first['batch_size'], 'request')} of {first['seq_len']:,} tokens, {first['num_draft_tokens']} draft tokens "
        f"and pages of {first['page_size']} tokens. A time was recorded only if verify got right metadata before and "
        "after the samples."
    )
    return Answer(
        aspects(claimed, aside), setting, _tree_masks(variants), ("a plan stream that builds MLA's metadata.",)
    )


def _named(row: RecordedRow) -> tuple[str, str]:
    drafts, builder = row["drafts"], row["builder"]
    return f"MHA, {drafts}, {builder}", f"{drafts}, {builder}, a draft of {row['draft_us']:g} µs"


def _fix_up(row: RecordedRow) -> Observation:
    launches = row["medians"]["fix_up_launches"]
    group, where = _named(row)
    return stated(group, f"{where}, planned {row['start']}", launches == 0, f"{launches:g} launches after the draft")


def _planned(variants: Sequence[RecordedRow], start: str, drafts: str) -> list[Observation]:
    rows = [row for row in variants if row["drafts"] == drafts]
    point = ("draft_us", "verify_us", "builder")
    return compared_pairs(pairs(rows, "start", "in line", start, point), _named, two_clocks("iteration"))


def _tree_masks(variants: Sequence[RecordedRow]) -> tuple[str, ...]:
    times = [row["medians"] for row in variants if row["drafts"] == "trees"]
    if not times:
        return ()
    least, most = (microseconds(of(each["fix_up_us"] for each in times)) for of in (min, max))
    launches = " or ".join(f"{count:g}" for count in sorted({each["fix_up_launches"] for each in times}))
    return (f"Writing a tree's verify mask after the draft takes {least} to {most} µs in {launches} launches.",)


CHANGE = Change(
    25925,
    "Verify planned on a second stream",
    "TRT-LLM MHA's verify metadata does not depend on the draft, so metadata planned on a second stream need not be "
    "written again after the draft. The lab also measures whether the plan stream makes the iteration shorter.",
    "description of sgl-project/sglang#25925; the plan stream is off unless SGLANG_ENABLE_OVERLAP_PLAN_STREAM is set",
    "If a second stream writes the verify metadata during the draft, is the metadata still right after the draft, and does an "
    "iteration become shorter?",
    "plan_stream",
    judge_plan_stream,
)
