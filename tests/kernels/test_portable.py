"""What all portable kernels promise, against the float64 references: interpreted, or compiled where there is a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab import references
from lab.calls import ContextCall, DecodeCall, RaggedContextCall
from lab.calls.mla_decode import MLADecodeCall
from lab.gpus import capability_of
from lab.kernels.portable.key_shares import Shares
from lab.kernels.support import Kernel, why_not
from lab.kernels.support.portable import PORTABLE, PORTABLE_MLA, PORTABLE_RAGGED
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments, Batch, chunk, merged, of_entries
from tests.devices import DEVICES
from tests.kernels.conftest import Split
from tests.kernels.held import BF16, E4M3, FLOAT32_SUMS, FP16, FP32, ROUNDOFF
from tests.kernels.portable_calls import NAN, PortableKernel, arguments_of, batch_of, kernels, sinks_of, truth_of

FOUR = (DECODE, CONTEXT, MLA, RAGGED)


def each(*rows: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrize with (function, options of its call), the keys of none shared out."""
    return pytest.mark.parametrize(("kernel", "options"), [((row[0], 1), row[1]) for row in rows], indirect=["kernel"])


# Shapes and dtypes.


@pytest.mark.parametrize(
    ("kernel", "page_size"),
    [((DECODE, 1), size) for size in (16, 32, 64, 128)] + [((MLA, 1), size) for size in (1, 16, 32, 64, 128)],
    indirect=["kernel"],
)
def test_lengths_at_page_and_tile_edges(kernel: PortableKernel, page_size: int) -> None:
    lengths = {0, 1, page_size - 1, page_size, page_size + 1, 31, 32, 33, 63, 64, 65, 127, 128, 129}
    kernel.right([1] * len(lengths), sorted(lengths), page_size, seed=page_size)


@kernels(RAGGED, CONTEXT, counts=(1,))
@pytest.mark.parametrize("causal", [True, False])
def test_new_tokens_at_tile_edges(kernel: PortableKernel, causal: bool) -> None:
    lengths = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]
    kernel.right(lengths, lengths, **of_rule(kernel, causal))


def of_rule(kernel: PortableKernel, causal: bool) -> Arguments:
    """The argument of a call that may be otherwise than causal."""
    return {"is_causal" if kernel.function == RAGGED else "causal": causal}


@kernels(RAGGED, counts=(1,))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 16, 17, 40, 65, 130])
def test_rows_after_a_prefix(kernel: PortableKernel, q_len: int, causal: bool) -> None:
    """Each of the tiles, over keys that end before, at and after one, from the rows' own number up."""
    kv_lens = [q_len + prefix for prefix in (0, 1, 62, 63, 64, 128)]
    kernel.right([q_len] * 6, kv_lens, seed=q_len, is_causal=causal)


@kernels(DECODE, MLA, counts=(1,))
@pytest.mark.parametrize("q_len", [*range(1, 9), 11])
def test_verify(kernel: PortableKernel, q_len: int) -> None:
    """Lengths from the rows' own up; 3 heads, so that a tile of 16 packed rows ends within a token."""
    sinks = sinks_of(3) if q_len % 2 else None
    kernel.right([q_len] * 3, [q_len, 31 + q_len, 64 + q_len], heads=3, seed=q_len, sinks=sinks)


@each(
    *((DECODE, heads) for heads in ((2, 2), (4, 2), (3, 1), (10, 2), (8, 1))),
    *((MLA, heads) for heads in (1, 8, 16, 24, 128)),
    *((RAGGED, heads) for heads in ((1, 1), (3, 3), (16, 16), (4, 2), (6, 1))),
)
def test_heads(kernel: PortableKernel, options: Any) -> None:
    """Every head has a sink of its own; tokens of 24 heads end within a block of rows, 128 heads take several blocks."""
    heads = options if isinstance(options, int) else options[0]
    kernel.right([2, 2], [19, 70], heads=options, sinks=sinks_of(heads))


@each(
    *((MLA, {"rank": rank, "rope": rope}) for rank, rope in ((16, 16), (32, 64), (64, 32), (256, 64), (512, 0))),
    *((RAGGED, {"dims": dims}) for dims in ((96, 64), (192, 128), (128, 128), (256, 256), (16, 16), (80, 256))),
)
def test_sizes(kernel: PortableKernel, options: Arguments) -> None:
    kernel.right([3, 70], [3, 140], **options)


@kernels(MLA, counts=(1,))
@pytest.mark.parametrize("q_len", [1, 4])
def test_deepseek_v3(kernel: PortableKernel, q_len: int) -> None:
    """576 and 512 with the 16 heads of a tensor-parallel eighth: a tile of 16 rows, and one of 64."""
    kernel.right([q_len] * 2, [66, 130], 64, heads=16, rank=512, rope=64, bmm1_scale=192**-0.5)


CACHED = [(BF16, BF16, BF16), (FP16, FP16, FP16), (BF16, E4M3, BF16), (FP16, E4M3, FP16), (E4M3, E4M3, BF16)]
CACHED += [(E4M3, E4M3, E4M3), (BF16, BF16, FP32)]
DTYPES = [
    *(((DECODE, 1), dtypes, {"head_dim": size}) for dtypes in CACHED for size in (64, 128, 256)),
    *(((MLA, count), dtypes, {}) for dtypes in CACHED for count in (1, 2)),
    *(
        ((RAGGED, 1), (dtype, dtype, out), {"is_causal": causal})
        for dtype, out in ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, BF16), (E4M3, BF16), (E4M3, FP16))
        for causal in (True, False)
    ),
]


@pytest.mark.parametrize(("kernel", "dtypes", "options"), DTYPES, indirect=["kernel"], ids=str)
def test_dtypes(kernel: PortableKernel, dtypes: tuple[torch.dtype, ...], options: Arguments) -> None:
    dtype, kv_dtype, out_dtype = dtypes
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype, "bmm2_scale": 1.3} | options
    kernel.right([2, 2], [35, 130], 32, **options)


@kernels(DECODE, MLA, RAGGED)
@pytest.mark.parametrize("tensors", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_scales(kernel: PortableKernel, tensors: tuple[bool, bool]) -> None:
    """Unequal, as numbers and as tensors of one element of either rank."""
    scales = {
        "bmm1_scale": torch.tensor(0.25) if tensors[0] else 0.25,
        "bmm2_scale": torch.tensor([0.6]) if tensors[1] else 0.6,
    }
    kernel.right([2, 2], [33, 150], kv_dtype=E4M3, **scales)


@kernels(DECODE, MLA, RAGGED, counts=(1,))
def test_whole_numbers_are_scales(kernel: PortableKernel) -> None:
    whole, _ = kernel.right([1], [33], bmm1_scale=1, bmm2_scale=2)
    assert whole.equal(kernel.right([1], [33], bmm1_scale=1.0, bmm2_scale=2.0)[0])


@kernels(*FOUR, counts=(1,))
def test_uint32_lengths(kernel: PortableKernel) -> None:
    """The interpreter lets a variable change its dtype in a loop; the compiler does not."""
    kernel.right([1, 1], [33, 5], seq_lens=torch.tensor([33, 5], dtype=torch.uint32))


# Results.


@kernels(DECODE, MLA, RAGGED, counts=(1,))
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3])
def test_a_new_output(kernel: PortableKernel, dtype: torch.dtype) -> None:
    """Of MLA bf16; else the query's dtype, but that of a ragged call of e4m3."""
    out, _ = kernel.run(kernel.pose([2, 2], [33, 150], dtype=dtype, out=None))
    expected = BF16 if kernel.function == MLA or (kernel.function == RAGGED and dtype == E4M3) else dtype
    assert out.dtype == expected
    assert out.flatten(0, -3).equal(kernel.right([2, 2], [33, 150], dtype=dtype, out_dtype=expected)[0])


@kernels(DECODE, MLA, RAGGED)
@pytest.mark.parametrize("q_lens", [[2, 2], [2, 3]], ids=["equal", "ragged"])
def test_an_lse_is_given_or_new_or_none(kernel: PortableKernel, q_lens: list[int]) -> None:
    given_out, given = kernel.right(q_lens, [2, 150])
    out, lse = kernel.run(kernel.pose(q_lens, [2, 150], lse=None))
    assert out.flatten(0, -3).equal(given_out)
    assert lse.view(given.shape).equal(given)
    base = {"return_lse_base": None} if kernel.function == MLA else {}
    alone = kernel.run(kernel.pose(q_lens, [2, 150], return_lse=False, **base))
    assert isinstance(alone, Tensor)
    assert alone.flatten(0, -3).equal(given_out)


@kernels(MLA)
@pytest.mark.parametrize("q_lens", [[2, 2], [2, 3]], ids=["equal", "ragged"])
def test_an_lse_in_base_e(kernel: PortableKernel, q_lens: list[int]) -> None:
    _, base_2 = kernel.right(q_lens, [1, 150])
    for lse in ({}, {"lse": None}):
        natural = kernel.run(kernel.pose(q_lens, [1, 150], return_lse_base="basee", **lse))[1]
        torch.testing.assert_close(natural.view(base_2.shape), base_2 * math.log(2.0))


@kernels(DECODE, RAGGED)
def test_a_given_lse_is_filled_without_being_returned(kernel: PortableKernel) -> None:
    """A ragged call's may have any strides."""
    out, expected = kernel.right([2, 3], [18, 40])
    columns = [torch.full((2, 5), 77.0).T] if kernel.function == RAGGED else []
    for lse in (torch.full((5, 2), 77.0), *columns):
        arguments = kernel.pose([2, 3], [18, 40], lse=lse, return_lse=False)
        assert kernel.run(arguments).equal(out)
        assert arguments["lse"].equal(expected)


@kernels(CONTEXT, MLA, RAGGED)
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_given_results_are_filled_and_nothing_beside_them(kernel: PortableKernel, out_dtype: torch.dtype) -> None:
    size = kernel.pose([1], [1])["out"].shape[-1]
    buffer = torch.full((9, 3, size), 77.0, dtype=out_dtype, device=kernel.device)
    lse_buffer = torch.full((9, 3), 77.0, device=kernel.device)
    kernel.right([2, 0, 3], [18, 4, 140], heads=3, out=buffer[2:7], lse=lse_buffer[2:7])
    for guard in (buffer[:2], buffer[7:], lse_buffer[:2], lse_buffer[7:]):
        assert bool((guard == 77.0).all())


@kernels(*FOUR, counts=(1,))
@pytest.mark.parametrize("padding", [0, 5])
def test_a_batch_without_rows(kernel: PortableKernel, padding: int) -> None:
    """No row, or none but padding, as a CUDA graph with room for more leaves it: nothing to compute, and no error."""
    query = torch.ones(padding, 2, kernel.pose([1], [1])["query"].shape[-1], dtype=BF16)
    out, lse = kernel.run(kernel.pose([0, 0], [18, 3], query=query, out=None, lse=None))
    assert out.shape == (padding, 2, kernel.pose([1], [1])["out"].shape[-1])
    assert lse.shape == (padding, 2)


# What a row sees.


@kernels(DECODE, RAGGED, counts=(1,))
@pytest.mark.parametrize("window_left", [0, 1, 15, 20, 63, 64, 65, 73, 150, 10_000])
def test_windows(kernel: PortableKernel, window_left: int) -> None:
    lengths = {DECODE: ([3, 3, 3], [3, 70, 140]), RAGGED: ([1, 70, 200, 3], [300, 150, 200, 130])}[kernel.function]
    kernel.right(*lengths, window_left=window_left, sinks=sinks_of(2) if window_left % 2 else None, seed=window_left)


@kernels(DECODE, MLA, RAGGED, counts=(1, 2, 3))
def test_sinks_count_once(kernel: PortableKernel) -> None:
    for sinks in (sinks_of(4), torch.tensor([-math.inf, 40.0, -40.0, 0.0])):
        kernel.right([2, 2], [5, 260], heads=4, sinks=sinks)


@kernels(DECODE, CONTEXT, MLA, RAGGED, counts=(1, 3))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_without_a_key_are_zero(kernel: PortableKernel, causal: bool) -> None:
    """Those of a request without keys; and, causal, the first of a request with fewer keys than rows."""
    if not causal and kernel.function not in (CONTEXT, RAGGED):
        pytest.skip("the call is causal")
    q_lens = [4, 140, 3] if kernel.function == RAGGED else [4, 4, 4]
    num_empty = 4 + (q_lens[1] - 2 if causal else 0)
    rule = {} if causal else of_rule(kernel, causal)
    for sinks in (None, sinks_of(2)):
        out, lse = kernel.right(q_lens, [0, 2, 100], sinks=sinks, **rule)
        assert not out[:num_empty].any()
        empty = torch.full((2,), -math.inf) if sinks is None else sinks / math.log(2)
        torch.testing.assert_close(lse[:num_empty].cpu(), empty.expand(num_empty, 2))
        assert bool(out[num_empty:].any(dim=-1).all())


@kernels(MLA, RAGGED)
def test_ragged_rows_and_loose_bounds(kernel: PortableKernel) -> None:
    """Some bounds make blocks of rows that no request has."""
    bounds: dict[str, list[Arguments]] = {
        MLA: [{}, {"max_q_len": 50}],
        RAGGED: [{}, {"max_q_len": 100, "max_kv_len": 1000}, {"max_q_len": 1000}],
    }
    q_len = {MLA: 6, RAGGED: 66}[kernel.function]
    for bound in bounds[kernel.function]:
        kernel.right([1, 0, q_len, 2, 0, 5], [70, 3, q_len, 1, 0, 0], heads=3, **bound)


@pytest.mark.parametrize(
    ("kernel", "dtypes", "q_len"),
    [
        *(((DECODE, count), of, 1) for count in (1, 2) for of in ((BF16, E4M3), (FP16, FP16), (FP16, E4M3))),
        *(((MLA, 1), (E4M3, E4M3), q_len) for q_len in (1, 16)),
    ],
    indirect=["kernel"],
)
def test_light_keys_count(kernel: PortableKernel, dtypes: tuple[torch.dtype, torch.dtype], q_len: int) -> None:
    """One key without a value has nearly all the weight; 299 others of 2 ** -26 each are all that is to be seen."""
    value, place = torch.ones(300, 64), torch.zeros(300, 16)
    value[0], place[0, 0] = 0.0, 26.0
    if kernel.function == MLA:
        query = torch.zeros(q_len, 4, 80)
        query[..., 64] = 1.0
        batch = of_entries([query], [torch.cat((value, place), 1)], rank=64)
    else:
        query, key = torch.zeros(q_len, 1, 64), torch.zeros(300, 1, 64)
        query[..., 0], key[:, 0, :16] = 1.0, place
        batch = Batch([query], [key], [value.unsqueeze(1)])
    keys, values = ([part.to(dtypes[1]) for part in side] for side in (batch.keys, batch.values))
    batch = Batch([query.to(dtypes[0])], keys, values)
    arguments = arguments_of(
        kernel.function, batch, device=kernel.device, bmm1_scale=math.log(2.0), out_dtype=FP32, lse=None
    )
    out, _ = kernel.run(arguments)
    seen = torch.arange(300 - q_len, 300, device=kernel.device).view(-1, 1, 1).expand(out.flatten(0, -3).shape)
    torch.testing.assert_close(out.flatten(0, -3), seen * 2.0**-26, rtol=1e-3, atol=0.0)


@each((CONTEXT, (16, 8)), (MLA, (1, 16)), (MLA, (4, 16)))
def test_a_pool_without_pages(kernel: PortableKernel, options: tuple[int, int]) -> None:
    """Nothing to describe to the copy engine: requests without keys, of 16, 64 and 128 rows."""
    q_len, heads = options
    arguments = kernel.pose([q_len] * 2, [0, 0], 64, heads=heads)
    cache = arguments["kv_cache"]
    out, lse = kernel.run(
        arguments | {"kv_cache": tuple(each[:0] for each in cache) if isinstance(cache, tuple) else cache[:0]}
    )
    assert not out.any()
    assert bool((lse == -math.inf).all())


@kernels(RAGGED, counts=(1,))
def test_new_tokens_and_chunks_of_the_prefix_merge_to_the_whole(kernel: PortableKernel) -> None:
    """New tokens causal, two chunks not, some requests without a key in one."""
    new, prefixes = [4, 1, 70, 3], [11, 0, 205, 90]
    lengths = [prefix + rows for prefix, rows in zip(prefixes, new, strict=True)]
    middle = [min(prefix, 100) for prefix in prefixes]
    batch = batch_of(RAGGED, new, lengths)
    spans = [(prefixes, lengths), ([0] * 4, middle), (middle, prefixes)]
    parts = []
    for (starts, ends), causal in zip(spans, (True, False, False), strict=True):
        part = chunk(batch, starts, ends)
        parts.append(kernel.hold(arguments_of(RAGGED, part, device=kernel.device, is_causal=causal, out_dtype=FP32)))
    out, lse = merged(parts)
    truth, truth_lse = truth_of(RAGGED, arguments_of(RAGGED, batch, device=kernel.device))
    assert float(references.relative_l2(out, truth).max()) <= 2 * ROUNDOFF[BF16]
    torch.testing.assert_close(lse, truth_lse.double(), rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


# Where tensors lie.


@kernels(DECODE, MLA, RAGGED, counts=(1,))
def test_tensors_of_any_stride(kernel: PortableKernel) -> None:
    """A query, and a ragged call's keys and values, of one projection; or heads first."""
    expected, _ = kernel.right([2, 3], [18, 140], heads=4)
    arguments = kernel.pose([2, 3], [18, 140], heads=4)
    names = ("query", "key", "value") if kernel.function == RAGGED else ("query",)
    apart, heads_first = dict(arguments), dict(arguments)
    for name in names:
        rows, heads, size = arguments[name].shape
        wide = torch.full((rows, heads + 2, 3 * size), NAN, dtype=BF16, device=kernel.device)
        apart[name] = wide[:, 1:-1, size : 2 * size].copy_(arguments[name])
        heads_first[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    for changed in (apart, heads_first):
        assert kernel.run(changed)[0].equal(expected)


@kernels(MLA, counts=(1,))
def test_a_cache_of_any_rank_and_stride(kernel: PortableKernel) -> None:
    """Pages with gaps between them and between their entries, and pages one after the other; a slice of a wider table."""
    expected, _ = kernel.right([2, 2], [18, 140])
    arguments = kernel.pose([2, 2], [18, 140])
    cache, table = arguments["kv_cache"], arguments["block_tables"]
    pages, _, page_size, head_dim = cache.shape
    gaps = torch.full((pages, 3, page_size + 5, head_dim + 8), NAN, dtype=BF16, device=kernel.device)
    gaps[:, 1, :page_size, :head_dim] = cache[:, 0]
    entries_first = cache.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = {"block_tables": torch.nn.functional.pad(table, (0, 3), value=-1)[:, :-3]}
    caches = (cache[:, 0], gaps[:, 1:2, :page_size, :head_dim], entries_first)
    for change in (wide, *({"kv_cache": each} for each in caches)):
        assert kernel.run(arguments | change)[0].flatten(0, 1).equal(expected)


# Keys that are shared out.


@kernels(DECODE, CONTEXT, MLA, counts=(1,))
@pytest.mark.parametrize("options", [{}, {"window_left": 40}, {"sinks": sinks_of(2)}], ids=["plain", "window", "sinks"])
def test_splits_agree(kernel: PortableKernel, split: Split, options: Arguments) -> None:
    """From a program for all keys to more programs than there are tiles."""
    options = {name: value for name, value in options.items() if name != "window_left" or kernel.function != MLA}
    whole, whole_lse = kernel.right([3, 3], [7, 260], 64, seed=3, out_dtype=FP32, **options)
    for count in (2, 12):
        split(count)
        out, lse = kernel.right([3, 3], [7, 260], 64, seed=3, out_dtype=FP32, **options)
        assert float(references.relative_l2(out, whole).max()) <= 2 * ROUNDOFF[BF16]
        torch.testing.assert_close(lse, whole_lse, rtol=FLOAT32_SUMS, atol=FLOAT32_SUMS)


@each(
    (DECODE, {"heads": (4, 2), "sinks": sinks_of(4)}),
    (DECODE, {"heads": (4, 2), "sinks": sinks_of(4), "window_left": 30}),
    (MLA, {"heads": 13, "rank": 256, "sinks": sinks_of(13), "bmm1_scale": 0.06}),
)
@pytest.mark.parametrize("shares", [(1, 1), (2, 1), (5, 1), (8, 2), (40, 1)], ids=str)
def test_every_key_counts_once(kernel: PortableKernel, options: Arguments, shares: Any, split: Split) -> None:
    """Shares that end in any request: of no key, of a few, and of most keys of the batch; 65 rows in two blocks."""
    split(shares=Shares(*shares))
    kv_lens = [0, 3, 160, 70] if kernel.function == MLA else [0, 3, 260, 130]
    kernel.right([5] * 4, kv_lens, 64, out_dtype=FP32, **options)


@kernels(DECODE, MLA, counts=(1,))
def test_a_slot_that_nobody_fills_leaves_no_trace(
    kernel: PortableKernel, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lay in the memory of partial results must not show."""
    split(shares=Shares(4))
    clean, _ = kernel.right([2, 2], [3, 300])
    arguments = kernel.pose([2, 2], [3, 300])

    # Scratch is bytes, and float32 of ones alone is NaN.
    def full_of_nan(*shape: Any, dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.full(*shape, NAN if dtype.is_floating_point else 255, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert kernel.run(arguments)[0].flatten(0, -3).equal(clean)


# What must not matter, and what must.


@kernels(DECODE, CONTEXT, MLA)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
@pytest.mark.parametrize("foreign_id", [-1, 2**30])
def test_poison_changes_no_bit(kernel: PortableKernel, kv_dtype: torch.dtype, foreign_id: int) -> None:
    """NaN in page tails and unread pages, and stale ids, or none, in the table's tails."""
    clean, dirty = (
        kernel.run(kernel.pose([2] * 4, [1, 33, 64, 0], 32, kv_dtype=kv_dtype, **poison))
        for poison in ({}, {"poison": NAN, "foreign_id": foreign_id})
    )
    assert all(map(torch.equal, dirty, clean))


@kernels(MLA)
def test_rows_after_the_last_request_disturb_nobody(kernel: PortableKernel) -> None:
    expected, _ = kernel.right([1, 3], [70, 40])
    query = kernel.pose([1, 3], [70, 40])["query"]
    padded = torch.cat((query, torch.full_like(query[:2], NAN)))
    out, _ = kernel.run(kernel.pose([1, 3], [70, 40], query=padded, out=torch.zeros(6, 2, 64, dtype=BF16), lse=None))
    assert out[:4].equal(expected)


@kernels(RAGGED, counts=(1,))
@pytest.mark.parametrize("causal", [True, False])
def test_rows_and_keys_of_nobody_disturb_nobody(kernel: PortableKernel, causal: bool) -> None:
    """NaN after the last request's tokens, and in the next request's, which a tile's end reaches into."""
    arguments = kernel.pose([3, 5, 4], [70, 40, 9], is_causal=causal)
    clean = [result.clone() for result in kernel.run(arguments)]
    alone = {"batch_size": 2, "seq_lens": arguments["seq_lens"][:2]}
    alone |= {name: arguments[name][:3] for name in ("cum_seq_lens_q", "cum_seq_lens_kv")}
    for name, end in (("query", 8), ("key", 110), ("value", 110)):
        arguments[name][end:] = NAN
    for got, expected in zip(kernel.run(arguments | alone), clean, strict=True):
        assert got[:8].equal(expected[:8])
    arguments["key"][70:] = NAN
    arguments["value"][70:] = NAN
    assert kernel.run(arguments | alone)[0][:3].equal(clean[0][:3])


@kernels(DECODE, MLA, RAGGED, counts=(1, 3))
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("column", [0, -1])
def test_a_live_nan_reaches_output_and_lse(kernel: PortableKernel, where: str, column: int) -> None:
    """A tool that looks for NaN must not lose one: it is not a row without keys. MLA's value is a part of its key."""
    arguments = kernel.pose([1], [300])
    if where == "query" or kernel.function == RAGGED:
        vectors = arguments[where][:1]
    else:
        page, cache = int(arguments["block_tables"][0, 0]), arguments["kv_cache"]
        vectors = (
            cache[page, :, 5, 64 * (where == "key") :]
            if kernel.function == MLA
            else cache[where == "value"][page, :, 5]
        )
    vectors[..., column] = NAN
    out, lse = kernel.run(arguments)
    assert out.isnan().any(dim=-1).all()
    assert bool(lse.isnan().all()) == (where != "value" or kernel.function == MLA)


CALLS: dict[str, tuple[Any, Kernel]] = {
    DECODE: (DecodeCall, PORTABLE),
    CONTEXT: (ContextCall, PORTABLE),
    MLA: (MLADecodeCall, PORTABLE_MLA),
    RAGGED: (RaggedContextCall, PORTABLE_RAGGED),
}


@each(
    *((DECODE, options) for options in ({"dtype": FP32}, {"head_dim": 80}, {"page_size": 8}, {"lse": "with gaps"})),
    *((MLA, options) for options in ({"dtype": FP32}, {"rank": 48}, {"rank": 1024}, {"rope": 24})),
    (RAGGED, {"dtype": FP32}),
    *((RAGGED, {"dims": dims}) for dims in ((112, 32), (40, 32), (320, 32), (48, 48), (48, 512))),
)
def test_a_declined_call_raises_the_reason_and_writes_nothing(kernel: PortableKernel, options: Arguments) -> None:
    lse = {"lse": torch.empty(2, 8)[:, :2]} if "lse" in options else {}
    arguments = kernel.pose([1, 1], [18, 40], **options | lse)
    arguments["out"].fill_(77.0)
    call, row = CALLS[kernel.function]
    problem = call(**arguments).problem()
    reason = why_not(row, capability_of(problem.query.device), problem)
    assert reason is not None
    with pytest.raises(NotImplementedError) as error:
        kernel.run(arguments)
    assert str(error.value) == reason
    assert bool((arguments["out"] == 77.0).all())


# Anything else.


@st.composite
def problems(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
    """Draw a call: its function, what `PortableKernel.pose` takes, and in how many shares its keys are."""
    function, causal, count = draw(st.sampled_from(FOUR)), draw(st.booleans()), draw(st.sampled_from([1, 2, 5]))
    most_rows = 150 if function == RAGGED else 9
    lengths = draw(st.lists(st.tuples(st.integers(0, most_rows), st.integers(0, 150)), min_size=1, max_size=3))
    heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2), (8, 2)]))
    options: dict[str, Any] = {
        "q_lens": [q_len for q_len, _ in lengths],
        "kv_lens": [kv_len for _, kv_len in lengths],
        "page_size": draw(st.sampled_from([16, 64, 128])),
        "heads": heads[0] if function == MLA else heads,
        "kv_dtype": draw(st.sampled_from([BF16, E4M3])),
        "seed": draw(st.integers(0, 2**16)),
        "bmm1_scale": draw(st.sampled_from([0.125, 0.5])),
        "bmm2_scale": draw(st.sampled_from([1.0, 0.3])),
        "sinks": draw(st.sampled_from([None, sinks_of(heads[0])])),
    }
    if function in (DECODE, CONTEXT):
        options |= {"separate_tables": draw(st.booleans()), "kv_layout": draw(st.sampled_from(["HND", "NHD"]))}
    if function == MLA:
        options |= {"rank": draw(st.sampled_from([16, 64])), "rope": draw(st.sampled_from([0, 16, 32]))}
    else:
        options["window_left"] = draw(st.sampled_from([-1, 0, 5, 40, 100])) if causal or function == DECODE else -1
    if function == RAGGED:
        options |= {"is_causal": causal, "dims": draw(st.sampled_from([(48, 32), (32, 16), (96, 64)]))}
    elif function == CONTEXT:
        options["causal"] = causal
    return function, options, count


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_any_problem(device: str, split: Split, problem: tuple[str, dict[str, Any], int]) -> None:
    function, options, count = problem
    split(count)
    if sum(options["q_lens"]):
        PortableKernel(function, device).right(options.pop("q_lens"), options.pop("kv_lens"), **options)
