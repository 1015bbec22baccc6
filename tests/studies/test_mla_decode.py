"""MLA decode's floors by hand, and the wrapper's name on each GPU."""

from types import SimpleNamespace

import pytest
import torch

from lab.kernels import support
from lab.timing import GpuWork, roofline
from studies.mla_decode import (
    MLADecode,
    variants_of,
)
from studies.passes import kernel_of
from tests.studies.simulated import CEILINGS, small_mla


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
