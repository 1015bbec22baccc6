"""Draw recorded rows as matplotlib figures, for the report and for notebooks. Needs the extra `plots`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from lab.reports.pictures import style
from lab.reports.recorded import Row
from lab.reports.timing_tables import SETTINGS

WIDTH_INCHES = 10.0  # 1,500 pixels, shown at 1,000
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BARS_SHARE = 0.8  # share of a scenario's height that bars fill; the rest separates scenarios
MOST_BARS = 3  # bars per scenario; more are hard to compare
LINE_INCHES = 0.3
NUMBERS_SHARE = 0.07  # share of the axis's length, at its left, for the number of the fastest implementation


@dataclass(frozen=True)
class Roofs:
    """The two ceilings of a roofline: memory in GB/s (10**9), and matrix units in TFLOP/s for products of `matrix_dtype`."""

    bandwidth_gbps: float
    matrix_rate_tflops: float
    matrix_dtype: str = ""

    def rate_tflops(self, intensity: float) -> float:
        """Return the highest rate of work with this intensity, as in Williams, Waterman and Patterson 2009."""
        return min(self.bandwidth_gbps * intensity / 1e3, self.matrix_rate_tflops)

    @property
    def ridge(self) -> float:
        """Return the intensity, in operations per byte, above which the matrix units are the limit."""
        return 1e3 * self.matrix_rate_tflops / self.bandwidth_gbps


def roofs_of(ceilings: Mapping[str, Any]) -> list[tuple[Roofs, str]]:
    """Return the roofs of `lab.timing.Ceilings.facts` with their names, "measured" and "datasheet", if both rates are known."""
    found = []
    for prefix, words in (("", "measured"), ("datasheet_", "datasheet")):
        bandwidth, rate = (ceilings.get(f"{prefix}{name}") for name in ("bandwidth_gbps", "matrix_rate_tflops"))
        if bandwidth and rate:
            found.append((Roofs(bandwidth, rate, ceilings.get("matrix_dtype") or ""), words))
    return found


def roofline_figure(rows: Sequence[Row], title: str, ceilings: Mapping[str, Any]) -> Figure:
    """Draw rates against intensity under the roofs: a colour per implementation, a marker per mode, hollow if throttled.

    The rows must have operations and bytes; `ceilings` is the input of `roofs_of`.
    """
    figure, axes = style.one_panel(title, 6.0, log="xy", width_inches=WIDTH_INCHES)
    intensities = [row.facts["operations"] / row.facts["bytes_moved"] for row in rows]
    modes = [row.mode or "no mode recorded" for row in rows]
    colours = _assigned(_ranked(map(_name, rows)), style.COLOURS)
    markers = _assigned(modes, MARKERS)
    for row, intensity, mode in zip(rows, intensities, modes, strict=True):
        colour = colours[_name(row)]
        rate_tflops = row.facts["operations"] / row.median_us / 1e6
        face = "none" if row.throttled_by else colour
        axes.plot(intensity, rate_tflops, markers[mode], markersize=8, color=colour, mfc=face, alpha=0.8)
    roofs = roofs_of(ceilings)
    lowest = min(intensities) / 2
    highest = max([2 * intensity for intensity in intensities] + [4 * each.ridge for each, _ in roofs])
    axes.set_xlim(lowest, highest)
    _few_ticks(axes)
    lines = [_draw_roofs(axes, each, words, (lowest, highest)) for each, words in roofs]
    style.name_axes(axes, "arithmetic intensity, operations per byte that must move", "rate reached, TFLOP/s")
    keys: list[Artist] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    keys += [style.mark_key(name, marker) for name, marker in markers.items()]
    if any(row.throttled_by for row in rows):
        keys.append(style.mark_key("throttled", "o", mfc="none"))
    style.legend_below(figure, 4, [*keys, *lines])
    return figure


def floor_figure(rows: Sequence[Row], title: str) -> Figure:
    """Draw time over floor per scenario on a logarithmic axis, where 1 is the limit. Rows without a floor are left out.

    A few implementations are drawn as bars side by side that begin at the limit, more implementations as marks on one line.
    Settings are added to a scenario's name if the name is not unique.
    """
    are_named = len({(row.scenario, row.implementation) for row in rows}) == len(rows)
    varying = (
        {} if are_named else {name: cell for name, cell in SETTINGS.items() if len({cell(row) for row in rows}) > 1}
    )
    bars = [
        _Bar(
            ", ".join([row.scenario, *(f"{name} {cell(row).text}" for name, cell in varying.items())]),
            _name(row),
            row.time_over_floor or math.nan,
            bool(row.throttled_by),
        )
        for row in rows
    ]
    scenarios = list(dict.fromkeys(bar.scenario for bar in bars))
    colours = _assigned(_ranked(bar.implementation for bar in bars), style.COLOURS)
    are_bars = len(colours) <= MOST_BARS
    height = 1.5 + len(scenarios) * (0.1 + 0.15 * len(colours) if are_bars else LINE_INCHES)
    figure, axes = style.one_panel(title, height, grid="x", log="x", width_inches=WIDTH_INCHES)
    keys = (_draw_bars if are_bars else _draw_marks)(axes, bars, scenarios, colours)
    axes.axvline(1, color=style.TEXT_COLOUR, linewidth=1)
    style.name_lines(axes, scenarios)
    times = [bar.time_over_floor for bar in bars]
    least, most = min(*times, 1), max(1.3 * max(times), 2)
    axes.set_xlim(0.95 * least if are_bars else least * (least / most) ** NUMBERS_SHARE, most)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    style.name_axes(axes, "median time over floor, which this run's measured rates give")
    style.legend_below(figure, 4 if are_bars else 3, keys)
    return figure


class _Bar(NamedTuple):
    """The time over floor of one implementation in one scenario."""

    scenario: str
    implementation: str
    time_over_floor: float
    throttled: bool


def _draw_bars(axes: Axes, bars: Sequence[_Bar], scenarios: Sequence[str], colours: Mapping[str, str]) -> list[Artist]:
    """Draw a bar for each measurement, and return the legend's keys."""
    thickness = BARS_SHARE / len(colours)
    places = {name: (place + 0.5) * thickness - BARS_SHARE / 2 for place, name in enumerate(colours)}
    for bar in bars:
        y = scenarios.index(bar.scenario) + places[bar.implementation]
        colour = colours[bar.implementation]
        axes.barh(y, bar.time_over_floor - 1, 0.9 * thickness, left=1, **style.fill(colour, bar.throttled))
        style.write_after(axes, (max(bar.time_over_floor, 1), y), f"{bar.time_over_floor:.2f}", fontsize=7)
    keys: list[Artist] = [Patch(label=name, **style.fill(colour, throttled=False)) for name, colour in colours.items()]
    if any(bar.throttled for bar in bars):
        keys.append(Patch(label="throttled", **style.fill(style.TEXT_COLOUR, throttled=True)))
    return keys


def _draw_marks(axes: Axes, bars: Sequence[_Bar], scenarios: Sequence[str], colours: Mapping[str, str]) -> list[Artist]:
    """Draw a mark for each measurement, with the fastest one's number before it, and return the legend's keys."""
    markers = _assigned(list(colours), MARKERS)
    for y, scenario in enumerate(scenarios):
        mine = [bar for bar in bars if bar.scenario == scenario]
        fastest = min(bar.time_over_floor for bar in mine)
        axes.plot([fastest, max(bar.time_over_floor for bar in mine)], [y, y], color="#CCCCCC", linewidth=1, zorder=1)
        for bar in mine:
            name, colour = bar.implementation, colours[bar.implementation]
            axes.plot(
                bar.time_over_floor, y, markers[name], color=colour, mfc="none" if bar.throttled else colour, alpha=0.85
            )
        beneath: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        style.write_after(axes, (fastest, y), f"{fastest:.2f}", gap=-6, ha="right", fontsize=7, bbox=beneath)
    keys: list[Artist] = [style.mark_key(name, markers[name], color=colour) for name, colour in colours.items()]
    if any(bar.throttled for bar in bars):
        keys.append(style.mark_key("throttled", "o", mfc="none"))
    return keys


@dataclass(frozen=True)
class FloorParts:
    """The memory time and the matrix time of an amount of work, in µs; the longer time is the floor.

    Attributes:
        amount: amount of work in the unit of the axis, such as query tokens per request.
        memory_us, matrix_us: bytes over a bandwidth, and operations over a matrix rate.
    """

    amount: float
    memory_us: float
    matrix_us: float

    @property
    def is_matrix_bound(self) -> bool:
        return self.matrix_us > self.memory_us


def bound_figure(
    parts: Sequence[FloorParts], title: str, amount_label: str, timed: Sequence[tuple[float, Row]] = ()
) -> Figure:
    """Draw the memory time and the matrix time as lines; the upper line is the floor. The matrix-bound part is shaded.

    Args:
        parts: the times, sorted by amount.
        title, amount_label: texts above and below the axes.
        timed: amounts with measurements of the same work, drawn as marks; hollow marks are throttled.
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
    names = [_name(row) for _, row in timed]
    colours, markers = _assigned(names, style.COLOURS[2:]), _assigned(names, MARKERS)
    for amount, row in sorted(timed, key=lambda each: names.index(_name(each[1]))):
        name = _name(row)
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
    _few_ticks(axes)
    style.name_axes(axes, amount_label, "µs")
    style.legend_below(figure, 3, None, *keys)
    return figure


def clocks_figure(readings_us: Mapping[str, Mapping[str, float | None]], base: str, title: str) -> Figure:
    """Draw each clock's reading relative to the base clock's reading, which is written after the name of the work.

    Args:
        readings_us: µs per call by work and clock; None if a clock cannot time the work.
        base: the clock by whose readings all readings are divided; it must have timed all work.
    """
    clocks = [name for name in dict.fromkeys(name for each in readings_us.values() for name in each) if name != base]
    figure, axes = style.one_panel(title, 1.6 + 0.27 * len(readings_us), log="x")
    labels = []
    for y, (work, by_clock) in enumerate(readings_us.items()):
        base_us = by_clock[base]
        if base_us is None:
            raise ValueError(f"{work} has no time by {base}, so there is nothing to divide the others by")
        labels.append(f"{work}: {base_us:,.1f} µs")
        for name, marker, colour in zip(clocks, MARKERS, style.COLOURS, strict=False):
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


def _name(row: Row) -> str:
    return row.implementation or "no implementation recorded"


def _few_ticks(axes: Axes) -> None:
    """Write tick labels at 1, 2 and 5 times each power of ten, even on short axes."""
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())


def _draw_roofs(axes: Axes, roofs: Roofs, words: str, intensities: tuple[float, float]) -> Line2D:
    lowest, highest = intensities
    corners = sorted({lowest, min(max(roofs.ridge, lowest), highest), highest})
    label = (
        f"{words}: {roofs.bandwidth_gbps:,.0f} GB/s, "
        f"{roofs.matrix_rate_tflops:,.0f} TFLOP/s {roofs.matrix_dtype}".rstrip()
    )
    line_style = "-" if words == "measured" else "--"
    rates = [roofs.rate_tflops(intensity) for intensity in corners]
    (line,) = axes.plot(corners, rates, line_style, color=style.TEXT_COLOUR, linewidth=1.3, label=label, zorder=1)
    return line


def _ranked(names: Iterable[str]) -> list[str]:
    """Return each name once. Names without a dot come before peers, so that a name keeps its look between runs."""
    return sorted(set(names), key=lambda name: ("." in name, name))


def _assigned(names: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    """Assign a style to each name in order; styles repeat if there are more names than styles."""
    return {name: looks[index % len(looks)] for index, name in enumerate(dict.fromkeys(names))}
