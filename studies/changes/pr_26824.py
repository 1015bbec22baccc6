"""SGLang's change 26824: lengths are not copied to the host."""

from lab.wording import counted
from studies.changes.change import Change, Recordings, compared_pairs, pairs, two_clocks
from studies.changes.verdicts import Answer, Observation, aspects, microseconds, stated
from studies.recording import RecordedRow


def judge_length_copy(recordings: Recordings) -> Answer:
    """Compare steps of a decode loop with and without the copy of the lengths, and report the cost of the mask."""
    recording = recordings["length_copy"]
    variants = recording["arms"]
    both = pairs(variants, "arm", "with the copy", "without the copy", ("gpu_us", "host_us"))
    full = [mask["fill_us"] for mask in recording["verify_masks"] if mask["form"] == "full"]
    claimed = {
        "Without the copy of the lengths, no decode step waits for the GPU.": [_waits(*rows) for rows in both],
        "Without the copy of the lengths, a decode step is shorter.": compared_pairs(both, _named, two_clocks("step")),
        "Filling the whole verify mask in each step takes less time than omitting the copy of the lengths saves.": (
            compared_pairs(both, _named, two_clocks("step"), least_saved_us=full[0]) if full else []
        ),
    }
    first = variants[0]
    setting = (
        f"The timed decode loop has {counted(first['batch_size'], 'request')} of {first['seq_len']:,} tokens, "
        f"{first['num_draft_tokens']} draft tokens and a kernel that simulates the forward pass."
    )
    missing = (
        "the decode loop with MLA's metadata. The copy of the lengths and the wait for it are the same code for MHA and MLA.",
    )
    return Answer(aspects(claimed), setting, tuple(_mask_facts(mask) for mask in recording["verify_masks"]), missing)


def _named(row: RecordedRow) -> tuple[str, str]:
    return "MHA", f"{row['gpu_us']:g} µs of GPU work, {row['host_us']:g} of host work"


def _waits(copying: RecordedRow, other: RecordedRow) -> Observation:
    before, after = (row["medians"] for row in (copying, other))
    figures = (
        f"{before['synchronisations']:g} → {after['synchronisations']:g} synchronisations, host blocked for "
        f"{microseconds(before['blocked_us'])} → {microseconds(after['blocked_us'])} µs"
    )
    return stated(*_named(copying), after["synchronisations"] == 0, figures)


def _mask_facts(mask: RecordedRow) -> str:
    sizes = (
        f"{mask['max_batch_size']} requests, {mask['num_draft_tokens']} draft tokens and up to "
        f"{mask['max_context_len']:,} tokens per request"
    )
    return (
        f"The verify mask {mask['form']!r} for {sizes} has {mask['mask_bytes']:,} bytes, and filling it takes "
        f"{microseconds(mask['fill_us'])} µs."
    )


CHANGE = Change(
    26824,
    "No copy of the lengths to the host for MLA",
    "The TRT-LLM MLA backend needs no lengths on the host, so each iteration can omit the copy of the lengths and "
    "the wait for it. A verify mask of the largest size, which is allocated once, replaces a verify mask sized by the sum of "
    "the lengths. Pull request 26824 gives no number.",
    "sgl-project/sglang#26824, whose description is a picture; #28106 describes the same change for MHA in words",
    "How much time does a decode loop save without the lengths' copy, and how much time and memory does the verify mask take?",
    "length_copy",
    judge_length_copy,
)
