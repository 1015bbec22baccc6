"""Wrong kernels of the draft's K/V lists, written without a look at the checks: numbers 586 to 587."""

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import WindowLists, window_lists_of


@wrong(window_lists_of, trigger="window_size < a prefix's length < window_size + sink_size")
class Blind586(WindowLists):
    """A prefix longer than its window keeps the sink's tokens and the window's one after the other, also where they
    overlap.
    """

    def kept(self, length, window, sink):
        if not window or length <= window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(sink, length)), torch.arange(length - window, length)))


@wrong(window_lists_of, trigger="v2p with entry_page_size = page_size > 1, drafted tokens that cross a page's end")
class Blind587(WindowLists):
    """Where entries are virtual pages, the first drafted token's place is looked up, and the others are taken to
    follow it.
    """

    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count, self.entry = count, entry_page_size
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        placed = super().physical(slots, v2p, page_size)
        if self.entry > 1:
            placed[-self.count :] = placed[-self.count] + torch.arange(self.count)
        return placed
