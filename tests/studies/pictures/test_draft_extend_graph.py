"""What is drawn of a draft extend's graph: which cells a replay writes, held against rules stated here; recorded times."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest

import lab.references
from lab.metadata import ForwardMode, SpecInfo
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendGraph, DraftExtendOutput
from studies.pictures.draft_extend_graph import eager_or_graph_figure, forms_figure
from studies.pictures.static_buffers import (
    ALONG,
    Along,
    CellState,
    ReplayedBuffers,
    buffers_figure,
    replayed_buffers,
    static_buffers,
    written_cells,
)
from studies.stand_in_model import StandInModel, StandInPass, draw_pass
from tests.devices import IN_INTERPRETER
from tests.metadata.draft_extend_cases import PAGE_SIZE, new_model
from tests.reports.pictures.figures import gids, marks, rectangles, words

WIDTH, CAPTURED = 2, (2, 4)
FIRST, SECOND, THIRD = (40, 17, 60, 30), (5, 33, 10), (14,)  # tokens before the pass
LIVE, PADDING, STALE_READ, STALE, PRESET = CellState

Replay = Callable[[], object]


class Replays:
    """A graph, and replays of batches that were drawn beforehand."""

    def __init__(self, width: int = WIDTH) -> None:
        self.model: StandInModel = new_model("cpu", 12)
        backend = TRTLLMMHABackend(lab.references)
        spec_info = SpecInfo(num_tokens_per_req=width)
        self.graph = DraftExtendGraph(backend, self.model, self.model.pool, spec_info, CAPTURED)
        self.width = width

    def replay(self, prefix_lens: tuple[int, ...]) -> Replay:
        drawn: StandInPass = draw_pass(
            self.model, ForwardMode.DRAFT_EXTEND_V2, prefix_lens, (self.width,) * len(prefix_lens)
        )
        return partial(self.graph.replay, drawn.batch, drawn.input_ids, drawn.hidden_states, drawn.accept_lens)

    def buffers_after(self, *batches: tuple[int, ...]) -> ReplayedBuffers:
        """The buffers behind the last of several replays."""
        buffers = static_buffers(self.graph)
        written = [written_cells(buffers, self.replay(batch)) for batch in batches]
        return replayed_buffers(self.graph, len(batches[-1]), written[-1], written[:-1])


@cache
def padded() -> ReplayedBuffers:
    return Replays().buffers_after(FIRST, SECOND)


@cache
def smaller() -> ReplayedBuffers:
    return Replays().buffers_after(FIRST, SECOND, THIRD)


def num_pages(prefix_len: int) -> int:
    return -(-(prefix_len + WIDTH) // PAGE_SIZE)


@IN_INTERPRETER
def test_looking_leaves_the_buffers_as_the_replay_does() -> None:
    def contents(replays: Replays) -> dict[str, list[Any]]:
        return {name: tensor.tolist() for name, tensor in static_buffers(replays.graph).items()}

    looked_at, only_replayed = Replays(), Replays()
    for batch in (FIRST, SECOND):
        written_cells(static_buffers(looked_at.graph), looked_at.replay(batch))
        only_replayed.replay(batch)()
    assert contents(looked_at) == contents(only_replayed)


@IN_INTERPRETER
def test_padding_is_written_and_the_models_inputs_are_stale() -> None:
    states = padded().states
    for name in ("seq_lens", "req_pool_indices", "extend_seq_lens", "cache_seqlens"):
        assert states[name] == [LIVE] * 3 + [PADDING], name
    assert states["cu_seqlens_k"] == [LIVE] * 4 + [PADDING]
    assert states["out_cache_loc"] == [LIVE] * 6 + [PADDING] * 2
    assert states["input_ids"] == states["hidden_states"] == [LIVE] * 6 + [STALE_READ] * 2
    assert states["select_index"] == [LIVE] * 3 + [STALE_READ]
    for request, prefix_len in enumerate(SECOND):
        now, before = num_pages(prefix_len), num_pages(FIRST[request])
        row = states["page_table"][request]
        assert row == [LIVE if c < now else STALE if c < before else PRESET for c in range(len(row))], request
    assert states["page_table"][3][:3] == [PADDING, STALE, PRESET]


@IN_INTERPRETER
def test_a_smaller_captured_size_leaves_the_rest_alone() -> None:
    states = smaller().states
    assert smaller().captured_size == 2
    assert states["seq_lens"] == [LIVE, PADDING, STALE, STALE]
    assert states["input_ids"] == [LIVE] * 2 + [STALE_READ] * 2 + [STALE] * 4
    assert states["cu_seqlens_q"] == [LIVE, LIVE, PADDING, STALE, STALE]
    assert not {LIVE, PADDING, STALE_READ} & {each for row in states["page_table"][2:] for each in row}


@IN_INTERPRETER
@pytest.mark.parametrize("replayed", [padded, smaller])
def test_every_cell_is_drawn_with_its_value(replayed: Callable[[], ReplayedBuffers]) -> None:
    buffers = replayed()
    figure = buffers_figure(buffers, "a title")
    expected = set()
    for name, states in buffers.states.items():
        if ALONG[name] is Along.PAGES:
            cells = {f"{i},{c}": state for i, row in enumerate(states) for c, state in enumerate(row)}
        else:
            cells = {str(place): state for place, state in enumerate(states)}
        expected |= {f"{state.name} {name} {place}" for place, state in cells.items()}
    assert gids(figure) == expected
    said = words(figure)
    drawn_values = [value for name in ("seq_lens", "out_cache_loc", "cu_seqlens_k") for value in buffers.values[name]]
    assert {str(value) for value in drawn_values} <= set(said)
    assert said.count("padding") == buffers.captured_size - buffers.num_requests
    assert said.count("not run") == buffers.max_batch_size - buffers.captured_size


def row_of(form: DraftExtendOutput, size: int, median_us: float, **changes: Any) -> dict[str, Any]:
    facts = {"form": form.value, "batch_size": size, "num_draft_tokens": 4, "median_us": median_us}
    return facts | {"floor_us": median_us / 2, "throttled_by": []} | changes


def test_forms_are_bars_over_their_floors() -> None:
    selected, everything = DraftExtendOutput.SELECTED_ROW, DraftExtendOutput.ALL_ROWS
    rows = [
        row_of(everything, 1, 30.0),
        row_of(selected, 1, 20.0),
        row_of(selected, 8, 25.0, throttled_by=["power limit"]),
        row_of(selected, 8, 40.0, num_draft_tokens=8),
    ]
    figure = forms_figure(rows, "a title")
    four, eight = figure.axes
    drawn = [(bar.axes, bar.get_height(), bool(bar.get_hatch())) for bar in rectangles(figure)]
    assert drawn == [(four, 30.0, False), (four, 20.0, False), (four, 25.0, True), (eight, 40.0, False)]
    assert [line.get_ydata()[0] for line in four.lines] == [15.0, 10.0, 12.5]
    assert [each.get_title() for each in figure.axes] == ["4 draft tokens", "8 draft tokens"]
    assert "hatched: clocks held back (power limit)" in words(figure)
    assert not any(word.startswith("hatched") for word in words(forms_figure(rows[:2], "a title")))


def variant(name: str, size: int, completion_us: float, **changes: Any) -> Mapping[str, Any]:
    facts = {"arm": name, "batch_size": size, "completion_us": completion_us, "host_us": 5.0, "median_us": 7.0}
    return facts | {"throttled_by": []} | changes


def test_variants_are_bars_with_marks_of_their_parts() -> None:
    rows = [
        variant("eager", 1, 90.0),
        variant("graph", 1, 40.0, host_us=3.0, median_us=30.0, throttled_by=["power limit"]),
    ]
    figure = eager_or_graph_figure(rows, "a title")
    (axes,) = figure.axes
    assert [bar.get_width() for bar in rectangles(figure)] == [90.0, 40.0]
    assert [x for x, _ in marks(axes)] == [5.0, 7.0, 3.0, 30.0]
    assert [line.get_markerfacecolor() for line in axes.lines[1::2]] == ["black", "white"]
    assert {"1 request", "90", "40", "the same, clocks held back (power limit)"} <= set(words(figure))
