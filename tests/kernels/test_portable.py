"""The portable kernel in Triton's interpreter, against the float64 references, per (row, head)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import references
from lab.calls import ContextCall, DecodeCall
from lab.kernels import portable
from lab.kernels.portable import key_shares, merge, paged, partial_results
from lab.kernels.portable.tile_choices import choose_tile
from lab.kernels.portable.tiles import ProgramTile, tile_descriptor
from lab.kernels.support.portable import PORTABLE
from tests.cases import Batch, context_arguments, decode_arguments, pack_mask, random_batch
from tests.kernels.held import (
    BF16,
    E4M3,
    FLOAT32_SUMS,
    FP16,
    FP32,
    ROUNDOFF,
    Arguments,
    assert_as_right_as_the_control,
    assert_declined,
    sinks_of,
)

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles for this machine's GPU; test_portable_gpu.py runs it there"
)

DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
# A merge finds the requests of its programs where that spares idle ones: wherever it may, and nowhere.
FINDS_ROWS = pytest.mark.parametrize(
    "most_idle", [0, math.inf], ids=["a merge that finds its rows", "a merge of units"]
)


def arguments_of(function: str, batch: Batch, page_size: int, **changes: Any) -> Arguments:
    """The call that poses the batch, its output in bf16 unless changed."""
    make = decode_arguments if function == DECODE else context_arguments
    return make(batch, page_size, **{"out_dtype": BF16} | changes)


def assert_right(function: str, batch: Batch, page_size: int = 16, **changes: Any) -> tuple[Tensor, Tensor]:
    """Run the call, and hold every output vector and LSE to the reference's; what it does not write is NaN."""
    arguments = arguments_of(function, batch, page_size, **changes)
    query = arguments["query"]
    unwritten = {
        "out": torch.full(query.shape, math.nan, dtype=arguments["out_dtype"]),
        "lse": torch.full(query.shape[:2], math.nan),
    }
    arguments |= unwritten | {name: changes[name] for name in unwritten if name in changes}
    out, lse = getattr(portable, function)(**arguments)
    assert_as_right_as_the_control(arguments, out, lse)
    return out, lse


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give each block of rows a program for all its keys, or share these out among so many that most requests are cut."""
    return lambda count: monkeypatch.setattr(paged, "shares_of", lambda *_: shares_of(count))


def shares_of(count: int) -> key_shares.Shares | None:
    return key_shares.Shares(16 * count) if count > 1 else None


# Shapes and dtypes.


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_decode_at_page_and_tile_edges(page_size: int) -> None:
    lengths = {0, 1, page_size - 1, page_size, page_size + 1, 63, 64, 65, 127, 128, 129}
    batch = random_batch([1] * len(lengths), sorted(lengths), heads=(2, 1), head_dim=64, seed=page_size)
    assert_right(DECODE, batch, page_size, bmm1_scale=0.125)


@pytest.mark.parametrize("q_len", range(1, 9))
def test_verify(q_len: int) -> None:
    """Lengths from the rows' own up; a tile holds 16 packed rows, so that 3 heads of 8 tokens need two."""
    batch = random_batch([q_len] * 3, [q_len, 17, 64 + q_len], heads=(3, 1), head_dim=64, seed=q_len)
    assert_right(DECODE, batch, 16, bmm1_scale=0.125, sinks=sinks_of(3) if q_len % 2 else None)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1), (10, 2), (8, 1)], ids=lambda heads: f"{heads[0]}/{heads[1]}")
def test_groups(heads: tuple[int, int]) -> None:
    """Every query head has K/V and a sink of its own; 1, 2, 3, 5 and 8 of them share a K/V head."""
    batch = random_batch([2] * 2, [19, 40], heads=heads, head_dim=64)
    assert_right(DECODE, batch, 16, bmm1_scale=0.125, sinks=sinks_of(heads[0]))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "out_dtype"),
    [
        (BF16, BF16, BF16),
        (FP16, FP16, FP16),
        (BF16, E4M3, BF16),
        (FP16, E4M3, FP32),
        (E4M3, E4M3, BF16),
        (E4M3, E4M3, E4M3),
    ],
    ids=str,
)
def test_dtypes(head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    batch = random_batch([2] * 2, [35, 130], heads=(4, 2), head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    scales = {"bmm1_scale": head_dim**-0.5 * 0.7, "bmm2_scale": 1.3}
    assert_right(DECODE, batch, 32, out_dtype=out_dtype, **scales)


def test_e4m3_output_saturates(split: Callable[[int], None]) -> None:
    batch = random_batch([1] * 2, [40, 90], heads=(2, 1), head_dim=64)
    for count in (1, 2):
        split(count)
        arguments = arguments_of(DECODE, batch, 16, bmm2_scale=1000.0, out_dtype=E4M3)
        out, expected = (
            module.trtllm_batch_decode_with_kv_cache(**arguments)[0].float() for module in (portable, references)
        )
        saturated = expected.abs() == 448.0
        assert 0 < int(saturated.sum()) < saturated.numel()
        assert out[saturated].equal(expected[saturated])
        assert bool(out.isfinite().all())


@pytest.mark.parametrize("tensors", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_scales(split: Callable[[int], None], tensors: tuple[bool, bool], num_splits: int) -> None:
    """Unequal, as numbers and as tensors of one element of either rank."""
    split(num_splits)
    batch = random_batch([2] * 2, [33, 150], heads=(2, 1), head_dim=64, kv_dtype=E4M3)
    scales = {
        "bmm1_scale": torch.tensor(0.25) if tensors[0] else 0.25,
        "bmm2_scale": torch.tensor([0.6]) if tensors[1] else 0.6,
    }
    assert_right(DECODE, batch, 16, **scales)


def test_integer_and_base_2_scales() -> None:
    batch = random_batch([1], [33], heads=(2, 1), head_dim=64, magnitude=0.3)
    whole, _ = assert_right(DECODE, batch, bmm1_scale=1, bmm2_scale=2)
    numbers, _ = assert_right(DECODE, batch, bmm1_scale=1.0, bmm2_scale=2.0)
    assert whole.equal(numbers)
    arguments = arguments_of(DECODE, batch, 16, bmm1_scale=9.0, bmm1_scale_log2=torch.tensor([0.2]))
    out, _ = portable.trtllm_batch_decode_with_kv_cache(**arguments)
    truth, _ = references.trtllm_batch_decode_with_kv_cache(**arguments | {"out_dtype": torch.float64})
    assert float(references.relative_l2(out, truth).max()) <= 2 * ROUNDOFF[BF16]


def test_uint32_lengths() -> None:
    batch = random_batch([1] * 3, [16, 33, 5], heads=(2, 1), head_dim=64)
    assert_right(DECODE, batch, seq_lens=torch.tensor([16, 33, 5], dtype=torch.uint32))


# What a row sees.


@pytest.mark.parametrize("window_left", [0, 1, 15, 64, 1000])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window(window_left: int, with_sinks: bool) -> None:
    batch = random_batch([3] * 3, [3, 70, 140], heads=(2, 1), head_dim=64, seed=window_left)
    sinks = sinks_of(2) if with_sinks else None
    assert_right(DECODE, batch, 16, window_left=window_left, sinks=sinks, bmm1_scale=0.125)


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_sinks_count_once(split: Callable[[int], None], num_splits: int) -> None:
    split(num_splits)
    batch = random_batch([2] * 2, [5, 260], heads=(4, 2), head_dim=64)
    for sinks in (sinks_of(4), torch.tensor([-math.inf, 40.0, -40.0, 0.0])):
        assert_right(DECODE, batch, 16, sinks=sinks, bmm1_scale=0.125)


def test_tree_mask() -> None:
    """Every row sees its own set of draft tokens, another in each request, and of 20 some bits lie in a second word."""
    generator = torch.Generator().manual_seed(0)
    masks = (torch.rand(2, 20, 20, generator=generator) < 0.4).tolist()
    batch = random_batch([20] * 2, [20, 75], heads=(2, 1), head_dim=64)
    assert_right(DECODE, batch, 16, mask=pack_mask(masks), bmm1_scale=0.125)
    assert_right(DECODE, batch, 16, mask=pack_mask(masks), bmm1_scale=0.125, window_left=30)


def test_a_causal_mask_is_no_mask(split: Callable[[int], None]) -> None:
    batch = random_batch([5] * 2, [5, 70], heads=(2, 1), head_dim=64)
    causal = [[[column <= row for column in range(5)] for row in range(5)]] * 2
    for count in (1, 2):
        split(count)
        with_mask = portable.trtllm_batch_decode_with_kv_cache(
            **arguments_of(DECODE, batch, 16, mask=pack_mask(causal))
        )
        without = portable.trtllm_batch_decode_with_kv_cache(**arguments_of(DECODE, batch, 16))
        assert with_mask[0].equal(without[0])
        assert with_mask[1].equal(without[1])


def test_rows_without_a_key_are_zero(split: Callable[[int], None]) -> None:
    """The first rows of a request with fewer keys than rows; and those of one without keys."""
    batch = random_batch([4] * 3, [0, 2, 70], heads=(2, 1), head_dim=64)
    for count in (1, 3):
        split(count)
        out, lse = assert_right(DECODE, batch, 16)
        assert not out[:6].any()
        assert bool((lse[:6] == -math.inf).all())
        out, lse = assert_right(DECODE, batch, 16, sinks=sinks_of(2))
        assert not out[:6].any()
        torch.testing.assert_close(lse[:6], (sinks_of(2) / math.log(2)).expand(6, 2))


@pytest.mark.parametrize("causal", [True, False])
def test_context(causal: bool) -> None:
    """Requests of 0 and 1 rows, a whole prompt, and a suffix; 66 packed rows span two tiles of 64 and more."""
    batch = random_batch([0, 1, 33, 7, 0], [5, 60, 33, 75, 0], heads=(2, 1), head_dim=64)
    assert_right(CONTEXT, batch, 16, causal=causal, bmm1_scale=0.125)


def test_context_of_several_row_blocks() -> None:
    """150 packed rows in blocks of 128, each with its own span of keys."""
    batch = random_batch([75, 2], [80, 90], heads=(2, 1), head_dim=64)
    assert_right(CONTEXT, batch, 64, bmm1_scale=0.125)
    assert_right(CONTEXT, batch, 64, bmm1_scale=0.125, window_left=9, sinks=sinks_of(2))


@FINDS_ROWS
def test_ragged_decode(split: Callable[[int], None], most_idle: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MOST_IDLE", most_idle)
    batch = random_batch([1, 0, 6, 2], [700, 3, 6, 1], heads=(4, 2), head_dim=64)
    for count in (1, 2, 13):  # 13 shares cut the longest request
        split(count)
        assert_right(DECODE, batch, 16, ragged=True, window_left=620)


@pytest.mark.parametrize(("programs", "block"), [(1024, (1, 32, 64)), (24, (8, 64, 1)), (3, (16, 64, 1))])
def test_merges_of_few_rows_and_of_many(
    split: Callable[[int], None], programs: int, block: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a merge's program follow from how many there are; here the same rows are few and many. Most are cut."""
    monkeypatch.setattr(merge, "MERGE_PROGRAMS", programs)
    batch = random_batch([5, 5, 5], [700, 90, 5], heads=(8, 2), head_dim=64)
    assert merge.merge_block(3 * 5 * 8, 64) == block
    split(2)
    assert_right(DECODE, batch, 16, ragged=True, sinks=sinks_of(8))
    assert_right(DECODE, batch, 16, window_left=620)


def test_a_request_of_more_pieces_than_a_merge_has_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "shares_of", lambda *_: key_shares.Shares(80))
    batch = random_batch([1], [70 * 64 - 9], heads=(1, 1), head_dim=64)  # a piece is a tile of 64 keys
    assert merge.merge_block(1, 64) == (1, 32, 64)
    assert_right(DECODE, batch, 64)


# Requests of two kinds.


@FINDS_ROWS
@pytest.mark.parametrize("share_count", [None, 1, 29])
def test_prompts_beside_decodes(monkeypatch: pytest.MonkeyPatch, share_count: int | None, most_idle: float) -> None:
    """Requests of 16 rows are of the first kind, of 17 of the second; each kind with blocks of rows, one share, or many.

    The memory of partial results is full of NaN and of wrong shares, which the merge of one kind must not take for the other's.
    """
    shares = None if share_count is None else key_shares.Shares(share_count)
    monkeypatch.setattr(paged, "shares_of", lambda *_: shares)
    monkeypatch.setattr(merge, "MOST_IDLE", most_idle)

    new_scratch = partial_results.new_scratch

    def full_of_nan(*arguments: Any) -> list[Tensor]:
        parts = new_scratch(*arguments)
        return [part.fill_(math.nan if part.is_floating_point() else share_count or 0) for part in parts]

    batch = random_batch([1, 16, 140, 17, 0, 8], [300, 60, 150, 70, 33, 7], heads=(2, 2), head_dim=64)
    problem = ContextCall(**arguments_of(CONTEXT, batch, 64)).problem()
    assert paged.few_tokens(problem) == 16
    with monkeypatch.context() as patch:
        patch.setattr(partial_results, "new_scratch", full_of_nan)
        assert_right(CONTEXT, batch, 64, bmm1_scale=0.125, window_left=70, sinks=sinks_of(2))


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
    batch = random_batch(q_lens, q_lens, heads=heads, head_dim=64, kv_dtype=kv_dtype)
    problem = ContextCall(**arguments_of(CONTEXT, batch, 64)).problem()
    assert paged.few_tokens(problem) == few
    if few is None:
        return
    # The grid of the second kind has room for each composition of rows: for this one, and for requests as short as can be.
    for tile_rows in (1, 16, 64, 128):
        tile = ProgramTile(tile_rows, 64, num_warps=4, num_stages=3)
        q_blocks = -(-max(q_lens) * (group := heads[0] // heads[1]) // tile_rows)
        blocks = paged._grid(problem, q_blocks, tile, None, few + 1)[0]
        shortest = min(len(q_lens), sum(q_lens) // (few + 1))
        assert blocks >= sum(-(-q_len * group // tile_rows) for q_len in q_lens if q_len > few)
        assert blocks >= shortest * -(-(few + 1) * group // tile_rows)


def test_a_merge_beside_decodes_has_few_idle_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """63 decodes have a row each where the prompt has 512: programs for as many rows of each would nearly all be idle."""
    monkeypatch.setattr(paged, "shares_of", lambda *_: key_shares.Shares(29))
    batch = random_batch([512, *[1] * 63], [600] * 64, heads=(8, 2), head_dim=64)
    problem = ContextCall(**arguments_of(CONTEXT, batch, 64)).problem()
    launch = paged._launches(problem, (torch.empty_like(problem.query), None))[-1]
    assert math.prod(launch._grid) * merge.MOST_MERGED_ROWS <= 2 * 512 * 8


def test_decodes_leave_room_for_a_prompt() -> None:
    """Half of the programs that run at a time, or what a small prompt leaves; all where its programs fill a multiprocessor."""
    small = ProgramTile(64, 64, num_warps=4, num_stages=3, per_multiprocessor=2)
    problem = SimpleNamespace(num_rows=2111, num_qo_heads=32, num_kv_heads=8)
    assert paged.shares_beside(problem, key_shares.Shares(264), small).count == 132
    problem.num_rows = 191  # 12 blocks for each of 8 heads
    assert paged.shares_beside(problem, key_shares.Shares(264), small).count == 264 - 96
    assert paged.shares_beside(problem, key_shares.Shares(264), small._replace(per_multiprocessor=1)).count == 264
    assert paged.shares_beside(problem, key_shares.Shares(1), small).count == 1


# Where K and V lie.


def layouts(batch: Batch, **changes: Any) -> dict[str, Arguments]:
    base = arguments_of(DECODE, batch, 16, **changes)
    k, v = base["kv_cache"]
    nhd = tuple(cache.transpose(1, 2).contiguous() for cache in (k, v))
    wide = torch.full((k.shape[0], 2, *k.shape[1:3], k.shape[3] + 8), math.nan).to(k.dtype)
    wide[:, 0, ..., : k.shape[3]], wide[:, 1, ..., : k.shape[3]] = k, v
    outer = torch.stack((k, v)).permute(3, 2, 0, 1, 4).contiguous().permute(2, 3, 1, 0, 4)
    return {
        "HND": base,
        "NHD": base | {"kv_cache": nhd, "kv_layout": "NHD"},
        "views of NHD": base | {"kv_cache": tuple(cache.transpose(1, 2) for cache in nhd)},
        "stacked HND": base | {"kv_cache": torch.stack((k, v), 1)},
        "stacked NHD": base | {"kv_cache": torch.stack(nhd, 1), "kv_layout": "NHD"},
        "K and V of unlike strides": base | {"kv_cache": (k, nhd[1].transpose(1, 2))},
        "head_dim in longer rows": base | {"kv_cache": wide[..., : k.shape[3]]},
        "pages innermost": base | {"kv_cache": tuple(outer)},
        "a column slice of a wider table": base
        | {"block_tables": torch.nn.functional.pad(base["block_tables"], (0, 3))[:, : base["block_tables"].shape[1]]},
    }


def test_layouts_give_the_same_bits() -> None:
    batch = random_batch([2] * 2, [18, 40], heads=(4, 2), head_dim=64)
    results = {
        name: portable.trtllm_batch_decode_with_kv_cache(**arguments) for name, arguments in layouts(batch).items()
    }
    assert_right(DECODE, batch)
    for name, (out, lse) in results.items():
        assert out.equal(results["HND"][0]), name
        assert lse.equal(results["HND"][1]), name


def test_k_that_is_v() -> None:
    batch = random_batch([2], [40], heads=(4, 2), head_dim=64)
    twice = Batch(batch.queries, batch.keys, batch.keys)
    expected, _ = assert_right(DECODE, twice)
    arguments = arguments_of(DECODE, twice, 16)
    single = arguments | {"kv_cache": arguments["kv_cache"][0].unsqueeze(1)}
    assert portable.trtllm_batch_decode_with_kv_cache(**single)[0].equal(expected)


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_separate_page_tables(function: str) -> None:
    batch = random_batch([2] * 2, [18, 70], heads=(4, 2), head_dim=64)
    together, _ = assert_right(function, batch)
    apart, _ = assert_right(function, batch, separate_tables=True)
    assert apart.equal(together)


def test_query_of_any_row_and_head_stride() -> None:
    batch = random_batch([2] * 2, [18, 40], heads=(4, 2), head_dim=64)
    arguments = arguments_of(DECODE, batch, 16)
    fused = torch.full((4, 6, 3 * 64), math.nan, dtype=BF16)
    fused[:, 1:5, 64:128] = arguments["query"]
    sliced = portable.trtllm_batch_decode_with_kv_cache(**arguments | {"query": fused[:, 1:5, 64:128]})
    assert sliced[0].equal(assert_right(DECODE, batch)[0])


# Splits.


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@pytest.mark.parametrize("options", [{}, {"window_left": 40}, {"sinks": sinks_of(2)}], ids=["plain", "window", "sinks"])
def test_splits_agree(split: Callable[[int], None], function: str, options: Arguments) -> None:
    """From a program for all keys of a block to more programs than there are tiles."""
    batch = random_batch([3, 3], [7, 260], heads=(2, 1), head_dim=64, seed=3)
    split(1)
    whole, whole_lse = assert_right(function, batch, 64, out_dtype=FP32, bmm1_scale=0.125, **options)
    for count in (2, 4):
        split(count)
        out, lse = assert_right(function, batch, 64, out_dtype=FP32, bmm1_scale=0.125, **options)
        assert float(references.relative_l2(out, whole).max()) <= 2 * ROUNDOFF[BF16]
        torch.testing.assert_close(lse, whole_lse, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


@pytest.mark.parametrize(("count", "least_tiles"), [(1, 1), (2, 1), (5, 1), (8, 2), (40, 1)])
@pytest.mark.parametrize("window_left", [-1, 30])
def test_every_key_counts_once(monkeypatch: pytest.MonkeyPatch, count: int, least_tiles: int, window_left: int) -> None:
    """Shares that end in any request: of no key, of a few, and of most keys of the batch."""
    monkeypatch.setattr(paged, "shares_of", lambda *_: key_shares.Shares(count, least_tiles))
    batch = random_batch([2] * 4, [0, 3, 260, 130], heads=(4, 2), head_dim=64)
    assert_right(DECODE, batch, 64, out_dtype=FP32, window_left=window_left, sinks=sinks_of(4), bmm1_scale=0.125)


def test_a_slot_that_nobody_fills_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lay in the memory of partial results must not show."""
    monkeypatch.setattr(paged, "shares_of", lambda *_: key_shares.Shares(3))
    batch = random_batch([2] * 2, [3, 300], heads=(2, 1), head_dim=64)
    clean, _ = assert_right(DECODE, batch)

    # Scratch is bytes, and float32 of ones alone is NaN.
    def full_of_nan(*shape: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(*shape, math.nan if dtype.is_floating_point else 255, dtype=dtype, **options)

    arguments = arguments_of(DECODE, batch, 16)
    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert portable.trtllm_batch_decode_with_kv_cache(**arguments)[0].equal(clean)


def test_blocks_of_rows_in_shares() -> None:
    """More rows than a tile has, ragged, so that some blocks of a request have no row."""
    batch = random_batch([1, 70, 20], [150, 300, 20], heads=(4, 1), head_dim=64)
    assert_right(CONTEXT, batch, 64, out_dtype=FP32, bmm1_scale=0.125)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_a_live_nan_reaches_output_and_lse(split: Callable[[int], None], count: int, where: str) -> None:
    """A tool that looks for NaN must not lose one: it is not a row without keys."""
    split(count)
    arguments = arguments_of(DECODE, random_batch([1], [300], heads=(2, 2), head_dim=64), 16)
    page, slot = int(arguments["block_tables"][0, 0]), 5
    if where == "query":
        arguments["query"][:] = math.nan
    else:
        arguments["kv_cache"][where == "value"][page, :, slot] = math.nan
    out, lse = portable.trtllm_batch_decode_with_kv_cache(**arguments | {"return_lse": True})
    assert out.isnan().all()
    assert lse.isnan().all() == (where != "value")


@pytest.mark.parametrize("window_left", [2**31 - 1, 2**40])
def test_a_window_beyond_all_lengths_is_no_window(window_left: int) -> None:
    batch = random_batch([4] * 2, [2, 70], heads=(2, 1), head_dim=64)
    wide, _ = assert_right(DECODE, batch, window_left=window_left)
    assert wide.equal(assert_right(DECODE, batch)[0])


@pytest.mark.parametrize(
    ("q_len", "kv_len", "shared"),
    [(1, 4096, True), (8, 4096, True), (512, 32_768, True), (4096, 4096, False), (64, 64, True)],
)
def test_keys_are_shared_out_unless_rows_fill_the_gpu(
    monkeypatch: pytest.MonkeyPatch, q_len: int, kv_len: int, shared: bool
) -> None:
    """Of one request with 32/8 heads; a short prompt has too few blocks."""
    monkeypatch.setattr(key_shares, "num_multiprocessors", lambda device: 132)
    problem = SimpleNamespace(
        query=SimpleNamespace(device=torch.device("cuda")),
        num_kv_heads=8,
        num_qo_heads=32,
        head_dim=128,
        batch_size=1,
        num_rows=q_len,
        max_q_len=q_len,
        max_kv_len=kv_len,
    )
    tile = choose_tile(4 * q_len, 128, 2, (9, 0))
    shares = paged.shares_of(problem, tile, -(-4 * q_len // tile.rows))
    assert (shares is not None) == shared


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1000])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("kv_bytes", [1, 2])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_choose_tile(rows: int, head_dim: int, kv_bytes: int, capability: tuple[int, int] | None) -> None:
    tile = choose_tile(rows, head_dim, kv_bytes, capability)
    most = 128 if capability in (None, (9, 0)) or (capability == (10, 0) and head_dim < 128) else 64
    if capability not in (None, (9, 0), (10, 0)) and head_dim > 128:
        most = 32
    assert tile.rows == min(most, next(size for size in (16, 32, 64, 1024) if size >= rows))
    assert tile.keys in (16, 32, 64, 128)


def by_descriptor(cache: Tensor, tile: ProgramTile) -> bool:
    return tile_descriptor(cache, tile, cache.shape[3]) is not None


@pytest.mark.parametrize(
    ("function", "page_size", "layout", "kv_dtype", "described"),
    [
        (DECODE, 64, "HND", BF16, True),
        (CONTEXT, 128, "NHD", BF16, True),
        (CONTEXT, 64, "HND", E4M3, False),
        (DECODE, 16, "HND", BF16, False),
    ],
)
def test_tiles_that_the_copy_engine_loads(
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    page_size: int,
    layout: str,
    kv_dtype: torch.dtype,
    described: bool,
) -> None:
    """128 rows: a prefix whose tiles need no mask, and lengths that end in a tile."""
    seen = []
    monkeypatch.setattr(paged, "tile_descriptor", lambda *asked: seen.append(asked) or tile_descriptor(*asked))
    batch = random_batch([16] * 2, [300, 150], heads=(16, 2), head_dim=64, kv_dtype=kv_dtype)
    assert_right(function, batch, page_size, bmm1_scale=0.125, kv_layout=layout)
    assert [by_descriptor(cache, tile) for cache, tile, _ in seen] == [described] * 2


def test_what_the_copy_engine_cannot_load_is_not_described() -> None:
    tile = ProgramTile(128, 64, num_warps=8, num_stages=3, by_descriptor=True)
    pool = torch.zeros(4, 2, 64, 128, dtype=BF16)
    assert by_descriptor(pool, tile)
    assert by_descriptor(pool.transpose(1, 2).contiguous().transpose(1, 2), tile)
    assert not by_descriptor(pool, tile._replace(by_descriptor=False))
    assert not by_descriptor(pool[:, :, :32], tile)  # pages shorter than a tile
    assert not by_descriptor(
        pool.flatten()[4:-124].view(-1)[: 3 * 2 * 64 * 128].view(3, 2, 64, 128), tile
    )  # 8 bytes off
    assert not by_descriptor(torch.zeros(4, 2, 64, 132, dtype=BF16)[..., :128], tile)  # tokens 264 bytes apart
    assert not by_descriptor(pool.transpose(2, 3), tile._replace(keys=32))  # elements of a vector apart


@pytest.mark.parametrize(("page_size", "kv_dtype", "rows"), [(64, BF16, 64), (16, BF16, 128), (64, E4M3, 128)])
def test_a_prefill_has_smaller_blocks_where_tiles_come_by_descriptor(
    monkeypatch: pytest.MonkeyPatch, page_size: int, kv_dtype: torch.dtype, rows: int
) -> None:
    seen = []
    monkeypatch.setattr(paged, "paired", lambda caches, tile: seen.append(tile.rows) or caches)
    batch = random_batch([100, 30], [180, 30], heads=(4, 1), head_dim=64, kv_dtype=kv_dtype)
    assert_right(CONTEXT, batch, page_size, bmm1_scale=0.125)
    assert seen == [64, rows]  # of requests with few rows, which this batch lacks, and of the others


@pytest.mark.parametrize("q_len", [1, 10], ids=["pairs", "elements"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 3e34])
def test_bf16_queries_beyond_float16_over_e4m3(q_len: int, size: float) -> None:
    """Rows of very different sizes; the scale brings the largest back to common logits."""
    batch = random_batch([q_len] * 2, [70, 33], heads=(8, 1), head_dim=64, kv_dtype=E4M3)
    sizes = torch.tensor([1.0, 1e-3, 0.0, 0.5])
    queries = [(rows * size * sizes.repeat(2).view(1, 8, 1)).to(BF16) for rows in batch.queries]
    assert_right(DECODE, replace(batch, queries=queries), 16, bmm1_scale=0.125 / size)


def test_a_pool_without_pages() -> None:
    """Nothing to describe to the copy engine: requests without keys, 128 rows."""
    arguments = arguments_of(CONTEXT, random_batch([16] * 2, [0, 0], heads=(8, 1), head_dim=64), 64)
    k, v = arguments["kv_cache"]
    out, lse = portable.trtllm_batch_context_with_kv_cache(**arguments | {"kv_cache": (k[:0], v[:0])})
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("odd", ["token stride", "start"])
@pytest.mark.parametrize("moved", [0, 1], ids=["keys", "values"])
def test_e4m3_elements_at_odd_addresses(monkeypatch: pytest.MonkeyPatch, moved: int, odd: str) -> None:
    """Pairs of their bytes cannot be read there: the bits are those of elements read one by one."""
    batch = random_batch([2], [40], heads=(4, 1), head_dim=64, kv_dtype=E4M3)
    arguments = arguments_of(DECODE, batch, 16, bmm1_scale=0.125)
    with monkeypatch.context() as without_pairs:
        without_pairs.setattr(paged, "paired", lambda caches, tile: caches)
        expected = portable.trtllm_batch_decode_with_kv_cache(**arguments)[0]
    caches = list(arguments["kv_cache"])
    width, first = (65, 0) if odd == "token stride" else (66, 1)
    cache = torch.zeros(*caches[moved].shape[:3], width, dtype=E4M3)[..., first : first + 64]
    caches[moved] = cache.copy_(caches[moved])
    out = portable.trtllm_batch_decode_with_kv_cache(**arguments | {"kv_cache": tuple(caches)})[0]
    assert out.equal(expected)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, E4M3), (FP16, FP16), (FP16, E4M3)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_light_keys_count(
    split: Callable[[int], None], dtype: torch.dtype, kv_dtype: torch.dtype, num_splits: int
) -> None:
    """One key without a value has nearly all the weight; 299 others of 2 ** -26 each are all that is to be seen."""
    split(num_splits)
    key = torch.zeros(300, 1, 64)
    key[0, 0, 0] = 26.0
    value = torch.ones(300, 1, 64)
    value[0] = 0.0
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 1.0
    batch = Batch([query.to(dtype)], [key.to(kv_dtype)], [value.to(kv_dtype)])
    arguments = arguments_of(DECODE, batch, 16, bmm1_scale=math.log(2.0), out_dtype=FP32)
    out, _ = portable.trtllm_batch_decode_with_kv_cache(**arguments)
    torch.testing.assert_close(out, torch.full_like(out, 299 * 2.0**-26), rtol=1e-3, atol=0.0)


# What must not matter.


def poisoned(function: str, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
    """With NaN in page tails and unread pages, and ids beyond the pool in the table's tails."""
    arguments = arguments_of(function, batch, 32, poison=math.nan, foreign_id=2**30, **changes)
    return getattr(portable, function)(**arguments)


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@pytest.mark.parametrize(("kv_dtype", "num_splits"), [(BF16, 1), (E4M3, 2)])
def test_poison_changes_no_bit(
    split: Callable[[int], None], function: str, kv_dtype: torch.dtype, num_splits: int
) -> None:
    split(num_splits)
    batch = random_batch([2] * 4, [1, 33, 64, 0], heads=(2, 1), head_dim=64, kv_dtype=kv_dtype)
    clean = getattr(portable, function)(**arguments_of(function, batch, 32))
    for got, expected in zip(poisoned(function, batch), clean, strict=True):
        assert got.equal(expected)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_keys_before_the_window_are_not_read(split: Callable[[int], None], num_splits: int) -> None:
    """A sliding-window pool has given them away: another request's keys lie there, or none yet."""
    split(num_splits)
    batch = random_batch([2], [200], heads=(4, 2), head_dim=64)
    clean, _ = assert_right(DECODE, batch, 32, window_left=20)
    first_seen = 200 - 2 - 20
    for side in (batch.keys, batch.values):
        side[0][:first_seen] = math.nan
    arguments = arguments_of(DECODE, batch, 32, window_left=20)
    assert portable.trtllm_batch_decode_with_kv_cache(**arguments)[0].equal(clean)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_given_outputs_are_filled_and_nothing_beside_them(
    split: Callable[[int], None], num_splits: int, out_dtype: torch.dtype
) -> None:
    split(num_splits)
    batch = random_batch([2, 0, 3], [18, 4, 140], heads=(3, 1), head_dim=64)
    buffer, lse_buffer = torch.full((9, 3, 64), 77.0, dtype=out_dtype), torch.full((9, 3), 77.0)
    out, lse = buffer[2:7], lse_buffer[2:7]
    got, got_lse = assert_right(CONTEXT, batch, out=out, out_dtype=out_dtype, lse=lse)
    assert got is out
    assert got_lse is lse
    for guard in (buffer[:2], buffer[7:], lse_buffer[:2], lse_buffer[7:]):
        assert bool((guard == 77.0).all())


def test_a_given_lse_is_filled_without_being_returned() -> None:
    batch = random_batch([1] * 2, [18, 40], heads=(2, 1), head_dim=64)
    lse = torch.full((2, 2), 77.0)
    out = portable.trtllm_batch_decode_with_kv_cache(**arguments_of(DECODE, batch, 16, lse=lse, return_lse=False))
    assert isinstance(out, Tensor)
    assert lse.equal(assert_right(DECODE, batch)[1])


DECLINED: dict[str, tuple[Arguments, Arguments]] = {
    "float32": ({"dtype": FP32, "head_dim": 64}, {}),
    "head_dim": ({"head_dim": 80}, {}),
    "page size": ({"head_dim": 64}, {"page_size": 8}),
    "lse with gaps": ({"head_dim": 64}, {"lse": torch.empty(2, 8)[:, :4]}),
}


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_call_raises_the_reason_and_writes_nothing(name: str) -> None:
    options, changes = DECLINED[name]
    changes = dict(changes)
    batch = random_batch([1] * 2, [18, 40], **options)
    out = torch.empty(2, 4, options["head_dim"], dtype=BF16)
    arguments = arguments_of(DECODE, batch, changes.pop("page_size", 16), out=out, **changes)
    assert_declined(DecodeCall, PORTABLE, arguments)


def test_an_output_dtype_that_is_not_written() -> None:
    batch = random_batch([1], [18], head_dim=64)
    with pytest.raises(NotImplementedError, match="writes fp16, bf16, e4m3 or float32"):
        portable.trtllm_batch_decode_with_kv_cache(**arguments_of(DECODE, batch, 16, out_dtype=torch.float64))


def test_a_batch_of_padding_alone() -> None:
    """Rows that no request has, as a CUDA graph with room for more leaves them: nothing to compute, and no error."""
    batch = random_batch([0] * 2, [18, 3], head_dim=64)
    query = torch.ones(5, 4, 64, dtype=BF16)
    out, _ = portable.trtllm_batch_decode_with_kv_cache(**arguments_of(DECODE, batch, 16, ragged=True, query=query))
    assert list(out.shape) == [5, 4, 64]


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_an_empty_batch_is_empty(function: str) -> None:
    batch = random_batch([0] * 2, [18, 3], head_dim=64)
    ragged = {"ragged": True} if function == DECODE else {}
    out, lse = getattr(portable, function)(**arguments_of(function, batch, 16, **ragged))
    assert list(out.shape) == [0, 4, 64]
    assert list(lse.shape) == [0, 4]


# Anything else.


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, Batch, int, int, Arguments]:
    lengths: Sequence[tuple[int, int]] = draw(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 150)), min_size=1, max_size=3)
    )
    group, num_kv_heads = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    batch = random_batch(
        [q_len for q_len, _ in lengths],
        [kv_len for _, kv_len in lengths],
        heads=(group * num_kv_heads, num_kv_heads),
        head_dim=64,
        kv_dtype=draw(st.sampled_from([BF16, E4M3])),
        seed=draw(st.integers(0, 2**16)),
    )
    options: Arguments = {
        "bmm1_scale": draw(st.sampled_from([0.125, 0.5])),
        "bmm2_scale": draw(st.sampled_from([1.0, 0.3])),
        "sinks": sinks_of(group * num_kv_heads) if draw(st.booleans()) else None,
        "separate_tables": draw(st.booleans()),
        "kv_layout": draw(st.sampled_from(["HND", "NHD"])),
        "window_left": draw(st.sampled_from([-1, 0, 5, 40])),
    }
    function = draw(st.sampled_from([DECODE, CONTEXT]))
    if function == CONTEXT:
        options["causal"] = options["window_left"] >= 0 or draw(st.booleans())
    else:
        options["ragged"] = True
    return function, batch, draw(st.sampled_from([16, 64, 128])), draw(st.sampled_from([1, 2, 5])), options


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_any_problem(problem: tuple[str, Batch, int, int, Arguments]) -> None:
    function, batch, page_size, num_splits, options = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "shares_of", lambda *_: shares_of(num_splits))
        if sum(batch.q_lens):
            assert_right(function, batch, page_size, **options)
