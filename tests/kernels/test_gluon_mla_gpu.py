"""The Gluon kernel of MLA on an H200, the smallest case first; a wrong result prints its error by blocks of rows and elements.

A deadlock ends no test by itself: run each group (`-k one_tile`, `-k lengths`, ...) under `timeout` where one is possible.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from lab import references
from lab.calls.mla_decode import MLADecodeCall
from lab.kernels import portable
from lab.kernels.portable import hopper, mla_decode
from lab.kernels.portable.key_shares import Shares
from tests.cases import Batch
from tests.kernels.test_gluon_gpu import BOUND, errors_by_place
from tests.kernels.test_portable_mla import arguments_of, random_batch, truth_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = {"rank": 512, "rope": 64}


@pytest.fixture(autouse=True)
def _every_row_count() -> Iterator[None]:
    with mock.patch.object(hopper, "LEAST_MLA_ROWS", 1):
        yield


def check(batch: Batch, page_size: int = 64, *, repeats: int = 3, **changes: Any) -> None:
    """Make the call several times, and hold every output vector and LSE to the reference's."""
    defaults = {"poison": float("nan"), "foreign_id": 0, "ragged": True, "bmm1_scale": 576**-0.5}
    arguments = arguments_of("cuda", batch, page_size, **defaults | changes)
    problem = MLADecodeCall(**arguments).problem()
    assert hopper.hopper_mla_tile(problem) is not None, "the choice function leaves this problem to the plain kernel"
    truth, truth_lse = truth_of(arguments)
    portable.trtllm_batch_decode_with_kv_cache_mla.cache_clear()  # calls of another choice
    for turn in range(repeats):
        out, lse = portable.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        torch.cuda.synchronize()
        error = references.relative_l2(out, truth)
        wrong = ~(error <= BOUND) | ~((lse.double() - truth_lse.double()).abs() <= 1e-4) & truth_lse.isfinite()
        if bool(wrong.any()):
            shown = errors_by_place(out, truth, lse, truth_lse)
            pytest.fail(f"call {turn}: {int(wrong.sum())} of {wrong.numel()} vectors wrong\n{shown}")


def test_one_tile() -> None:
    check(random_batch([1], [64], heads=64, **SIZES))


@pytest.mark.parametrize("keys", [100, 128, 1000])
def test_several_tiles(keys: int) -> None:
    check(random_batch([1], [keys], heads=64, **SIZES))


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_lengths_around_pages_and_tiles(page_size: int) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700]
    check(random_batch([1] * len(lengths), lengths, heads=64, **SIZES), page_size)


@pytest.mark.parametrize(("q_len", "heads"), [(1, 128), (4, 16), (4, 128), (1, 16), (5, 24), (2, 1)])
def test_rows(q_len: int, heads: int) -> None:
    check(random_batch([q_len] * 3, [q_len, 300, 2000], heads=heads, **SIZES))


def test_terms() -> None:
    """Sinks, a negative scale, scales as tensors, float16."""
    batch = random_batch([2, 3], [190, 900], heads=48, **SIZES)
    check(batch, sinks=torch.linspace(-2, 4, 48), bmm1_scale=-0.1, bmm2_scale=0.5)
    scales = {name: torch.tensor([value]) for name, value in (("bmm1_scale", 0.1), ("bmm2_scale", 2.0))}
    check(random_batch([2, 3], [190, 900], heads=48, dtype=FP16, **SIZES), out_dtype=FP16, **scales)


def test_ragged() -> None:
    """Requests without rows and without keys, and more rows than keys."""
    check(random_batch([4, 0, 1, 5, 9], [300, 5, 0, 140, 5], heads=24, **SIZES), 32)


@pytest.mark.parametrize("kv_lens", [[4096] * 8, [70, 9000, 129, 128, 1], [20000], [900] * 300])
def test_shares(kv_lens: list[int]) -> None:
    check(random_batch([1] * len(kv_lens), kv_lens, heads=128, **SIZES), repeats=5)


def test_shares_that_cut_everywhere() -> None:
    with mock.patch.object(mla_decode, "choose_shares", return_value=Shares(29)):
        check(random_batch([3] * 3, [3000, 100, 5000], heads=40, **SIZES), repeats=5)


def test_variants() -> None:
    """Tiles of another start, and of more registers for the consumers."""
    for changes in ({"start_keys": 512}, {"consumer_registers": 240, "producer_registers": 24}):
        with mock.patch.dict(hopper.MLA_TILES, {(512, 64): hopper.MLA_TILES[512, 64]._replace(**changes)}):
            check(random_batch([1] * 5, [4000] * 5, heads=128, **SIZES))
