"""Attention computed from launches alone is what the references compute, of the dtypes that no forward pass has."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lab.dry_run.arithmetic import HostMemory, UnsoundLaunchError, compute
from lab.dry_run.machine import machine
from lab.kernels import trtllm
from lab.metadata.engine.lengths import exclusive_cumsum, num_pages
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4
from tests.cases import CONTEXT, DECODE, Arguments
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER
from tests.kernels.adapter_calls import case
from tests.kernels.held import BF16, E4M3, FP16, assert_rounded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BOTH = pytest.mark.parametrize("function", [DECODE, CONTEXT])
REQUESTS = (2, 2, 2), (5, 64, 130)
SCALES: Arguments = {"bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([0.7])}


def over_nvfp4(arguments: Arguments) -> Arguments:
    """The same K and V in NVFP4, V's scale factors as trtllm-gen reads them."""
    (k, k_factors), (v, v_factors) = (quantize_nvfp4(side.float(), 1.0) for side in arguments["kv_cache"])
    return arguments | {"kv_cache": (k, v), "kv_cache_sf": (k_factors, interleave_v_scale_factors(v_factors))}


@NEEDS_A_LAUNCHER
@BOTH
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nvfp4(function: str, page_size: int, head_dim: int) -> None:
    """Descriptors of 16 or 8 bits, of rows that are joined, and of scale factors."""
    options = {"heads": (8, 2), "head_dim": head_dim, "dtype": E4M3, "out_dtype": E4M3, "page_size": page_size}
    options |= {"bmm1_scale": 0.1, "bmm2_scale": 0.7, "backend": "trtllm-gen"}
    with machine("b200", computes=True):
        assert_rounded(trtllm, function, case(function, *REQUESTS, over_nvfp4, **options))


@NEEDS_A_LAUNCHER
@BOTH
@pytest.mark.parametrize("out_dtype", [FP16, BF16, E4M3])
def test_e4m3_with_scales_on_the_device(function: str, out_dtype: torch.dtype) -> None:
    options = {"heads": (8, 2), "head_dim": 128, "dtype": E4M3, "out_dtype": out_dtype, "page_size": 64}
    with machine("b200", computes=True):
        assert_rounded(trtllm, function, case(function, *REQUESTS, **options, **SCALES))


def with_key_offsets(change: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Arguments]:
    return lambda given: given | {"cum_seq_lens_kv": exclusive_cumsum(change(given["seq_lens"]))}


@NEEDS_A_LAUNCHER
def test_offsets_of_keys_may_count_pages() -> None:
    options = {"heads": (8, 2), "head_dim": 64, "page_size": 64, "bmm1_scale": 0.1}
    in_pages = case(CONTEXT, *REQUESTS, with_key_offsets(lambda lens: num_pages(lens, 64)), **options)
    with machine("b200", computes=True):
        assert_rounded(trtllm, CONTEXT, in_pages)


@NEEDS_A_LAUNCHER
def test_a_row_without_keys_has_the_lse_of_no_key() -> None:
    arguments = case(DECODE, (1, 1), (0, 5), heads=(8, 2), head_dim=64, page_size=64, bmm1_scale=0.1, return_lse=True)
    with machine("b200", computes=True):
        _, lse = trtllm.trtllm_batch_decode_with_kv_cache(**arguments)
    assert lse[0].eq(-math.inf).all()
    assert lse[1].isfinite().all()


@NEEDS_A_LAUNCHER
def test_rows_that_no_cta_computes_are_found() -> None:
    arguments = case(CONTEXT, *REQUESTS, heads=(8, 2), head_dim=64, page_size=64, bmm1_scale=0.1)
    with machine("b200", computes=True) as gpu:
        trtllm.trtllm_batch_context_with_kv_cache(**arguments)
        (launch,) = gpu.launches
    assert launch.params is not None
    given = [part for value in arguments.values() for part in (value if isinstance(value, tuple) else (value,))]
    memory = HostMemory.of(each for each in given if isinstance(each, Tensor))
    with pytest.raises(UnsoundLaunchError, match="a request has 2 query rows, and the grid covers 0"):
        compute([replace(launch, params=replace(launch.params, max_num_ctas_q=0))], memory)


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
