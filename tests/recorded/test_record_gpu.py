"""Calls of kernels on a GPU are recorded, eager and in graphs; an idle recorder launches nothing. `-s` prints the costs."""

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.checks import Outcome
from lab.checks.run.judge import judge_calls
from lab.recorded import Recorder, Triggers, recorded_cases
from tests.devices import ON_GPU, graph_of, synchronisation_is_an_error

pytestmark = [*ON_GPU]
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, WIDTH = 32, 8, 128, 64, 64
NAME = "trtllm_batch_decode_with_kv_cache"


@pytest.fixture(params=["flashinfer.decode", "lab.kernels.portable"])
def home(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("triton")
    pytest.importorskip(request.param.partition(".")[0])
    return importlib.import_module(request.param)


def _arguments(batch: int = 4, kv_len: int = 1000, pages: int = 600, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    pool = torch.randn(pages, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda").to(torch.bfloat16)
    lengths = torch.arange(kv_len - batch + 1, kv_len + 1, device="cuda", dtype=torch.int32)
    query = torch.randn(batch, HEADS, HEAD_DIM, device="cuda").to(torch.bfloat16)
    arguments = {
        "query": query,
        "kv_cache": (pool[:, 0], pool[:, 1]),
        "workspace_buffer": torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda"),
        "block_tables": torch.randperm(pages, device="cuda")[: batch * WIDTH].view(batch, WIDTH).to(torch.int32),
        "seq_lens": lengths,
        "max_seq_len": WIDTH * PAGE_SIZE,
        "bmm1_scale": HEAD_DIM**-0.5,
        "out": torch.empty_like(query),
    }
    return arguments | changes


def _outcomes(folder: Path, **settings: Any) -> list[Outcome]:
    return [verdict.outcome for verdict in judge_calls(folder, isolated=False, **settings).verdicts]


def test_an_eager_call_is_kept_and_right_in_both_ways(home: Any, tmp_path: Path) -> None:
    arguments = _arguments()
    getattr(home, NAME)(**arguments)
    with Recorder(tmp_path, functions=[home]) as recorder:
        getattr(home, NAME)(**arguments)
    assert recorder.kept == 1
    (path,) = tmp_path.iterdir()
    read_bytes = 2 * 4 * 16 * KV_HEADS * PAGE_SIZE * HEAD_DIM * 2 + 2 * arguments["query"].nbytes
    assert path.stat().st_size < 1.1 * read_bytes + 16 * 1024
    call = recorded_cases(tmp_path)[0].read()
    assert call.gpu == torch.cuda.get_device_name()
    given = call.arguments(torch.device("cuda"))
    for side, whole in zip(given["kv_cache"], arguments["kv_cache"], strict=True):
        assert side.stride() == whole.stride()
        assert side.data_ptr() % 256 == whole.data_ptr() % 256
    assert _outcomes(tmp_path, device="cpu") == [Outcome.RIGHT]
    assert _outcomes(tmp_path, implementation=home.__name__, device="cuda") == [Outcome.RIGHT]


def test_replays_of_a_graph_are_kept_with_their_own_lengths_and_queries(home: Any, tmp_path: Path) -> None:
    arguments = _arguments()
    getattr(home, NAME)(**arguments)
    with Recorder(tmp_path, functions=[home]) as recorder:
        graph = graph_of(lambda: getattr(home, NAME)(**arguments))
        assert recorder.kept == 1  # the run before the capture
        for _ in range(3):
            arguments["seq_lens"].add_(1)
            arguments["query"].copy_(torch.randn_like(arguments["query"]))
            graph.replay()
        assert recorder.kept == 4
    graph.replay()
    assert recorder.kept == 4
    cases = recorded_cases(tmp_path)
    assert [case.replay for case in cases] == [0, 1, 2, 3]
    assert [int(case.read().given["seq_lens"][-1]) for case in cases] == [1000, 1001, 1002, 1003]
    assert _outcomes(tmp_path, device="cpu") == [Outcome.RIGHT] * 4


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_shadow_keeps_what_is_wrong(home: Any, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = getattr(home, NAME)
    scale = torch.ones((), device="cuda", dtype=torch.bfloat16)

    def scaled(out: torch.Tensor, **arguments: Any) -> Any:
        return kernel(out=out, **arguments).mul_(scale)

    scaled(**_arguments())
    monkeypatch.setattr(home, NAME, scaled)
    with Recorder(tmp_path, functions=[home], triggers=Triggers(shadow=1)) as recorder:
        arguments = _arguments()

        def call() -> Any:
            return getattr(home, NAME)(**arguments)

        run: Callable[[], Any] = graph_of(call).replay if how == "graph" else call
        assert recorder.wrong == []
        for factor in (1.0, 1.5, 1.0):
            scale.fill_(factor)
            run()
    assert (len(recorder.wrong), recorder.kept) == (1, 1)
    assert _outcomes(tmp_path, device="cpu") == [Outcome.WRONG]


@pytest.mark.parametrize("how", ["eager", "graph"])
def test_an_idle_recorder_launches_nothing_and_does_not_wait(home: Any, tmp_path: Path, how: str) -> None:
    arguments = _arguments()
    counts = []
    for triggers in (None, Triggers(every=10**9)):
        functions = [home] if triggers else []
        with Recorder(tmp_path, functions=functions, triggers=triggers):

            def call() -> Any:
                return getattr(home, NAME)(**arguments)

            run: Callable[[], Any] = graph_of(call).replay if how == "graph" else call
            run()
            with synchronisation_is_an_error():
                run()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(5):
                    run()
                torch.cuda.synchronize()
            counts.append(sum(1 for event in profile.events() if event.device_type.name == "CUDA"))
    assert counts[0] == counts[1] > 0


def test_non_finite_outputs_are_found_in_a_graph(home: Any, tmp_path: Path) -> None:
    arguments = _arguments()
    with Recorder(tmp_path, functions=[home], triggers=Triggers(non_finite=True)) as recorder:
        graph = graph_of(lambda: getattr(home, NAME)(**arguments))
        graph.replay()
        arguments["query"][2, 3] = torch.nan
        graph.replay()
    assert recorder.kept == 1
    assert [case.replay for case in recorded_cases(tmp_path)] == [2]


def test_compiled_code_runs_as_before(home: Any, tmp_path: Path) -> None:
    arguments = _arguments()
    expected = getattr(home, NAME)(**arguments).clone()
    with Recorder(tmp_path, functions=[home]):
        step = torch.compile(lambda query: torch.ops.tests_recorded.attention(query * 2) + 1, fullgraph=True)

        def attention(query: torch.Tensor) -> torch.Tensor:
            return getattr(home, NAME)(**arguments | {"query": query, "out": torch.empty_like(query)})

        operator = torch.library.custom_op("tests_recorded::attention", attention, mutates_args=())
        operator.register_fake(torch.empty_like)
        try:
            found = step(arguments["query"] / 2)
        finally:
            operator._lib._destroy()
    assert torch.equal(found, expected + 1)
    assert len(recorded_cases(tmp_path)) == 1  # an operator's code is not traced


def _host_us(run: Callable[[], Any], count: int = 300) -> float:
    """Return the median host time of a call, until it returns."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()  # so that no launch waits for a place in the queue
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def test_costs(home: Any, tmp_path: Path) -> None:
    """Print the cost of an idle call and replay (µs of host time), of a kept and of a judged call (ms)."""
    arguments = _arguments(batch=8, kv_len=4000)

    def call() -> Any:
        return getattr(home, NAME)(**arguments)

    graph = graph_of(lambda: [call() for _ in range(32)])
    plain, plain_replay = _host_us(call), _host_us(graph.replay)
    lines = [f"{home.__name__}: {plain:.1f} µs a call, {plain_replay:.1f} µs a replay of 32 calls without a recorder"]
    with Recorder(tmp_path, functions=[home], triggers=Triggers(every=10**9)):
        graph = graph_of(lambda: [call() for _ in range(32)])
        idle, idle_replay = _host_us(call) - plain, _host_us(graph.replay) - plain_replay
        lines.append(f"an idle call costs {idle:.1f} µs more, an idle replay of 32 calls {idle_replay:.1f} µs more")
    with Recorder(tmp_path, functions=[home], triggers=Triggers(layers=(99,))):
        lines.append(f"with --layers an idle call costs {_host_us(call) - plain:.1f} µs more")
    for triggers in (Triggers(), Triggers(shadow=1), Triggers(non_finite=True)):
        with Recorder(tmp_path / str(triggers.shadow), functions=[home], triggers=triggers) as recorder:
            call()
            took = _host_us(call, 10) / 1000
        lines.append(f"{triggers}: {took:.2f} ms a call, {recorder.kept} kept of {recorder.kept_bytes / 1e6:.1f} MB")
    print("", *lines, sep="\n")
    assert idle < 50
    assert idle_replay < 1000
