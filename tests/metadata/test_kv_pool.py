"""The id spaces behave like an engine's, and the cache is laid out as the kernels are handed it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import KVLayout, KVPool, PagedKVCache
from lab.metadata.engine.kv_cache import PagedLatentCache

DTYPES = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]


def make_pool(**changes: Any) -> KVPool:
    sizes: dict[str, Any] = {"num_requests": 4, "max_context_len": 50, "page_size": 16, "num_pages": 17}
    return KVPool(**sizes | changes)


def pages_of(pool: KVPool, row: int, length: int) -> list[int]:
    return [slot // pool.page_size for slot in pool.slots(row, 0, length)[:: pool.page_size].tolist()]


def test_row_zero_and_page_zero_belong_to_nobody() -> None:
    pool = make_pool()
    rows = [pool.add_request(50) for _ in range(4)]
    assert sorted(rows) == [1, 2, 3, 4]
    assert pool.req_to_token.shape == (5, 50)
    assert pool.req_to_token.dtype == torch.int32
    assert not pool.req_to_token[0].any()
    assert sorted(page for row in rows for page in pages_of(pool, row, 50)) == list(range(1, 17))


def test_pages_are_shuffled_and_the_seed_decides() -> None:
    tables = [make_pool(seed=seed) for seed in (0, 0, 1)]
    pages = [pages_of(pool, pool.add_request(50), 50) for pool in tables]
    assert pages[0] == pages[1] != pages[2]
    assert pages[0] != sorted(pages[0])


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 50])
def test_a_request_fills_its_last_page_before_it_takes_another(length: int) -> None:
    pool = make_pool()
    row, neighbour = pool.add_request(length), pool.add_request(7)
    appended = [pool.extend_request(row, 1) for _ in range(50 - length)]
    slots = pool.slots(row, 0, 50)
    assert slots.dtype == torch.int64
    assert torch.equal(slots[length:], torch.cat([*appended, slots[:0]]))
    assert torch.equal(slots % 16, torch.arange(50) % 16)
    assert len(set((slots // 16).tolist())) == 4
    assert not set(slots.tolist()) & set(pool.slots(neighbour, 0, 7).tolist())


def test_freed_ids_come_back_and_the_row_keeps_its_leftovers() -> None:
    pool = make_pool(num_requests=1, num_pages=5)
    row = pool.add_request(50)
    left = pool.req_to_token[row].clone()
    pool.free_request(row)
    assert torch.equal(pool.req_to_token[row], left)
    assert pool.add_request(17) == row
    assert torch.equal(pool.req_to_token[row, 17:], left[17:])


def test_exhaustion_changes_nothing() -> None:
    pool = make_pool(num_pages=4)
    row = pool.add_request(33)
    before = pool.req_to_token.clone()
    with pytest.raises(RuntimeError, match="full pool has 0 free pages of 16 tokens, 1 are needed"):
        pool.add_request(1)
    with pytest.raises(RuntimeError, match="raise num_pages"):
        pool.extend_request(row, 16)
    assert torch.equal(pool.req_to_token, before)
    assert pool.extend_request(row, 15).shape == (15,)
    pool.free_request(row)
    assert len({pool.add_request(1) for _ in range(3)}) == 3


FULL = make_pool(num_requests=1)
ROW = FULL.add_request(50)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make_pool().add_request(51), ValueError, "51 tokens, more than max_context_len=50"),
        (lambda: FULL.extend_request(ROW, 1), ValueError, "51 tokens, more than max_context_len=50"),
        (lambda: FULL.extend_request(ROW, -1), ValueError, "cannot add -1 tokens"),
        (lambda: FULL.add_request(1), RuntimeError, "all 1 request rows are taken"),
        (lambda: FULL.free_request(3), ValueError, "holds no request"),
        (lambda: FULL.slots(ROW, 49, 51), ValueError, r"positions 49..51 are outside request \d+ of 50 tokens"),
        (lambda: make_pool(num_pages=1), ValueError, "num_pages=1 must be at least 2"),
        (lambda: make_pool(page_size=0), ValueError, "page_size=0"),
        (lambda: make_pool(num_virtual_pages=16), ValueError, "num_virtual_pages=16 must be at least num_pages=17"),
        (lambda: FULL.swa_slots(torch.zeros(1)), ValueError, "no sliding-window pages"),
        (lambda: FULL.evict_swa(ROW, 0), ValueError, "no sliding-window pages"),
        (lambda: FULL.new_cache(1, 8, torch.uint8, KVLayout.NHD, sliding_window=True), ValueError, "no sliding-window"),
    ],
)
def test_refusals_name_the_limit(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_the_window_map_is_whole_pages_with_a_sink_and_a_minus_one() -> None:
    pool = make_pool(swa_num_pages=9)
    row = pool.add_request(33)
    assert pool.full_to_swa.shape == (16 * 16 + 16 + 1,)
    assert pool.full_to_swa.dtype == torch.int64
    pages = pages_of(pool, row, 33)
    for page in range(17):
        mapped = pool.full_to_swa[page * 16 : page * 16 + 16]
        if page in pages:
            assert mapped[0] >= 16
            assert torch.equal(mapped, mapped[0] + torch.arange(16))
        else:
            assert not mapped.any()
    assert pool.swa_slots(torch.tensor([-1, 0], dtype=torch.int32)).tolist() == [-1, 0]


def test_evicting_frees_only_pages_wholly_before_the_position() -> None:
    pool = make_pool(swa_num_pages=5)
    row = pool.add_request(50)
    swa = pool.swa_slots(pool.slots(row, 0, 50))
    full = pool.slots(row, 0, 50)
    with pytest.raises(RuntimeError, match=r"sliding-window pool has 0 free pages.*raise swa_num_pages"):
        pool.add_request(1)
    for before, gone in [(15, 0), (16, 16), (31, 16), (47, 32), (47, 32), (48, 48), (50, 48), (0, 48)]:
        pool.evict_swa(row, before)
        now = pool.swa_slots(full)
        assert not now[:gone].any()
        assert torch.equal(now[gone:], swa[gone:])
    assert torch.equal(pool.slots(row, 0, 50), full)
    assert pool.add_request(48) != row
    for before in (-1, 51):
        with pytest.raises(ValueError, match=f"before={before} is outside"):
            pool.evict_swa(row, before)
    pool.free_request(row)
    assert not pool.swa_slots(full).any()
    pool.add_request(16)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
    steps=st.lists(st.tuples(st.sampled_from("aefv"), st.integers(0, 20)), max_size=25),
)
def test_no_two_live_tokens_share_a_slot(page_size: int, seed: int, steps: list[tuple[str, int]]) -> None:
    """Any order of admitting, extending, freeing and evicting, in both id spaces."""
    pool = KVPool(num_requests=4, max_context_len=60, page_size=page_size, num_pages=80, swa_num_pages=40, seed=seed)
    lengths: dict[int, int] = {}
    for action, number in steps:
        try:
            if action == "a":
                lengths[pool.add_request(number)] = number
            for row in list(lengths)[number % 4 : number % 4 + 1]:
                if action == "e":
                    pool.extend_request(row, number)
                    lengths[row] += number
                elif action == "f":
                    pool.free_request(row)
                    del lengths[row]
                elif action == "v":
                    pool.evict_swa(row, min(number, lengths[row]))
        except (RuntimeError, ValueError):
            continue
    slots = torch.cat([pool.slots(row, 0, n) for row, n in lengths.items()] or [torch.zeros(0, dtype=torch.int64)])
    windowed = pool.swa_slots(slots)
    windowed = windowed[windowed > 0]
    assert len(set(slots.tolist())) == len(slots) == sum(lengths.values())
    assert len(set(windowed.tolist())) == len(windowed)
    assert all(page_size <= slot < 80 * page_size for slot in slots.tolist())
    assert all(page_size <= slot < 40 * page_size for slot in windowed.tolist())


def random_bytes(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    width = shape[-1] * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (*shape[:-1], width), generator=generator, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize(("heads", "page_size"), [(3, 16), (1, 16), (3, 1), (1, 1)])
def test_written_tokens_are_found_through_the_hnd_view(
    dtype: torch.dtype, layout: KVLayout, heads: int, page_size: int
) -> None:
    pool = make_pool(page_size=page_size, num_pages=60)
    cache = pool.new_cache(heads, 8, dtype, layout)
    slots = pool.slots(pool.add_request(33), 0, 33)
    k, v = (random_bytes(33, heads, 8, dtype=dtype, seed=seed) for seed in (1, 2))
    cache.write(slots, k, v)
    for view, rows in zip(cache.as_hnd(), (k, v), strict=True):
        assert view.shape == (60, heads, page_size, 8)
        found = torch.stack([view[slot // page_size, :, slot % page_size] for slot in slots.tolist()])
        assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))
    everything = cache.storage.view(torch.uint8).count_nonzero()
    assert everything == k.view(torch.uint8).count_nonzero() + v.view(torch.uint8).count_nonzero()


def test_a_negative_slot_writes_to_the_sink_not_to_the_last_page_and_no_slot_nowhere() -> None:
    cache = make_pool().new_cache(1, 8, torch.float8_e4m3fn, KVLayout.NHD)
    row = torch.ones(1, 1, 8).to(torch.float8_e4m3fn)
    cache.write(torch.zeros(0, dtype=torch.int64), row[:0], row[:0])
    assert not cache.storage.view(torch.uint8).any()
    cache.write(torch.tensor([-1]), row, row)
    assert cache.k_cache.view(torch.uint8)[0, 0].all()
    assert not cache.storage.view(torch.uint8)[:, 1:].any()


@pytest.mark.parametrize(
    ("heads", "layout", "strides"),
    [
        (4, KVLayout.NHD, (512, 8, 32, 1)),
        (4, KVLayout.HND, (512, 128, 8, 1)),
        (1, KVLayout.NHD, (128, 128, 8, 1)),  # the permuted view alone would have (128, 8, 8, 1)
        (1, KVLayout.HND, (128, 128, 8, 1)),
    ],
)
def test_view_strides_are_sglangs(heads: int, layout: KVLayout, strides: tuple[int, ...]) -> None:
    """K and V are the halves of one allocation."""
    cache = make_pool().new_cache(heads, 8, torch.float16, layout)
    k, v = cache.as_hnd()
    assert k.stride() == v.stride() == strides
    assert k.data_ptr() == cache.k_cache.data_ptr() == cache.storage.data_ptr()
    assert v.data_ptr() == cache.v_cache.data_ptr() == k.data_ptr() + cache.storage.nbytes // 2


def test_a_window_cache_has_the_windows_pages() -> None:
    pool = make_pool(swa_num_pages=6)
    full, window = (pool.new_cache(2, 8, torch.uint8, KVLayout.NHD, sliding_window=flag) for flag in (False, True))
    assert (full.k_cache.shape[0], window.k_cache.shape[0]) == (17, 6)
    assert (window.page_size, window.num_kv_heads) == (16, 2)


def test_cache_refusals() -> None:
    cache = make_pool().new_cache(2, 8, torch.bfloat16, KVLayout.NHD)
    slots, rows = torch.arange(3), torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="slots has dtype"):
        cache.write(slots.int(), rows, rows)
    with pytest.raises(TypeError, match=r"v has dtype torch\.float32, the cache torch\.bfloat16: quantise"):
        cache.write(slots, rows, rows.float())
    with pytest.raises(ValueError, match=r"k has shape \[1, 2, 8\], expected \[3, 2, 8\]"):
        cache.write(slots, rows[:1], rows)


def test_everything_works_where_reading_is_impossible() -> None:
    pool = make_pool(swa_num_pages=9, device="meta")
    row = pool.add_request(20)
    slots = pool.extend_request(row, 13)
    pool.evict_swa(row, 32)
    for window in (False, True):
        cache = pool.new_cache(2, 8, torch.float8_e4m3fn, KVLayout.HND, sliding_window=window)
        rows = torch.zeros(13, 2, 8, dtype=torch.float8_e4m3fn, device="meta")
        cache.write(pool.swa_slots(slots) if window else slots, rows, rows)
    pool.free_request(row)
    assert pool.device.type == "meta"


def test_virtual_slots_keep_their_names_where_pages_move() -> None:
    pool = KVPool(num_requests=3, max_context_len=12, page_size=4, num_pages=8, num_virtual_pages=20, seed=1)
    first, second = pool.add_request(9), pool.add_request(4)
    slots = pool.slots(first, 0, 9)
    named = slots[::4] // 4
    lie = pool.pages(slots[::4])
    assert lie.tolist() == pool.v2p[named].tolist()
    assert set(lie.tolist()) < set(range(1, 8))
    assert max(named.tolist()) >= 8, "more pages are named than there are"
    assert (pool.physical_slots(slots) // 4).tolist() == pool.pages(slots).tolist()
    assert (pool.physical_slots(slots) % 4).tolist() == (slots % 4).tolist()
    pool.free_request(second)
    assert (pool.v2p >= 0).sum() == 1 + 3, "the sink and the pages of the first request"
    assert [pool.add_request(12) for _ in range(1)], "freed pages of the cache are handed out again"
    with pytest.raises(RuntimeError, match="the full pool has 1 free pages"):
        pool.add_request(12)


def test_nothing_virtual_is_outside_the_pool() -> None:
    """What has no page, and slot -1, are in the sink; of a pool without virtual slots -1 stays what it is."""
    pool = KVPool(num_requests=1, max_context_len=8, page_size=4, num_pages=4, num_virtual_pages=9)
    slots = torch.tensor([-1, 0, 3, 35])
    assert pool.pages(slots).tolist() == [0, 0, 0, 0]
    assert pool.physical_slots(slots).tolist() == [0, 0, 3, 0]
    plain = KVPool(num_requests=1, max_context_len=8, page_size=4, num_pages=4)
    assert plain.v2p is None
    assert plain.pages(slots).tolist() == [-1, 0, 0, 8]
    assert plain.physical_slots(slots) is slots


def test_storage_of_other_axes_or_with_gaps_is_refused() -> None:
    for shape, swapped in (((2, 3, 16, 8), None), ((3, 3, 1, 16, 8), None), ((2, 3, 1, 8, 16), (3, 4))):
        storage = torch.zeros(shape)
        with pytest.raises(ValueError, match=r"expected a contiguous \[2, num_pages.*KVPool\.new_cache"):
            PagedKVCache(storage if swapped is None else storage.transpose(*swapped), KVLayout.HND)
    for storage in (torch.zeros(3, 1, 16, 8), torch.zeros(3, 8, 16).transpose(1, 2)):
        with pytest.raises(ValueError, match=r"expected a contiguous \[num_pages, page_size, entry\]"):
            PagedLatentCache(storage)
