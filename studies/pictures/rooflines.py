"""Draw memory time and matrix time over the amount of work, and the readings of clocks. Needs the extra `plots`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from lab.reports.pictures import style
from lab.reports.recorded import Row


@dataclass(frozen=True)
class FloorParts:
    """The memory time and the matrix time of an amount of work, in µs; the longer time is the floor."""

    amount: float
    memory_us: float
    matrix_us: float

    @property
    def is_matrix_bound(self) -> bool:
        return self.matrix_us > self.memory_us


def bound_figure(
    parts: Sequence[FloorParts], title: str, amount_label: str, timed: Sequence[tuple[float, Row]] = ()
) -> Figure:
    """Draw the memory time and the matrix time over the amount of work, sorted. The upper line is the floor (least possible
    time).

    Marks are measurements of the same work, by amount; a hollow mark was measured at reduced clocks. The part that is bound by
    matrix products is shaded.
    """
    figure, axes = style.one_panel(title, 4.6, log="xy")
    amounts = [part.amount for part in parts]
    memory, matrix = [part.memory_us for part in parts], [part.matrix_us for part in parts]
    floors = [max(pair) for pair in zip(memory, matrix, strict=True)]
    wide: dict[str, Any] = {"color": "#BBBBBB", "linewidth": 7, "solid_capstyle": "butt"}
    axes.plot(amounts, floors, label="floor: the longer of the two", **wide)
    axes.plot(amounts, memory, color=style.COLOURS[0], label="bytes over the bandwidth")
    axes.plot(amounts, matrix, "--", color=style.COLOURS[1], label="operations over the matrix rate")
    bound = next((part.amount for part in parts if part.is_matrix_bound), None)
    if bound is not None:
        shade: dict[str, Any] = {"color": style.COLOURS[1], "alpha": 0.08, "linewidth": 0}
        axes.axvspan(bound, amounts[-1], label="the matrix units are the limit", **shade)
    names = [row.implementation for _, row in timed]
    colours, markers = style.assigned(names, style.COLOURS[2:]), style.assigned(names, style.MARKERS)
    for amount, row in sorted(timed, key=lambda each: names.index(each[1].implementation)):
        name = row.implementation
        look: dict[str, Any] = {
            "color": colours[name],
            "mfc": "none" if row.throttled_by else colours[name],
            "markersize": 7,
            "alpha": 0.8,
        }
        axes.plot(amount, row.median_us, markers[name], clip_on=False, **look)
    keys = [style.mark_key(f"measured: {name}", markers[name], color=colour) for name, colour in colours.items()]
    if any(row.throttled_by for _, row in timed):
        keys.append(style.mark_key("measured, throttled", "o", mfc="none"))
    axes.set_xlim(amounts[0], amounts[-1])
    style.few_ticks(axes)
    style.name_axes(axes, amount_label, "µs")
    style.legend_below(figure, 3, None, *keys)
    return figure


def clocks_figure(readings_us: Mapping[str, Mapping[str, float | None]], base: str, title: str) -> Figure:
    """Draw each clock's reading, in µs per call, divided by that of the clock `base`, which must have timed all work."""
    clocks = [name for name in dict.fromkeys(name for each in readings_us.values() for name in each) if name != base]
    figure, axes = style.one_panel(title, 1.6 + 0.27 * len(readings_us), log="x")
    labels = []
    for y, (work, by_clock) in enumerate(readings_us.items()):
        base_us = by_clock[base]
        if base_us is None:
            raise ValueError(f"{work} has no time by {base}, so there is nothing to divide the others by")
        labels.append(f"{work}: {base_us:,.1f} µs")
        for name, marker, colour in zip(clocks, style.MARKERS, style.COLOURS, strict=False):
            reading = by_clock.get(name)
            if reading is not None:
                axes.plot(reading / base_us, y, marker, color=colour, mfc="none", markersize=7, label=name)
    axes.axvline(1, color=style.TEXT_COLOUR, linewidth=1)
    style.name_lines(axes, labels)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    style.name_axes(axes, f"time ÷ time by {base}")
    style.legend_below(figure, 3)
    return figure
