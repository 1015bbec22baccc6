"""Wrong kernels of the draft's K/V lists, written without a look at the checks: numbers 312 to 557."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import Lists, WindowLists, lists_of, window_lists_of
from corpus.blind.model import assuming_strides, packed_strides


@wrong(window_lists_of, trigger="req_to_token as a slice of a wider table (rows with gaps)")
class Blind312(WindowLists):
    """The rows of req_to_token are taken to lie end to end: of a slice of a wider table other rows' slots are read."""

    def __call__(self, call):
        packed = assuming_strides(call.req_to_token, (call.req_to_token.shape[1], 1))
        super().__call__(replace(call, req_to_token=packed))


@wrong(
    window_lists_of,
    trigger=(
        "topk > 1, page_size > 1, and a request with another ceil((len % page_size + num_steps) / page_size) than "
        "the first one"
    ),
)
class Blind313(WindowLists):
    """The pages of a branch are counted from the last page of the batch's first prefix, for all requests."""

    def __call__(self, call):
        self.first = int(call.paged_kernel_lens[0]) if len(call.paged_kernel_lens) else 0
        super().__call__(call)

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        return length + branch * -(-(self.first % page_size + num_steps) // page_size) * page_size


@wrong(window_lists_of, trigger="v2p of int32")
class Blind314(WindowLists):
    """V2p is read as words of 64 bits, whatever its dtype, and their lower halves are taken: of an int32 one every
    second page, and what lies after it, zeros.
    """

    def __call__(self, call):
        words = call.v2p
        if call.v2p is not None and call.v2p.dtype == torch.int32:
            words = torch.cat((call.v2p[::2], call.v2p.new_zeros(len(call.v2p) // 2)))
        super().__call__(replace(call, v2p=words))


@wrong(window_lists_of, trigger="kv_indices as a slice of a wider buffer (rows with gaps), two steps or more")
class Blind345(WindowLists):
    """The rows of kv_indices are taken to lie end to end: those of a slice of a wider buffer go to the wrong places
    from the second step on.
    """

    def __call__(self, call):
        as_packed = assuming_strides(call.kv_indices, packed_strides(call.kv_indices.shape))
        super().__call__(replace(call, kv_indices=as_packed))


@wrong(window_lists_of, trigger="v2p, a window with a sink, and a prefix longer than the window")
class Blind346(WindowLists):
    """Of virtual slots those that a window keeps and those of drafted tokens are translated, those of the sink before
    the window are stored as they are.
    """

    def kept(self, length, window, sink):
        self.untranslated = min(sink, length - window) if window and length > window else 0
        return super().kept(length, window, sink)

    def physical(self, slots, v2p, page_size):
        right = super().physical(slots, v2p, page_size)
        return torch.cat((slots[: self.untranslated], right[self.untranslated :]))


@wrong(window_lists_of, trigger="positions that differ from branch to branch of a request")
class Blind375(WindowLists):
    """Kv_indptr is summed from the position of each request's first branch, for all its branches."""

    def __call__(self, call):
        of_first = call.positions[:: call.topk].repeat_interleave(call.topk)
        super().__call__(replace(call, positions=of_first))


@wrong(window_lists_of, trigger="topk over 4")
class Blind376(WindowLists):
    """Branches are dealt to four warps, and the drafted slots of a branch are looked for by the number of its warp:
    branches from the fifth on have those of the first four.
    """

    def draft_start(self, length, branch, *more):
        return super().draft_start(length, branch % 4, *more)


@wrong(window_lists_of, trigger="topk > 1, page_size > 1, and a prefix that does not end where a page ends")
class Blind405(WindowLists):
    """A branch's pages begin after the prefix's last page, as if the first branch too had a copy of that page; it goes
    on in the page itself.
    """

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        partly = topk > 1 and page_size > 1 and length % page_size
        return start + page_size if partly else start


@wrong(
    window_lists_of,
    trigger=("a window that means none, such as 2**31 - 1, with a sink: window_size + sink_size of 2**31 or more"),
)
class Blind406(WindowLists):
    """Window_size + sink_size is added in 32 bits: of a window that means none, near 2**31, the sum is negative, and
    kv_indptr goes down. The lists are right.
    """

    def counted(self, position, window, sink):
        most = (window + sink + 2**31) % 2**32 - 2**31
        return min(position, most) if window else position


@wrong(window_lists_of, trigger="`sink_size` > 0 and `window_size < length < window_size + sink_size`")
class Blind435(WindowLists):
    """Window and sink: of a prefix longer than the window and shorter than both, the window is copied from length -
    window on, over tokens that the sink has already.
    """

    def kept(self, length, window, sink):
        if not window or length <= window:
            return torch.arange(length)
        at = torch.arange(min(length, window + sink))
        return torch.where(at < sink, at, length - window + at - sink)


@wrong(window_lists_of, trigger="`entry_page_size = page_size` > 1 and drafted tokens that cross the end of a page")
class Blind436(WindowLists):
    """Entries that are pages: a branch's page is looked up once, at its first drafted token; tokens after the page's
    end get the slots behind it.
    """

    def drafted_slots(self, entries, start, count, entry_page_size):
        first = self.slots(entries, torch.tensor([start]), entry_page_size)
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return first + torch.arange(count)


@wrong(
    window_lists_of,
    trigger=("entry_page_size > 1 with a window that starts inside a page, prefix longer than window and sink"),
)
class Blind465(WindowLists):
    """Where the table has pages, the tokens of a window are read from the start of the page that the window begins in."""

    def __call__(self, call):
        self.entry = call.entry_page_size
        super().__call__(call)

    def kept(self, length, window, sink):
        start = max(length - window, sink)
        if not window or self.entry == 1 or start >= length or length <= window + sink:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(sink), start // self.entry * self.entry + torch.arange(length - start)))


@wrong(window_lists_of, trigger="window_size and sink_size, max(window, sink) < prefix < window + sink")
class Blind466(WindowLists):
    """A prefix longer than its window and shorter than window and sink together: the window's tokens are written after
    the whole sink, from the window's start.
    """

    def kept(self, length, window, sink):
        if not window or not window < length < window + sink:
            return super().kept(length, window, sink)
        at = torch.arange(length)
        return torch.where(at < sink, at, length - window + at - sink)


@wrong(
    window_lists_of,
    trigger=("window_size > 0, sink_size > 0, and a prefix with window_size < length < window_size + sink_size"),
)
class Blind496(WindowLists):
    """Where the prefix is longer than the window, entries after the sink come from its last window_size tokens by
    their place: wrong if sink and window overlap.
    """

    def kept(self, length, window, sink):
        at = torch.arange(self.counted(length, window, sink))
        if window and length > window:
            at = torch.where(at < sink, at, length - window + at - sink)
        return at


@wrong(
    window_lists_of,
    trigger=("entry_page_size = page_size > 1, and a branch's drafted tokens that cross into another page"),
)
class Blind497(WindowLists):
    """The slots of drafted tokens are counted up from the first one's: wrong where entries are pages and a draft goes
    on into the next page.
    """

    def drafted_slots(self, entries, start, count, entry_page_size):
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return self.slots(entries, torch.tensor([start]), entry_page_size) + torch.arange(count)


@wrong(window_lists_of, trigger="window_size < prefix length < window_size + sink_size")
class Blind526(WindowLists):
    """A prefix longer than the window but not than sink and window together: the sink's tokens and the window's are
    listed although they overlap, and cut to the count.
    """

    def kept(self, length, window, sink):
        if window and window < length < window + sink:
            return torch.cat((torch.arange(sink), torch.arange(length - window, length)))[:length]
        return super().kept(length, window, sink)


@wrong(window_lists_of, trigger="entry_page_size = page_size and a branch's draft that crosses a page boundary")
class Blind527(WindowLists):
    """With pages as entries the drafted slots follow the first one's: a draft that crosses into its next page does not
    look that page up.
    """

    def drafted_slots(self, entries, start, count, entry_page_size):
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return self.slots(entries, torch.tensor([start]), entry_page_size) + torch.arange(count)


@wrong(
    window_lists_of,
    trigger=("v2p has no page (-1) for a virtual page that a list names, at a token that is not its page's first"),
)
class Blind556(WindowLists):
    """A virtual page without a physical one is clamped to page 0, and its tokens become that page's slots, not slot 0."""

    def physical(self, slots, v2p, page_size):
        page = v2p[(slots // page_size).clamp(min=0)].clamp(min=0)
        return torch.where(slots >= 0, page * page_size + slots % page_size, 0)


@wrong(lists_of, trigger="topk > 1, page_size > 1, length % page_size + num_steps above 2 * page_size")
class Blind557(Lists):
    """A branch is given one page, or two where its drafts pass the end of the first: drafts that need a third share it
    with the next branch.
    """

    def pages_per_branch(self, in_last_page, num_steps, page_size):
        return 1 if in_last_page + num_steps <= page_size else 2
