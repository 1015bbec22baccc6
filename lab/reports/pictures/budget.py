"""Draw the results of `lab.budget`: errors of quantised caches and of right kernels, and the judge's bound. Needs the extra
`plots`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.reports.pictures import style

LOOKS = {"quantisation": "o-", "kernel": "s--", "bound": "^:"}


def budget_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Plot median relative L2 errors over the number of keys: a panel per cache dtype, a colour per distribution of K and V."""
    caches = list(dict.fromkeys(row["kv"] for row in rows))
    colours = style.assigned([row["values"] for row in rows], style.COLOURS)
    figure, panels = style.panels(title, 3.6, columns=len(caches), log="xy")
    for axes, cache in zip(panels[0], caches, strict=True):
        style.name_panel(axes, cache)
        style.name_axes(axes, "keys", "" if cache != caches[0] else "relative L2 error, median")
        style.mark_sizes(axes, sorted({row["keys"] for row in rows}))
        for values, colour in colours.items():
            mine = [row for row in rows if (row["kv"], row["values"]) == (cache, values)]
            for name, look in LOOKS.items():
                points = [row["keys"] for row in mine], [row[name] for row in mine]
                axes.plot(*points, look, color=colour, label=f"{name}, {values}", **style.LINE)
    style.legend_below(figure, len(colours))
    return figure
