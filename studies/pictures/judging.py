"""Draw pictures of the judge: mutants and the checks that find them, and the errors of one output."""

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from matplotlib.figure import Figure

from lab.reports.tables import grouped
from studies.pictures.cells import Box, Line, Look, cells_figure

# Blue is found or right, orange is let through or wrong: Okabe and Ito's, which differ in lightness too.
FOUND, LET_THROUGH, NOTHING, NOT_ASKED = "#0072B2", "#E69F00", "#FFFFFF", "#DDDDDD"
MUTANT_LOOKS = {
    "found": Look(FOUND, "found by the check", edge="#CCCCCC"),
    "passes": Look(LET_THROUGH, "passes the upstream rule", edge="#CCCCCC"),
    "none": Look(NOT_ASKED, "no attention output to compare", edge="#CCCCCC"),
    "nothing": Look(NOTHING, edge="#CCCCCC"),
}
# Error over bound, in steps: a picture of few colours is small, and 1 is where blue ends.
STEPS = (0.5, 1.0, 3.0, 10.0, 30.0)
STEP_COLOURS = ("#2166AC", "#D1E5F0", "#FDDBC7", "#EF8A62", "#B2182B", "#67001F")
Record = Mapping[str, Any]  # a row of results/mutants.json.gz


def _table(
    title: str, lines: Mapping[str, Sequence[Box]], columns: Sequence[str], kinds: Mapping[str, Look], **more: Any
) -> Figure:
    drawn = [Line(name, cells) for name, cells in lines.items()]
    across = {place + 0.5: name for place, name in enumerate(columns) if name}
    return cells_figure(title, drawn, kinds, (0, len(columns)), across=across, **more)


def one_for_each_check(records: Sequence[Record], checks: Sequence[str]) -> list[Record]:
    """Return a different mutant for each check: among those that are not yet chosen, the mutant that the fewest checks find."""
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
    """Draw all mutants: a column each, a line per check with how many it finds, a line per rule with how many pass it."""
    groups = grouped((_family(record), record) for record in records)
    widths = [len(group) + len(records) / 100 for group in groups.values()]  # a ranges after each group
    starts = list(accumulate(widths, initial=0.0))

    def by_kills(record: Record) -> Any:
        return -len(record["kills"]), [key not in record["kills"] for key in checks], record["mutant"]

    ordered = [
        (start + place, record)
        for start, group in zip(starts, groups.values(), strict=False)
        for place, record in enumerate(sorted(group, key=by_kills))
    ]
    lines = []
    for key in checks:
        found = [Box(x, "found") for x, record in ordered if key in record["kills"]]
        lines.append(Line(f"{key} ({len(found)})", _joined(found)))
    lines.append(Line())
    unasked = [Box(x, "none") for x, record in ordered if record["upstream"] is None]
    for place, rule in enumerate(rules):
        passing = [Box(x, "passes") for x, record in ordered if place in (record["upstream"] or ())]
        lines.append(Line(f"{rule} ({len(passing)})", [*_joined(passing), *_joined(unasked)]))
    across = {}
    for place, (start, (name, group)) in enumerate(zip(starts, groups.items(), strict=False)):
        # Names of narrow groups are wider than the groups: they take turns at two heights.
        raised = "\n" if len(group) < len(records) / 8 and place % 2 else ""
        across[start + len(group) / 2] = f"{name}, {len(group)}{raised}"
    title = f"Which check finds which of {len(records)} mutants, and which upstream rule lets it pass"
    kinds = {kind: replace(look, edge="none") for kind, look in MUTANT_LOOKS.items()}
    return cells_figure(title, lines, kinds, (0, starts[-1]), across=across)


def _joined(boxes: Iterable[Box]) -> list[Box]:
    """Join neighbouring cells of a line, so that a picture of thousands of cells has few patches."""
    joined: list[Box] = []
    for box in boxes:
        if joined and math.isclose(joined[-1].x + joined[-1].width, box.x):
            joined[-1] = replace(joined[-1], width=joined[-1].width + box.width)
        else:
            joined.append(box)
    return joined


def few_figure(records: Sequence[Record], checks: Sequence[str], rules: Sequence[str]) -> Figure:
    """Draw some mutants: a line per mutant, a column per check, and on the right a column per upstream tolerance rule."""
    first_rule = len(checks) + 1  # a column is left free
    lines = {}
    for record in records:
        found = [Box(x, "found" if key in record["kills"] else "nothing") for x, key in enumerate(checks)]
        passed = record["upstream"]
        kinds = ["none" if passed is None else "passes" if rule in passed else "nothing" for rule in range(len(rules))]
        lines[record["mutant"]] = found + [Box(first_rule + rule, kind) for rule, kind in enumerate(kinds)]
    title = f"{len(records)} mutants, each with the checks that find it and the rules that it passes"
    return _table(title, lines, [*checks, "", *rules], MUTANT_LOOKS, rotation=60)


def vector_errors_figure(error: torch.Tensor, bound: torch.Tensor, request_of_row: torch.Tensor, title: str) -> Figure:
    """Draw each output vector's error divided by its bound, [num_rows, num_heads] each: blue up to 1, red above."""
    ratios = (error / bound).nan_to_num(nan=math.inf, posinf=math.inf).T.tolist()
    requests = [(f"request {request}", len(list(rows))) for request, rows in groupby(request_of_row.tolist())]
    starts = accumulate((width for _, width in requests), initial=0)
    boxes = [Box(start, "request", words, width) for start, (words, width) in zip(starts, requests, strict=False)]
    lines = [Line(cells=boxes)]
    for head, of_rows in enumerate(ratios):
        lines.append(Line(f"head {head}", [Box(x, bisect(STEPS, ratio)) for x, ratio in enumerate(of_rows)]))
    names = [*(f"{low:g} to {high:g}" for low, high in pairwise((0.0, *STEPS))), f"{STEPS[-1]:g} or more"]
    kinds = {
        i: Look(colour, f"error over bound: {name}")
        for i, (colour, name) in enumerate(zip(STEP_COLOURS, names, strict=True))
    }
    num_rows = len(request_of_row)
    across = {row + 0.5: str(row) for row in range(0, num_rows, max(1, num_rows // 16))}
    return cells_figure(
        title, lines, kinds | {"request": Look("#F2F2F2")}, (0, num_rows), subtitle="query row", across=across
    )


def passing_figure(
    passed: Sequence[Sequence[bool]], lengths: Sequence[int], rules: Sequence[str], title: str
) -> Figure:
    """Draw at which lengths each rule accepts an output: a line per rule, and a column per length in keys."""
    lines = {
        rule: [Box(x, "passes" if passes else "found") for x, passes in enumerate(line)]
        for rule, line in zip(rules, passed, strict=True)
    }
    kinds = {"found": Look(FOUND, "found"), "passes": Look(LET_THROUGH, "passes")}
    return _table(title, lines, [f"{length:,}" for length in lengths], kinds, subtitle="keys per request")


def _family(record: Record) -> str:
    first = record["interface"][0]
    if "mla_decode_metadata" in first or "mha_metadata" in first:
        return "metadata"
    if "ragged" in first:
        return "ragged"
    if first.endswith("_mla"):
        return "MLA decode"
    return "paged attention" if first.startswith("trtllm") else "draft lists"
