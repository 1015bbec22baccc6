"""A recorded call is timed on the GPU: a right kernel has a time, a kernel that keeps old lengths or pages has none."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.kernels import portable, prepare
from lab.recorded.case import recorded_cases
from lab.timing import method_named
from lab.timing.forward import time_interleaved
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import write_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, whose time is measured"),
]
DECODE = "trtllm_batch_decode_with_kv_cache"


def _stale(**arguments: Any) -> Any:
    kept = {name: arguments[name].clone() for name in ("seq_lens", "block_tables")}
    return prepare(portable, DECODE, **arguments | kept)


def test_a_right_kernel_has_a_time_and_one_that_keeps_its_tables_has_none(tmp_path: Path) -> None:
    (case,) = recorded_cases(write_call(tmp_path, DECODE, decode_arguments(), (torch.zeros(1),)))
    stale = SimpleNamespace(__name__="stale", **{f"prepare_{DECODE}": _stale})
    right, wrong = time_interleaved(case, [portable, stale], method_named("graph", "warm"))
    assert isinstance(right, tuple), right
    assert right[0].median_us > 0
    assert right[1]["kv_tokens"] == 55
    assert isinstance(wrong, AssertionError), wrong
