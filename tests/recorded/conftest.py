"""Calls that FlashInfer's recorder recorded, once for all tests."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.recorded.fake_kernels import Engine, FakeGraph, decode_kernel
from tests.recorded.record_calls import OWN


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed, whose recorder these tests read")
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "tests.recorded.record_calls", str(folder / "dumps"), str(folder / OWN)]
    subprocess.run(command, check=True, timeout=240)
    return folder / "dumps"


@pytest.fixture
def dumps(recorded_once: Path, tmp_path: Path) -> Path:
    """A copy of the recorded calls, which a test may damage."""
    return Path(shutil.copytree(recorded_once, tmp_path / "dumps"))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeGraph.captured is not None)
    return FakeGraph


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Engine:
    made = Engine(ModuleType("some_kernels"), tmp_path, caplog)
    made.use(decode_kernel())
    monkeypatch.setitem(sys.modules, "some_kernels", made.module)
    return made
