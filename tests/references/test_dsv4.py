"""DeepSeek-V4's call: the reference over two pools, by the dense formula on the entries, and its bad input."""

import math
import random
from typing import Any

import pytest
import torch

from lab.calls import DSV4DecodeCall, Feature
from lab.references import assert_close_to_reference
from lab.references import trtllm_batch_decode_sparse_mla_dsv4 as dsv4
from tests.calls.breaks import (
    POISON,
    Bad,
    Breaks,
    assert_refused,
    bad_of_every_call,
    each_of,
    elsewhere,
    entry,
    int32,
    not_modelled,
    stretched,
    tensor,
    to,
    together,
    value,
)
from tests.cases import Arguments, Batch, expected, of_entries, random_batch, running_sum, selected_batch, write_pages

WINDOW, WIDTH, DIM = 128, 152, 6
E4M3 = torch.float8_e4m3fn


def two_pools(q_lens: list[int], kv_lens: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Batch, Batch]:
    """Batches of recent tokens and of compressed ones, an eighth as many and one more. They have the same queries."""
    window, compressed = (
        random_batch(q_lens, lens, heads=(4, 1), head_dim=DIM, dtype=dtype, seed=seed)
        for seed, lens in enumerate((kv_lens, [length // 8 + 1 for length in kv_lens]))
    )
    return (
        of_entries(window.queries, [each[:, 0] for each in window.keys], DIM),
        of_entries(window.queries, [each[:, 0] for each in compressed.keys], DIM),
    )


def drawn(window: Batch, compressed: Batch, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    """Columns of each row in either pool: positions in any order, also twice, with -1 between them; p + 1 of the first."""
    rng, of_window, of_compressed = random.Random(seed), [], []
    for q_len, kv_len, count in zip(window.q_lens, window.kv_lens, compressed.kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            used = min(WINDOW, position + 1)
            cells = rng.choices(range(position + 1), k=used)
            of_window.append([cell if rng.random() < 0.8 else -1 for cell in cells])
            cells = rng.choices(range(count), k=min(rng.randint(0, count), WIDTH - WINDOW))
            of_compressed.append([cell if rng.random() < 0.8 else -1 for cell in cells])
    return of_window, of_compressed


def arguments_of(
    pools: tuple[Batch, Batch],
    columns: tuple[list[list[int]], list[list[int]]],
    page_sizes: tuple[int, int] = (16, 4),
    ragged: bool = False,
    unused: int = 2**30,
    **changes: Any,
) -> Arguments:
    """The call; columns that a row does not use hold `unused`, and what no history covers is NaN."""
    window, _ = pools
    written = [
        write_pages(batch.keys, size, seed=seed, poison=math.nan)
        for seed, (batch, size) in enumerate(zip(pools, page_sizes, strict=True))
    ]
    requests = [request for request, rows in enumerate(window.queries) for _ in rows]
    places = torch.full((len(requests), WIDTH), unused, dtype=torch.int32)
    for first, ((_, table), of_pool, size) in zip(
        (0, WINDOW), zip(written, columns, page_sizes, strict=True), strict=True
    ):
        for row, (request, positions) in enumerate(zip(requests, of_pool, strict=True)):
            for column, position in enumerate(positions):
                page = int(table[request, position // size])
                places[row, first + column] = -1 if position < 0 else page * size + position % size
    query = torch.cat(window.queries) if ragged else torch.stack(window.queries)
    arguments: Arguments = {
        "query": query,
        "swa_kv_cache": written[0][0],
        "workspace_buffer": None,
        "sparse_indices": places,
        "compressed_kv_cache": written[1][0],
        "sparse_topk_lens": torch.tensor([WINDOW + len(row) for row in columns[1]], dtype=torch.int32),
        "seq_lens": torch.tensor(window.kv_lens, dtype=torch.int32),
        "out": torch.full(query.shape, math.nan, dtype=torch.float64),
    }
    if ragged:
        arguments |= {"cum_seq_lens_q": running_sum(window.q_lens), "max_q_len": max(window.q_lens)}
    return arguments | changes


def truth_of(
    pools: tuple[Batch, Batch], columns: tuple[list[list[int]], list[list[int]]], **rules: Any
) -> torch.Tensor:
    """By the dense formula over both histories, the window's first, of each row alone."""
    window, compressed = pools
    entries = [torch.cat((a[:, 0], b[:, 0])) for a, b in zip(window.keys, compressed.keys, strict=True)]
    requests = [request for request, rows in enumerate(window.queries) for _ in rows]
    cells = [
        first + [window.kv_lens[request] + cell for cell in second if cell >= 0]
        for request, first, second in zip(requests, *columns, strict=True)
    ]
    out, _ = expected(selected_batch(of_entries(window.queries, entries, DIM), cells), causal=False, **rules)
    return out


def assert_right(out: torch.Tensor, truth: torch.Tensor) -> None:
    torch.testing.assert_close(out.flatten(0, -3).double(), truth, rtol=1e-11, atol=1e-12 * float(truth.abs().max()))


# Results


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("page_sizes", [(16, 4), (64, 1), (1, 64)])
def test_random_selections(q_len: int, page_sizes: tuple[int, int]) -> None:
    pools = two_pools([q_len] * 6, [3, 4, 20, 127, 128, 200])
    columns = drawn(*pools)
    assert_right(dsv4(**arguments_of(pools, columns, page_sizes)), truth_of(pools, columns))


def test_requests_of_several_widths_sinks_and_scales() -> None:
    pools = two_pools([0, 3, 1, 4], [0, 9, 150, 130])
    columns, rules = (
        drawn(*pools),
        {"sinks": torch.tensor([0.0, 0.5, -1.0, 3.0]), "bmm1_scale": 0.25, "bmm2_scale": 0.5},
    )
    arguments = arguments_of(pools, columns, ragged=True, **rules)
    assert_right(dsv4(**arguments), truth_of(pools, columns, **rules))
    arguments["bmm1_scale"] = torch.tensor([0.25])
    assert_right(dsv4(**arguments), truth_of(pools, columns, **rules))


def test_rows_after_the_last_request_are_padding() -> None:
    pools = two_pools([2, 1], [9, 150])
    columns = drawn(*pools)
    arguments = arguments_of(pools, columns, ragged=True)
    padded = {name: torch.cat((arguments[name], arguments[name][:2])) for name in ("query", "out", "sparse_indices")}
    padded["sparse_indices"][-2:] = 2**30
    padded["sparse_topk_lens"] = torch.cat((arguments["sparse_topk_lens"], int32(0, 2**30)))
    out = dsv4(**arguments | padded)
    assert_right(out[:-2], truth_of(pools, columns))
    assert not out[-2:].any()


def test_a_row_uses_as_many_window_columns_as_there_are_tokens_up_to_its_own() -> None:
    """Two rows, at positions 1 and 2, over entries 1, 2 and 3; every window column names an entry, and all count as in use."""
    pools = tuple(of_entries([torch.zeros(2, 1, 1)], [torch.tensor([[1.0], [2.0], [3.0]])], 1) for _ in range(2))
    arguments = arguments_of(pools, ([[1, 0, 2]] * 2, [[], []]))
    assert dsv4(**arguments).flatten().tolist() == pytest.approx([1.5, 2.0])
    arguments["seq_lens"] += 1
    arguments["sparse_indices"][:, 3] = arguments["sparse_indices"][:, 0]
    assert dsv4(**arguments).flatten().tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_forms_of_the_pools(dtype: torch.dtype) -> None:
    pools = two_pools([2, 2], [9, 150], dtype)
    columns = drawn(*pools)
    arguments, truth = arguments_of(pools, columns), truth_of(pools, columns)
    caches = {name: arguments[name] for name in ("swa_kv_cache", "compressed_kv_cache")}
    flat = {name: cache.squeeze(1) for name, cache in caches.items()}
    nhd = {name: cache.transpose(1, 2) for name, cache in caches.items()} | {"kv_layout": "NHD"}
    apart = {name: stretched(cache.view(torch.uint8).transpose(2, 3)).transpose(2, 3) for name, cache in caches.items()}
    apart = {name: cache.contiguous().view(dtype) for name, cache in apart.items()}
    wide = {
        name: torch.stack((c.view(torch.uint8), c.view(torch.uint8)), 1)[:, 0].view(dtype) for name, c in caches.items()
    }
    places = {"sparse_indices_are_storage_offsets": False}
    for form in (flat, nhd, apart, wide | places, places, {"out": None}):
        out = dsv4(**arguments | form)
        assert out.shape == arguments["query"].shape
        if "out" in form:
            assert out.dtype == torch.bfloat16
            assert_close_to_reference(out, **arguments | form)
        else:
            assert_right(out, truth)


def test_both_pools_may_be_one_tensor() -> None:
    window, _ = two_pools([1, 1], [9, 150])
    columns = drawn(window, Batch(window.queries, window.keys, window.values))
    pools = (window, window)
    arguments = arguments_of(pools, columns, (16, 16))
    _, table = write_pages(window.keys, 16, seed=0)
    arguments["compressed_kv_cache"] = arguments["swa_kv_cache"]
    for row, cells in enumerate(columns[1]):
        for column, cell in enumerate(cells):
            page = int(table[row, max(cell, 0) // 16])
            arguments["sparse_indices"][row, WINDOW + column] = -1 if cell < 0 else page * 16 + cell % 16
    assert_right(dsv4(**arguments), truth_of(pools, columns))


def test_the_call_is_not_in_the_terms_of_one_pool() -> None:
    pools = two_pools([2, 2], [9, 150])
    problem = DSV4DecodeCall(**arguments_of(pools, drawn(*pools))).problem()
    assert {Feature.TWO_POOLS, Feature.TOP_K, Feature.TOP_K_LENS} <= problem.features()
    one = problem.of_one_pool()
    assert Feature.TWO_POOLS not in one.features()
    one.check_values()
    assert one.of_one_pool() is one
    cells = one.columns_in_use() & (one.selected >= 0)
    assert torch.equal(cells, problem.columns_in_use() & (problem.selected >= 0))
    num_window = problem.window_cache.shape[0] * 16
    assert torch.equal(one.selected[cells], (problem.selected + num_window * (torch.arange(WIDTH) >= WINDOW))[cells])


def test_a_wrong_output_is_told() -> None:
    pools = two_pools([2, 2], [9, 150])
    arguments = arguments_of(pools, drawn(*pools), out=None)
    assert_close_to_reference(dsv4(**arguments), **arguments)
    with pytest.raises(AssertionError, match="dsv4"):
        assert_close_to_reference(dsv4(**arguments | {"bmm1_scale": 1.5}), **arguments)


# Bad input


def good_arguments() -> Arguments:
    """Two requests of two rows and 4 heads, bf16, into a poisoned `out`."""
    pools = two_pools([2, 2], [20, 5])
    out = torch.full((2, 2, 4, DIM), POISON, dtype=torch.bfloat16)
    return arguments_of(pools, drawn(*pools), out=out)


def ragged(**changes: Any) -> Breaks:
    def breaks(good: Arguments) -> Arguments:
        rows = {name: good[name].flatten(0, 1) for name in ("query", "out")}
        return rows | {"cum_seq_lens_q": int32(0, 2, 4), "max_q_len": 2} | changes

    return breaks


BAD: list[Bad] = [
    *bad_of_every_call(has_lse=False),
    (tensor("query", lambda q: q[0]), ValueError, "query must be [batch_size", "without cum", "[2, 4, 6]"),
    (ragged(query=torch.zeros(2, 2, 4, 6)), ValueError, "query must be [num_rows", "with cum_seq_lens_q"),
    (tensor("query", lambda q: q[:, :0]), ValueError, "at least one row", "[2, 0, 4, 6]"),
    (value(sparse_indices=None), TypeError, "sparse_indices must be a torch.Tensor", "NoneType"),
    (value(compressed_kv_cache=None), TypeError, "compressed_kv_cache must be a torch.Tensor"),
    (value(sparse_topk_lens=None), TypeError, "sparse_topk_lens must be a torch.Tensor", "NoneType"),
    (value(kv_layout="HDN"), ValueError, "kv_layout must be 'HND' or 'NHD'", "'HDN'"),
    (tensor("swa_kv_cache", to(E4M3)), TypeError, "swa_kv_cache must be bfloat16", "e4m3"),
    (value(kv_cache_format="nvfp4"), NotImplementedError, "kv_cache_format='nvfp4'", "packed entries"),
    (tensor("compressed_kv_cache", lambda c: c.repeat(1, 2, 1, 1)), ValueError, "compressed_kv_cache"),
    (tensor("swa_kv_cache", lambda c: c[..., :4]), ValueError, "swa_kv_cache must be", "1, ", "6]"),
    (together(tensor("swa_kv_cache", lambda c: c[:, 0]), value(kv_layout="NHD")), ValueError, "kv_layout='NHD'"),
    (tensor("swa_kv_cache", lambda c: c[0, 0]), ValueError, "swa_kv_cache must be [num_pages, 1"),
    (tensor("swa_kv_cache", lambda c: c[:, :, ::2]), ValueError, "next to each other", "offsets=False"),
    (tensor("swa_kv_cache", lambda c: torch.stack((c[:1], c[:1]), 1)[:, 0]), ValueError, "next to", "offsets=False"),
    (tensor("sparse_indices", to(torch.int64)), TypeError, "sparse_indices must be int32", "int64"),
    (tensor("sparse_indices", lambda t: t[:, :124]), ValueError, "multiple of 4", "128", "[4, 124]"),
    (tensor("sparse_indices", lambda t: t[:, :130]), ValueError, "multiple of 4", "[4, 130]"),
    (tensor("sparse_indices", lambda t: t.view(2, 2, -1)), ValueError, "[num_rows", "[2, 2, 152]"),
    (tensor("sparse_indices", lambda t: t[:2]), NotImplementedError, "has 2 rows and query 4"),
    (tensor("sparse_indices", lambda t: t.repeat(2, 1)), ValueError, "has 8 rows and query 4"),
    (tensor("sparse_indices", stretched), ValueError, "sparse_indices rows must be contiguous"),
    (tensor("sparse_topk_lens", lambda s: s[:2]), ValueError, "sparse_topk_lens must have shape [4]"),
    (tensor("sparse_topk_lens", to(torch.int64)), TypeError, "sparse_topk_lens must be int32", "int64"),
    (entry("sparse_topk_lens", (2,), 127), ValueError, "sparse_topk_lens[2] = 127", "between 128 and", "152"),
    (entry("sparse_topk_lens", (2,), 153), ValueError, "sparse_topk_lens[2] = 153", "sparse_indices = 152"),
    (tensor("seq_lens", lambda s: s.to(torch.uint32)), TypeError, "seq_lens must be int32", "uint32"),
    (entry("seq_lens", (1,), 1), ValueError, "seq_lens[1] = 1", "2 query rows"),
    (entry("sparse_indices", (1, 2), 128), ValueError, "128 of row 1, column 2", "sparse_indices"),
    (
        together(entry("sparse_indices", (0, 128), 2**20), value(sparse_topk_lens=int32(129, 128, 128, 128))),
        ValueError,
        "row 0, column 128",
        "-1 is none",
    ),
    (value(out=torch.zeros(4, 4, 6)), ValueError, "out must be [2, 2, 4, 6]", "[4, 4, 6]"),
    (value(max_q_len=3), ValueError, "max_q_len must be None or 2", "3"),
    (value(max_q_len=torch.ones(2)), TypeError, "max_q_len must be an int"),
    (value(max_q_len=True), TypeError, "max_q_len must be an int", "True"),
    (ragged(max_q_len=None), TypeError, "max_q_len must be an int", "None"),
    (ragged(cum_seq_lens_q=int32(0, 3, 2)), ValueError, "cum_seq_lens_q", "decreases"),
    (ragged(cum_seq_lens_q=int32(0)), ValueError, "cum_seq_lens_q", "at least one request"),
    (ragged(cum_seq_lens_q=int32(0, 2, 4).long()), TypeError, "cum_seq_lens_q must be int32"),
    (ragged(cum_seq_lens_q=int32(0, 1, 4)), ValueError, "3 rows, more than max_q_len = 2"),
    (value(backend="xqa"), ValueError, "backend='xqa' is unknown"),
    *not_modelled(
        backend="cake",
        hca_swa_indices=int32(1),
        hca_is_causal=False,
        hca_use_persistent=True,
        hca_sparse_indices_format="compressed-page-aligned",
        swa_topk_lens=int32(1),
        extra_sparse_indices=int32(1),
        sparse_topk_lens_offset=128,
        sparse_indices_are_storage_offsets=True,
        dsv4_inv_rope_cos_sin_cache=torch.zeros(8, 64),
        dsv4_output_scale=int32(1),
    )[1:],
    (value(backend="cute-dsl"), NotImplementedError, "backend='cute-dsl'", "use one of auto"),
    *elsewhere("sparse_indices", "swa_kv_cache", "compressed_kv_cache", "sparse_topk_lens"),
]


@each_of(BAD)
def test_bad_input_is_refused_before_anything_is_written(row: Bad) -> None:
    assert_refused(lambda lse, **given: dsv4(**given), good_arguments(), row)


def test_what_no_row_uses_may_hold_anything() -> None:
    for change in (
        value(),
        ragged(),
        entry("sparse_indices", (2, 4), 2**30),
        value(backend="trtllm-gen"),
        value(max_q_len=2),
    ):
        good = good_arguments()
        out = dsv4(**good | change(good))
        assert (out != POISON).any(dim=-1).all()
