"""A GPU that is not there."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import references
from lab.kernels import support
from lab.kernels.peers import flashinfer_mla
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from studies import kv_read_once, passes, study, variants
from studies.variants import Point, PointRows, TimingPlan
from tests.commands.command import run
from tests.studies.simulated import CEILINGS, measured_interleaved, quick_host_time


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is measured on a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("measures GPU work, and there is no GPU here")


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study measures; the test simulates what it measures."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(study, "environment", lambda: {"gpu": "simulated"})
    monkeypatch.setattr(study, "measure_ceilings", lambda device: CEILINGS)


@dataclass(frozen=True)
class Done:
    """A command that has run: its exit status, what it wrote and printed, and how each point was to be timed."""

    status: int
    recorded: dict[str, Any]
    printed: str
    plans: list[TimingPlan]


Command = Callable[..., Done]


@pytest.fixture
def command(
    simulated_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run `lab experiments` on a line, with points that a function of the test measures where the study measures points."""

    def ran(line: str, measured: Callable[[Point], PointRows] | None = None) -> Done:
        out, plans = tmp_path / "out.json", []

        def simulated(point: Point, make: Any, plan: TimingPlan, facts_of: Any) -> PointRows:
            assert measured is not None
            plans.append(plan)
            return measured(point)

        for module in (study, kv_read_once):
            monkeypatch.setattr(module, "measure_point", simulated)
        status = run(f"experiments {line} --out {out}")
        return Done(status, json.loads(out.read_text()), capsys.readouterr().out, plans)

    return ran


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are built on the CPU, and each variant runs, is checked, and takes 10 µs and 1 for each variant before it."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(passes, "build_forward", lambda case, device: build_forward(case, cpu))
    monkeypatch.setattr(passes, "build_mla_pass", lambda case, device: build_mla_pass(case, cpu))
    monkeypatch.setattr(variants, "measure_interleaved", measured_interleaved)
    monkeypatch.setattr(kv_read_once, "host_time", quick_host_time)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The plans of the MLA wrapper on an SM90; what is planned is the reference's call."""
    found: list[dict[str, Any]] = []

    def plan(**arguments: Any) -> Callable[[], Any]:
        found.append(arguments)
        return partial(references.trtllm_batch_decode_with_kv_cache_mla, **arguments)

    monkeypatch.setattr(flashinfer_mla, f"plan_{flashinfer_mla.NAME}", plan)
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))
    return found
