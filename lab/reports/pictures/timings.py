"""Draw rows of recorded benchmarks as matplotlib figures, for reports and notebooks. Needs the extra `plots`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullLocator

from lab.reports.pictures import style
from lab.reports.recorded import Row
from lab.reports.tables import grouped
from lab.reports.timing_tables import SETTINGS

WIDTH_INCHES = 10.0  # 1,500 pixels, shown at 1,000
LINE_INCHES = 0.3
NUMBERS_SHARE = 0.07  # share of the axis's length, at its left, for the number of the fastest implementation


def roofline_figure(rows: Sequence[Row], title: str, ceilings: Mapping[str, Any]) -> Figure:
    """Draw a roofline plot (Williams, Waterman and Patterson 2009) of rows that have the fields "operations" and "bytes_moved".

    `ceilings` is the result of `lab.timing.Ceilings.facts`. It has the measured and the datasheet's rates; a roof is drawn for
    each. A mark is hollow if the GPU reduced its clocks.
    """
    figure, axes = style.one_panel(title, 6.0, log="xy", width_inches=WIDTH_INCHES)
    intensities = [row.facts["operations"] / row.facts["bytes_moved"] for row in rows]
    modes = [str(row.facts.get("mode") or "no mode recorded").replace("_", " ") for row in rows]
    colours = style.assigned(_ranked(map(_name, rows)), style.COLOURS)
    markers = style.assigned(modes, style.MARKERS)
    for row, intensity, mode in zip(rows, intensities, modes, strict=True):
        colour = colours[_name(row)]
        rate_tflops = row.facts["operations"] / row.median_us / 1e6
        face = "none" if row.throttled_by else colour
        axes.plot(intensity, rate_tflops, markers[mode], markersize=8, color=colour, mfc=face, alpha=0.8)
    roofs = {
        words: (bandwidth_gbps, rate_tflops, 1e3 * rate_tflops / bandwidth_gbps)
        for prefix, words in (("", "measured"), ("datasheet_", "datasheet"))
        if (bandwidth_gbps := ceilings.get(f"{prefix}bandwidth_gbps"))
        and (rate_tflops := ceilings.get(f"{prefix}matrix_rate_tflops"))
    }
    lowest = min(intensities) / 2
    highest = max([2 * intensity for intensity in intensities] + [4 * ridge for _, _, ridge in roofs.values()])
    axes.set_xlim(lowest, highest)
    style.few_ticks(axes)
    lines: list[Artist] = []
    for words, (bandwidth_gbps, rate_tflops, ridge) in roofs.items():
        corners = sorted({lowest, max(ridge, lowest), highest})
        label = f"{words}: {bandwidth_gbps:,.0f} GB/s, {rate_tflops:,.0f} TFLOP/s {ceilings.get('matrix_dtype') or ''}"
        look: dict[str, Any] = {"color": style.TEXT_COLOUR, "linewidth": 1.3, "label": label.rstrip(), "zorder": 1}
        rates = [min(bandwidth_gbps * corner / 1e3, rate_tflops) for corner in corners]
        lines += axes.plot(corners, rates, "-" if words == "measured" else "--", **look)
    style.name_axes(axes, "arithmetic intensity, operations per byte that must move", "rate reached, TFLOP/s")
    keys: list[Artist] = [Patch(color=colour, label=name) for name, colour in colours.items()]
    keys += [style.mark_key(name, marker) for name, marker in markers.items()]
    style.legend_below(figure, 4, [*keys, *_throttled_key(rows), *lines])
    return figure


def floor_figure(rows: Sequence[Row], title: str) -> Figure:
    """Plot median time / least possible time (floor): one line per scenario, one mark per implementation."""
    are_named = len({(row.scenario, row.implementation) for row in rows}) == len(rows)
    varying = (
        {} if are_named else {name: cell for name, cell in SETTINGS.items() if len({cell(row) for row in rows}) > 1}
    )
    lines = grouped(
        (", ".join([row.scenario, *(f"{name} {cell(row).text}" for name, cell in varying.items())]), row)
        for row in rows
        if row.time_over_floor is not None
    )
    names = _ranked(map(_name, rows))
    colours, markers = style.assigned(names, style.COLOURS), style.assigned(names, style.MARKERS)
    figure, axes = style.one_panel(title, 1.5 + LINE_INCHES * len(lines), grid="x", log="x", width_inches=WIDTH_INCHES)
    axes.axvline(1, color=style.TEXT_COLOUR, linewidth=1)
    for y, mine in enumerate(lines.values()):
        times = [row.time_over_floor or math.nan for row in mine]
        axes.plot([min(times), max(times)], [y, y], color="#CCCCCC", linewidth=1, zorder=1)
        for row, time in zip(mine, times, strict=True):
            colour = colours[_name(row)]
            axes.plot(
                time, y, markers[_name(row)], color=colour, mfc="none" if row.throttled_by else colour, alpha=0.85
            )
        beneath: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        style.write_after(axes, (min(times), y), f"{min(times):.2f}", gap=-6, ha="right", fontsize=7, bbox=beneath)
    style.name_lines(axes, list(lines))
    all_times = [row.time_over_floor for mine in lines.values() for row in mine if row.time_over_floor is not None]
    least, most = min(*all_times, 1), max(1.3 * max(all_times), 2)
    axes.set_xlim(least * (least / most) ** NUMBERS_SHARE, most)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    style.name_axes(axes, "median time over floor, which this run's measured rates give")
    keys: list[Artist] = [style.mark_key(name, markers[name], color=colour) for name, colour in colours.items()]
    style.legend_below(figure, 3, [*keys, *_throttled_key(rows)])
    return figure


def _name(row: Row) -> str:
    return row.implementation or "no implementation recorded"


def _throttled_key(rows: Sequence[Row]) -> list[Artist]:
    return [style.mark_key("throttled", "o", mfc="none")] if any(row.throttled_by for row in rows) else []


def _ranked(names: Iterable[str]) -> list[str]:
    return sorted(set(names), key=lambda name: ("." in name, name))
