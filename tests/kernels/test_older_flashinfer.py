"""Older releases of FlashInfer: the lab's adapter calls each on an H200 that is not there, or refuses in a sentence.

They are not installed here. A folder has one of each, and `LAB_FLASHINFER_RELEASES=FOLDER` names it:
`pip install --no-deps --target FOLDER/0.6.12 flashinfer-python==0.6.12`.
"""

import importlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.calls.problem import E4M3
from tests.dry_run import calls
from tests.dry_run.on_a_b200 import told_by

FOLDER = os.environ.get("LAB_FLASHINFER_RELEASES")
RELEASES = sorted(path.name for path in Path(FOLDER).iterdir() if (path / "flashinfer").exists()) if FOLDER else []
FIRST_WITH_FMHA_V2, FIRST_WITH_PAIRS = (0, 6, 7), (0, 6, 18)
HALVES = (2, calls.PAGES, calls.KV_HEADS, calls.PAGE_SIZE, calls.HEAD_DIM)

Case = Callable[[], dict[str, Any]]


def over_e4m3(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"kv_cache": tuple(side.to(E4M3) for side in call["kv_cache"])}


DECODE: dict[str, Case] = {
    "decode": calls.decode,
    "verify, window, sinks": lambda: calls.decode(q_len=4) | {"window_left": 5, "sinks": torch.zeros(calls.HEADS)},
    "e4m3": lambda: over_e4m3(calls.decode(q_len=4)) | {"bmm2_scale": 0.5},
    "tensor scales": lambda: over_e4m3(calls.decode()) | {"bmm1_scale": torch.ones(1), "bmm2_scale": torch.ones(1)},
    "scale in base 2": lambda: calls.decode() | {"bmm1_scale_log2": torch.ones(1)},
    "LSE": lambda: calls.decode() | {"return_lse": True},
}
CONTEXT: dict[str, Case] = {
    "stacked": lambda: (
        calls.context() | {"kv_cache": torch.zeros(HALVES, dtype=torch.bfloat16).transpose(0, 1).contiguous()}
    ),
    "halves": lambda: calls.context() | {"kv_cache": tuple(torch.zeros(HALVES, dtype=torch.bfloat16))},
}


def told() -> dict[str, Any]:
    """Return what each call hands FlashInfer's compiled module, or the sentence that refuses it."""
    properties = types.SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda *of: properties  # 0.6.14 to 0.7.0 ask GPU 0 when they are imported
    from lab.dry_run import machine
    from lab.kernels import trtllm

    shown: dict[str, Any] = {}
    with machine("h200") as gpu:
        for cases, function in (
            (DECODE, trtllm.trtllm_batch_decode_with_kv_cache),
            (CONTEXT, trtllm.trtllm_batch_context_with_kv_cache),
        ):
            for name, make in cases.items():
                gpu.clear()
                try:
                    function(**make())
                except NotImplementedError as error:
                    shown[name] = str(error)
                else:
                    (called,) = gpu.compiled_calls
                    shown[name] = [_plain(each) for each in called.arguments if each is not None]
    return shown


def _plain(value: Any) -> Any:
    return [str(value.dtype), list(value.shape), list(value.stride())] if isinstance(value, Tensor) else value


@pytest.mark.skipif(not RELEASES, reason="LAB_FLASHINFER_RELEASES names no folder of FlashInfer's releases")
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_is_called_as_the_newest_or_refused_in_a_sentence(release: str) -> None:
    here = importlib.metadata.version("flashinfer-python")
    old, new = (told_by("tests.kernels.test_older_flashinfer", "told", each) for each in (f"{FOLDER}/{release}", ""))
    version = tuple(int(part) for part in release.split(".")[:3])
    assert old["LSE"] == new["LSE"] == "XQA computes no LSE"
    for name in set(DECODE) - {"LSE"}:
        # The first argument tells which of XQA's two kernels for e4m3 K/V runs, which releases choose otherwise.
        assert old[name][1:] == new[name][1:], (name, release, here)
    if version < FIRST_WITH_FMHA_V2:
        assert {old[name] for name in CONTEXT} == {
            f"the installed FlashInfer {release} has no flashinfer.prefill.trtllm_fmha_v2_prefill; the lab is written for 0.7.2"
        }
        return
    assert old["stacked"] == new["stacked"]
    if version < FIRST_WITH_PAIRS:
        assert "takes K and V as one [num_pages, 2, ...] tensor alone" in old["halves"]
    else:
        assert old["halves"] == new["halves"]
