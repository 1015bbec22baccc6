"""What is the paged kernel's own, in Triton's interpreter: layouts, masks, requests of two kinds, tiles by descriptor."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.calls import ContextCall
from lab.kernels.portable import hopper, merge, paged
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.rows import most_blocks
from lab.kernels.portable.tile_choices import choose_tile
from lab.kernels.portable.tiles import HopperTile, ProgramTile, tile_descriptor
from tests.cases import CONTEXT, DECODE
from tests.kernels.conftest import Split
from tests.kernels.held import BF16, E4M3, FP32
from tests.kernels.portable_calls import PortableKernel, arguments_of, batch_of, sinks_of, sizes_on_a_gpu

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles for this machine's GPU; test_portable_gpu.py runs it there"
)

DECODES, CONTEXTS = PortableKernel(DECODE), PortableKernel(CONTEXT)
# A merge finds the requests of its programs where that spares idle ones: wherever it may, and nowhere.
FINDS_ROWS = pytest.mark.parametrize(
    "most_idle", [0, math.inf], ids=["a merge that finds its rows", "a merge of units"]
)


def posed(q_lens: list[int], kv_lens: list[int], **changes: Any) -> Any:
    """The problem of a context call over pages of 64."""
    return ContextCall(**CONTEXTS.pose(q_lens, kv_lens, 64, **changes)).problem()


# Scales that other kernels do not have.


@pytest.mark.parametrize("q_len", [1, 10], ids=["pairs", "elements"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e34])
def test_bf16_queries_beyond_float16_over_e4m3(q_len: int, size: float) -> None:
    """Rows of very different sizes; the scale brings the largest back to common logits."""
    batch = batch_of(DECODE, [q_len] * 2, [70, 33], heads=(8, 1), kv_dtype=E4M3)
    sizes = torch.tensor([1.0, 1e-3, 0.0, 0.5]).repeat(2).view(1, 8, 1)
    queries = [(rows * size * sizes).to(BF16) for rows in batch.queries]
    DECODES.hold(arguments_of(DECODE, replace(batch, queries=queries), bmm1_scale=0.125 / size))


# Blocks of rows, and merges.


def test_several_blocks_of_rows() -> None:
    """150 packed rows in blocks of 128, each with its own span of keys; and ragged ones, where some blocks have no row."""
    for changes in ({}, {"window_left": 9, "sinks": sinks_of(2)}):
        CONTEXTS.right([75, 2], [80, 90], 64, **changes)
    CONTEXTS.right([1, 70, 20], [150, 300, 20], 64, heads=(4, 1), out_dtype=FP32)


@FINDS_ROWS
def test_ragged_decode(split: Split, most_idle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MOST_IDLE", most_idle)
    for count in (1, 2, 13):  # 13 shares cut the longest request
        split(count)
        DECODES.right([1, 0, 6, 2], [700, 3, 6, 1], heads=(4, 2), window_left=620)


@pytest.mark.parametrize(("programs", "block"), [(1024, (1, 32, 64)), (24, (8, 64, 1)), (3, (16, 64, 1))])
def test_merges_of_few_rows_and_of_many(
    split: Split, programs: int, block: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a merge's program follow from how many there are; here the same rows are few and many. Most are cut."""
    monkeypatch.setattr(merge, "MERGE_PROGRAMS", programs)
    assert merge.merge_block(3 * 5 * 8, 64) == block
    split(2)
    DECODES.right([5] * 3, [700, 90, 5], heads=(8, 2), ragged=True, sinks=sinks_of(8))
    DECODES.right([5] * 3, [700, 90, 5], heads=(8, 2), window_left=620)


def test_a_request_of_more_pieces_than_a_merge_has_lanes(split: Split) -> None:
    split(shares=Shares(80))
    assert merge.merge_block(1, 64) == (1, 32, 64)
    DECODES.right([1], [70 * 64 - 9], 64, heads=1)  # a piece is a tile of 64 keys


# Requests of two kinds.


@pytest.mark.parametrize(("share_count", "most_idle"), [(None, 0), (1, math.inf), (29, 0), (29, math.inf)])
def test_prompts_beside_decodes(
    monkeypatch: pytest.MonkeyPatch, split: Split, share_count: int | None, most_idle: float
) -> None:
    """Requests of 16 rows are of the first kind, of 17 of the second; each kind with blocks of rows, one share, or many."""
    split(shares=None if share_count is None else Shares(share_count))
    monkeypatch.setattr(merge, "MOST_IDLE", most_idle)
    lengths = [1, 16, 140, 17, 0, 8], [300, 60, 150, 70, 33, 7]
    assert paged.few_tokens(posed(*lengths, heads=(2, 2))) == 16
    CONTEXTS.right(*lengths, 64, heads=(2, 2), window_left=70, sinks=sinks_of(2))


@pytest.mark.parametrize(
    ("q_lens", "heads", "kv_dtype", "few"),
    [
        ([2048, *[1] * 63], (32, 8), BF16, 4),  # 16 rows
        ([2048, *[1] * 63], (64, 8), BF16, 2),
        ([2048, *[4] * 63], (32, 8), BF16, 4),
        ([2048, *[4] * 63], (64, 8), BF16, 4),  # 32 rows
        ([2048, 1024, 4, 1], (32, 8), E4M3, 16),  # the mean of the others fits no tile: 64 rows
        ([2048, 2048, 1], (32, 8), BF16, 4),
        ([512] * 8, (32, 8), BF16, None),
        ([512], (32, 8), BF16, None),
        ([32, 1, 1], (32, 8), BF16, None),  # one tile of 128 rows holds each
        ([33, 1, 1], (32, 8), BF16, 4),
    ],
)
def test_requests_are_of_two_kinds_where_some_fill_several_blocks(
    q_lens: list[int], heads: tuple[int, int], kv_dtype: torch.dtype, few: int | None
) -> None:
    problem = posed(q_lens, q_lens, heads=heads, kv_dtype=kv_dtype)
    assert paged.few_tokens(problem) == few
    if few is None:
        return
    # The grid of the second kind has room for each composition of rows: for this one, and for requests as short as can be.
    for tile_rows in (1, 16, 64, 128):
        group, blocks = heads[0] // heads[1], most_blocks(problem, tile_rows, few + 1)
        shortest = min(len(q_lens), sum(q_lens) // (few + 1))
        assert blocks >= sum(-(-q_len * group // tile_rows) for q_len in q_lens if q_len > few)
        assert blocks >= shortest * -(-(few + 1) * group // tile_rows)


def test_a_merge_beside_decodes_has_few_idle_programs(split: Split) -> None:
    """63 decodes have a row each where the prompt has 512: programs for as many rows of each would nearly all be idle."""
    split(shares=Shares(29))
    problem = posed([512, *[1] * 63], [600] * 64, heads=(8, 2))
    launch = paged._launches(problem, (torch.empty_like(problem.query), None))[-1]
    assert math.prod(launch._grid) * merge.MOST_MERGED_ROWS <= 2 * 512 * 8


def test_decodes_leave_room_for_a_prompt() -> None:
    """Half of the programs that run at a time, or what a small prompt leaves; all where its programs fill a multiprocessor."""
    small = ProgramTile(64, 64, num_warps=4, num_stages=3, per_multiprocessor=2)
    problem = SimpleNamespace(num_rows=2111, group=4, num_kv_heads=8)
    assert paged.shares_of_first(problem, Shares(264), small).count == 132
    problem.num_rows = 191  # 12 blocks for each of 8 heads
    assert paged.shares_of_first(problem, Shares(264), small).count == 264 - 96
    assert paged.shares_of_first(problem, Shares(264), small._replace(per_multiprocessor=1)).count == 264
    assert paged.shares_of_first(problem, Shares(264), HopperTile(64, 64, 3, per_multiprocessor=3)).count == 264
    assert paged.shares_of_first(problem, Shares(1), small).count == 1


@pytest.mark.parametrize(
    ("q_len", "kv_len", "window_left", "shared"),
    [
        *[
            (1, 4096, -1, True),
            (8, 4096, -1, True),
            (512, 32_768, -1, True),
            (4096, 4096, -1, False),
            (64, 64, -1, True),
        ],
        *[(1, 4096, 1023, True), (2048, 32_768, 127, False), (2048, 32_768, 8191, True), (64, 64, 127, True)],
    ],
)
def test_keys_are_shared_out_unless_rows_fill_the_gpu(
    h200: None, q_len: int, kv_len: int, window_left: int, shared: bool
) -> None:
    """Of one request with 32/8 heads; a short prompt has too few blocks, and keys before a window are not counted."""
    tile = choose_tile(4 * q_len, 128, 2, (9, 0))
    problem = sizes_on_a_gpu(1, q_len, kv_len, window_left=window_left)
    shares = paged.shares_of(problem, tile, -(-4 * q_len // tile.rows))
    assert (shares is not None) == shared


@pytest.mark.parametrize(("head_dim", "most"), [(64, 2048), (128, 512)])
def test_windows_of_few_keys_have_a_tile_of_their_own(
    h200: None, monkeypatch: pytest.MonkeyPatch, head_dim: int, most: int
) -> None:
    tiles = hopper.TILES[head_dim]
    monkeypatch.setattr(paged, "hopper_tiles", lambda _: tiles)
    for window_left, tile in ((0, tiles.windows), (most - 1, tiles.windows), (most, tiles.blocks), (-1, tiles.blocks)):
        problem = sizes_on_a_gpu(8, 4096, 4096, head_dim=head_dim, window_left=window_left)
        assert paged._tile_and_shares(problem, False) == (tile, None)


# Where K and V lie.


@pytest.mark.parametrize("odd", ["token stride", "start"])
@pytest.mark.parametrize("moved", [0, 1], ids=["keys", "values"])
def test_e4m3_elements_at_odd_addresses(monkeypatch: pytest.MonkeyPatch, moved: int, odd: str) -> None:
    """Pairs of their bytes cannot be read there: the bits are those of elements read one by one."""
    arguments = DECODES.pose([2], [40], heads=(4, 1), kv_dtype=E4M3)
    with monkeypatch.context() as without_pairs:
        without_pairs.setattr(paged, "paired", lambda caches, tile: caches)
        expected = DECODES.run(arguments)[0].clone()
    caches = list(arguments["kv_cache"])
    width, first = (65, 0) if odd == "token stride" else (66, 1)
    cache = torch.zeros(*caches[moved].shape[:3], width, dtype=E4M3)[..., first : first + 64]
    caches[moved] = cache.copy_(caches[moved])
    assert DECODES.run(arguments | {"kv_cache": tuple(caches)})[0].equal(expected)


# Tiles that the copy engine loads.


def by_descriptor(cache: Tensor, tile: ProgramTile) -> bool:
    return tile_descriptor(cache, tile, cache.shape[3]) is not None


@pytest.mark.parametrize(
    ("kernel", "page_size", "layout", "kv_dtype", "described"),
    [
        (DECODES, 64, "HND", BF16, True),
        (CONTEXTS, 128, "NHD", BF16, True),
        (CONTEXTS, 64, "HND", E4M3, False),
        (DECODES, 16, "HND", BF16, False),
    ],
)
def test_tiles_that_the_copy_engine_loads(
    monkeypatch: pytest.MonkeyPatch,
    kernel: PortableKernel,
    page_size: int,
    layout: str,
    kv_dtype: torch.dtype,
    described: bool,
) -> None:
    """128 rows: a prefix whose tiles need no mask, and lengths that end in a tile."""
    seen = []
    monkeypatch.setattr(paged, "tile_descriptor", lambda *asked: seen.append(asked) or tile_descriptor(*asked))
    kernel.right([16, 16], [300, 150], page_size, heads=(16, 2), kv_dtype=kv_dtype, kv_layout=layout)
    assert [by_descriptor(cache, tile) for cache, tile, _ in seen] == [described] * 2


def test_what_the_copy_engine_cannot_load_is_not_described() -> None:
    tile = ProgramTile(128, 64, num_warps=8, num_stages=3, by_descriptor=True)
    pool = torch.zeros(4, 2, 64, 128, dtype=BF16)
    assert by_descriptor(pool, tile)
    assert by_descriptor(pool.transpose(1, 2).contiguous().transpose(1, 2), tile)
    assert not by_descriptor(pool, tile._replace(by_descriptor=False))
    assert not by_descriptor(pool[:, :, :32], tile)  # pages shorter than a tile
    eight_bytes_off = pool.flatten()[4:-124].view(-1)[: 3 * 2 * 64 * 128].view(3, 2, 64, 128)
    assert not by_descriptor(eight_bytes_off, tile)
    assert not by_descriptor(torch.zeros(4, 2, 64, 132, dtype=BF16)[..., :128], tile)  # tokens 264 bytes apart
    assert not by_descriptor(pool.transpose(2, 3), tile._replace(keys=32))  # elements of a vector apart
