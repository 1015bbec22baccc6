"""The portable kernel on small batches in Triton's interpreter: one launch, in which the last program to arrive merges."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from lab.kernels import portable
from lab.kernels.portable import key_shares, paged, partial_results
from lab.kernels.portable.hopper import TILES
from lab.kernels.portable.partial_results import GROUPED_PIECES, PartialResults
from lab.kernels.portable.tile_choices import choose_tile
from tests.cases import DECODE, Arguments
from tests.kernels.conftest import Split
from tests.kernels.held import FP32
from tests.kernels.portable_calls import PortableKernel, sinks_of, sizes_on_a_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles for this machine's GPU; test_small_batches_gpu.py runs it there"
)

Cut, RunIn = Callable[..., list[PartialResults]], Callable[[str], None]
DECODES = PortableKernel(DECODE)
ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "in order": list,
    "the last program first": lambda programs: programs[::-1],
    "in any order": lambda programs: random.Random(7).sample(programs, len(programs)),
}


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch, split: Split) -> Cut:
    """Share the keys of small batches out among so many programs; returns a list of what each call then allocates."""
    allocated: list[PartialResults] = []

    def new_partials(*arguments: Any) -> PartialResults | None:
        partials = partial_results.new_partials(*arguments)
        allocated.extend(() if partials is None else (partials,))
        return partials

    def shared(count: int, least_places: int = 1, merges_at_once: bool = True) -> list[PartialResults]:
        split(shares=key_shares.Shares(count, least_places, key_shares.WARP_REQUESTS.value, merges_at_once))
        return allocated

    monkeypatch.setattr(paged, "new_partials", new_partials)
    return shared


@pytest.fixture
def run_in(monkeypatch: pytest.MonkeyPatch) -> RunIn:
    """Run the programs of a launch in another order: shares are the second dimension of the grid."""
    set_grid_idx = type(interpreter_builder).set_grid_idx

    def use(order: str) -> None:
        def reordered(builder: Any, x: int, y: int, z: int) -> None:
            set_grid_idx(builder, x, ORDERS[order](list(range(builder.grid_dim[1])))[y], z)

        monkeypatch.setattr(type(interpreter_builder), "set_grid_idx", reordered)

    return use


def arguments_of(kv_lens: list[int], q_len: int = 1, heads: tuple[int, int] = (4, 2), **changes: Any) -> Arguments:
    new = {"out": None, "lse": None, "out_dtype": FP32}
    return DECODES.pose([q_len] * len(kv_lens), kv_lens, 64, heads=heads, **new | changes)


def launch(arguments: Arguments) -> tuple[Tensor, Tensor]:
    out, lse = portable.trtllm_batch_decode_with_kv_cache(**arguments)
    return out, lse


# Equal lengths and unequal ones, with and without equal parts, fewer and more tiles than programs; the sixth needs two levels.
CUT = [
    ([512], 8, 1),
    ([512, 512], 16, 2),
    ([512, 300, 40], 16, 1),
    ([0, 3, 900, 130], 7, 1),
    ([64] * 3, 50, 1),
    ([64 * (2 * GROUPED_PIECES.value + 3)], 2 * (2 * GROUPED_PIECES.value + 3), 1),
]


@pytest.mark.parametrize(
    ("number", "kv_lens", "count", "least_places"), [(n, *row) for n, row in enumerate(CUT)], ids=str
)
@pytest.mark.parametrize("merges_at_once", [True, False])
def test_every_key_counts_once(
    cut: Cut, number: int, kv_lens: list[int], count: int, least_places: int, merges_at_once: bool
) -> None:
    allocated, q_len = cut(count, least_places, merges_at_once), (1, 4)[(number + merges_at_once) % 2]
    DECODES.right([q_len] * len(kv_lens), kv_lens, 64, heads=(4, 2), out_dtype=FP32, sinks=sinks_of(4))
    assert not (merges_at_once and allocated[0].of_units.any())


@pytest.mark.parametrize("window_left", [0, 30, 200])
def test_windows(cut: Cut, window_left: int) -> None:
    cut(12)
    DECODES.right([2] * 3, [500, 260, 3], 64, heads=(4, 2), out_dtype=FP32, window_left=window_left)


@pytest.mark.parametrize(("kv_lens", "count", "least_places"), [CUT[2], CUT[5]], ids=str)
def test_the_order_of_programs_does_not_show(
    cut: Cut, run_in: RunIn, kv_lens: list[int], count: int, least_places: int
) -> None:
    """Whoever arrives last, the first program of a unit among them: the bits are the same."""
    allocated = cut(count, least_places)
    arguments = arguments_of(kv_lens)
    out, lse = launch(arguments)
    for order in ORDERS:
        run_in(order)
        again = launch(arguments)
        assert again[0].equal(out), order
        assert again[1].equal(lse), order
        assert not allocated[-1].of_units.any(), order


def test_a_prepared_call_again_and_again(cut: Cut, run_in: RunIn) -> None:
    """The counters are zero between calls, whatever lengths the calls had."""
    allocated = cut(12)
    arguments = arguments_of([512, 512])
    call = portable.prepare_trtllm_batch_decode_with_kv_cache(**arguments)
    for order, kv_lens in zip(ORDERS, ([512, 512], [512, 1], [200, 500]), strict=True):
        run_in(order)
        arguments["seq_lens"].copy_(torch.tensor(kv_lens))
        out, lse = call()
        assert not allocated[0].of_units.any()
        expected = launch(arguments)
        assert out.equal(expected[0])
        assert lse.equal(expected[1])


@pytest.mark.parametrize(
    ("batch_size", "q_len", "head_dim", "lanes", "at_once"),
    [
        (1, 1, 128, 32, True),  # 16 pieces of 8 rows
        (1, 4, 128, 32, False),  # and of 32
        (8, 4, 128, 32, True),  # 8 pieces
        (32, 4, 128, 32, True),
        (33, 1, 128, 128, True),
        (128, 1, 128, 128, True),
        (129, 1, 128, 0, True),
        (1, 8, 128, 0, False),  # 64 rows
        (16, 1, 256, 32, True),
        (16, 4, 256, 32, False),  # pieces of 32 rows of 256
    ],
)
def test_what_is_small(h200: None, batch_size: int, q_len: int, head_dim: int, lanes: int, at_once: bool) -> None:
    """Lengths that a program reads at once, and whether the last program merges; 8 query heads share a K/V head."""
    tile = choose_tile(8 * q_len, head_dim, 2, (9, 0))
    problem = sizes_on_a_gpu(batch_size, q_len, 4096, num_kv_heads=4, head_dim=head_dim)
    least_places = paged.SMALL_SHARE_KEYS // tile.keys if lanes else 1
    assert paged.shares_of(problem, tile, 1) == key_shares.Shares(264, least_places, lanes, at_once)
    assert paged.shares_of(problem, tile, 1, of_kind=True) == key_shares.Shares(264)


def test_few_keys_are_not_shared_out(h200: None) -> None:
    """One program reads 256 keys, if a window, with the rows of a verify, or the largest length says that there are no more."""
    tile = choose_tile(32, 128, 2, (9, 0))
    problems = {window: sizes_on_a_gpu(64, 4, 4096, num_kv_heads=4, window_left=window) for window in (0, 252, 253, -1)}
    shared = {window: paged.shares_of(problem, tile, 1) is not None for window, problem in problems.items()}
    assert shared == {0: False, 252: False, 253: True, -1: True}
    assert paged.shares_of(problems[0], tile, 1, of_kind=True) is not None
    for most, window in ((256, -1), (256, 4096), (257, 252)):
        assert paged.shares_of(sizes_on_a_gpu(64, 4, most, num_kv_heads=4, window_left=window), tile, 1) is None
    assert paged.shares_of(sizes_on_a_gpu(64, 4, 257, num_kv_heads=4), tile, 1) is not None
    for packed_rows, shared in ((64, False), (128, True)):
        problem = sizes_on_a_gpu(1, packed_rows // 8, 256, num_kv_heads=4)
        assert (paged.shares_of(problem, choose_tile(packed_rows, 128, 2, (9, 0)), 1) is not None) == shared
    assert TILES[64].blocks.rows == 64
    assert paged.shares_of(sizes_on_a_gpu(1, 8, 256), TILES[64].blocks, 1) is not None  # of a Gluon kernel


@pytest.mark.parametrize(
    ("requests", "q_len", "window_left", "tile"),
    [(66, 1, -1, (16, 64)), (67, 1, -1, (16, 32)), (66, 1, 0, (16, 32)), (1, 300, -1, (64, 64))],
)
def test_tiles_are_smaller_in_windows_prefills_and_if_not_all_programs_of_few_keys_run_at_once(
    h200: None, monkeypatch: pytest.MonkeyPatch, requests: int, q_len: int, window_left: int, tile: tuple[int, int]
) -> None:
    """An H200 runs 264 programs at once, two on a multiprocessor; a request has one for each of 4 K/V heads."""
    monkeypatch.setattr(paged, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(paged, "hopper_tiles", lambda problem: None)
    problem = sizes_on_a_gpu(requests, q_len, 256, num_kv_heads=4 if q_len == 1 else 1, window_left=window_left)
    problem.k_cache = problem.v_cache = torch.empty(1, problem.num_kv_heads, 64, 128, dtype=torch.bfloat16)
    chosen, shares = paged._tile_and_shares(problem, False)
    assert (shares, chosen[:2]) == (None, tile)


@pytest.mark.parametrize("q_len", [1, 32])
def test_requests_beyond_a_grid_are_shared_out(h200: None, q_len: int) -> None:
    """A program for each would lie on an axis that CUDA ends at 65,535: a window of few keys, and of few keys per row."""
    tile = choose_tile(4 * q_len, 128, 2, (9, 0))
    for requests, heads, shared in ((65_535, 1, False), (65_536, 1, True), (8191, 8, False), (8192, 8, True)):
        problem = sizes_on_a_gpu(requests, q_len, 4096, window_left=64 if q_len > 1 else 127)
        problem.is_block_sparse = heads > 1
        assert (paged.shares_of(problem, tile, 1) is not None) == shared
    assert paged.shares_of(sizes_on_a_gpu(65_536, 32, 4096, window_left=64), tile, 1, of_kind=True) is None
