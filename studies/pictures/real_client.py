"""Draw the attention calls of a real engine by step, and the verdicts on them (`studies.real_client`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.reports.pictures import style

# By the verdict of a call: colour, marker and the legend's words.
LOOKS = {
    "": ("#BBBBBB", ".", "not judged"),
    "right": (style.COLOURS[2], "o", "judged right"),
    "wrong": (style.COLOURS[1], "X", "judged wrong, and kept"),
}


def calls_figure(calls: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw, for each attention implementation, the keys of each call's longest request over the engine's step. Raises
    ValueError without calls.

    The calls of a step, one per layer, lie next to each other. The marks of a verdict have the gid "<attention> <verdict>".
    """
    names = list(dict.fromkeys(call["attention"] for call in calls))
    if not names:
        raise ValueError("the recording has no calls: it was made without a kernel in shadow")
    layers, longest = 1 + max(call["layer"] for call in calls), max(call["max_kv_len"] for call in calls)
    figure, drawn = style.panels(title, 1.1 + 1.9 * len(names), len(names))
    for axes, name in zip(drawn[:, 0], names, strict=True):
        of_name = [call for call in calls if call["attention"] == name]
        counts = [sum(call["verdict"] == verdict for call in of_name) for verdict in ("wrong", "right")]
        style.name_panel(axes, f"{name}: {counts[0]} wrong of {sum(counts)} judged calls", loc="left")
        for verdict, (colour, marker, words) in LOOKS.items():
            found = [call for call in of_name if call["verdict"] == verdict]
            axes.plot(
                [call["step"] + call["layer"] / layers for call in found],
                [call["max_kv_len"] for call in found],
                marker,
                color=colour,
                markersize=3 if verdict == "" else 5,
                gid=f"{name} {verdict}",
                label=words,
            )
        axes.set_ylim(0, 1.1 * longest)
        style.name_axes(axes, upwards="keys of the longest request")
    style.name_axes(drawn[-1, 0], "step of the engine", "keys of the longest request")
    style.legend_below(figure, len(LOOKS))
    return figure


DRAWINGS = (style.Drawing("calls", "The engine's calls, and the verdicts of shadow", calls_figure),)
