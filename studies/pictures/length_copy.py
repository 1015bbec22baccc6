"""Draw the work of a decode loop with and without the copy of its lengths, from `length_copy.json`, and verify masks."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.metadata.speculation.verify_mask import VerifyMask, VerifyMaskForm, verify_mask_cells
from lab.reports.pictures import style
from studies.pictures.cells import Box, Line, Look, cells_figure, check_legible

STEP_COLOURS = (style.COLOURS[0], style.COLOURS[4], style.COLOURS[2])  # of neighbouring steps
WAIT: dict[str, Any] = {
    "facecolor": "white",
    "edgecolor": "#888888",
    "hatch": "////",
    "linewidth": 0.8,
    "label": "the CPU waits for the GPU",
}
IDLE_COLOUR = "#F3B8A5"
ELSEWHERE_COLOUR = "#EEEEEE"
MOST_MASK_COLUMNS = 44  # more are not legible side by side
MASK_KINDS = {
    "prefix": Look("#BBBBBB", "key of the prefix, seen"),
    "seen": Look(style.COLOURS[0], "draft token, seen"),
    "hidden": Look("white", "draft token, hidden", edge="#AAAAAA"),
}


class Lane(enum.Enum):
    """A processor. The value is its name in the picture."""

    CPU = "CPU"
    GPU = "GPU"


@dataclass(frozen=True)
class Span:
    """A part of one step's work, in µs from any common start. If `waits` is True, the CPU waits for the GPU."""

    lane: Lane
    step: int
    start_us: float
    end_us: float
    waits: bool = False


@dataclass(frozen=True)
class LoopExcerpt:
    """Consecutive steps of a loop. If `is_whole` is False, the loop has more work before and after these steps."""

    name: str
    spans: tuple[Span, ...]
    is_whole: bool = False

    def of(self, lane: Lane) -> list[Span]:
        return sorted((span for span in self.spans if span.lane is lane), key=lambda span: span.start_us)


def recorded_excerpt(variant: Mapping[str, Any]) -> LoopExcerpt:
    """Return the steps of a variant's recorded `timeline`. Raises ValueError if it is empty or incomplete."""
    ranges = [(name, start, us) for lane, name, start, us in variant["timeline"] if lane == "host"]
    hosts = sorted((start, int(name.split()[1]), us) for name, start, us in ranges if name.startswith("step "))
    activities = [(start, us) for lane, _, start, us in variant["timeline"] if lane.startswith("GPU")]
    if not hosts or not activities or len(activities) % len(hosts):
        raise ValueError(
            f"the timeline has {len(hosts)} steps and {len(activities)} GPU activities, expected equally many activities for "
            "each of at least one step"
        )
    waits = [
        (start, us)
        for lane, name, start, us in variant["timeline"]
        if lane == "CUDA calls" and name.endswith("Synchronize")
    ]
    spans = [span for start, step, us in hosts for span in _host_spans(step, start, start + us, waits)]
    per_step = len(activities) // len(hosts)  # listed step by step
    for place, (start, us) in enumerate(activities):
        spans.append(Span(Lane.GPU, hosts[place // per_step][1], start, start + us))
    return LoopExcerpt(variant["arm"], tuple(spans))


def _host_spans(step: int, start_us: float, end_us: float, waits: Sequence[tuple[float, float]]) -> list[Span]:
    spans, at_us = [], start_us
    for wait_us, duration_us in sorted(waits):
        if start_us <= wait_us < end_us:
            spans.append(Span(Lane.CPU, step, at_us, wait_us))
            at_us = wait_us + duration_us
            spans.append(Span(Lane.CPU, step, wait_us, at_us, waits=True))
    return [*spans, Span(Lane.CPU, step, at_us, end_us)]


def timeline_figure(excerpts: Sequence[LoopExcerpt], title: str) -> Figure:
    """Draw the CPU's work above the GPU's work for each loop, on one time axis. A step has the same colour in both.

    A span is a `Rectangle` with the gid "<cpu or gpu> <step>", "wait <step>" if the CPU waits, or "idle" if the GPU has no
    work.
    """
    end_us = max(span.end_us for excerpt in excerpts for span in excerpt.spans)
    names, lanes = [excerpt.name for excerpt in excerpts], [lane.value for lane in Lane]
    figure, panels = style.lane_panels(title, names, lanes, 1.01 * end_us / 1e3, "time, ms")
    steps = sorted({span.step for excerpt in excerpts for span in excerpt.spans})
    looks = {}
    for place, step in enumerate(steps):
        alike = ", ".join(map(str, steps[place % len(STEP_COLOURS) :: len(STEP_COLOURS)]))
        looks[step] = {"color": STEP_COLOURS[place % len(STEP_COLOURS)], "linewidth": 0, "label": f"step {alike}"}
    for axes, excerpt in zip(panels, excerpts, strict=True):
        _draw_spans(axes, excerpt, looks)
        _draw_idle(axes, excerpt)
        if not excerpt.is_whole:
            _draw_elsewhere(axes, excerpt, 1.01 * end_us)
    style.legend_below(figure, 3)
    return figure


def _draw_spans(axes: Axes, excerpt: LoopExcerpt, looks: Mapping[int, Mapping[str, Any]]) -> None:
    for span in excerpt.spans:
        kind = "wait" if span.waits else span.lane.value.lower()
        look = WAIT if span.waits else looks[span.step]
        _bar(axes, span.lane, span.start_us, span.end_us, gid=f"{kind} {span.step}", zorder=3, **look)
    for step in {span.step for span in excerpt.spans}:
        ends = [span.end_us for span in excerpt.of(Lane.CPU) if span.step == step]
        starts = [span.start_us for span in excerpt.of(Lane.GPU) if span.step == step]
        if starts and ends and min(starts) > max(ends):  # the work was launched before it could begin
            line = [max(ends) / 1e3, min(starts) / 1e3], [0.8, 1]
            axes.plot(*line, color=looks[step]["color"], linewidth=1, linestyle=":")


def _draw_idle(axes: Axes, excerpt: LoopExcerpt) -> None:
    busy = excerpt.of(Lane.GPU)
    end_us = busy[0].end_us
    for span in busy[1:]:
        if span.start_us > end_us:
            look = {"color": IDLE_COLOUR, "linewidth": 0, "label": "the GPU is idle"}
            _bar(axes, Lane.GPU, end_us, span.start_us, gid="idle", **look)
        end_us = max(end_us, span.end_us)


def _draw_elsewhere(axes: Axes, excerpt: LoopExcerpt, end_us: float) -> None:
    look = {"color": ELSEWHERE_COLOUR, "linewidth": 0, "label": "other steps, not recorded"}
    for lane in Lane:
        spans = excerpt.of(lane)
        _bar(axes, lane, 0, spans[0].start_us, **look)
        _bar(axes, lane, max(span.end_us for span in spans), end_us, **look)


def _bar(axes: Axes, lane: Lane, start_us: float, end_us: float, **look: Any) -> None:
    style.draw_span(axes, list(Lane).index(lane), start_us / 1e3, end_us / 1e3, **look)


def variants_figure(variants: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw the busy and idle GPU time of a step of each recorded variant. A mark is the time of a step without a profile."""
    figure, axes = style.one_panel(title, 1.2 + 0.33 * len(variants), grid="x")
    for place, variant in enumerate(variants):
        step_us, idle_us = variant["medians"]["step_us"], variant["medians"]["idle_us"]
        unprofiled_us = median(variant["unprofiled_step_us"])
        busy_us = step_us - idle_us
        axes.barh(place, busy_us, 0.68, color=style.COLOURS[0], label="GPU busy")
        axes.barh(place, idle_us, 0.68, left=busy_us, color=IDLE_COLOUR, label="GPU idle")
        axes.plot(unprofiled_us, place, "|k", markersize=15, markeredgewidth=1.8, label="step without the profiler")
        end = max(step_us, unprofiled_us), place
        style.write_after(axes, end, f"{variant['medians']['idle_percent']:.0f} % idle", gap=6)
    style.name_lines(
        axes,
        [f"GPU {variant['gpu_us']:,.0f}, host {variant['host_us']:,.0f} µs, {variant['arm']}" for variant in variants],
    )
    axes.set_xlim(0, 1.18 * max(variant["medians"]["step_us"] for variant in variants))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(axes, "one step on the GPU, µs")
    style.legend_below(figure, 3)
    return figure


def step_time_figure(
    num_layers: Sequence[int],
    gpu_us: Sequence[float],
    step_us: Mapping[str, Sequence[float]],
    title: str,
    chosen: int | None = None,
) -> Figure:
    """Draw the time of a step over the number of layers for two loops, the slower first. Above `gpu_us` the GPU is idle."""
    figure, axes = style.one_panel(title, 3.3)
    axes.plot(num_layers, gpu_us, "--", color=style.TEXT_COLOUR, linewidth=1.3, label="GPU work alone")
    (slower, slower_us), (faster, faster_us) = step_us.items()
    axes.plot(num_layers, slower_us, color=style.COLOURS[1], linewidth=1.8, label=f"a step {slower}")
    axes.plot(num_layers, faster_us, color=style.COLOURS[0], linewidth=1.8, label=f"a step {faster}")
    bubbles = (
        (faster_us, slower_us, style.COLOURS[1], f"bubble {slower} only"),
        (gpu_us, faster_us, style.COLOURS[0], "bubble in both"),
    )
    for lower_us, upper_us, colour, words in bubbles:
        axes.fill_between(num_layers, lower_us, upper_us, color=colour, alpha=0.16, linewidth=0, label=words)
    if chosen is not None:
        axes.axvline(chosen, color="#999999", linewidth=1, linestyle=":")
    axes.set(xlim=(min(num_layers), max(num_layers)), ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(axes, "layers", "time of a step, µs")
    style.legend_below(figure, 3)
    return figure


def verify_mask_figure(masks: Sequence[VerifyMask], seq_lens: Sequence[int], title: str) -> Figure:
    """Draw each mask of a batch, which `write_chain_mask` has written, as a block of query rows by keys per request.

    A cell has the gid "<form's name> <request> <row> <column> <prefix, seen or hidden>". Raises ValueError for too many
    columns.
    """
    blocks = [_mask_blocks(mask, seq_lens) for mask in masks]
    columns = max(sum(width for _, _, width in each) + len(each) - 1 for each in blocks)
    check_legible(columns, "columns", MOST_MASK_COLUMNS, "draw fewer or shorter requests")
    lines: list[Line] = []
    for mask, each in zip(masks, blocks, strict=True):
        used = verify_mask_cells(
            mask.form,
            len(seq_lens),
            mask.num_draft_tokens,
            max_context_len=mask.max_context_len,
            seq_lens_sum=sum(seq_lens),
        )
        words = f"{mask.form.name}: {used} cells for this batch; a step fills all {mask.nbytes} bytes of the buffer"
        lines += [Line(heading=words), *_mask_lines(mask, each), Line()]
    return cells_figure(title, lines, MASK_KINDS, (0, MOST_MASK_COLUMNS), square=True)


def _mask_blocks(mask: VerifyMask, seq_lens: Sequence[int]) -> list[tuple[int, int, int]]:
    blocks, cell = [], 0
    for length in seq_lens:
        prefix = length if mask.form is VerifyMaskForm.FULL else 0
        blocks.append((cell, prefix, prefix + mask.num_draft_tokens))
        cell += mask.num_draft_tokens * (prefix + mask.num_draft_tokens)
    return blocks


def _mask_lines(mask: VerifyMask, blocks: Sequence[tuple[int, int, int]]) -> list[Line]:
    rows: list[list[Box]] = [[] for _ in range(mask.num_draft_tokens)]
    left = 0
    for request, (first, prefix, width) in enumerate(blocks):
        cells = mask.buffer[first : first + len(rows) * width].view(len(rows), width).tolist()
        for row, sees in enumerate(cells):
            for column, seen in enumerate(sees):
                kind = ("prefix" if column < prefix else "seen") if seen else "hidden"
                rows[row].append(Box(left + column, kind, gid=f"{mask.form.name} {request} {row} {column} {kind}"))
        left += width + 1
    return [Line(cells=row) for row in rows]


DRAWINGS = (style.Drawing("arms", "The GPU's time of a step", variants_figure),)
