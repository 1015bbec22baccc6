"""Mutants of the MLA decode call whose rows select entries (`sparse_mla_top_k`)."""

import math
from dataclasses import replace

import torch

from corpus.models.selected import SelectedSplitKV
from corpus.wrong import MLA, wrong

TILE = 128  # columns


class Selection(SelectedSplitKV):
    @wrong(MLA, stage="selected", trigger="a column that a row uses holds -1")
    def mla_selected_negative_is_last(self, problem, tile):
        """-1 is read as the pool's last entry, as torch indexes."""
        places = super().selected(problem, tile)
        return torch.where(places < 0, problem.k_cache.shape[0] * problem.page_size - 1, places)

    @wrong(MLA, stage="is_entry", trigger="a column before an entry holds -1")
    def mla_selected_negative_ends_row(self, places):
        """The first -1 of a row ends its entries."""
        return (places >= 0).cumprod(0).bool()

    @wrong(MLA, stage="is_entry", trigger="the pool's first slot is selected")
    def mla_selected_first_slot_is_none(self, places):
        """Place 0 is taken for no entry, as for -1."""
        return places > 0

    @wrong(MLA, stage="selected", trigger="a request has several query rows")
    def mla_selected_of_first_row(self, problem, tile):
        """All rows of a request read the entries of its first row."""
        offsets = self.row_offsets(problem)
        return super().selected(problem, replace(tile, first_row=offsets[tile.request]))

    @wrong(MLA, stage="selected", trigger="rows of block_tables do not lie next to each other")
    def mla_selected_row_stride_ignored(self, problem, tile):
        """A row's entries are taken to begin sparse_mla_top_k columns after those of the row before it."""
        selected = problem.selected
        packed = selected.as_strided(selected.shape, (selected.shape[1], 1), selected.storage_offset())
        return super().selected(replace(problem, selected=packed), tile)

    @wrong(MLA, stage="selected", trigger="an entry stands in two columns of a row")
    def mla_selected_twice_counts_once(self, problem, tile):
        """An entry counts in its last column alone."""
        places = super().selected(problem, tile)
        _, entry = places.unique(return_inverse=True)
        columns = torch.arange(len(places), device=places.device)
        last = torch.zeros_like(columns).scatter_reduce(0, entry, columns, "amax")
        return torch.where(columns == last[entry], places, -1)

    @wrong(MLA, stage="columns", trigger="sparse_mla_top_k_lens is given")
    def mla_selected_lens_ignored(self, problem, row, position):
        """sparse_mla_top_k_lens is ignored: a row uses the columns up to its position."""
        return super().columns(replace(problem, selected_lens=None), row, position)

    @wrong(MLA, stage="columns", trigger="fewer keys than columns, and a place in a column after the row's position")
    def mla_selected_columns_all_used(self, problem, row, position):
        """Without sparse_mla_top_k_lens, all columns are used that do not hold -1."""
        return problem.selected.shape[1] if problem.selected_lens is None else super().columns(problem, row, position)

    @wrong(MLA, stage="columns", trigger="a place in a column after the row's position, in its block of 32 columns")
    def mla_selected_columns_in_blocks(self, problem, row, position):
        """Without sparse_mla_top_k_lens, the number of used columns is rounded up to a multiple of 32."""
        used = super().columns(problem, row, position)
        rounds = used > 0 and problem.selected_lens is None
        return min(-(-used // 32) * 32, problem.selected.shape[1]) if rounds else used

    @wrong(MLA, stage="columns", trigger="a row selects an entry after the last whole tile of 64 columns")
    def mla_selected_last_tile_lost(self, problem, row, position):
        """Columns go in tiles of 64, and those after the last whole tile of sparse_mla_top_k are not read."""
        return min(super().columns(problem, row, position), problem.selected.shape[1] // 64 * 64)

    @wrong(MLA, stage="selected", trigger="the entries of a row are not in ascending order")
    def mla_selected_search_expects_order(self, problem, tile):
        """Entries are read until one is smaller than the one before it, as if the rest of the row was left from before."""
        places = super().selected(problem, tile)
        largest = places.clamp(min=0).cummax(0).values
        return torch.where((places < largest).cumsum(0) > 0, -1, places)


class Places(SelectedSplitKV):
    @wrong(MLA, stage="page", trigger="page_size is not 64")
    def mla_selected_pages_of_64(self, problem, places):
        """A place is divided by 64, whatever the page's size: the offset in a page stays right."""
        return (places // 64).clamp(max=problem.k_cache.shape[0] - 1)

    @wrong(MLA, stage="at_places", trigger="the pool has more than 2**31 elements")
    def mla_selected_offset_overflows(self, problem, cache, places):
        """A place times head_dim is an int32, which overflows in a large pool."""
        overflows = places * problem.head_dim >= 2**31
        return super().at_places(problem, cache, torch.where(overflows, 0, places))


@wrong(MLA, trigger="the first 128 columns of a row hold -1 alone")
class MLASelectedEmptyFirstTile(SelectedSplitKV):
    """A first tile of 128 columns without an entry gives NaN: its largest logit is -inf, and -inf - -inf is NaN."""

    def finish_tile(self, problem, tile, rows):
        if not self.is_entry(self.selected(problem, tile)[:TILE]).any():
            rows.values.fill_(math.nan)
