"""Sparse decode by the portable kernels: the truth is the dense call over what each row or K/V head selects."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import portable
from lab.kernels.portable import paged
from lab.kernels.portable.key_shares import Shares
from tests.cases import (
    DECODE,
    MLA,
    Arguments,
    Batch,
    block_sparse_arguments,
    decode_arguments,
    latent_batch,
    mla_arguments,
    of_kv_head,
    random_batch,
    selected_batch,
    sparse_arguments,
)
from tests.kernels.conftest import Split
from tests.kernels.held import BF16, E4M3, FP16, on
from tests.kernels.portable_calls import NAN, sinks_of

TOP_K = 200  # columns, more than three tiles
Columns = list[list[int]]


def drawn(q_lens: Sequence[int], kv_lens: Sequence[int], top_k: int = TOP_K, seed: int = 0) -> Columns:
    """Return the positions that each row selects, fewer than it may and in any order, with -1 in front, inside and behind."""
    rng = random.Random(seed)
    columns = []
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            used = min(top_k, max(position + 1, 0))
            chosen = rng.sample(range(max(position + 1, 1)), used)
            row = [each if rng.random() < 0.7 and index > 1 else -1 for index, each in enumerate(chosen)]
            columns.append(row + [-1] * (top_k - used))
    return columns


def right(q_lens: Sequence[int], kv_lens: Sequence[int], columns: Columns, device: str, **changes: Any) -> Tensor:
    """Hold a sparse call to the dense call whose requests are its rows, with NaN where no row selects; return the LSE."""
    of_batch = {name: changes.pop(name) for name in ("heads", "rank", "rope", "dtype", "kv_dtype") if name in changes}
    batch = latent_batch(q_lens, kv_lens, **{"heads": 4, "rank": 64, "rope": 16} | of_batch)
    usual = {"bmm1_scale": 0.125, "out": None, "ragged": len(set(q_lens)) > 1}
    arguments = poisoned(sparse_arguments(batch, columns, **usual | changes))
    out, lse = run(MLA, arguments, device)
    is_of_call = ("sinks", "bmm2_scale", "bmm1_scale")
    alone = {name: value for name, value in (usual | changes).items() if name in is_of_call}
    truth = mla_arguments(selected_batch(batch, columns), **alone, out=None)
    hold(truth, (out.view(-1, 1, *out.shape[-2:])[: len(columns)], lse[: len(columns)]))
    return lse


def poisoned(arguments: Arguments) -> Arguments:
    """Fill the entries that no column names with NaN."""
    places = arguments["block_tables"].flatten()
    cache = arguments["kv_cache"].clone()
    unread = torch.ones(cache.shape[:-1].numel(), dtype=torch.bool)
    unread[places[(places >= 0) & (places < len(unread))].long()] = False
    entries = cache.view(-1, cache.shape[-1])
    entries[unread] = torch.full_like(entries[unread].float(), NAN).to(cache.dtype)
    return arguments | {"kv_cache": cache}


def run(function: str, arguments: Arguments, device: str) -> Any:
    call = getattr(portable, function)
    call.cache_clear()
    out, lse = call(**{name: on(device, value) for name, value in arguments.items()})
    return out.cpu(), lse.cpu()


def hold(truth: Arguments, results: tuple[Tensor, Tensor]) -> None:
    references.assert_close_to_reference(
        results, arithmetic=FP16 if truth["query"].dtype == FP16 else BF16, check_dtype=False, **truth
    )


# Entries selected for each row of an MLA decode.


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((1, 1, 1), (1, 70, 400)), ((3, 3), (3, 300)), ((1, 4, 0, 2), (5, 250, 0, 300)), ((4, 4), (2, 0))],
    ids=["decode", "verify", "ragged", "fewer keys than rows"],
)
def test_selected_entries(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], count: int, device: str, split: Split
) -> None:
    split(count)
    for seed, changes in enumerate(({}, {"sinks": sinks_of(4), "width": TOP_K + 4}, {"bmm2_scale": 0.7})):
        right(q_lens, kv_lens, drawn(q_lens, kv_lens, seed=seed), device, **changes)


@pytest.mark.parametrize("count", [1, 3])
def test_a_tile_and_a_row_without_an_entry(count: int, device: str, split: Split) -> None:
    """No NaN comes of them, and a row without an entry is one without a key."""
    split(count)
    inside = [7, *[-1] * (TOP_K - 2), 3]
    columns = [[-1] * 190 + [5, 9] + [-1] * 8, [-1] * TOP_K, inside, [0, 299, *[-1] * (TOP_K - 2)]]
    lse = right([4], [300], columns, device)
    assert (lse == -torch.inf).all(dim=1).tolist() == [False, True, False, False]
    right([4], [300], columns, device, sinks=sinks_of(4))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(page_size: int, device: str) -> None:
    """The first and the last entry of pages."""
    edges = [0, page_size - 1, page_size, 2 * page_size - 1, 129]
    columns = [edges + [-1] * 3, [-1, 5, *edges[::-1], -1], drawn([1], [130], 8)[0]]
    right([1] * 3, [130] * 3, columns, device, page_size=page_size)


def test_place_0_is_an_entry(device: str) -> None:
    columns = [[-1, 0, 1, -1]]
    batch = latent_batch([1], [20], heads=4, rank=64, rope=16)
    arguments = sparse_arguments(batch, columns, out=None, bmm1_scale=0.125)
    cache, places = arguments["kv_cache"], arguments["block_tables"]
    first = int(places[0, 0, 1])
    cache = torch.cat((cache[first // 16 :], cache[: first // 16]))  # the pages in another order
    assert first % 16 == 0
    moved = torch.where(places < 0, places, places - first)
    results = run(MLA, arguments | {"kv_cache": cache, "block_tables": moved}, device)
    hold(mla_arguments(selected_batch(batch, columns), out=None, bmm1_scale=0.125), results)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP16, FP16), (BF16, E4M3), (FP16, E4M3), (E4M3, E4M3)])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, device: str) -> None:
    right([2], [300], drawn([2], [300]), device, dtype=dtype, kv_dtype=kv_dtype, bmm2_scale=1.3)


@pytest.mark.parametrize("heads", [1, 3, 24, 128])
def test_heads(heads: int, device: str, split: Split) -> None:
    split(2)
    right([2], [90], drawn([2], [90], 68), device, heads=heads, sinks=sinks_of(heads))


@pytest.mark.parametrize("rope", [0, 16])
@pytest.mark.parametrize("q_lens", [(2, 2), (1, 3)])
def test_numbers_of_entries(rope: int, q_lens: tuple[int, int], device: str, split: Split) -> None:
    """Columns after a row's number hold ids far outside the pool; numbers may exceed a row's position."""
    split(2)
    lens = [0, 1, 150, TOP_K]
    columns = [(list(range(row, row + used)) + [-1] * TOP_K)[:TOP_K] for row, used in enumerate(lens)]
    right(q_lens, (210, 220), columns, device, lens=lens, rope=rope)


def test_a_dense_call_without_a_rotary_part(device: str) -> None:
    batch = latent_batch([2, 2], [40, 130], heads=4, rank=64, rope=0)
    arguments = mla_arguments(batch, out=None, bmm1_scale=0.125)
    hold(arguments, run(MLA, arguments, device))


def test_columns_after_a_rows_position_are_not_read(device: str) -> None:
    """Row i uses as many columns as there are keys up to its position."""
    columns = [[2, 1, 0, 3], [3, -1, 1, 0]]
    batch = latent_batch([2], [4], heads=4, rank=64, rope=16)
    arguments = sparse_arguments(batch, columns, out=None, bmm1_scale=0.125)
    arguments["block_tables"][0, 0, 3] = 2**30
    seen = selected_batch(batch, [[2, 1, 0, -1], columns[1]])
    out, lse = run(MLA, arguments, device)
    hold(mla_arguments(seen, out=None, bmm1_scale=0.125), (out.view(-1, 1, *out.shape[-2:]), lse))


def test_rows_after_the_last_request_are_not_read(device: str) -> None:
    """Neither their queries nor their entries and numbers."""
    columns = drawn([1, 2], [50, 60], 8)
    batch = latent_batch([1, 2], [50, 60], heads=4, rank=64, rope=16)
    for lens in (None, [8] * 3):
        arguments = sparse_arguments(batch, columns, ragged=True, out=None, bmm1_scale=0.125)
        rows = {"query": NAN, "block_tables": 2**30}
        for name, value in rows.items():
            arguments[name] = torch.cat((arguments[name], torch.full_like(arguments[name], value)))
        if lens is not None:
            arguments["sparse_mla_top_k_lens"] = torch.tensor([*lens, *[2**30] * 3], dtype=torch.int32)
        out, lse = run(MLA, arguments, device)
        truth = mla_arguments(selected_batch(batch, columns), out=None, bmm1_scale=0.125)
        hold(truth, (out[:3].unsqueeze(1), lse[:3]))


# Pages selected for each K/V head of a decode.


def pages_of(batch: Batch, page_size: int, num_kv_heads: int, seed: int) -> list[Columns]:
    """Return the pages that each K/V head selects of each request, in order: from none to all."""
    rng = random.Random(seed)
    counts = [-(-kv_len // page_size) for kv_len in batch.kv_lens]
    return [[sorted(rng.sample(range(count), rng.randint(0, count))) for count in counts] for _ in range(num_kv_heads)]


def right_pages(q_lens: Sequence[int], kv_lens: Sequence[int], device: str, seed: int = 0, **changes: Any) -> None:
    """Hold a block-sparse call, head by head, to the dense call over the pages that the K/V head selects."""
    of_batch = {name: changes.pop(name) for name in ("heads", "head_dim", "dtype", "kv_dtype") if name in changes}
    page_size = changes.pop("page_size", 16)
    heads, kv_heads = of_batch.setdefault("heads", (6, 2))
    batch = random_batch(list(q_lens), list(kv_lens), **{"head_dim": 64, "dtype": BF16} | of_batch)
    pages = pages_of(batch, page_size, kv_heads, seed)
    usual = {"bmm1_scale": 0.125, "out_dtype": BF16, "ragged": len(set(q_lens)) > 1, "poison": NAN}
    out, lse = run(DECODE, block_sparse_arguments(batch, pages, page_size, **usual | changes), device)
    group = heads // kv_heads
    for head, of_head in enumerate(pages):
        of_rows = slice(head * group, (head + 1) * group)
        own = {"sinks": changes["sinks"][of_rows]} if "sinks" in changes else {}
        truth = dense_arguments(of_kv_head(batch, head, of_head, page_size), **own)
        hold(truth, (out[:, of_rows], lse[:, of_rows]))


def dense_arguments(batch: Batch, **changes: Any) -> Arguments:
    ragged = len(set(batch.q_lens)) > 1
    return decode_arguments(batch, bmm1_scale=0.125, out_dtype=BF16, ragged=ragged, **changes)


@pytest.mark.parametrize("shares", [None, Shares(1), Shares(3), Shares(32)])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [((1, 1, 1), (1, 70, 400)), ((3, 3), (20, 300)), ((1, 4, 0, 2), (5, 250, 0, 300)), ((20, 20), (130, 300))],
    ids=["decode", "verify", "ragged", "many rows"],
)
def test_pages_of_each_head(
    q_lens: tuple[int, ...], kv_lens: tuple[int, ...], shares: Shares | None, device: str, split: Split
) -> None:
    """A program for each request and K/V head, one for all of them, and some that begin and end within one."""
    split(shares=shares)
    for seed, changes in enumerate(({}, {"sinks": sinks_of(6)}, {"heads": (3, 3), "page_size": 64})):
        right_pages(q_lens, kv_lens, device, seed, **changes)


@pytest.mark.parametrize("merges_at_once", [False, True])
@pytest.mark.parametrize(("requests", "count"), [(1, 40), (5, 40), (17, 80), (65, 264)])
def test_pages_of_each_head_in_small_batches(
    requests: int, count: int, merges_at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is small by its requests times its 2 K/V heads, and then cut into equal parts: of 2, 10 and 34, not of 130."""
    monkeypatch.setattr(paged, "choose_shares", lambda *_: Shares(count))
    monkeypatch.setattr(paged, "merges_at_once", lambda *_: merges_at_once)
    right_pages([1] * requests, [300] * requests, device, seed=requests)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP16, FP16), (BF16, E4M3), (E4M3, E4M3)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_of_pages_of_each_head(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, device: str, split: Split
) -> None:
    split(2)
    right_pages([2, 2], [100, 300], device, dtype=dtype, kv_dtype=kv_dtype, head_dim=head_dim)


def test_keys_count_for_each_head(device: str, split: Split) -> None:
    """With one row each, and lengths that make one head's work many times another's."""
    split(3)
    batch = random_batch([1, 1], [640, 640], heads=(2, 2), head_dim=64, dtype=BF16)
    pages = [[[], list(range(40))], [[3], [39]]]
    out, lse = run(DECODE, block_sparse_arguments(batch, pages, bmm1_scale=0.125, out_dtype=BF16), device)
    assert lse[0, 0] == -torch.inf
    assert not out[0, 0].any()
    for head, of_head in enumerate(pages):
        hold(dense_arguments(of_kv_head(batch, head, of_head)), (out[:, head : head + 1], lse[:, head : head + 1]))
