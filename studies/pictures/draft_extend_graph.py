"""Draw recorded times of a draft extend: by the outputs of its CUDA graph, and of eager passes and replays."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput
from lab.reports.pictures import style
from lab.wording import counted

FORM_WORDS = {
    DraftExtendOutput.ALL_ROWS_WITH_TOPK: "logits of all rows, and a top-k that nobody reads",
    DraftExtendOutput.ALL_ROWS: "logits of all rows",
    DraftExtendOutput.SELECTED_ROW: "logits of the selected row",
}

FORMS = [form.value for form in FORM_WORDS]
FLOOR_WORDS = "floor: the least time of its bytes and operations"


def forms_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw GPU time and floor of a draft extend by its outputs, with a panel per number of draft tokens."""
    widths = sorted({row["num_draft_tokens"] for row in rows})
    sizes = sorted({row["batch_size"] for row in rows})
    figure, panels = style.panels(title, 3.6, columns=len(widths), grid="y")
    thickness = 0.8 / len(FORM_WORDS)
    for axes, width in zip(panels[0], widths, strict=True):
        for row in (row for row in rows if row["num_draft_tokens"] == width):
            place = FORMS.index(row["form"])
            x = sizes.index(row["batch_size"]) + (place + 0.5) * thickness - 0.4
            axes.bar(
                x, row["median_us"], 0.9 * thickness, **style.fill(style.COLOURS[place], bool(row["throttled_by"]))
            )
            ends = x - thickness / 2, x + thickness / 2
            axes.plot(ends, [row["floor_us"]] * 2, color="black", linewidth=1.2, label=FLOOR_WORDS)
        style.name_panel(axes, f"{width} draft tokens")
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        style.name_axes(axes, "requests")
    panels[0, 0].yaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(panels[0, 0], "requests", "GPU time of a replay, µs")
    more = [Patch(label=words, color=colour) for words, colour in zip(FORM_WORDS.values(), style.COLOURS, strict=False)]
    if reasons := _limits_of(rows):
        look = style.fill(style.TEXT_COLOUR, throttled=True)
        more.append(Patch(label=f"hatched: clocks held back ({reasons})", **look))
    style.legend_below(figure, 2, None, *more)
    return figure


ARM_WORDS = {"eager": "launched one by one", "graph": "replayed, the copies into the graph's inputs included"}


def eager_or_graph_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw a mode's times: from the call until the GPU is idle, the host's time, and the kernels' time."""
    sizes = sorted({row["batch_size"] for row in rows})
    figure, axes = style.one_panel(title, 1.6 + 0.5 * len(sizes), grid="x")
    held_back = f"the same, clocks held back ({_limits_of(rows)})"
    for row in sorted(rows, key=lambda row: list(ARM_WORDS).index(row["arm"])):
        place = list(ARM_WORDS).index(row["arm"])
        y, is_limited = sizes.index(row["batch_size"]) + 0.38 * place - 0.19, bool(row["throttled_by"])
        axes.barh(y, row["completion_us"], 0.34, color=style.COLOURS[place], label=ARM_WORDS[row["arm"]])
        style.write_after(axes, (row["completion_us"], y), f"{row['completion_us']:,.0f}", gap=4)
        axes.plot(row["host_us"], y, "D", mfc="white", mec="black", markersize=5, label="the host's calls alone")
        words, face = (held_back, "white") if is_limited else ("the kernels alone", "black")
        axes.plot(row["median_us"], y, "ok", mfc=face, markersize=5, label=words)
    style.name_lines(axes, [counted(size, "request") for size in sizes])
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    style.name_axes(axes, "µs")
    style.legend_below(figure, 2)
    return figure


def _limits_of(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({reason for row in rows for reason in row["throttled_by"] or ()}))


DRAWINGS = (style.Drawing("forms", "GPU time of a draft extend, by what it hands out", forms_figure),)
