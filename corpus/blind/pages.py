"""Blind kernels: page ids, and the call before it is posed."""

import math
from dataclasses import replace

import torch

from corpus.models.attention import E4M3, Attention, saturated
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class PagesOfChanged(Attention, changes="pages_of"):
    @wrong(CONTEXT, trigger="kv_cache one 5-D tensor with a second dimension of 1 (HND or NHD)", named="blind486")
    @wrong(DECODE, trigger="kv_cache as one tensor with a second dimension of 1")
    def blind16(self, pages, run, r, columns, side):
        """Of a one-tensor cache V is found stride(1) after K: where that dimension is 1 (K is V), that is the next page."""
        cache = run.call.kv_cache
        is_next = side == "v" and isinstance(cache, torch.Tensor) and cache.shape[1] == 1
        return (pages + 1) % cache.shape[0] if is_next else pages

    @wrong(MLA, trigger="a live page id of 65,536 or more (small pages, large pool)", named="blind487")
    @wrong(DECODE, trigger="a pool of more than 65,536 pages, and a live page id of 65,536 or more")
    def blind61(self, pages, run, r, columns, side):
        """Page ids are packed in 16 bits on their way to shared memory: those from 65,536 on lose their upper part."""
        return pages & 0xFFFF

    @wrong(DECODE, trigger="live columns 2 i and 2 i + 1 with page ids n and n - 1 (a free list that is a stack)")
    def blind229(self, ids, run, r, columns, side):
        """Two pages in a row are loaded at once where their ids differ by 1, whichever is the larger."""
        first = int(columns[0]) % 2 if len(columns) else 0
        for i in range(first, len(ids) - 1, 2):
            if abs(int(ids[i + 1] - ids[i])) == 1:
                ids[i + 1] = min(int(ids[i]) + 1, len(run.k_cache) - 1)
        return ids

    @wrong(DECODE, trigger="uses_shared_paged_kv_idx=False, over 128 keys whose K and V pages differ there")
    def blind444(self, pages, run, r, columns, side):
        """Of separate page tables V's ids after the first 128 tokens are prefetched from K's."""
        if side == "v" and run.k_table is not run.v_table:
            later = columns * run.page_size >= 128
            pages = torch.where(later, run.k_table[r, columns].long(), pages)
        return pages

    @wrong(CONTEXT, trigger="as many rows as keys, over one page, page ids not consecutive")
    def blind181(self, pages, run, r, columns, side):
        """A request without cached keys goes down a path that takes its pages to follow its first one in the pool."""
        is_new = run.num_rows(r) == run.lens[r]
        return (run.table(side)[r, 0].long() + columns).clamp(max=len(run.k_cache) - 1) if is_new else pages


class PagesOf(Attention, stage="pages_of"):
    def cells(self, run, table, at):
        """Return the page ids in the memory of a table, at places counted from its first cell, moved into range."""
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        return cells[(table.storage_offset() + at).clamp(0, len(cells) - 1)].long().clamp(0, len(run.k_cache) - 1)

    def shared(self, run, r, columns, side, other, whole):
        """Return a request's pages, the leading ones that requests 0 and `other` share, of `whole` each, as request 0's."""
        same = (run.k_table[0, :whole] == run.k_table[other, :whole]) & (
            run.v_table[0, :whole] == run.v_table[other, :whole]
        )
        count = int(same.int().cumprod(0).sum())
        first = super().pages_of(run, 0, columns.clamp(max=max(count - 1, 0)), side)
        return torch.where(columns < count, first, super().pages_of(run, r, columns, side))

    @wrong(DECODE, trigger="a request with over 1,024 live columns in view (over 16,384 keys with pages of 16)")
    def blind2(self, run, r, columns, side):
        """Page ids are staged in shared memory with room for 1,024 of a request, as a ring: later columns wrap around."""
        return super().pages_of(run, r, columns % 1024 if len(columns) > 1024 else columns, side)

    @wrong(DECODE, trigger="uses_shared_paged_kv_idx=False with a window that skips a whole page of a request")
    def blind13(self, run, r, columns, side):
        """With separate page tables and a window, K's table is read from the window's first page on, V's from column 0."""
        if side == "v" and run.window >= 0 and run.v_table is not run.k_table and len(columns):
            columns = columns - columns[0]
        return super().pages_of(run, r, columns, side)

    @wrong(DECODE, trigger="a window, pages of 32 tokens or more, and a first page in view in an odd column")
    def blind327(self, run, r, columns, side):
        """Page ids are loaded in pairs from a rounded-down address: with an odd first column they are the one before's."""
        is_odd = run.page_size >= 32 and run.window >= 0 and len(columns) and int(columns[0]) % 2
        return super().pages_of(run, r, columns - 1 if is_odd else columns, side)

    @wrong(DECODE, trigger="pages of 1, 2 or 4 tokens, and a request with more than 16 of them in a tile of 128 keys")
    def blind351(self, run, r, columns, side):
        """A tile of 128 keys has room for 16 page ids: with pages below 8 tokens those after the 16th wrap around."""
        in_tile = columns % (128 // run.page_size) if run.page_size < 8 else columns % 16
        return super().pages_of(run, r, columns - in_tile + in_tile % 16, side)

    @wrong(DECODE, trigger="over 32 columns in view (over 512 keys with pages of 16): V's pages 31, 63, ...")
    def blind383(self, run, r, columns, side):
        """Ids are staged for 32 columns; K runs a page ahead, so that V's 32nd page is the one 32 columns later."""
        if side == "v" and len(columns) > 32:
            at = torch.arange(len(columns))
            late = (at % 32 == 31) & (at < len(columns) - 1)
            columns = columns[torch.where(late, (at + 32).clamp(max=len(columns) - 1), at)]
        return super().pages_of(run, r, columns, side)

    @wrong(MLA, trigger="2 requests or more, a table with other columns than max_seq_len needs", named="blind186")
    @wrong(DECODE, trigger="batch > 1 and another table row stride: a loose max_seq_len, or a wider table's slice")
    def blind418(self, run, r, columns, side):
        """Rows of the page table are taken to be ceil(max_seq_len / page_size) columns apart: right for a tight bound alone."""
        width = -(-run.p.max_kv_len // run.page_size)
        sides = 1 if run.k_table is run.v_table else 2
        at = (r * sides + (sides == 2 and side == "v")) * width + columns
        return self.cells(run, run.k_table, at)

    @wrong(DECODE, trigger="batch of more than 1024 with a request numbered 1024 or more that has more than 512 keys")
    def blind503(self, run, r, columns, side):
        """A work item is request << 6 | split in 16 bits: requests from the 1,024th on that are split wrap to r - 1024."""
        request = ((r << 6) & 0xFFFF) >> 6 if run.lens[r] > 512 else r
        return super().pages_of(run, request, columns, side).clamp(0, run.k_cache.shape[0] - 1)

    @wrong(CONTEXT, trigger="two requests with the same first page id and other later pages that both have whole")
    def blind77(self, run, r, columns, side):
        """Requests with the same first page are taken to share all pages that both have whole: the first one's are read."""
        pages = super().pages_of(run, r, columns, side)
        table, ps = run.k_table, run.page_size
        leader = next((i for i in range(r) if run.lens[i] >= ps and table[i, 0] == table[r, 0]), None)
        if leader is None or run.lens[r] < ps:
            return pages
        shared = columns < min(run.lens[leader], run.lens[r]) // ps
        return torch.where(shared, super().pages_of(run, leader, columns.clamp(max=table.shape[1] - 1), side), pages)

    @wrong(CONTEXT, trigger="pages of 32 tokens or more, 2 requests or more, columns no multiple of 4")
    def blind366(self, run, r, columns, side):
        """Page ids are loaded by four from a rounded-down address: a table row that begins elsewhere is read shifted."""
        table = run.table(side)
        shift = (table.data_ptr() // 4 + r * table.stride(0)) % 4
        if run.page_size < 32 or not len(columns):
            shift = 0
        return self.cells(run, table, r * table.stride(0) + columns - shift)

    @wrong(CONTEXT, trigger="first and last of 3 requests share leading whole pages, the second not", also="blind484")
    def blind456(self, run, r, columns, side):
        """A shared prefix is found from the pages of the first and the last request; all between are taken to share it."""
        whole = min(run.lens[0], run.lens[-1]) // run.page_size if run.batch > 2 else 0
        return self.shared(run, r, columns, side, run.batch - 1, whole)

    @wrong(CONTEXT, trigger="three or more requests with one first page, a third that leaves before the others part")
    def blind515(self, run, r, columns, side):
        """Where all requests begin with the same page, the pages that requests 0 and 1 share are taken to be shared by all."""
        is_common = min(run.lens) > 0 and bool((run.k_table[:, 0] == run.k_table[0, 0]).all())
        whole = min(run.lens[:2]) // run.page_size if run.batch > 2 and is_common else 0
        return self.shared(run, r, columns, side, min(1, run.batch - 1), whole)

    @wrong(MLA, trigger="an MLA cache with pages of fewer than 32 tokens, not consecutive in memory")
    def blind38(self, run, r, columns, side):
        """A load brings 32 tokens from a page's start: past a smaller page's end they are of the page next in memory."""
        per_box = max(1, 32 // run.page_size)
        first = super().pages_of(run, r, columns // per_box * per_box, side)
        return (first + columns % per_box) % run.k_cache.shape[0]

    @wrong(MLA, trigger="cum_seq_lens_q with a request without rows before one with rows")
    def blind338(self, run, r, columns, side):
        """With cum_seq_lens_q requests without rows are left out, and a request's number there is its row of the table."""
        with_rows = sum(a < b for a, b in zip(run.offsets[:r], run.offsets[1 : r + 1]))
        return super().pages_of(run, with_rows, columns, side).clamp(0, max(len(run.k_cache) - 1, 0))

    @wrong(MLA, trigger="a request of more than 128 pages (4,096 keys with pages of 32)")
    def blind430(self, run, r, columns, side):
        """128 page ids of a request are staged at a time, and not staged again: page 128 and later are read as page c % 128."""
        return super().pages_of(run, r, columns % 128, side)


class PagedChanged(Attention, changes="paged"):
    @wrong(DECODE, trigger="out as the first part of a larger buffer, rows no multiple of 16: what follows is zeroed")
    def blind64(self, result, call):
        """Rows are stored in tiles of 16 whole ones: zeros go after out's end where the rows are no multiple of 16."""
        if call.out is not None and call.out.numel():
            out, row = call.out, call.out[0].numel()
            after = out.storage_offset() + out.numel()
            room = out.untyped_storage().nbytes() // out.element_size() - after
            count = min(-out.shape[0] % 16 * row, room)
            if count > 0:
                torch.as_strided(out, (count,), (1,), after).copy_(torch.zeros(count, dtype=out.dtype))
        return result

    @wrong(CONTEXT, trigger="two calls of one shape without out, the first one's result read after the second")
    def blind129(self, result, call):
        """Where no out is given, the output is a buffer that the next call of the same shape writes again."""
        if call.out is not None:
            return result
        out = result[0] if call.return_lse else result
        buffer = self.kept.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)
        return (buffer, result[1]) if call.return_lse else buffer

    @wrong(RAGGED, trigger="bmm1_scale as a tensor: it has changed after the call")
    def blind197(self, result, call):
        """A bmm1_scale that is a tensor is turned to base 2 in the caller's memory."""
        if isinstance(call.bmm1_scale, torch.Tensor):
            call.bmm1_scale.mul_(1 / math.log(2.0))
        return result

    @wrong(RAGGED, trigger="two calls with return_lse, no lse, one shape: the first LSE read after the second")
    def blind432(self, got, call):
        """A returned LSE, if none is given, is one buffer per shape: the next call overwrites an earlier one's."""
        if call.lse is not None or not call.return_lse:
            return got
        return got[0], self.kept.setdefault(tuple(got[1].shape), got[1]).copy_(got[1])


class Paged(Attention, stage="paged"):
    @wrong(DECODE, trigger="out of another dtype than the query's (e4m3, bfloat16 out); what is returned is right")
    def blind228(self, call):
        """A given out of another dtype than the query's is not written: the result is converted to a new tensor."""
        if call.out is not None and call.out.dtype != call.query.dtype:
            call = replace(call, out=None, out_dtype=call.out.dtype)
        return super().paged(call)

    @wrong(CONTEXT, trigger="block_tables with anything but 0 after live pages (-1, stale ids): overwritten")
    def blind75(self, call):
        """Cells of the page table after a request's last page are set to 0 in the caller's table, for prefetches."""
        problem = call.problem()
        pages = (problem.seq_lens.to(torch.int64) + problem.page_size - 1) // problem.page_size
        for table in (problem.k_block_tables, problem.v_block_tables):
            dead = torch.arange(table.shape[1]) >= pages.unsqueeze(1)
            table.masked_fill_(dead, 0)
        return super().paged(call)


class MlaChanged(Attention, changes="mla"):
    @wrong(MLA, trigger="cum_seq_lens_q, return_lse_base='base2'")
    def blind139(self, result, call):
        """With cum_seq_lens_q the LSE is a natural logarithm, also if base 2 is requested."""
        if call.return_lse and call.cum_seq_lens_q is not None and call.return_lse_base == "base2":
            result[1].mul_(math.log(2.0))
        return result

    @wrong(MLA, trigger="a given lse of three dimensions, several rows")
    def blind142(self, result, call):
        """An lse of three dimensions is written as [batch_size, heads, rows]."""
        if call.lse is not None and call.lse.ndim == 3:
            call.lse.copy_(call.lse.transpose(1, 2).reshape(call.lse.shape))
        return result

    @wrong(MLA, trigger="a float16 or e4m3 query, and no out")
    def blind249(self, result, call):
        """A new output has the query's dtype, not bfloat16."""
        if call.out is not None or call.query.dtype not in (torch.float16, E4M3):
            return result
        out, *lse = result if call.return_lse else (result,)
        out = saturated(out.float(), call.query.dtype)
        return (out, *lse) if lse else out


class Mla(Attention, stage="mla"):
    @wrong(MLA, trigger="`return_lse_base='basee'` and more rows than requests. LSE only")
    def blind427(self, call):
        """return_lse_base='basee': the pass that multiplies by ln 2 covers batch_size rows, not all query rows."""
        problem = call.problem()
        out, lse = self.solved(call, problem)
        if lse is not None and call.lse_is_base_e:
            lse[: problem.batch_size] *= math.log(2.0)
        return call.returned(out, lse)

    @wrong(MLA, trigger="return_lse_base='basee' with a given lse", also="blind87")
    def blind489(self, call):
        """The LSE is turned to base e in a new tensor: a given lse keeps base 2, and only the returned one is right."""
        if call.lse is None or call.return_lse_base != "basee":
            return super().mla(call)
        out, lse = super().mla(replace(call, return_lse_base="base2"))
        return out, lse * math.log(2.0)

    @wrong(MLA, trigger="lse given with return_lse_base='basee'", also="blind547 blind579")
    def blind517(self, call):
        """The LSE is turned to base e in a tensor of the kernel's own only: a given lse stays in base 2."""
        out, lse = self.solved(call, call.problem())
        if call.lse is None and lse is not None and call.lse_is_base_e:
            lse *= math.log(2.0)
        return call.returned(out, lse)
