"""Blind kernels: several stages of the draft's K/V lists."""

from dataclasses import replace

import torch

from corpus.models.lists import Lists, WindowLists
from corpus.wrong import LISTS, wrong


@wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that ends inside a page whose token is kept")
class Blind201(WindowLists):
    """Tokens of a prefix's last, partly filled page are listed from each branch's own copy of that page."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        has_copies = page_size > 1 and topk > 1
        self.full, self.shift = (length // page_size * page_size, start - length) if has_copies else (length, 0)
        return start

    def kept(self, length, window, sink):
        at = super().kept(length, window, sink)
        return torch.where(at < self.full, at, at + self.shift)


@wrong(LISTS, trigger="v2p, whose pages of drafted tokens are not their own numbers")
class Blind206(WindowLists):
    """Of virtual slots those of the prefix are translated, those of drafted tokens are stored as they are."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count = count
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        found = super().physical(slots, v2p, page_size)
        found[-self.count :] = slots[-self.count :]
        return found


@wrong(LISTS, trigger="a window, a prefix longer than sink_size, prefix + num_steps over window_size + sink_size")
class Blind263(WindowLists):
    """The window slides with the draft: it counts drafted tokens, so that each step keeps one token less of a prefix."""

    def lists(self, call):
        num_steps, n = call.kv_indices.shape[0], len(call.positions)
        for step in range(num_steps if len(call.req_pool_indices) else 0):
            self.drafted = step + 1
            old = call.kv_indices.clone()
            bounds = torch.zeros(num_steps, n + 1, dtype=torch.int64)
            rows = old.clone()
            super().lists(replace(call, kv_indices=rows, kv_indptr=bounds))
            call.kv_indices[step] = rows[step]
            call.kv_indptr[step, 1 : n + 1] = bounds[step, 1:].to(call.kv_indptr.dtype)

    def counted(self, position, window, sink):
        return min(position, max(0, window - self.drafted) + sink) if window else position

    def kept(self, length, window, sink):
        at = torch.arange(length)
        return at[(at < sink) | (at >= length - (window - self.drafted))] if window else at


@wrong(LISTS, trigger="a window that cuts and starts inside a page, page_size > 1")
class Blind264(WindowLists):
    """A window that cuts is copied from the start of its first page, as many tokens as ever: the newest are left out."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.page_size = page_size
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)

    def kept(self, length, window, sink):
        at = super().kept(length, window, sink)
        if len(at) == length:
            return at
        start = length - window
        return torch.where(at < start, at, at - start % self.page_size)


@wrong(LISTS, trigger="topk > 1, page_size > 1, a step below the last whose draft needs fewer pages than the last")
class Blind265(WindowLists):
    """The pages of a branch are counted up to the step of the list, not for all steps of the draft."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.has_pages = page_size > 1 and topk > 1
        self.start_after = lambda steps: WindowLists.draft_start(
            self, length, branch, steps, topk, page_size, window, sink
        )
        return self.start_after(num_steps)

    def drafted_slots(self, entries, start, count, entry_page_size):
        start = self.start_after(count) if self.has_pages else start
        return super().drafted_slots(entries, start, count, entry_page_size)


@wrong(LISTS, trigger="v2p, num_steps > 1, and a kept token whose physical page is not its own number in v2p")
class Blind266(WindowLists):
    """Each later step's prefix is copied from the first step's list, whose slots are translated, and translated again."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count = count
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        found = super().physical(slots, v2p, page_size)
        if self.count == 1:
            return found
        prefix = found[: -self.count]
        again = super().physical(prefix.clamp(max=len(v2p) * page_size - 1), v2p, page_size)
        return torch.cat((again, found[-self.count :]))


@wrong(LISTS, trigger="a listed slot over 16,777,216 that float32 does not hold (odd ones, up to 2**25)")
class Blind267(WindowLists):
    """Slots are gathered by a product with a matrix of zeros and ones in float32, which holds whole numbers up to 2**24."""

    def slots(self, entries, at, entry_page_size):
        return super().slots(entries, at, entry_page_size).float().long()

    def physical(self, slots, v2p, page_size):
        return super().physical(slots.clamp(max=len(v2p) * page_size - 1), v2p, page_size)


@wrong(LISTS, trigger="topk > 1, page_size > 1, and a request of other branch pages than the first one's")
class Blind313(WindowLists):
    """The pages of a branch are counted from the last page of the batch's first prefix, for all requests."""

    def lists(self, call):
        self.first = int(call.paged_kernel_lens[0]) if len(call.paged_kernel_lens) else 0
        super().lists(call)

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        return length + branch * -(-(self.first % page_size + num_steps) // page_size) * page_size


@wrong(LISTS, trigger="v2p, a window with a sink, and a prefix longer than the window")
class Blind346(WindowLists):
    """Slots that a window keeps and drafted ones are translated; those of the sink before it are not."""

    def kept(self, length, window, sink):
        self.untranslated = min(sink, length - window) if window and length > window else 0
        return super().kept(length, window, sink)

    def physical(self, slots, v2p, page_size):
        right = super().physical(slots, v2p, page_size)
        return torch.cat((slots[: self.untranslated], right[self.untranslated :]))


@wrong(LISTS, trigger="entry_page_size > 1 with a window that starts inside a page, prefix over window and sink")
class Blind465(WindowLists):
    """Where the table has pages, the tokens of a window are read from the start of the page that the window begins in."""

    def lists(self, call):
        self.entry = call.entry_page_size
        super().lists(call)

    def kept(self, length, window, sink):
        start = max(length - window, sink)
        if not window or self.entry == 1 or start >= length or length <= window + sink:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(sink), start // self.entry * self.entry + torch.arange(length - start)))


@wrong(LISTS, trigger="v2p with entry_page_size = page_size > 1, drafted tokens that cross a page's end")
class Blind587(WindowLists):
    """Where entries are virtual pages, the first drafted token's place is looked up, and the others follow it."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count, self.entry = count, entry_page_size
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        placed = super().physical(slots, v2p, page_size)
        if self.entry > 1:
            placed[-self.count :] = placed[-self.count] + torch.arange(self.count)
        return placed


@wrong(LISTS, trigger="a 0 in paged_kernel_lens")
class Blind98(Lists):
    """A request without a prefix ends early: its drafted slots are not written."""

    def prefix(self, length):
        self.empty = length == 0
        return length

    def drafted(self, count):
        return 0 if self.empty else count
