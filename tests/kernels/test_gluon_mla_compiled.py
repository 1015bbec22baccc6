"""The Gluon kernel of MLA as Triton compiles it for SM90, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# Of a thread, where 168 are the registers of each when all have as many; most lie outside the loops over tiles.
MOST_SPILL_BYTES = 256
SM90_SHARED_BYTES = 232_448  # of a program, by the CUDA C++ Programming Guide
PROGRAM = """
import dataclasses, json
from tests.kernels.every_choice import mla
from tests.kernels.gpu_target import gpu_target
with gpu_target((9, 0)) as compiled:
    for heads, q_len, page_size in ((128, 1, 64), (16, 4, 16)):
        mla(heads, page_size=page_size, q_len=q_len)
print(json.dumps([dataclasses.asdict(each) for each in compiled]))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for this machine's GPU in the other tests")
def test_registers_and_shared_memory_suffice() -> None:
    """In another process, for this one may be the interpreter's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [each for each in json.loads(done.stdout.splitlines()[-1]) if each["kernel"] == "hopper_mla_kernel"]
    assert len(found) == 2
    for each in found:
        assert each["matrix"] == ["wgmma"]
        assert max(each["spill_store_bytes"], each["spill_load_bytes"]) <= MOST_SPILL_BYTES
        assert each["shared_bytes"] <= SM90_SHARED_BYTES
