"""A right model of the draft's K/V lists. A wrong kernel replaces one stage."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from corpus.wrong import LISTS, Model


@dataclass(frozen=True, eq=False)
class ListsCall:
    """The arguments of `generate_draft_decode_kv_indices`."""

    req_pool_indices: Tensor
    req_to_token: Tensor
    paged_kernel_lens: Tensor
    kv_indices: Tensor
    kv_indptr: Tensor
    positions: Tensor
    topk: int
    page_size: int
    window_size: int = 0
    sink_size: int = 0
    entry_page_size: int = 1
    v2p: Tensor | None = None

    @property
    def num_steps(self) -> int:
        return len(self.kv_indices)

    @property
    def has_copies(self) -> bool:
        """Return True if each branch has its own pages, whose first page repeats the prefix's last page."""
        return self.page_size > 1 and self.topk > 1


class Lists(Model, interface=(LISTS,)):
    """A right `generate_draft_decode_kv_indices` on the host, which writes the lists of one step after another."""

    def generate_draft_decode_kv_indices(self, *tensors, schedule=None, **named):
        self.lists(ListsCall(*tensors, **named))

    def lists(self, call):
        lens = self.lens(call.paged_kernel_lens, call.req_pool_indices)
        rows = self.rows(call.req_to_token, call.req_pool_indices)
        for step in range(call.num_steps):
            lists = [
                self.list_of(call, rows[request], lens[request], branch, step)
                for request, branch in self.order(len(lens), call.topk)
            ]
            self.write(call.kv_indices, step, torch.cat([rows.new_empty(0), *lists]))
            counted = [self.counted(call, position) for position in call.positions.tolist()]
            self.write_boundaries(call.kv_indptr[step], self.boundaries(counted, lens, call.topk, step))

    def lens(self, paged_kernel_lens, req_pool_indices):
        """Return the number of tokens in each request's prefix."""
        return paged_kernel_lens.tolist()

    def rows(self, req_to_token, req_pool_indices):
        """Return each request's row of the table, [num_requests, row_width]."""
        return req_to_token[req_pool_indices.long()]

    def order(self, num_requests, topk):
        return [(request, branch) for request in range(num_requests) for branch in range(topk)]

    def list_of(self, call, row, length, branch, step):
        """Return the slots of a branch's list: those of the prefix that it keeps, and then those of its drafted tokens."""
        kept = self.slots(call, row, self.kept(call, length))
        drafted = self.drafted_slots(call, row, self.draft_start(call, length, branch), self.drafted(step))
        return self.translated(call, torch.cat((kept, drafted)))

    def kept(self, call, length):
        """Return the positions of the prefix's tokens that a list keeps."""
        at = torch.arange(length)
        return at[(at < call.sink_size) | (at >= length - call.window_size)] if call.window_size else at

    def counted(self, call, position):
        """Return how many tokens of a prefix the boundaries count."""
        return min(position, call.window_size + call.sink_size) if call.window_size else position

    def draft_start(self, call, length, branch):
        """Return the position of a branch's first drafted token."""
        if not call.has_copies:
            return length + branch * call.num_steps
        return length + branch * self.pages_per_branch(call, length % call.page_size) * call.page_size

    def pages_per_branch(self, call, in_last_page):
        return -(-(in_last_page + call.num_steps) // call.page_size)

    def drafted(self, step):
        """Return the number of drafted tokens in a list of a step."""
        return step + 1

    def drafted_slots(self, call, row, start, count):
        return self.slots(call, row, start + torch.arange(count))

    def slots(self, call, row, at):
        """Return the slots, before translation, at positions of a request; 0 after its row's last column."""
        column = at // call.entry_page_size
        entry = torch.where(column < len(row), row[column.clamp(max=len(row) - 1)].long(), 0)
        return entry * call.entry_page_size + at % call.entry_page_size

    def translated(self, call, slots):
        """Return the physical slots of virtual slots."""
        if call.v2p is None:
            return slots
        pages = torch.where(slots < 0, -1, call.v2p.long()[slots.clamp(min=0) // call.page_size])
        return self.physical(pages, slots % call.page_size, call.page_size)

    def physical(self, pages, tokens, page_size):
        """Return the slots of tokens in pages; slot 0 if the page is below 0."""
        return torch.where(pages < 0, 0, pages * page_size + tokens)

    def write(self, kv_indices, step, slots):
        slots = slots[: kv_indices.shape[1]]
        kv_indices[step, : len(slots)] = slots.to(kv_indices.dtype)

    def boundaries(self, positions, lens, topk, step):
        return list(accumulate(position + step + 1 for position in positions))

    def write_boundaries(self, kv_indptr, boundaries):
        """Write a step's boundaries. Column 0 is not written."""
        kv_indptr[1 : len(boundaries) + 1] = torch.tensor(boundaries, dtype=kv_indptr.dtype, device=kv_indptr.device)

    def num_kept(self, call):
        """Return how many tokens of each request's prefix a list keeps."""
        return [len(self.kept(call, length)) for length in call.paged_kernel_lens.tolist()]

    def totals(self, call):
        """Return the number of cells of each step's lists."""
        kept = self.num_kept(call)
        return [call.topk * (sum(kept) + len(kept) * (step + 1)) for step in range(call.num_steps)]

    def with_room(self, call):
        """Return how many tokens of each request are kept, and the right lists in a `kv_indices` with room for all."""
        whole = call.kv_indices.new_zeros(call.num_steps, max(self.totals(call), default=0))
        Lists.lists(self, replace(call, kv_indices=whole))
        return self.num_kept(call), whole

    def put(self, row, at, values):
        """Write values into a row, as far as it has room."""
        room = row[at : at + len(values)]
        room.copy_(values[: len(room)])

    def spans(self, call):
        """Yield each list in the order of `kv_indices`: (step, index of its first cell, number of kept tokens)."""
        kept = [count for count in self.num_kept(call) for _ in range(call.topk)]
        for step in range(call.num_steps):
            ends = accumulate((count + step + 1 for count in kept), initial=0)
            yield from ((step, begin, count) for begin, count in zip(ends, kept))

    def leaving(self, call, cells_of):
        """Write the lists without the cells `cells_of(step, first cell of the list, number of kept tokens)` of each list."""
        old = call.kv_indices.clone()
        Lists.lists(self, call)
        for step, begin, count in self.spans(call):
            cells = cells_of(step, begin, count)
            call.kv_indices[step, cells] = old[step, cells]
