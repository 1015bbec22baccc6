"""The measuring itself, on a GPU: against work whose time is known, against another clock, against FlashInfer's own timer."""

import importlib.util
import os
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from lab.timing import L2, Clock, GpuWork, Method, measure, measure_ceilings, measure_interleaved
from lab.timing.method import METHODS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU, and there is none here"),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times a GPU, which other workers use meanwhile"),
]
needs_cupti = pytest.mark.skipif(
    importlib.util.find_spec("cupti") is None, reason="cupti-python is not installed: pip install '.[cupti]'"
)
GRAPH = Method(Clock.GRAPH, L2.WARM)
MEBIBYTE = 2**20


def negation(size_bytes: int) -> GpuWork:
    """Reads and writes half of `size_bytes` each; its check wants every element written anew."""
    source = torch.randn(size_bytes // 8, device="cuda")
    return GpuWork(
        prepare=lambda source, out: lambda: torch.neg(source, out=out),
        arguments={"source": source, "out": torch.full_like(source, float("nan"))},
        bytes_moved=size_bytes,
        check=check_negation,
    )


def check_negation(arguments: Mapping[str, Any]) -> None:
    assert torch.equal(arguments["out"], -arguments["source"])
    arguments["out"].fill_(float("nan"))


def test_the_ceilings_are_this_gpus() -> None:
    ceilings = measure_ceilings(torch.device("cuda"))
    copy_us = measure(negation(2**31), GRAPH).median_us
    assert ceilings.bandwidth_gbps == pytest.approx(2**31 / copy_us / 1000, rel=0.05)
    if ceilings.datasheet is not None:
        assert 0.5 < ceilings.bandwidth_gbps / ceilings.datasheet.bandwidth_gbps <= 1
        assert 0.5 < ceilings.matrix_rate_tflops / ceilings.datasheet.matrix_rate_tflops <= 1


@pytest.mark.parametrize("method", METHODS, ids=lambda method: f"{method.clock.value}-{method.l2.value}")
def test_every_buffer_is_checked_before_and_after_and_two_launches_are_two(method: Method) -> None:
    if method.clock is Clock.CUPTI and importlib.util.find_spec("cupti") is None:
        pytest.skip("cupti-python is not installed: pip install '.[cupti]'")
    checked: list[int] = []

    def check(arguments: Mapping[str, Any]) -> None:
        checked.append(arguments["out"].data_ptr())
        assert torch.equal(arguments["out"], (-arguments["source"]).abs())
        arguments["out"].fill_(float("nan"))

    def prepare(source: torch.Tensor, out: torch.Tensor) -> Any:
        return lambda: torch.abs(torch.neg(source, out=out), out=out)

    source = torch.randn(8 * MEBIBYTE, device="cuda")
    work = GpuWork(prepare, {"source": source, "out": torch.empty_like(source)}, 2 * source.nbytes, check=check)
    time = measure(work, method, samples=5)
    assert time.launches == 2
    assert len(time.samples_us) == 5
    assert time.buffer_copies >= 2 if method.l2 is L2.COLD_ROTATION else time.buffer_copies == 1
    assert len(set(checked)) == time.buffer_copies
    assert len(checked) == 2 * time.buffer_copies
    assert time.device.facts()["sm_clock_mhz"] is not None


def test_a_result_that_is_wrong_after_the_timing_is_noticed() -> None:
    """The third call and all later ones write something else, as a kernel that keeps state may."""
    calls = []

    def prepare(source: torch.Tensor, out: torch.Tensor) -> Any:
        def call() -> None:
            calls.append(1)
            torch.neg(source, out=out)
            if len(calls) > 2:
                out[0] += 1

        return call

    work = negation(2**20)
    with pytest.raises(AssertionError):
        measure(GpuWork(prepare, work.arguments, work.bytes_moved, check=check_negation), GRAPH)


def test_a_call_that_launches_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="launches nothing"):
        measure(GpuWork.of(lambda: None, 1), GRAPH)


def test_a_cold_cache_is_slower_than_a_warm_one() -> None:
    """16 MiB fit in the L2 of every GPU that the lab knows."""
    warm = measure(negation(16 * MEBIBYTE), GRAPH).median_us
    assert measure(negation(16 * MEBIBYTE), Method(Clock.GRAPH, L2.COLD_ROTATION)).median_us > 1.2 * warm


def test_twice_the_work_takes_twice_the_time_interleaved_or_not() -> None:
    half, whole = measure(negation(2**30), GRAPH).median_us, measure(negation(2**31), GRAPH).median_us
    assert 1.9 < whole / half < 2.1
    times = measure_interleaved({"half": negation(2**29), "whole": negation(2**30)}, GRAPH)
    assert 1.8 < times["whole"].median_us / times["half"].median_us < 2.2


def test_what_a_call_owns_lives_as_long_as_its_graph() -> None:
    """A table that only the call holds: freed too early, it would be overwritten by the next work's."""

    def prepare(source: torch.Tensor, out: torch.Tensor) -> Any:
        table = source.clone()
        return lambda: torch.neg(table, out=out)

    works = {
        name: GpuWork(prepare, plain.arguments, plain.bytes_moved, check=check_negation)
        for name, plain in ((name, negation(2**24)) for name in ("a", "b", "c"))
    }
    assert set(measure_interleaved(works, GRAPH, samples=5)) == {"a", "b", "c"}


@needs_cupti
@pytest.mark.parametrize("size_bytes", [128 * MEBIBYTE, 256 * MEBIBYTE, 2048 * MEBIBYTE])
def test_cupti_and_graph_agree(size_bytes: int) -> None:
    """Within 3 %, from 20 µs a launch; `studies.clocks` shows shorter ones too."""
    graph = measure(negation(size_bytes), GRAPH).median_us
    assert measure(negation(size_bytes), Method(Clock.CUPTI, L2.WARM)).median_us == pytest.approx(graph, rel=0.03)


@needs_cupti
def test_flashinfers_timer_agrees() -> None:
    testing = pytest.importorskip("flashinfer.testing", reason="FlashInfer is not installed")
    work = negation(256 * MEBIBYTE)
    theirs_ms = testing.bench_gpu_time_with_cupti(work.call(), repeat_iters=30, cold_l2_cache=False)
    ours = measure(work, Method(Clock.CUPTI, L2.WARM)).median_us
    assert ours == pytest.approx(1000 * statistics.median(theirs_ms), rel=0.03)
