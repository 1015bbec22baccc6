"""The draft extend in graphs: every form of output, padding, what survives the next replay, and who may have such a graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.metadata import ForwardBatch, ForwardMode, SpecInfo
from lab.metadata.engine.graph_inputs import MetadataPlace
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import (
    DraftExtendGraph,
    DraftExtendOutput,
    DraftInputs,
    DraftOutputs,
    selected_rows,
    supports_draft_extend_graph,
)
from studies.stand_in_model import StandInModel, StandInPass, draw_pass, truth_of_pass
from tests.devices import IN_INTERPRETER
from tests.metadata.draft_extend_cases import BUFFER_PLACES, PLACES, implementation, new_model

V2 = ForwardMode.DRAFT_EXTEND_V2
ALL_ROWS, WITH_TOPK, SELECTED = DraftExtendOutput
FORMS = list(DraftExtendOutput)
WIDTH = 4
SIZES = (4, 2)
NAN = float("nan")


def new_graph(model: StandInModel, name: str, form: DraftExtendOutput = SELECTED, **settings: Any) -> DraftExtendGraph:
    """Graphs of 2 and of 4 requests, 4 rows each."""
    spec_info = SpecInfo(num_tokens_per_req=WIDTH)
    return DraftExtendGraph(
        TRTLLMMHABackend(implementation(name)), model, model.pool, spec_info, SIZES, form, **settings
    )


def draw(model: StandInModel, *prefix_lens: int, seed: int = 0) -> StandInPass:
    return draw_pass(model, V2, prefix_lens, (WIDTH,) * len(prefix_lens), seed)


def replay(graph: DraftExtendGraph, drawn: StandInPass) -> DraftOutputs:
    accept_lens = drawn.accept_lens if graph.form is SELECTED else None
    return graph.replay(drawn.batch, drawn.input_ids, drawn.hidden_states, accept_lens)


def copied(outputs: DraftOutputs) -> tuple[Tensor, Tensor]:
    return outputs.logits.clone(), outputs.hidden_states.clone()


@pytest.mark.parametrize("place", list(MetadataPlace), ids=repr)
@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize(("device", "name"), BUFFER_PLACES)
def test_every_form_is_right_for_full_and_padded_batches_of_all_sizes(
    device: str, name: str, form: DraftExtendOutput, place: MetadataPlace
) -> None:
    model = new_model(device, 10)
    batches = [draw(model, 5, 33, 18, 17), draw(model, 30), draw(model, 12, 16, 31), draw(model, 28, 70)]
    graph = new_graph(model, name, form, place=place)
    for drawn in batches:
        outputs = replay(graph, drawn)
        truth_of_pass(model, drawn).hold(outputs, form)
        rows = drawn.batch.batch_size * (1 if form is SELECTED else WIDTH)
        assert outputs.logits.shape == (rows, model.sizes.vocab_size)
        assert outputs.hidden_states.shape == (rows, model.sizes.hidden_size)
        assert (outputs.topk_index is None) == (outputs.topk_p is None) == (form is not WITH_TOPK)


@pytest.mark.parametrize(("device", "name"), PLACES)
def test_a_window_layer_writes_and_reads_the_window_pool(device: str, name: str) -> None:
    model = new_model(device, 10, sliding_window=True)
    graph = new_graph(model, name)
    for drawn in (draw(model, 5, 61, 40), draw(model, 70)):
        truth_of_pass(model, drawn).hold(replay(graph, drawn), SELECTED)


def test_selected_rows_in_numbers() -> None:
    rows = selected_rows(torch.tensor([1, 4, 2], dtype=torch.int32), 4)
    assert (rows.dtype, rows.tolist()) == (torch.int64, [0, 7, 9])


@pytest.mark.parametrize("second_lens", [(30, 12, 7), (30,)], ids=["same size", "smaller size"])
@pytest.mark.parametrize(("device", "name"), BUFFER_PLACES)
def test_what_survives_the_next_replay(device: str, name: str, second_lens: tuple[int, ...]) -> None:
    """Cloned: the selected row's hidden states. The graph's own, and gone: its logits, and both of the forms with all rows."""
    model = new_model(device)
    first, second = draw(model, 5, 61, 40, seed=1), draw(model, *second_lens, seed=2)
    for form in FORMS:
        graph = new_graph(model, name, form)
        buffers = [*vars(graph.inputs).values(), *vars(graph.outputs).values()]
        buffers += vars(graph.runner.captured[2].output).values()
        addresses = [tensor.data_ptr() for tensor in buffers if tensor is not None]
        outputs = replay(graph, first)
        logits, hidden_states = copied(outputs)
        replay(graph, second)
        assert torch.equal(outputs.hidden_states, hidden_states) == (form is SELECTED)
        assert not torch.equal(outputs.logits[0], logits[0])
        assert outputs.logits.data_ptr() == graph.outputs.logits.data_ptr()
        assert graph.outputs.logits.data_ptr() == graph.runner.captured[2].output.logits.data_ptr()
        own = outputs.hidden_states.data_ptr() != graph.outputs.hidden_states.data_ptr()
        assert own == (form is SELECTED)
        assert [tensor.data_ptr() for tensor in buffers if tensor is not None] == addresses


@pytest.mark.parametrize("form", FORMS, ids=repr)
@pytest.mark.parametrize(("device", "name"), BUFFER_PLACES)
def test_whatever_the_padding_holds_real_rows_are_the_same(device: str, name: str, form: DraftExtendOutput) -> None:
    model = new_model(device)
    drawn = draw(model, 5, 61, 40)
    graph = new_graph(model, name, form)
    clean = copied(replay(graph, drawn))
    graph.inputs.hidden_states.fill_(NAN)
    graph.inputs.input_ids.fill_(model.sizes.vocab_size - 1)
    graph.inputs.select_index[3] = 4 * WIDTH - 1
    model.cache.storage[:, 0] = NAN  # the sink, which padded rows write and read
    outputs = replay(graph, drawn)
    assert torch.equal(outputs.logits, clean[0])
    assert torch.equal(outputs.hidden_states, clean[1])
    truth_of_pass(model, drawn).hold(outputs, form)
    padded = graph.outputs.hidden_states[outputs.hidden_states.shape[0] :]
    assert bool(padded.isnan().any())  # the poison did reach the padded rows


@pytest.mark.parametrize(("device", "name"), BUFFER_PLACES)
def test_padded_rows_write_into_the_sink_and_nowhere_else(device: str, name: str) -> None:
    model = new_model(device)
    graph = new_graph(model, name)
    larger, smaller = draw(model, 5, 61, 40, 17), draw(model, 30)
    replay(graph, larger)  # whose slots must be gone from the padding of the next
    graph.inputs.hidden_states.fill_(1.0)  # what the larger one left would write what is there already
    before = model.cache.storage.clone()
    replay(graph, smaller)
    allowed = torch.zeros(before.shape[1:3], dtype=torch.bool, device=device)
    allowed[0] = True
    allowed.view(-1)[smaller.batch.out_cache_loc] = True
    changed = (model.cache.storage != before).flatten(3).any(dim=3)
    assert not bool((changed & ~allowed).any())
    assert bool(changed.view(2, -1)[:, smaller.batch.out_cache_loc].all())


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (TRTLLMMHABackend(None), True),
        (SimpleNamespace(supports_draft_extend_graph=True), True),
        (SimpleNamespace(supports_draft_extend_graph=False), False),
        (SimpleNamespace(supports_draft_extend_graph="yes"), False),
        (SimpleNamespace(), False),
        (None, False),
    ],
)
def test_a_backend_that_says_nothing_has_no_graph(backend: Any, expected: bool) -> None:
    assert supports_draft_extend_graph(backend) is expected


def test_graphs_of_a_silent_backend_are_refused() -> None:
    model = new_model("cpu")
    with pytest.raises(ValueError, match="SimpleNamespace does not declare supports_draft_extend_graph"):
        DraftExtendGraph(SimpleNamespace(), model, model.pool, SpecInfo(num_tokens_per_req=WIDTH), SIZES)


def batch_of(bs: int, width: int = WIDTH, stated: int = WIDTH, **changes: Any) -> ForwardBatch:
    facts: dict[str, Any] = {
        "forward_mode": V2,
        "req_pool_indices": torch.ones(bs, dtype=torch.int64),
        "seq_lens": torch.full((bs,), 8),
        "out_cache_loc": torch.zeros(bs * width, dtype=torch.int64),
        "num_tokens": bs * width,
        "spec_info": SpecInfo(num_tokens_per_req=stated),
    }
    return ForwardBatch(**facts | changes)


CAN_RUN = [
    ("a captured size", batch_of(4), True, True),
    ("between two sizes", batch_of(3), True, False),
    ("below all", batch_of(1), True, False),
    ("too many requests", batch_of(5), False, False),
    ("no request", batch_of(0), False, False),
    ("a narrower width", batch_of(4, 3, 3), False, False),
    ("a wider one", batch_of(2, 5, 5), False, False),
    ("an open width", batch_of(4, stated=-1), True, True),
    ("an open width of other rows", batch_of(4, 3, -1), False, False),
    ("no SpecInfo", batch_of(2, spec_info=None), True, True),
    ("the rows of another width", batch_of(2, 5, WIDTH), False, False),
    ("rows after the requests'", batch_of(2, num_tokens=12), False, False),
    ("unequal rows", batch_of(2, stated=-1, extend_seq_lens_cpu=[5, 3]), False, False),
    ("another mode", batch_of(2, forward_mode=ForwardMode.TARGET_VERIFY), False, False),
]


@IN_INTERPRETER
def test_which_batches_a_graph_stands_for() -> None:
    model = new_model("cpu")
    padding, exact = (new_graph(model, "lab.references", disable_padding=flag) for flag in (False, True))
    for what, batch, *expected in CAN_RUN:
        assert [padding.can_run(batch), exact.can_run(batch)] == expected, what


def test_inputs_take_as_many_rows_as_they_have_and_no_more() -> None:
    inputs = DraftInputs(torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3), torch.zeros(2, dtype=torch.int64))
    inputs.load(torch.arange(1, 5), torch.ones(4, 3), torch.tensor([1, 3]))
    inputs.load(torch.tensor([9]), torch.full((1, 3), 2.0))
    assert inputs.input_ids.tolist() == [9, 2, 3, 4]
    assert inputs.hidden_states[:, 0].tolist() == [2, 1, 1, 1]
    assert inputs.select_index.tolist() == [1, 3]
    with pytest.raises(ValueError, match=r"input_ids has shape \[5\], which does not fit the buffer's \[4\]"):
        inputs.load(torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"select_index has shape \[3\]"):
        inputs.load(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(3, dtype=torch.int64))


@IN_INTERPRETER
def test_a_replay_is_refused_before_anything_is_copied() -> None:
    model = new_model("cpu")
    graph, drawn = new_graph(model, "lab.references"), draw(model, 5, 61)
    ids, states, accepted = drawn.input_ids, drawn.hidden_states, drawn.accept_lens
    wrong: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "ask can_run, and run it eagerly", (batch_of(5), ids, states, accepted)),
        (ValueError, "DraftExtendOutput.SELECTED_ROW selects by it", (drawn.batch, ids, states)),
        (ValueError, r"accept_lens has shape \[1\] for 2 requests", (drawn.batch, ids, states, accepted[:1])),
        (ValueError, "7 input_ids for 8 rows", (drawn.batch, ids[:7], states, accepted)),
        (ValueError, "8 input_ids for 7 rows of hidden_states", (drawn.batch, ids, states[:7], accepted)),
        (ValueError, "hidden_states has shape", (drawn.batch, ids, states[:, :1], accepted)),
        (TypeError, "hidden_states has dtype torch.float32", (drawn.batch, ids, states.float(), accepted)),
        (TypeError, "input_ids has dtype torch.int32", (drawn.batch, ids.int(), states, accepted)),
        (TypeError, "select_index has dtype torch.float32", (drawn.batch, ids, states, accepted.float())),
    ]
    for error, message, arguments in wrong:
        with pytest.raises(error, match=message):
            graph.replay(*arguments)
    everything = new_graph(model, "lab.references", ALL_ROWS)
    with pytest.raises(ValueError, match="has no use for it"):
        everything.replay(drawn.batch, ids, states, accepted)
    for each in (graph, everything):
        assert not bool(each.inputs.input_ids.any())
        assert not bool(each.inputs.hidden_states.any())
