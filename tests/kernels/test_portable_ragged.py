"""The portable ragged kernel against the float64 reference, per (row, head): interpreted, or compiled where there is a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import references
from lab.calls.ragged_context import RaggedContextCall
from lab.kernels import portable
from lab.kernels.portable import ragged_context as portable_ragged
from lab.kernels.portable.tile_choices import choose_ragged_tile
from lab.kernels.support.portable import PORTABLE_RAGGED
from tests.cases import Batch, chunk, merged, ragged_arguments, ragged_batch, running_sum
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

DIMS = (48, 32)


def batch_of(q_lens: Any, kv_lens: Any, **options: Any) -> Batch:
    return ragged_batch(q_lens, kv_lens, **{"heads": (2, 2), "dims": DIMS} | options)


def arguments_of(device: str, batch: Batch, *, out_dtype: torch.dtype | None = None, **changes: Any) -> Arguments:
    """The call that poses the batch, with an output full of NaN."""
    plain = ragged_arguments(batch)
    dtype = out_dtype or (BF16 if plain["query"].dtype == E4M3 else plain["query"].dtype)
    plain |= {"out": plain["out"].to(dtype), "bmm1_scale": plain["query"].shape[2] ** -0.5}
    return {name: on(device, value) for name, value in (plain | changes).items()}


def run(arguments: Arguments) -> Any:
    return portable.trtllm_ragged_attention_deepseek(**arguments)


def truth_of(arguments: Arguments) -> tuple[Tensor, Tensor]:
    shape = (*arguments["query"].shape[:2], arguments["value"].shape[2])
    out = torch.empty(shape, dtype=torch.float64, device=arguments["query"].device)
    return references.trtllm_ragged_attention_deepseek(**arguments | {"out": out, "lse": None, "return_lse": True})


def assert_right(device: str, batch: Batch, **changes: Any) -> tuple[Tensor, Tensor]:
    """Run the call, and hold every output vector and LSE to the reference's."""
    arguments = arguments_of(device, batch, **changes)
    out, lse = run(arguments)
    assert out is arguments["out"]
    assert_as_right_as_the_control(arguments, out, lse)
    return out, lse


# Shapes and dtypes.


@pytest.mark.parametrize("causal", [True, False])
def test_new_tokens_at_tile_edges(device: str, causal: bool) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]
    assert_right(device, batch_of(lengths, lengths), is_causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 16, 17, 40, 65, 130])
def test_rows_after_a_prefix(device: str, q_len: int, causal: bool) -> None:
    """Each of the tiles, over keys that end before, at and after one, from the rows' own number up."""
    kv_lens = [q_len + prefix for prefix in (0, 1, 62, 63, 64, 128)]
    assert_right(device, batch_of([q_len] * 6, kv_lens, seed=q_len), is_causal=causal)


@pytest.mark.parametrize(
    "dims", [(48, 32), (96, 64), (192, 128), (128, 128), (256, 256), (16, 16), (24 + 8, 16), (80, 256)], ids=str
)
def test_sizes(device: str, dims: tuple[int, int]) -> None:
    assert_right(device, batch_of([3, 70], [3, 140], dims=dims))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (16, 16), (4, 2), (6, 1)], ids=str)
def test_heads(device: str, heads: tuple[int, int]) -> None:
    """Every head has a sink of its own; and groups that share a key's head."""
    assert_right(device, batch_of([2, 19], [2, 70], heads=heads), attention_sinks=sinks_of(heads[0]))


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, BF16), (E4M3, BF16), (E4M3, FP16)],
    ids=str,
)
@pytest.mark.parametrize("causal", [True, False])
def test_dtypes(device: str, dtype: torch.dtype, out_dtype: torch.dtype, causal: bool) -> None:
    batch = batch_of([2, 30], [35, 130], dtype=dtype)
    assert_right(device, batch, out_dtype=out_dtype, bmm2_scale=1.3, is_causal=causal)


@pytest.mark.parametrize("tensors", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_scales(device: str, tensors: tuple[bool, bool]) -> None:
    """Unequal, as numbers and as tensors of one element of either rank."""
    scales = {
        "bmm1_scale": torch.tensor(0.25) if tensors[0] else 0.25,
        "bmm2_scale": torch.tensor([0.6]) if tensors[1] else 0.6,
    }
    assert_right(device, batch_of([2, 20], [33, 150], dtype=E4M3), **scales)


def test_whole_numbers_are_scales(device: str) -> None:
    batch = batch_of([3], [33])
    whole, _ = assert_right(device, batch, bmm1_scale=1, bmm2_scale=2)
    assert whole.equal(assert_right(device, batch, bmm1_scale=1.0, bmm2_scale=2.0)[0])


@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
def test_a_new_output(device: str, dtype: torch.dtype) -> None:
    batch = batch_of([2, 3], [33, 150], dtype=dtype)
    out, _ = run(arguments_of(device, batch, out=None))
    assert out.dtype == (BF16 if dtype == E4M3 else dtype)
    assert out.equal(assert_right(device, batch)[0])


def test_lse_given_or_new_or_none(device: str) -> None:
    batch = batch_of([2, 3], [2, 150])
    out, expected = assert_right(device, batch)
    rows, columns = torch.full((5, 2), 77.0), torch.full((2, 5), 77.0).T
    for lse in (rows, columns):
        arguments = arguments_of(device, batch, lse=lse)
        assert run(arguments)[1] is arguments["lse"]
        assert arguments["lse"].equal(expected)
        arguments = arguments_of(device, batch, lse=lse.fill_(77.0), return_lse=False)
        assert run(arguments).equal(out)
        assert arguments["lse"].equal(expected)
    alone = run(arguments_of(device, batch, return_lse=False))
    assert isinstance(alone, Tensor)
    assert alone.equal(out)


# What a row sees.


@pytest.mark.parametrize("window_left", [0, 1, 20, 63, 64, 65, 150, 10_000])
def test_windows(device: str, window_left: int) -> None:
    batch = batch_of([1, 70, 200, 3], [300, 150, 200, 130])
    assert_right(device, batch, window_left=window_left)


@pytest.mark.parametrize("causal", [True, False])
def test_sinks(device: str, causal: bool) -> None:
    batch = batch_of([2, 20], [5, 200], heads=(4, 4))
    for sinks in (sinks_of(4), torch.tensor([-math.inf, 40.0, -40.0, 0.0])):
        assert_right(device, batch, attention_sinks=sinks, is_causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_key_are_zero(device: str, causal: bool) -> None:
    """Those of requests without keys; and, causal, the first of a request with fewer keys than rows."""
    batch = batch_of([4, 140, 3], [0, 2, 100])
    num_empty = 4 + 138 if causal else 4
    for sinks in (None, sinks_of(2)):
        out, lse = assert_right(device, batch, is_causal=causal, attention_sinks=sinks)
        assert not out[:num_empty].any()
        empty = torch.full((2,), -math.inf) if sinks is None else sinks / math.log(2)
        torch.testing.assert_close(lse[:num_empty].cpu(), empty.expand(num_empty, 2))
        assert bool(out[num_empty:].any(dim=-1).all())


def test_ragged_rows_and_loose_bounds(device: str) -> None:
    batch = batch_of([1, 0, 66, 2, 0, 5], [70, 3, 66, 1, 0, 0], heads=(3, 3))
    expected, _ = assert_right(device, batch)
    assert_right(device, batch, max_q_len=100, max_kv_len=1000)
    out, _ = assert_right(device, batch, max_q_len=1000)  # blocks of rows that no request has
    assert float(references.relative_l2(out, expected.double()).nan_to_num(0.0).max()) <= 2 * ROUNDOFF[BF16]


def test_new_tokens_and_chunks_of_the_prefix_merge_to_the_whole(device: str) -> None:
    """New tokens causal, two chunks not, some requests without a key in one."""
    new, prefixes = [4, 1, 70, 3], [11, 0, 205, 90]
    lengths = [prefix + rows for prefix, rows in zip(prefixes, new, strict=True)]
    middle = [min(prefix, 100) for prefix in prefixes]
    batch = batch_of(new, lengths)
    spans = [(prefixes, lengths), ([0] * 4, middle), (middle, prefixes)]
    parts = [
        assert_right(device, chunk(batch, starts, ends), is_causal=causal, out_dtype=FP32)
        for (starts, ends), causal in zip(spans, (True, False, False), strict=True)
    ]
    out, lse = merged(parts)
    truth, truth_lse = truth_of(arguments_of(device, batch))
    assert float(references.relative_l2(out, truth).max()) <= 2 * ROUNDOFF[BF16]
    torch.testing.assert_close(lse, truth_lse.double(), rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


# Where tensors lie.


def test_rows_keys_and_values_of_any_stride(device: str) -> None:
    """Values as an up-projection leaves them: after each head's part of the keys."""
    batch = batch_of([2, 70], [18, 140])
    expected, _ = assert_right(device, batch)
    arguments = arguments_of(device, batch)
    for name in ("query", "key", "value"):
        tensor = arguments[name]
        wide = torch.full((len(tensor), 4, 128), math.nan, dtype=BF16, device=device)
        arguments[name] = wide[:, 1:3, 16 : 16 + tensor.shape[2]].copy_(tensor)
    assert run(arguments)[0].equal(expected)
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    assert run(arguments)[0].equal(expected)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_keys_of_nobody_disturb_nobody(device: str, causal: bool) -> None:
    """NaN after the last request's tokens, and in the next request's, which a tile's end reaches into."""
    batch = batch_of([3, 5, 4], [70, 40, 9])
    arguments = arguments_of(device, batch, is_causal=causal)
    clean = [result.clone() for result in run(arguments)]
    alone = {"batch_size": 2, "seq_lens": arguments["seq_lens"][:2]}
    alone |= {name: arguments[name][:3] for name in ("cum_seq_lens_q", "cum_seq_lens_kv")}
    for name, end in (("query", 8), ("key", 110), ("value", 110)):
        arguments[name][end:] = math.nan
    dirty = run(arguments | alone)
    for got, expected in zip(dirty, clean, strict=True):
        assert got[:8].equal(expected[:8])
    arguments["key"][70:] = math.nan
    arguments["value"][70:] = math.nan
    assert run(arguments | alone)[0][:3].equal(clean[0][:3])


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("column", [0, -1])
def test_a_live_nan_reaches_the_output(device: str, where: str, column: int) -> None:
    """A tool that looks for NaN must not lose one: it is not a row without keys."""
    arguments = arguments_of(device, batch_of([1], [200]))
    arguments[where][0, :, column] = math.nan
    out, lse = run(arguments)
    assert out.isnan().any(dim=-1).all()
    assert bool(lse.isnan().all()) == (where != "value")


@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_given_outputs_are_filled_and_nothing_beside_them(device: str, out_dtype: torch.dtype) -> None:
    batch = batch_of([2, 0, 3], [18, 4, 140], heads=(3, 3))
    buffer = torch.full((9, 3, 32), 77.0, dtype=out_dtype, device=device)
    lse_buffer = torch.full((9, 3), 77.0, device=device)
    assert_right(device, batch, out=buffer[2:7], lse=lse_buffer[2:7])
    for guard in (buffer[:2], buffer[7:], lse_buffer[:2], lse_buffer[7:]):
        assert bool((guard == 77.0).all())


DECLINED: dict[str, Arguments] = {
    "float32": {"dtype": FP32},
    "head_dim of three powers": {"dims": (112, 32)},
    "head_dim of a small rest": {"dims": (40, 32)},
    "large head_dim": {"dims": (320, 32)},
    "v_head_dim": {"dims": (48, 48)},
    "large v_head_dim": {"dims": (48, 512)},
}


@pytest.mark.parametrize("name", DECLINED)
def test_a_declined_call_raises_the_reason_and_writes_nothing(device: str, name: str) -> None:
    assert_declined(
        RaggedContextCall, PORTABLE_RAGGED, arguments_of(device, batch_of([1, 2], [18, 40], **DECLINED[name]))
    )


@pytest.mark.parametrize("padding", [0, 5])
def test_a_batch_without_rows(device: str, padding: int) -> None:
    """No row, or none but padding: nothing to compute, and no error."""
    query = torch.ones(padding, 2, DIMS[0], dtype=BF16)
    out, lse = run(arguments_of(device, batch_of([0, 0], [18, 3]), query=query, out=None))
    assert out.shape == (padding, 2, DIMS[1])
    assert lse.shape == (padding, 2)


@pytest.mark.parametrize("max_q_len", [1, 16, 17, 64, 65, 5000])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256)])
def test_choose_ragged_tile(max_q_len: int, capability: tuple[int, int] | None, dims: tuple[int, int]) -> None:
    tile = choose_ragged_tile(max_q_len, *dims, capability)
    roomy = capability in (None, (9, 0), (10, 0))
    most = 128 if roomy and dims[0] < 256 else 64
    assert tile.rows == min(most, next(size for size in (16, 32, 64, 128, 8192) if size >= max_q_len))
    # Q once, and K and V in each stage, all bf16: what shared memory must hold.
    held_bytes = 2 * (tile.rows * dims[0] + tile.num_stages * tile.keys * sum(dims))
    assert held_bytes <= (227 if roomy else 99) * 1024


# Launches on a GPU.


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_deepseek_prefill(device: str) -> None:
    """192 and 128 over 16 heads: new tokens, and a long chunk."""
    batch = batch_of([1000, 129, 3000], [1000, 129, 3000], heads=(16, 16), dims=(192, 128))
    for causal in (True, False):
        assert_right(device, batch, is_causal=causal)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_a_call_does_not_synchronise(device: str) -> None:
    scales = {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor([0.7])}
    arguments = arguments_of(device, batch_of([3, 100, 300], [30, 100, 300], heads=(16, 16)), **scales)
    first = run(arguments)  # compiles
    lse = first[1].clone()
    with synchronisation_is_an_error():
        again = run(arguments)
    assert again[1].equal(lse)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_graph_replays_other_lengths(device: str, causal: bool) -> None:
    """The same tensors; longer, shorter, and with rows before the first key: bit for bit as eager."""
    batch = batch_of([100] * 3, [500] * 3, heads=(16, 16), dims=(192, 128))
    arguments = arguments_of(device, batch, is_causal=causal, lse=torch.empty(300, 16))
    arguments |= {"max_q_len": 300, "max_kv_len": 1500}
    graph = graph_of(lambda: run(arguments))
    for q_lens, kv_lens in (([1, 200, 99], [700, 200, 600]), ([300, 0, 0], [0, 5, 1495]), ([9, 90, 201], [8, 1, 0])):
        arguments["seq_lens"].copy_(torch.tensor(kv_lens))
        arguments["cum_seq_lens_q"].copy_(running_sum(q_lens))
        arguments["cum_seq_lens_kv"].copy_(running_sum(kv_lens))
        arguments["query"].copy_(torch.randn_like(arguments["query"]))
        graph.replay()
        eager = run(arguments | {"out": torch.empty_like(arguments["out"]), "lse": None})
        assert arguments["out"].equal(eager[0])
        assert arguments["lse"].equal(eager[1])
        truth, _ = truth_of(arguments)
        assert float(references.relative_l2(eager[0], truth).max()) <= 4 * ROUNDOFF[BF16]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_lengths_windows_and_batches_compile_nothing_new(device: str) -> None:
    def compiled() -> int:
        return sum(len(cache[0]) for cache in portable_ragged._ragged_kernel.device_caches.values())

    run(arguments_of(device, batch_of([200] * 3, [200] * 3), window_left=33))
    before = compiled()
    for q_lens, kv_lens in (([200, 1], [3000, 1]), ([129] * 40, [130] * 40), ([1000], [1001])):
        for window_left in (-1, 0, 1, 16, 17):
            run(arguments_of(device, batch_of(q_lens, kv_lens), window_left=window_left))
    assert compiled() == before


# Anything else.


@st.composite
def problems(draw: st.DrawFn) -> tuple[Batch, Arguments]:
    lengths = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 150)), min_size=1, max_size=3))
    heads = draw(st.sampled_from([(1, 1), (2, 2), (4, 2)]))
    batch = ragged_batch(
        [q_len for q_len, _ in lengths],
        [kv_len for _, kv_len in lengths],
        heads=heads,
        dims=draw(st.sampled_from([(48, 32), (32, 16), (96, 64)])),
        dtype=draw(st.sampled_from([BF16, E4M3])),
        seed=draw(st.integers(0, 2**16)),
    )
    causal = draw(st.booleans())
    options: Arguments = {
        "bmm1_scale": draw(st.sampled_from([0.125, 0.5])),
        "bmm2_scale": draw(st.sampled_from([1.0, 0.3])),
        "attention_sinks": sinks_of(heads[0]) if draw(st.booleans()) else None,
        "is_causal": causal,
        "window_left": draw(st.sampled_from([-1, 0, 30, 100])) if causal else -1,
    }
    return batch, options


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=15, derandomize=True, deadline=None, database=None)
@given(problem=problems())
def test_any_problem(device: str, problem: tuple[Batch, Arguments]) -> None:
    batch, options = problem
    if sum(batch.q_lens):
        assert_right(device, batch, **options)
