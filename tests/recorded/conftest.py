"""Calls that FlashInfer's recorder recorded, once for all tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorded_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("flashinfer", reason="FlashInfer is not installed, whose recorder these tests read")
    folder = tmp_path_factory.mktemp("dumps")
    subprocess.run([sys.executable, "-m", "tests.recorded.record_calls", str(folder)], check=True, timeout=240)
    return folder


@pytest.fixture
def dumps(recorded_once: Path, tmp_path: Path) -> Path:
    """A copy of the recorded calls, which a test may damage."""
    return Path(shutil.copytree(recorded_once, tmp_path / "dumps"))
