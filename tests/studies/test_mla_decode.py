"""MLA decode's points, floors, judged variants, target and command line on a CPU; times on a GPU."""

from types import SimpleNamespace

import pytest
import torch

from lab.kernels import support
from lab.metadata.engine.forward_mode import ForwardMode
from lab.timing import GpuWork, roofline
from studies.mla_decode import (
    MLADecode,
    point_of,
    variants_of,
)
from studies.passes import kernel_of
from tests.studies.simulated import CEILINGS, small_mla


def test_the_default_points() -> None:
    cases = MLADecode().cases()
    assert [(len(case.q_lens), case.kv_lens[0], case.num_qo_heads) for case in cases] == [
        (64, 8192, 16),
        (64, 8192, 128),
        (8, 81920, 16),
        (8, 81920, 128),
    ]
    for case in cases:
        assert (case.mode, set(case.q_lens)) == (ForwardMode.DECODE, {1})
        assert (case.head_dim, case.kv_lora_rank, case.page_size) == (576, 512, 64)
        assert (case.dtype, case.kv_dtype) == (torch.bfloat16, torch.bfloat16)


def test_more_rows_verify_and_their_keys_count_the_new_tokens() -> None:
    decode, verify = MLADecode(shapes=((8, 81920),), heads=(16,), q_lens=(1, 4), kv_dtype="e4m3").cases()
    assert (decode.mode, decode.prefix_lens[0]) == (ForwardMode.DECODE, 81919)
    assert (verify.mode, verify.prefix_lens[0], verify.kv_lens[0]) == (ForwardMode.TARGET_VERIFY, 81916, 81920)
    assert {decode.kv_dtype, verify.kv_dtype} == {torch.float8_e4m3fn}
    assert point_of(verify).row == {
        "point": "8q4s80k/16 heads",
        "q_len": 4,
        "requests": 8,
        "kv_len": 81920,
        "heads": 16,
    }


@pytest.mark.parametrize(
    ("heads", "bytes_moved", "operations", "floor_us", "bound"),
    [
        # 64 · 8,192 entries of 1,152 bytes are 603,979,776; 64 rows of 16 heads, 576 + 512 elements of 2 bytes, are 2,228,224.
        (16, 606_208_000, 18_253_611_008, 151.552, "memory"),
        # 128 heads: 17,825,792 bytes of rows; 2 · 128 · 524,288 · 1,088 operations take longer than the bytes' 155.451 µs.
        (128, 621_805_568, 146_028_888_064, 182.536, "matrix"),
    ],
)
def test_floors_by_hand(heads: int, bytes_moved: int, operations: int, floor_us: float, bound: str) -> None:
    (case,) = MLADecode(shapes=((64, 8192),), heads=(heads,)).cases()
    assert (case.bytes_moved, case.operations) == (bytes_moved, operations)
    line = roofline(1000.0, case.bytes_moved, case.operations, CEILINGS)
    assert (line.floor_us, line.floor_bound) == (pytest.approx(floor_us, abs=1e-3), bound)


def test_the_wrapper_is_named_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, name in (((9, 0), "FA3"), ((10, 0), "FA2")):
        monkeypatch.setattr(support, "capability_of", lambda device, capability=capability: capability)
        portable, wrapper = variants_of(small_mla())
        work = GpuWork.of(print, 1, query=SimpleNamespace(device=torch.device("cuda")))
        assert kernel_of(wrapper, work).endswith(name)
        assert kernel_of(portable, work) == "portable"
