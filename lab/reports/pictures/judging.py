"""Pictures of the judge: verdicts of recorded runs, mutants and the checks that find them, errors of one output."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from lab.reports.pictures import style

ROW_INCHES = 0.21
# Blue is found or right, orange is let through or wrong: Okabe and Ito's, which differ in lightness too.
FOUND, LET_THROUGH, NOTHING, NOT_ASKED = "#0072B2", "#E69F00", "#FFFFFF", "#DDDDDD"
OUTCOME_COLOURS = {
    "right": "#BFDDF0",
    "known": "#F6D98B",
    "wrong": "#E58A4E",
    "failed": "#B0413E",
    "declined": "#DDDDDD",
}
# Error over bound, in steps: a picture of few colours is small, and 1 is where blue ends.
STEPS = (0.0, 0.5, 1.0, 3.0, 10.0, 30.0, 100.0)
STEP_COLOURS = ("#2166AC", "#D1E5F0", "#FDDBC7", "#EF8A62", "#B2182B", "#67001F")
Record = Mapping[str, Any]  # a row of results/mutants.json


@dataclass(frozen=True)
class VerdictCell:
    """One check of one function in one run.

    Attributes:
        line: run and function.
        check: key of the check, and its name.
        outcome: of `OUTCOME_COLOURS`.
        worst_right: largest error of a right result over its bound; None if there was none.
    """

    line: str
    check: str
    outcome: str
    worst_right: float | None


def verdict_figure(cells: Sequence[VerdictCell], title: str) -> Figure:
    """Draw a line per run and function, a column per check; the number is the worst right error, in percent of its bound."""
    lines, checks = list(dict.fromkeys(cell.line for cell in cells)), _in_catalogue_order(cell.check for cell in cells)
    height = 1.8 + ROW_INCHES * len(lines)
    figure, axes = _figure(title, height)
    axes.set(xlim=(0, len(checks)), ylim=(len(lines), 0))
    for cell in cells:
        x, y = checks.index(cell.check), lines.index(cell.line)
        colour = OUTCOME_COLOURS[cell.outcome]
        axes.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
        if cell.worst_right is not None:
            ink = "white" if cell.outcome == "failed" else "black"
            style.write_in_cell(axes, x + 0.5, y, f"{100 * cell.worst_right:.0f}", fontsize=7, color=ink)
    _label_cells(axes, checks, lines)
    _slant(axes)
    shown = [outcome for outcome in OUTCOME_COLOURS if any(cell.outcome == outcome for cell in cells)]
    _legend(figure, {outcome: OUTCOME_COLOURS[outcome] for outcome in shown})
    return figure


def one_for_each_check(records: Sequence[Record], checks: Sequence[str]) -> list[Record]:
    """Return for each check the mutant that the fewest others find, the first of several; none twice if there are enough."""
    chosen: dict[str, Record] = {}
    for check in checks:
        found = sorted(
            (record for record in records if check in record["kills"]), key=lambda record: len(record["kills"])
        )
        new = next((record for record in found if record["mutant"] not in chosen), None)
        if new is not None:
            chosen[new["mutant"]] = new
    return list(chosen.values())


def matrix_figure(records: Sequence[Record], checks: Sequence[str], rules: Sequence[str]) -> Figure:
    """Draw all mutants: a column each, a line per check and, beneath, a line per upstream rule.

    Args:
        records: rows of results/mutants.json.
        checks: keys, in order; numbers at the right are how many mutants each finds.
        rules: names of the upstream rules, in the order of the records' numbers; at the right, how many each lets through.
    """
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_family(record), []).append(record)
    ordered = [record for group in groups.values() for record in sorted(group, key=_by_kills(checks))]
    height = 1.75 + 0.17 * (len(checks) + len(rules))
    figure, axes = _figure(
        f"Which check finds which of {len(records)} mutants, and which upstream rule lets it pass", height
    )
    gap = 1
    lines = len(checks) + gap + len(rules)
    axes.set(xlim=(0, len(ordered)), ylim=(lines, 0))
    first_rule = len(checks) + gap
    drawn: dict[str, list[tuple[int, int]]] = {FOUND: [], LET_THROUGH: [], NOT_ASKED: []}
    for x, record in enumerate(ordered):
        drawn[FOUND] += [(x, y) for y, key in enumerate(checks) if key in record["kills"]]
        passed = record["upstream"]
        drawn[NOT_ASKED if passed is None else LET_THROUGH] += [
            (x, first_rule + rule) for rule in (range(len(rules)) if passed is None else passed)
        ]
    for colour, corners in drawn.items():
        boxes = [Rectangle((x, y + 0.06), 1, 0.88) for x, y in corners]
        axes.add_collection(PatchCollection(boxes, facecolor=colour, edgecolor="none", antialiased=False))
    counts = [sum(key in record["kills"] for record in records) for key in checks]
    passing = [sum(rule in (record["upstream"] or ()) for record in records) for rule in range(len(rules))]
    places = [*range(len(checks)), *range(first_rule, lines)]
    axes.set_yticks([place + 0.5 for place in places], [*checks, *rules], fontsize=7.5)
    right = axes.secondary_yaxis("right")
    right.set_yticks([place + 0.5 for place in places], [str(count) for count in counts + passing], fontsize=7.5)
    right.tick_params(length=0)
    right.spines["right"].set_visible(False)
    _mark_groups(axes, {name: len(group) for name, group in groups.items()}, lines)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    _legend(
        figure,
        {
            "found by the check": FOUND,
            "passes the upstream rule": LET_THROUGH,
            "no attention output to compare": NOT_ASKED,
        },
    )
    return figure


def few_figure(records: Sequence[Record], checks: Sequence[str], rules: Sequence[str]) -> Figure:
    """Draw named mutants: a line each, a column per check, and at the right a column per upstream rule."""
    figure, axes = _figure(
        f"{len(records)} mutants, each with the checks that find it and the rules that it passes",
        1.75 + ROW_INCHES * len(records),
    )
    gap = 1
    columns = len(checks) + gap + len(rules)
    axes.set(xlim=(0, columns), ylim=(len(records), 0))
    for y, record in enumerate(records):
        for x, key in enumerate(checks):
            _box(axes, x, y, FOUND if key in record["kills"] else NOTHING)
        passed = record["upstream"]
        for rule in range(len(rules)):
            colour = NOT_ASKED if passed is None else LET_THROUGH if rule in passed else NOTHING
            _box(axes, len(checks) + gap + rule, y, colour)
    labels = [*checks, *([""] * gap), *rules]
    _label_cells(axes, labels, [record["mutant"] for record in records])
    _slant(axes)
    _legend(
        figure,
        {"found by the check": FOUND, "passes the upstream rule": LET_THROUGH, "no attention output": NOT_ASKED},
    )
    return figure


def vector_errors_figure(error: torch.Tensor, bound: torch.Tensor, request_of_row: torch.Tensor, title: str) -> Figure:
    """Draw the error of each output vector over its bound: a cell per query row and head, blue within the bound, red beyond.

    Args:
        error, bound: relative L2, [num_rows, num_heads]; what is not finite is drawn as the largest.
        request_of_row: int [num_rows].
    """
    ratio = (error / bound).nan_to_num(nan=math.inf, posinf=math.inf).cpu()
    num_rows, num_heads = ratio.shape
    figure, axes = _figure(title, 1.5 + 0.16 * num_heads)
    colours = ListedColormap(STEP_COLOURS)
    norm = BoundaryNorm(STEPS, len(STEP_COLOURS))
    shown = ratio.clamp(max=math.nextafter(STEPS[-1], 0)).T.numpy()
    image = axes.pcolormesh(shown, cmap=colours, norm=norm, edgecolors="white", linewidth=0.4)
    axes.set(ylim=(num_heads, 0), ylabel="head", xlabel="query row")
    axes.set_yticks([place + 0.5 for place in range(num_heads)], [str(head) for head in range(num_heads)])
    step = max(1, num_rows // 16)
    axes.set_xticks([row + 0.5 for row in range(0, num_rows, step)], [str(row) for row in range(0, num_rows, step)])
    starts = [row for row in range(num_rows) if row == 0 or request_of_row[row] != request_of_row[row - 1]]
    for row in starts:
        axes.axvline(row, color="black", linewidth=1.2)
    for row, end in zip(starts, [*starts[1:], num_rows], strict=True):
        axes.annotate(
            f"request {int(request_of_row[row])}",
            ((row + end) / 2, 0),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=style.FONT_POINTS - 1,
        )
    bar = figure.colorbar(image, ax=axes, label="error over bound", pad=0.02)
    bar.ax.set_yticks(STEPS, [*(f"{step:g}" for step in STEPS[:-1]), "more"])
    return figure


def passing_figure(
    passed: Sequence[Sequence[bool]], lengths: Sequence[int], rules: Sequence[str], title: str
) -> Figure:
    """Draw the lengths at which each rule lets an output pass: a line per rule, a column per length in keys.

    Args:
        passed: per rule, per length.
    """
    figure, axes = _figure(title, 1.55 + ROW_INCHES * len(rules))
    axes.set(xlim=(0, len(lengths)), ylim=(len(rules), 0))
    for y, line in enumerate(passed):
        for x, passes in enumerate(line):
            _box(axes, x, y, LET_THROUGH if passes else FOUND)
    _label_cells(axes, [f"{length:,}" for length in lengths], list(rules))
    axes.set_xlabel("keys per request", fontsize=style.FONT_POINTS)
    axes.xaxis.set_label_position("top")
    _legend(figure, {"found": FOUND, "passes": LET_THROUGH})
    return figure


def _in_catalogue_order(keys: Any) -> list[str]:
    """Sort keys, and names that begin with them: K1 before K10, and K before L and M."""
    numbered = re.compile(r"([A-Z])(\d+)")

    def place(name: str) -> tuple[str, int, str]:
        found = numbered.match(name)
        return (found[1], int(found[2]), name) if found else (name[:1], 0, name)

    return sorted(dict.fromkeys(keys), key=place)


def _family(record: Record) -> str:
    """Return the family of a mutant, by which the columns are grouped."""
    first = record["interface"][0]
    if "mla_decode_metadata" in first or "mha_metadata" in first:
        return "metadata"
    if "ragged" in first:
        return "ragged"
    if first.endswith("_mla"):
        return "MLA decode"
    return "paged attention" if first.startswith("trtllm") else "draft lists"


def _by_kills(checks: Sequence[str]) -> Any:
    """Return a sorting key: most checks first, then by their names, so that equal columns come together."""
    return lambda record: (-len(record["kills"]), [key not in record["kills"] for key in checks], record["mutant"])


def _mark_groups(axes: Axes, sizes: Mapping[str, int], lines: int) -> None:
    first = 0
    for place, (name, size) in enumerate(sizes.items()):
        if first:
            axes.plot([first, first], [-0.2, lines], color=style.TEXT_COLOUR, linewidth=0.8, clip_on=False)
        # Names of narrow groups are wider than the groups: they take turns at two heights.
        narrow = size < sum(sizes.values()) / 8
        offset = 4 + 11 * (place % 2 if narrow else 0)
        axes.annotate(
            f"{name}, {size}",
            (first + size / 2, 0),
            (0, offset),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=style.TEXT_COLOUR,
            annotation_clip=False,
        )
        first += size
    axes.set_xticks([])


def _box(axes: Axes, x: int, y: int, colour: str) -> None:
    axes.add_patch(Rectangle((x + 0.06, y + 0.08), 0.88, 0.84, facecolor=colour, edgecolor="#CCCCCC", linewidth=0.5))


def _label_cells(axes: Axes, columns: Sequence[str], lines: Sequence[str]) -> None:
    axes.set_xticks([place + 0.5 for place in range(len(columns))], list(columns), fontsize=7.5)
    axes.set_yticks([place + 0.5 for place in range(len(lines))], list(lines), fontsize=7.5)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _slant(axes: Axes) -> None:
    for label in axes.get_xticklabels():
        label.set(rotation=60, ha="left", rotation_mode="anchor")


def _figure(title: str, height_inches: float) -> tuple[Figure, Axes]:
    figure = style.new_figure(title, height_inches)
    return figure, figure.add_subplot()


def _legend(figure: Figure, meanings: Mapping[str, str]) -> None:
    handles = [Patch(facecolor=colour, edgecolor="#CCCCCC", label=name) for name, colour in meanings.items()]
    style.legend_below(figure, handles, 5)
