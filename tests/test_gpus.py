"""One GPU for each worker of a test run."""

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.gpus import take_own_gpu, visible_gpus

CONFTEST = "from tests.conftest import pytest_xdist_auto_num_workers"  # which takes a worker's GPU when it is imported
# The workers ask torch for a GPU and nothing more; importing the real one takes longer than all of the rest.
TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
"""
TESTS = """
import os

import pytest


@pytest.mark.parametrize("number", range(8))
def test_gpu(number, worker_id):
    open(os.path.join(os.environ["SEEN"], worker_id), "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "4,7"}, "7"),
        ({"PYTEST_XDIST_WORKER": "gw3", "CUDA_VISIBLE_DEVICES": "4,7"}, "7"),
        ({"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "7"}, "7"),  # a process that a worker has started
        ({"PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": ""}, ""),  # no GPU is to be seen
        ({"CUDA_VISIBLE_DEVICES": "4,7"}, "4,7"),  # no worker
    ],
)
def test_a_worker_leaves_itself_one_gpu(before: dict[str, str], after: str) -> None:
    take_own_gpu(before)
    assert before["CUDA_VISIBLE_DEVICES"] == after


def test_all_gpus_are_named_by_uuid_where_nothing_hides_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"handle {index}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU of {handle}")
    assert visible_gpus({}) == ["GPU of handle 0", "GPU of handle 1"]


def test_a_machine_without_a_driver_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    assert visible_gpus({}) == []


def test_as_many_workers_as_gpus_each_with_its_own(tmp_path: Path) -> None:
    """`pytest -n auto` in a project of its own, with two GPUs' names."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_inner.py").write_text(TESTS)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    root = str(Path(__file__).parents[1])
    clean |= {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "SEEN": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    clean |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), root))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n",
        "auto",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
    ]
    run = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {path.name: path.read_text() for path in tmp_path.glob("gw*")} == {"gw0": "GPU-a", "gw1": "GPU-b"}
