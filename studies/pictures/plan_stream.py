"""Draw a verify pass that is planned during the draft: what its plan depends on, a recorded iteration, and the time saved."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.reports.pictures import style
from studies.changes.change import pairs
from studies.pictures.cells import Box, Line, Look, cells_figure

LANES = ("forward", "plan")  # from the top
PHASES = {"inputs": "#999999", "draft": "#56B4E9", "plan": "#D55E00", "fix-up": "#CC79A7", "verify": "#009E73"}
OTHER = "#444444"  # work of no phase
LEAST_SHARE = 0.0012  # of the axis: what is shorter is drawn as long, so that it is seen
AFTER_VERIFY_STARTS_US = 60.0

# One kernel or copy of an iteration: `studies.plan_stream.two_lanes` says what it holds.
PhaseEvent = Mapping[str, Any]


def draft_to_verify_us(events: Iterable[PhaseEvent]) -> tuple[float, float]:
    """Return the end of the draft and the start of the verify pass, in µs after the start of the iteration's first kernel."""
    listed = list(events)
    ended = max(each["start_us"] + each["duration_us"] for each in listed if each["phase"] == "draft")
    return ended, min(each["start_us"] for each in listed if each["phase"] == "verify")


def two_lane_figure(
    timelines: Mapping[str, Sequence[PhaseEvent]], title: str, window_us: tuple[float, float] | None = None
) -> Figure:
    """Draw recorded iterations below each other, with a lane per stream. An arrow leads from the draft's end to the verify
    pass's start.

    A kernel is a `Rectangle` whose gid is "<stream> <phase>". `window_us` counts from the iteration's first kernel; None: it
    ends shortly after the last verify pass has begun. Raises ValueError for no timeline or an empty window.
    """
    if not timelines:
        raise ValueError("no timeline to draw: pass at least one iteration's events")
    verify_starts = [draft_to_verify_us(events)[1] for events in timelines.values()]
    window = window_us or (0.0, max(verify_starts) + AFTER_VERIFY_STARTS_US)
    if window[0] >= window[1]:
        raise ValueError(f"window_us={window_us} is empty: its end must be later than its start")
    lanes = [f"{lane} stream" for lane in LANES]
    figure, panels = style.lane_panels(title, timelines, lanes, window[1], "µs from the iteration's first kernel on")
    for axes, events in zip(panels, timelines.values(), strict=True):
        axes.set(xlim=window, ylim=(len(LANES) + 0.45, -0.1))
        for each in events:
            if each["start_us"] <= window[1] and each["start_us"] + each["duration_us"] >= window[0]:
                _draw_event(axes, each, LEAST_SHARE * (window[1] - window[0]))
        _draw_gap(axes, events, window)
    style.legend_below(figure, len(PHASES))
    return figure


def _draw_event(axes: Axes, event: PhaseEvent, least_us: float) -> None:
    stream, phase, start_us = event["stream"], event["phase"], event["start_us"]
    look = {"facecolor": PHASES.get(phase, OTHER), "edgecolor": "white", "linewidth": 0.2, "label": phase}
    end_us = start_us + max(event["duration_us"], least_us)
    style.draw_span(axes, LANES.index(stream), start_us, end_us, gid=f"{stream} {phase}", **look)


def _draw_gap(axes: Axes, events: Iterable[PhaseEvent], window: tuple[float, float]) -> None:
    ended, started = draft_to_verify_us(events)
    y = len(LANES) + 0.12
    for x in (ended, started):
        axes.plot([x, x], [0, y + 0.15], color="black", linewidth=0.7, linestyle=":")
    if ended < window[0] or started > window[1]:
        return
    arrow = {"arrowstyle": "<->", "shrinkA": 0, "shrinkB": 0, "linewidth": 0.8}
    axes.annotate("", (started, y), (ended, y), arrowprops=arrow)
    style.write_after(axes, (ended, y), f"{started - ended:,.1f} µs from draft to verify", gap=-5, ha="right")


# --- what the overlap saved -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The time in µs that the overlap of plan and draft saves in one kind of iteration. A negative time is a cost.

    Attributes:
        traced_us, traced_rounds_us: from the medians of all profiled iterations, and of each round's.
        untraced_us, untraced_rounds_us: the same by the host's clock over a whole run, without a profiler.
    """

    name: str
    traced_us: float
    traced_rounds_us: tuple[float, ...]
    untraced_us: float
    untraced_rounds_us: tuple[float, ...]


def savings_of_overlap(rows: Sequence[Mapping[str, Any]]) -> list[Saved]:
    """Return how much longer iterations take if they are planned after the draft, not during it. Equal runs are a round."""
    saved = []
    for before, beside in pairs(rows, "start", "in line", "after the inputs", ("drafts", "builder", "draft_us")):
        untraced_us = before["unprofiled_iteration_us"], beside["unprofiled_iteration_us"]
        saved.append(
            Saved(
                name=f"{before['drafts']}, {before['builder']}, draft of {before['draft_us']:g} µs",
                traced_us=before["medians"]["iteration_us"] - beside["medians"]["iteration_us"],
                traced_rounds_us=_differences(_run_medians(before), _run_medians(beside)),
                untraced_us=statistics.median(untraced_us[0]) - statistics.median(untraced_us[1]),
                untraced_rounds_us=_differences(*untraced_us),
            )
        )
    return saved


def _run_medians(row: Mapping[str, Any]) -> list[float]:
    return [statistics.median(each["iteration_us"] for each in run) for run in row["runs"]]


def _differences(before: Sequence[float], beside: Sequence[float]) -> tuple[float, ...]:
    return tuple(one - other for one, other in zip(before, beside, strict=True))


def saved_figure(saved: Sequence[Saved], title: str) -> Figure:
    """Draw bars of the time that the overlap saves, with and without a profiler, and a dot per round."""
    figure, axes = style.one_panel(title, 1.3 + 0.48 * len(saved), grid="x")
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=style.TEXT_COLOUR, linewidth=1)
    words = ("in the profiler's trace, medians of all iterations", "without a profiler, medians of all runs")
    looks: list[dict[str, Any]] = [
        {"color": colour, "alpha": 0.75, "label": each} for each, colour in zip(words, style.COLOURS, strict=False)
    ]
    for i, each in enumerate(saved):
        pairs = ((each.traced_us, each.traced_rounds_us), (each.untraced_us, each.untraced_rounds_us))
        for y, (value, rounds), look in zip((i - 0.19, i + 0.19), pairs, looks, strict=True):
            axes.barh(y, value, 0.34, **look)
            axes.plot(rounds, [y] * len(rounds), "ok", markersize=2.8, label="one round")
            at_the_edge: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "fontsize": style.FONT_POINTS - 1,
                "gap": 6,
            }
            style.write_after(axes, (1, y), f"{value:+,.1f} µs", color=look["color"], **at_the_edge)
    style.name_lines(axes, [each.name for each in saved])
    axes.tick_params(left=False)
    axes.margins(x=0.04)
    style.name_axes(axes, "µs that the overlap saves of an iteration; below 0 it costs")
    style.legend_below(figure, 2)
    return figure


# --- what a plan depends on -------------------------------------------------------------------------------------------


def dependence_figure(changed: Mapping[str, Mapping[str, bool]], title: str, known: Mapping[str, str]) -> Figure:
    """Draw whether each tensor of a verify pass changes with each cause. `known` says when a cause is final.

    A cell has the gid "changes <cause>/<tensor>" or "same <cause>/<tensor>".
    """
    kinds = {"changes": Look(PHASES["plan"], ink="white"), "same": Look("#F2F2F2", ink="#777777")}
    lines = []
    for cause, tensors in changed.items():
        words = {tensor: "changes" if changes else "same" for tensor, changes in tensors.items()}
        cells = [Box(x, word, word, gid=f"{word} {cause}/{tensor}") for x, (tensor, word) in enumerate(words.items())]
        lines.append(Line(f"{cause} ({known[cause]})", cells))
    across = {x + 0.5: tensor for x, tensor in enumerate(next(iter(changed.values())))}
    return cells_figure(title, lines, kinds, (0, len(across)), across=across)
