"""The Gluon kernel on an H200, the smallest case first; a wrong result prints its error by blocks of rows and elements.

A deadlock ends no test by itself: run each group (`-k one_tile`, `-k masks`, ...) under `timeout` where one is possible.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls import ContextCall, DecodeCall
from lab.kernels import portable
from lab.kernels.portable import hopper, paged
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from tests.kernels.test_portable_gpu import CONTEXT, DECODE, FP16, posed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
    ),
]
# As `tests.kernels.test_portable_gpu.BOUND`.
BOUND = 4 * 2.0**-8


def check(function: str, arguments: dict[str, Any], *, repeats: int = 3) -> None:
    """Make the call several times, and hold every output vector and LSE to the reference's."""
    problem = (DecodeCall if function == DECODE else ContextCall)(**arguments).problem()
    assert hopper.hopper_tiles(problem) is not None, "the choice function leaves this problem to the plain kernel"
    truth, truth_lse = getattr(references, function)(
        **arguments | {"out": None, "out_dtype": torch.float64, "lse": None}
    )
    getattr(portable, function).cache_clear()  # calls of another tile
    for turn in range(repeats):
        out, lse = getattr(portable, function)(**arguments)
        torch.cuda.synchronize()
        error = references.relative_l2(out, truth)
        wrong = ~(error <= BOUND) | ~((lse.double() - truth_lse.double()).abs() <= 1e-4) & truth_lse.isfinite()
        if bool(wrong.any()):
            shown = errors_by_place(out, truth, lse, truth_lse)
            pytest.fail(f"call {turn}: {int(wrong.sum())} of {wrong.numel()} vectors wrong\n{shown}")


def errors_by_place(out: Tensor, truth: Tensor, lse: Tensor, truth_lse: Tensor) -> str:
    """Return the largest error of each 16 rows (down) and 16 elements (across) of the first heads, and that of the LSE."""
    lines = []
    for head in range(min(out.shape[1], 4)):
        error = (out[:, head].double() - truth[:, head].double()).abs().nan_to_num(nan=float("inf"))
        lse_error = (lse[:, head].double() - truth_lse[:, head].double()).abs().nan_to_num(nan=float("inf"))
        lines.append(
            f"head {head}: rows, errors by 16 elements, of the LSE (out's size {float(truth.abs().max()):.3g})"
        )
        for row in range(0, min(len(error), 256), 16):
            block = error[row : row + 16]
            across = " ".join(f"{float(part.max()):8.2g}" for part in block.split(16, 1))
            lines.append(f"  {row:5}: {across} | {float(lse_error[row : row + 16].max()):8.2g}")
    return "\n".join(lines)


def test_one_tile_not_causal() -> None:
    check(CONTEXT, posed(CONTEXT, [128], [128], 128, heads=(1, 1), causal=False))


@pytest.mark.parametrize("keys", [64, 100, 200, 1000])
def test_one_tile_and_several_not_causal(keys: int) -> None:
    check(CONTEXT, posed(CONTEXT, [128], [keys], 64, heads=(1, 1), causal=False))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_masks_causal(head_dim: int, page_size: int) -> None:
    check(CONTEXT, posed(CONTEXT, [300, 77], [300, 500], page_size, head_dim=head_dim, heads=(8, 2)))


@pytest.mark.parametrize("window_left", [0, 50, 129, 1000])
def test_masks_window(window_left: int) -> None:
    check(CONTEXT, posed(CONTEXT, [300, 77], [700, 500], window_left=window_left))


def test_terms() -> None:
    """Sinks, a negative scale, scales as tensors, float16, groups that are no power of two, tables of their own."""
    sinks = torch.linspace(-2, 4, 8, device="cuda")
    check(CONTEXT, posed(CONTEXT, [90, 200], [190, 900], sinks=sinks, bmm1_scale=-0.1, bmm2_scale=0.5))
    scales = {name: torch.tensor([value], device="cuda") for name, value in (("bmm1_scale", 0.1), ("bmm2_scale", 2.0))}
    check(CONTEXT, posed(CONTEXT, [90, 200], [190, 900], dtype=FP16, heads=(10, 2), **scales))
    check(CONTEXT, posed(CONTEXT, [90, 200], [190, 900], separate_tables=True, out_dtype=FP16))


def test_ragged_blocks() -> None:
    q_lens, kv_lens = [1, 0, 400, 33, 900, 5], [700, 0, 400, 2000, 901, 0]
    check(CONTEXT, posed(CONTEXT, q_lens, kv_lens, heads=(32, 4)))
    check(CONTEXT, posed(CONTEXT, [4096], [4096], heads=(16, 2)), repeats=5)


@pytest.mark.parametrize("q_lens", [[1, 700, 1, 2, 300], [700, 1, 1, 1], [1] * 150 + [200] + [1] * 3 + [90]])
@pytest.mark.parametrize("prefix", [0, 5000])
def test_prompts_beside_decodes(q_lens: list[int], prefix: int) -> None:
    """The plain kernel has the decodes, and this one the prompts: in blocks of rows, and after a long prefix in shares."""
    kv_lens = [q_len + (prefix or 300) for q_len in q_lens]
    check(CONTEXT, posed(CONTEXT, q_lens, kv_lens, heads=(16, 2)), repeats=5)


@pytest.mark.parametrize("q_len", [16, 32])
@pytest.mark.parametrize("kv_lens", [[4096] * 8, [70, 9000, 129, 128, 1], [20000]])
def test_shares(q_len: int, kv_lens: list[int]) -> None:
    kv_lens = [max(length, q_len) for length in kv_lens]
    check(DECODE, posed(DECODE, [q_len] * len(kv_lens), kv_lens, heads=(16, 2)), repeats=5)


def test_shares_that_cut_everywhere() -> None:
    with mock.patch.object(paged, "shares_of", return_value=Shares(29)):
        check(DECODE, posed(DECODE, [17] * 3, [3000, 100, 5000], heads=(16, 2)), repeats=5)


@pytest.mark.parametrize(
    "tile",
    [
        HopperTile(128, 128, stages=2),
        HopperTile(128, 64, stages=3),
        HopperTile(128, 64, stages=6),
    ],
    ids=str,
)
def test_variants(tile: HopperTile) -> None:
    with mock.patch.dict(hopper.TILES, {128: hopper.HopperTiles(tile, tile)}):
        check(CONTEXT, posed(CONTEXT, [300, 77], [700, 500]))
        check(DECODE, posed(DECODE, [16] * 5, [4000] * 5, heads=(16, 2)))  # 128 rows; 64 are the plain kernel's
