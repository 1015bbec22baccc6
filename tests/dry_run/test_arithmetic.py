"""Attention computed from launches alone is what the references compute, of the dtypes that no forward pass has."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.dry_run.host_memory import HostMemory, UnsoundLaunchError
from lab.dry_run.kernel_facts import MaskType, kernel_facts
from lab.dry_run.machine import machine
from lab.kernels import trtllm
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

E4M3 = torch.float8_e4m3fn
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
HEADS, KV_HEADS, PAGES = 8, 2, 27
LENGTHS, Q_LENS = (5, 64, 130), (2, 2, 2)


def arguments_over(kv_cache: Any, page_size: int, dtype: torch.dtype, head_dim: int, **changes: Any) -> dict[str, Any]:
    """A decode call of three requests of two rows."""
    generator = torch.Generator().manual_seed(1)
    return {
        "query": torch.randn(sum(Q_LENS), HEADS, head_dim, generator=generator).to(dtype),
        "kv_cache": kv_cache,
        "workspace_buffer": None,
        "block_tables": torch.randperm(PAGES, generator=generator)[: 3 * (PAGES // 3)].view(3, -1).int(),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "max_seq_len": PAGES // 3 * page_size,
        "q_len_per_req": 2,
        "bmm1_scale": 0.1,
        "bmm2_scale": 0.7,
    } | changes


def as_context(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same requests in a context call."""
    offsets = {
        f"cum_seq_lens_{side}": torch.tensor((0, *lens), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for side, lens in (("q", Q_LENS), ("kv", LENGTHS))
    }
    bounds = {"max_q_len": 2, "max_kv_len": arguments["max_seq_len"], "batch_size": 3}
    left_out = ("q_len_per_req", "max_seq_len")
    return {name: value for name, value in arguments.items() if name not in left_out} | offsets | bounds


def nvfp4(page_size: int, head_dim: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Pages of K and V, and their scale factors, V's as trtllm-gen reads them."""
    sides = [quantize_nvfp4(torch.randn(PAGES, KV_HEADS, page_size, head_dim), 1.0) for _ in range(2)]
    (k, k_factors), (v, v_factors) = sides
    return (k, v), (k_factors, interleave_v_scale_factors(v_factors))


@NEEDS_A_LAUNCHER
@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nvfp4(function: str, page_size: int, head_dim: int) -> None:
    """Descriptors of 16 or 8 bits, of rows that are joined, and of scale factors."""
    cache, factors = nvfp4(page_size, head_dim)
    arguments = arguments_over(cache, page_size, E4M3, head_dim, kv_cache_sf=factors, out_dtype=E4M3)
    assert_right(function, arguments | {"backend": "trtllm-gen"} if function == DECODE else as_context(arguments))


@NEEDS_A_LAUNCHER
@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, E4M3])
def test_e4m3_with_scales_on_the_device(function: str, out_dtype: torch.dtype) -> None:
    cache = tuple(torch.randn(PAGES, KV_HEADS, 64, 128).to(E4M3) for _ in range(2))
    scales = {"bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([0.7])}
    arguments = arguments_over(cache, 64, E4M3, 128, out_dtype=out_dtype, **scales)
    assert_right(function, arguments if function == DECODE else as_context(arguments))


def assert_right(function: str, arguments: dict[str, Any]) -> None:
    with machine("b200", computes=True):
        out = getattr(trtllm, function)(**arguments)
    expected = getattr(references, function)(**arguments)
    one_rounding = torch.finfo(out.dtype).eps / 2
    assert float(references.relative_l2(out, expected).max()) <= one_rounding


def test_the_facts_of_a_kernel() -> None:
    facts = kernel_facts("fmhaSm100fKernel_QkvBfloat16OBfloat16H64PagedKvCausalP64VarSeqQ8Kv128PersistentSwapsAbForGen")
    assert (facts.dtype_q, facts.dtype_k, facts.dtype_v, facts.dtype_o) == (torch.bfloat16,) * 4
    assert (facts.head_dim_qk, facts.head_dim_v, facts.mask) == (64, 64, MaskType.CAUSAL)
    assert (facts.is_paged, facts.is_context, facts.is_sparse) == (True, False, False)
    assert (facts.has_window, facts.sees_all_keys) == (False, False)


def test_memory_is_that_of_the_tensors() -> None:
    tensor = torch.arange(24, dtype=torch.int32).view(4, 6)[:, :5]
    memory = HostMemory.of([tensor])
    assert memory.view("it", tensor.data_ptr(), (4, 5), (24, 4), torch.int32).tolist() == tensor.tolist()
    assert memory.array("a row", tensor[2].data_ptr(), (5,), torch.int32).tolist() == tensor[2].tolist()
    memory.array("it", tensor.data_ptr(), (1,), torch.int32)[0] = 7
    assert tensor[0, 0] == 7


@pytest.mark.parametrize(
    ("offset", "shape", "strides_bytes"),
    [(0, (4, 6), (24, 4)), (-4, (1,), (4,)), (0, (5,), (24,)), (0, (4,), (6,)), (2, (1,), (4,)), (10**9, (1,), (4,))],
    ids=[
        "past the last element",
        "before the first",
        "a row too many",
        "half a stride",
        "half an element",
        "elsewhere",
    ],
)
def test_other_memory_is_refused(offset: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...]) -> None:
    tensor = torch.zeros(24, dtype=torch.int32).view(4, 6)[:, :5]
    with pytest.raises(UnsoundLaunchError, match="the table"):
        HostMemory.of([tensor]).view("the table", tensor.data_ptr() + offset, shape, strides_bytes, torch.int32)
