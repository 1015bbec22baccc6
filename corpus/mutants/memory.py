"""Mutants of what a call writes, and of what it reads that is nobody's: outputs, inputs, workspace. Those of `AddedTo` and below
are right unless huge or NaN values lie where no row may read them, or in a buffer that the call must write.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import Forgiving, Rows, SplitKV, gathered
from corpus.mutants.pages import with_strides
from corpus.wrong import wrong
from lab.calls.problem import E4M3
from lab.calls.workspace import SEMAPHORE_BYTES


def overwrite(tensor: Tensor, offset: int, count: int) -> None:
    """Write zeros `offset` elements after a tensor's first, as far as its own storage reaches."""
    start = int(tensor.storage_offset()) + offset
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    start, end = max(0, start), min(room, start + count)
    if start < end:
        tensor.as_strided((end - start,), (1,), start).zero_()


class Written(SplitKV):
    zeros = wrong(mla=True, merged=lambda rows, *_: rows._replace(values=rows.values * 0.0))("The output is zero.")
    nan_in_one_head = wrong(mla=True, finish=lambda _, p, out, lse: out[-1:, -1, -1].fill_(torch.nan))(
        "One element of the last head of the last row is NaN."
    )

    @wrong(stage="write")
    def large_e4m3_outputs_nan(self, problem, tile, rows, out, lse):
        """An e4m3 output is NaN where 448 is not the nearest: it does not saturate."""
        if out.dtype == E4M3:
            rows = rows._replace(values=rows.values.masked_fill(rows.values.abs() > 464, torch.nan))
        super().write(problem, tile, rows, out, lse)

    one_element_zero = wrong(finish=lambda _, p, out, lse: out[:1, 0, 0].fill_(0.0))(
        "One element of one vector is zero."
    )

    @wrong(stage="finish_tile", mla=True, source="FlashInfer #2883")
    def length_zero_nan(self, problem, tile, rows):
        """A request without keys has NaN rows."""
        if tile.kv_len == 0:
            rows.values.fill_(torch.nan)

    @wrong(stage="write", mla=True, source="FlashInfer #2883")
    def length_zero_untouched(self, problem, tile, rows, out, lse):
        """The rows of a request without keys are not written."""
        if tile.kv_len > 0:
            super().write(problem, tile, rows, out, lse)

    out_row_beyond = wrong(
        mla=True, source="FlashInfer #3929", finish=lambda _, p, out, lse: overwrite(out, out.numel(), out[:1].numel())
    )("One row is written after the output.")
    out_row_before = wrong(
        mla=True, finish=lambda _, p, out, lse: overwrite(out, -out.shape[1:].numel(), out.shape[1:].numel())
    )("One row is written before the output.")

    @wrong(stage="finish", mla=True)
    def lse_beyond(self, problem, out, lse):
        """One value is written after the LSE."""
        if lse is not None and lse.is_contiguous():
            overwrite(lse, lse.numel(), 1)

    out_ignored = wrong(mla=True, results=lambda results, _: (torch.empty_like(results[0]), results[1]))(
        "The result goes to a new tensor, whatever `out` the caller gave."
    )

    @wrong(stage="returned")
    def out_dtype_ignored(self, problem, out, lse):
        """The output has the query's dtype, whatever out_dtype says."""
        return super().returned(problem, out if problem.out is not None else out.to(problem.query.dtype), lse)

    out_rounded_to_e4m3 = wrong(mla=True, merged=lambda rows, *_: rows._replace(values=rows.values.to(E4M3).float()))(
        "The output is rounded to e4m3 on its way."
    )

    @wrong(stage="write", mla=True, source="FlashInfer #2408")
    def needs_zero_out(self, problem, tile, rows, out, lse):
        """Results are added to what the output holds."""
        held = out[tile.rows].float() if problem.out is not None else torch.zeros_like(rows.values)
        super().write(problem, tile, rows._replace(values=held + rows.values), out, lse)

    query_scaled_in_place = wrong(mla=True, finish=lambda _, p, *__: p.query.copy_(p.query.float() * p.bmm1_scale))(
        "The caller's query is overwritten by its product with bmm1_scale."
    )
    seq_lens_written = wrong(mla=True, finish=lambda _, p, *__: p.seq_lens.copy_(p.seq_lens.to(torch.int64) + 1))(
        "seq_lens are advanced by one after the call."
    )
    table_tail_written = wrong(mla=True, finish=lambda _, p, *__: p.k_block_tables[:, -1:].zero_())(
        "The last column of the page table is overwritten by 0."
    )

    @wrong(stage="values", mla=True)
    def page_tail_cleared(self, problem, tile, positions):
        """The tails of last pages in the V cache are overwritten by zeros before they are read."""
        used = tile.kv_len % problem.page_size
        if used:
            page = problem.v_block_tables[tile.request, tile.kv_len // problem.page_size]
            problem.v_cache.view(torch.uint8)[int(page), :, used:] = 0
        return super().values(problem, tile, positions)

    @wrong(stage="finish")
    def sinks_overwritten(self, problem, out, lse):
        """The caller's sinks are overwritten by their exponentials."""
        if problem.sinks is not None:
            problem.sinks.exp_()

    @wrong(stage="sink_weight", source="FlashInfer #4525")
    def sinks_padded(self, problem, tile, sinks, origin):
        """Sinks are read eight at a time, and what lies after the last reaches the sum with a factor of zero."""
        room = problem.sinks.untyped_storage().nbytes() // 4 - problem.sinks.storage_offset()
        padded = min(room, -(-problem.num_qo_heads // 8) * 8)
        tail = problem.sinks.as_strided((padded,), (1,))[problem.num_qo_heads :]
        return super().sink_weight(problem, tile, sinks, origin) + (tail * 0.0).sum()

    @wrong(stage="arrives_last", mla=True, source="FlashInfer #1643")
    def counters_left(self, counters, index, tile):
        """The split that arrives last leaves its counter as it is."""
        counters[index] += tile.num_splits
        return int(counters[index]) % tile.num_splits == 0

    @wrong(stage="launch", mla=True)
    def given_counters_left(self, call):
        """The tiles of several splits count in multi_ctas_kv_counter_buffer too, and leave the count."""
        counters = call.multi_ctas_kv_counter_buffer
        tiles = (tile for part in self.problem(call).of_kv_heads() for tile in self.tiles(part))
        if counters is not None and any(tile.num_splits > 1 for tile in tiles):
            counters.view(-1)[:1] += 1
        return super().launch(call)

    @wrong(changes="arrives_last", mla=True, source="FlashInfer #3465")
    def counters_left_by_other_shape(self, last, counters, index, tile):
        """A counter is zeroed only after more than one split."""
        counters[index] += tile.num_splits == 1
        return last

    @wrong(changes="workspace", mla=True, source="vLLM #25520")
    def scratch_in_counters(self, workspace, buffer, problem, tiles):
        """Sums of weights lie in the last bytes of the counters' 8 MiB."""
        if 4 * len(workspace.counters) == SEMAPHORE_BYTES:
            workspace.counters[-1] = 1
        return workspace

    @wrong(stage="workspace", mla=True)
    def scratch_beyond_end(self, buffer, problem, tiles):
        """64 bytes after the workspace are written."""
        if buffer is not None and buffer.is_contiguous():
            overwrite(buffer, buffer.numel(), 64 // buffer.element_size())
        return super().workspace(buffer, problem, tiles)

    @wrong(stage="results", mla=True, source="SGLang #39175")
    def output_reused(self, problem):
        """Without `out`, results of a shape share one tensor, so that a call overwrites an earlier one's."""
        out, lse = super().results(problem)
        if problem.out is None:
            out = self.first((out.shape, out.dtype, out.device), lambda: out)
        return out, lse

    @wrong(stage="write", mla=True)
    def empty_batch_untouched(self, problem, tile, rows, out, lse):
        """Nothing is written where no request has a key."""
        if max(self.kv_lens(problem)) > 0:
            super().write(problem, tile, rows, out, lse)
        else:
            out[tile.rows] = torch.nan  # what memory holds

    @wrong(stage="returned")
    def returns_another_tensor(self, problem, out, lse):
        """The result is written into out, and what is returned is a new tensor of zeros."""
        return super().returned(problem, out if problem.out is None else torch.zeros_like(out), lse)

    @wrong(stage="returned")
    def lse_returned_unasked(self, problem, out, lse):
        """An lse that is handed out is returned, also without return_lse."""
        return super().returned(problem, out, lse) if problem.lse is None else (out, lse)

    @wrong(stage="changed", mla=True)
    def no_rows_refused(self, problem):
        """A batch whose requests have no rows ends in an empty grid."""
        if problem.cu_seqlens_q is not None and problem.batch_size and not int(problem.cu_seqlens_q[-1]):
            raise RuntimeError("a grid of no blocks")
        return super().changed(problem)


@wrong(mla=True)
class CountersOfFirstCall(SplitKV):
    """As many counters are zeroed as the first call with this workspace had tiles."""

    def workspace(self, buffer, problem, tiles):
        workspace = super().workspace(buffer, problem, tiles)
        self.zeroed = self.first(workspace.counters.data_ptr(), lambda: len(tiles))
        return workspace

    def arrives_last(self, counters, index, tile):
        last = super().arrives_last(counters, index, tile)
        if last and index >= self.zeroed:
            counters[index] = tile.num_splits
        return last


@wrong(mla=True, source="FlashInfer #1459")
class ScratchNotCleared(SplitKV):
    """The merge reads one split more than there is and multiplies it by zero."""

    def workspace(self, buffer, problem, tiles):
        workspace = super().workspace(buffer, problem, tiles)
        self.leftover = float(workspace.scratch[0]) if len(workspace.scratch) and buffer is not None else 0.0
        return workspace

    def merged(self, problem, tile, partials):
        values, lse_log2 = super().merged(problem, tile, partials)
        return Rows(values + 0.0 * self.leftover, lse_log2)


@wrong(mla=True)
class ScratchAddedTo(SplitKV):
    """Sums of weights are added to what the scratch holds."""

    def layout(self, problem, tile, scratch):
        partials = super().layout(problem, tile, scratch)
        self.held = partials.total.clone()
        return partials

    def merged(self, problem, tile, partials):
        return super().merged(problem, tile, partials._replace(total=partials.total + self.held))

    def workspace(self, buffer, problem, tiles):
        workspace = super().workspace(buffer, problem, tiles)
        if buffer is None:
            workspace.scratch.zero_()
        return workspace


@wrong()
class OriginOfWholePages(Forgiving):
    """The largest logit, from which exponents are counted, is that of whole pages, with the tokens before a window."""

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // problem.page_size * problem.page_size, end

    def masked(self, scores, visible):
        self.hidden = scores.masked_fill(visible, -math.inf)
        return super().masked(scores, visible)

    def in_splits(self, problem, tile, tensor, fill, dim):
        if fill == -math.inf:
            self.hidden = super().in_splits(problem, tile, self.hidden, fill, dim)
        return super().in_splits(problem, tile, tensor, fill, dim)

    def largest(self, scores):
        return torch.maximum(super().largest(scores), super().largest(self.hidden))


class AddedTo(Forgiving):
    @wrong(stage="changed")
    def v_inner_strides_from_k(self, problem):
        """V is read with its own page stride, and with the strides of K's heads and tokens."""
        strides, cache = problem.k_cache.stride()[1:3], problem.v_cache
        if strides == cache.stride()[1:3]:
            return problem
        return replace(problem, v_cache=with_strides((cache.stride(0), *strides), cache))

    @wrong(stage="write", mla=True)
    def lse_kept_if_larger(self, problem, tile, rows, out, lse):
        """The larger of the LSE and of what the caller's buffer holds is written, without NaN."""
        if problem.lse is not None:
            rows = rows._replace(lse_log2=torch.fmax(rows.lse_log2, lse[tile.rows].float()))
        super().write(problem, tile, rows, out, lse)

    @wrong(stage="keys", mla=True)
    def gap_times_zero(self, problem, tile, positions):
        """Keys that lie apart are read up to the next, and what lies between is multiplied by zero."""
        cache, keys = problem.k_cache, super().keys(problem, tile, positions)
        size = min(stride for stride, count in zip(cache.stride(), cache.shape[:3], strict=False) if count > 1)
        if size <= cache.shape[3] or not cache.is_floating_point():
            return keys
        whole = cache.as_strided((*cache.shape[:3], size), cache.stride())
        pages = self.pages(problem, problem.k_block_tables, tile, positions)
        gaps = gathered(whole, pages, self.offsets(problem, positions))[..., cache.shape[3] :]
        return keys + 0.0 * gaps.float().sum(dim=-1, keepdim=True).transpose(0, 1)


@wrong()
class RaggedOutputAddedTo(Ragged):
    """The output is added to what the caller's buffer holds, from which NaN is cleared."""

    def changed(self, problem):
        self.held = None if problem.out is None else problem.out.nan_to_num(0.0)
        return problem

    def finish(self, problem, out, lse_log2):
        if self.held is not None:
            out += self.held
