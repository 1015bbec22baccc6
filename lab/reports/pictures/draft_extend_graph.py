"""A draft extend's CUDA graph, drawn: what each static buffer holds at a replay, and what graph and trimmed outputs save.

Matplotlib figures, 8 inches wide: legible where they are shown 800 pixels wide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from lab.metadata.speculation.draft_extend_graph import DraftExtendGraph, DraftExtendOutput
from lab.reports.pictures.style import COLOURS, DOTS_PER_INCH, FONT_POINTS, TEXT_COLOUR, legend_below, plain

WIDTH_INCHES = 8.0
LABEL_INCHES = 1.75
LINE_INCHES = 0.24
HEADING_INCHES = 0.6
LEGEND_INCHES = 0.75
MOST_ROWS = 24  # query rows side by side that are legible
BEFORE_ROWS = 1.0  # room for the first entry of running sums, in query rows
TABLE_CELL = 2  # width of a page-table cell, in query rows


class CellState(Enum):
    """What a cell of a static buffer holds while a replay runs."""

    LIVE = "written by this replay: of the batch"
    PADDING = "written by this replay: padding"
    STALE_READ = "left by an earlier replay, read by padded rows"
    STALE = "left by an earlier replay, read by nobody"
    PRESET = "as it was made"

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


# What is left over is hatched too, so that no colour stands alone.
LOOKS: dict[CellState, dict[str, Any]] = {
    CellState.LIVE: {"facecolor": "#56B4E9", "edgecolor": "white"},
    CellState.PADDING: {"facecolor": "#F7D98B", "edgecolor": "white"},
    CellState.STALE_READ: {"facecolor": "#FFFFFF", "edgecolor": "#D55E00", "hatch": "//////"},
    CellState.STALE: {"facecolor": "#FFFFFF", "edgecolor": "#999999", "hatch": "...."},
    CellState.PRESET: {"facecolor": "#FFFFFF", "edgecolor": "#BBBBBB", "linestyle": ":"},
}


class Along(Enum):
    """What the cells of a buffer stand for."""

    REQUESTS = "a cell per request"
    ROWS = "a cell per query row"
    BOUNDARIES = "0, then a cell per request"
    PAGES = "a line per request, a cell per page"

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


GROUPS: dict[str, dict[str, Along]] = {
    "the batch, copied in before the replay": {
        "seq_lens": Along.REQUESTS,
        "req_pool_indices": Along.REQUESTS,
        "extend_seq_lens": Along.REQUESTS,
        "out_cache_loc": Along.ROWS,
    },
    "what the model reads besides, copied in before the replay": {
        "input_ids": Along.ROWS,
        "hidden_states": Along.ROWS,
        "select_index": Along.REQUESTS,
    },
    "metadata, written in one launch": {
        "cache_seqlens": Along.REQUESTS,
        "cu_seqlens_q": Along.BOUNDARIES,
        "cu_seqlens_k": Along.BOUNDARIES,
        "page_table": Along.PAGES,
    },
}
ALONG = {name: along for group in GROUPS.values() for name, along in group.items()}


def static_buffers(graph: DraftExtendGraph) -> dict[str, Tensor]:
    """The buffers that a draft extend's graphs read, of the largest captured size, by name; not copies."""
    inputs, metadata = graph.runner.inputs, graph.runner.metadata.buffers
    return {
        "seq_lens": inputs.seq_lens,
        "req_pool_indices": inputs.req_pool_indices,
        "extend_seq_lens": inputs.extend_seq_lens,
        "out_cache_loc": inputs.out_cache_loc,
        "input_ids": graph.inputs.input_ids,
        "hidden_states": graph.inputs.hidden_states,
        "select_index": graph.inputs.select_index,
        "cache_seqlens": metadata.cache_seqlens_int32,
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "cu_seqlens_k": metadata.cu_seqlens_k,
        "page_table": metadata.page_table,
    }


def written_cells(buffers: Mapping[str, Tensor], replay: Callable[[], object]) -> dict[str, Tensor]:
    """Which cells a replay writes, found out and not assumed: bool, the buffers' shapes; a row of `hidden_states` is one cell.

    Replays on buffers full of zeros and on buffers full of ones. What is the same afterwards was written. Then what was there
    is put back, and the replay runs once more.

    Args:
        buffers: of `static_buffers`; 0 and 1 must be good entries of each.
        replay: the same each time.
    """
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    after: list[dict[str, Tensor]] = []
    for value in (0, 1):
        for tensor in buffers.values():
            tensor.fill_(value)
        replay()
        after.append({name: tensor.clone() for name, tensor in buffers.items()})
    for name, tensor in buffers.items():
        tensor.copy_(before[name])
    replay()
    written = {name: after[0][name] == after[1][name] for name in buffers}
    return {name: cells.all(dim=1) if name == "hidden_states" else cells for name, cells in written.items()}


@dataclass(frozen=True, eq=False)
class ReplayedBuffers:
    """The static buffers while a replay runs, as `buffers_figure` draws them.

    Attributes:
        values: of every cell, by buffer; `hidden_states` has a row each.
        states: of every cell, by buffer: lists of the cells' shape.
        num_requests, captured_size, max_batch_size: of the batch, of the graph that ran, of the buffers.
        width: query rows of each request.
    """

    values: Mapping[str, list[Any]]
    states: Mapping[str, list[Any]]
    num_requests: int
    captured_size: int
    max_batch_size: int
    width: int

    def count(self, name: str, state: CellState) -> int:
        """Cells of a buffer in a state."""
        lines = self.states[name] if ALONG[name] is Along.PAGES else [self.states[name]]
        return sum(each is state for line in lines for each in line)


def replayed_buffers(
    graph: DraftExtendGraph,
    num_requests: int,
    written: Mapping[str, Tensor],
    earlier: Sequence[Mapping[str, Tensor]] = (),
) -> ReplayedBuffers:
    """Sort every cell of a graph's buffers, right behind a replay.

    Args:
        graph: as the replay left it.
        num_requests: of the batch, padding apart.
        written: by this replay, of `written_cells`.
        earlier: the same of each replay before it.
    """
    size = graph.runner.size_for(num_requests)
    page_size = graph.runner.pool.page_size
    buffers = static_buffers(graph)
    num_pages = [-(-length // page_size) for length in buffers["cache_seqlens"].tolist()]

    def state(name: str, place: tuple[int, ...], request: int, is_read: bool) -> CellState:
        if bool(written[name][place]):
            return CellState.LIVE if request < num_requests else CellState.PADDING
        if any(bool(each[name][place]) for each in earlier):
            return CellState.STALE_READ if is_read else CellState.STALE
        return CellState.PRESET

    def states(name: str) -> list[Any]:
        along, tensor = ALONG[name], buffers[name]
        if along is Along.PAGES:
            return [
                [state(name, (i, c), i, i < size and c < num_pages[i]) for c in range(tensor.shape[1])]
                for i in range(tensor.shape[0])
            ]
        request_of = {
            Along.REQUESTS: lambda place: place,
            Along.ROWS: lambda place: place // graph.width,
            Along.BOUNDARIES: lambda place: place - 1,
        }[along]
        return [state(name, (place,), request_of(place), request_of(place) < size) for place in range(tensor.shape[0])]

    return ReplayedBuffers(
        values={name: tensor.tolist() for name, tensor in buffers.items()},
        states={name: states(name) for name in buffers},
        num_requests=num_requests,
        captured_size=size,
        max_batch_size=graph.runner.inputs.max_batch_size,
        width=graph.width,
    )


def buffers_figure(buffers: ReplayedBuffers, title: str) -> Figure:
    """Every cell of the static buffers: its value, and by its look whose it is.

    A cell is a `Rectangle` whose gid is "<state's name> <buffer> <place>", the place "<request>,<page>" in a page table.

    Raises:
        ValueError: more than `MOST_ROWS` query rows, which would not be legible.
    """
    rows = buffers.max_batch_size * buffers.width
    if rows > MOST_ROWS:
        raise ValueError(
            f"the buffers have {rows} query rows, more than the {MOST_ROWS} that can be read side by side: capture smaller "
            "sizes, or fewer rows of each request"
        )
    lines = 1 + sum(1 + sum(_num_lines(name, buffers) for name in group) for group in GROUPS.values())
    body = lines * LINE_INCHES
    height = HEADING_INCHES + body + LEGEND_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH)
    share = LABEL_INCHES / WIDTH_INCHES
    axes = figure.add_axes((share, LEGEND_INCHES / height, 0.985 - share, body / height))
    columns = max(rows, TABLE_CELL * len(buffers.values["page_table"][0]))
    axes.set(xlim=(-BEFORE_ROWS, columns), ylim=(lines, 0))
    axes.set_axis_off()
    _write_heading(figure, buffers, title)
    _name_requests(axes, buffers)
    line = 1
    for heading, group in GROUPS.items():
        _text(axes, -BEFORE_ROWS, line, heading, -LABEL_INCHES * 72 + 10, weight="bold")
        line += 1
        for name in group:
            _draw_buffer(axes, line, name, buffers)
            line += _num_lines(name, buffers)
    figure.legend(handles=_keys(buffers), loc="lower center", ncols=2, frameon=False, fontsize=FONT_POINTS)
    return figure


def _num_lines(name: str, buffers: ReplayedBuffers) -> int:
    return buffers.max_batch_size if ALONG[name] is Along.PAGES else 1


def _write_heading(figure: Figure, buffers: ReplayedBuffers, title: str) -> None:
    height = figure.get_figheight()
    said = (
        f"{buffers.num_requests} of {buffers.max_batch_size} requests, {buffers.width} query rows each; "
        f"the graph that runs was captured for {buffers.captured_size}"
    )
    figure.text(
        0.02, 1 - 0.2 / height, title, fontsize=FONT_POINTS + 2.5, weight="bold", color=TEXT_COLOUR, va="center"
    )
    figure.text(0.02, 1 - 0.43 / height, said, fontsize=FONT_POINTS, color=TEXT_COLOUR, va="center")


def _name_requests(axes: Axes, buffers: ReplayedBuffers) -> None:
    for request in range(buffers.max_batch_size):
        words = f"request {request}" if request < buffers.num_requests else "padding"
        if request >= buffers.captured_size:
            words = "not run"
        middle = (request + 0.5) * buffers.width
        axes.text(middle, 0.5, words, ha="center", va="center", fontsize=FONT_POINTS, color=TEXT_COLOUR)


def _draw_buffer(axes: Axes, line: int, name: str, buffers: ReplayedBuffers) -> None:
    values, states, along = buffers.values[name], buffers.states[name], ALONG[name]
    if along is Along.PAGES:
        for request, (entries, kinds) in enumerate(zip(values, states, strict=True)):
            _text(axes, -BEFORE_ROWS, line + request, f"{name}[{request}]", -6, ha="right")
            for column, (value, kind) in enumerate(zip(entries, kinds, strict=True)):
                gid = f"{kind.name} {name} {request},{column}"
                _cell(axes, TABLE_CELL * column, line + request, TABLE_CELL, str(value), kind, gid)
        return
    _text(axes, -BEFORE_ROWS, line, name, -6, ha="right")
    for place, (value, kind) in enumerate(zip(values, states, strict=True)):
        first, width = _extent(along, place, buffers.width)
        words = "" if name == "hidden_states" else str(value)
        _cell(axes, first, line, width, words, kind, f"{kind.name} {name} {place}")


def _extent(along: Along, place: int, width: int) -> tuple[float, float]:
    """Left edge and width of a cell."""
    if along is Along.ROWS:
        return place, 1
    if along is Along.REQUESTS:
        return place * width, width
    return (-BEFORE_ROWS, BEFORE_ROWS) if place == 0 else ((place - 1) * width, width)


def _cell(axes: Axes, x: float, line: int, width: float, words: str, state: CellState, gid: str) -> None:
    axes.add_patch(Rectangle((x + 0.04, line + 0.06), width - 0.08, 0.88, linewidth=0.8, gid=gid, **LOOKS[state]))
    if words:
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if "hatch" in LOOKS[state] else None
        axes.text(
            x + width / 2,
            line + 0.53,
            words,
            ha="center",
            va="center",
            fontsize=FONT_POINTS - 1.5,
            color="black",
            bbox=behind,
        )


def _text(axes: Axes, x: float, line: int, words: str, points: float, **style: Any) -> None:
    axes.annotate(
        words,
        (x, line + 0.5),
        (points, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_POINTS,
        color=TEXT_COLOUR,
        **style,
    )


def _keys(buffers: ReplayedBuffers) -> list[Patch]:
    there = [state for state in CellState if any(buffers.count(name, state) for name in ALONG)]
    return [Patch(linewidth=0.8, label=state.value, **LOOKS[state]) for state in there]


# --- recorded times ---------------------------------------------------------------------------------------------------

FORM_WORDS = {
    DraftExtendOutput.ALL_ROWS_WITH_TOPK: "logits of all rows, and a top-k that nobody reads",
    DraftExtendOutput.ALL_ROWS: "logits of all rows",
    DraftExtendOutput.SELECTED_ROW: "logits of the selected row",
}


def forms_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """What the draft extend takes on the GPU by what it hands out, a panel per number of draft tokens; a line is the floor.

    Args:
        rows: the `forms` of `lab.experiments.draft_extend_graph`, as recorded.
        title: over all panels.
    """
    widths = sorted({row["num_draft_tokens"] for row in rows})
    sizes = sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(WIDTH_INCHES, 3.6), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_POINTS + 2)
    panels = figure.subplots(1, len(widths), sharey=True, squeeze=False)[0]
    thickness = 0.8 / len(FORM_WORDS)
    for axes, width in zip(panels, widths, strict=True):
        plain(axes)
        axes.grid(visible=False, axis="x")
        axes.tick_params(labelsize=FONT_POINTS - 0.5)
        for place, (form, colour) in enumerate(zip(FORM_WORDS, COLOURS, strict=False)):
            found = {
                row["batch_size"]: row for row in rows if (row["num_draft_tokens"], row["form"]) == (width, form.value)
            }
            for group, size in enumerate(sizes):
                if size not in found:
                    continue
                x = group + (place + 0.5) * thickness - 0.4
                axes.bar(x, found[size]["median_us"], 0.9 * thickness, **_fill(colour, found[size]))
                axes.plot(
                    [x - thickness / 2, x + thickness / 2], [found[size]["floor_us"]] * 2, color="black", linewidth=1.2
                )
        axes.set_title(f"{width} draft tokens", fontsize=FONT_POINTS)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlabel("requests", fontsize=FONT_POINTS)
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("GPU time of a replay, µs", fontsize=FONT_POINTS)
    keys: list[Any] = [
        Patch(color=colour, label=words) for words, colour in zip(FORM_WORDS.values(), COLOURS, strict=False)
    ]
    keys.append(Line2D([], [], color="black", linewidth=1.2, label="floor: the least time of its bytes and operations"))
    if reasons := _throttled_by(rows):
        label = f"hatched: clocks held back ({reasons})"
        keys.append(Patch(facecolor="white", edgecolor=TEXT_COLOUR, hatch="////", label=label))
    legend_below(figure, keys, 2)
    return figure


ARM_WORDS = {"eager": "launched one by one", "graph": "replayed, the copies into the graph's inputs included"}


def eager_or_graph_figure(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """From the call to an idle GPU, eagerly and replayed; marks are what the host and the kernels take by themselves.

    Args:
        rows: of one mode, of the `modes` of `lab.experiments.draft_extend_graph`, as recorded.
        title: over the axes.
    """
    sizes = sorted({row["batch_size"] for row in rows})
    figure = Figure(figsize=(WIDTH_INCHES, 1.6 + 0.5 * len(sizes)), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT_POINTS + 2)
    axes = figure.add_subplot()
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.tick_params(labelsize=FONT_POINTS - 0.5)
    for place, (arm, colour) in enumerate(zip(ARM_WORDS, COLOURS, strict=False)):
        for group, size in enumerate(sizes):
            (row,) = (row for row in rows if (row["batch_size"], row["arm"]) == (size, arm))
            y = group + 0.38 * place - 0.19
            axes.barh(y, row["completion_us"], 0.34, color=colour)
            axes.annotate(
                f"{row['completion_us']:,.0f}",
                (row["completion_us"], y),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=FONT_POINTS - 1,
            )
            axes.plot(row["host_us"], y, "D", color="white", markeredgecolor="black", markersize=5)
            axes.plot(row["median_us"], y, "o", color="black", mfc=_dot_face(row), markersize=5)
    axes.set_yticks(range(len(sizes)), [f"{size} requests" if size > 1 else "1 request" for size in sizes])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("µs", fontsize=FONT_POINTS)
    keys: list[Any] = [
        Patch(color=colour, label=words) for words, colour in zip(ARM_WORDS.values(), COLOURS, strict=False)
    ]
    keys += [
        Line2D(
            [], [], marker="D", color="white", markeredgecolor="black", linestyle="none", label="the host's calls alone"
        ),
        Line2D([], [], marker="o", color="black", linestyle="none", label="the kernels alone"),
    ]
    if reasons := _throttled_by(rows):
        label = f"the same, clocks held back ({reasons})"
        keys.append(Line2D([], [], marker="o", color="black", mfc="white", linestyle="none", label=label))
    legend_below(figure, keys, 2)
    return figure


def _fill(colour: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A bar that was timed while the GPU's clocks were held back is hatched."""
    is_throttled = bool(row["throttled_by"])
    return {
        "facecolor": "white" if is_throttled else colour,
        "edgecolor": colour,
        "hatch": "////" if is_throttled else None,
    }


def _dot_face(row: Mapping[str, Any]) -> str:
    return "white" if row["throttled_by"] else "black"


def _throttled_by(rows: Sequence[Mapping[str, Any]]) -> str:
    """What held the clocks back in any of the rows; empty for nothing."""
    return ", ".join(sorted({reason for row in rows for reason in row["throttled_by"]}))
