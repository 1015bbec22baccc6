"""Mutants that let a row see the wrong keys: windows, draft masks, causality, rows before the first key."""

from dataclasses import replace

import torch
from torch import Tensor

from lab.calls.problem import PagedAttention
from lab.checks.mutants.mutant import CONTEXT, DECODE, mutants_of
from lab.checks.mutants.split_kv import Call, Partials, RowTile, SplitKV


class WindowIgnored(SplitKV):
    """No window is applied."""

    source = "FlashInfer #2062"

    def problem(self, call: Call) -> PagedAttention:
        return replace(call.problem(), window_left=-1)


class WindowIgnoredWithMask(SplitKV):
    """A window is applied only where there is no draft mask."""

    source = "FlashInfer #4198"
    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return problem if problem.mask is None else replace(problem, window_left=-1)


class WindowOffByOneWide(SplitKV):
    """A window holds one key too many."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return problem if problem.window_left < 0 else replace(problem, window_left=problem.window_left + 1)


class WindowOffByOneNarrow(SplitKV):
    """The first key of a window is lost."""

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return keys > rows - problem.window_left


class WindowOfFirstRow(SplitKV):
    """All rows of a request see the window of its first row, to the left."""

    source = "FlashInfer #4198"

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return super().in_window(problem, tile, rows[:1], keys)


class WindowOfLastRow(SplitKV):
    """A window is counted from the request's end, for every row."""

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return keys >= tile.kv_len - 1 - problem.window_left


class WindowFromPageStart(SplitKV):
    """A window begins where the page of its first key begins."""

    source = "FlashInfer #3089"

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // problem.page_size * problem.page_size, end

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        first = rows - problem.window_left
        return keys >= first.div(problem.page_size, rounding_mode="floor") * problem.page_size


class WindowSkipsPageBoundary(SplitKV):
    """A window that begins with a page loses that key, and no other window does."""

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        first = rows - problem.window_left
        return keys >= torch.where((first > 0) & (first % problem.page_size == 0), first + 1, first)


class WindowSkipsSplitBoundary(SplitKV):
    """A window that begins within a split of 64 keys begins with the split's first."""

    def key_range(self, problem: PagedAttention, first_position: int, num_rows: int, kv_len: int) -> tuple[int, int]:
        start, end = super().key_range(problem, first_position, num_rows, kv_len)
        return start // 64 * 64, end

    def in_window(self, problem: PagedAttention, tile: RowTile, rows: Tensor, keys: Tensor) -> Tensor:
        return keys >= (rows - problem.window_left).div(64, rounding_mode="floor") * 64


class FullMaskToCausal(SplitKV):
    """A draft mask is taken for a causal one."""

    source = "FlashInfer #4198"
    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        return replace(call.problem(), mask=None)


class CausalToFullMask(SplitKV):
    """Without a mask, or with one, every row sees all draft tokens."""

    source = "FlashInfer #4198"

    def problem(self, call: Call) -> PagedAttention:
        return replace(call.problem(), mask=None, causal=False)


class MaskTransposed(SplitKV):
    """Row i's bit for draft token j is read as row j's bit for i."""

    interface = (DECODE,)

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return super().mask_bits(problem, tile).T if tile.num_rows == tile.q_len else super().mask_bits(problem, tile)


class MaskOfFirstRequest(SplitKV):
    """All requests have the first one's draft mask."""

    interface = (DECODE,)

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        first_row = tile.first_row - tile.request * tile.q_len
        return super().mask_bits(problem, replace(tile, request=0, first_row=first_row))


class MaskBeyondFirstWordIgnored(SplitKV):
    """Draft tokens from the 17th are seen by no row, as if the mask had one word."""

    interface = (DECODE,)

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        bits = super().mask_bits(problem, tile)
        bits[:, 16:] = False
        return bits


class MaskOfPrefixToo(SplitKV):
    """A draft mask is read from the first key on, instead of the first draft token."""

    interface = (DECODE,)

    def unmasked(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        return self.mask_bits(problem, tile)[:, keys.clamp(max=tile.q_len - 1)] | (keys >= tile.q_len)


class NonCausalIgnored(SplitKV):
    """causal=False is ignored."""

    source = "SGLang #36716"
    interface = (CONTEXT,)

    def problem(self, call: Call) -> PagedAttention:
        return replace(call.problem(), causal=True)


class CausalAtTopLeft(SplitKV):
    """Row i of several sits at position i, whatever its request has of keys before its rows."""

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return row if q_len > 1 else super().position(kv_len, q_len, row)


class CausalExcludesItself(SplitKV):
    """A row of several does not see its own key."""

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        visible = super().visible(problem, tile, keys)
        if tile.q_len == 1 or not problem.causal or problem.mask is not None:
            return visible
        return visible & (keys < self.row_positions(problem, tile).unsqueeze(1))


class BoundaryUnmasked(SplitKV):
    """Without causality, the places after the last key up to a full tile have a logit of 0."""

    source = "FlashInfer #3716"
    interface = (CONTEXT,)

    def in_splits(self, problem: PagedAttention, tile: RowTile, tensor: Tensor, fill: float, dim: int) -> Tensor:
        return super().in_splits(problem, tile, tensor, fill if problem.causal else 0.0, dim)


class ShortRequestFromItsStart(SplitKV):
    """A request with fewer keys than rows has its first row at its first key."""

    source = "SGLang #26521"

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return max(kv_len - q_len, 0) + row


class MaskedRowUniform(SplitKV):
    """A row that sees no key weighs the masked ones alike: exp(-inf - -inf) as 1."""

    source = "TRT-LLM #17477"

    def masked(self, scores: Tensor, visible: Tensor) -> Tensor:
        return super().masked(scores, visible).masked_fill(~visible.any(dim=1, keepdim=True), 0.0)


class FiniteSentinel(SplitKV):
    """The search for the largest logit starts at -1e5, so that logits far below weigh nothing."""

    source = "FlashInfer #4401"

    def largest(self, scores: Tensor) -> Tensor:
        return super().largest(scores).clamp(min=-1e5)


class SentinelMeetsSink(SplitKV):
    """A split's sums are scaled by exp(sink - -1e5) where a row of it sees no key: infinity times 0."""

    source = "TRT-LLM #19220"

    def partials(self, problem: PagedAttention, tile: RowTile) -> Partials:
        partials = super().partials(problem, tile)
        if problem.sinks is None or tile.num_splits == 1:
            return partials
        return partials._replace(
            sums=partials.sums.masked_fill((partials.largest == -torch.inf).unsqueeze(-1), torch.nan)
        )


class MaskLowersLogits(SplitKV):
    """Masked logits are lowered by 10,000 instead of removed."""

    def masked(self, scores: Tensor, visible: Tensor) -> Tensor:
        return torch.where(visible, scores, scores - 1e4)


class VerifyRowsAtLastPosition(SplitKV):
    """Every row of a decode call sits at the last position: q_len > 1 is ignored."""

    source = "FlashInfer #3871"
    interface = (DECODE,)

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        return torch.full_like(super().row_positions(problem, tile), tile.kv_len - 1)


class SecondTileRestarts(SplitKV):
    """Rows of a request after its first 64 sit at the positions of those."""

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return super().position(kv_len, q_len, row % 64)


class MaskBeyondTwoWordsIgnored(SplitKV):
    """A mask row has two words: draft tokens from the 33rd on are hidden from all."""

    interface = (DECODE,)

    def mask_bits(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        shown = super().mask_bits(problem, tile).clone()
        shown[:, 32:] = False
        return shown


class MaskIgnoredWithoutPrefix(SplitKV):
    """A request that is its draft alone is causal, whatever its mask says."""

    interface = (DECODE,)

    def visible(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        alone = tile.kv_len == tile.q_len
        return super().visible(replace(problem, mask=None, causal=True) if alone else problem, tile, keys)


class MaskColumnsFromFirstKey(SplitKV):
    """In a request with fewer keys than rows, a mask's columns are counted from the first key."""

    interface = (DECODE,)

    def unmasked(self, problem: PagedAttention, tile: RowTile, keys: Tensor) -> Tensor:
        if tile.kv_len < tile.q_len:
            return self.mask_bits(problem, tile)[:, keys]
        return super().unmasked(problem, tile, keys)


class RowsBeyondEightMisplaced(SplitKV):
    """Without a mask, rows of a draft from the ninth on have the positions of the first ones."""

    interface = (DECODE,)

    def row_positions(self, problem: PagedAttention, tile: RowTile) -> Tensor:
        positions = super().row_positions(problem, tile)
        if problem.mask is not None or problem.cu_seqlens_q is not None:
            return positions
        return torch.cat((positions[:8], positions[: max(0, len(positions) - 8)]))


class RaggedWindowIgnored(SplitKV):
    """A window is ignored where cum_seq_lens_q is given."""

    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return problem if problem.cu_seqlens_q is None else replace(problem, window_left=-1)


class WindowIgnoredOfNvfp4(SplitKV):
    """A window is ignored over an NVFP4 cache."""

    interface = (DECODE,)

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return problem if problem.k_scale_factors is None else replace(problem, window_left=-1)


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


class ContextRowsWrap(SplitKV):
    """Rows of a prompt from the 257th on have the positions of the first ones."""

    interface = (CONTEXT,)

    def position(self, kv_len: int, q_len: int, row: int) -> int:
        return kv_len - q_len + row % 256


MUTANTS = mutants_of(__name__)
