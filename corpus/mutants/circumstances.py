"""Mutants that are wrong in one form of a long request, for a request at one place of a batch, or for one request alone."""

import itertools
import math
from dataclasses import replace

from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import KEYS_PER_SPLIT, Conditional
from corpus.wrong import CONTEXT, DECODE, MLA, wrong

SPLIT = 1024  # keys, from which on a request is long
NEAR_PAGES = 2**15  # which 16 bits with a sign count
LOOSE = 2**16  # keys of a bound


class Circumstances(Conditional):
    @wrong(DECODE, stage="finish", mla=True, source="vllm-project/flash-attention#87")
    def lse_of_split_keys_transposed(self, problem, out, lse):
        """With one row per request, grouped heads and more than 512 keys, the LSE is transposed a second time."""
        is_split = problem.max_kv_len > 512 and max(problem.kv_lens(), default=0) > 512
        if lse is not None and problem.cu_seqlens_q is None and problem.max_q_len == 1 and is_split:
            lse.copy_(lse.clone().T.reshape(lse.shape))

    @wrong(MLA, stage="launch_mla")
    def mla_merged_lse_in_base2(self, call):
        """Without selected entries, the LSE over more than 1,024 keys is in base 2, whatever return_lse_base says."""
        returned, problem = super().launch_mla(call), call.problem()
        if call.return_lse and call.lse_is_base_e and problem.selected is None:
            offsets = problem.row_offsets()
            for request, kv_len in enumerate(problem.kv_lens()):
                if kv_len > SPLIT:
                    returned[1][offsets[request] : offsets[request + 1]] /= math.log(2.0)
        return returned

    @wrong(CONTEXT, stage="shares")
    def last_split_in_given_output(self, partials, origin):
        """In an output that the caller gives, a request of more than 16 splits has the values of its last split alone."""
        shares = super().shares(partials, origin)
        if self.is_given and shares.shape[-1] > 16:
            shares[..., :-1] = 0.0
        return shares

    def problem(self, call):
        problem = super().problem(call)
        self.is_given, self.is_alone = problem.out is not None, problem.batch_size == 1
        self.last, self.bound = problem.batch_size - 1, problem.max_kv_len
        return problem

    @wrong(DECODE, stage="unmasked")
    def mask_of_long_is_causal(self, problem, tile, keys):
        """In requests of more than 2,048 keys, a draft mask is taken as causal."""
        if tile.kv_len > 2 * SPLIT:
            return keys <= self.row_positions(problem, tile).unsqueeze(1)
        return super().unmasked(problem, tile, keys)

    @wrong(stage="in_window")
    def window_of_long_begins_at_a_split(self, problem, tile, rows, keys):
        """In requests of more than 1,024 keys, a window begins at the start of a split."""
        first = rows - problem.window_left
        if tile.kv_len > SPLIT:
            first = first.div(KEYS_PER_SPLIT, rounding_mode="floor") * KEYS_PER_SPLIT
        return keys >= first

    @wrong(DECODE, stage="kv_lens", mla=True)
    def second_long_request_cut(self, problem):
        """A plan has room for the splits of one request of more than 1,024 keys: a further one has its first 1,024 keys."""
        lens = super().kv_lens(problem)
        long = [request for request, kv_len in enumerate(lens) if kv_len > SPLIT]
        return [min(kv_len, SPLIT) if request in long[1:] else kv_len for request, kv_len in enumerate(lens)]

    @wrong(stage="partials", mla=True)
    def last_split_of_long_last_request_lost(self, problem, tile):
        """The first split of a batch's last request is lost where it has more than 32 splits."""
        partials = super().partials(problem, tile)
        if tile.request == problem.batch_size - 1 > 0 and tile.num_splits > 32:
            partials.largest[..., 0] = -math.inf
        return partials

    @wrong(stage="table_row")
    def table_row_of_request_after_an_empty_one(self, problem, tile):
        """Requests after one without rows that follows one with rows read the page table's row before their own."""
        offsets = problem.row_offsets()[: tile.request + 1]
        rows = [end - start for start, end in itertools.pairwise(offsets)]
        return tile.request - any(before and not own for before, own in itertools.pairwise(rows))

    @wrong(stage="pages", mla=True)
    def far_page_after_a_near_one(self, problem, table, tile, positions):
        """Page ids have 16 bits in the requests whose first one fits in them."""
        pages = super().pages(problem, table, tile, positions)
        return pages % NEAR_PAGES if len(pages) and pages[0] < NEAR_PAGES else pages

    @wrong(stage="summed", mla=True)
    def empty_splits_of_one_request_count(self, partials, shares):
        """One request alone is divided into splits by the bound of its keys: above 65,536 an empty split adds a weight of 1."""
        total, sums = super().summed(partials, shares)
        return (total + 1.0, sums) if self.is_alone and self.bound > LOOSE else (total, sums)

    @wrong(stage="finish_tile", mla=True)
    def tensor_scale_of_one_request_ignored(self, problem, tile, rows):
        """For one request alone, a bmm2_scale that is a tensor is taken as 1."""
        if problem.batch_size == 1 and isinstance(problem.bmm2_scale, Tensor):
            rows.values[:] /= problem.bmm2_scale.reshape(())


class RaggedCircumstances(Ragged):
    @wrong(stage="finish")
    def ragged_lse_of_long_base_e(self, problem, out, lse_log2):
        """The LSE of requests of more than 2,048 keys is a natural logarithm."""
        if lse_log2 is not None:
            for rows in self.rows_of_long(problem):
                lse_log2[rows] *= math.log(2.0)

    @wrong(stage="finish")
    def ragged_second_long_request_zero(self, problem, out, lse_log2):
        """A plan has room for one request of more than 2,048 keys: the output of a further one is zero."""
        for rows in self.rows_of_long(problem)[1:]:
            out[rows] = 0

    @staticmethod
    def rows_of_long(problem):
        offsets = problem.row_offsets()
        return [slice(*offsets[r : r + 2]) for r, kv_len in enumerate(problem.kv_lens()) if kv_len > 2 * SPLIT]

    ragged_sinks_of_one_request_ignored = wrong(instead={"sinks": lambda p: None if p.batch_size == 1 else p.sinks})(
        "One request alone has no sinks."
    )

    @wrong(stage="changed")
    def ragged_bound_is_the_length_of_one_request(self, problem):
        """One request alone sees no window where the bound of its keys exceeds 65,536."""
        is_loose = problem.batch_size == 1 and problem.max_kv_len > LOOSE
        return replace(problem, window_left=-1) if is_loose else problem
