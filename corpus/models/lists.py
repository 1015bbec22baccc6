"""Right models of the draft's K/V lists. A wrong kernel replaces one stage."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from corpus.wrong import LISTS, Model
from lab.references.draft_decode_kv_indices import draft_start, kept_positions


@dataclass(frozen=True, eq=False)
class ListsCall:
    """The arguments of `generate_draft_decode_kv_indices`. A call without a window has the last four at their defaults."""

    req_pool_indices: torch.Tensor
    req_to_token: torch.Tensor
    paged_kernel_lens: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor
    positions: torch.Tensor
    topk: int
    page_size: int
    window_size: int = 0
    sink_size: int = 0
    entry_page_size: int = 1
    v2p: torch.Tensor | None = None


class Lists(Model):
    """A right `generate_draft_decode_kv_indices` without windows, which writes one list at a time."""

    def generate_draft_decode_kv_indices(
        self,
        req_pool_indices,
        req_to_token,
        paged_kernel_lens,
        kv_indices,
        kv_indptr,
        positions,
        *,
        topk,
        page_size,
        schedule=None,
    ):
        tensors = req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions
        self.lists(ListsCall(*tensors, topk=topk, page_size=page_size))

    def lists(self, call):
        num_steps, n = call.kv_indices.shape[0], call.req_pool_indices.shape[0]
        if n == 0 or num_steps == 0:
            return
        lens = call.paged_kernel_lens.long()
        before = self.before(lens)
        self.boundaries(call.kv_indptr, self.positions_of(call.positions, call.paged_kernel_lens), num_steps)
        width, capacity = call.req_to_token.shape[1], call.kv_indices.shape[1]
        for r, (row, length) in enumerate(zip(call.req_pool_indices.tolist(), lens.tolist())):
            slots = call.req_to_token[row]
            prefix = torch.arange(self.prefix(length))
            for branch in range(call.topk):
                start = self.draft_start(length, branch, num_steps, call.topk, call.page_size)
                for step in range(num_steps):
                    at = int(before[r]) * call.topk + r * (step + 1) * call.topk + branch * (length + step + 1)
                    drafted = torch.arange(self.drafted(step + 1))
                    source = torch.cat((prefix, start + drafted))
                    target = torch.cat((prefix, length + drafted)) + at
                    value = torch.where(source < width, slots[source.clamp(max=width - 1)], 0)
                    inside = target < capacity
                    call.kv_indices[step, target[inside]] = value[inside].to(call.kv_indices.dtype)

    def before(self, lens):
        return lens.cumsum(0) - lens

    def positions_of(self, positions, paged_kernel_lens):
        return positions.long()

    def boundaries(self, kv_indptr, positions, num_steps):
        for step in range(num_steps):
            kv_indptr[step, 1 : len(positions) + 1] = (positions + step + 1).cumsum(0).to(kv_indptr.dtype)

    def prefix(self, length):
        return length

    def drafted(self, count):
        return count

    def draft_start(self, length, branch, num_steps, topk, page_size):
        if page_size == 1 or topk == 1:
            return length + branch * num_steps
        return length + branch * self.pages_per_branch(length % page_size, num_steps, page_size) * page_size

    def pages_per_branch(self, in_last_page, num_steps, page_size):
        return -(-(in_last_page + num_steps) // page_size)


class WindowLists(Model):
    """A right `generate_draft_decode_kv_indices` with a window, pages as entries and virtual pages."""

    def generate_draft_decode_kv_indices(self, *tensors, schedule=None, **settings):
        self.lists(ListsCall(*tensors, **settings))

    def lists(self, call):
        requests = list(zip(call.req_pool_indices.tolist(), call.paged_kernel_lens.tolist()))
        num_steps, capacity = call.kv_indices.shape if requests else (0, 0)
        for step in range(num_steps):
            counts = [self.counted(n, call.window_size, call.sink_size) + step + 1 for n in call.positions.tolist()]
            call.kv_indptr[step, 1 : len(counts) + 1] = torch.tensor(counts).cumsum(0).to(call.kv_indptr.dtype)
            at = 0
            for row, length in requests:
                entries = call.req_to_token[row].long()
                for branch in range(call.topk):
                    start = self.draft_start(
                        length, branch, num_steps, call.topk, call.page_size, call.window_size, call.sink_size
                    )
                    prefix = self.slots(
                        entries, self.kept(length, call.window_size, call.sink_size), call.entry_page_size
                    )
                    drafted = self.drafted_slots(entries, start, step + 1, call.entry_page_size)
                    slots = torch.cat((prefix, drafted))
                    if call.v2p is not None:
                        slots = self.physical(slots, call.v2p.long(), call.page_size)
                    room = max(0, min(len(slots), capacity - at))
                    call.kv_indices[step, at : at + room] = slots[:room].to(call.kv_indices.dtype)
                    at += len(slots)

    def with_room(self, call):
        """Return how many tokens of each request are kept, and the right lists in a `kv_indices` with room for all."""
        kept = [len(self.kept(n, call.window_size, call.sink_size)) for n in call.paged_kernel_lens.tolist()]
        num_steps = len(call.kv_indices)
        whole = call.kv_indices.new_zeros(num_steps, call.topk * (sum(kept) + len(kept) * num_steps))
        WindowLists.lists(self, replace(call, kv_indices=whole))
        return kept, whole

    def put(self, row, at, values):
        """Write values into a row, as far as it has room."""
        room = row[at : at + len(values)]
        room.copy_(values[: len(room)])

    def counted(self, position, window, sink):
        return min(position, window + sink) if window else position

    def kept(self, length, window, sink):
        at = torch.arange(length)
        return at[(at < sink) | (at >= length - window)] if window else at

    def draft_start(self, length, branch, num_steps, topk, page_size, window, sink):
        if page_size == 1 or topk == 1:
            return length + branch * num_steps
        return length + branch * -(-(length % page_size + num_steps) // page_size) * page_size

    def slots(self, entries, at, entry_page_size):
        column = at // entry_page_size
        entry = torch.where(column < len(entries), entries[column.clamp(max=len(entries) - 1)], 0)
        return entry * entry_page_size + at % entry_page_size

    def drafted_slots(self, entries, start, count, entry_page_size):
        return self.slots(entries, start + torch.arange(count), entry_page_size)

    def physical(self, slots, v2p, page_size):
        page = v2p[(slots // page_size).clamp(min=0)]
        return torch.where((slots >= 0) & (page >= 0), page * page_size + slots % page_size, 0)


class DraftListsModel(Model, interface=(LISTS,)):
    """A right model of `lab.kernels.generate_draft_decode_kv_indices` on the host. A wrong kernel replaces one stage."""

    def generate_draft_decode_kv_indices(
        self,
        req_pool_indices: Tensor,
        req_to_token: Tensor,
        paged_kernel_lens: Tensor,
        kv_indices: Tensor,
        kv_indptr: Tensor,
        positions: Tensor,
        *,
        topk: int,
        page_size: int,
        window_size: int = 0,
        sink_size: int = 0,
        entry_page_size: int = 1,
        v2p: Tensor | None = None,
        schedule: object = None,
    ) -> None:
        """Write the lists. The arguments are the kernel's; the schedule is ignored."""
        num_steps = kv_indices.shape[0]
        lens = self.lens(paged_kernel_lens, req_pool_indices)
        starts = {
            (request, branch): self.start(lens[request], branch, num_steps=num_steps, topk=topk, page_size=page_size)
            for request, branch in self.order(len(lens), topk)
        }
        rows = self.rows(req_to_token, req_pool_indices)
        if entry_page_size > 1 or v2p is not None:  # beyond its columns a row counts as zeros
            needed = -(-(max(starts.values(), default=0) + num_steps) // entry_page_size)
            rows = torch.nn.functional.pad(rows.to(torch.int64), (0, max(0, needed - rows.shape[1])))
            rows = self.translated(self.slots_of_pages(rows, entry_page_size), page_size, v2p)
        counted = [self.counted(number, window_size, sink_size) for number in positions.tolist()]
        for step in range(num_steps):
            lists = [torch.empty(0, dtype=rows.dtype, device=rows.device)]
            for (request, _), start in starts.items():
                prefix = self.kept(lens[request], window_size, sink_size)
                lists.append(self.slots(rows[request], [*prefix, *range(start, start + self.drafted(step))]))
            self.write(kv_indices, step, torch.cat(lists))
            self.write_boundaries(kv_indptr[step], self.boundaries(counted, lens, topk, step))

    def lens(self, paged_kernel_lens: Tensor, req_pool_indices: Tensor) -> list[int]:
        """Return the number of prefix slots in each request's lists."""
        return paged_kernel_lens.tolist()

    def rows(self, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
        """Return each request's row of the table, [num_requests, row_width]."""
        return req_to_token[req_pool_indices.to(torch.int64)]

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        return [(request, branch) for request in range(num_requests) for branch in range(topk)]

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        return draft_start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)

    def kept(self, length: int, window_size: int, sink_size: int) -> list[int]:
        """Return the columns of a prefix that a list keeps."""
        return kept_positions(length, window_size, sink_size)

    def counted(self, position: int, window_size: int, sink_size: int) -> int:
        """Return how many tokens of a prefix the boundaries count."""
        return min(position, window_size + sink_size) if window_size else position

    def slots_of_pages(self, rows: Tensor, entry_page_size: int) -> Tensor:
        """Return the slots by position, int64 [num_requests, row_width * entry_page_size]."""
        tokens = torch.arange(entry_page_size, device=rows.device)
        return (rows[:, :, None] * entry_page_size + tokens).flatten(1)

    def translated(self, slots: Tensor, page_size: int, v2p: Tensor | None) -> Tensor:
        """Return the physical slots of virtual slots, in the same shape."""
        if v2p is None:
            return slots
        pages = torch.where(slots < 0, -1, v2p.to(torch.int64)[slots.clamp(min=0) // page_size])
        return self.physical(pages, slots % page_size, page_size)

    def physical(self, pages: Tensor, tokens: Tensor, page_size: int) -> Tensor:
        """Return the slots of tokens in pages; slot 0 if the page is below 0."""
        return torch.where(pages < 0, 0, pages * page_size + tokens)

    def drafted(self, step: int) -> int:
        """Return the number of draft slots in a list of a step."""
        return step + 1

    def slots(self, row: Tensor, columns: list[int]) -> Tensor:
        """Return the slots in columns of a row, [len(columns)]; slot 0 for a column that the row does not have."""
        index = torch.tensor(columns, dtype=torch.int64, device=row.device)
        inside = (index >= 0) & (index < len(row))
        return torch.where(inside, row[torch.where(inside, index, 0)], 0)

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        slots = slots[: kv_indices.shape[1]]
        kv_indices[step, : len(slots)] = slots.to(kv_indices.dtype)

    def boundaries(self, positions: list[int], lens: list[int], topk: int, step: int) -> list[int]:
        return list(accumulate(position + step + 1 for position in positions))

    def write_boundaries(self, kv_indptr: Tensor, boundaries: list[int]) -> None:
        """Write a step's boundaries. Column 0 is not written."""
        kv_indptr[1 : len(boundaries) + 1] = torch.tensor(boundaries, dtype=kv_indptr.dtype, device=kv_indptr.device)
