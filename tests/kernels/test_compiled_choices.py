"""The Triton kernels that the host code chooses fit every GPU that it knows: compiled without one, as recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.files import read_json
from tests.kernels.compiled_choices import tables

ROOT = Path(__file__).parents[2]
RECORD = Path("results/blackwell-dry-run/portable.json.gz")
WITHOUT_A_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles for this machine's GPU in the other tests"
)
# Of a thread, where 168 are the registers of each when all have as many; most lie outside the loops over tiles.
MOST_SPILL_BYTES = 256
SM90_SHARED_BYTES = 232_448  # of a program, by the CUDA C++ Programming Guide
ON_SM90 = """
import dataclasses, json
from lab.kernels import portable
from tests.kernels.every_choice import BF16, PAGES, REQUESTS, mla, tensor
from tests.kernels.gpu_target import gpu_target
with gpu_target((9, 0)) as of_mla:
    for heads, q_len, page_size in ((128, 1, 64), (16, 4, 16)):
        mla(heads, page_size=page_size, q_len=q_len)
with gpu_target((9, 0)) as of_ragged_selection:
    query, pool = tensor(100, 16, 576, dtype=BF16), tensor(PAGES, 1, 64, 576, dtype=BF16)
    sizes, ragged = (128, 512, 64), {"cum_seq_lens_q": tensor(REQUESTS + 1), "max_q_len": 4}
    portable.trtllm_batch_decode_with_kv_cache_mla(
        query, pool, None, *sizes, tensor(100, 2048), tensor(REQUESTS), 65536, 2048, **ragged
    )
print(json.dumps([[dataclasses.asdict(each) for each in compiled] for compiled in (of_mla, of_ragged_selection)]))
"""


def run(*words: str) -> str:
    """What Python prints that compiles: another process, for this one may be the interpreter's.

    FlashInfer, once imported, names another assembler than Triton's own to Triton, which then writes other PTX.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {name: os.environ[name] for name in ("TRITON_CACHE_DIR",) if name in os.environ}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@WITHOUT_A_GPU
def test_every_choice_is_the_recorded_one_and_fits() -> None:
    checked = run("-m", "tests.kernels.compiled_choices", "--check", str(RECORD))
    assert checked == "all choices are the record's, and fit\n"


def test_the_page_has_the_tables_of_the_record() -> None:
    page = (ROOT / RECORD).with_name("portable.md").read_text()
    for table in tables(read_json(ROOT / RECORD)).strip().split("\n\n"):
        assert table in page


@pytest.fixture(scope="module")
def on_sm90() -> list[list[dict[str, Any]]]:
    """What MLA calls compile to on SM90, and an MLA call whose rows select entries."""
    return json.loads(run("-c", ON_SM90).splitlines()[-1])


@WITHOUT_A_GPU
def test_rows_of_different_widths_select_entries(on_sm90: list[list[dict[str, Any]]]) -> None:
    """The interpreter does not see that a variable of the kernel has another type in a branch."""
    assert "_columns_kernel" in {each["kernel"] for each in on_sm90[1]}


@WITHOUT_A_GPU
def test_registers_and_shared_memory_suffice_for_mla_on_sm90(on_sm90: list[list[dict[str, Any]]]) -> None:
    found = [each for each in on_sm90[0] if each["kernel"] == "hopper_mla_kernel"]
    assert len(found) == 2
    for each in found:
        assert each["matrix"] == ["wgmma"]
        assert max(each["spill_store_bytes"], each["spill_load_bytes"]) <= MOST_SPILL_BYTES
        assert each["shared_bytes"] <= SM90_SHARED_BYTES
