"""Draw the static buffers of a draft extend's CUDA graph at a replay, cell by cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from lab.metadata.speculation.draft_extend_graph import DraftExtendGraph
from lab.named_enum import NamedEnum
from studies.pictures.cells import Box, Line, Look, cells_figure, check_legible

MOST_ROWS = 24  # query rows side by side that are legible
BEFORE_ROWS = 1.0  # room for the first entry of running sums, in query rows
TABLE_CELL = 2  # width of a page-table cell, in query rows


class CellState(NamedEnum):
    """The content of a static buffer's cell while a replay runs."""

    LIVE = "written by this replay: of the batch"
    PADDING = "written by this replay: padding"
    STALE_READ = "left by an earlier replay, read by padded rows"
    STALE = "left by an earlier replay, read by nobody"
    PRESET = "as it was made"


# What is left over is hatched too, so that no colour stands alone.
KINDS = {
    CellState.LIVE: Look("#56B4E9", CellState.LIVE.value),
    CellState.PADDING: Look("#F7D98B", CellState.PADDING.value),
    CellState.STALE_READ: Look("white", CellState.STALE_READ.value, edge="#D55E00", hatch="//////"),
    CellState.STALE: Look("white", CellState.STALE.value, edge="#999999", hatch="...."),
    CellState.PRESET: Look("white", CellState.PRESET.value, edge="#BBBBBB", linestyle=":"),
}


class Along(NamedEnum):
    """What a cell of a buffer is for: a request, a query row and so on."""

    REQUESTS = "a cell per request"
    ROWS = "a cell per query row"
    BOUNDARIES = "0, then a cell per request"
    PAGES = "a line per request, a cell per page"


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
    """Return the buffers (not copies) that the graphs of a draft extend read, by name, for the largest captured size."""
    sources = (graph.runner.inputs, graph.inputs, graph.runner.metadata.buffers)  # of each group
    return {
        name: getattr(source, {"cache_seqlens": "cache_seqlens_int32"}.get(name, name))
        for source, group in zip(sources, GROUPS.values(), strict=True)
        for name in group
    }


def written_cells(buffers: Mapping[str, Tensor], replay: Callable[[], object]) -> dict[str, Tensor]:
    """Return which cells a replay writes, as bool tensors of the buffers' shapes. A row of `hidden_states` is one cell.

    The replay runs on buffers of zeros and on buffers of ones, which must be valid contents. Cells that are equal afterwards
    were written. Then the old contents are restored, and the replay runs once more.
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
    """The values and states of every cell of the static buffers while a replay runs; `hidden_states` has one cell per row."""

    values: Mapping[str, list[Any]]
    states: Mapping[str, list[Any]]
    num_requests: int
    captured_size: int
    max_batch_size: int
    width: int

    def count(self, name: str, state: CellState) -> int:
        lines = self.states[name] if ALONG[name] is Along.PAGES else [self.states[name]]
        return sum(each is state for line in lines for each in line)


def replayed_buffers(
    graph: DraftExtendGraph,
    num_requests: int,
    written: Mapping[str, Tensor],
    earlier: Sequence[Mapping[str, Tensor]] = (),
) -> ReplayedBuffers:
    """Return the state of every cell after a replay, from the cells that this replay and the `earlier` ones wrote."""
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
    """Draw the value and state of every cell of the static buffers. Raises ValueError if they are too many to be legible.

    A cell has the gid "<state's name> <buffer> <index>", with the index "<request>,<page>" in a page table.
    """
    rows = buffers.max_batch_size * buffers.width
    check_legible(rows, "query rows", MOST_ROWS, "capture smaller sizes, or fewer rows of each request")
    lines = []
    for heading, group in GROUPS.items():
        lines += [Line(heading=heading), *(line for name in group for line in _lines(name, buffers))]
    ends = (
        (buffers.num_requests, "request {}"),
        (buffers.captured_size, "padding"),
        (buffers.max_batch_size, "not run"),
    )
    names = [next(words for end, words in ends if i < end).format(i) for i in range(buffers.max_batch_size)]
    requests = f"{buffers.num_requests} of {buffers.max_batch_size} requests, {buffers.width} query rows each"
    return cells_figure(
        title,
        lines,
        KINDS,
        (-BEFORE_ROWS, max(rows, TABLE_CELL * len(buffers.values["page_table"][0]))),
        subtitle=f"{requests}; the graph that runs was captured for {buffers.captured_size}",
        across={(request + 0.5) * buffers.width: name for request, name in enumerate(names)},
    )


def _lines(name: str, buffers: ReplayedBuffers) -> list[Line]:
    values, states, along = buffers.values[name], buffers.states[name], ALONG[name]
    if along is not Along.PAGES:
        cells = []
        for place, (value, state) in enumerate(zip(values, states, strict=True)):
            x, width = _extent(along, place, buffers.width)
            words = "" if name == "hidden_states" else str(value)
            cells.append(Box(x, state, words, width, gid=f"{state.name} {name} {place}"))
        return [Line(name, cells)]
    lines = []
    for request, entries in enumerate(zip(values, states, strict=True)):
        cells = [
            Box(TABLE_CELL * page, state, str(value), TABLE_CELL, gid=f"{state.name} {name} {request},{page}")
            for page, (value, state) in enumerate(zip(*entries, strict=True))
        ]
        lines.append(Line(f"{name}[{request}]", cells))
    return lines


def _extent(along: Along, place: int, width: int) -> tuple[float, float]:
    if along is Along.ROWS:
        return place, 1
    if along is Along.REQUESTS:
        return place * width, width
    return (-BEFORE_ROWS, BEFORE_ROWS) if place == 0 else ((place - 1) * width, width)
