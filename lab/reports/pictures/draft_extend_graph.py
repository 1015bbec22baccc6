"""Recorded times of a draft extend: by what its CUDA graph hands out, and eager passes beside replays."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput
from lab.reports.pictures import style
from lab.reports.tables import counted

FORM_WORDS = {
    DraftExtendOutput.ALL_ROWS_WITH_TOPK: "logits of all rows, and a top-k that nobody reads",
    DraftExtendOutput.ALL_ROWS: "logits of all rows",
    DraftExtendOutput.SELECTED_ROW: "logits of the selected row",
}


def forms_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw the GPU time of a draft extend by what it hands out, a panel per number of draft tokens; a line is the floor.

    Args:
        rows: the `forms` of `lab.experiments.draft_extend_graph`, as recorded.
        title: over all panels.
    """
    widths = sorted({row["num_draft_tokens"] for row in rows})
    sizes = sorted({row["batch_size"] for row in rows})
    figure = style.new_figure(title, height_inches=3.6)
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    thickness = 0.8 / len(FORM_WORDS)
    for axes, width in zip(panels, widths, strict=True):
        style.plain(axes, grid="y")
        axes.tick_params(labelsize=style.FONT_POINTS - 0.5)
        for place, (form, colour) in enumerate(zip(FORM_WORDS, style.COLOURS, strict=False)):
            found = {
                row["batch_size"]: row for row in rows if (row["num_draft_tokens"], row["form"]) == (width, form.value)
            }
            for group, size in enumerate(sizes):
                if size not in found:
                    continue
                x = group + (place + 0.5) * thickness - 0.4
                axes.bar(
                    x,
                    found[size]["median_us"],
                    0.9 * thickness,
                    **style.fill(colour, bool(found[size]["throttled_by"])),
                )
                ends = x - thickness / 2, x + thickness / 2
                axes.plot(ends, [found[size]["floor_us"]] * 2, color="black", linewidth=1.2)
        axes.set_title(f"{width} draft tokens", fontsize=style.FONT_POINTS)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        style.name_axes(axes, "requests")
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(panels[0], "requests", "GPU time of a replay, µs")
    keys = _bar_keys(FORM_WORDS.values())
    keys.append(style.line_key("floor: the least time of its bytes and operations", "black", linewidth=1.2))
    if reasons := _limits_of(rows):
        keys.append(
            Patch(label=f"hatched: clocks held back ({reasons})", **style.fill(style.TEXT_COLOUR, throttled=True))
        )
    style.legend_below(figure, keys, 2)
    return figure


ARM_WORDS = {"eager": "launched one by one", "graph": "replayed, the copies into the graph's inputs included"}


def eager_or_graph_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw the time from the call to an idle GPU, eagerly and replayed; marks are the host's and the kernels' own times.

    Args:
        rows: of one mode, of the `modes` of `lab.experiments.draft_extend_graph`, as recorded.
        title: over the axes.
    """
    sizes = sorted({row["batch_size"] for row in rows})
    figure, axes = style.one_panel(title, height_inches=1.6 + 0.5 * len(sizes), grid="x")
    axes.tick_params(labelsize=style.FONT_POINTS - 0.5)
    for place, (arm, colour) in enumerate(zip(ARM_WORDS, style.COLOURS, strict=False)):
        for group, size in enumerate(sizes):
            (row,) = (row for row in rows if (row["batch_size"], row["arm"]) == (size, arm))
            y = group + 0.38 * place - 0.19
            axes.barh(y, row["completion_us"], 0.34, color=colour)
            end = row["completion_us"], y
            style.write_after(axes, end, f"{row['completion_us']:,.0f}", gap=4, fontsize=style.FONT_POINTS - 1)
            axes.plot(row["host_us"], y, "D", color="white", markeredgecolor="black", markersize=5)
            axes.plot(
                row["median_us"], y, "o", color="black", mfc="white" if row["throttled_by"] else "black", markersize=5
            )
    axes.set_yticks(range(len(sizes)), [counted(size, "request") for size in sizes])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(axes, "µs")
    keys = _bar_keys(ARM_WORDS.values())
    keys.append(style.mark_key("the host's calls alone", "D", color="white", markeredgecolor="black"))
    keys.append(style.mark_key("the kernels alone", "o", color="black"))
    if reasons := _limits_of(rows):
        keys.append(style.mark_key(f"the same, clocks held back ({reasons})", "o", color="black", mfc="white"))
    style.legend_below(figure, keys, 2)
    return figure


def _bar_keys(words: Iterable[str]) -> list[Artist]:
    return [Patch(color=colour, label=each) for each, colour in zip(words, style.COLOURS, strict=False)]


def _limits_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what held the clocks back in any of the rows; "" for nothing."""
    return ", ".join(sorted({reason for row in rows for reason in row["throttled_by"]}))


DRAWINGS = (style.Drawing("forms", "GPU time of a draft extend, by what it hands out", forms_figure),)
