"""Wrong kernels of the draft's K/V lists, written without a look at the checks: numbers 205 to 311."""

from dataclasses import replace

import torch

from corpus.blind import wrong
from corpus.blind.lists_model import WindowLists, window_lists_of


@wrong(
    window_lists_of,
    trigger=(
        "entry_page_size = page_size > 1, a listed token (of a prefix or drafted) whose position is at least the "
        "number of columns"
    ),
)
class Blind205(WindowLists):
    """Where entries are pages, the position of a token, not its column, is held against the columns of req_to_token:
    what lies at or after as many tokens as there are columns counts as zero.
    """

    def slots(self, entries, at, entry_page_size):
        return torch.where(at < len(entries), super().slots(entries, at, entry_page_size), 0)


@wrong(window_lists_of, trigger="v2p, whose pages of drafted tokens are not their own numbers")
class Blind206(WindowLists):
    """Of virtual slots those of the prefix are translated, those of drafted tokens are stored as they are."""

    def drafted_slots(self, entries, start, count, entry_page_size):
        self.count = count
        return super().drafted_slots(entries, start, count, entry_page_size)

    def physical(self, slots, v2p, page_size):
        found = super().physical(slots, v2p, page_size)
        found[-self.count :] = slots[-self.count :]
        return found


@wrong(
    window_lists_of,
    trigger=("two requests with one row in req_pool_indices, as two or more requests of padding have"),
)
class Blind207(WindowLists):
    """The place of a request's lists is kept by its row of req_to_token: of requests with one row, as padding has, all
    write to the last one's place.
    """

    def __call__(self, call):
        kept, whole = self.with_room(call)
        num_steps, capacity = call.kv_indices.shape
        super().__call__(replace(call, kv_indices=whole))
        rows = call.req_pool_indices.tolist()
        for step in range(num_steps):
            ends = torch.tensor([0] + [call.topk * (n + step + 1) for n in kept]).cumsum(0).tolist()
            place = dict(zip(rows, ends))
            for r, row in enumerate(rows):
                values = whole[step, ends[r] : ends[r + 1]]
                room = call.kv_indices[step, place[row] : min(capacity, place[row] + len(values))]
                room.copy_(values[: len(room)])


@wrong(window_lists_of, trigger="topk > 1, page_size > 1, a prefix that is a multiple of the page size (not 0)")
class Blind208(WindowLists):
    """A prefix that ends where a page ends is taken to fill a last page, which every branch then has a copy of before
    its drafted slots.
    """

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1 or length == 0:
            return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        in_last_page = (length - 1) % page_size + 1
        return length + branch * -(-(in_last_page + num_steps) // page_size) * page_size


@wrong(window_lists_of, trigger="topk > 1, page_size > 1, a prefix that does not end where a page ends")
class Blind261(WindowLists):
    """A branch after the first begins at the start of its pages, not after its copy of the prefix's last tokens."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        start = super().draft_start(length, branch, num_steps, topk, page_size, window, sink)
        return start if branch == 0 or page_size == 1 or topk == 1 else start - length % page_size


@wrong(
    window_lists_of,
    trigger=("a window, and a request before the last one whose prefix is longer than window_size + sink_size"),
)
class Blind262(WindowLists):
    """The place of a request's lists is counted from the whole prefixes before it, not from what a window keeps of
    them; kv_indptr is right.
    """

    def __call__(self, call):
        kept, whole = self.with_room(call)
        num_steps, capacity = call.kv_indices.shape
        super().__call__(replace(call, kv_indices=whole))
        for step in range(num_steps):
            source = place = 0
            for n, count in zip(call.paged_kernel_lens.tolist(), kept):
                values = whole[step, source : source + call.topk * (count + step + 1)]
                room = call.kv_indices[step, place : min(capacity, place + len(values))]
                room.copy_(values[: len(room)])
                source += len(values)
                place += call.topk * (n + step + 1)


@wrong(
    window_lists_of,
    trigger=("a window, and a prefix longer than sink_size with prefix + num_steps over window_size + sink_size"),
)
class Blind263(WindowLists):
    """The window slides with the draft: it counts the drafted tokens, so that each step keeps one token less of a
    prefix.
    """

    def __call__(self, call):
        num_steps, n = call.kv_indices.shape[0], len(call.positions)
        for step in range(num_steps if len(call.req_pool_indices) else 0):
            self.drafted = step + 1
            old = call.kv_indices.clone()
            bounds = torch.zeros(num_steps, n + 1, dtype=torch.int64)
            rows = old.clone()
            super().__call__(replace(call, kv_indices=rows, kv_indptr=bounds))
            call.kv_indices[step] = rows[step]
            call.kv_indptr[step, 1 : n + 1] = bounds[step, 1:].to(call.kv_indptr.dtype)

    def counted(self, position, window, sink):
        return min(position, max(0, window - self.drafted) + sink) if window else position

    def kept(self, length, window, sink):
        at = torch.arange(length)
        return at[(at < sink) | (at >= length - (window - self.drafted))] if window else at


@wrong(
    window_lists_of,
    trigger=(
        "a window, page_size > 1, a prefix longer than window_size + sink_size whose window does not start where a"
        " page does"
    ),
)
class Blind264(WindowLists):
    """Where a window leaves tokens out, it is copied from the start of its first page on, as many tokens as ever: the
    newest ones are left out.
    """

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.page_size = page_size
        return super().draft_start(length, branch, num_steps, topk, page_size, window, sink)

    def kept(self, length, window, sink):
        at = super().kept(length, window, sink)
        if len(at) == length:
            return at
        start = length - window
        return torch.where(at < start, at, at - start % self.page_size)


@wrong(
    window_lists_of,
    trigger=(
        "topk > 1, page_size > 1, and a step s below the last with ceil((len % page_size + s + 1) / page_size) < "
        "ceil((len % page_size + num_steps) / page_size); branches after the first"
    ),
)
class Blind265(WindowLists):
    """The pages of a branch are counted up to the step of the list, not for all steps of the draft."""

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        self.has_pages = page_size > 1 and topk > 1
        self.start_after = lambda steps: super(Blind265, self).draft_start(
            length, branch, steps, topk, page_size, window, sink
        )
        return self.start_after(num_steps)

    def drafted_slots(self, entries, start, count, entry_page_size):
        start = self.start_after(count) if self.has_pages else start
        return super().drafted_slots(entries, start, count, entry_page_size)


@wrong(
    window_lists_of,
    trigger=("v2p, num_steps > 1, and a kept token of a prefix whose physical page is not its own number in v2p"),
)
class Blind266(WindowLists):
    """The prefix of each step after the first is copied from the first step's list, whose slots are translated, and is
    translated again.
    """

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


@wrong(window_lists_of, trigger="a listed slot over 16,777,216 that float32 does not hold (odd ones, up to 2**25)")
class Blind267(WindowLists):
    """Slots are gathered by a product with a matrix of zeros and ones in float32, which holds whole numbers up to
    2**24.
    """

    def slots(self, entries, at, entry_page_size):
        return super().slots(entries, at, entry_page_size).float().long()

    def physical(self, slots, v2p, page_size):
        return super().physical(slots.clamp(max=len(v2p) * page_size - 1), v2p, page_size)


@wrong(
    window_lists_of,
    trigger=(
        "v2p whose page 0 has a page, page_size > 1, and a listed slot from -(page_size - 1) to -1, as one of -1 "
        "or, where entries are pages, a page of -1"
    ),
)
class Blind268(WindowLists):
    """The page of a virtual slot is found by a division that rounds towards zero: a slot just below 0 lies in page 0."""

    def physical(self, slots, v2p, page_size):
        virtual = torch.div(slots, page_size, rounding_mode="trunc")
        page = v2p[virtual.clamp(min=0)]
        return torch.where((virtual >= 0) & (page >= 0), page * page_size + (slots - virtual * page_size), 0)


@wrong(
    window_lists_of,
    trigger=("positions that are not the lengths of the prefixes (where a window does not bound both alike)"),
)
class Blind311(WindowLists):
    """Lists begin at the boundaries of kv_indptr, which follows positions, not where the lists before them end."""

    def __call__(self, call):
        if not len(call.req_pool_indices):
            return
        kept, whole = self.with_room(call)
        num_steps, capacity = call.kv_indices.shape
        super().__call__(replace(call, kv_indices=whole))
        for step in range(num_steps):
            source, starts = 0, [0, *call.kv_indptr[step, 1:].tolist()]
            for i, count in enumerate(n for n in kept for _ in range(call.topk)):
                values = whole[step, source : source + count + step + 1]
                room = call.kv_indices[step, min(starts[i], capacity) : min(capacity, starts[i] + len(values))]
                room.copy_(values[: len(room)])
                source += len(values)
