"""Requests in a pool: what they hold, what is written for them, and each mode's batch, against numbers worked out here."""

from typing import Any

import pytest
import torch

from lab.metadata import ForwardMode, KVLayout, KVPool
from lab.workloads.requests import Requests, admit, new_pool, num_pages

P = 4
PREFIX_LENS = (3, 0, 9)


def pool_of(*lens: int, **changes: Any) -> KVPool:
    return new_pool(lens, page_size=P, max_context_len=20, **changes)


def positions_of(pool: KVPool, rows: tuple[int, ...], slots: torch.Tensor) -> list[tuple[int, int]]:
    """Request and position of each slot, read from the request table."""
    owners = {int(pool.req_to_token[row, at]): (i, at) for i, row in enumerate(rows) for at in range(20)}
    return [owners[slot] for slot in slots.tolist()]


def test_a_pool_has_just_the_pages_that_are_asked_for() -> None:
    assert num_pages((5, 4, 0, 1), P) == 4
    pool = pool_of(5, 4, 0, 1)
    assert (pool.num_requests, pool.num_pages, pool.swa_num_pages) == (4, 5, None)
    pool = pool_of(5, 4, 0, 1, spare_pages=3, swa_spare_pages=0)
    assert (pool.num_pages, pool.swa_num_pages) == (8, 5)


# Mode, rows of each request, draft step: tokens that the lengths count, and the fields of the SpecInfo.
BATCHES: dict[str, tuple[ForwardMode, tuple[int, ...], int | None, tuple[int, ...], dict[str, Any] | None]] = {
    "decode": (ForwardMode.DECODE, (1, 1, 1), None, (4, 1, 10), None),
    "draft step 2": (ForwardMode.DECODE, (1, 1, 1), 2, PREFIX_LENS, {"speculative_step_id": 2}),
    "verify": (ForwardMode.TARGET_VERIFY, (2, 2, 2), None, PREFIX_LENS, {"num_draft_tokens": 2}),
    "draft extend": (ForwardMode.DRAFT_EXTEND, (2, 1, 3), None, (5, 1, 12), {}),
    "draft extend v2": (ForwardMode.DRAFT_EXTEND_V2, (2, 2, 2), None, (5, 2, 11), {"num_tokens_per_req": 2}),
    "extend": (ForwardMode.EXTEND, (2, 0, 3), None, (5, 0, 12), None),
    "mixed": (ForwardMode.MIXED, (5, 1, 1), None, (8, 1, 10), None),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_counts_and_names_what_an_engine_does_in_its_mode(name: str) -> None:
    mode, q_lens, draft_step, seq_lens, spec_info = BATCHES[name]
    requests = admit(pool_of(20, 20, 20), PREFIX_LENS, q_lens, draft_step)
    batch = requests.batch(mode)
    assert batch.forward_mode is mode
    assert batch.req_pool_indices.tolist() == list(requests.rows)
    assert batch.seq_lens.tolist() == list(seq_lens)
    assert batch.num_tokens == sum(q_lens)
    assert batch.out_cache_loc.tolist() == requests.slots().tolist()
    if spec_info is None:
        assert batch.spec_info is None
    else:
        assert {name: getattr(batch.spec_info, name) for name in spec_info} == spec_info
    extends = name in ("draft extend", "draft extend v2", "extend", "mixed")
    device = (batch.extend_seq_lens, batch.extend_prefix_lens)
    host = (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu)
    assert host == ((q_lens, PREFIX_LENS) if extends else (None, None))
    assert [None if each is None else tuple(each.tolist()) for each in device] == list(host)
    if name == "draft extend":
        assert batch.spec_info is not None
        assert batch.spec_info.num_accept_tokens is batch.extend_seq_lens


def test_a_history_is_written_token_by_token_from_a_position_on() -> None:
    requests = admit(pool_of(7, 6), (5, 4), (2, 2))
    cache = requests.pool.new_cache(1, 2, torch.float32, KVLayout.NHD)
    histories = [tuple(torch.full((n, 1, 2), 10.0 * n) + torch.arange(n)[:, None, None] for _ in "kv") for n in (7, 6)]
    requests.write(cache, histories, first=(0, 3))
    for side in (cache.k_cache, cache.v_cache):
        of_slot = side[..., 0, 0].flatten()
        assert of_slot[requests.pool.slots(requests.rows[0], 0, 7)].tolist() == [70.0 + i for i in range(7)]
        assert of_slot[requests.pool.slots(requests.rows[1], 0, 6)].tolist() == [0.0, 0.0, 0.0, 63.0, 64.0, 65.0]
        assert int((of_slot != 0).sum()) == 7 + 3


def test_a_windows_pages_before_the_first_row_are_given_back_and_the_rest_written() -> None:
    pool = pool_of(15, 6, swa_spare_pages=0)
    requests = admit(pool, (13, 4), (2, 2))
    kept = requests.evict(window_left=4)  # rows from position 13 see 9 and on, whose page begins at 8
    assert kept == (8, 0)
    assert pool.swa_slots(pool.slots(requests.rows[0], 0, 15)).eq(0).tolist() == [True] * 8 + [False] * 7
    cache = pool.new_cache(1, 1, torch.float32, KVLayout.NHD, sliding_window=True)
    histories = [(torch.ones(n, 1, 1), torch.ones(n, 1, 1)) for n in (13, 4)]
    requests.write(cache, histories, kept, sliding_window=True)
    assert cache.k_cache[0].eq(0).all(), "the sink"
    assert int(cache.k_cache.sum()) == 13 - 8 + 4


def test_batches_see_prefixes_of_long_histories() -> None:
    pool = pool_of(20, 20, 20)
    admitted = admit(pool, (20, 20, 20), (0, 0, 0))
    seen = Requests(pool, admitted.rows[1:], prefix_lens=(7, 16), q_lens=(4, 4))
    batch = seen.batch(ForwardMode.TARGET_VERIFY)
    assert batch.seq_lens.tolist() == [7, 16]
    assert positions_of(pool, seen.rows, batch.out_cache_loc) == [
        (i, n + k) for i, n in ((0, 7), (1, 16)) for k in range(4)
    ]


def test_lengths_that_make_no_requests_are_refused() -> None:
    pool = pool_of(20)
    for rows, prefix_lens in (((), ()), ((1,), (3, 4))):
        with pytest.raises(ValueError, match="at least one request"):
            Requests(pool, rows, prefix_lens, (1,) * len(rows))
    with pytest.raises(ValueError, match="are outside request"):
        Requests(pool, admit(pool, (5,), (0,)).rows, (5,), (1,)).batch(ForwardMode.DECODE)
    with pytest.raises(RuntimeError, match="rows are taken"):
        admit(pool, (1,), (1,))
