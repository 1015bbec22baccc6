"""Draft extend on the decode call against the context call: maps over requests and keys, and cuts through one point.

Rows are those of
`results/<gpu>/draft_extend_kernels.json`, as `lab.experiments.draft_extend_kernels` writes them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from operator import itemgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

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
    figure, drawn = style.panels(title, 3.4, columns=2, log="xy")
    kernels = {row["arm"]: row["kernel"] for row in rows}
    names = {"q_len": "query rows per request", "kv_len": "keys per request"}
    for axes, (across, words) in zip(drawn[0], names.items(), strict=True):
        fixed = {name: value for name, value in chosen.items() if name != across}
        cut = sorted(
            (row for row in rows if all(row[name] == value for name, value in fixed.items())), key=itemgetter(across)
        )
        for arm, (colour, marker) in _looks(rows).items():
            line = [(row[across], row["median_us"]) for row in cut if row["arm"] == arm]
            look = {"color": colour, "marker": marker, "label": f"{arm}: {kernels[arm]}"}
            axes.plot(*zip(*line, strict=True), **style.LINE, **look)
        floor = sorted({row[across]: row["floor_us"] for row in cut}.items())
        axes.plot(*zip(*floor, strict=True), label="floor", **style.FLOOR)
        axes.axvline(chosen[across], color="#999999", linestyle=":", linewidth=1)
        style.mark_sizes(axes, sorted({row[across] for row in cut}))
        style.name_axes(axes, words)
        style.name_panel(axes, ", ".join(_counted(name, value) for name, value in fixed.items()))
    drawn[0, 0].set_ylabel("GPU time of one layer, µs", fontsize=style.FONT_POINTS)
    style.legend_below(figure, 4)
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
    width = min(PANELS_PER_LINE, len(panels))
    figure, grid = style.panels(title, 1.15 + lines * (0.65 + 0.24 * len(counts)), lines, width, grid=None)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (words, (q_len, values)) in zip(grid.flat, panels.items(), strict=False):
        style.name_panel(axes, words)
        axes.set(xlim=(0, len(keys)), ylim=(0, len(counts)))
        axes.set_xticks([place + 0.5 for place in range(len(keys))], [style.in_short(kv_len) for kv_len in keys])
        axes.set_yticks([place + 0.5 for place in range(len(counts))], [str(count) for count in counts])
        axes.tick_params(length=0)
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
    for axes in grid.flat:
        style.name_axes(axes, "keys per request", "requests")
        axes.label_outer()
    handles = [Patch(facecolor=band.colour, edgecolor="#BBBBBB", linewidth=0.5, label=band.words) for band in bands]
    handles.append(Patch(label="not measured", **NOT_MEASURED))
    style.legend_below(figure, len(handles), handles)
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


def _counted(name: str, count: int) -> str:
    """Return such as "8 query rows" for a row's `requests`, `kv_len` or `q_len`."""
    noun = {"requests": "request", "kv_len": "key", "q_len": "query row"}[name]
    return f"{style.in_short(count)} {noun}{'' if count == 1 else 's'}"


def _rows_in_words(q_len: int) -> str:
    return _counted("q_len", q_len)


def _ratio_in_words(ratio: float) -> str:
    """Return two digits, or as many as tell the ratio from 1."""
    if ratio < 1:
        return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.3f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


DRAWINGS = (style.Drawing("rows", "Time of the context call over the decode call's", crossover_figure),)
