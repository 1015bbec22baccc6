"""A right model of MLA decode calls whose rows select entries. A wrong kernel replaces one stage.

A tile is one query row, and its keys are the columns that the row uses. A column without an entry is a key that the row does
not see.
"""

import torch
from torch import Tensor

from corpus.models.split_kv import RowTile, SplitKV
from corpus.wrong import MLA
from lab.calls.problem import PagedAttention


class SelectedSplitKV(SplitKV, selects_entries=True):
    """A right model of MLA decode calls with `sparse_mla_top_k`; other calls are refused."""

    interface = (MLA,)

    def tiles(self, problem: PagedAttention) -> list[RowTile]:
        offsets = self.row_offsets(problem)
        tiles = []
        for request, kv_len in enumerate(self.kv_lens(problem)):
            for row in range(*offsets[request : request + 2]):
                position = self.position(kv_len, offsets[request + 1] - offsets[request], row - offsets[request])
                columns = self.columns(problem, row, position)
                tiles.append(RowTile(request, row, 1, position, 1, columns, 0, columns))
        return tiles

    def columns(self, problem: PagedAttention, row: int, position: int) -> int:
        """Return the number of columns that a row uses."""
        assert problem.selected is not None
        used = position + 1 if problem.selected_lens is None else int(problem.selected_lens[row])
        return max(0, min(used, problem.selected.shape[1]))

    def selected(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        """Return the places in a tile's columns, int64 [num_columns]; a negative place is no entry."""
        assert problem.selected is not None
        return problem.selected[tile.first_row, : tile.key_end].to(torch.int64)

    def is_entry(self, places: Tensor) -> Tensor:
        return places >= 0

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return self.is_entry(self.selected(problem, tile)).unsqueeze(0)

    def keys(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        return self.at_places(problem, problem.k_cache, self.selected(problem, tile))

    def values(self, problem: PagedAttention, tile: RowTile, positions: Tensor) -> Tensor:
        return self.at_places(problem, problem.v_cache, self.selected(problem, tile))

    def at_places(self, problem: PagedAttention, cache: Tensor, places: Tensor) -> Tensor:
        """Return entries, float32 [1, num_columns, head_dim or v_head_dim]. A place that is no entry reads zeros."""
        is_entry = self.is_entry(places)
        found = places.clamp(0, cache.shape[0] * cache.shape[2] - 1)
        tokens = self.entries(cache, None, self.page(problem, found), self.offsets(problem, found))
        return torch.where(is_entry.view(1, -1, 1), tokens, 0.0)

    def page(self, problem: PagedAttention, places: Tensor) -> Tensor:
        return places // problem.page_size
