"""Blind kernels: several stages of a decode call, by later writers."""

import math

import torch

from corpus.models.attention import Attention
from corpus.wrong import DECODE, wrong


@wrong(DECODE, trigger="a second call with the same seq_lens memory, grown past the next multiple of 128")
class Blind414(Attention):
    """The plan, tiles of 128 keys, is made at a seq_lens buffer's first call; later keys are left out."""

    def host(self, run):
        lengths = run.p.seq_lens
        run.tiles = self.memory.of(lengths, lambda: [-(-n // 128) for n in lengths.tolist()])

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = max(0, min(len(keys), run.tiles[r] * 128 - first_key))
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


@wrong(DECODE, trigger="over 32 requests of equal widths, not sorted by falling length, with an LSE (LSE only)")
class Blind445(Attention):
    """Batches of over 32 requests are sorted, longest first; the LSE is written at a request's place in that order."""

    def host(self, run):
        run.place = None
        if run.batch > 32 and run.p.cu_seqlens_q is None:
            order = sorted(range(run.batch), key=lambda r: -run.lens[r])
            run.place = {r: place for place, r in enumerate(order)}

    def store(self, run, r, start, stop, out, lse):
        kept, run.lse = run.lse, None
        super().store(run, r, start, stop, out, lse)
        run.lse = kept
        if kept is not None:
            shift = 0 if run.place is None else (run.place[r] - r) * run.p.max_q_len
            kept[start + shift : stop + shift] = lse.to(kept.dtype)


@wrong(DECODE, trigger="no mask, q * group > 64 of a request, a group that does not divide 64")
class Blind449(Attention):
    """Rows and heads are packed densely in tiles of 64, but a tile's first row is tile * (64 // group)."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        run.position = position
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    def mask_scores(self, run, r, s, first_key):
        width = run.offsets[r + 1] - run.offsets[r]
        if width * run.group <= 64 or run.shown is not None:
            return s
        first = run.lens[r] - width
        packed = (run.position - first).unsqueeze(1) * run.group + torch.arange(run.group)
        row = packed // 64 * (64 // run.group) + packed % 64 // run.group
        keys = first_key + torch.arange(s.shape[3])
        return s.masked_fill(keys > (first + row).unsqueeze(2), -math.inf)


@wrong(
    DECODE,
    trigger="several query rows, no mask, and a group (heads per K/V head) that is no power of two",
    also=("blind570",),
)
class Blind475(Attention):
    """The causal limit of a packed row divides by the group rounded up to a power of two."""

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        run.position = position
        return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)

    def mask_scores(self, run, r, s, first_key):
        if run.shown is not None:
            return s
        _, rows, group, n = s.shape
        shift = (group - 1).bit_length()
        before = run.lens[r] - (run.offsets[r + 1] - run.offsets[r])
        packed = (run.position - before).unsqueeze(1) * group + torch.arange(group)
        limit = before + (packed >> shift)
        return s.masked_fill((first_key + torch.arange(n)) > limit.unsqueeze(2), -math.inf)


@wrong(DECODE, trigger="mask and window_left, a window that begins inside a tile of 64 keys before the draft")
class Blind535(Attention):
    """With a draft mask, tiles of 64 keys before the draft are not masked: a window goes by whole tiles."""

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        return (start // 64 * 64 if run.shown is not None else start), end

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        draft = run.lens[r] - run.shown.shape[1]
        before = (keys // 64 + 1) * 64 <= draft
        first = (position.min() - run.window).clamp(min=0) // 64
        return torch.where(before, keys // 64 >= first, seen)


@wrong(DECODE, trigger="no mask, q_len * group above 64, and group (heads per K/V head) does not divide 64")
class Blind536(Attention):
    """Rows and heads are packed in tiles of 64; a row's token counts as if each tile began with a head 0."""

    def rows(self, run, r, start, stop):
        run.row_of_chunk = torch.arange(start, stop) - run.offsets[r]
        super().rows(run, r, start, stop)

    def mask_scores(self, run, r, s, first_key):
        _, _, g, n = s.shape
        if run.shown is not None or not n:
            return s
        packed = run.row_of_chunk.unsqueeze(1) * g + torch.arange(g)
        token = packed // 64 * 64 // g + packed % 64 // g
        position = self.positions(run, r, token)
        keys = first_key + torch.arange(n)
        return s.masked_fill(keys > position.unsqueeze(2), -math.inf)
