"""Show the claims of the changes and the verdicts on them, as a Markdown page and as a table in a terminal."""

import os
from collections.abc import Sequence
from pathlib import Path

from lab.reports.recorded_file import RecordedFile
from lab.reports.tables import Cell, Table, items, markdown_of, table_of_lines
from lab.timing.statistics import INTERLEAVED
from studies import command_of
from studies.changes import CHANGES
from studies.changes.entries import Entry, day_of, held_back
from studies.changes.verdicts import NOT_RECORDED, Aspect, Observation, Standing, microseconds

PAGE = "experiments.md"
FLASHINFER = "lab.kernels.trtllm"
# Points that a table of points and a cell name; the table of groups counts all points.
MOST_NAMED, MOST_IN_A_CELL = 12, 4
SUMMARY = ("change", "the claim", "MHA: holds at", "MLA: holds at", "does not hold, or is undecided, at")
RECORDINGS = ("recording", "day", "GPU", "commit", "torch, FlashInfer", "GPU held back in", "method")
METHOD = (
    "`lab experiments changes` computed every measured number and every verdict of this page from the recordings to which the "
    "page links."
)
RULES = (
    "A *point* is a combination of settings at which times were measured, such as 4 requests of 1,024 keys and 16 query rows. "
    "The statement that a change saves time *holds* at a point if the time with the change is shorter, *does not hold* if the "
    "time with the change is longer, and *is undecided* in all other cases.",
    f"A time counts as shorter if the whole {INTERLEAVED.confidence_percent:g} % confidence interval of the ratio of the "
    f"medians is below {1 - INTERLEAVED.minimum_effect_percent / 100:g}, and a rank test of the samples agrees. A time counts "
    f"as longer if the whole confidence interval is above {1 + INTERLEAVED.minimum_effect_percent / 100:g}, and the rank test "
    "agrees. If a recording has no samples, the confidence interval is computed from the quartiles.",
    "If a change claims to save a number of microseconds, this number is added to the time with the change before the times "
    "are compared.",
    "At a point that the profiler and the host's clock timed, a statement holds only if the times of the profiler and of the "
    "host's clock confirm the statement. The column *saved, µs* of such a point has the saving in the profiler's times.",
    "The sign *a → b* stands for the median time without a change and the median time with the change.",
    "Statements with the note *(not claimed)* do not count in the verdict on a change.",
    "The column *day* has the day on which the recording was committed, because recordings have no date.",
)
CLAIMS = ("change", "statement", "verdict", "saved, µs", "does not hold, or is undecided, at")
POINTS = ("point", "the statement", "without the change → with the change")
GROUPS = ("", "points", *(standing.value for standing in Standing), "saved, µs", "times as fast")


def page(entries: Sequence[Entry], folder: Path) -> str:
    """Return the overview in Markdown. Its links are relative to `folder`."""
    whose = "Five changes of SGLang's" if len(entries) == len(CHANGES) else "Changes of SGLang's"
    blocks = [
        f"# {whose}, measured on {_gpus(entries)}",
        METHOD,
        items(RULES),
        kernels_sentence(entries),
        markdown_of(table_of_lines(SUMMARY, [_summary(entry) for entry in entries])),
    ]
    for entry in entries:
        blocks += _section(entry, folder)
    return "\n\n".join(blocks) + "\n"


def _gpus(entries: Sequence[Entry]) -> str:
    names = sorted({str(found.fact("gpu")) for entry in entries for found in entry.files if found.fact("gpu")})
    return " and ".join(names) or "no recorded GPU"


def kernels_sentence(entries: Sequence[Entry]) -> str:
    """Return a sentence that names the FlashInfer kernels that ran, and says whether trtllm-gen is missing among them."""
    files = [found for entry in entries for found in entry.files]
    rows = [row for found in files for row in found.content.get("rows", ())]
    ran = sorted({f"{row['kernel']} for {row['call']}" for row in rows if row.get("implementation") == FLASHINFER})
    capabilities = sorted({tuple(found.fact("capability") or ()) for found in files} - {()})
    where = " and ".join(f"SM{major}{minor}" for major, minor in capabilities) or "a GPU that is not recorded"
    if not ran:
        return f"On {where} no recording here names a kernel of FlashInfer's."
    sentence = f"On {where} FlashInfer ran {' and '.join(ran)}"
    if any("trtllm-gen" in kernel for kernel in ran):
        return f"{sentence}."
    return f"{sentence}. SGLang's backends run trtllm-gen on SM100; the changes of this page were not measured with trtllm-gen."


def _summary(entry: Entry) -> list[str]:
    change = entry.change
    name = f"[{change.number}](https://github.com/sgl-project/sglang/pull/{change.number}) {_lower(change.title)}"
    attentions = (entry.of_attention(attention) for attention in ("MHA", "MLA"))
    return [name, f"**{entry.verdict}**", *attentions, _exceptions(entry.claimed())]


def _exceptions(observations: Sequence[Observation]) -> str:
    where = [each.where for each in observations if each.standing is not Standing.HOLDS]
    left = len(where) - MOST_IN_A_CELL
    return "; ".join([*where[:MOST_IN_A_CELL], *([f"and {left} more"] if left > 0 else [])])


def _section(entry: Entry, folder: Path) -> list[str]:
    change = entry.change
    blocks = [
        f"## {change.number}: {_lower(change.title)}",
        f"**Claim.** {change.claim} ({change.source}.)",
        f"**Question.** {change.question} "
        f"To measure the change on your GPU, run `{command_of(change.module)} --out {change.module}.json`.",
    ]
    if entry.failure:
        left = "" if entry.answer is None else " The numbers below were recorded before the failure."
        blocks += [f"**Failed**: {entry.failure}.{left}"]
    if entry.answer is None:
        return [*blocks, f"**{NOT_RECORDED.capitalize()}.**"]
    blocks += [f"**Measured.** {entry.answer.setting}"]
    blocks += [markdown_of(table_of_lines(RECORDINGS, [_recording(found, folder) for found in entry.files]))]
    for aspect in entry.answer.aspects:
        blocks += _aspect(aspect)
    remarks = [*entry.answer.notes, *(f"Not measured: {lacking}" for lacking in entry.answer.missing)]
    return [*blocks, items(remarks)] if remarks else blocks


def _recording(found: RecordedFile, folder: Path) -> list[str]:
    watched = held_back(found)
    limited = [reasons for reasons in watched if reasons]
    reasons = ", ".join(sorted({reason for each in limited for reason in each}))
    counted = f"{len(limited)} of {len(watched)} rows that record it{f' ({reasons})' if reasons else ''}"
    return [
        f"[{found.path.name}]({Path(os.path.relpath(found.path, folder)).as_posix()})",
        day_of(found.path),
        str(found.fact("gpu") or NOT_RECORDED),
        f"`{found.fact('commit') or NOT_RECORDED}`",
        ", ".join(str(found.fact("packages", name) or NOT_RECORDED) for name in ("torch", "flashinfer-python")),
        counted if watched else NOT_RECORDED,
        str(found.content.get("method", NOT_RECORDED)),
    ]


def _aspect(aspect: Aspect) -> list[str]:
    aside = "" if aspect.of_claim else " (not claimed)"
    head = f"**{aspect.statement.removesuffix('.')}**{aside}"
    if not aspect.observations:
        return [f"{head}: {NOT_RECORDED}."]
    blocks = [f"{head}: this statement {aspect.verdict}."]
    blocks += [markdown_of(table_of_lines(GROUPS, [_group(name, each) for name, each in aspect.by_group().items()]))]
    listed = [Standing.FAILS, Standing.UNDECIDED]
    if all(each.saved_us is None for each in aspect.observations):
        listed = [Standing.HOLDS, *listed]  # the table has no figures
    found = [each for standing in listed for each in aspect.that(standing)]
    return [*blocks, *_points(found)]


def _points(observations: Sequence[Observation]) -> list[str]:
    figures = {(each.standing, each.figures) for each in observations}
    if len(figures) == 1 and len(observations) > 1:
        ((_, text),) = figures
        return [f"Measured at each of the {len(observations)} points: {text}."]
    lines = [(each.where, each.standing.value, each.figures) for each in observations[:MOST_NAMED]]
    if (left := len(observations) - MOST_NAMED) > 0:
        lines.append((f"and {left} more", "", ""))
    return [markdown_of(table_of_lines(POINTS, lines))] if lines else []


def _group(name: str, observations: Sequence[Observation]) -> list[str]:
    counts = [sum(each.standing is standing for each in observations) for standing in Standing]
    ratios = [each.ratio for each in observations if each.ratio is not None]
    faster = _range(f"{min(ratios):.2f}", f"{max(ratios):.2f}") if ratios else ""
    return [name, str(len(observations)), *map(str, counts), _saved(observations), faster]


def _saved(observations: Sequence[Observation]) -> str:
    saved = [each.saved_us for each in observations if each.saved_us is not None]
    return _range(microseconds(min(saved)), microseconds(max(saved))) if saved else ""


def claims_table(entries: Sequence[Entry]) -> Table:
    """Make a table with one row per statement that a change claims."""
    lines: list[tuple[str | Cell, ...]] = []
    for entry in entries:
        text = f"{entry.change.number} {entry.change.title}: {entry.verdict}"
        name = Cell(f"{text}\nfailed: {entry.failure}", style="failed") if entry.failure else Cell(text)
        if entry.answer is None:
            lines.append((name, entry.change.question, NOT_RECORDED, "", ""))
            continue
        for number, aspect in enumerate(each for each in entry.answer.aspects if each.of_claim):
            figures = (aspect.statement, aspect.verdict, _saved(aspect.observations), _exceptions(aspect.observations))
            lines.append((name if number == 0 else "", *figures))
    return table_of_lines(CLAIMS, lines, caption=f"SGLang's changes, measured on {_gpus(entries)}")


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _lower(words: str) -> str:
    return words[:1].lower() + words[1:]
