"""What is drawn of a draft extend's graph: which cells a replay writes, held against rules stated here; recorded times."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

import lab.references
from lab.metadata import ForwardMode, SpecInfo
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendGraph
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
from tests.studies.recorded import recorded

RECORDED = recorded("draft_extend_graph")
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


def test_forms_are_bars_over_their_floors() -> None:
    figure = forms_figure(RECORDED["forms"], "a title")
    for axes, width in zip(figure.axes, (2, 4, 8), strict=True):
        rows = [row for row in RECORDED["forms"] if row["num_draft_tokens"] == width]
        bars = [(bar.get_height(), bool(bar.get_hatch())) for bar in axes.patches]
        assert bars == [(row["median_us"], bool(row["throttled_by"])) for row in rows]
        assert [line.get_ydata()[0] for line in axes.lines] == [row["floor_us"] for row in rows]
        assert axes.get_title() == f"{width} draft tokens"
    assert any(word.startswith("hatched: clocks held back (power limit") for word in words(figure))


def test_variants_are_bars_with_marks_of_their_parts() -> None:
    rows = [row for row in RECORDED["modes"] if row["mode"] == "target_verify" and row["arm"] != "load"]
    figure = eager_or_graph_figure(rows, "a title")
    (axes,) = figure.axes
    rows = sorted(rows, key=lambda row: str(row["arm"]))
    assert [bar.get_width() for bar in rectangles(figure)] == [row["completion_us"] for row in rows]
    assert [x for x, _ in marks(axes)] == [row[name] for row in rows for name in ("host_us", "median_us")]
    faces = [line.get_markerfacecolor() for line in axes.lines[1::2]]
    assert faces == ["white" if row["throttled_by"] else "black" for row in rows]
    assert {"1 request", f"{rows[0]['completion_us']:,.0f}"} <= set(words(figure))
