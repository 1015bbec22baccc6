"""FlashInfer 0.6.13's launcher with its own table: the two match exactly, and so nothing rests on an older table.

It needs FlashInfer 0.6.13 in a folder of its own, which no other test sees:
`pip install --no-deps --target FOLDER flashinfer-python==0.6.13`, and `LAB_FLASHINFER_0613=FOLDER`. The lab's adapters are
written for 0.7.2, so FlashInfer's functions are called by themselves.
"""

import json
import os
from typing import Any

import pytest

from lab.dry_run import machine
from tests.dry_run import calls
from tests.dry_run.on_a_b200 import told_by

FOLDER = os.environ.get("LAB_FLASHINFER_0613")


def launched() -> dict[str, Any]:
    """Return (kernel, grid, cluster, scale) of what FlashInfer's functions launch on a B200, and what the table lacks."""
    import flashinfer.decode
    import flashinfer.mla
    import flashinfer.prefill

    runs = {
        "decode": (flashinfer.decode.trtllm_batch_decode_with_kv_cache, calls.decode(keys=8192)),
        "context": (flashinfer.prefill.trtllm_batch_context_with_kv_cache, calls.context()),
        "mla": (flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla, calls.mla()),
        "ragged": (flashinfer.prefill.trtllm_ragged_attention_deepseek, calls.ragged()),
    }
    shown: dict[str, Any] = {}
    with machine("b200") as gpu:
        for name, (function, arguments) in runs.items():
            gpu.clear()
            calls.run_installed(function, arguments)
            launch = gpu.launches[0]
            assert launch.params is not None
            shown[name] = [launch.name, launch.grid, launch.cluster, launch.params.scale_softmax_log2]
        shown["lacks"] = gpu.table_lacks
    return shown


@pytest.mark.skipif(FOLDER is None, reason="LAB_FLASHINFER_0613 names no folder with FlashInfer 0.6.13")
@pytest.mark.usefixtures("_launcher")
def test_0613_with_its_own_table_launches_the_same_and_lacks_nothing() -> None:
    exact = told_by("tests.dry_run.test_exact_table", "launched", str(FOLDER))
    assert exact.pop("lacks") == []
    newer = json.loads(json.dumps(launched()))
    newer.pop("lacks")
    assert exact == newer
