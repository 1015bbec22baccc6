"""A call on a GPU that is not there: FlashInfer's launcher selects its kernel, and is given the call's tensors."""

import math

import pytest
import torch

from lab.dry_run import machine, why_not_built
from lab.kernels import trtllm

KERNEL = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvCgaVarSeqQ8Kv128StaticSwapsAbForGen"
pytestmark = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))


def decode_arguments() -> dict[str, object]:
    pages, kv_heads, page_size, heads, head_dim, requests = 40, 4, 64, 32, 128, 8
    return {
        "query": torch.zeros(requests, heads, head_dim, dtype=torch.bfloat16),
        "kv_cache": tuple(torch.zeros(pages, kv_heads, page_size, head_dim, dtype=torch.bfloat16) for _ in range(2)),
        "workspace_buffer": torch.zeros(72 << 20, dtype=torch.uint8),
        "block_tables": torch.zeros(requests, 128, dtype=torch.int32),
        "seq_lens": torch.full((requests,), 8192, dtype=torch.int32),
        "max_seq_len": 8192,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
    }


@pytest.mark.parametrize("name", ["b200", "b300"])
def test_decode_launches_the_kernel_that_the_prototype_saw(name: str) -> None:
    arguments = decode_arguments()
    with machine(name) as gpu:
        trtllm.trtllm_batch_decode_with_kv_cache(**arguments)
    (launch,) = gpu.launches
    assert launch.name == KERNEL
    assert (launch.grid, launch.cluster, launch.pdl, launch.shared_memory_bytes) == ((4, 4, 8), 4, True, 174_696)
    params = launch.params
    assert params is not None
    assert params.ptr_page_idx_kv == arguments["block_tables"].data_ptr()
    assert params.ptr_seq_lens_kv == arguments["seq_lens"].data_ptr()
    assert params.scale_softmax_log2 == pytest.approx(0.1 * math.log2(math.e))
    maps = {each.member: each for each in launch.tma}
    assert [maps[member].address for member in ("tmaK_", "tmaV_")] == [
        each.data_ptr() for each in arguments["kv_cache"]
    ]
    assert maps["tmaK_"].strides_bytes == (256, 64 * 256, 4 * 64 * 256)
