"""Blind kernels: the draft's K/V lists."""

from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from corpus.models.attention import assuming_strides, packed_strides
from corpus.models.lists import Lists
from corpus.wrong import LISTS, wrong


class Counted(Lists, stage="counted"):
    @wrong(LISTS, trigger="a sink, and a prefix longer than the window")
    def blind153(self, call, position):
        """kv_indptr bounds the positions by the window and leaves the sink out."""
        return super().counted(replace(call, sink_size=0), position)

    @wrong(LISTS, trigger="a window that means none, such as 2**31 - 1, with a sink: a sum of 2**31 or more")
    def blind406(self, call, position):
        """window_size + sink_size is added in 32 bits: near 2**31 kv_indptr goes down. The lists are right."""
        most = (call.window_size + call.sink_size + 2**31) % 2**32 - 2**31
        return min(position, most) if call.window_size else position


class DraftStartChanged(Lists, changes="draft_start"):
    @wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that does not end where a page ends")
    def blind261(self, start, call, length, branch):
        """A branch after the first begins at the start of its pages, not after its copy of the prefix's last tokens."""
        return start - length % call.page_size if branch and call.has_copies else start

    @wrong(LISTS, trigger="topk > 1, page_size > 1, and a prefix that does not end where a page ends")
    def blind405(self, start, call, length, branch):
        """A branch's pages begin after the prefix's last page, as if the first branch too had a copy of it."""
        return start + call.page_size if call.has_copies and length % call.page_size else start


class DraftStart(Lists, stage="draft_start"):
    @wrong(LISTS, trigger="a window shorter than a prefix (with its sink)")
    def blind152(self, call, length, branch):
        """A branch's drafted slots are looked for after as many tokens as the list keeps of the prefix."""
        return super().draft_start(call, self.counted(call, length), branch)

    @wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that is a multiple of the page size (not 0)")
    def blind208(self, call, length, branch):
        """A prefix that ends where a page ends is taken to fill a last page, which every branch copies."""
        if not call.has_copies or length == 0:
            return super().draft_start(call, length, branch)
        in_last_page = (length - 1) % call.page_size + 1
        return length + branch * self.pages_per_branch(call, in_last_page) * call.page_size

    @wrong(LISTS, trigger="topk over 4")
    def blind376(self, call, length, branch):
        """Branches are dealt to four warps, and drafted slots looked for by the warp: from the fifth on the first four's."""
        return super().draft_start(call, length, branch % 4)


class PagesPerBranch(Lists, stage="pages_per_branch"):
    @wrong(LISTS, trigger="ceil((len % page_size + num_steps) / page_size) > ceil(num_steps / page_size), topk > 1")
    def blind49(self, call, in_last_page):
        """A branch's pages are counted from num_steps alone: branches overlap where the prefix's last page makes one more."""
        return -(-call.num_steps // call.page_size)

    @wrong(LISTS, trigger="topk > 1, page_size > 1, length % page_size + num_steps above 2 * page_size")
    def blind557(self, call, in_last_page):
        """A branch is given one page, or two where its drafts pass the first: a third is shared with the next branch."""
        return 1 if in_last_page + call.num_steps <= call.page_size else 2

    @wrong(LISTS, trigger="topk > 1, page_size > 1, and a request of other branch pages than the first one's")
    def blind313(self, call, in_last_page):
        """The pages of a branch are counted from the last page of the batch's first prefix, for all requests."""
        return super().pages_per_branch(call, int(call.paged_kernel_lens[0]) % call.page_size)


class KeptByWindow(Lists, changes="kept", where=lambda call, _: call.window_size > 0):
    @wrong(LISTS, trigger="a sink, and a prefix shorter than sink and window together")
    def blind149(self, at, call, length):
        """The sink and the window of a prefix are copied one after the other, so that tokens of both are in the list twice."""
        begin = max(0, length - call.window_size)
        return torch.cat((torch.arange(min(length, call.sink_size)), torch.arange(begin, length)))

    @wrong(LISTS, trigger="window_size < length < window_size + sink_size", also="blind466 blind496 blind526")
    def blind435(self, at, call, length):
        """Window and sink overlap: the window is copied from length - window on, over tokens that the sink has."""
        window, sink = call.window_size, call.sink_size
        at = torch.arange(min(length, window + sink))
        return torch.where((at < sink) | (length <= window), at, length - window + at - sink)

    @wrong(LISTS, trigger="window_size < a prefix's length < window_size + sink_size")
    def blind586(self, at, call, length):
        """A prefix longer than its window keeps the sink's and the window's tokens, also where they overlap."""
        if length <= call.window_size:
            return at
        return torch.cat((torch.arange(min(call.sink_size, length)), torch.arange(length - call.window_size, length)))

    @wrong(LISTS, trigger="a window that cuts and starts inside a page, page_size > 1")
    def blind264(self, at, call, length):
        """A window that cuts is copied from the start of its first page, as many tokens as ever: the newest are left out."""
        start = length - call.window_size
        return at if len(at) == length else torch.where(at < start, at, at - start % call.page_size)

    @wrong(LISTS, trigger="entry_page_size > 1 with a window that starts inside a page, prefix over window and sink")
    def blind465(self, at, call, length):
        """Where the table has pages, the tokens of a window are read from the start of the page that the window begins in."""
        entry, sink = call.entry_page_size, call.sink_size
        start = max(length - call.window_size, sink)
        if len(at) == length or entry == 1 or start >= length:
            return at
        return torch.cat((torch.arange(sink), start // entry * entry + torch.arange(length - start)))


class Drafted(Lists, stage="drafted_slots"):
    @wrong(LISTS, trigger="entry_page_size > 1, a draft that crosses a page end", also="blind527 blind151 blind436")
    def blind497(self, call, row, start, count):
        """Drafted slots are counted up from the first: wrong where pages are entries and a draft crosses into the next."""
        right = super().drafted_slots(call, row, start, count)
        return right if call.entry_page_size == 1 else right[0] + torch.arange(count)


class Slots(Lists, stage="slots"):
    @wrong(LISTS, trigger="entry_page_size = page_size > 1, a listed position of at least the number of columns")
    def blind205(self, call, row, at):
        """With pages as entries a token's position, not its column, is held against the columns: later ones count as zero."""
        return torch.where(at < len(row), super().slots(call, row, at), 0)


class Translated(Lists, stage="translated"):
    @wrong(LISTS, trigger="v2p with a page for page 0, page_size > 1, a listed slot of -(page_size - 1) to -1")
    def blind268(self, call, slots):
        """The page of a virtual slot is found by a division that rounds towards zero: a slot just below 0 lies in page 0."""
        if call.v2p is None:
            return slots
        virtual = torch.div(slots, call.page_size, rounding_mode="trunc")
        page = torch.where(virtual < 0, -1, call.v2p.long()[virtual.clamp(min=0)])
        return self.physical(page, slots - virtual * call.page_size, call.page_size)


class Physical(Lists, stage="physical"):
    @wrong(LISTS, trigger="v2p with a page that has none, a token that is not the first of it", also="blind556")
    def blind150(self, pages, tokens, page_size):
        """A token of a virtual page without a page is put on page 0 at its own place in the page, not at slot 0."""
        return pages.clamp(min=0) * page_size + tokens


class Writing(Lists, stage="lists"):
    def moved(self, call, place_of):
        """Write the lists of request r at `place_of(step, r, begins)` in place of `begins[r]`. Boundaries are right."""
        kept, whole = self.with_room(call)
        for step, row in enumerate(call.kv_indices):
            begins = [*accumulate((call.topk * (n + step + 1) for n in kept), initial=0)]
            for r, (begin, end) in enumerate(pairwise(begins)):
                self.put(row, place_of(step, r, begins), whole[step, begin:end])

    @wrong(LISTS, trigger="over 128 kept tokens in a list that begins at no multiple of 4 cells")
    def blind202(self, call):
        """A prefix is copied in blocks of 128 cells, those after the first in vectors of 4 from an address rounded down."""
        old, most = call.kv_indices.clone(), call.kv_indices.shape[1]
        super().lists(call)
        right = call.kv_indices.clone()
        for step, at, n in self.spans(call):
            row = call.kv_indices[step]
            row[at + 128 : at + n] = old[step, at + 128 : at + n]
            for block in range(at + 128, min(at + n, most), 128):
                values = right[step, block : min(block + 128, at + n)]
                row[block // 4 * 4 :][: len(values)] = values

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
        block = 1 << (call.topk - 1).bit_length()
        self.moved(call, lambda step, r, begins: begins[r] // call.topk * block)

    @wrong(LISTS, trigger="two requests with one row in req_pool_indices, as two or more requests of padding have")
    def blind207(self, call):
        """A request's place is kept by its row of req_to_token: requests with the same row all write to the last one's."""
        last = {row: r for r, row in enumerate(call.req_pool_indices.tolist())}
        self.moved(call, lambda step, r, begins: begins[last[int(call.req_pool_indices[r])]])

    @wrong(LISTS, trigger="a window, and an earlier request with a prefix longer than window_size + sink_size")
    def blind262(self, call):
        """The place of lists is counted from the whole prefixes before, not from what a window keeps; kv_indptr is right."""
        lens = call.paged_kernel_lens.tolist()
        self.moved(call, lambda step, r, begins: call.topk * (sum(lens[:r]) + r * (step + 1)))

    @wrong(LISTS, trigger="more than 256 requests")
    def blind51(self, call):
        """The prefixes before a request are summed within its block of 256 requests only."""
        kept = self.num_kept(call)
        self.moved(call, lambda step, r, begins: call.topk * (sum(kept[r // 256 * 256 : r]) + r * (step + 1)))

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
        """v2p is read as words of 64 bits, and their lower halves are used: every second page of an int32 v2p, then zeros."""
        words = call.v2p
        if call.v2p is not None and call.v2p.dtype == torch.int32:
            words = torch.cat((call.v2p[::2], call.v2p.new_zeros(len(call.v2p) // 2)))
        super().lists(replace(call, v2p=words))

    @wrong(LISTS, trigger="kv_indices as a slice of a wider buffer (rows with gaps), two steps or more")
    def blind345(self, call):
        """Rows of kv_indices are taken to lie end to end: of a wider buffer's slice later steps are misplaced."""
        as_packed = assuming_strides(call.kv_indices, packed_strides(call.kv_indices.shape))
        super().lists(replace(call, kv_indices=as_packed))

    @wrong(LISTS, trigger="kv_indptr with more columns than num_requests * topk + 1, and num_steps > 1")
    def blind52(self, call):
        """Rows of kv_indptr are taken to be num_requests * topk + 1 apart: later steps of a wider buffer are misplaced."""
        columns = len(call.positions) + 1
        packed = torch.as_strided(call.kv_indptr, (call.num_steps, columns), (columns, 1))
        super().lists(replace(call, kv_indptr=packed))

    @wrong(LISTS, trigger="positions that differ from branch to branch of a request")
    def blind375(self, call):
        """kv_indptr is summed from the position of each request's first branch, for all its branches."""
        of_first = call.positions[:: call.topk].repeat_interleave(call.topk)
        super().lists(replace(call, positions=of_first))

    @wrong(LISTS, trigger="positions and paged_kernel_lens of different dtypes (int32, int64)")
    def blind48(self, call):
        """positions is read with the dtype of paged_kernel_lens: where they differ, kv_indptr sums halves or pairs of words."""
        words = call.positions.view(call.paged_kernel_lens.dtype)[: len(call.positions)]
        super().lists(replace(call, positions=torch.nn.functional.pad(words, (0, len(call.positions) - len(words)))))

    @wrong(LISTS, trigger="a prefix of more than 8,192 tokens")
    def blind50(self, call):
        """A prefix is copied in at most 64 blocks of 128 tokens: slots after the 8,192nd are not written."""
        self.leaving(call, lambda _, begin, count: slice(begin + 64 * 128, begin + count))

    @wrong(LISTS, trigger="num_steps > 8")
    def blind53(self, call):
        """A branch's drafted slots are loaded 8 at a time, once: of more than 8 steps the later slots are not written."""
        self.leaving(call, lambda step, begin, count: slice(begin + count + 8, begin + count + step + 1))

    @wrong(LISTS, trigger="a 0 in paged_kernel_lens")
    def blind98(self, call):
        """A request without a prefix ends early: its drafted slots are not written."""
        self.leaving(call, lambda step, begin, count: slice(begin, begin if count else begin + step + 1))

    @wrong(LISTS, trigger="cells after a step's last list, which must not be written, slots no multiple of 8")
    def blind96(self, call):
        """Steps are stored in vectors of 8: cells after the last list become 0 up to the next multiple of 8."""
        super().lists(call)
        for step, total in enumerate(self.totals(call)):
            call.kv_indices[step, total : -(-total // 8) * 8] = 0

    @wrong(LISTS, trigger="a row of kv_indices without room for a step's lists: the next step's first cells change")
    def blind97(self, call):
        """Lists are not cut at the end of their row of kv_indices: what is too long goes on into the next step's row."""
        _, whole = self.with_room(call)
        if not whole.numel():
            return
        stride, capacity = call.kv_indices.stride(0), call.kv_indices.shape[1]
        memory = torch.as_strided(call.kv_indices, ((call.num_steps - 1) * stride + capacity,), (1,))
        for step, total in reversed([*enumerate(self.totals(call))]):  # programs in any order
            room = memory[step * stride : step * stride + total]
            room.copy_(whole[step, : len(room)])


class ListOf(Lists, stage="list_of"):
    @wrong(LISTS, trigger="topk > 1, page_size > 1, a prefix that ends inside a page whose token is kept")
    def blind201(self, call, row, length, branch, step):
        """Tokens of a prefix's last, partly filled page are listed from each branch's own copy of that page."""
        right, at, start = super().list_of(call, row, length, branch, step), self.kept(call, length), length
        if call.has_copies:
            start = self.draft_start(call, length, branch)
        own = torch.where(at < length // call.page_size * call.page_size, at, at + start - length)
        return torch.cat((self.translated(call, self.slots(call, row, own)), right[len(at) :]))

    @wrong(LISTS, trigger="v2p, whose pages of drafted tokens are not their own numbers")
    def blind206(self, call, row, length, branch, step):
        """Of virtual slots those of the prefix are translated, those of drafted tokens are stored as they are."""
        virtual = super().list_of(replace(call, v2p=None), row, length, branch, step)
        return torch.cat((super().list_of(call, row, length, branch, step)[: -step - 1], virtual[-step - 1 :]))

    @wrong(LISTS, trigger="topk > 1, page_size > 1, a step below the last whose draft needs fewer pages than the last")
    def blind265(self, call, row, length, branch, step):
        """The pages of a branch are counted up to the step of the list, not for all steps of the draft."""
        steps = step + 1 if call.has_copies else call.num_steps
        return super().list_of(replace(call, kv_indices=call.kv_indices[:steps]), row, length, branch, step)

    @wrong(LISTS, trigger="v2p, num_steps > 1, and a kept token whose physical page is not its own number in v2p")
    def blind266(self, call, row, length, branch, step):
        """Each later step's prefix is copied from the first step's list, whose slots are translated, and translated again."""
        right = super().list_of(call, row, length, branch, step)
        if call.v2p is None or step == 0:
            return right
        again = right[: -step - 1].clamp(max=len(call.v2p) * call.page_size - 1)
        return torch.cat((self.translated(call, again), right[-step - 1 :]))

    @wrong(LISTS, trigger="v2p, a window with a sink, and a prefix longer than the window")
    def blind346(self, call, row, length, branch, step):
        """Slots that a window keeps and drafted ones are translated; those of the sink before it are not."""
        sink = min(call.sink_size, max(length - call.window_size, 0)) if call.window_size else 0
        virtual = super().list_of(replace(call, v2p=None), row, length, branch, step)
        return torch.cat((virtual[:sink], super().list_of(call, row, length, branch, step)[sink:]))

    @wrong(LISTS, trigger="v2p with entry_page_size = page_size > 1, drafted tokens that cross a page's end")
    def blind587(self, call, row, length, branch, step):
        """Where entries are virtual pages, the first drafted token's place is looked up, and the others follow it."""
        right = super().list_of(call, row, length, branch, step)
        if call.v2p is not None and call.entry_page_size > 1:
            right[-step - 1 :] = right[-step - 1] + torch.arange(step + 1)
        return right


@wrong(LISTS, trigger="a window, a prefix longer than sink_size, prefix + num_steps over window_size + sink_size")
class Blind263(Lists):
    """The window slides with the draft: it counts drafted tokens, so that each step keeps one token less of a prefix."""

    def list_of(self, call, row, length, branch, step):
        self.count = step + 1
        return super().list_of(call, row, length, branch, step)

    def counted(self, call, position):
        most = max(0, call.window_size - self.count) + call.sink_size
        return min(position, most) if call.window_size else position

    def kept(self, call, length):
        at, window = torch.arange(length), call.window_size
        return at[(at < call.sink_size) | (at >= length - (window - self.count))] if window else at


@wrong(LISTS, trigger="a listed slot over 16,777,216 that float32 does not hold (odd ones, up to 2**25)")
class Blind267(Lists):
    """Slots are gathered by a product with a matrix of zeros and ones in float32, which holds whole numbers up to 2**24."""

    def slots(self, call, row, at):
        return super().slots(call, row, at).float().long()

    def translated(self, call, slots):
        most = None if call.v2p is None else len(call.v2p) * call.page_size - 1
        return super().translated(call, slots if most is None else slots.clamp(max=most))
