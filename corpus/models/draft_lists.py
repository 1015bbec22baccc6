"""The ragged K/V lists of a multi-step draft, on the host."""

from itertools import accumulate

import torch
from torch import Tensor

from corpus.wrong import LISTS, Model
from lab.references.draft_decode_kv_indices import draft_start, kept_positions


class DraftListsModel(Model, interface=(LISTS,)):
    """`lab.kernels.generate_draft_decode_kv_indices` on the host: right, and in stages of which a wrong kernel replaces one."""

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
        """Arguments and results are the kernel's; the schedule changes nothing."""
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
        """Prefix slots of each request's lists."""
        return paged_kernel_lens.tolist()

    def rows(self, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
        """[num_requests, row_width]."""
        return req_to_token[req_pool_indices.to(torch.int64)]

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        """(request, branch) of each list."""
        return [(request, branch) for request in range(num_requests) for branch in range(topk)]

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        """Column of a branch's first draft slot."""
        return draft_start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)

    def kept(self, length: int, window_size: int, sink_size: int) -> list[int]:
        """Columns of a prefix that a list keeps."""
        return kept_positions(length, window_size, sink_size)

    def counted(self, position: int, window_size: int, sink_size: int) -> int:
        """Return how many tokens of a prefix the boundaries count."""
        return min(position, window_size + sink_size) if window_size else position

    def slots_of_pages(self, rows: Tensor, entry_page_size: int) -> Tensor:
        """[num_requests, row_width * entry_page_size] int64, by position."""
        tokens = torch.arange(entry_page_size, device=rows.device)
        return (rows[:, :, None] * entry_page_size + tokens).flatten(1)

    def translated(self, slots: Tensor, page_size: int, v2p: Tensor | None) -> Tensor:
        """Return the slots of virtual ones, of their shape."""
        if v2p is None:
            return slots
        pages = torch.where(slots < 0, -1, v2p.to(torch.int64)[slots.clamp(min=0) // page_size])
        return self.physical(pages, slots % page_size, page_size)

    def physical(self, pages: Tensor, tokens: Tensor, page_size: int) -> Tensor:
        """Return the slots of tokens in pages; slot 0 where a page is below 0."""
        return torch.where(pages < 0, 0, pages * page_size + tokens)

    def drafted(self, step: int) -> int:
        """Draft slots of a list."""
        return step + 1

    def slots(self, row: Tensor, columns: list[int]) -> Tensor:
        """[len(columns)]; slot 0 for a column that the row does not have."""
        index = torch.tensor(columns, dtype=torch.int64, device=row.device)
        inside = (index >= 0) & (index < len(row))
        return torch.where(inside, row[torch.where(inside, index, 0)], 0)

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        """Write a step's lists, cut at the end of its row."""
        slots = slots[: kv_indices.shape[1]]
        kv_indices[step, : len(slots)] = slots.to(kv_indices.dtype)

    def boundaries(self, positions: list[int], lens: list[int], topk: int, step: int) -> list[int]:
        """Return the end of each list."""
        return list(accumulate(position + step + 1 for position in positions))

    def write_boundaries(self, kv_indptr: Tensor, boundaries: list[int]) -> None:
        """Column 0 stays as it is."""
        kv_indptr[1 : len(boundaries) + 1] = torch.tensor(boundaries, dtype=kv_indptr.dtype, device=kv_indptr.device)
