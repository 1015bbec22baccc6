"""The Gluon kernel of MLA in a simulator of its partitions and barriers, against the float64 references, per (row, head).

That each of its waits is needed is `test_gluon_orders.py`'s.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.portable import hopper
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from tests.cases import Batch
from tests.kernels.simulated_gluon import simulate
from tests.kernels.test_portable_mla import BF16, arguments_of, random_batch, truth_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gluon_mla_gpu.py runs the kernel itself")

FP16 = torch.float16
TILE = HopperTile(64, 64, stages=2, start_keys=128)
SIZES = {"rank": 128, "rope": 64}  # the least whose halves are whole boxes
POISONED: dict[str, Any] = {"poison": float("nan"), "foreign_id": 10**6}


def run(
    batch: Batch,
    page_size: int = 64,
    *,
    count: int = 3,
    tile: HopperTile = TILE,
    seed: int = 0,
    **changes: Any,
) -> None:
    """Make the call in the simulator, in so many shares, and hold every output vector and LSE to the reference's."""
    arguments = arguments_of("cpu", batch, page_size, **POISONED | {"ragged": True} | changes)
    problem = MLADecodeCall(**arguments).problem()
    out, lse = problem.results()
    out.fill_(float("nan"))
    attention, *merge = hopper.hopper_mla_launches(problem, (out, lse), tile, Shares(count))
    simulate(attention, seed)
    for launch in merge:
        launch()
    truth, truth_lse = truth_of(arguments)
    error = references.relative_l2(out, truth.reshape(out.shape))
    assert float(error.max()) < 2.0**-7, error
    assert lse is not None
    torch.testing.assert_close(lse.double(), truth_lse.double().reshape(lse.shape), rtol=1e-5, atol=1e-5)


# (query rows, keys) of each request, heads, keys of a page, and what the call asks for beside them
CASES: dict[str, tuple[list[int], list[int], int, int, dict[str, Any]]] = {
    "one tile": ([1], [64], 64, 64, {}),
    "lengths around tiles": ([1] * 5, [63, 64, 65, 128, 129], 64, 64, {}),
    "lengths around pages": ([1] * 4, [1, 15, 16, 17], 64, 16, {}),
    "pages of 32, and those without a key": ([1] * 4, [31, 32, 33, 97], 64, 32, {}),
    "pages of two tiles": ([2, 2], [64, 200], 32, 128, {}),
    "few rows": ([1, 1], [100, 300], 16, 64, {}),
    "several blocks": ([3, 3], [3, 190], 48, 64, {}),
    "ragged, without keys, without rows": ([4, 0, 1, 5], [300, 5, 0, 140], 24, 32, {}),
    "more rows than keys": ([9], [5], 16, 16, {}),
    "sinks": ([2, 1], [70, 0], 40, 64, {"sinks": 40}),
    "a negative scale": ([2], [150], 64, 64, {"bmm1_scale": -0.1, "bmm2_scale": 0.5}),
    "no scale": ([2], [70], 64, 64, {"bmm1_scale": 0.0}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, seed: int) -> None:
    q_lens, kv_lens, heads, page_size, asked = CASES[case]
    if "sinks" in asked:
        asked = asked | {"sinks": torch.linspace(-1, 3, heads)}
    batch = random_batch(q_lens, kv_lens, heads=heads, dtype=(BF16, FP16)[seed], seed=seed, **SIZES)
    run(batch, page_size, seed=seed, count=(3, 1)[seed], out_dtype=(BF16, FP16)[seed], **asked)


@pytest.mark.parametrize(("heads", "q_len"), [(64, 1), (48, 2)])
@pytest.mark.parametrize(("count", "kv_lens"), [(4, [1000]), (7, [700, 2, 64, 900]), (2, [0, 129]), (29, [500, 100])])
def test_shares(heads: int, q_len: int, count: int, kv_lens: list[int]) -> None:
    batch = random_batch([q_len] * len(kv_lens), kv_lens, heads=heads, **SIZES)
    run(batch, count=count, bmm2_scale=0.5)


@pytest.mark.parametrize("tile", [TILE, TILE._replace(stages=3), TILE._replace(keys=128)], ids=str)
def test_tiles_and_many_orders(tile: HopperTile) -> None:
    batch = random_batch([2, 1], [500, 3], heads=32, **SIZES)
    for seed in range(5):
        run(batch, tile=tile, seed=seed, count=2)


def of_a_choice(q_len: int = 1, heads: int = 64, page_size: int = 64, **sizes: Any) -> PagedAttention:
    """An MLA problem of DeepSeek-V3's entries."""
    batch = random_batch([q_len], [200], heads=heads, **{"rank": 512, "rope": 64} | sizes)
    return MLADecodeCall(**arguments_of("cpu", batch, page_size)).problem()


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "triton_interprets", lambda: False)
    monkeypatch.setattr(hopper, "capability_of", lambda _device: (9, 0))
    tile = hopper.MLA_TILES[512, 64]
    for changes in (
        {},
        {"heads": 16, "q_len": 4},
        {"heads": 128},
        {"page_size": 16},
        {"page_size": 128},
        {"dtype": FP16},
    ):
        assert hopper.hopper_mla_tile(of_a_choice(**changes)) == tile, changes
    too_few = {"heads": hopper.LEAST_MLA_ROWS - 1}
    for changes in (too_few, {"page_size": 8}, {"kv_dtype": torch.float8_e4m3fn}, {"rank": 256}, {"rope": 32}):
        assert hopper.hopper_mla_tile(of_a_choice(**changes)) is None, changes
    misplaced = of_a_choice()
    pool = torch.zeros(misplaced.k_cache.numel() + 1, dtype=BF16)[1:].view(misplaced.k_cache.shape)
    assert hopper.hopper_mla_tile(replace(misplaced, k_cache=pool)) is None
    monkeypatch.setattr(hopper, "triton_interprets", lambda: True)
    assert hopper.hopper_mla_tile(of_a_choice()) is None
    monkeypatch.setattr(hopper, "triton_interprets", lambda: False)
    for other in ((8, 0), (10, 0), (12, 0), None):
        monkeypatch.setattr(hopper, "capability_of", lambda _device, other=other: other)
        assert hopper.hopper_mla_tile(of_a_choice()) is None
