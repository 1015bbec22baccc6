"""Mutants that let a row see the wrong keys: windows, draft masks, causality, rows before the first key."""

from dataclasses import replace

import torch

from corpus.models.split_kv import SplitKV
from corpus.wrong import CONTEXT, DECODE, wrong


class Masks(SplitKV):
    window_ignored = wrong(source="FlashInfer #2062", instead={"window_left": -1})("No window is applied.")
    window_ignored_with_mask = wrong(DECODE, source="FlashInfer #4198", instead={"window_left": -1}, only_with="mask")(
        "A window is applied only where there is no draft mask."
    )
    window_off_by_one_wide = wrong(
        where=lambda p: p.window_left >= 0, instead={"window_left": lambda p: p.window_left + 1}
    )("A window holds one key too many.")
    window_off_by_one_narrow = wrong(in_window=lambda _, p, tile, rows, keys: keys > rows - p.window_left)(
        "The first key of a window is lost."
    )

    @wrong(stage="in_window", source="FlashInfer #4198")
    def window_of_first_row(self, problem, tile, rows, keys):
        """All rows of a request see the window of its first row, to the left."""
        return super().in_window(problem, tile, rows[:1], keys)

    window_of_last_row = wrong(in_window=lambda _, p, tile, rows, keys: keys >= tile.kv_len - 1 - p.window_left)(
        "A window is counted from the request's end, for every row."
    )

    @wrong(stage="in_window")
    def window_skips_page_boundary(self, problem, tile, rows, keys):
        """A window that begins with a page loses that key, and no other window does."""
        first = rows - problem.window_left
        return keys >= torch.where((first > 0) & (first % problem.page_size == 0), first + 1, first)

    full_mask_to_causal = wrong(DECODE, source="FlashInfer #4198", instead={"mask": None})(
        "A draft mask is taken for a causal one."
    )
    causal_to_full_mask = wrong(source="FlashInfer #4198", instead={"mask": None, "causal": False})(
        "Without a mask, or with one, every row sees all draft tokens."
    )
    mask_transposed = wrong(DECODE, mask_bits=lambda bits, _, tile: bits.T if tile.num_rows == tile.q_len else bits)(
        "Row i's bit for draft token j is read as row j's bit for i."
    )

    @wrong(DECODE, stage="mask_bits")
    def mask_of_first_request(self, problem, tile):
        """All requests have the first one's draft mask."""
        return super().mask_bits(problem, replace(tile, request=0, first_row=tile.mask_rows.start))

    @wrong(DECODE, stage="unmasked")
    def mask_of_prefix_too(self, problem, tile, keys):
        """A draft mask is read from the first key on, instead of the first draft token."""
        return self.mask_bits(problem, tile)[:, keys.clamp(max=tile.q_len - 1)] | (keys >= tile.q_len)

    non_causal_ignored = wrong(CONTEXT, source="SGLang #36716", instead={"causal": True})("causal=False is ignored.")
    causal_at_top_left = wrong(mla=True, position=lambda position, _, q_len, row: row if q_len > 1 else position)(
        "Row i of several sits at position i, whatever its request has of keys before its rows."
    )

    @wrong(changes="visible", mla=True)
    def causal_excludes_itself(self, visible, problem, tile, keys):
        """A row of several does not see its own key."""
        if tile.q_len == 1 or not problem.causal or problem.mask is not None:
            return visible
        return visible & (keys < self.row_positions(problem, tile).unsqueeze(1))

    @wrong(CONTEXT, stage="in_splits", source="FlashInfer #3716")
    def boundary_unmasked(self, problem, tile, tensor, fill, dim):
        """Without causality, the places after the last key up to a full tile have a logit of 0."""
        return super().in_splits(problem, tile, tensor, fill if problem.causal else 0.0, dim)

    short_request_from_its_start = wrong(
        mla=True, source="SGLang #26521", position=lambda _, kv_len, q_len, row: max(kv_len - q_len, 0) + row
    )("A request with fewer keys than rows has its first row at its first key.")

    @wrong(stage="masked", mla=True, source="TRT-LLM #17477")
    def masked_row_uniform(self, scores, visible):
        """A row that sees no key weighs the masked ones alike: exp(-inf - -inf) as 1."""
        return super().masked(scores, visible).masked_fill(~visible.any(dim=1, keepdim=True), 0.0)

    finite_sentinel = wrong(mla=True, source="FlashInfer #4401", largest=lambda largest, *_: largest.clamp(min=-1e5))(
        "The search for the largest logit starts at -1e5, so that logits far below weigh nothing."
    )

    @wrong(changes="partials", source="TRT-LLM #19220")
    def sentinel_meets_sink(self, partials, problem, tile):
        """A split's sums are scaled by exp(sink - -1e5) where a row of it sees no key: infinity times 0."""
        if problem.sinks is None or tile.num_splits == 1:
            return partials
        unseen = (partials.largest == -torch.inf).unsqueeze(-1)
        return partials._replace(sums=partials.sums.masked_fill(unseen, torch.nan))

    mask_lowers_logits = wrong(mla=True, masked=lambda _, scores, visible: torch.where(visible, scores, scores - 1e4))(
        "Masked logits are lowered by 10,000 instead of removed."
    )

    @wrong(DECODE, stage="row_positions", mla=True, source="FlashInfer #3871")
    def verify_rows_at_last_position(self, problem, tile):
        """Every row of a decode call sits at the last position: q_len > 1 is ignored."""
        return torch.full_like(super().row_positions(problem, tile), tile.kv_len - 1)

    @wrong(DECODE, stage="visible")
    def mask_ignored_without_prefix(self, problem, tile, keys):
        """A request that is its draft alone is causal, whatever its mask says."""
        alone = tile.kv_len == tile.q_len
        return super().visible(replace(problem, mask=None, causal=True) if alone else problem, tile, keys)

    @wrong(DECODE, stage="unmasked")
    def mask_columns_from_first_key(self, problem, tile, keys):
        """In a request with fewer keys than rows, a mask's columns are counted from the first key."""
        if tile.kv_len < tile.q_len:
            return self.mask_bits(problem, tile)[:, keys]
        return super().unmasked(problem, tile, keys)

    @wrong(DECODE, changes="row_positions")
    def rows_beyond_eight_misplaced(self, positions, problem, tile):
        """Without a mask, rows of a draft from the ninth on have the positions of the first ones."""
        if problem.mask is not None or problem.cu_seqlens_q is not None:
            return positions
        return torch.cat((positions[:8], positions[: max(0, len(positions) - 8)]))

    @wrong(DECODE, changes="mask_bits")
    def masked_row_sees_itself(self, bits, problem, tile):
        """A row sees itself, whatever its bit of a draft mask says."""
        return bits | torch.eye(tile.q_len, dtype=torch.bool, device=bits.device)[tile.mask_rows]

    @wrong(DECODE, changes="mask_bits")
    def masked_row_without_bits_causal(self, bits, problem, tile):
        """A row whose bits of a draft mask are all clear is taken for one without a mask: it is causal."""
        causal = torch.ones(tile.q_len, tile.q_len, dtype=torch.bool, device=bits.device).tril()
        return torch.where(bits.any(dim=1, keepdim=True), bits, causal[tile.mask_rows])

    @wrong(DECODE, changes="mask_bits")
    def last_bit_of_mask_shows_last_token(self, bits, problem, tile):
        """The last bit of a row of a draft mask, which means nothing after q_len, shows the draft's last token."""
        last_word = problem.mask[tile.request, tile.mask_rows, -1].to(torch.int32)
        bits[:, -1] |= (last_word >> 15).bool()
        return bits

    ragged_window_ignored = wrong(DECODE, instead={"window_left": -1}, only_with="cu_seqlens_q")(
        "A window is ignored where cum_seq_lens_q is given."
    )
    window_ignored_of_nvfp4 = wrong(DECODE, instead={"window_left": -1}, only_with="k_scale_factors")(
        "A window is ignored over an NVFP4 cache."
    )


@wrong(source="FlashInfer #3089")
class WindowFromPageStart(SplitKV):
    """A window begins where the page of its first key begins."""

    def unit(self, problem):
        return problem.page_size

    def key_range(self, problem, first_position, num_rows, kv_len):
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // self.unit(problem) * self.unit(problem), end

    def in_window(self, problem, tile, rows, keys):
        return keys >= (rows - problem.window_left) // self.unit(problem) * self.unit(problem)


@wrong()
class WindowSkipsSplitBoundary(WindowFromPageStart, unit=lambda *_: 64):
    """A window that begins within a split of 64 keys begins with the split's first."""


@wrong(DECODE)
class MaskBeyondFirstWordIgnored(SplitKV):
    """Draft tokens from the 17th are seen by no row, as if the mask had one word."""

    words = 1

    def mask_bits(self, problem, tile):
        bits = super().mask_bits(problem, tile)
        bits[:, 16 * self.words :] = False
        return bits


@wrong()
class SecondTileRestarts(SplitKV):
    """Rows of a request after its first 64 sit at the positions of those."""

    rows_at_once = 64

    def position(self, kv_len, q_len, row):
        return super().position(kv_len, q_len, row % self.rows_at_once)


@wrong(DECODE)
class MaskBeyondTwoWordsIgnored(MaskBeyondFirstWordIgnored, words=2):
    """A mask row has two words: draft tokens from the 33rd on are hidden from all."""


@wrong()
class WindowIgnoredInSharedPrefix(SplitKV):
    """If all requests name the same first page, they see all of it."""

    def visible(self, problem, tile, keys):
        visible = super().visible(problem, tile, keys)
        first = problem.k_block_tables[:, 0]
        if len(first) > 1 and bool((first == first[0]).all()):
            visible = visible | (keys < min(problem.page_size, tile.kv_len))
        return visible

    def key_range(self, problem, first_position, num_rows, kv_len):
        return 0, super().key_range(problem, first_position, num_rows, kv_len)[1]


@wrong(CONTEXT)
class ContextRowsWrap(SecondTileRestarts, rows_at_once=256):
    """Rows of a prompt from the 257th on have the positions of the first ones."""
