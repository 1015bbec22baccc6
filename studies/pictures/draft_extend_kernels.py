"""Compare draft extends on the decode call and on the context call, from rows of `results/<gpu>/draft_extend_kernels.json`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from operator import itemgetter
from typing import Any

from matplotlib.figure import Figure

from lab.reports.pictures import style
from studies.draft_extend_kernels import points_of
from studies.pictures.cells import Box, Line, Look, cells_figure

PANELS_PER_LINE = 3
DECODE_COLOUR, CONTEXT_COLOUR = style.COLOURS[0], style.COLOURS[1]
# Of each variant: colour, marker. Variants of other names take the colours that are left.
VARIANTS = {
    "decode": (DECODE_COLOUR, "s"),
    "context": (CONTEXT_COLOUR, "o"),
    "portable decode": (style.COLOURS[2], "^"),
}
OTHER_VARIANTS = ((style.COLOURS[3], "D"), (style.COLOURS[4], "v"))
NOT_MEASURED = Look("white", "not measured", edge="#CCCCCC", hatch="////")

Bands = Mapping[float, Look]  # by their ends: the looks of values below an end that no band before it has
RATIO_BANDS: Bands = {
    0.7: Look(CONTEXT_COLOUR, "below 0.7", edge="black"),
    1: Look("#F2B48A", "0.7 to 1", edge="black"),
    2: Look("#E3EEF6", "1 to 2"),
    4: Look("#A3C9E3", "2 to 4"),
    8: Look("#4A98CB", "4 to 8"),
    inf: Look(DECODE_COLOUR, "8 or more", ink="white"),
}
SHARE_BANDS: Bands = {
    20: Look("#F1F8F5", "below 20"),
    40: Look("#CBE9DE", "20 to 40"),
    60: Look("#8FD1BA", "40 to 60"),
    80: Look("#45B592", "60 to 80"),
    inf: Look("#00875F", "80 or more", ink="white"),
}


def crossover_figure(rows: Iterable[Mapping[str, Any]], title: str) -> Figure:
    """Draw the context call's time over the decode call's. There is a panel per number of query rows, with a cell per number of
    requests and of keys.

    A measured cell has the gid "<requests> <keys> <query rows>". Ratios below 1 are framed. Raises ValueError if no point has
    both times.
    """
    ratios = {
        point: found["context"]["median_us"] / found["decode"]["median_us"]
        for point, found in points_of(rows).items()
        if {"decode", "context"} <= set(found)
    }
    if not ratios:
        raise ValueError("no recorded point has both calls: the rows need the arms 'decode' and 'context'")
    panels = {
        f"{_counted('q_len', q_len)} per request": (q_len, _at_q_len(ratios, q_len))
        for q_len in sorted({point[2] for point in ratios})
    }
    return _map_figure(title, panels, RATIO_BANDS, _ratio_in_words)


def floor_share_figure(rows: Iterable[Mapping[str, Any]], title: str, q_lens: Sequence[int] = (1, 8, 32)) -> Figure:
    """Draw the floor in percent of each call's time, in cells as in `crossover_figure`. Raises ValueError without a row."""
    points = points_of(rows)
    panels: dict[str, tuple[int, dict[tuple[int, int], float]]] = {}
    for variant in ("decode", "context"):
        timed = {point: found[variant] for point, found in points.items() if variant in found}
        shares = {point: 100 * row["floor_us"] / row["median_us"] for point, row in timed.items()}
        for q_len in q_lens:
            values = _at_q_len(shares, q_len)
            if not values:
                raise ValueError(f"no recorded point of the {variant} call has {_counted('q_len', q_len)} per request")
            panels[f"{variant}, {_counted('q_len', q_len)}"] = q_len, values
    return _map_figure(title, panels, SHARE_BANDS, lambda share: f"{share:.0f}")


def point_figure(rows: Iterable[Mapping[str, Any]], title: str, requests: int, kv_len: int, q_len: int) -> Figure:
    """Draw each variant's time over query rows, and over keys, through one point. Raises ValueError if it is not measured."""
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
        for variant, (colour, marker) in _looks(rows).items():
            line = [(row[across], row["median_us"]) for row in cut if row["arm"] == variant]
            look = {"color": colour, "marker": marker, "label": f"{variant}: {kernels[variant]}"}
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
    bands: Bands,
    in_words: Callable[[float], str],
) -> Figure:
    measured = {point for _, values in panels.values() for point in values}
    counts, keys = sorted({requests for requests, _ in measured}), sorted({kv_len for _, kv_len in measured})
    looks: dict[Any, Look] = {**bands, "not measured": NOT_MEASURED, "name": Look("white")}

    def box(x: int, name: str, requests: int, kv_len: int) -> Box:
        q_len, values = panels[name]
        value = values.get((requests, kv_len))
        if value is None or not isfinite(value):
            return Box(x, "not measured")
        variant = f"{name.split(',')[0]} " if "," in name else ""
        band = next(end for end in bands if value < end)
        return Box(x, band, in_words(value), gid=f"{variant}{requests} {kv_len} {q_len}")

    lines: list[Line] = []
    starts = [place * (len(keys) + 1) for place in range(min(PANELS_PER_LINE, len(panels)))]
    for first in range(0, len(panels), PANELS_PER_LINE):
        placed = list(zip(starts, list(panels)[first:], strict=False))
        lines.append(Line(cells=[Box(start, "name", name, len(keys)) for start, name in placed]))
        for requests in counts:
            boxes = [box(start + x, name, requests, kv_len) for start, name in placed for x, kv_len in enumerate(keys)]
            lines.append(Line(_counted("requests", requests), boxes))
    across = {start + x + 0.5: style.in_short(kv_len) for start in starts for x, kv_len in enumerate(keys)}
    columns = 0, starts[-1] + len(keys)
    return cells_figure(title, lines, looks, columns, subtitle="keys per request", across=across)


def _at_q_len(values: Mapping[tuple[Any, ...], float], q_len: int) -> dict[tuple[int, int], float]:
    return {(requests, kv_len): value for (requests, kv_len, rows), value in values.items() if rows == q_len}


def _looks(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    variants = list(dict.fromkeys(row["arm"] for row in rows))
    others = [variant for variant in variants if variant not in VARIANTS]
    return {
        variant: VARIANTS.get(variant) or OTHER_VARIANTS[others.index(variant) % len(OTHER_VARIANTS)]
        for variant in variants
    }


def _counted(name: str, count: int) -> str:
    noun = {"requests": "request", "kv_len": "key", "q_len": "query row"}[name]
    return f"{style.in_short(count)} {noun}{'' if count == 1 else 's'}"


def _ratio_in_words(ratio: float) -> str:
    """Return a ratio with two decimals, or with as many as distinguish it from 1."""
    if ratio < 1:
        return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.3f}"
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


DRAWINGS = (style.Drawing("rows", "Time of the context call over the decode call's", crossover_figure),)
