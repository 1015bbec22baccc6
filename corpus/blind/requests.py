"""Blind kernels: whole requests."""

import torch

from corpus.models.attention import E4M3, Attention, index, saturated
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class Request(Attention, stage="request"):
    @wrong(DECODE, trigger="sinks and an LSE with a request of seq_lens 0; only the LSE of its rows is wrong")
    def blind66(self, run, r):
        """A request without keys returns early, with an LSE of minus infinity: its sinks are forgotten."""
        if run.lens[r]:
            super().request(run, r)
        else:
            self.clear(run, slice(*run.offsets[r : r + 2]))

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

    @wrong(DECODE, trigger="page 0 in the first column of a request with keys")
    def blind290(self, run, r):
        """A request whose first page is page 0 is taken for padding of a CUDA graph, and is left as zero."""
        first, last = run.offsets[r : r + 2]
        if first == last or run.lens[r] == 0 or int(run.k_table[r, 0]) != 0:
            super().request(run, r)
        else:
            self.clear(run, slice(first, last))

    @wrong(CONTEXT, trigger="a request with rows and seq_lens 0, with out or lse given (holding anything) or new")
    def blind79(self, run, r):
        """Requests without keys are skipped by the scheduler: their rows of out and lse keep what was there."""
        if run.lens[r]:
            super().request(run, r)

    @wrong(CONTEXT, trigger="a group that does not divide 128, rows over ceil(rows * group / 128) * (128 // group)")
    def blind238(self, run, r):
        """A tile has 128 // group rows; there are as many tiles as rows * group / 128. Rows after the last tile are zero."""
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) * run.group // 128)
        end = first + tiles * max(128 // run.group, 1)
        if end < last:
            self.clear(run, slice(end, last))

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

    @wrong(
        MLA,
        trigger="cum_seq_lens_q without max_q_len, and a request wider than the mean, rounded up",
        also=("blind458", "blind429"),
    )
    def blind577(self, run, r):
        """Without max_q_len, requests get the mean number of rows, rounded up, and rows beyond it are zero."""
        call = run.call
        first, last = run.offsets[r : r + 2]
        if call.cum_seq_lens_q is None or call.max_q_len is not None or first == last:
            return super().request(run, r)
        end = min(last, first + -(-run.p.num_rows // run.batch))
        self.rows(run, r, first, end)
        self.clear(run, slice(end, last))

    @wrong(RAGGED, trigger="is_causal and an odd number, 3 or more, of 128-row tiles of a request")
    def blind431(self, run, r):
        """Causal: row tiles of 128 are paired, i and n - 1 - i: an odd number leaves the middle one out."""
        super().request(run, r)
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 128)
        if run.causal and tiles > 1 and tiles % 2:
            self.clear(run, slice(first + tiles // 2 * 128, first + tiles // 2 * 128 + 128))

    @wrong(RAGGED, trigger="q_seq_lens_cpu / kv_seq_lens_cpu given as int64, two requests or more")
    def blind492(self, run, r):
        """Host lengths are read as int32 to leave out empty requests: of int64 every second looks empty."""
        for mirror in (run.call.q_seq_lens_cpu, run.call.kv_seq_lens_cpu):
            if mirror is not None and int(mirror.view(torch.int32)[r]) == 0:
                self.clear(run, slice(*run.offsets[r : r + 2]))
                return
        super().request(run, r)

    @wrong(RAGGED, trigger="q_seq_lens_cpu of int64, two requests or more")
    def blind552(self, run, r):
        """The host's row counts are read as int32: of int64 every second is 0, and its request is skipped."""
        mirror = run.call.q_seq_lens_cpu
        if mirror is not None and int(mirror.view(torch.int32)[r]) == 0:
            self.clear(run, slice(*run.offsets[r : r + 2]))
        else:
            super().request(run, r)
