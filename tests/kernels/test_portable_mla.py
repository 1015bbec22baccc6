"""The portable MLA kernel against the float64 reference, per (row, head): interpreted, or compiled where there is a GPU."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import references
from lab.calls.mla_decode import MLADecodeCall
from lab.kernels import portable
from lab.kernels.portable import key_shares
from lab.kernels.portable import mla_decode as portable_mla
from lab.kernels.portable.tile_choices import choose_mla_tile
from lab.kernels.support.portable import PORTABLE_MLA
from tests.cases import Batch, latent_batch, mla_arguments, of_entries
from tests.devices import DEVICES, ON_GPU, graph_of, synchronisation_is_an_error
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
    on,
    sinks_of,
)

RANK, ROPE = 64, 16


random_batch = partial(latent_batch, heads=2, rank=RANK, rope=ROPE)


def arguments_of(
    device: str, batch: Batch, page_size: int = 32, *, out_dtype: torch.dtype = BF16, **changes: Any
) -> Arguments:
    """The call that poses the batch, its pages shuffled, with an output full of NaN."""
    arguments = mla_arguments(batch, page_size, **{"seed": 1, "bmm1_scale": 0.125} | changes)
    if arguments["out"] is not None:
        arguments["out"] = arguments["out"].to(out_dtype)
    return {name: on(device, value) for name, value in arguments.items()}


def run(arguments: Arguments) -> Any:
    portable.trtllm_batch_decode_with_kv_cache_mla.cache_clear()  # of calls with other shares than a test has now
    return portable.trtllm_batch_decode_with_kv_cache_mla(**arguments)


def truth_of(arguments: Arguments) -> tuple[Tensor, Tensor]:
    shape = (*arguments["query"].shape[:-1], arguments["kv_lora_rank"])
    out = torch.empty(shape, dtype=torch.float64, device=arguments["query"].device)
    return references.trtllm_batch_decode_with_kv_cache_mla(**arguments | {"out": out, "lse": None})


def assert_right(device: str, batch: Batch, page_size: int = 32, **changes: Any) -> tuple[Tensor, Tensor]:
    """Run the call, and hold every output vector and LSE to the reference's; both as rows."""
    arguments = arguments_of(device, batch, page_size, **changes)
    out, lse = run(arguments)
    assert out is arguments["out"]
    assert_as_right_as_the_control(arguments, out, lse)
    return out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Share the keys out among one program, which cuts nothing, or so many that most requests are cut."""
    return lambda count: monkeypatch.setattr(portable_mla, "choose_shares", lambda *_: shares_of(count))


def shares_of(count: int) -> key_shares.Shares:
    return key_shares.Shares(1 if count == 1 else 16 * count)


# Shapes and dtypes.


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_lengths_at_page_and_tile_edges(device: str, page_size: int) -> None:
    lengths = {0, 1, page_size - 1, page_size, page_size + 1, 31, 32, 33, 63, 64, 65, 129}
    batch = random_batch([1] * len(lengths), sorted(lengths), seed=page_size)
    assert_right(device, batch, page_size)


@pytest.mark.parametrize("q_len", [*range(1, 9), 11])
def test_verify(device: str, q_len: int) -> None:
    """Lengths from the rows' own up; 3 heads, so that a tile ends within a token."""
    batch = random_batch([q_len] * 3, [q_len, 31 + q_len, 64 + q_len], heads=3, seed=q_len)
    assert_right(device, batch, sinks=sinks_of(3) if q_len % 2 else None)


@pytest.mark.parametrize("heads", [1, 8, 16, 24, 128])
def test_heads(device: str, heads: int) -> None:
    """Every head has a sink of its own; 2 tokens of 24 heads end within a block of 64 rows, 128 heads take four blocks."""
    assert_right(device, random_batch([2] * 2, [19, 70], heads=heads), sinks=sinks_of(heads))


@pytest.mark.parametrize(("rank", "rope"), [(16, 16), (32, 64), (64, 32), (256, 64)])
def test_sizes(device: str, rank: int, rope: int) -> None:
    assert_right(device, random_batch([2] * 2, [19, 70], rank=rank, rope=rope), bmm1_scale=0.1)


@pytest.mark.parametrize("q_len", [1, 4], ids=lambda q_len: f"{q_len} rows")
def test_deepseek_v3(device: str, q_len: int) -> None:
    """576 and 512 with the 16 heads of a tensor-parallel eighth: a tile of 16 rows, and one of 64."""
    batch = random_batch([q_len] * 2, [66, 130], heads=16, rank=512, rope=64)
    assert_right(device, batch, 64, bmm1_scale=192**-0.5)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "out_dtype"),
    [
        (BF16, BF16, BF16),
        (BF16, BF16, FP32),
        (FP16, FP16, FP16),
        (BF16, E4M3, BF16),
        (FP16, E4M3, FP16),
        (E4M3, E4M3, BF16),
        (E4M3, E4M3, E4M3),
    ],
    ids=str,
)
def test_dtypes(
    device: str,
    split: Callable[[int], None],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    out_dtype: torch.dtype,
    num_splits: int,
) -> None:
    split(num_splits)
    batch = random_batch([2] * 2, [35, 130], dtype=dtype, kv_dtype=kv_dtype)
    assert_right(device, batch, out_dtype=out_dtype, bmm2_scale=1.3)


@pytest.mark.parametrize("tensors", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 2])
def test_scales(device: str, split: Callable[[int], None], tensors: tuple[bool, bool], num_splits: int) -> None:
    """Unequal, as numbers and as tensors of one element of either rank."""
    split(num_splits)
    scales = {
        "bmm1_scale": torch.tensor(0.25) if tensors[0] else 0.25,
        "bmm2_scale": torch.tensor([0.6]) if tensors[1] else 0.6,
    }
    assert_right(device, random_batch([2] * 2, [33, 150], kv_dtype=E4M3), **scales)


def test_whole_numbers_are_scales(device: str) -> None:
    batch = random_batch([1], [33])
    whole, _ = assert_right(device, batch, bmm1_scale=1, bmm2_scale=2)
    assert whole.equal(assert_right(device, batch, bmm1_scale=1.0, bmm2_scale=2.0)[0])


def test_uint32_lengths(device: str) -> None:
    assert_right(device, random_batch([1] * 2, [33, 5]), seq_lens=torch.tensor([33, 5], dtype=torch.uint32))


def test_a_new_output_is_bf16(device: str) -> None:
    batch = random_batch([2] * 2, [33, 150], dtype=FP16)
    out, _ = run(arguments_of(device, batch, out=None))
    assert out.dtype == BF16
    assert out.shape == (2, 2, 2, RANK)
    given_out, _ = assert_right(device, batch)
    assert out.flatten(0, 1).equal(given_out)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("ragged", [False, True])
def test_lse_in_either_base_given_or_new(
    device: str, split: Callable[[int], None], num_splits: int, ragged: bool
) -> None:
    split(num_splits)
    batch = random_batch([2] * 2, [1, 150])
    _, base_2 = assert_right(device, batch, ragged=ragged)
    natural = run(arguments_of(device, batch, ragged=ragged, return_lse_base="basee"))[1]
    torch.testing.assert_close(natural, base_2 * math.log(2.0))
    lse = torch.full((4, 2) if ragged else (2, 2, 2), 77.0, device=device)
    arguments = arguments_of(device, batch, ragged=ragged, lse=lse, return_lse_base="basee")
    assert run(arguments)[1] is lse
    assert lse.view(4, 2).equal(natural)


def test_without_lse_the_output_alone_is_returned(device: str) -> None:
    batch = random_batch([1], [33])
    out = run(arguments_of(device, batch, return_lse=False, return_lse_base=None))
    assert isinstance(out, Tensor)
    assert out.flatten(0, 1).equal(assert_right(device, batch)[0])


# What a row sees.


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_sinks_count_once(device: str, split: Callable[[int], None], num_splits: int) -> None:
    split(num_splits)
    batch = random_batch([2] * 2, [5, 200], heads=4)
    for sinks in (sinks_of(4), torch.tensor([-math.inf, 40.0, -40.0, 0.0])):
        assert_right(device, batch, sinks=sinks)


@pytest.mark.parametrize("q_len", [1, 16], ids=["16 rows", "64 rows"])
def test_light_keys_count(device: str, q_len: int) -> None:
    """One key without a value has nearly all the weight; 299 others of 2 ** -26 each are all that is to be seen."""
    latent, rope = torch.ones(300, 32), torch.zeros(300, 16)
    latent[0], rope[0, 0] = 0.0, 26.0
    query = torch.zeros(q_len, 4, 48)
    query[..., 32] = 1.0
    batch = of_entries([query.to(E4M3)], [torch.cat((latent, rope), 1).to(E4M3)], rank=32)
    arguments = arguments_of(device, batch, out_dtype=FP32, bmm1_scale=math.log(2.0))
    out, _ = run(arguments)
    seen = torch.arange(300 - q_len, 300, device=device).view(1, q_len, 1, 1).expand(out.shape)
    torch.testing.assert_close(out, seen * 2.0**-26, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("q_len", [1, 4], ids=["16 rows", "64 rows"])
def test_a_pool_without_pages(device: str, q_len: int) -> None:
    arguments = arguments_of(device, random_batch([q_len] * 2, [0, 0], heads=16), 64)
    out, lse = run(arguments | {"kv_cache": arguments["kv_cache"][:0]})
    assert not out.any()
    assert bool((lse == -math.inf).all())


@pytest.mark.parametrize("num_splits", [1, 3])
def test_rows_without_a_key_are_zero(device: str, split: Callable[[int], None], num_splits: int) -> None:
    """The first rows of a request with fewer keys than rows; and those of one without keys."""
    split(num_splits)
    batch = random_batch([4] * 3, [0, 2, 100])
    out, lse = assert_right(device, batch)
    assert not out[:6].any()
    assert bool((lse[:6] == -math.inf).all())
    out, lse = assert_right(device, batch, sinks=sinks_of(2))
    assert not out[:6].any()
    torch.testing.assert_close(lse[:6].cpu(), (sinks_of(2) / math.log(2)).expand(6, 2))


@pytest.mark.parametrize("num_splits", [1, 2])
def test_ragged_rows(device: str, split: Callable[[int], None], num_splits: int) -> None:
    split(num_splits)
    batch = random_batch([1, 0, 6, 2, 0], [70, 3, 6, 1, 0], heads=5)
    assert_right(device, batch, ragged=True)
    assert_right(device, batch, ragged=True, max_q_len=50)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_rows_after_the_last_request_disturb_nobody(device: str, split: Callable[[int], None], num_splits: int) -> None:
    split(num_splits)
    batch = random_batch([1, 3], [70, 40])
    expected, _ = assert_right(device, batch, ragged=True)
    query = torch.cat((*batch.queries, torch.full((2, 2, RANK + ROPE), math.nan, dtype=BF16)))
    out = torch.zeros(6, 2, RANK, dtype=BF16)
    got, _ = run(arguments_of(device, batch, ragged=True, query=query, out=out))
    assert got[:4].equal(expected)


# Where the cache lies.


def test_a_cache_of_any_rank_and_stride(device: str) -> None:
    """Pages with gaps between them and between their entries, and pages one after the other."""
    batch = random_batch([2] * 2, [18, 140])
    expected, _ = assert_right(device, batch)
    cache = arguments_of(device, batch)["kv_cache"]
    pages, _, page_size, head_dim = cache.shape
    gaps = torch.full((pages, 3, page_size + 5, head_dim + 8), math.nan, dtype=BF16, device=device)
    gaps[:, 1, :page_size, :head_dim] = cache[:, 0]
    entries_first = cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    for kv_cache in (cache[:, 0], gaps[:, 1:2, :page_size, :head_dim], entries_first):
        got, _ = run(arguments_of(device, batch, kv_cache=kv_cache))
        assert got.flatten(0, 1).equal(expected)


def test_a_query_and_a_table_of_any_stride(device: str) -> None:
    batch = random_batch([2] * 2, [18, 140], heads=4)
    expected, _ = assert_right(device, batch)
    arguments = arguments_of(device, batch)
    wide = torch.full((2, 2, 6, 3 * (RANK + ROPE)), math.nan, dtype=BF16, device=device)
    query = wide[:, :, 1:5, RANK + ROPE : 2 * (RANK + ROPE)]
    query.copy_(arguments["query"])
    table = torch.nn.functional.pad(arguments["block_tables"], (0, 3), value=-1)[:, :-3]
    got, _ = run(arguments | {"query": query, "block_tables": table})
    assert got.flatten(0, 1).equal(expected)


# Splits.


@pytest.mark.parametrize("options", [{}, {"sinks": sinks_of(2)}], ids=["plain", "sinks"])
def test_splits_agree(device: str, split: Callable[[int], None], options: Arguments) -> None:
    """From one program to more than there are tiles."""
    batch = random_batch([3, 3], [7, 260], seed=3)
    split(1)
    whole, whole_lse = assert_right(device, batch, out_dtype=FP32, **options)
    for count in (2, 4, 12):
        split(count)
        out, lse = assert_right(device, batch, out_dtype=FP32, **options)
        assert float(references.relative_l2(out, whole).max()) <= 2 * ROUNDOFF[BF16]
        torch.testing.assert_close(lse, whole_lse, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


@pytest.mark.parametrize(("count", "least_tiles"), [(2, 1), (5, 1), (8, 2), (40, 1)])
def test_every_key_counts_once(device: str, monkeypatch: pytest.MonkeyPatch, count: int, least_tiles: int) -> None:
    """Shares that end in any request; heads and rows in two blocks, and a latent vector that two programs merge."""
    monkeypatch.setattr(portable_mla, "choose_shares", lambda *_: key_shares.Shares(count, least_tiles))
    batch = random_batch([5] * 4, [0, 3, 160, 70], heads=13, rank=256)
    assert_right(device, batch, out_dtype=FP32, sinks=sinks_of(13), bmm1_scale=0.06)


def test_a_slot_that_nobody_fills_leaves_no_trace(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lay in the memory of partial results must not show."""
    monkeypatch.setattr(portable_mla, "choose_shares", lambda *_: key_shares.Shares(4))
    batch = random_batch([2] * 2, [3, 300])
    clean, _ = assert_right(device, batch)
    arguments = arguments_of(device, batch)

    # Scratch is bytes, and float32 of ones alone is NaN.
    def full_of_nan(*shape: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(*shape, math.nan if dtype.is_floating_point else 255, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert run(arguments)[0].flatten(0, 1).equal(clean)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1024])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("kv_bytes", [1, 2])
def test_choose_mla_tile(rows: int, kv_bytes: int, capability: tuple[int, int] | None) -> None:
    tile = choose_mla_tile(rows, kv_bytes, capability)
    most = {None: 64, (9, 0): 64, (10, 0): 16 * kv_bytes}.get(capability, 16)
    assert tile.rows == min(most, next(size for size in (16, 32, 64, 1024) if size >= rows))
    assert tile.keys in (32, 64)


@pytest.mark.parametrize(
    ("query", "rows", "expected"), [(BF16, 64, "bf16"), (BF16, 16, "fp16"), (E4M3, 64, "fp16"), (E4M3, 16, "fp16")]
)
def test_what_products_over_an_e4m3_cache_are_made_in(query: torch.dtype, rows: int, expected: str) -> None:
    problem = SimpleNamespace(query=SimpleNamespace(dtype=query), k_cache=SimpleNamespace(dtype=E4M3))
    tile = choose_mla_tile(rows, 1, (9, 0))
    assert str(portable_mla.choose_dot_dtype(problem, tile)) == expected


# What must not matter.


@pytest.mark.parametrize("foreign_id", [-1, 2**30])
@pytest.mark.parametrize(("kv_dtype", "num_splits"), [(BF16, 1), (E4M3, 2)])
def test_poison_changes_no_bit(
    device: str, split: Callable[[int], None], foreign_id: int, kv_dtype: torch.dtype, num_splits: int
) -> None:
    """NaN in page tails and unread pages, and stale ids, or none, in the table's tails."""
    split(num_splits)
    batch = random_batch([2] * 4, [1, 33, 64, 0], kv_dtype=kv_dtype)
    clean = run(arguments_of(device, batch))
    dirty = run(arguments_of(device, batch, poison=math.nan, foreign_id=foreign_id))
    for got, expected in zip(dirty, clean, strict=True):
        assert got.equal(expected)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("where", ["query", "latent", "rotary"])
def test_a_live_nan_reaches_output_and_lse(
    device: str, split: Callable[[int], None], num_splits: int, where: str
) -> None:
    """A tool that looks for NaN must not lose one: it is not a row without keys."""
    split(num_splits)
    arguments = arguments_of(device, random_batch([1], [200]))
    page = int(arguments["block_tables"][0, 0])
    if where == "query":
        arguments["query"][:] = math.nan
    else:
        arguments["kv_cache"][page, 0, 5, 3 if where == "latent" else RANK + 3] = math.nan
    out, lse = run(arguments)
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_given_outputs_are_filled_and_nothing_beside_them(
    device: str, split: Callable[[int], None], num_splits: int, out_dtype: torch.dtype
) -> None:
    split(num_splits)
    batch = random_batch([2, 0, 3], [18, 4, 140], heads=3)
    buffer = torch.full((9, 3, RANK), 77.0, dtype=out_dtype, device=device)
    lse_buffer = torch.full((9, 3), 77.0, device=device)
    assert_right(device, batch, ragged=True, out=buffer[2:7], lse=lse_buffer[2:7])
    for guard in (buffer[:2], buffer[7:], lse_buffer[:2], lse_buffer[7:]):
        assert bool((guard == 77.0).all())


DECLINED: dict[str, Arguments] = {
    "float32": {"dtype": FP32},
    "rank": {"rank": 48},
    "large rank": {"rank": 1024},
    "rope": {"rope": 24},
    "no rope": {"rope": 0},
}


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_call_raises_the_reason_and_writes_nothing(device: str, name: str) -> None:
    assert_declined(
        MLADecodeCall, PORTABLE_MLA, arguments_of(device, random_batch([1] * 2, [18, 40], **DECLINED[name]))
    )


@pytest.mark.parametrize("padding", [0, 5])
def test_a_batch_without_rows(device: str, padding: int) -> None:
    """No row, or none but padding: nothing to compute, and no error."""
    batch = random_batch([0] * 2, [18, 3])
    query = torch.ones(padding, 2, RANK + ROPE, dtype=BF16)
    out, lse = run(arguments_of(device, batch, ragged=True, query=query, out=None))
    assert out.shape == (padding, 2, RANK)
    assert lse.shape == (padding, 2)


# Launches on a GPU.


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_call_does_not_synchronise(device: str) -> None:
    scales = {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor([0.7])}
    arguments = arguments_of(device, random_batch([3] * 3, [30, 100, 300], heads=16), **scales)
    first = run(arguments)  # compiles
    with synchronisation_is_an_error():
        again = run(arguments)
    assert again[1].equal(first[1])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_graph_replays_other_lengths_and_tables(device: str, q_len: int) -> None:
    """The same pool and output; longer, shorter, and with rows before the first key: bit for bit as eager."""
    batch = random_batch([q_len] * 4, [4000, 4096, 3000, 4001], heads=16, rank=512, rope=64)
    arguments = arguments_of(device, batch, 64, lse=torch.empty(4, q_len, 16), bmm1_scale=192**-0.5)
    graph = graph_of(lambda: run(arguments))
    for lengths in ([3, 64, 65, 4096], [2, 0, 1, 128], [4000, 4096, 3000, 4001]):
        arguments["seq_lens"].copy_(torch.tensor(lengths))
        arguments["block_tables"].copy_(arguments["block_tables"].roll(1, dims=0))
        arguments["query"].copy_(torch.randn_like(arguments["query"]))
        graph.replay()
        eager = run(arguments | {"out": torch.empty_like(arguments["out"]), "lse": None})
        assert arguments["out"].equal(eager[0])
        assert arguments["lse"].view(-1, 16).equal(eager[1])
        truth, _ = truth_of(arguments)
        assert float(references.relative_l2(eager[0], truth).max()) <= 4 * ROUNDOFF[BF16]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_lengths_and_batches_compile_nothing_new(device: str) -> None:
    def compiled() -> int:
        return sum(len(cache[0]) for cache in portable_mla._mla_kernel.device_caches.values())

    run(arguments_of(device, random_batch([1] * 3, [4000, 4000, 4000]), 64))
    before = compiled()
    for kv_lens in ([4000, 3999, 5], [4000, 1, 3999, 7], [4096] * 40, [300] * 16, [2000]):
        run(arguments_of(device, random_batch([1] * len(kv_lens), kv_lens), 64))
    assert compiled() == before


# Anything else.


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, int, int, Arguments]:
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 150)), min_size=1, max_size=3))
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    batch = random_batch(
        [q_len for q_len, _ in lengths],
        [kv_len for _, kv_len in lengths],
        heads=heads,
        rank=draw(st.sampled_from([16, 64])),
        rope=draw(st.sampled_from([16, 32])),
        kv_dtype=draw(st.sampled_from([BF16, E4M3])),
        seed=draw(st.integers(0, 2**16)),
    )
    options: Arguments = {
        "bmm1_scale": draw(st.sampled_from([0.125, 0.5])),
        "bmm2_scale": draw(st.sampled_from([1.0, 0.3])),
        "sinks": sinks_of(heads) if draw(st.booleans()) else None,
    }
    return batch, draw(st.sampled_from([1, 16, 64, 128])), draw(st.sampled_from([1, 2, 5])), options


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_any_problem(device: str, problem: tuple[Batch, int, int, Arguments]) -> None:
    batch, page_size, num_splits, options = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable_mla, "choose_shares", lambda *_: shares_of(num_splits))
        if sum(batch.q_lens):
            assert_right(device, batch, page_size, ragged=True, **options)
