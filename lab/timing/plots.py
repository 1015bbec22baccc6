"""Pictures of recorded runs, matplotlib figures of plain data: for the report, and for notebooks. Needs the extra `plots`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from lab.plots.style import COLOURS, DOTS_PER_INCH, TEXT_COLOUR, logarithmic, plain

WIDTH_INCHES = 10.0  # 1,500 pixels, shown at 1,000
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BARS_SHARE = 0.8  # of a scenario's height; the rest keeps scenarios apart


@dataclass(frozen=True)
class Roofs:
    """A ceiling of each kind: memory in GB/s (10**9), matrix units in TFLOP/s of `matrix_dtype`."""

    bandwidth_gbps: float
    matrix_rate_tflops: float
    matrix_dtype: str = ""

    def rate_tflops(self, intensity: float) -> float:
        """The most that work of this intensity (operations per byte) can reach: Williams, Waterman and Patterson 2009."""
        return min(self.bandwidth_gbps * intensity / 1e3, self.matrix_rate_tflops)

    @property
    def ridge(self) -> float:
        """Operations per byte from which the matrix units are the limit."""
        return 1e3 * self.matrix_rate_tflops / self.bandwidth_gbps


@dataclass(frozen=True)
class RooflinePoint:
    """One measurement: operations per byte that must move, and the rate reached in TFLOP/s."""

    implementation: str
    mode: str
    intensity: float
    rate_tflops: float
    throttled: bool = False


@dataclass(frozen=True)
class FloorBar:
    """One measurement: median time over the least time that the work can take; 1 is the limit."""

    scenario: str
    implementation: str
    time_over_floor: float
    throttled: bool = False


def roofline_figure(
    points: Sequence[RooflinePoint], title: str, measured: Roofs | None = None, datasheet: Roofs | None = None
) -> Figure:
    """Rates against intensity under the roofs: colour says which implementation, marker which mode, hollow is throttled."""
    figure, axes = _figure(title, height_inches=6.0)
    logarithmic(axes, "xy")
    colours = _assigned([point.implementation for point in points], COLOURS)
    markers = _assigned([point.mode for point in points], MARKERS)
    for point in points:
        colour = colours[point.implementation]
        face = "none" if point.throttled else colour
        axes.plot(
            point.intensity, point.rate_tflops, markers[point.mode], markersize=8, color=colour, mfc=face, alpha=0.8
        )
    roofs = [(each, words) for each, words in ((measured, "measured"), (datasheet, "datasheet")) if each is not None]
    lowest = min(point.intensity for point in points) / 2
    highest = max([2 * point.intensity for point in points] + [4 * each.ridge for each, _ in roofs])
    axes.set_xlim(lowest, highest)
    lines = [_draw_roofs(axes, each, words, (lowest, highest)) for each, words in roofs]
    axes.set_xlabel("arithmetic intensity, operations per byte that must move")
    axes.set_ylabel("rate reached, TFLOP/s")
    keys: list[Artist] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    keys += [_marker_key(name, marker) for name, marker in markers.items()]
    if any(point.throttled for point in points):
        keys.append(_marker_key("throttled", "o", face="none"))
    _legend(figure, [*keys, *lines])
    return figure


def floor_figure(bars: Sequence[FloorBar], title: str) -> Figure:
    """Time over floor per scenario, implementations side by side; the axis is logarithmic and bars start at 1, the limit."""
    scenarios = list(dict.fromkeys(bar.scenario for bar in bars))
    colours = _assigned([bar.implementation for bar in bars], COLOURS)
    figure, axes = _figure(title, height_inches=1.5 + len(scenarios) * (0.1 + 0.15 * len(colours)))
    logarithmic(axes, "x")
    thickness = BARS_SHARE / len(colours)
    places = {name: (place + 0.5) * thickness - BARS_SHARE / 2 for place, name in enumerate(colours)}
    for bar in bars:
        y = scenarios.index(bar.scenario) + places[bar.implementation]
        colour = colours[bar.implementation]
        axes.barh(y, bar.time_over_floor - 1, 0.9 * thickness, left=1, **_fill(colour, bar.throttled))
        end = max(bar.time_over_floor, 1), y
        axes.annotate(f"{bar.time_over_floor:.2f}", end, (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1, color=TEXT_COLOUR, linewidth=1)
    axes.set_yticks(range(len(scenarios)), scenarios)
    axes.set_ylim(len(scenarios) - 0.5, -0.5)
    times = [bar.time_over_floor for bar in bars]
    axes.set_xlim(0.95 * min(*times, 1), max(1.3 * max(times), 2))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("median time over floor, which this run's measured rates give")
    keys: list[Artist] = [Patch(label=name, **_fill(colour, throttled=False)) for name, colour in colours.items()]
    if any(bar.throttled for bar in bars):
        keys.append(Patch(label="throttled", **_fill(TEXT_COLOUR, throttled=True)))
    _legend(figure, keys)
    return figure


def _figure(title: str, height_inches: float) -> tuple[Figure, Axes]:
    """A figure of its own, without pyplot, which would keep it for ever."""
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)  # over the labels too, where a long one finds room
    plain(axes)
    return figure, axes


def _draw_roofs(axes: Axes, roofs: Roofs, words: str, intensities: tuple[float, float]) -> Line2D:
    lowest, highest = intensities
    corners = sorted({lowest, min(max(roofs.ridge, lowest), highest), highest})
    label = (
        f"{words}: {roofs.bandwidth_gbps:,.0f} GB/s, "
        f"{roofs.matrix_rate_tflops:,.0f} TFLOP/s {roofs.matrix_dtype}".rstrip()
    )
    style = "-" if words == "measured" else "--"
    rates = [roofs.rate_tflops(intensity) for intensity in corners]
    (line,) = axes.plot(corners, rates, style, color=TEXT_COLOUR, linewidth=1.3, label=label, zorder=1)
    return line


def _assigned(names: Sequence[str], looks: Sequence[str]) -> dict[str, str]:
    """A look for each name, in order of appearance; they come round again when there are more names than looks."""
    return {name: looks[index % len(looks)] for index, name in enumerate(dict.fromkeys(names))}


def _fill(colour: str, throttled: bool) -> dict[str, Any]:
    return {"facecolor": "white" if throttled else colour, "edgecolor": colour, "hatch": "////" if throttled else None}


def _marker_key(name: str, marker: str, face: str = TEXT_COLOUR) -> Line2D:
    return Line2D([], [], marker=marker, color=TEXT_COLOUR, markerfacecolor=face, linestyle="none", label=name)


def _legend(figure: Figure, keys: Sequence[Artist]) -> None:
    figure.legend(handles=list(keys), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
