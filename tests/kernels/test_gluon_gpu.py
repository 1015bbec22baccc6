"""The Gluon kernels on an H200, the smallest case first.

A deadlock ends no test by itself: run each group (`-k one_tile`, `-k masks`, ...) under `timeout` where one is possible.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.mla_decode import MLADecodeCall
from lab.kernels.portable import hopper, mla_decode, paged
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from tests.cases import CONTEXT, DECODE, MLA
from tests.kernels.held import FP16
from tests.kernels.test_portable_gpu import assert_right, posed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
    ),
]
# By function: its call, and the choice of the Gluon kernel's tiles for a problem.
CHOICES: dict[str, tuple[Any, Any]] = {
    DECODE: (DecodeCall, hopper.hopper_tiles),
    CONTEXT: (ContextCall, hopper.hopper_tiles),
    MLA: (MLADecodeCall, hopper.hopper_mla_tile),
}
TENSOR_SCALES = {"bmm1_scale": torch.tensor([0.1]), "bmm2_scale": torch.tensor([2.0])}


def check(function: str, *lengths: Any, repeats: int = 3, **changes: Any) -> None:
    """Make the call of a random batch several times, and hold every output vector and LSE to the reference's."""
    if function == MLA:  # whatever its number of rows
        changes = {"ragged": True, "bmm1_scale": 576**-0.5} | changes
    arguments = posed(function, *lengths, **changes)
    call, choice = CHOICES[function]
    with mock.patch.object(hopper, "LEAST_MLA_ROWS", 1):
        assert choice(call(**arguments).problem()) is not None, "the problem is left to the plain kernel"
        for _ in range(repeats):
            assert_right(function, arguments)


def test_one_tile() -> None:
    check(CONTEXT, [128], [128], 128, heads=(1, 1), causal=False)
    check(MLA, [1], [64], heads=64)


@pytest.mark.parametrize("keys", [64, 100, 128, 200, 1000])
def test_several_tiles(keys: int) -> None:
    check(CONTEXT, [128], [keys], heads=(1, 1), causal=False)
    check(MLA, [1], [keys], heads=64)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_masks_causal(head_dim: int, page_size: int) -> None:
    check(CONTEXT, [300, 77], [300, 500], page_size, head_dim=head_dim, bmm1_scale=head_dim**-0.5)


@pytest.mark.parametrize("window_left", [0, 50, 129, 1000])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shares", [None, Shares(1)], ids=["blocks", "shares"])
def test_masks_window(window_left: int, head_dim: int, shares: Shares | None) -> None:
    with mock.patch.object(paged, "shares_of", return_value=shares):
        check(CONTEXT, [300, 77], [700, 500], window_left=window_left, head_dim=head_dim)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_lengths_around_pages_and_tiles(page_size: int) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 700]
    check(MLA, [1] * len(lengths), lengths, page_size, heads=64)


@pytest.mark.parametrize(("q_len", "heads"), [(1, 128), (4, 16), (4, 128), (1, 16), (5, 24), (2, 1)])
def test_rows(q_len: int, heads: int) -> None:
    check(MLA, [q_len] * 3, [q_len, 300, 2000], heads=heads)


def test_terms() -> None:
    """Sinks, a negative scale, scales as tensors, float16, groups that are no power of two, tables of their own."""
    negative = {"bmm1_scale": -0.1, "bmm2_scale": 0.5}
    check(CONTEXT, [90, 200], [190, 900], sinks=torch.linspace(-2, 4, 8), **negative)
    check(CONTEXT, [90, 200], [190, 900], dtype=FP16, heads=(10, 2), **TENSOR_SCALES)
    check(CONTEXT, [90, 200], [190, 900], separate_tables=True, out_dtype=FP16)
    check(MLA, [2, 3], [190, 900], heads=48, sinks=torch.linspace(-2, 4, 48), **negative)
    out = torch.empty(5, 48, 512, dtype=FP16)
    check(MLA, [2, 3], [190, 900], heads=48, dtype=FP16, out=out, **TENSOR_SCALES)


def test_ragged() -> None:
    """Requests without rows and without keys, and more rows than keys."""
    check(CONTEXT, [1, 0, 400, 33, 900, 5], [700, 0, 400, 2000, 901, 0], heads=(32, 4))
    check(CONTEXT, [4096], [4096], heads=(16, 2), repeats=5)
    check(MLA, [4, 0, 1, 5, 9], [300, 5, 0, 140, 5], 32, heads=24)


@pytest.mark.parametrize("q_lens", [[1, 700, 1, 2, 300], [700, 1, 1, 1], [1] * 150 + [200] + [1] * 3 + [90]])
@pytest.mark.parametrize("prefix", [0, 5000])
def test_prompts_beside_decodes(q_lens: list[int], prefix: int) -> None:
    """The plain kernel has the decodes, and this one the prompts: in blocks of rows, and after a long prefix in shares."""
    kv_lens = [q_len + (prefix or 300) for q_len in q_lens]
    check(CONTEXT, q_lens, kv_lens, heads=(16, 2), repeats=5)


@pytest.mark.parametrize(("function", "q_len", "heads"), [(DECODE, 16, (16, 2)), (DECODE, 32, (16, 2)), (MLA, 1, 128)])
@pytest.mark.parametrize("kv_lens", [[4096] * 8, [70, 9000, 129, 128, 1], [20000], [900] * 300], ids=str)
def test_shares(function: str, q_len: int, heads: Any, kv_lens: list[int]) -> None:
    kv_lens = [max(length, q_len) for length in kv_lens]
    check(function, [q_len] * len(kv_lens), kv_lens, heads=heads, repeats=5)


def test_shares_that_cut_everywhere() -> None:
    with mock.patch.object(paged, "shares_of", return_value=Shares(29)):
        check(DECODE, [17] * 3, [3000, 100, 5000], heads=(16, 2), repeats=5)
    with mock.patch.object(mla_decode, "choose_shares", return_value=Shares(29)):
        check(MLA, [3] * 3, [3000, 100, 5000], heads=40, repeats=5)


@pytest.mark.parametrize(
    "tile",
    [
        HopperTile(128, 128, stages=2),
        HopperTile(128, 64, stages=3),
        HopperTile(128, 64, stages=6),
        HopperTile(64, 64, stages=3, per_multiprocessor=2),
    ],
    ids=str,
)
def test_variants(tile: HopperTile) -> None:
    with mock.patch.dict(hopper.TILES, {128: hopper.HopperTiles(*[tile] * 3)}):
        check(CONTEXT, [300, 77], [700, 500])
        check(DECODE, [16] * 5, [4000] * 5, heads=(16, 2))  # 128 rows; 64 are the plain kernel's


@pytest.mark.parametrize(
    "changes", [{"start_keys": 512}, {"consumer_registers": 240, "producer_registers": 24}], ids=str
)
def test_mla_variants(changes: dict[str, int]) -> None:
    """Tiles of another start, and of more registers for the consumers."""
    with mock.patch.dict(hopper.MLA_TILES, {(512, 64): hopper.MLA_TILES[512, 64]._replace(**changes)}):
        check(MLA, [1] * 5, [4000] * 5, heads=128)
