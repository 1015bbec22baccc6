"""Blind kernels: whole batches, and whole requests."""

import math

import torch

from corpus.models.attention import E4M3, Attention, index, saturated
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


def search(offsets, row, steps):
    """Return the request that a bisection of a number of steps finds for a row."""
    low, high = 0, len(offsets) - 1
    for _ in range(steps):
        middle = (low + high) // 2
        low, high = (middle, high) if offsets[middle] <= row else (low, middle)
    return low


class SolveChanged(Attention, changes="solve"):
    @wrong(DECODE, trigger="a batch of over 4 requests, two of equal length")
    def blind115(self, _, run):
        """Batches of over 4 requests are sorted by length and put back by length: equal lengths get the first one's results."""
        if run.batch <= 4:
            return
        for r, length in enumerate(run.lens):
            first = run.lens.index(length)
            (a, b), (start, stop) = run.offsets[first : first + 2], run.offsets[r : r + 2]
            if first == r or b - a != stop - start:
                continue
            run.out[start:stop] = run.out[a:b].clone()
            if run.lse is not None:
                run.lse[start:stop] = run.lse[a:b].clone()

    @wrong(DECODE, trigger="cum_seq_lens_q with a request without rows before one with rows")
    def blind233(self, _, run):
        """With ragged rows a request without rows has a tile too: it writes the next one's first row, which is done before."""
        if run.p.cu_seqlens_q is None:
            return
        for r in reversed(range(run.batch)):
            first, last = run.offsets[r : r + 2]
            if first == last and first < run.offsets[-1]:
                run.offsets[r + 1] = first + 1
                self.request(run, r)
                run.offsets[r + 1] = last

    @wrong(RAGGED, trigger="lse a part of a larger buffer, heads no multiple of 4: memory next to it", named="blind402")
    @wrong(DECODE, trigger="heads no multiple of 4, lse a slice of a larger buffer: cells next to it", also="blind447")
    def blind417(self, _, run):
        """The LSE is stored four heads at a time: with 6 heads, say, two floats after each row's are overwritten."""
        lse = run.lse
        if lse is None or run.p.lse is None or lse.stride(1) != 1 or lse.shape[1] % 4 == 0:
            return
        rows, heads = run.offsets[-1], lse.shape[1]
        cells = torch.as_strided(lse, (lse.untyped_storage().nbytes() // 4,), (1,), 0)
        own = torch.zeros(len(cells), dtype=torch.bool)
        torch.as_strided(own, lse.shape, lse.stride(), lse.storage_offset())[:] = True
        first = lse.storage_offset() + torch.arange(rows) * lse.stride(0)
        beside = (first[:, None] + torch.arange(heads, -(-heads // 4) * 4)).flatten()
        beside = beside[beside < len(cells)]
        cells[beside[~own[beside]]] = 0.0

    @wrong(CONTEXT, trigger="batch_size above 512")
    def blind546(self, _, run):
        """A row's request is found by a binary search of 9 steps: over 512 requests some rows are not computed."""
        for row in range(run.offsets[-1]):
            if row >= run.offsets[search(run.offsets, row, 9) + 1]:
                self.clear(run, row)

    @wrong(MLA, trigger="heads no multiple of 16, and 2 rows or more")
    def blind135(self, _, run):
        """Heads are padded to a multiple of 16 and stored so, last row first: zeros fall on the next row's first heads."""
        padding = -run.p.num_qo_heads % 16
        run.out[1 : run.offsets[-1], :padding] = 0

    @wrong(MLA, trigger="no cum_seq_lens_q, lengths whose sort is not its own inverse, such as 70, 130, 5")
    def blind301(self, _, run):
        """Requests are sorted, shortest first, and results put back by the permutation's inverse, which may be another."""
        if run.p.cu_seqlens_q is not None:
            return
        order = torch.tensor(run.lens).argsort(stable=True)
        place = order.argsort()
        width = run.offsets[1]
        target = (place[place].unsqueeze(1) * width + torch.arange(width)).flatten()
        for result in (run.out, run.lse):
            if result is not None:
                rows = result.view(torch.uint8) if result.dtype == E4M3 else result
                rows[target] = rows.clone()

    @wrong(MLA, trigger="sinks (any but 0 and minus infinity): they have changed after the call")
    def blind302(self, _, run):
        """Sinks are multiplied by log2(e) in the caller's memory: the call is right, a second one with them is not."""
        if run.p.sinks is not None:
            run.p.sinks.mul_(math.log2(math.e))

    @wrong(MLA, trigger="return_lse, heads no multiple of 16, more than one row (LSE only)")
    def blind457(self, _, run):
        """The LSE is written with the heads padded to 16: other numbers' later rows go to other places."""
        heads = run.p.num_qo_heads
        if run.lse is None or heads % 16 == 0:
            return
        rows, pitch = run.lse.shape[0], -(-heads // 16) * 16
        at = (torch.arange(rows).unsqueeze(1) * pitch + torch.arange(heads)).flatten()
        inside = at < run.lse.numel()
        written = torch.zeros(run.lse.numel(), dtype=run.lse.dtype)
        written[at[inside]] = run.lse.flatten()[inside]
        run.lse.copy_(written.view(rows, heads))


class Solve(Attention, stage="solve"):
    def solve_by(self, run, request_of):
        """Solve a batch; without cum_seq_lens_q, solve rows whose request is not `request_of` them once more, as its rows."""
        super().solve(run)
        for row in range(run.offsets[-1] if run.p.cu_seqlens_q is None else 0):
            r = request_of(row)
            if r != row // run.p.max_q_len and r < run.batch:
                self.rows(run, r, row, row + 1)

    @wrong(DECODE, trigger="a request of seq_lens 0 before one with keys: the later ones are zero")
    def blind170(self, run):
        """The persistent loop over requests ends at one without keys, where it should go on with the next."""
        self.start(run)
        self.clear(run, slice(None))
        for r in range(run.batch):
            self.request(run, r)
            if run.lens[r] == 0:
                break

    @wrong(DECODE, trigger="q_len_per_req no power of two in large batches: from 29 with 7 rows, 170 with 3, 85 with 6")
    def blind356(self, run):
        """A row's request is row * (1024 // q_len + 1) >> 10: in large batches a request's last row becomes the next one's."""
        q_len = run.p.max_q_len
        magic = 1024 // q_len + 1 if 0 < q_len <= 512 and q_len & (q_len - 1) else 0
        self.solve_by(run, lambda row: min(row * magic >> 10, run.batch - 1) if magic else row // q_len)

    @wrong(DECODE, trigger="q_len_per_req no power of two, late rows: from row 2,048 with 3, 1,024 with 5, 685 with 7")
    def blind384(self, run):
        """A row's request is found by a 12-bit multiplication: in high rows a last row is taken for the next request's."""
        magic = -(-4096 // max(run.p.max_q_len, 1))
        self.solve_by(run, lambda row: row * magic >> 12)

    @wrong(DECODE, trigger="cum_seq_lens_q, rows no multiple of 16, then within the tile a request with more keys")
    def blind540(self, run):
        """Ragged rows are stored in tiles of 16, longest first: spare rows overwrite a request's that ran before."""
        if run.call.cum_seq_lens_q is None:
            return super().solve(run)
        self.begin(run)
        end = run.offsets[-1]
        for r in sorted(range(run.batch), key=lambda r: -run.lens[r]):
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            spare = min(first + -(-(last - first) // 16) * 16, end)
            if last < spare:
                self.rows(run, r, last, spare)

    @wrong(DECODE, trigger="cum_seq_lens_q with more than 512 requests")
    def blind566(self, run):
        """The request of a row is searched in cum_seq_lens_q by a bisection of 9 steps, too few for more than 512 requests."""
        if run.p.cu_seqlens_q is None or run.p.batch_size <= 2**9:
            return super().solve(run)
        self.begin(run)
        for row in range(run.offsets[-1]):
            self.rows(run, search(run.offsets, row, 9), row, row + 1)

    @wrong(CONTEXT, trigger="over 8 requests, one with a partial last tile of 64 rows before rows of a longer one")
    def blind175(self, run):
        """Tiles of 64 rows are stored whole, zeros after the end; over 8 requests the longest come first, and zeros last."""
        self.begin(run)
        order = range(run.batch)
        if run.batch > 8:
            order = sorted(order, key=lambda r: -run.lens[r])
        for r in order:
            self.request(run, r)
            first, last = run.offsets[r : r + 2]
            run.out[last : first + -(-(last - first) // 64) * 64] = 0

    @wrong(RAGGED, trigger="lse given with return_lse=False; only the lse is wrong", also="blind585")
    def blind93(self, run):
        """A given lse is written only where return_lse is True."""
        if not run.call.return_lse:
            run.lse = None
        super().solve(run)


class Request(Attention, stage="request"):
    @wrong(DECODE, trigger="an LSE, a request of 2 rows or more, and grouped heads")
    def blind282(self, run, r):
        """Rows and heads of a group make one tile, whose LSEs are stored head by head. The output is right."""
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        if run.lse is None or first == last:
            return
        tile = run.lse[first:last].unflatten(1, (run.num_kv_heads, run.group))
        turned = tile.permute(1, 2, 0).flatten(1).unflatten(1, (last - first, run.group))
        run.lse[first:last] = turned.transpose(0, 1).flatten(1).clone()

    @wrong(DECODE, trigger="out given that holds anything but zeros (as in a second call), over 512 keys in view")
    def blind283(self, run, r):
        """Parts of over 512 keys are added to the output with atomics; a new output is zeroed before, a given one is not."""
        first, last = run.offsets[r : r + 2]
        before = run.out[first:last].to(run.dtype)
        super().request(run, r)
        if run.p.out is None or first == last:
            return
        start, end = self.span(run, r, self.positions(run, r, torch.arange(last - first)))
        if end - start > 512:
            run.out[first:last] = saturated(run.out[first:last].to(run.dtype) + before, run.out.dtype)

    @wrong(CONTEXT, trigger="a request with rows and seq_lens 0, with out or lse given (holding anything) or new")
    def blind79(self, run, r):
        """Requests without keys are skipped by the scheduler: their rows of out and lse keep what was there."""
        if run.lens[r]:
            super().request(run, r)

    @wrong(CONTEXT, trigger="a request of over 64 rows, no multiple of 64")
    def blind331(self, run, r):
        """A partial last tile of 64 rows is loaded from 64 rows before the end, but masked and stored at its own place."""
        first, last = run.offsets[r : r + 2]
        rows = last - first
        if rows > 64 and rows % 64:
            tail = first + rows // 64 * 64
            at = torch.arange(len(run.query))
            at[tail:last] -= 64 - rows % 64
            was, run.query = run.query, index(run.query, at)
            super().request(run, r)
            run.query = was
        else:
            super().request(run, r)

    @wrong(CONTEXT, trigger="a request with rows directly after one or more without rows: its first row")
    def blind426(self, run, r):
        """The search for a row's request ends at the first equal offset: rows after empty requests are the first such's."""
        super().request(run, r)
        first = run.offsets[r]
        found = run.offsets.index(first)
        if found != r and run.offsets[r + 1] > first:
            self.rows(run, found, first, first + 1)

    @wrong(CONTEXT, trigger="a request with rows that follows one without rows")
    def blind572(self, run, r):
        """The first tile of 64 rows after a request without rows is taken for that request's."""
        first, last = run.offsets[r : r + 2]
        found = r
        while found > 0 and run.offsets[found - 1] == first:
            found -= 1
        if found == r or first == last:
            return super().request(run, r)
        end = min(first + 64, last)
        self.rows(run, found, first, end)
        if end < last:
            self.rows(run, r, end, last)

    @wrong(MLA, trigger="a length no multiple of the page size, anything but zero after it: kv_cache has changed")
    def blind187(self, run, r):
        """What stands after a request's last token in its last page is zeroed in the caller's cache, so that no NaN is read."""
        length, ps = run.lens[r], run.page_size
        if length % ps:
            page = int(run.k_table[r, length // ps])
            cache = run.k_cache.view(torch.uint8) if run.k_cache.dtype == E4M3 else run.k_cache
            cache[page, :, length % ps :] = 0
        super().request(run, r)
