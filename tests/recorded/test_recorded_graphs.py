"""Calls in CUDA graphs are recorded after each replay, with what the replay read."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.checks import Outcome
from lab.checks.run.judge import judge_calls
from lab.recorded import Triggers, recorded_cases
from tests.recorded.fake_kernels import Engine, FakeGraph, decode_kernel, outcomes
from tests.recorded.record_calls import decode_arguments

pytestmark = pytest.mark.usefixtures("graphs")


def _captured(engine: Engine, *steps: dict[str, Any]) -> FakeGraph:
    graph: FakeGraph = torch.cuda.CUDAGraph()  # type: ignore[assignment]
    graph.capture_begin()
    for number, arguments in enumerate(steps):
        _forward(SimpleNamespace(layer_id=number), engine, arguments)
    graph.capture_end()
    return graph


def _forward(layer: SimpleNamespace, engine: Engine, arguments: dict[str, Any]) -> Any:
    return engine.kernel(**arguments)


def test_each_replay_of_a_graph_is_recorded_with_what_it_read(engine: Engine) -> None:
    first, second = decode_arguments(), decode_arguments(window_left=3)
    with engine.recorded() as recorder:
        graph = _captured(engine, first, second)
        assert recorder.kept == 0
        engine.decode()
        for length in (4, 3):
            first["seq_lens"].copy_(torch.tensor([length, 17, 20]))
            first["query"].mul_(2)
            graph.replay()
        assert recorder.kept == 5
    graph.replay()
    cases = recorded_cases(engine.folder)
    assert [(case.replay, case.layer) for case in cases] == [(0, None), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [case.read().given["seq_lens"].tolist() for case in cases[1::2]] == [[4, 17, 20], [3, 17, 20]]
    assert torch.equal(cases[3].read().given["query"], first["query"])
    assert torch.equal(cases[1].read().given["query"] * 2, first["query"])
    assert outcomes(engine.folder) == [Outcome.RIGHT] * 5
    assert recorder.kept == 5


@pytest.mark.parametrize(
    ("triggers", "kept"),
    [
        (Triggers(layers=(2,)), [(1, 2), (2, 2)]),
        (Triggers(shadow=1), [(1, 1), (2, 1)]),
    ],
    ids=str,
)
def test_replays_are_chosen_as_eager_calls_are(engine: Engine, triggers: Triggers, kept: list[tuple[int, int]]) -> None:
    kernels = iter([decode_kernel(), decode_kernel(1.5), decode_kernel()])
    engine.use(lambda **arguments: next(kernels)(**arguments))
    with engine.recorded(triggers=triggers):
        graph = _captured(engine, *(decode_arguments() for _ in range(3)))
        graph.replay()
        graph.replay()
    assert [(case.replay, case.layer) for case in recorded_cases(engine.folder)] == kept


def test_a_captured_tensor_stays_as_long_as_its_graph(engine: Engine) -> None:
    with engine.recorded() as recorder:
        arguments = decode_arguments()
        held = weakref.ref(arguments["query"])
        graph = _captured(engine, arguments)
        graph.kernels.clear()
        del arguments
        gc.collect()
        assert held() is not None
        graph.reset()
        gc.collect()
        assert held() is None
        graph.replay()
        arguments = decode_arguments()
        held, graph = weakref.ref(arguments["query"]), _captured(engine, arguments)
        del arguments, graph
        gc.collect()
        assert held() is None
    assert recorder.kept == 0


def test_a_graph_holds_the_tensors_of_the_chosen_layers_alone(engine: Engine) -> None:
    with engine.recorded(triggers=Triggers(layers=(1,))):
        arguments = [decode_arguments(), decode_arguments()]
        held = [weakref.ref(each["query"]) for each in arguments]
        graph = _captured(engine, *arguments)
        graph.kernels.clear()
        del arguments
        gc.collect()
        assert [each() is not None for each in held] == [False, True]


def test_a_captured_call_is_written_after_a_replay_alone(engine: Engine) -> None:
    with engine.recorded(before=True):
        graph = _captured(engine, decode_arguments())
        assert list(engine.folder.iterdir()) == []
        graph.replay()
    assert outcomes(engine.folder) == [Outcome.RIGHT]


def test_an_argument_that_a_captured_call_overwrites_is_lost_and_said(engine: Engine) -> None:
    arguments = decode_arguments()
    arguments["out"] = arguments["query"]
    with engine.recorded():
        _captured(engine, arguments).replay()
    (verdict,) = judge_calls(engine.folder, device="cpu", isolated=False).verdicts
    assert (
        "does not hold the value of query, only that it is a tensor that the call overwrote in a CUDA graph"
        in verdict.reason
    )


def test_a_query_beside_the_output_in_one_buffer_is_kept(engine: Engine) -> None:
    arguments = decode_arguments()
    buffer = torch.cat((arguments["query"], arguments["query"]))
    arguments |= {"query": buffer[:3], "out": buffer[3:]}
    with engine.recorded():
        _captured(engine, arguments).replay()
    assert outcomes(engine.folder) == [Outcome.RIGHT]


def test_a_graph_whose_capture_began_before_the_recorder_is_not_recorded(
    engine: Engine, graphs: type[FakeGraph]
) -> None:
    graph = graphs()
    graph.capture_begin()
    with engine.recorded() as recorder:
        engine.decode()
        graph.capture_end()
        graph.replay()
    assert recorder.kept == 0


def test_the_methods_of_graphs_are_put_back(engine: Engine) -> None:
    before = dict(vars(FakeGraph))
    with engine.recorded(most_calls=1) as recorder:
        graph = _captured(engine, decode_arguments())
        graph.replay()
        graph.replay()
        assert vars(FakeGraph)["replay"] is not before["replay"]
    assert recorder.kept == 1
    assert all(vars(FakeGraph)[name] is method for name, method in before.items() if callable(method))
