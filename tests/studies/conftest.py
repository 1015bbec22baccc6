"""A GPU that is not there."""

import pytest
import torch

from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.inputs.mla_pass import build_mla_pass
from studies import kv_read_once, passes, recording, variants
from tests.studies.simulated import CEILINGS, measured_interleaved, quick_host_time


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study measures; the test simulates what it measures."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(recording, "environment", lambda: {"gpu": "simulated"})
    monkeypatch.setattr(variants, "measure_ceilings", lambda device: CEILINGS)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are built on the CPU, and each variant runs, is checked, and takes 10 µs and 1 for each variant before it."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(passes, "build_forward", lambda case, device: build_forward(case, cpu))
    monkeypatch.setattr(passes, "build_mla_pass", lambda case, device: build_mla_pass(case, cpu))
    monkeypatch.setattr(variants, "measure_interleaved", measured_interleaved)
    monkeypatch.setattr(kv_read_once, "host_time", quick_host_time)
