"""Mutants of DeepSeek-V4's call, whose rows select entries of two pools, and of its metadata builder."""

from dataclasses import replace

import torch

from corpus.models.dsv4 import DSV4Decode
from corpus.models.metadata import DSV4Builder
from corpus.wrong import wrong
from lab.calls.selection import WINDOW_COLUMNS
from lab.metadata.engine.forward_mode import QueryRows


class TwoPoolCalls(DSV4Decode):
    """The call of DeepSeek-V4."""

    dsv4_sinks_ignored = wrong(instead={"sinks": None})("Sinks are ignored.")
    dsv4_window_not_bounded = wrong(
        trigger="a row is among its request's first 127 tokens",
        instead={"seq_lens": lambda problem: problem.seq_lens + WINDOW_COLUMNS},
    )("All 128 window columns are used, since sparse_topk_lens counts them.")

    @wrong(stage="changed", trigger="a row does not use all its columns")
    def dsv4_lens_leave_out_window(self, problem):
        """sparse_topk_lens is taken for the number of compressed entries alone."""
        width = problem.selected.shape[1]
        used = (problem.selected_lens + WINDOW_COLUMNS).clamp(max=width)
        entries = problem.k_cache.shape[0] * problem.page_size
        return replace(problem, selected_lens=used, selected=problem.selected.clamp(max=entries - 1))

    @wrong(stage="changed", trigger="a request has several rows and fewer than 128 tokens")
    def dsv4_window_of_last_row(self, problem):
        """The window columns of each row are bounded by the position of its request's last row."""
        offsets = torch.tensor(problem.row_offsets())
        rows = torch.arange(int(offsets[-1]) + 1, dtype=torch.int32)
        lengths = problem.seq_lens.repeat_interleave(offsets.diff())
        return replace(problem, seq_lens=lengths, cu_seqlens_q=rows, max_q_len=1)

    @wrong(stage="changed", trigger="a request of fewer than 128 tokens has compressed entries")
    def dsv4_position_bounds_all_columns(self, problem):
        """A row's position bounds all its columns, as it does without lengths."""
        position = replace(problem.of_one_pool(), selected=problem.selected, selected_lens=None).columns_in_use()
        return replace(problem, selected=torch.where(position, problem.selected, -1))

    @wrong(stage="changed", trigger="a row selects a compressed entry")
    def dsv4_compressed_read_from_window(self, problem):
        """Each column is a place in the pool of recent tokens."""
        window = problem.window_cache
        in_pool = problem.selected.clamp(max=window.shape[0] * window.shape[2] - 1)
        return replace(problem, k_cache=window, v_cache=window, selected=in_pool)


class TwoPoolMetadata(DSV4Builder):
    """The metadata of DeepSeek-V4."""

    @wrong(stage="changed", trigger="a verification has several rows per request")
    def dsv4_rows_see_their_last(self, metadata, batch, pool):
        """Each row of a verification has the length of its request's last row."""
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS or not batch.batch_size:
            return metadata
        rows = batch.num_tokens // batch.batch_size
        return replace(metadata, seq_lens=metadata.seq_lens[rows - 1 :: rows].repeat_interleave(rows))

    @wrong(stage="changed", trigger="a page of the sliding-window pool has another number than the token's page")
    def dsv4_window_in_the_full_pool(self, metadata, batch, pool):
        """Window columns are slots of the full pool."""
        position = metadata.seq_lens[:, None] - 1 - torch.arange(WINDOW_COLUMNS, dtype=torch.int32)
        place, columns = position.clamp(min=0), metadata.page_table.shape[1]
        pages = metadata.page_table.gather(1, (place // pool.page_size).clamp(max=columns - 1).long())
        slots = pages * pool.page_size + place % pool.page_size
        return replace(metadata, window=torch.where(position < 0, -1, slots).to(torch.int32))
