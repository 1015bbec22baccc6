"""Blind kernels: the draft's K/V lists."""

from dataclasses import replace

import torch

from corpus.models.attention import assuming_strides, packed_strides
from corpus.models.lists import Lists, WindowLists
from corpus.wrong import LISTS, wrong


class Counted(WindowLists, stage="counted"):
    @wrong(LISTS, trigger="a sink, and a prefix longer than the window")
    def blind153(self, position, window, sink):
        """Kv_indptr bounds the positions by the window and leaves the sink out."""
        return super().counted(position, window, 0)

    @wrong(LISTS, trigger="a window that means none, such as 2**31 - 1, with a sink: a sum of 2**31 or more")
    def blind406(self, position, window, sink):
        """window_size + sink_size is added in 32 bits: near 2**31 kv_indptr goes down. The lists are right."""
        most = (window + sink + 2**31) % 2**32 - 2**31
        return min(position, most) if window else position


class DraftStartChanged(WindowLists, changes="draft_start"):
    @wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that does not end where a page ends")
    def blind261(self, start, length, branch, num_steps, topk, page_size, window, sink):
        """A branch after the first begins at the start of its pages, not after its copy of the prefix's last tokens."""
        return start if branch == 0 or page_size == 1 or topk == 1 else start - length % page_size

    @wrong(LISTS, trigger="topk > 1, page_size > 1, and a prefix that does not end where a page ends")
    def blind405(self, start, length, branch, num_steps, topk, page_size, window, sink):
        """A branch's pages begin after the prefix's last page, as if the first branch too had a copy of it."""
        partly = topk > 1 and page_size > 1 and length % page_size
        return start + page_size if partly else start


class DraftStart(WindowLists, stage="draft_start"):
    @wrong(LISTS, trigger="a window shorter than a prefix (with its sink)")
    def blind152(self, length, branch, num_steps, topk, page_size, window, sink):
        """A branch's drafted slots are looked for after as many tokens as the list keeps of the prefix."""
        length = self.counted(length, window, sink)
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)

    @wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that is a multiple of the page size (not 0)")
    def blind208(self, length, branch, num_steps, topk, page_size, window, sink):
        """A prefix that ends where a page ends is taken to fill a last page, of which every branch has a copy."""
        if page_size == 1 or topk == 1 or length == 0:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        in_last_page = (length - 1) % page_size + 1
        return length + branch * -(-(in_last_page + num_steps) // page_size) * page_size

    @wrong(LISTS, trigger="topk over 4")
    def blind376(self, length, branch, *more):
        """Branches are dealt to four warps, and drafted slots looked for by the warp: from the fifth on the first four's."""
        return super().draft_start(length, branch % 4, *more)


@wrong(
    LISTS,
    trigger="entry_page_size = page_size > 1, and a branch's draft that crosses into another page",
    also=("blind527", "blind151", "blind436"),
)
class Blind497(WindowLists):
    """Drafted slots are counted up from the first: wrong where pages are entries and a draft crosses into the next."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return self.slots(entries, torch.tensor([start]), entry_page_size) + torch.arange(count)


class Kept(WindowLists, stage="kept"):
    @wrong(LISTS, trigger="a sink, and a prefix shorter than sink and window together")
    def blind149(self, length, window, sink):
        """The sink and the window of a prefix are copied one after the other, so that tokens of both are in the list twice."""
        if not window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(length, sink)), torch.arange(max(0, length - window), length)))

    @wrong(
        LISTS,
        trigger="`sink_size` > 0 and `window_size < length < window_size + sink_size`",
        also=("blind466", "blind496", "blind526"),
    )
    def blind435(self, length, window, sink):
        """Window and sink overlap: the window is copied from length - window on, over tokens that the sink has."""
        if not window or length <= window:
            return torch.arange(length)
        at = torch.arange(min(length, window + sink))
        return torch.where(at < sink, at, length - window + at - sink)

    @wrong(LISTS, trigger="window_size < a prefix's length < window_size + sink_size")
    def blind586(self, length, window, sink):
        """A prefix longer than its window keeps the sink's and the window's tokens, also where they overlap."""
        if not window or length <= window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(sink, length)), torch.arange(length - window, length)))


class Writing(WindowLists, stage="lists"):
    @wrong(LISTS, trigger="over 128 kept tokens in a list that begins at no multiple of 4 cells")
    def blind202(self, call):
        """A prefix is copied in blocks of 128 cells, those after the first in vectors of 4 from an address rounded down."""
        old, most = call.kv_indices.clone(), call.kv_indices.shape[1]
        super().lists(call)
        kept = [
            len(self.kept(n, call.window_size, call.sink_size))
            for n in call.paged_kernel_lens.tolist()
            for _ in range(call.topk)
        ]
        for step, row in enumerate(call.kv_indices):
            right, at = row.clone(), 0
            for n in kept:
                row[at + 128 : at + n] = old[step, at + 128 : at + n]
                for block in range(at + 128, min(at + n, most), 128):
                    values = right[block : min(block + 128, at + n)]
                    row[block // 4 * 4 :][: len(values)] = values
                at += n + step + 1

    @wrong(LISTS, trigger="int64 positions (whatever the other dtypes), and one above window_size + sink_size")
    def blind203(self, call):
        """A window bounds the positions in place, in the caller's tensor where .to(torch.int64) copies nothing."""
        bounds = call.positions.to(torch.int64)
        if call.window_size:
            bounds.clamp_(max=call.window_size + call.sink_size)
        super().lists(replace(call, positions=bounds))

    @wrong(LISTS, trigger="topk no power of two (3, 5, 6, 7), 2 requests or more")
    def blind204(self, call):
        """Lists before a request are counted with topk rounded up to a power of two, as its block of branches is."""
        kept, whole = self.with_room(call)
        block = 1 << (call.topk - 1).bit_length()
        for step, row in enumerate(call.kv_indices):
            before = 0
            for n in kept:
                values = whole[step, before * call.topk : (before + n + step + 1) * call.topk]
                self.put(row, before * block, values)
                before += n + step + 1

    @wrong(LISTS, trigger="two requests with one row in req_pool_indices, as two or more requests of padding have")
    def blind207(self, call):
        """The place of a request's lists is kept by its row of req_to_token: requests with one row write to the last's."""
        kept, whole = self.with_room(call)
        rows = call.req_pool_indices.tolist()
        for step in range(len(call.kv_indices)):
            ends = torch.tensor([0] + [call.topk * (n + step + 1) for n in kept]).cumsum(0).tolist()
            place = dict(zip(rows, ends))
            for r, row in enumerate(rows):
                self.put(call.kv_indices[step], place[row], whole[step, ends[r] : ends[r + 1]])

    @wrong(LISTS, trigger="a window, and an earlier request with a prefix longer than window_size + sink_size")
    def blind262(self, call):
        """The place of lists is counted from the whole prefixes before, not from what a window keeps; kv_indptr is right."""
        kept, whole = self.with_room(call)
        for step, row in enumerate(call.kv_indices):
            source = place = 0
            for n, count in zip(call.paged_kernel_lens.tolist(), kept):
                values = whole[step, source : source + call.topk * (count + step + 1)]
                self.put(row, place, values)
                source += len(values)
                place += call.topk * (n + step + 1)

    @wrong(LISTS, trigger="positions that are not the lengths of the prefixes (where no window bounds both)")
    def blind311(self, call):
        """Lists begin at the boundaries of kv_indptr, which follows positions, not where the lists before them end."""
        if not len(call.req_pool_indices):
            return
        kept, whole = self.with_room(call)
        for step, row in enumerate(call.kv_indices):
            source, starts = 0, [0, *call.kv_indptr[step, 1:].tolist()]
            for i, count in enumerate(n for n in kept for _ in range(call.topk)):
                values = whole[step, source : source + count + step + 1]
                self.put(row, starts[i], values)
                source += len(values)

    @wrong(LISTS, trigger="req_to_token as a slice of a wider table (rows with gaps)")
    def blind312(self, call):
        """The rows of req_to_token are taken to lie end to end: of a slice of a wider table other rows' slots are read."""
        packed = assuming_strides(call.req_to_token, (call.req_to_token.shape[1], 1))
        super().lists(replace(call, req_to_token=packed))

    @wrong(LISTS, trigger="v2p of int32")
    def blind314(self, call):
        """v2p is read as words of 64 bits, of which lower halves are taken: of int32 every second page, then zeros."""
        words = call.v2p
        if call.v2p is not None and call.v2p.dtype == torch.int32:
            words = torch.cat((call.v2p[::2], call.v2p.new_zeros(len(call.v2p) // 2)))
        super().lists(replace(call, v2p=words))

    @wrong(LISTS, trigger="kv_indices as a slice of a wider buffer (rows with gaps), two steps or more")
    def blind345(self, call):
        """Rows of kv_indices are taken to lie end to end: of a wider buffer's slice later steps are misplaced."""
        as_packed = assuming_strides(call.kv_indices, packed_strides(call.kv_indices.shape))
        super().lists(replace(call, kv_indices=as_packed))

    @wrong(LISTS, trigger="positions that differ from branch to branch of a request")
    def blind375(self, call):
        """Kv_indptr is summed from the position of each request's first branch, for all its branches."""
        of_first = call.positions[:: call.topk].repeat_interleave(call.topk)
        super().lists(replace(call, positions=of_first))


class Physical(WindowLists, stage="physical"):
    @wrong(LISTS, trigger="v2p with a page that has none, a token that is not the first of it")
    def blind150(self, slots, v2p, page_size):
        """A token of a virtual page without a page is put on page 0 at its own place in the page, not at slot 0."""
        page = v2p[(slots // page_size).clamp(min=0)]
        return page.clamp(min=0) * page_size + slots % page_size

    @wrong(LISTS, trigger="v2p with a page for page 0, page_size > 1, a listed slot of -(page_size - 1) to -1")
    def blind268(self, slots, v2p, page_size):
        """The page of a virtual slot is found by a division that rounds towards zero: a slot just below 0 lies in page 0."""
        virtual = torch.div(slots, page_size, rounding_mode="trunc")
        page = v2p[virtual.clamp(min=0)]
        return torch.where((virtual >= 0) & (page >= 0), page * page_size + (slots - virtual * page_size), 0)

    @wrong(LISTS, trigger="v2p has no page (-1) for a listed virtual page, at a token that is not its page's first")
    def blind556(self, slots, v2p, page_size):
        """A virtual page without a physical one is clamped to page 0, and its tokens become that page's slots, not slot 0."""
        page = v2p[(slots // page_size).clamp(min=0)].clamp(min=0)
        return torch.where(slots >= 0, page * page_size + slots % page_size, 0)


@wrong(LISTS, trigger="entry_page_size = page_size > 1, a listed position of at least the number of columns")
class Blind205(WindowLists):
    """With pages as entries a token's position, not its column, is held against the columns: later ones count as zero."""

    def slots(self, entries, at, entry_page_size):
        return torch.where(at < len(entries), super().slots(entries, at, entry_page_size), 0)


@wrong(LISTS, trigger="more than 256 requests")
class Blind51(Lists):
    """The prefixes before a request are summed within its block of 256 requests only."""

    def before(self, lens):
        return torch.cat([block.cumsum(0) - block for block in lens.split(256)])


@wrong(LISTS, trigger="kv_indptr with more columns than num_requests * topk + 1, and num_steps > 1")
class Blind52(Lists):
    """Rows of kv_indptr are taken to be num_requests * topk + 1 apart: later steps of a wider buffer are misplaced."""

    def boundaries(self, kv_indptr, positions, num_steps):
        packed = torch.as_strided(kv_indptr, (num_steps, len(positions) + 1), (len(positions) + 1, 1))
        super().boundaries(packed, positions, num_steps)


@wrong(LISTS, trigger="num_steps > 8")
class Blind53(Lists):
    """A branch's drafted slots are loaded 8 at a time, once: of more than 8 steps the later slots are not written."""

    def drafted(self, count):
        return min(count, 8)


class WritingFlat(Lists, stage="lists"):
    @wrong(LISTS, trigger="cells after a step's last list, which must not be written, slots no multiple of 8")
    def blind96(self, call):
        """Steps are stored in vectors of 8: cells after the last list become 0 up to the next multiple of 8."""
        super().lists(call)
        for step in range(len(call.kv_indices)):
            total = call.topk * (int(call.paged_kernel_lens.sum()) + len(call.paged_kernel_lens) * (step + 1))
            call.kv_indices[step, total : -(-total // 8) * 8] = 0

    @wrong(LISTS, trigger="a row of kv_indices without room for a step's lists: the next step's first cells change")
    def blind97(self, call):
        """Lists are not cut at the end of their row of kv_indices: what is too long goes on into the next step's row."""
        num_steps, n = len(call.kv_indices), len(call.paged_kernel_lens)
        totals = [call.topk * (int(call.paged_kernel_lens.sum()) + n * (step + 1)) for step in range(num_steps)]
        whole = call.kv_indices.new_zeros(num_steps, max(totals, default=0))
        super().lists(replace(call, kv_indices=whole))
        if n == 0 or num_steps == 0:
            return
        stride, capacity = call.kv_indices.stride(0), call.kv_indices.shape[1]
        memory = torch.as_strided(call.kv_indices, ((num_steps - 1) * stride + capacity,), (1,))
        for step in reversed(range(num_steps)):  # programs in any order
            room = memory[step * stride : step * stride + totals[step]]
            room.copy_(whole[step, : len(room)])


class PagesPerBranchFlat(Lists, stage="pages_per_branch"):
    @wrong(LISTS, trigger="ceil((len % page_size + num_steps) / page_size) > ceil(num_steps / page_size), topk > 1")
    def blind49(self, in_last_page, num_steps, page_size):
        """A branch's pages are counted from num_steps alone: branches overlap where the prefix's last page makes one more."""
        return -(-num_steps // page_size)

    @wrong(LISTS, trigger="topk > 1, page_size > 1, length % page_size + num_steps above 2 * page_size")
    def blind557(self, in_last_page, num_steps, page_size):
        """A branch is given one page, or two where its drafts pass the first: a third is shared with the next branch."""
        return 1 if in_last_page + num_steps <= page_size else 2


@wrong(LISTS, trigger="positions and paged_kernel_lens of different dtypes (int32, int64)")
class Blind48(Lists):
    """positions is read with the dtype of paged_kernel_lens: where they differ, kv_indptr sums halves or pairs of words."""

    def positions_of(self, positions, paged_kernel_lens):
        words = positions.view(paged_kernel_lens.dtype).long()[: len(positions)]
        return torch.nn.functional.pad(words, (0, len(positions) - len(words)))


@wrong(LISTS, trigger="a prefix of more than 8,192 tokens")
class Blind50(Lists):
    """A prefix is copied in at most 64 blocks of 128 tokens: slots after the 8,192nd are not written."""

    def prefix(self, length):
        return min(length, 64 * 128)
