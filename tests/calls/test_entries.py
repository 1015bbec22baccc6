"""The entries of the pool that each request of a paged call reads."""

from dataclasses import replace

import torch

from lab.calls import MLADecodeCall
from lab.calls.entries import live_cells, num_keys, places_of, places_of_requests
from tests.recorded.record_calls import latent_arguments, selecting_arguments


def test_keys_lie_in_the_pages_of_their_table() -> None:
    problem = MLADecodeCall(**latent_arguments()).problem()  # pages of 32: 3 and 1 of 40 keys, 0 of 5
    assert num_keys(problem) == [40, 5]
    assert live_cells(problem).tolist() == [[True, True], [True, False]]
    (first, _), (second, v) = places_of_requests(problem, [1, 0])
    assert first.tolist() == [0, 1, 2, 3, 4]
    assert second.tolist() == v.tolist() == [*range(96, 128), *range(32, 40)]
    separate = replace(problem, v_block_tables=problem.k_block_tables.flip(1))
    k, v = places_of(separate, torch.tensor([0, 1]), torch.tensor([33, 2]))
    assert (k.tolist(), v.tolist()) == ([33, 2], [97, 66])


def test_selected_entries_are_the_keys_each_once_and_by_place() -> None:
    problem = MLADecodeCall(**selecting_arguments()).problem()
    assert num_keys(problem) == [5, 5]
    (first, v), (second, _) = places_of_requests(problem, [0, 1])
    assert first.tolist() == v.tolist() == [35, 39, 96, 97, 103]
    assert second.tolist() == [0, 1, 2, 3, 4]
    k, _ = places_of(problem, torch.tensor([1, 0, 0]), torch.tensor([4, 1, 0]))
    assert k.tolist() == [4, 39, 35]
    assert live_cells(problem).sum(dim=1).tolist() == [3, 3, 3, 4]
    lens = torch.tensor([1, 3, 2, 0], dtype=torch.int32)
    counted = MLADecodeCall(**selecting_arguments(sparse_mla_top_k_lens=lens)).problem()
    assert num_keys(counted) == [3, 2]
    assert live_cells(counted).sum(dim=1).tolist() == [1, 3, 2, 0]
