"""Mutants of the ragged K/V lists of a multi-step draft."""

from dataclasses import replace

import torch

from corpus.models.lists import Lists
from corpus.wrong import wrong


class DraftIndices(Lists):
    branch_pages_ignored = wrong(draft_start=lambda _, call, length, branch: length + branch * call.num_steps)(
        "Branches follow each other without regard to pages."
    )
    branch_pages_rounded_down = wrong(pages_per_branch=lambda _, call, __: -(-call.num_steps // call.page_size))(
        "A branch's pages have no room for the copy of the prefix's last page."
    )

    @wrong(stage="draft_start")
    def branches_share_slots(self, call, length, branch):
        """All branches read the first one's draft slots."""
        return super().draft_start(call, length, 0)

    @wrong(stage="write")
    def last_step_missing(self, kv_indices, step, slots):
        """The lists of the last step are not written."""
        if step == 0 or step + 1 < kv_indices.shape[0]:
            super().write(kv_indices, step, slots)

    own_token_missing = wrong(drafted=lambda _, step: step)(
        "A step reads the tokens drafted before it, and not its own."
    )
    branch_major_order = wrong(order=lambda pairs, *_: sorted(pairs, key=lambda pair: pair[1]))(
        "All requests' first branches come first, then all second ones."
    )

    @wrong(stage="boundaries")
    def indptr_off_by_one(self, positions, lens, topk, step):
        """Boundaries do not count a step's own token."""
        return super().boundaries(positions, lens, topk, step - 1)

    @wrong(stage="boundaries")
    def indptr_from_lens(self, positions, lens, topk, step):
        """Boundaries are summed from paged_kernel_lens, not from positions."""
        return super().boundaries([length for length in lens for _ in range(topk)], lens, topk, step)

    @wrong(stage="write_boundaries")
    def indptr_start_written(self, kv_indptr, boundaries):
        """Column 0 of kv_indptr is written."""
        kv_indptr[0] = -1
        super().write_boundaries(kv_indptr, boundaries)

    @wrong(stage="slots")
    def late_tokens_missing(self, call, row, at):
        """A prefix is copied up to its 128th slot; those after it are slot 0."""
        return super().slots(call, row, at).masked_fill((at == torch.arange(len(at))) & (at >= 128), 0)

    @wrong(stage="write")
    def writes_behind_lists(self, kv_indices, step, slots):
        """One cell after a step's last list is written."""
        super().write(kv_indices, step, torch.nn.functional.pad(slots, (0, 1)))

    @wrong(changes="write")
    def cut_ignored(self, _, kv_indices, step, slots):
        """A list that is too long for its row continues in the next step's."""
        spilled = slots[kv_indices.shape[1] :][: kv_indices.shape[1]]
        kv_indices[(step + 1) % kv_indices.shape[0], : len(spilled)] = spilled.to(kv_indices.dtype)

    slots_wrap_int32 = wrong(slots=lambda slots, *_: (slots + 2**31) % 2**32 - 2**31)("Slots are copied in 32 bits.")
    lengths_of_next_request = wrong(lens=lambda _, paged_kernel_lens, *__: paged_kernel_lens.roll(1).tolist())(
        "A request has its neighbour's prefix length."
    )
    lengths_by_pool_index = wrong(lens=lambda lens, _, rows: [lens[row % len(lens)] for row in rows.tolist()])(
        "Lengths are looked up by the request's row of the pool, not by its place in the batch."
    )
    pool_indices_ignored = wrong(
        rows=lambda _, table, rows: table[torch.arange(len(rows)).to(table.device) % len(table)]
    )("Request i reads row i of the pool.")

    @wrong(stage="rows")
    def row_stride_ignored(self, req_to_token, req_pool_indices):
        """The pool's rows are taken to lie next to each other."""
        return super().rows(req_to_token.as_strided(req_to_token.shape, (req_to_token.shape[1], 1)), req_pool_indices)

    @wrong(stage="draft_start")
    def branches_beyond_four_share(self, call, length, branch):
        """Branches from the fifth on read the fourth's draft slots."""
        return super().draft_start(call, length, min(branch, 3))

    @wrong(stage="draft_start")
    def pages_of128_taken_as64(self, call, length, branch):
        """A branch's pages are counted as if they held 64 tokens at most."""
        return super().draft_start(replace(call, page_size=min(call.page_size, 64)), length, branch)

    @wrong(stage="draft_start")
    def steps_beyond_page_lost(self, call, length, branch):
        """A branch is taken to draft a page of tokens at most."""
        steps = call.page_size if call.page_size > 1 else call.num_steps
        return super().draft_start(replace(call, kv_indices=call.kv_indices[:steps]), length, branch)

    @wrong(stage="order")
    def branches_beyond_eight_missing(self, num_requests, topk):
        """A request has no lists of its branches from the ninth on."""
        return super().order(num_requests, min(topk, 8))

    @wrong(changes="rows")
    def narrow_table_read_as_wide(self, rows, req_to_token, req_pool_indices):
        """An int32 req_to_token is read as int64 where req_pool_indices is int64."""
        if req_to_token.dtype == torch.int64 or req_pool_indices.dtype == torch.int32:
            return rows
        pairs = torch.nn.functional.pad(rows.to(torch.int64), (0, rows.shape[1] % 2)).unflatten(1, (-1, 2))
        return torch.nn.functional.pad(pairs[..., 0] + (pairs[..., 1] << 32), (0, rows.shape[1] - pairs.shape[1]))

    @wrong(stage="order")
    def requests_beyond1024_missing(self, num_requests, topk):
        """Requests from the 1,025th on have no lists."""
        return super().order(min(num_requests, 1024), topk)

    @wrong(stage="order")
    def last_of_full_warp_missing(self, num_requests, topk):
        """The last of a multiple of 32 requests has no lists."""
        return super().order(num_requests - (num_requests % 32 == 0), topk)

    @wrong(stage="draft_start")
    def pages_of32_taken_as16(self, call, length, branch):
        """A branch's pages of 32 tokens are counted as if they held 16."""
        page_size = 16 if call.page_size == 32 else call.page_size
        return super().draft_start(replace(call, page_size=page_size), length, branch)

    @wrong(stage="write")
    def unaligned_lists_shifted(self, kv_indices, step, slots):
        """Lists in a buffer that does not begin at a multiple of 16 bytes begin a cell too late."""
        if kv_indices.data_ptr() % 16:
            slots = torch.nn.functional.pad(slots, (1, 0))
        super().write(kv_indices, step, slots)

    window_and_sink_overflow = wrong(
        counted=lambda counted, call, _: counted - (2**32 if call.window_size + call.sink_size >= 2**31 else 0)
    )("A window and its sink are added up in 32 bits: boundaries go down where both are 2**31 and more.")
    sink_lost = wrong(kept=lambda kept, call, _: kept[-call.window_size :] if call.window_size else kept)(
        "A list keeps a prefix's window and not its sink."
    )
    window_uncounted = wrong(counted=lambda _, __, position: position)(
        "Boundaries count whole prefixes, of which the lists keep a window."
    )

    @wrong(stage="kept")
    def window_holds_the_sink(self, call, length):
        """A window ends so many tokens later as the sink holds, so that a list keeps fewer than it counts."""
        window = max(call.window_size - call.sink_size, 1) if call.window_size else 0
        return super().kept(replace(call, window_size=window), length)

    pages_taken_for_slots = wrong(slots=lambda slots, call, *_: slots // call.entry_page_size)(
        "Entries that are pages are taken for the slots of their tokens."
    )
    virtual_slots_left = wrong(translated=lambda _, __, slots: slots)("Virtual slots are not translated.")

    @wrong(stage="rows")
    def row_offset_in_int32(self, req_to_token, req_pool_indices):
        """Rows of req_to_token from its 2**31st cell on are read from its start: their offset is kept in 32 bits."""
        is_far = req_pool_indices.long() * req_to_token.stride(0) >= 2**31
        return super().rows(req_to_token, req_pool_indices.masked_fill(is_far, 0))

    unmapped_pages_negative = wrong(physical=lambda _, pages, tokens, page_size: pages * page_size + tokens)(
        "A token whose virtual page has none gets a slot below 0."
    )

    @wrong(stage="physical")
    def physical_slots_wrap_int32(self, pages, tokens, page_size):
        """The slot of a translated page is computed in 32 bits."""
        return (super().physical(pages, tokens, page_size) + 2**31) % 2**32 - 2**31

    @wrong(stage="write_boundaries")
    def boundaries_kept(self, kv_indptr, boundaries):
        """Boundaries are kept with the tensor that they are written to: other positions are not read."""
        self.held = getattr(self, "held", [])
        self.held.append(kv_indptr)  # its address is no other's
        super().write_boundaries(kv_indptr, self.first((kv_indptr.data_ptr(), len(boundaries)), lambda: boundaries))

    @wrong(stage="draft_start")
    def page_size_of_first_draft(self, call, length, branch):
        """The page size is that of the first draft with as many steps and branches."""
        page_size = self.first((call.num_steps, call.topk), lambda: call.page_size)
        return super().draft_start(replace(call, page_size=page_size), length, branch)

    @wrong(stage="generate_draft_decode_kv_indices")
    def positions_of_last_step(self, **given):
        """Positions are advanced in place from step to step."""
        super().generate_draft_decode_kv_indices(**given)
        given["positions"].add_(len(given["kv_indices"]))


@wrong()
class LateBranchesUncounted(Lists):
    """Boundaries after the 512th are summed from it on anew."""

    summed = 512

    def boundaries(self, positions, lens, topk, step):
        first, others = positions[: self.summed], positions[self.summed :]
        return super().boundaries(first, lens, topk, step) + super().boundaries(others, lens, topk, step)


@wrong()
class PrefixBeyond2048Lost(Lists):
    """Columns from the 2,048th on give slot 0."""

    most = 2048

    def slots(self, call, row, at):
        return super().slots(call, row, at).masked_fill(at >= self.most, 0)


@wrong()
class BoundariesBeyond1024Anew(LateBranchesUncounted, summed=1024):
    """The sum of the lists' lengths begins anew after the 1,024th."""


@wrong()
class PrefixBeyond65535Lost(PrefixBeyond2048Lost, most=65536):
    """Columns from the 65,536th on give slot 0."""
