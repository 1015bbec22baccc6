"""The Gluon kernel in a simulator of its partitions and barriers, against the float64 references, per (row, head)."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.portable import hopper
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from tests.cases import context_arguments, decode_arguments, random_batch
from tests.kernels.simulated_gluon import simulate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gluon_gpu.py runs the kernel itself")

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SMALL = HopperTile(128, 64, stages=2, start_keys=128)
ONE_CONSUMER = HopperTile(64, 64, stages=2, start_keys=128, per_multiprocessor=2)


def run(
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    decodes: bool,
    shares: Shares | None = None,
    tile: HopperTile = SMALL,
    seed: int = 0,
    unwaited: str | None = None,
    least_q_len: int | None = None,
) -> None:
    """Make the call in the simulator, on 3 multiprocessors, and hold every output vector and LSE to the reference's.

    With `least_q_len`, those of requests with so many rows; the others' stay as they were.
    """
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _device: 3)
    problem = (DecodeCall if decodes else ContextCall)(**arguments).problem()
    out, lse = problem.results()
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    attention, *merge = hopper.hopper_launches(problem, (out, lse), tile, shares, least_q_len)
    simulate(attention, seed, unwaited)
    for launch in merge:
        launch()
    name = "trtllm_batch_decode_with_kv_cache" if decodes else "trtllm_batch_context_with_kv_cache"
    truth, truth_lse = getattr(references, name)(**arguments | {"out": None, "out_dtype": torch.float64, "lse": None})
    written = torch.ones(len(out), dtype=torch.bool)
    if least_q_len is not None:
        q_lens = arguments["cum_seq_lens_q"].diff()
        written = (q_lens >= least_q_len).repeat_interleave(q_lens)
    assert out[~written].isnan().all()
    assert lse[~written].isnan().all()
    error = references.relative_l2(out[written], truth[written])
    assert float(error.max()) < 2.0**-7, error
    torch.testing.assert_close(lse[written].double(), truth_lse[written].double(), rtol=1e-5, atol=1e-5)


NAN = float("nan")
POISONED = {"poison": NAN, "foreign_id": 10**6}
# (query rows, keys) of each request, heads, and what the call asks for beside them
CASES: dict[str, tuple[list[int], list[int], tuple[int, int], int, dict[str, Any]]] = {
    "one tile, not causal": ([128], [64], (1, 1), 64, {"causal": False}),
    "causal, several tiles": ([128], [200], (1, 1), 64, {}),
    "blocks of a prefill": ([100, 70], [100, 70], (4, 2), 64, {}),
    "ragged, without keys, without rows": ([40, 0, 7, 130], [300, 5, 0, 140], (6, 2), 32, {}),
    "more rows than keys": ([90], [40], (2, 1), 16, {}),
    "window": ([60, 33], [400, 190], (4, 2), 16, {"window_left": 70}),
    "small pages, separate tables, sinks": ([50], [333], (8, 4), 16, {"separate_tables": True, "sinks": 4}),
    "pages of two tiles": ([33], [450], (4, 1), 128, {"bmm1_scale": -0.3, "bmm2_scale": 0.5}),
    "no scale": ([33], [100], (4, 1), 64, {"bmm1_scale": 0.0}),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_blocks(case: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q_lens, kv_lens, heads, page_size, asked = CASES[case]
    asked = {"bmm1_scale": 0.2} | asked
    if "sinks" in asked:
        asked["sinks"] = torch.linspace(-1, 3, heads[0])
    batch = random_batch(q_lens, kv_lens, heads=heads, head_dim=64, dtype=(BF16, FP16)[seed], seed=seed)
    arguments = context_arguments(batch, page_size, **POISONED | {"out_dtype": (BF16, FP16)[seed]} | asked)
    run(arguments, monkeypatch, decodes=False, seed=seed)


@pytest.mark.parametrize("count", [None, 2])
def test_pages_before_a_window_are_nobodys(count: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be other requests' by now, and hold anything."""
    q_lens, kv_lens, page_size, window_left = [33, 20], [400, 190], 16, 70
    batch = random_batch(q_lens, kv_lens, heads=(8, 2), head_dim=64, dtype=BF16)
    arguments = context_arguments(batch, page_size, **POISONED, out_dtype=BF16, bmm1_scale=0.2, window_left=window_left)
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        dead = arguments["block_tables"][request, : (kv_len - q_len - window_left) // page_size]
        assert len(dead) % (SMALL.keys // page_size) > 0, "a tile has pages on both sides"
        for cache in arguments["kv_cache"]:
            cache[dead.long()] = NAN
    run(arguments, monkeypatch, decodes=False, shares=None if count is None else Shares(count))


@pytest.mark.parametrize("heads", [(8, 1), (16, 2)])
@pytest.mark.parametrize(("count", "kv_lens"), [(1, [300, 70]), (3, [1000]), (5, [700, 1, 64, 900]), (2, [0, 129])])
def test_shares(heads: tuple[int, int], count: int, kv_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([17] * len(kv_lens), kv_lens, heads=heads, head_dim=64)
    arguments = decode_arguments(batch, 64, **POISONED, out_dtype=BF16, bmm1_scale=0.2, bmm2_scale=0.5)
    run(arguments, monkeypatch, decodes=True, shares=Shares(count))


@pytest.mark.parametrize("count", [None, 1, 4])
@pytest.mark.parametrize("q_lens", [[1, 3, 140, 0, 2, 70, 5, 90], [130, 1, 1], [1, 2, 5]])
def test_requests_of_one_kind(count: int | None, q_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 5 rows or more, beside others: the first, the last, some in between; in blocks of rows, and in shares."""
    kv_lens = [q_len + 60 * (index % 3) for index, q_len in enumerate(q_lens)]
    batch = random_batch(q_lens, kv_lens, heads=(4, 2), head_dim=64)
    arguments = context_arguments(batch, 64, **POISONED, out_dtype=BF16, bmm1_scale=0.2)
    shares = None if count is None else Shares(count)
    run(arguments, monkeypatch, decodes=False, shares=shares, least_q_len=5)


@pytest.mark.parametrize(
    "tile",
    [HopperTile(128, 128, stages=2), HopperTile(128, 64, stages=3), HopperTile(128, 64, stages=2)],
    ids=str,
)
def test_tiles_and_many_orders(tile: HopperTile, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([70, 3], [500, 3], heads=(2, 1), head_dim=128)
    arguments = context_arguments(batch, 64, **POISONED, out_dtype=BF16, bmm1_scale=0.2)
    for seed in range(5):
        run(arguments, monkeypatch, decodes=False, tile=tile, seed=seed)


@pytest.mark.parametrize("tile", [ONE_CONSUMER, SMALL], ids=["one consumer", "two consumers"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_e4m3(head_dim: int, dtype: torch.dtype, tile: HopperTile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are converted between their copy and the products; queries of bf16 are scaled for products in float16."""
    batch = random_batch([16, 16], [333, 130], heads=(8, 2), head_dim=head_dim, dtype=dtype, kv_dtype=E4M3)
    asked = {"out_dtype": dtype, "bmm1_scale": 0.2, "bmm2_scale": 0.5}
    decode, context = (make(batch, 64, **POISONED, **asked) for make in (decode_arguments, context_arguments))
    decode["query"][:8] *= 2.0**20 if dtype == BF16 else 1.0
    for seed in range(3):
        run(decode, monkeypatch, decodes=True, shares=Shares(3), tile=tile, seed=seed)
        run(context, monkeypatch, decodes=False, tile=tile, seed=seed)


@pytest.mark.parametrize("barriers", ["k_full", "k_empty", "v_full", "v_empty"])
def test_barriers_that_nobody_waits_for_are_noticed(barriers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator finds what the barriers are for."""
    batch = random_batch([70], [500], heads=(2, 1), head_dim=64)
    arguments = context_arguments(batch, 64, **POISONED, out_dtype=BF16, bmm1_scale=0.2)
    failed = 0
    for seed in range(10):
        try:
            run(arguments, monkeypatch, decodes=False, seed=seed, unwaited=barriers)
        except AssertionError:
            failed += 1
    assert failed > 0


def of_a_choice(q_len: int = 16, **changes: Any) -> PagedAttention:
    """A decode problem of 8 query heads for one K/V head of 64."""
    options = {"head_dim": 64, "heads": (8, 1), "dtype": BF16, "kv_dtype": BF16}
    options |= {name: changes.pop(name) for name in tuple(changes) if name in options}
    page_size = changes.pop("page_size", 64)
    batch = random_batch([q_len], [200], **options)
    return DecodeCall(**decode_arguments(batch, page_size, **{"out_dtype": BF16} | changes)).problem()


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "triton_interprets", lambda: False)
    monkeypatch.setattr(hopper, "capability_of", lambda _device: (9, 0))
    for changes in ({}, {"q_len": 9}, {"page_size": 16}, {"page_size": 128}, {"dtype": FP16, "kv_dtype": FP16}):
        assert hopper.hopper_tiles(of_a_choice(**changes)) == hopper.TILES[64], changes
    assert hopper.hopper_tiles(of_a_choice(head_dim=128, kv_layout="NHD")) == hopper.TILES[128]
    for changes in ({}, {"q_len": 3}, {"dtype": FP16}):
        assert hopper.hopper_tiles(of_a_choice(**changes, kv_dtype=E4M3)) == hopper.E4M3_TILES[64], changes
    mask = torch.zeros(1, 16, 2, dtype=torch.uint16)
    for changes in ({"q_len": 8}, {"mask": mask}, {"q_len": 2, "kv_dtype": E4M3}, {"head_dim": 32}):
        assert hopper.hopper_tiles(of_a_choice(**changes)) is None, changes
    misplaced = of_a_choice()
    pool = torch.zeros(misplaced.k_cache.numel() + 1, dtype=BF16)[1:].view(misplaced.k_cache.shape)
    assert hopper.hopper_tiles(replace(misplaced, k_cache=pool)) is None
    monkeypatch.setattr(hopper, "triton_interprets", lambda: True)
    assert hopper.hopper_tiles(of_a_choice()) is None
    monkeypatch.setattr(hopper, "triton_interprets", lambda: False)
    for other in ((8, 0), (10, 0), (12, 0), None):
        monkeypatch.setattr(hopper, "capability_of", lambda _device, other=other: other)
        assert hopper.hopper_tiles(of_a_choice()) is None
