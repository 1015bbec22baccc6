"""The Triton kernels that the host code chooses fit every GPU that it knows: compiled without one, as recorded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RECORD = Path("results/blackwell-dry-run/portable.json")


def run(task: str) -> str:
    """The module's output, compiled: in another process, for this one may be the interpreter's.

    FlashInfer, once imported, names another assembler than Triton's own to Triton, which then writes other PTX.
    """
    of_other_tests = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in of_other_tests}
    command = [sys.executable, "-m", "tests.kernels.compiled_choices", task, str(RECORD)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for this machine's GPU in the other tests")
def test_every_choice_is_the_recorded_one_and_fits() -> None:
    assert run("--check") == "all choices are the record's, and fit\n"


def test_the_page_has_the_tables_of_the_record() -> None:
    page = (ROOT / RECORD).with_suffix(".md").read_text()
    for table in run("--tables").strip().split("\n\n"):
        assert table in page
