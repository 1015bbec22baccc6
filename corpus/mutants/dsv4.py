"""Mutants of DeepSeek-V4's call, whose rows select entries of two pools, and of its metadata builder."""

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.metadata import DSV4Builder
from corpus.models.ragged import DSV4Decode
from corpus.mutants.limits import INT32_END, MULTIPROCESSORS
from corpus.wrong import wrong
from lab.calls.selection import WINDOW_COLUMNS
from lab.metadata.engine.forward_mode import QueryRows


def _with_places(problem, place, of_window=False):
    """Return the problem with `place` of each place of one pool, the compressed one unless `of_window`."""
    pool = problem.window_cache if of_window else problem.k_cache
    in_pool = (torch.arange(problem.selected.shape[1]) < WINDOW_COLUMNS) == of_window
    places = place(problem.selected.long()) % (pool.shape[0] * pool.shape[2])
    selected = torch.where(in_pool & (problem.selected >= 0), places, problem.selected)
    return replace(problem, selected=selected.to(torch.int32))


def _in_range(problem):
    """Return the problem with places that are in both pools."""
    return _with_places(_with_places(problem, lambda place: place, True), lambda place: place)


def _is_far(tensor):
    """Return which rows of a tensor begin at or after its 2**31st element."""
    return torch.arange(len(tensor)) * tensor.stride(0) >= INT32_END


def _with_pools(problem, view):
    """Return the problem with `view` of both pools."""
    compressed = view(problem.k_cache)
    return replace(problem, window_cache=view(problem.window_cache), k_cache=compressed, v_cache=compressed)


def _packed(tensor):
    """Return what a kernel reads that takes a tensor for contiguous."""
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class TwoPoolCalls(DSV4Decode):
    dsv4_sinks_ignored = wrong(instead={"sinks": None})("Sinks are ignored.")
    dsv4_window_not_bounded = wrong(
        trigger="a row is among its request's first 127 tokens",
        instead={"seq_lens": lambda p, _: p.seq_lens + WINDOW_COLUMNS},
    )("All 128 window columns are used, since sparse_topk_lens counts them.")

    @wrong(stage="changed", trigger="both pools are one tensor")
    def dsv4_one_tensor_has_window_alone(self, problem, call):
        """If both pools are one tensor, rows use the window columns alone."""
        if call.compressed_kv_cache.data_ptr() != call.swa_kv_cache.data_ptr():
            return problem
        return replace(problem, selected_lens=problem.selected_lens.clamp(max=WINDOW_COLUMNS))

    @wrong(stage="changed", trigger="a row does not use all its columns")
    def dsv4_lens_leave_out_window(self, problem, call):
        """sparse_topk_lens is taken for the number of compressed entries alone."""
        width = problem.selected.shape[1]
        used = (problem.selected_lens + WINDOW_COLUMNS).clamp(max=width)
        entries = problem.k_cache.shape[0] * problem.page_size
        return replace(problem, selected_lens=used, selected=problem.selected.clamp(max=entries - 1))

    @wrong(stage="changed", trigger="a request has several rows and fewer than 128 tokens")
    def dsv4_window_of_last_row(self, problem, call):
        """The window columns of each row are bounded by the position of its request's last row."""
        offsets = torch.tensor(problem.row_offsets())
        rows = torch.arange(int(offsets[-1]) + 1, dtype=torch.int32)
        lengths = problem.seq_lens.repeat_interleave(offsets.diff())
        return replace(problem, seq_lens=lengths, cu_seqlens_q=rows, max_q_len=1)

    @wrong(stage="changed", trigger="a request of fewer than 128 tokens has compressed entries")
    def dsv4_position_bounds_all_columns(self, problem, call):
        """A row's position bounds all its columns, as it does without lengths."""
        position = replace(problem.of_one_pool(), selected=problem.selected, selected_lens=None).columns_in_use()
        return replace(problem, selected=torch.where(position, problem.selected, -1))

    @wrong(stage="changed", trigger="a row selects a compressed entry")
    def dsv4_compressed_read_from_window(self, problem, call):
        """Each column is a place in the pool of recent tokens."""
        window = problem.window_cache
        in_pool = problem.selected.clamp(max=window.shape[0] * window.shape[2] - 1)
        return replace(problem, k_cache=window, v_cache=window, selected=in_pool)

    @wrong(stage="changed", trigger="the pools have pages of unequal sizes")
    def dsv4_compressed_in_pages_of_window(self, problem, call):
        """Places of the compressed pool are divided by the page size of the window pool."""
        size, own = problem.window_cache.shape[2], problem.page_size
        return _with_places(problem, lambda place: place // size * own + place % size)


class TwoPoolArguments(DSV4Decode):
    dsv4_sinks_added_per_pool = wrong(
        trigger="sinks are given, and rows select compressed entries",
        where=lambda p, _: p.selected.shape[1] > WINDOW_COLUMNS,
        only_with="sinks",
        instead={"sinks": lambda p, _: p.sinks + math.log(2.0)},
    )("Each pool has a softmax of its own with the sinks: merged, they count twice.")
    dsv4_bmm1_tensor_not_read = wrong(
        trigger="bmm1_scale is a tensor",
        where=lambda p, _: isinstance(p.bmm1_scale, Tensor),
        instead={"bmm1_scale": lambda p, _: p.head_dim**-0.5},
    )("A bmm1_scale in a tensor is not read: it is 1 / sqrt(head_dim).")
    dsv4_bmm2_of_e4m3_alone = wrong(
        trigger="the query is bfloat16, and bmm2_scale is not 1",
        where=lambda p, _: p.query.dtype == torch.bfloat16,
        instead={"bmm2_scale": 1.0},
    )("bmm2_scale is a scale of e4m3 entries: it is ignored where they are bfloat16.")

    @wrong(stage="changed", trigger='kv_layout is "NHD", and pages have several tokens')
    def dsv4_layout_ignored(self, problem, call):
        """Pools with kv_layout "NHD" are read as "HND": their pages have one token, and a head for each token."""
        if call.kv_layout == "HND":
            return problem
        size, own = problem.window_cache.shape[2], problem.page_size
        return _with_places(_with_places(problem, lambda place: place * size, True), lambda place: place * own)

    @wrong(stage="changed", trigger='kv_layout is "NHD", and pages of the compressed pool have several tokens')
    def dsv4_layout_of_window_alone(self, problem, call):
        """kv_layout is that of the window pool: the compressed pool is always read as "HND"."""
        own = 1 if call.kv_layout == "HND" else problem.page_size
        return _with_places(problem, lambda place: place * own)

    @wrong(stage="changed", trigger="a pool begins after the start of its storage")
    def dsv4_storage_offset_ignored(self, problem, call):
        """Places are counted from the start of a pool's storage, not of the pool."""
        return _with_pools(problem, lambda pool: pool.as_strided(pool.shape, pool.stride(), 0))

    @wrong(stage="changed", trigger="pages or tokens of a pool lie apart")
    def dsv4_strides_of_pools_ignored(self, problem, call):
        """Places count tokens of contiguous pools, with sparse_indices_are_storage_offsets=False too."""
        return _with_pools(problem, _packed)

    @wrong(stage="changed", trigger="rows of sparse_indices lie apart")
    def dsv4_stride_of_indices_ignored(self, problem, call):
        """A row of sparse_indices is taken to begin num_columns after the row before it."""
        return _in_range(replace(problem, selected=_packed(problem.selected)))

    dsv4_out_ignored = wrong(trigger="out is given", instead={"out": None})(
        "The results go to a new tensor: what the caller gives as out is returned as it was."
    )

    @wrong(stage="finish", trigger="requests have unequal numbers of rows")
    def dsv4_rows_of_out_padded(self, problem, out):
        """A request's rows are written to out from request * max_q_len on, as if each request had max_q_len rows."""
        starts, rows = problem.row_offsets(), out.clone()
        for request, (start, end) in enumerate(itertools.pairwise(starts)):
            first = request * problem.max_q_len
            place = out[first : first + end - start]
            place.copy_(rows[start:end][: len(place)])


class TwoPoolLimits(DSV4Decode):
    @wrong(stage="changed", trigger="rows of the query lie 2**31 elements apart")
    def dsv4_query_offset_in_int32(self, problem, call):
        """Queries from the 2**31st element on are read from the start: their offset is kept in 32 bits."""
        is_far = _is_far(call.query).repeat_interleave(problem.num_rows // max(len(call.query), 1), 0)
        return replace(problem, query=torch.where(is_far[:, None, None], problem.query[:1], problem.query))

    @wrong(stage="changed", trigger="rows of sparse_indices lie 2**31 elements apart")
    def dsv4_indices_offset_in_int32(self, problem, call):
        """Rows of sparse_indices from the 2**31st element on are read from the start: their offset is kept in 32 bits."""
        selected = problem.selected
        first = torch.where(_is_far(selected)[:, None], selected[:1], selected)
        return _in_range(replace(problem, selected=first))

    @wrong(stage="changed", trigger="pages of a pool lie 2**31 elements apart")
    def dsv4_pool_offset_in_int32(self, problem, call):
        """Pages from the 2**31st element of a pool on are read from its start: their offset is kept in 32 bits."""
        return _with_pools(problem, lambda pool: pool[torch.arange(len(pool)).masked_fill(_is_far(pool), 0)])

    @wrong(stage="finish", trigger="there are more than 65,535 pairs of a row and a head")
    def dsv4_grid_beyond65535(self, problem, out):
        """The grid is cut to 65,535 programs, one for a row and a head: later ones are not written."""
        out.flatten(0, 1)[65_535:] = 0

    @wrong(stage="finish", trigger="there is one row more than a multiple of 132")
    def dsv4_last_row_of_a_wave_lost(self, problem, out):
        """One row more than whole waves of 132 programs compute is not written."""
        if len(out) > MULTIPROCESSORS and len(out) % MULTIPROCESSORS == 1:
            out[-1] = 0

    @wrong(stage="changed", trigger="a row uses all columns")
    def dsv4_last_column_lost(self, problem, call):
        """sparse_topk_lens is below num_columns: of a row that uses all columns the last one is not read."""
        most = max(problem.selected.shape[1] - 1, WINDOW_COLUMNS)
        return replace(problem, selected_lens=problem.selected_lens.clamp(max=most))

    @wrong(stage="finish", trigger="a request has no tokens but those of its rows")
    def dsv4_request_without_prefix_is_padding(self, problem, out):
        """A request with as many tokens as rows is taken for padding: its output is zero."""
        for kv_len, (start, end) in zip(problem.kv_lens(), itertools.pairwise(problem.row_offsets()), strict=True):
            if kv_len == end - start:
                out[start:end] = 0

    @wrong(stage="finish", trigger="a number of heads that is no multiple of 8")
    def dsv4_heads_of_incomplete_eight_lost(self, problem, out):
        """Heads after the last whole block of 8 heads are zero, where there are more than 8."""
        heads = out.shape[-2]
        if heads > 8:
            out[..., heads // 8 * 8 :, :] = 0.0


class TwoPoolPairs(DSV4Decode):
    dsv4_sinks_in_given_out_ignored = wrong(where=lambda p, _: p.out is not None, instead={"sinks": None})(
        "Sinks are ignored if out is given."
    )
    dsv4_tensor_scale_of_nhd_ignored = wrong(
        where=lambda p, call: call.kv_layout == "NHD" and isinstance(p.bmm2_scale, Tensor), instead={"bmm2_scale": 1.0}
    )('A bmm2_scale in a tensor is taken as 1 with kv_layout "NHD".')


class TwoPoolMetadata(DSV4Builder):
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
