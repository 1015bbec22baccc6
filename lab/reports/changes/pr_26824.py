"""Change 26824: no copy of the lengths to the host."""

from operator import itemgetter

from lab.reports.changes.change import Change, Recordings, Row, compared_loops, pairs
from lab.reports.changes.verdicts import Answer, Aspect, Observation, microseconds, stated
from lab.reports.tables import counted


def judge_length_copy(recordings: Recordings) -> Answer:
    """Compare steps of a decode loop with the copy and without it, and what the mask costs that is filled in its stead."""
    recording = recordings["length_copy"]
    arms = recording["arms"]
    points = {
        f"{row['gpu_us']:g} µs of GPU work, {row['host_us']:g} of host work": (row, other)
        for row, other in pairs(arms, itemgetter("gpu_us", "host_us"), "arm", "with the copy", "without the copy")
    }
    full = [mask for mask in recording["verify_masks"] if mask["form"] == "full"]
    aspects = (
        Aspect(
            "Without the copy no step waits for the GPU.",
            tuple(_waits(where, *pair) for where, pair in points.items()),
        ),
        Aspect(
            "Without the copy a step is shorter.",
            tuple(compared_loops("MHA", where, rows, "step") for where, rows in points.items()),
        ),
        Aspect(
            "Filling the preallocated mask whole, as 0.5.13 does in each step, costs less than that saves.",
            tuple(_pays(where, *pair, full[0]["fill_us"]) for where, pair in points.items() if full),
        ),
    )
    first = arms[0]
    setting = (
        f"A decode loop of {counted(first['batch_size'], 'request')} of {first['seq_len']:,} tokens, "
        f"{first['num_draft_tokens']} draft tokens, with a stand-in for the forward pass; first times from a profile, second "
        "ones by the host's clock without it."
    )
    missing = ("the loop with MLA's metadata; the copy and the wait for it are the engine's, the same for both.",)
    return Answer(aspects, setting, tuple(_mask_facts(mask) for mask in recording["verify_masks"]), missing)


def _waits(where: str, copying: Row, other: Row) -> Observation:
    before, after = (row["medians"] for row in (copying, other))
    figures = (
        f"{before['synchronisations']:g} → {after['synchronisations']:g} synchronisations, host blocked for "
        f"{microseconds(before['blocked_us'])} → {microseconds(after['blocked_us'])} µs"
    )
    return stated("MHA", where, after["synchronisations"] == 0, figures)


def _pays(where: str, copying: Row, other: Row, fill_us: float) -> Observation:
    saved_us = copying["medians"]["step_us"] - other["medians"]["step_us"]
    figures = f"saved {microseconds(saved_us)} µs, the fill takes {microseconds(fill_us)}"
    return stated("MHA", where, saved_us > fill_us, figures)


def _mask_facts(mask: Row) -> str:
    sizes = f"{mask['max_batch_size']} requests, {mask['num_draft_tokens']} draft tokens, {mask['max_context_len']:,} tokens"
    return f"The mask of form {mask['form']!r} for {sizes}: {mask['mask_bytes']:,} bytes, {microseconds(mask['fill_us'])} µs."


CHANGE = Change(
    26824,
    "No copy of the lengths to the host for MLA",
    "The TRT-LLM MLA backend needs no lengths on the host, so the copy in each iteration and the wait for it can go; a mask "
    "of the largest size, allocated before, stands in for one sized by the sum of the lengths. No figure is given.",
    "sgl-project/sglang#26824, whose description is a picture; #28106 says the same of MHA in words",
    "What does a decode loop gain without the copy, and what does the mask cost?",
    "length_copy",
    judge_length_copy,
)
