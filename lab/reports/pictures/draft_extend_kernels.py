"""Draft extend on the decode call against the context call: maps over requests and keys, and cuts through one point.

Rows are those of
`results/<gpu>/draft_extend_kernels.json`, as `lab.experiments.draft_extend_kernels` writes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullLocator

from lab.reports.pictures import style

PANELS_PER_LINE = 3
DECODE_COLOUR, CONTEXT_COLOUR = style.COLOURS[0], style.COLOURS[1]
# Of each arm: colour, marker. Arms of other names take the colours that are left.
ARMS = {"decode": (DECODE_COLOUR, "s"), "context": (CONTEXT_COLOUR, "o"), "portable decode": (style.COLOURS[2], "^")}
OTHER_ARMS = ((style.COLOURS[3], "D"), (style.COLOURS[4], "v"))
NOT_MEASURED: dict[str, Any] = {"facecolor": "white", "edgecolor": "#CCCCCC", "hatch": "////", "linewidth": 0.5}

# requests, keys of each, query rows of each
Point = tuple[int, int, int]


@dataclass(frozen=True)
class Band:
    """A colour of a map: of values below `end` that no band before it has."""

    end: float
    colour: str
    words: str


RATIO_BANDS = (
    Band(0.7, CONTEXT_COLOUR, "below 0.7"),
    Band(1, "#F2B48A", "0.7 to 1"),
    Band(2, "#E3EEF6", "1 to 2"),
    Band(4, "#A3C9E3", "2 to 4"),
    Band(8, "#4A98CB", "4 to 8"),
    Band(inf, DECODE_COLOUR, "8 or more"),
)
SHARE_BANDS = (
    Band(20, "#F1F8F5", "below 20"),
    Band(40, "#CBE9DE", "20 to 40"),
    Band(60, "#8FD1BA", "40 to 60"),
    Band(80, "#45B592", "60 to 80"),
    Band(inf, "#00875F", "80 or more"),
)


def crossover_figure(rows: Iterable[Mapping[str, Any]], title: str) -> Figure:
    """Draw the context call's time over the decode call's: a panel per number of query rows, requests over keys.

    A cell is a `Rectangle` whose gid is "<requests> <keys> <query rows>"; one that was not measured has none.

    Args:
        rows: recorded, with the arms "decode" and "context".
        title: what was measured, on what.

    Raises:
        ValueError: no point has both arms.
    """
    decode, context = (_by_point(rows, arm, "median_us") for arm in ("decode", "context"))
    ratios = {point: context[point] / time_us for point, time_us in decode.items() if point in context}
    if not ratios:
        raise ValueError("no recorded point has both calls: the rows need the arms 'decode' and 'context'")
    panels = {
        f"{_rows_in_words(q_len)} per request": (q_len, _at_q_len(ratios, q_len))
        for q_len in sorted({point[2] for point in ratios})
    }
    return _map_figure(title, panels, RATIO_BANDS, _ratio_in_words, is_framed=lambda ratio: ratio < 1)


def floor_share_figure(rows: Iterable[Mapping[str, Any]], title: str, q_lens: Sequence[int] = (1, 8, 32)) -> Figure:
    """Draw the floor in percent of each call's time, 100 being the limit: a line of panels per call, one per query rows.

    Cells as in `crossover_figure`, their gid with the arm before it.

    Raises:
        ValueError: nothing was recorded with so many query rows.
    """
    rows = list(rows)
    panels: dict[str, tuple[int, dict[tuple[int, int], float]]] = {}
    for arm in ("decode", "context"):
        times_us, floors_us = (_by_point(rows, arm, value) for value in ("median_us", "floor_us"))
        for q_len in q_lens:
            shares = {point: 100 * floors_us[point] / time_us for point, time_us in times_us.items()}
            values = _at_q_len(shares, q_len)
            if not values:
                raise ValueError(f"no recorded point of the {arm} call has {_rows_in_words(q_len)} per request")
            panels[f"{arm}, {_rows_in_words(q_len)}"] = q_len, values
    return _map_figure(title, panels, SHARE_BANDS, lambda share: f"{share:.0f}")


def point_figure(rows: Iterable[Mapping[str, Any]], title: str, requests: int, kv_len: int, q_len: int) -> Figure:
    """Draw two cuts through one point: each arm's time over the query rows, and over the keys; and the floor.

    Raises:
        ValueError: the point was not measured; says what was.
    """
    rows = list(rows)
    chosen = {"requests": requests, "kv_len": kv_len, "q_len": q_len}
    measured = {(row["requests"], row["kv_len"], row["q_len"]) for row in rows}
    if (requests, kv_len, q_len) not in measured:
        listed = (sorted({point[place] for point in measured}) for place in range(3))
        known = "; ".join(f"{name} {values}" for name, values in zip(chosen, listed, strict=True))
        raise ValueError(f"no recorded point has {chosen}: there are {known}, but not in every combination")
    figure = style.new_figure(title, height_inches=3.4)
    panels = figure.subplots(1, 2, sharey=True)
    names = {"q_len": "query rows per request", "kv_len": "keys per request"}
    looks = _looks(rows)
    for axes, (across, words) in zip(panels, names.items(), strict=True):
        style.plain(axes)
        style.logarithmic(axes, "xy")
        fixed = {name: value for name, value in chosen.items() if name != across}
        cut = sorted((row for row in rows if all(row[name] == value for name, value in fixed.items())), key=_by(across))
        for arm, (colour, marker) in looks.items():
            line = [(row[across], row["median_us"]) for row in cut if row["arm"] == arm]
            axes.plot(*zip(*line, strict=True), marker=marker, markersize=4.5, color=colour, linewidth=1.4)
        floor = sorted({row[across]: row["floor_us"] for row in cut}.items())
        axes.plot(*zip(*floor, strict=True), "--", color=style.TEXT_COLOUR, linewidth=1.2)
        axes.axvline(chosen[across], color="#999999", linestyle=":", linewidth=1)
        ticks = sorted({row[across] for row in cut})
        axes.set_xticks(ticks, [_short(tick) for tick in ticks], fontsize=style.FONT_POINTS)
        axes.xaxis.set_minor_locator(NullLocator())
        style.name_axes(axes, words)
        axes.set_title(
            ", ".join(_counted(name, value) for name, value in fixed.items()), fontsize=style.FONT_POINTS + 0.5
        )
    panels[0].set_ylabel("GPU time of one layer, µs", fontsize=style.FONT_POINTS)
    kernels = {row["arm"]: row["kernel"] for row in rows}
    keys = [
        style.line_key(f"{arm}: {kernels[arm]}", colour, marker, markersize=4.5)
        for arm, (colour, marker) in looks.items()
    ]
    keys.append(style.line_key("floor", style.TEXT_COLOUR, linestyle="--", linewidth=1.5))
    style.legend_below(figure, keys, len(keys), fontsize=style.FONT_POINTS - 0.5)
    return figure


def _map_figure(
    title: str,
    panels: Mapping[str, tuple[int, Mapping[tuple[int, int], float]]],
    bands: Sequence[Band],
    in_words: Callable[[float], str],
    is_framed: Callable[[float], bool] = lambda value: False,
) -> Figure:
    """Draw panels, given by their words: query rows, and a value for each measured (requests, keys)."""
    measured = {point for _, values in panels.values() for point in values}
    counts, keys = sorted({requests for requests, _ in measured}), sorted({kv_len for _, kv_len in measured})
    lines = -(-len(panels) // PANELS_PER_LINE)
    figure = style.new_figure(title, height_inches=1.15 + lines * (0.4 + 0.24 * len(counts) + 0.25))
    grid = figure.subplots(lines, min(PANELS_PER_LINE, len(panels)), sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (words, (q_len, values)) in zip(grid.flat, panels.items(), strict=False):
        axes.set_title(words, fontsize=style.FONT_POINTS + 0.5)
        axes.set(xlim=(0, len(keys)), ylim=(0, len(counts)))
        axes.set_xticks([place + 0.5 for place in range(len(keys))], [_short(kv_len) for kv_len in keys])
        axes.set_yticks([place + 0.5 for place in range(len(counts))], [str(count) for count in counts])
        axes.tick_params(length=0, labelsize=style.FONT_POINTS)
        arm = f"{words.split(',')[0]} " if "," in words else ""
        for corner in ((x, y) for y in range(len(counts)) for x in range(len(keys))):
            point = counts[corner[1]], keys[corner[0]]
            value = values.get(point)
            if value is None or not isfinite(value):
                axes.add_patch(Rectangle(corner, 1, 1, **NOT_MEASURED))
                continue
            colour = next(band.colour for band in bands if value < band.end)
            gid = f"{arm}{point[0]} {point[1]} {q_len}"
            _draw_cell(axes, corner, colour, in_words(value), gid, framed=is_framed(value))
    for axes in grid[:, 0]:
        axes.set_ylabel("requests", fontsize=style.FONT_POINTS)
    for axes in grid[-1]:
        axes.set_xlabel("keys per request", fontsize=style.FONT_POINTS)
    handles = [Patch(facecolor=band.colour, edgecolor="#BBBBBB", linewidth=0.5, label=band.words) for band in bands]
    handles.append(Patch(label="not measured", **NOT_MEASURED))
    style.legend_below(figure, handles, len(handles), columnspacing=1.2)
    return figure


def _draw_cell(axes: Axes, corner: tuple[int, int], colour: str, words: str, gid: str, *, framed: bool) -> None:
    axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="white", linewidth=1, gid=gid))
    if framed:
        inner = corner[0] + 0.04, corner[1] + 0.05
        axes.add_patch(Rectangle(inner, 0.92, 0.9, fill=False, edgecolor="black", linewidth=1.3))
    red, green, blue = to_rgb(colour)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    look: dict[str, Any] = {"weight": "bold" if framed else "normal", "color": "black" if luma > 0.45 else "white"}
    middle = corner[0] + 0.5, corner[1] + 0.47
    axes.text(*middle, words, ha="center", va="center", fontsize=style.FONT_POINTS - 0.5, **look)


def _by_point(rows: Iterable[Mapping[str, Any]], arm: str, value: str) -> dict[Point, float]:
    return {(row["requests"], row["kv_len"], row["q_len"]): row[value] for row in rows if row["arm"] == arm}


def _at_q_len(values: Mapping[Point, float], q_len: int) -> dict[tuple[int, int], float]:
    return {(requests, kv_len): value for (requests, kv_len, rows), value in values.items() if rows == q_len}


def _looks(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each arm, in the order of the rows."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    others = [arm for arm in arms if arm not in ARMS]
    return {arm: ARMS.get(arm) or OTHER_ARMS[others.index(arm) % len(OTHER_ARMS)] for arm in arms}


def _by(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: row[name]


def _counted(name: str, count: int) -> str:
    """Return such as "8 query rows" for a row's `requests`, `kv_len` or `q_len`."""
    noun = {"requests": "request", "kv_len": "key", "q_len": "query row"}[name]
    return f"{_short(count)} {noun}{'' if count == 1 else 's'}"


def _rows_in_words(q_len: int) -> str:
    return _counted("q_len", q_len)


def _ratio_in_words(ratio: float) -> str:
    """Return two digits, or as many as tell the ratio from 1."""
    if ratio < 1:
        return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.3f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def _short(number: int) -> str:
    return f"{number // 1024}K" if number >= 1024 and number % 1024 == 0 else str(number)


DRAWINGS = (style.Drawing("rows", "Time of the context call over the decode call's", crossover_figure),)
