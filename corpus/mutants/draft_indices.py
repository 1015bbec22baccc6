"""Mutants of the ragged K/V lists of a multi-step draft."""

from itertools import accumulate

import torch
from torch import Tensor

from corpus.mutants.mutant import DRAFT_INDICES, Defective, Memory
from lab.references.draft_decode_kv_indices import draft_start, kept_positions


class DraftListsModel(Defective, is_model=True, interface=(DRAFT_INDICES,)):
    """`lab.kernels.generate_draft_decode_kv_indices` on the host: right, and in stages of which a mutant replaces one."""

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


class BranchPagesIgnored(DraftListsModel):
    """Branches follow each other without regard to pages."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        return length + branch * num_steps


class BranchPagesRoundedDown(DraftListsModel):
    """A branch's pages have no room for the copy of the prefix's last page."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        if page_size == 1 or topk == 1:
            return super().start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)
        return length + branch * -(-num_steps // page_size) * page_size


class BranchesShareSlots(DraftListsModel):
    """All branches read the first one's draft slots."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        return super().start(length, 0, num_steps=num_steps, topk=topk, page_size=page_size)


class LastStepMissing(DraftListsModel):
    """The lists of the last step are not written."""

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        if step == 0 or step + 1 < kv_indices.shape[0]:
            super().write(kv_indices, step, slots)


class OwnTokenMissing(DraftListsModel, drafted=lambda _, step: step):
    """A step reads the tokens drafted before it, and not its own."""


class BranchMajorOrder(DraftListsModel):
    """All requests' first branches come first, then all second ones."""

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        return [(request, branch) for branch in range(topk) for request in range(num_requests)]


class IndptrOffByOne(DraftListsModel):
    """Boundaries do not count a step's own token."""

    def boundaries(self, positions: list[int], lens: list[int], topk: int, step: int) -> list[int]:
        return super().boundaries(positions, lens, topk, step - 1)


class IndptrFromLens(DraftListsModel):
    """Boundaries are summed from paged_kernel_lens, not from positions."""

    def boundaries(self, positions: list[int], lens: list[int], topk: int, step: int) -> list[int]:
        return super().boundaries([length for length in lens for _ in range(topk)], lens, topk, step)


class IndptrStartWritten(DraftListsModel):
    """Column 0 of kv_indptr is written."""

    def write_boundaries(self, kv_indptr: Tensor, boundaries: list[int]) -> None:
        kv_indptr[0] = -1
        super().write_boundaries(kv_indptr, boundaries)


class LateBranchesUncounted(DraftListsModel):
    """Boundaries after the 512th are summed from it on anew."""

    summed = 512

    def boundaries(self, positions: list[int], lens: list[int], topk: int, step: int) -> list[int]:
        first, others = positions[: self.summed], positions[self.summed :]
        return super().boundaries(first, lens, topk, step) + super().boundaries(others, lens, topk, step)


class LateTokensMissing(DraftListsModel):
    """A prefix is copied up to its 128th slot; those after it are slot 0."""

    def slots(self, row: Tensor, columns: list[int]) -> Tensor:
        prefix = sum(1 for column, place in zip(columns, range(len(columns)), strict=True) if column == place)
        return super().slots(row, [-1 if 128 <= place < prefix else column for place, column in enumerate(columns)])


class WritesBehindLists(DraftListsModel):
    """One cell after a step's last list is written."""

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        super().write(kv_indices, step, torch.nn.functional.pad(slots, (0, 1)))


class CutIgnored(DraftListsModel):
    """A list that is too long for its row continues in the next step's."""

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        super().write(kv_indices, step, slots)
        spilled = slots[kv_indices.shape[1] :][: kv_indices.shape[1]]
        kv_indices[(step + 1) % kv_indices.shape[0], : len(spilled)] = spilled.to(kv_indices.dtype)


class SlotsWrapInt32(DraftListsModel, slots=lambda slots, *_: (slots.to(torch.int64) + 2**31) % 2**32 - 2**31):
    """Slots are copied in 32 bits."""


class LengthsOfNextRequest(DraftListsModel, lens=lambda _, paged_kernel_lens, *__: paged_kernel_lens.roll(1).tolist()):
    """A request has its neighbour's prefix length."""


class LengthsByPoolIndex(DraftListsModel):
    """Lengths are looked up by the request's row of the pool, not by its place in the batch."""

    def lens(self, paged_kernel_lens: Tensor, req_pool_indices: Tensor) -> list[int]:
        return paged_kernel_lens[req_pool_indices.to(torch.int64) % len(paged_kernel_lens)].tolist()


class PoolIndicesIgnored(DraftListsModel):
    """Request i reads row i of the pool."""

    def rows(self, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
        return req_to_token[torch.arange(len(req_pool_indices), device=req_to_token.device) % len(req_to_token)]


class RowStrideIgnored(DraftListsModel):
    """The pool's rows are taken to lie next to each other."""

    def rows(self, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
        return super().rows(req_to_token.as_strided(req_to_token.shape, (req_to_token.shape[1], 1)), req_pool_indices)


class BranchesBeyondFourShare(DraftListsModel):
    """Branches from the fifth on read the fourth's draft slots."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        return super().start(length, min(branch, 3), num_steps=num_steps, topk=topk, page_size=page_size)


class PagesOf128TakenAs64(DraftListsModel):
    """A branch's pages are counted as if they held 64 tokens at most."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        return super().start(length, branch, num_steps=num_steps, topk=topk, page_size=min(page_size, 64))


class StepsBeyondPageLost(DraftListsModel):
    """A branch is taken to draft a page of tokens at most."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        steps = min(num_steps, page_size) if page_size > 1 else num_steps
        return super().start(length, branch, num_steps=steps, topk=topk, page_size=page_size)


class PrefixBeyond2048Lost(DraftListsModel):
    """Columns from the 2,048th on give slot 0."""

    most = 2048

    def slots(self, row: Tensor, columns: list[int]) -> Tensor:
        index = torch.tensor(columns, dtype=torch.int64, device=row.device)
        return super().slots(row, columns).masked_fill(index >= self.most, 0)


class BoundariesBeyond1024Anew(LateBranchesUncounted, summed=1024):
    """The sum of the lists' lengths begins anew after the 1,024th."""


class BranchesBeyondEightMissing(DraftListsModel):
    """A request has no lists of its branches from the ninth on."""

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        return super().order(num_requests, min(topk, 8))


class NarrowTableReadAsWide(DraftListsModel):
    """An int32 req_to_token is read as int64 where req_pool_indices is int64."""

    def rows(self, req_to_token: Tensor, req_pool_indices: Tensor) -> Tensor:
        rows = super().rows(req_to_token, req_pool_indices)
        if req_to_token.dtype == torch.int64 or req_pool_indices.dtype == torch.int32:
            return rows
        pairs = torch.nn.functional.pad(rows.to(torch.int64), (0, rows.shape[1] % 2)).unflatten(1, (-1, 2))
        return torch.nn.functional.pad(pairs[..., 0] + (pairs[..., 1] << 32), (0, rows.shape[1] - pairs.shape[1]))


class RequestsBeyond1024Missing(DraftListsModel):
    """Requests from the 1,025th on have no lists."""

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        return super().order(min(num_requests, 1024), topk)


class LastOfFullWarpMissing(DraftListsModel):
    """The last of a multiple of 32 requests has no lists."""

    def order(self, num_requests: int, topk: int) -> list[tuple[int, int]]:
        return super().order(num_requests - (num_requests % 32 == 0), topk)


class PagesOf32TakenAs16(DraftListsModel):
    """A branch's pages of 32 tokens are counted as if they held 16."""

    def start(self, length: int, branch: int, *, num_steps: int, topk: int, page_size: int) -> int:
        page_size = 16 if page_size == 32 else page_size
        return super().start(length, branch, num_steps=num_steps, topk=topk, page_size=page_size)


class PrefixBeyond65535Lost(PrefixBeyond2048Lost, most=65536):
    """Columns from the 65,536th on give slot 0."""


class UnalignedListsShifted(DraftListsModel):
    """Lists in a buffer that does not begin at a multiple of 16 bytes begin a cell too late."""

    def write(self, kv_indices: Tensor, step: int, slots: Tensor) -> None:
        if kv_indices.data_ptr() % 16:
            slots = torch.nn.functional.pad(slots, (1, 0))
        super().write(kv_indices, step, slots)


class WindowAndSinkOverflow(
    DraftListsModel,
    counted=lambda counted, _, window_size, sink_size: counted - (2**32 if window_size + sink_size >= 2**31 else 0),
):
    """A window and its sink are added up in 32 bits: boundaries go down where both are 2**31 and more."""


class SinkLost(DraftListsModel, kept=lambda kept, length, window_size, _: kept[-window_size:] if window_size else kept):
    """A list keeps a prefix's window and not its sink."""


class WindowUncounted(DraftListsModel, counted=lambda _, position, *__: position):
    """Boundaries count whole prefixes, of which the lists keep a window."""


class WindowHoldsTheSink(DraftListsModel):
    """A window ends so many tokens later as the sink holds, so that a list keeps fewer than it counts."""

    def kept(self, length: int, window_size: int, sink_size: int) -> list[int]:
        return super().kept(length, max(window_size - sink_size, 1) if window_size else 0, sink_size)


class PagesTakenForSlots(DraftListsModel):
    """Entries that are pages are taken for the slots of their tokens."""

    def slots_of_pages(self, rows: Tensor, entry_page_size: int) -> Tensor:
        return rows.repeat_interleave(entry_page_size, 1)


class VirtualSlotsLeft(DraftListsModel, translated=lambda _, slots, *__: slots):
    """Virtual slots are not translated."""


class UnmappedPagesNegative(DraftListsModel):
    """A token whose virtual page has none gets a slot below 0."""

    def physical(self, pages: Tensor, tokens: Tensor, page_size: int) -> Tensor:
        return pages * page_size + tokens


class PhysicalSlotsWrapInt32(DraftListsModel):
    """The slot of a translated page is computed in 32 bits."""

    def physical(self, pages: Tensor, tokens: Tensor, page_size: int) -> Tensor:
        return (super().physical(pages, tokens, page_size) + 2**31) % 2**32 - 2**31


class BoundariesKept(Memory, DraftListsModel):
    """Boundaries are kept with the tensor that they are written to: other positions are not read."""

    def write_boundaries(self, kv_indptr: Tensor, boundaries: list[int]) -> None:
        self.held = getattr(self, "held", [])
        self.held.append(kv_indptr)  # its address is no other's
        super().write_boundaries(kv_indptr, self.first((kv_indptr.data_ptr(), len(boundaries)), lambda: boundaries))
