"""What all portable kernels promise, against the float64 references: interpreted, or compiled where there is a GPU."""

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab import references
from lab.kernels.portable.key_shares import Shares
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
    [((DECODE, 1), size) for size in (16, 64, 128)] + [((MLA, 1), size) for size in (1, 32, 128)],
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
@pytest.mark.parametrize(
    ("q_len", "causal"), [(1, True), (16, False), (17, True), (40, False), (65, True), (130, False)]
)
def test_rows_after_a_prefix(kernel: PortableKernel, q_len: int, causal: bool) -> None:
    """Each of the tiles, over keys that end before, at and after one, from the rows' own number up."""
    kv_lens = [q_len + prefix for prefix in (0, 1, 62, 63, 64, 128)]
    kernel.right([q_len] * 6, kv_lens, seed=q_len, is_causal=causal)


# What a row sees.


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


# Keys that are shared out.


EVERY_KEY = (
    (DECODE, {"heads": (4, 2), "sinks": sinks_of(4)}, (Shares(1), Shares(2), Shares(40))),
    (DECODE, {"heads": (4, 2), "sinks": sinks_of(4), "window_left": 30}, (Shares(5), Shares(8, 2))),
    (CONTEXT, {"heads": (4, 2)}, (Shares(2), Shares(8, 2), Shares(40))),
    (MLA, {"heads": 13, "rank": 256, "sinks": sinks_of(13), "bmm1_scale": 0.06}, (Shares(1), Shares(5), Shares(8, 2))),
)


@pytest.mark.parametrize(
    ("kernel", "options", "shares"),
    [((function, 1), options, each) for function, options, shares in EVERY_KEY for each in shares],
    indirect=["kernel"],
)
def test_every_key_counts_once(kernel: PortableKernel, options: Arguments, shares: Shares, split: Split) -> None:
    """Shares that end in any request: of no key, of a few, and of most keys of the batch; 65 rows in two blocks."""
    split(shares=shares)
    kv_lens = [0, 3, 160, 70] if kernel.function == MLA else [0, 3, 260, 130]
    kernel.right([5] * 4, kv_lens, 64, out_dtype=FP32, **options)


# What must not matter, and what must.


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


@each((DECODE, {"head_dim": 80}), (CONTEXT, {"page_size": 8}), (MLA, {"rank": 48}), (RAGGED, {"dims": (40, 32)}))
def test_a_declined_call_raises_the_reason_and_writes_nothing(kernel: PortableKernel, options: Arguments) -> None:
    arguments = kernel.pose([1, 1], [18, 40], **options)
    arguments["out"].fill_(77.0)
    with pytest.raises(NotImplementedError, match=r"the portable Triton .*kernel is built for .*, not [0-9]+"):
        kernel.run(arguments)
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
@settings(max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(problem=problems())
def test_any_problem(device: str, split: Split, problem: tuple[str, dict[str, Any], int]) -> None:
    function, options, count = problem
    split(count)
    if sum(options["q_lens"]):
        PortableKernel(function, device).right(options.pop("q_lens"), options.pop("kv_lens"), **options)
