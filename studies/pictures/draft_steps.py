"""Draw the metadata of a multi-step draft, and the time that its parts take, from rows of `results/<gpu>/draft_steps.json`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from lab.metadata import ForwardBatch, KVPool
from lab.metadata.speculation.draft_steps import DraftBuffers, DraftStep, PreparedDraft
from lab.reports.pictures import style
from lab.wording import counted
from studies.pictures.cells import Box, Line, Look, Ruler, cells_figure, check_legible

MOST_SLOTS = 40  # more are not legible side by side
FEWEST_SLOTS = 16  # fewer would be drawn too wide
TOKEN_TICKS = (1024, 8192, 32768, 131072)

KINDS = {
    "page": Look("#56B4E9", "page, read by the attention"),
    "prefix": Look("#E8E8E8", "slot of the prefix, read by nobody", edge="#AAAAAA", linestyle=":", ink="#555555"),
    "drafted": Look("#C4C4C4", "slot of a drafted token, read by nobody", edge="#AAAAAA", linestyle=":", ink="#555555"),
}

# Of each plan: the name that recorded rows have, and how its line looks.
PLANS: dict[str, dict[str, Any]] = {
    "common_template": {"label": "common template: lists and steps", "color": style.COLOURS[1], "marker": "o"},
    "per_step": {"label": "steps alone (26241)", "color": style.COLOURS[0], "marker": "s"},
    "one_launch": {"label": "one launch for all steps", "color": style.COLOURS[2], "marker": "^"},
}
LISTS: dict[str, dict[str, Any]] = {
    "serial": {"label": "serial, as SGLang's was", "color": style.COLOURS[1], "marker": "o"},
    "spread": {"label": "each prefix read once", "color": style.COLOURS[0], "marker": "s"},
}


def built_figure(
    batch: ForwardBatch, pool: KVPool, prepared: PreparedDraft, buffers: DraftBuffers, title: str
) -> Figure:
    """Draw the metadata that SGLang's common template makes for each draft step: the page table, and the ragged list, which no
    kernel reads.

    A slot of a list has the gid "list <step> <request> <slot>", a page "page <step> <request> <page>".

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
            lines += _step_lines(starts, step, prepared.steps[step], pool.page_size)
        else:
            lines.append(Line(f"step {step}: no such step"))
        boundaries = buffers.kv_indptr[step, : batch.batch_size + 1].tolist()
        indices = buffers.kv_indices[step, : boundaries[-1]].tolist()
        slots_of = [indices[first:end] for first, end in pairwise(boundaries)]
        cells = [
            Box(
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


def _step_lines(starts: Sequence[int], step: int, draft_step: DraftStep, page_size: int) -> list[Line]:
    seq_lens, table = draft_step.metadata.seq_lens, draft_step.metadata.block_tables
    placed = list(zip(starts, seq_lens.tolist(), strict=True))
    pages = [
        Box(start + place * page_size, "page", f"page {page}", page_size, gid=f"page {step} {request} {page}")
        for request, (start, length) in enumerate(placed)
        for place, page in enumerate(table[request, : -(-length // page_size)].tolist())
    ]
    rulers = [Ruler(start, length, str(length)) for start, length in placed]
    return [Line(f"step {step}: seq_lens", rulers=rulers), Line("block_tables", pages)]


def draft_times_figure(rows: Iterable[Mapping[str, Any]], title: str, *, num_steps: int = 3) -> Figure:
    """Draw the GPU time of a draft's metadata over the requests' length, by plan. Columns are batch sizes; MHA is above MLA."""
    drawn = _uniform(rows, mode="draft_steps", num_steps=num_steps)
    figure, panels = _panels(drawn, ("MHA", "MLA"), title, f"{num_steps} steps")
    for (attention, requests), axes in panels.items():
        found = {plan: _points(drawn, kernel=f"{attention.lower()} {plan}", requests=requests) for plan in PLANS}
        for plan, look in PLANS.items():
            axes.plot(*found[plan], **style.LINE, **look)
        tokens, template_us = found["common_template"]
        dead: dict[str, Any] = {"color": style.COLOURS[1], "alpha": 0.13, "linewidth": 0, "label": "what nobody reads"}
        axes.fill_between(tokens, found["per_step"][1], template_us, **dead)
    style.legend_below(figure, 4)
    return figure


def lists_figure(rows: Iterable[Mapping[str, Any]], title: str, *, num_steps: int = 3) -> Figure:
    """Draw the GPU time of the ragged lists alone over the requests' length, by schedule, and the floor."""
    drawn = _uniform(rows, mode="kv_indices", num_steps=num_steps)
    figure, panels = _panels(drawn, ("lists",), title, f"{num_steps} steps")
    for (_, requests), axes in panels.items():
        for schedule, look in LISTS.items():
            axes.plot(*_points(drawn, kernel=schedule, requests=requests), **style.LINE, **look)
        floor = _points(drawn, value="floor_us", kernel="serial", requests=requests)
        axes.plot(*floor, label="floor: the bytes, over the measured bandwidth", **style.FLOOR)
    style.legend_below(figure, 3)
    return figure


def steps_figure(rows: Iterable[Mapping[str, Any]], title: str, *, requests: int, tokens: int) -> Figure:
    """Draw the GPU time of a draft's metadata over `speculative_num_steps`, by plan. Raises ValueError without a row."""
    drawn = _uniform(rows, mode="draft_steps", requests=requests, kv_tokens=requests * tokens)
    if not drawn:
        raise ValueError(f"no recorded row has {requests} requests of {tokens} tokens")
    figure, panels = style.panels(title, 2.9, columns=2, log="y")
    for attention, axes in zip(("MHA", "MLA"), panels[0], strict=True):
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        style.name_panel(axes, attention)
        for plan, look in PLANS.items():
            points = _points(drawn, across="num_steps", kernel=f"{attention.lower()} {plan}", requests=requests)
            axes.plot(*points, **style.LINE, **look)
            axes.xaxis.set_major_locator(FixedLocator(points[0]))
        style.name_axes(axes, "speculative_num_steps")
    panels[0, 0].set_ylabel("GPU time of a draft, µs", fontsize=style.FONT_POINTS)
    style.legend_below(figure, 3)
    return figure


def claim_figure(claim: Mapping[str, Any], title: str) -> Figure:
    """Draw the measured saving per draft without the ragged lists, and the saving that pull request 26241 claims."""
    gpu = {f"GPU, {_requests(point)}": saved for point, saved in claim["gpu_saving_us_per_draft_mla"].items()}
    host = {f"host, {form}": saved for form, saved in claim["host_saving_us_per_draft"].items()}
    bars = gpu | host
    stated_us = claim["implied_saving_us_per_iteration"]
    figure, axes = style.one_panel(title, 1.3 + 0.26 * len(bars), grid="x")
    colours = [style.COLOURS[0]] * len(gpu) + [style.COLOURS[4]] * len(host)
    for place, (saved, colour) in enumerate(zip(bars.values(), colours, strict=True)):
        axes.barh(place, saved, 0.68, color=colour)
        style.write_after(axes, (saved, place), f"{saved:,.0f}")
    axes.axvline(stated_us, color=style.COLOURS[1], linewidth=1.6, linestyle="--")
    end = stated_us, len(bars) - 1.5
    style.write_after(axes, end, f"stated: {stated_us:,.0f}", gap=6, color=style.COLOURS[1])
    style.name_lines(axes, list(bars))
    axes.set_xlim(0, 1.2 * max(*bars.values(), stated_us))
    style.name_axes(axes, "saved per iteration, µs")
    return figure


def _requests(point: str) -> str:
    """Convert the name of a point, such as "4x80k/steps3", to words: "4 requests of 80K"."""
    count, _, length = point.split("/")[0].partition("x")
    return f"{counted(int(count), 'request')} of {length.upper()}"


def _with(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[name] == each for name, each in wanted.items())]


def _uniform(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    return _with((row for row in rows if not row["point"].startswith("trace")), **wanted)


def _points(
    rows: Iterable[Mapping[str, Any]], across: str = "tokens", value: str = "median_us", **wanted: Any
) -> tuple[list[float], list[float]]:
    found = sorted(
        (row["kv_tokens"] / row["requests"] if across == "tokens" else row[across], row[value])
        for row in _with(rows, **wanted)
    )
    if not found:
        raise ValueError(f"no recorded row has {', '.join(f'{name} {each!r}' for name, each in wanted.items())}")
    return [x for x, _ in found], [y for _, y in found]


def _panels(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], title: str, what: str
) -> tuple[Figure, dict[tuple[str, int], Axes]]:
    lengths: dict[int, set[int]] = {}
    for row in rows:
        lengths.setdefault(row["requests"], set()).add(row["kv_tokens"])
    counts = sorted(requests for requests, found in lengths.items() if len(found) > 1)
    if not counts:
        raise ValueError(f"no recorded row has {what}")
    figure, drawn = style.panels(title, 1.1 + 1.75 * len(names), len(names), len(counts), log="xy")
    for axes in drawn.flat:
        style.mark_sizes(axes, TOKEN_TICKS)
        axes.yaxis.set_minor_formatter(NullFormatter())
    for count, axes in zip(counts, drawn[0], strict=True):
        style.name_panel(axes, counted(count, "request"))
    for axes in drawn[-1]:
        style.name_axes(axes, "tokens per request")
    for name, axes in zip(names, drawn[:, 0], strict=True):
        axes.set_ylabel(f"{name}: GPU time, µs" if len(names) > 1 else "GPU time, µs", fontsize=style.FONT_POINTS)
    return figure, dict(zip(product(names, counts), drawn.flat, strict=True))


DRAWINGS = (
    style.Drawing("pr_26241", "What skipping the lists saves per draft", claim_figure),
    style.Drawing("rows", "GPU time of one draft's metadata", draft_times_figure),
)
