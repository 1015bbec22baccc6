"""An engine's slots as a page table, and the attention function's calls against attention over the same slots."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from studies.real_engine import CONTEXT, DECODE, PagedCalls, mixed_prompts, page_table, pages_of
from tests.cases import Batch, expected, running_sum

PAGE = 4


def slots_of(pages: list[int], kv_len: int) -> list[int]:
    return [PAGE * pages[token // PAGE] + token % PAGE for token in range(kv_len)]


def test_cells_after_a_requests_last_page_are_0() -> None:
    slots = torch.tensor([*slots_of([5], 4), *slots_of([5, 2, 9], 9), *slots_of([7], 1)])
    assert page_table(slots, running_sum([4, 9, 1]), PAGE, 9).tolist() == [[5, 0, 0], [5, 2, 9], [7, 0, 0]]


class Cache:
    """What an attention function uses of transformers' cache: two groups of two layers, each group with its own blocks."""

    def __init__(self, num_kv_heads: int, head_dim: int, num_blocks: int = 12) -> None:
        self.block_size = PAGE
        self.layer_index_to_group_indices = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)}
        self.sliding_windows = dict.fromkeys(range(4), 1)
        shape = (num_blocks * PAGE, num_kv_heads, head_dim)
        self.key_cache, self.value_cache = ([torch.randn(shape) for _ in range(2)] for _ in "KV")

    def update(
        self, *, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Any, write_index: Any
    ) -> None:
        group, place = self.layer_index_to_group_indices[layer_idx]
        assert not len(read_index[group])
        for side, states in ((self.key_cache, key_states), (self.value_cache, value_states)):
            side[place][write_index[group]] = states[0].transpose(0, 1)


def call(
    cache: Cache,
    client: PagedCalls,
    layer: int,
    slots: list[list[list[int]]],
    q_lens: list[int],
    rows: tuple[Tensor, Tensor, Tensor],
    scaling: float = 1.0,
) -> tuple[Tensor, None]:
    """Make a layer's call of requests whose keys are in these slots of each group; the offsets are by layer in odd layers."""
    kv_lens = [len(own) for own in slots[0]]
    read = [[] if q_lens == kv_lens else [*chain(*each)] for each in slots]  # of new tokens alone nothing is read
    written = [[slot for own, q_len in zip(each, q_lens, strict=True) for slot in own[-q_len:]] for each in slots]
    by_kind = (lambda value: {"full_attention": value}) if layer % 2 else (lambda value: value)
    return client(
        SimpleNamespace(layer_idx=layer),
        *rows,
        None,
        scaling=scaling,
        cache=cache,
        read_index=[torch.tensor(each, dtype=torch.int64) for each in read],
        write_index=[torch.tensor(each) for each in written],
        cu_seq_lens_q=running_sum(q_lens),
        cu_seq_lens_k=by_kind(running_sum(kv_lens)),
        max_seqlen_q=max(q_lens),
        max_seqlen_k=by_kind(max(kv_lens)),
        dropout=0.0,
    )


# Pages of each request in each group of layers, its keys, and its new rows. The first two requests share a page.
MIXED = [([[5, 2, 9], [1, 10]], 9, 1), ([[5, 8], [3, 0]], 6, 2), ([[7, 4], [11, 6]], 8, 8)]
DECODES = [([[5, 2, 9], [1, 10]], 9, 1), ([[5, 8], [3, 0]], 6, 1), ([[7], [11]], 1, 1)]
PAIRS = [([[5, 2], [1, 10]], 7, 2), ([[7], [11]], 3, 1)]
NEW = [([[5, 2], [1, 10]], 6, 6), ([[7], [11]], 3, 3)]


@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    ("requests", "function"),
    [(MIXED, CONTEXT), (DECODES, DECODE), (PAIRS, CONTEXT), (NEW, CONTEXT), (NEW[1:], CONTEXT)],
)
def test_calls_equal_attention_over_the_slots(requests: list[Any], function: str, layer: int) -> None:
    torch.manual_seed(layer)
    cache, client = Cache(2, 16), PagedCalls(references)
    q_lens, kv_lens = [q_len for *_, q_len in requests], [kv_len for _, kv_len, _ in requests]
    slots = [[slots_of((pages[group] * 3)[:3], kv_len) for pages, kv_len, _ in requests] for group in range(2)]
    query, key, value = (torch.randn(1, heads, sum(q_lens), 16) for heads in (4, 2, 2))
    out, weights = call(cache, client, layer, slots, q_lens, (query, key, value), scaling=0.3)
    group, place = cache.layer_index_to_group_indices[layer]
    histories = ([side[place][own] for own in slots[group]] for side in (cache.key_cache, cache.value_cache))
    truth, _ = expected(Batch([*query[0].transpose(0, 1).split(q_lens)], *histories), bmm1_scale=0.3)
    assert weights is None
    torch.testing.assert_close(out[0], truth.float())
    (made,) = client.calls
    assert made.pop("host_us") > 0
    assert made == {
        "step": 0,
        "layer": layer,
        "function": function,
        "requests": len(requests),
        "rows": sum(q_lens),
        "max_kv_len": max(kv_lens),
    }


def one_token(cache: Cache, client: PagedCalls, layer: int) -> None:
    """Make the call of one request with one token, in block 5."""
    key, value = torch.tensor([2.0, 3.0]).view(1, 1, 1, 2), torch.tensor([4.0, 5.0]).view(1, 1, 1, 2)
    call(cache, client, layer, [[[4 * 5]]] * 2, [1], (key, key, value))


def test_the_new_tokens_are_written_where_they_belong() -> None:
    cache = Cache(1, 2)
    one_token(cache, PagedCalls(references), layer=2)
    assert cache.key_cache[1][4 * 5, 0].tolist() == [2.0, 3.0]
    assert cache.value_cache[1][4 * 5, 0].tolist() == [4.0, 5.0]


def test_a_step_ends_with_its_last_layer() -> None:
    cache, client = Cache(1, 2), PagedCalls(references)
    for layer in (0, 2, 0, 2, 0, 0):
        one_token(cache, client, layer)
    assert [(made["step"], made["layer"]) for made in client.calls] == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (3, 0)]


def test_a_sliding_window_is_refused_before_anything_is_written() -> None:
    cache = Cache(1, 2)
    cache.sliding_windows = {0: 1, 1: 1, 2: 128, 3: 1}
    before = [side.clone() for side in cache.key_cache]
    with pytest.raises(NotImplementedError, match="layer 2 has a sliding window"):
        one_token(cache, PagedCalls(references), layer=2)
    for side, old in zip(cache.key_cache, before, strict=True):
        torch.testing.assert_close(side, old)


def test_k_and_v_become_halves_of_one_allocation_once() -> None:
    cache = Cache(2, 16)
    old = cache.key_cache[1].clone(), cache.value_cache[1].clone()
    k, v = pages_of(cache, 1)
    assert k.shape == v.shape == (12, PAGE, 2, 16)
    assert v.data_ptr() - k.data_ptr() == k.nbytes
    torch.testing.assert_close((k.flatten(0, 1), v.flatten(0, 1)), old)
    assert cache.key_cache[1].data_ptr() == k.data_ptr()
    assert cache.value_cache[1].data_ptr() == v.data_ptr()
    again = pages_of(cache, 1)
    assert [each.data_ptr() for each in again] == [k.data_ptr(), v.data_ptr()]


def test_prompts_are_mixed_and_some_share_a_prefix() -> None:
    prompts = mixed_prompts(100)
    lengths = [len(prompt) for prompt in prompts]
    assert (min(lengths) >= 5, max(lengths) <= 600) == (True, True)
    assert max(lengths) - min(lengths) > 500
    assert len({tuple(prompt[:200]) for prompt in prompts[::10]}) == 1
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 91
    assert prompts == mixed_prompts(100)
