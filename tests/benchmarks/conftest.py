"""Benchmarks in pytest-benchmark: GPU time by graph replay on a GPU; without one, kernels are judged, not timed."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table

from lab.checks import ForwardCase, Verdict, judge_forward
from lab.provenance import environment
from lab.timing import copy_bandwidth_gbps, graph_time
from lab.timing.gpu_time import METHOD, DeviceClock
from lab.workloads.traces import read_mooncake

HAS_GPU = torch.cuda.is_available()
GPU_CLOCK = DeviceClock(METHOD)
JUDGED = pytest.StashKey[list[Verdict]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[JUDGED] = []


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["lab"] = environment()


@pytest.fixture(scope="session")
def trace(request: pytest.FixtureRequest) -> list[Any]:
    path = Path(request.config.getoption("--lab-trace"))
    if not path.exists():
        pytest.skip(f"no trace at {path}: pass --lab-trace PATH of a Mooncake JSONL file")
    return read_mooncake(path)


@pytest.fixture(scope="session")
def bandwidth_gbps() -> float:
    """What this GPU's memory gives a large elementwise kernel, in this run."""
    return copy_bandwidth_gbps(torch.device("cuda"))


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Callable[[Any, ForwardCase], Verdict]:
    """Judge a case, fail if it is wrong, and put it into the summary."""

    def judged(implementation: Any, case: ForwardCase) -> Verdict:
        verdict = judge_forward(implementation, case)
        request.config.stash[JUDGED].append(verdict)
        assert verdict.outcome.value == "right", str(verdict)
        return verdict

    return judged


@pytest.fixture
def gpu_benchmark(benchmark: Any) -> Callable[..., float]:
    """Time a call on the GPU into pytest-benchmark; returns the median in microseconds."""

    def measured(call: Callable[[], object], **extra_info: Any) -> float:
        time = graph_time(call)
        samples = iter(time.samples_us)
        benchmark.extra_info.update(method=time.method, **extra_info)
        benchmark.pedantic(lambda: GPU_CLOCK.advance(next(samples) * 1e-6), rounds=len(time.samples_us))
        return time.median_us

    return measured


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    verdicts = config.stash[JUDGED]
    if not verdicts:
        return
    where = "on this GPU" if HAS_GPU else "not timed: no GPU here, the interpreter's time is not a kernel's"
    table = Table(title=f"Judged, {where}", title_justify="left")
    for column in ("mode", "implementation", "geometry", "verdict", "worst error", "of the allowed"):
        table.add_column(column)
    for verdict in verdicts:
        table.add_row(
            _mode_name(verdict.case),
            verdict.implementation,
            verdict.case.geometry,
            verdict.outcome.value,
            f"{verdict.worst_error:.1e}",
            f"{verdict.worst_ratio:.0%}",
        )
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    terminalreporter.write_line("\n" + console.file.getvalue().rstrip())


def _mode_name(case: ForwardCase) -> str:
    name = case.mode.name.lower().replace("_", " ")
    if case.draft_step is not None:
        name = f"draft decode, step {case.draft_step}"
    return f"{name}, sliding window" if case.sliding_window else name
