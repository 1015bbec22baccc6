"""Wrong kernels of the draft's K/V lists, written without a look at the checks: numbers 48 to 204."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import Lists, WindowLists, lists_of, window_lists_of


@wrong(lists_of, trigger="positions and paged_kernel_lens of different dtypes (int32, int64)")
class Blind48(Lists):
    """Positions is read with the dtype of paged_kernel_lens: where the two differ, kv_indptr is summed from halves or
    pairs of its words.
    """

    def positions_of(self, positions, paged_kernel_lens):
        words = positions.view(paged_kernel_lens.dtype).long()[: len(positions)]
        return torch.nn.functional.pad(words, (0, len(positions) - len(words)))


@wrong(
    lists_of,
    trigger=(
        "topk > 1 and page_size > 1 where ceil((len % page_size + num_steps) / page_size) > ceil(num_steps / page_size)"
    ),
)
class Blind49(Lists):
    """A branch's pages are counted from num_steps alone: where the prefix's last page and the draft together fill one
    page more, branches overlap.
    """

    def pages_per_branch(self, in_last_page, num_steps, page_size):
        return -(-num_steps // page_size)


@wrong(lists_of, trigger="a prefix of more than 8,192 tokens")
class Blind50(Lists):
    """A prefix is copied in at most 64 blocks of 128 tokens: slots after the 8,192nd are not written."""

    def prefix(self, length):
        return min(length, 64 * 128)


@wrong(lists_of, trigger="more than 256 requests")
class Blind51(Lists):
    """The prefixes before a request are summed within its block of 256 requests only."""

    def before(self, lens):
        return torch.cat([block.cumsum(0) - block for block in lens.split(256)])


@wrong(lists_of, trigger="kv_indptr with more columns than num_requests * topk + 1, and num_steps > 1")
class Blind52(Lists):
    """Kv_indptr's rows are taken to be num_requests * topk + 1 apart: a wider buffer gets the later steps at the wrong
    places.
    """

    def boundaries(self, kv_indptr, positions, num_steps):
        packed = torch.as_strided(kv_indptr, (num_steps, len(positions) + 1), (len(positions) + 1, 1))
        super().boundaries(packed, positions, num_steps)


@wrong(lists_of, trigger="num_steps > 8")
class Blind53(Lists):
    """A branch's drafted slots are loaded 8 at a time, once: of more than 8 steps the later slots are not written."""

    def drafted(self, count):
        return min(count, 8)


@wrong(
    lists_of,
    trigger=(
        "cells of kv_indices after a step's last list (there is room in the row, and the slots are no multiple of "
        "8): they must not be written"
    ),
)
class Blind96(Lists):
    """Each step's row is stored in vectors of 8: the cells after its last list are overwritten with 0 up to the next
    multiple of 8.
    """

    def __call__(self, call):
        super().__call__(call)
        for step in range(len(call.kv_indices)):
            total = call.topk * (int(call.paged_kernel_lens.sum()) + len(call.paged_kernel_lens) * (step + 1))
            call.kv_indices[step, total : -(-total // 8) * 8] = 0


@wrong(
    lists_of,
    trigger=(
        "a row of kv_indices with less room than a step's lists (not the last step's): the next step's first cells"
        " are overwritten"
    ),
)
class Blind97(Lists):
    """Lists are not cut at the end of their row of kv_indices: what is too long goes on into the next step's row."""

    def __call__(self, call):
        num_steps, n = len(call.kv_indices), len(call.paged_kernel_lens)
        totals = [call.topk * (int(call.paged_kernel_lens.sum()) + n * (step + 1)) for step in range(num_steps)]
        whole = call.kv_indices.new_zeros(num_steps, max(totals, default=0))
        super().__call__(replace(call, kv_indices=whole))
        if n == 0 or num_steps == 0:
            return
        stride, capacity = call.kv_indices.stride(0), call.kv_indices.shape[1]
        memory = torch.as_strided(call.kv_indices, ((num_steps - 1) * stride + capacity,), (1,))
        for step in reversed(range(num_steps)):  # programs in any order
            room = memory[step * stride : step * stride + totals[step]]
            room.copy_(whole[step, : len(room)])


@wrong(lists_of, trigger="a 0 in paged_kernel_lens")
class Blind98(Lists):
    """A request without a prefix ends early: its drafted slots are not written."""

    def prefix(self, length):
        self.empty = length == 0
        return length

    def drafted(self, count):
        return 0 if self.empty else count


@wrong(window_lists_of, trigger="a sink, and a prefix shorter than sink and window together")
class Blind149(WindowLists):
    """The sink and the window of a prefix are copied one after the other, so that tokens of both are in the list
    twice.
    """

    def kept(self, length, window, sink):
        if not window:
            return super().kept(length, window, sink)
        return torch.cat((torch.arange(min(length, sink)), torch.arange(max(0, length - window), length)))


@wrong(window_lists_of, trigger="v2p with a page that has none, a token that is not the first of it")
class Blind150(WindowLists):
    """A token of a virtual page without a page is put on page 0 at its own place in the page, not at slot 0."""

    def physical(self, slots, v2p, page_size):
        page = v2p[(slots // page_size).clamp(min=0)]
        return page.clamp(min=0) * page_size + slots % page_size


@wrong(window_lists_of, trigger="entry_page_size = page_size, drafted tokens that cross the end of a page")
class Blind151(WindowLists):
    """Where entries are pages, the drafted slots of a branch follow its first one, also beyond the end of its page."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        first = super().drafted_slots(entries, start, 1, entry_page_size)
        if entry_page_size == 1:
            return super().drafted_slots(entries, start, count, entry_page_size)
        return first + torch.arange(count)


@wrong(window_lists_of, trigger="a window shorter than a prefix (with its sink)")
class Blind152(WindowLists):
    """A branch's drafted slots are looked for after as many tokens as the list keeps of the prefix."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        length = self.counted(length, window, sink)
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)


@wrong(window_lists_of, trigger="a sink, and a prefix longer than the window")
class Blind153(WindowLists):
    """Kv_indptr bounds the positions by the window and leaves the sink out."""

    def counted(self, position, window, sink):
        return super().counted(position, window, 0)


@wrong(
    window_lists_of,
    trigger=(
        "topk > 1, page_size > 1, a prefix that does not end where a page ends (and the list keeps a token of that"
        " page)"
    ),
)
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


@wrong(
    window_lists_of,
    trigger=("over 128 tokens kept of a prefix, in a list that does not begin at a multiple of 4 cells of its row"),
)
class Blind202(WindowLists):
    """A prefix is copied in blocks of 128 cells, of which those after the first are stored in vectors of 4 from an
    address that is rounded down.
    """

    def __call__(self, call):
        old, most = call.kv_indices.clone(), call.kv_indices.shape[1]
        super().__call__(call)
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


@wrong(window_lists_of, trigger="int64 positions (whatever the other dtypes), and one above window_size + sink_size")
class Blind203(WindowLists):
    """A window bounds the positions in place, in the caller's tensor where .to(torch.int64) copies nothing."""

    def __call__(self, call):
        bounds = call.positions.to(torch.int64)
        if call.window_size:
            bounds.clamp_(max=call.window_size + call.sink_size)
        super().__call__(replace(call, positions=bounds))


@wrong(window_lists_of, trigger="topk no power of two (3, 5, 6, 7), 2 requests or more")
class Blind204(WindowLists):
    """The lists before a request are counted with topk rounded up to a power of two, as the kernel's block of branches
    is.
    """

    def __call__(self, call):
        kept, whole = self.with_room(call)
        num_steps, capacity = call.kv_indices.shape
        super().__call__(replace(call, kv_indices=whole))
        block = 1 << (call.topk - 1).bit_length()
        for step in range(num_steps):
            before = 0
            for n in kept:
                values = whole[step, before * call.topk : (before + n + step + 1) * call.topk]
                room = call.kv_indices[step, before * block : min(capacity, before * block + len(values))]
                room.copy_(values[: len(room)])
                before += n + step + 1
