"""The metadata of a multi-step draft, which parts of it are read, and the time that each part takes.

Rows are those of `results/<gpu>/draft_steps.json`, as `lab.experiments.draft_steps` writes them.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from lab.metadata import ForwardBatch, KVPool
from lab.metadata.speculation.draft_steps import DraftBuffers, DraftStep, PreparedDraft
from lab.reports.pictures import style
from lab.reports.pictures.cells import Cell, Kind, Line, Ruler, cells_figure, check_legible
from lab.reports.tables import counted
from lab.timing.draft import lengths_and_table

MOST_SLOTS = 40  # more are not legible side by side
FEWEST_SLOTS = 16  # fewer would be drawn too wide
TOKEN_TICKS = (1024, 8192, 32768, 131072)

KINDS = {
    "page": Kind("#56B4E9", "page, read by the attention"),
    "prefix": Kind("#E8E8E8", "slot of the prefix, read by nobody", edge="#AAAAAA", linestyle=":", ink="#555555"),
    "drafted": Kind("#C4C4C4", "slot of a drafted token, read by nobody", edge="#AAAAAA", linestyle=":", ink="#555555"),
}

# Of each plan: the name that recorded rows have, words, colour, marker.
PLANS = (
    ("common_template", "common template: lists and steps", style.COLOURS[1], "o"),
    ("per_step", "steps alone (26241)", style.COLOURS[0], "s"),
    ("one_launch", "one launch for all steps", style.COLOURS[2], "^"),
)
LISTS = (
    ("serial", "serial, as SGLang's was", style.COLOURS[1], "o"),
    ("spread", "each prefix read once", style.COLOURS[0], "s"),
)


def built_figure(
    batch: ForwardBatch, pool: KVPool, prepared: PreparedDraft, buffers: DraftBuffers, title: str
) -> Figure:
    """Draw what the common template makes for each step: the page table, which is read, and the ragged list, which is not.

    A slot of a list has the gid "list <step> <request> <slot>", a page "page <step> <request> <page>".

    Args:
        batch, pool: a draft decode of chains, and where its requests live.
        prepared: written; by `DraftPlan.COMMON_TEMPLATE`.
        buffers: what it was written to.
        title: of the picture.

    Raises:
        ValueError: the buffers have no lists, or the requests are too long to be drawn.
    """
    if buffers.kv_indptr is None or buffers.kv_indices is None:
        raise ValueError("the buffers have no ragged lists to draw: prepare the draft with DraftPlan.COMMON_TEMPLATE")
    prefix_lens, num_lists = batch.seq_lens.tolist(), buffers.kv_indptr.shape[0]
    widths = [-(-(length + num_lists) // pool.page_size) * pool.page_size for length in prefix_lens]
    starts = [sum(widths[:i]) + i for i in range(len(widths))]  # a slot's space between requests
    slots = sum(widths) + len(widths) - 1
    check_legible(slots, "slots", MOST_SLOTS, "draw fewer or shorter requests, on smaller pages")
    lines: list[Line] = []
    for step in range(num_lists):
        if step < len(prepared.steps):
            lines += _handed_lines(starts, step, prepared.steps[step], pool.page_size)
        else:
            lines.append(Line(f"step {step}: no such step"))
        boundaries = buffers.kv_indptr[step, : batch.batch_size + 1].tolist()
        indices = buffers.kv_indices[step, : boundaries[-1]].tolist()
        slots_of = [indices[first:end] for first, end in pairwise(boundaries)]
        cells = [
            Cell(
                start + place,
                "prefix" if place < prefix_lens[request] else "drafted",
                str(slot),
                gid=f"list {step} {request} {slot}",
            )
            for request, start in enumerate(starts)
            for place, slot in enumerate(slots_of[request])
        ]
        lines += [Line(f"kv_indices[{step}]", cells), Line()]
    across = {
        start + width / 2: f"request {i}: {prefix_lens[i]} tokens"
        for i, (start, width) in enumerate(zip(starts, widths, strict=True))
    }
    return cells_figure(title, lines, KINDS, (0, max(slots, FEWEST_SLOTS)), across=across)


def _handed_lines(starts: Sequence[int], step: int, handed: DraftStep, page_size: int) -> list[Line]:
    """Return a line of rulers as long as the kernel is told that requests are, and one of the pages that they cover."""
    seq_lens, table = lengths_and_table(handed.metadata)
    placed = list(zip(starts, seq_lens.tolist(), strict=True))
    pages = [
        Cell(start + place * page_size, "page", f"page {page}", page_size, gid=f"page {step} {request} {page}")
        for request, (start, length) in enumerate(placed)
        for place, page in enumerate(table[request, : -(-length // page_size)].tolist())
    ]
    rulers = [Ruler(start, length, str(length)) for start, length in placed]
    return [Line(f"step {step}: seq_lens", rulers=rulers), Line("block_tables", pages)]


def draft_times_figure(rows: Iterable[Mapping[str, Any]], title: str, *, num_steps: int = 3) -> Figure:
    """Draw the GPU time of one draft's metadata over the length of its requests, by plan: columns of batch sizes, MHA over MLA.

    Args:
        rows: recorded; those of equal requests, static buffers and so many steps are drawn.
        title: what was measured, on what.
        num_steps: `speculative_num_steps`.

    Raises:
        ValueError: no such row.
    """
    drawn = [row for row in _uniform(rows) if row["mode"] == "draft_steps" and row["num_steps"] == num_steps]
    figure, panels = _panels(drawn, ("MHA", "MLA"), title, f"{num_steps} steps")
    for attention, line in panels.items():
        for requests, axes in line.items():
            found = {}
            for plan, words, colour, marker in PLANS:
                points = _points(drawn, kernel=f"{attention.lower()} {plan}", requests=requests)
                found[plan] = points
                axes.plot(*points, marker=marker, markersize=4, color=colour, label=words, linewidth=1.4)
            tokens, template_us = found["common_template"]
            axes.fill_between(
                tokens, found["per_step"][1], template_us, color=style.COLOURS[1], alpha=0.13, linewidth=0
            )
    keys: list[Artist] = [style.line_key(words, colour, marker) for _, words, colour, marker in PLANS]
    keys.append(Patch(color=style.COLOURS[1], alpha=0.13, label="what nobody reads"))
    style.legend_below(figure, keys, 4)
    return figure


def lists_figure(rows: Iterable[Mapping[str, Any]], title: str, *, num_steps: int = 3) -> Figure:
    """Draw the GPU time of the ragged lists alone over the length of the requests, by schedule, and the floor of their bytes.

    Args, raises: as `draft_times_figure`.
    """
    drawn = [row for row in _uniform(rows) if row["mode"] == "kv_indices" and row["num_steps"] == num_steps]
    figure, panels = _panels(drawn, ("lists",), title, f"{num_steps} steps")
    for requests, axes in panels["lists"].items():
        for schedule, words, colour, marker in LISTS:
            points = _points(drawn, kernel=schedule, requests=requests)
            axes.plot(*points, marker=marker, markersize=4, color=colour, label=words, linewidth=1.4)
        floor = _points(drawn, value="floor_us", kernel="serial", requests=requests)
        axes.plot(*floor, "--", color=style.TEXT_COLOUR, linewidth=1.2)
    keys = [style.line_key(words, colour, marker) for _, words, colour, marker in LISTS]
    keys.append(
        style.line_key(
            "floor: the bytes, over the measured bandwidth", style.TEXT_COLOUR, linestyle="--", linewidth=1.5
        )
    )
    style.legend_below(figure, keys, 3)
    return figure


def steps_figure(rows: Iterable[Mapping[str, Any]], title: str, *, requests: int, tokens: int) -> Figure:
    """Draw the GPU time of one draft's metadata over `speculative_num_steps`, by plan, at one batch size and length.

    Raises:
        ValueError: no such row.
    """
    drawn = [
        row
        for row in _uniform(rows)
        if row["mode"] == "draft_steps" and row["kv_tokens"] == requests * tokens and row["requests"] == requests
    ]
    if not drawn:
        raise ValueError(f"no recorded row has {requests} requests of {tokens} tokens")
    figure = style.new_figure(title, height_inches=2.9)
    axes_of = dict(zip(("MHA", "MLA"), figure.subplots(1, 2, sharey=True), strict=True))
    for attention, axes in axes_of.items():
        style.plain(axes)
        style.logarithmic(axes, "y")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_title(attention, fontsize=style.FONT_POINTS + 1)
        for plan, words, colour, marker in PLANS:
            points = _points(drawn, across="num_steps", kernel=f"{attention.lower()} {plan}", requests=requests)
            axes.plot(*points, marker=marker, markersize=5, color=colour, label=words, linewidth=1.4)
            axes.xaxis.set_major_locator(FixedLocator(points[0]))
        axes.set_xlabel("speculative_num_steps", fontsize=style.FONT_POINTS)
    axes_of["MHA"].set_ylabel("GPU time of a draft, µs", fontsize=style.FONT_POINTS)
    keys = [style.line_key(words, colour, marker) for _, words, colour, marker in PLANS]
    style.legend_below(figure, keys, 3)
    return figure


def claim_figure(claim: Mapping[str, Any], title: str) -> Figure:
    """Draw what skipping the lists saved here, per draft, beside what 26241's description states.

    Args:
        claim: the recorded `pr_26241`: its stated times per token, and savings on the GPU and on the host in µs.
        title: what was measured, on what.
    """
    gpu = {f"GPU, {_requests(point)}": saved for point, saved in claim["gpu_saving_us_per_draft_mla"].items()}
    host = {f"host, {form}": saved for form, saved in claim["host_saving_us_per_draft"].items()}
    bars = gpu | host
    stated_us = claim["implied_saving_us_per_iteration"]
    figure, axes = style.one_panel(title, height_inches=1.3 + 0.26 * len(bars), grid="x")
    places = range(len(bars))
    axes.barh(places, list(bars.values()), 0.68, color=[style.COLOURS[0]] * len(gpu) + [style.COLOURS[4]] * len(host))
    for place, saved in zip(places, bars.values(), strict=True):
        style.write_after(axes, (saved, place), f"{saved:,.0f}")
    axes.axvline(stated_us, color=style.COLOURS[1], linewidth=1.6, linestyle="--")
    end = stated_us, len(bars) - 1.5
    style.write_after(
        axes, end, f"stated: {stated_us:,.0f}", gap=6, color=style.COLOURS[1], fontsize=style.FONT_POINTS + 0.5
    )
    axes.set_yticks(places, list(bars), fontsize=style.FONT_POINTS)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max(*bars.values(), stated_us))
    style.name_axes(axes, "saved per iteration, µs")
    return figure


def _requests(point: str) -> str:
    """Return "4 requests of 80K" for "4x80k/steps3"."""
    count, _, length = point.split("/")[0].partition("x")
    return f"{counted(int(count), 'request')} of {length.upper()}"


def _uniform(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of batches whose requests are equally long."""
    return [row for row in rows if not row["point"].startswith("trace")]


def _points(
    rows: Iterable[Mapping[str, Any]], across: str = "tokens", value: str = "median_us", **wanted: Any
) -> tuple[list[float], list[float]]:
    """Return x and y of the rows with the wanted values, in order of x: a column, or "tokens", which is tokens per request."""
    found = sorted(
        (row["kv_tokens"] / row["requests"] if across == "tokens" else row[across], row[value])
        for row in rows
        if all(row[name] == each for name, each in wanted.items())
    )
    if not found:
        raise ValueError(f"no recorded row has {', '.join(f'{name} {each!r}' for name, each in wanted.items())}")
    return [x for x, _ in found], [y for _, y in found]


def _panels(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str, what: str
) -> tuple[Figure, dict[str, dict[int, Axes]]]:
    """Make panels by name and number of requests: tokens across, GPU time upwards, the same axes for all."""
    counts = _counts_on_the_grid(rows)
    if not counts:
        raise ValueError(f"no recorded row has {what}")
    figure = style.new_figure(title, height_inches=1.1 + 1.75 * len(names))
    drawn = figure.subplots(len(names), len(counts), sharex=True, sharey=True, squeeze=False)
    panels: dict[str, dict[int, Axes]] = {}
    for name, line in zip(names, drawn, strict=True):
        panels[name] = dict(zip(counts, line, strict=True))
        line[0].set_ylabel(f"{name}: GPU time, µs" if len(names) > 1 else "GPU time, µs", fontsize=style.FONT_POINTS)
    for axes in drawn.flat:
        style.plain(axes)
        style.logarithmic(axes, "xy")
        axes.tick_params(labelsize=style.FONT_POINTS - 0.5)
        axes.set_xticks(TOKEN_TICKS, [f"{tick // 1024}K" for tick in TOKEN_TICKS])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())
    for count, axes in zip(counts, drawn[0], strict=True):
        axes.set_title(counted(count, "request"), fontsize=style.FONT_POINTS + 0.5)
    for axes in drawn[-1]:
        axes.set_xlabel("tokens per request", fontsize=style.FONT_POINTS)
    return figure, panels


def _counts_on_the_grid(rows: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the batch sizes that were measured at more than one length."""
    lengths: dict[int, set[int]] = {}
    for row in rows:
        lengths.setdefault(row["requests"], set()).add(row["kv_tokens"])
    return sorted(requests for requests, found in lengths.items() if len(found) > 1)


DRAWINGS = (
    style.Drawing("pr_26241", "What skipping the lists saves per draft", claim_figure),
    style.Drawing("rows", "GPU time of one draft's metadata", draft_times_figure),
)
