"""Mutants that let a row see the wrong keys: windows, draft masks, causality, rows before the first key."""

from dataclasses import replace

import torch
from torch import Tensor

from corpus.mutants.mutant import CONTEXT, DECODE
from corpus.mutants.split_kv import Partials, RowTile, SplitKV
from lab.calls.problem import PagedAttention


class WindowIgnored(SplitKV, source="FlashInfer #2062", instead={"window_left": -1}):
    """No window is applied."""


class WindowIgnoredWithMask(
    SplitKV, interface=(DECODE,), source="FlashInfer #4198", instead={"window_left": -1}, only_with="mask"
):
    """A window is applied only where there is no draft mask."""


class WindowOffByOneWide(SplitKV):
    """A window holds one key too many."""

    def changed(self, problem: PagedAttention) -> PagedAttention:
        return problem if problem.window_left < 0 else replace(problem, window_left=problem.window_left + 1)


class WindowOffByOneNarrow(SplitKV, in_window=lambda _, problem, tile, rows, keys: keys > rows - problem.window_left):
    """The first key of a window is lost."""


class WindowOfFirstRow(SplitKV, source="FlashInfer #4198"):
    """All rows of a request see the window of its first row, to the left."""

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return super().in_window(problem, tile, rows[:1], keys)


class WindowOfLastRow(
    SplitKV, in_window=lambda _, problem, tile, rows, keys: keys >= tile.kv_len - 1 - problem.window_left
):
    """A window is counted from the request's end, for every row."""


class WindowFromPageStart(SplitKV, source="FlashInfer #3089"):
    """A window begins where the page of its first key begins."""

    def unit(self, problem: PagedAttention) -> int:
        return problem.page_size

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // self.unit(problem) * self.unit(problem), end

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return keys >= (rows - problem.window_left) // self.unit(problem) * self.unit(problem)


class WindowSkipsPageBoundary(SplitKV):
    """A window that begins with a page loses that key, and no other window does."""

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        first = rows - problem.window_left
        return keys >= torch.where((first > 0) & (first % problem.page_size == 0), first + 1, first)


class WindowSkipsSplitBoundary(WindowFromPageStart, source="", unit=lambda *_: 64):
    """A window that begins within a split of 64 keys begins with the split's first."""


class FullMaskToCausal(SplitKV, interface=(DECODE,), source="FlashInfer #4198", instead={"mask": None}):
    """A draft mask is taken for a causal one."""


class CausalToFullMask(SplitKV, source="FlashInfer #4198", instead={"mask": None, "causal": False}):
    """Without a mask, or with one, every row sees all draft tokens."""


class MaskTransposed(
    SplitKV, interface=(DECODE,), mask_bits=lambda bits, _, tile: bits.T if tile.num_rows == tile.q_len else bits
):
    """Row i's bit for draft token j is read as row j's bit for i."""


class MaskOfFirstRequest(SplitKV, interface=(DECODE,)):
    """All requests have the first one's draft mask."""

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return super().mask_bits(problem, replace(tile, request=0, first_row=tile.mask_rows.start))


class MaskBeyondFirstWordIgnored(SplitKV, interface=(DECODE,)):
    """Draft tokens from the 17th are seen by no row, as if the mask had one word."""

    words = 1

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        bits = super().mask_bits(problem, tile)
        bits[:, 16 * self.words :] = False
        return bits


class MaskOfPrefixToo(SplitKV, interface=(DECODE,)):
    """A draft mask is read from the first key on, instead of the first draft token."""

    def unmasked(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return self.mask_bits(problem, tile)[:, keys.clamp(max=tile.q_len - 1)] | (keys >= tile.q_len)


class NonCausalIgnored(SplitKV, interface=(CONTEXT,), source="SGLang #36716", instead={"causal": True}):
    """causal=False is ignored."""


class CausalAtTopLeft(SplitKV, mla=True, position=lambda position, _, q_len, row: row if q_len > 1 else position):
    """Row i of several sits at position i, whatever its request has of keys before its rows."""


class CausalExcludesItself(SplitKV, mla=True):
    """A row of several does not see its own key."""

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        visible = super().visible(problem, tile, keys)
        if tile.q_len == 1 or not problem.causal or problem.mask is not None:
            return visible
        return visible & (keys < self.row_positions(problem, tile).unsqueeze(1))


class BoundaryUnmasked(SplitKV, interface=(CONTEXT,), source="FlashInfer #3716"):
    """Without causality, the places after the last key up to a full tile have a logit of 0."""

    def in_splits(self, problem: PagedAttention, tile: RowTile, tensor: Tensor, fill: float, dim: int) -> Tensor:
        return super().in_splits(problem, tile, tensor, fill if problem.causal else 0.0, dim)


class ShortRequestFromItsStart(
    SplitKV, mla=True, source="SGLang #26521", position=lambda _, kv_len, q_len, row: max(kv_len - q_len, 0) + row
):
    """A request with fewer keys than rows has its first row at its first key."""


class MaskedRowUniform(SplitKV, mla=True, source="TRT-LLM #17477"):
    """A row that sees no key weighs the masked ones alike: exp(-inf - -inf) as 1."""

    def masked(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super().masked(scores, visible).masked_fill(~visible.any(dim=1, keepdim=True), 0.0)


class FiniteSentinel(SplitKV, mla=True, source="FlashInfer #4401", largest=lambda largest, *_: largest.clamp(min=-1e5)):
    """The search for the largest logit starts at -1e5, so that logits far below weigh nothing."""


class SentinelMeetsSink(SplitKV, source="TRT-LLM #19220"):
    """A split's sums are scaled by exp(sink - -1e5) where a row of it sees no key: infinity times 0."""

    def partials(self, problem: PagedAttention, tile: RowTile) -> Partials:
        partials = super().partials(problem, tile)
        if problem.sinks is None or tile.num_splits == 1:
            return partials
        unseen = (partials.largest == -torch.inf).unsqueeze(-1)
        return partials._replace(sums=partials.sums.masked_fill(unseen, torch.nan))


class MaskLowersLogits(SplitKV, mla=True, masked=lambda _, scores, visible: torch.where(visible, scores, scores - 1e4)):
    """Masked logits are lowered by 10,000 instead of removed."""


class VerifyRowsAtLastPosition(SplitKV, mla=True, interface=(DECODE,), source="FlashInfer #3871"):
    """Every row of a decode call sits at the last position: q_len > 1 is ignored."""

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return torch.full_like(super().row_positions(problem, tile), tile.kv_len - 1)


class SecondTileRestarts(SplitKV):
    """Rows of a request after its first 64 sit at the positions of those."""

    rows_at_once = 64

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return super().position(kv_len, q_len, row % self.rows_at_once)


class MaskBeyondTwoWordsIgnored(MaskBeyondFirstWordIgnored, words=2):
    """A mask row has two words: draft tokens from the 33rd on are hidden from all."""


class MaskIgnoredWithoutPrefix(SplitKV, interface=(DECODE,)):
    """A request that is its draft alone is causal, whatever its mask says."""

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        alone = tile.kv_len == tile.q_len
        return super().visible(replace(problem, mask=None, causal=True) if alone else problem, tile, keys)


class MaskColumnsFromFirstKey(SplitKV, interface=(DECODE,)):
    """In a request with fewer keys than rows, a mask's columns are counted from the first key."""

    def unmasked(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        if tile.kv_len < tile.q_len:
            return self.mask_bits(problem, tile)[:, keys]
        return super().unmasked(problem, tile, keys)


class RowsBeyondEightMisplaced(SplitKV, interface=(DECODE,)):
    """Without a mask, rows of a draft from the ninth on have the positions of the first ones."""

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        positions = super().row_positions(problem, tile)
        if problem.mask is not None or problem.cu_seqlens_q is not None:
            return positions
        return torch.cat((positions[:8], positions[: max(0, len(positions) - 8)]))


class MaskedRowSeesItself(SplitKV, interface=(DECODE,)):
    """A row sees itself, whatever its bit of a draft mask says."""

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        bits = super().mask_bits(problem, tile)
        return bits | torch.eye(tile.q_len, dtype=torch.bool, device=bits.device)[tile.mask_rows]


class MaskedRowWithoutBitsCausal(SplitKV, interface=(DECODE,)):
    """A row whose bits of a draft mask are all clear is taken for one without a mask: it is causal."""

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        bits = super().mask_bits(problem, tile)
        causal = torch.ones(tile.q_len, tile.q_len, dtype=torch.bool, device=bits.device).tril()
        return torch.where(bits.any(dim=1, keepdim=True), bits, causal[tile.mask_rows])


class LastBitOfMaskShowsLastToken(SplitKV, interface=(DECODE,)):
    """The last bit of a row of a draft mask, which means nothing after q_len, shows the draft's last token."""

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        assert problem.mask is not None
        bits = super().mask_bits(problem, tile)
        last_word = problem.mask[tile.request, tile.mask_rows, -1].to(torch.int32)
        bits[:, -1] |= (last_word >> 15).bool()
        return bits


class RaggedWindowIgnored(SplitKV, interface=(DECODE,), instead={"window_left": -1}, only_with="cu_seqlens_q"):
    """A window is ignored where cum_seq_lens_q is given."""


class WindowIgnoredOfNvfp4(SplitKV, interface=(DECODE,), instead={"window_left": -1}, only_with="k_scale_factors"):
    """A window is ignored over an NVFP4 cache."""


class WindowIgnoredInSharedPrefix(SplitKV):
    """If all requests name the same first page, they see all of it."""

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        visible = super().visible(problem, tile, keys)
        first = problem.k_block_tables[:, 0]
        if len(first) > 1 and bool((first == first[0]).all()):
            visible = visible | (keys < min(problem.page_size, tile.kv_len))
        return visible

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        return 0, super().key_range(problem, first_position, num_rows, kv_len)[1]


class ContextRowsWrap(SecondTileRestarts, interface=(CONTEXT,), rows_at_once=256):
    """Rows of a prompt from the 257th on have the positions of the first ones."""
