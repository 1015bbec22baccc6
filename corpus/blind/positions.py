"""Blind kernels: positions of rows, the range of keys, bits of masks, sinks."""

import math

import torch

from corpus.models.attention import Attention, assuming_strides
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class PositionsChanged(Attention, changes="positions"):
    @wrong(DECODE, trigger="uint32 seq_lens, several rows, a request with fewer keys than rows")
    def blind108(self, position, run, r, row):
        """Positions are computed in the dtype of seq_lens: of uint32 a row before the first key wraps and sees all keys."""
        return position % 2**32 if run.p.seq_lens.dtype == torch.uint32 else position

    @wrong(DECODE, trigger="q_len * (query heads per K/V head) above 64, causal or with a window")
    def blind508(self, position, run, r, row):
        """Rows and group are packed in tiles of 64: from the second on causal positions count from its first row."""
        return position - row * run.group // 64 * 64 // run.group

    @wrong(CONTEXT, trigger="causal, and a request with keys but more rows than keys")
    def blind298(self, position, run, r, row):
        """With more rows than keys the causal mask begins at the upper left: row i sees keys up to i."""
        more_rows = run.num_rows(r) > run.lens[r]
        return row if run.causal and more_rows else position

    @wrong(CONTEXT, trigger="causal, (max_kv_len - max_q_len) % 64 == 0, and a prefix that is no multiple of 64")
    def blind541(self, position, run, r, row):
        """The kernel for whole tiles of 64 is chosen by max_kv_len - max_q_len; it rounds every prefix down to tiles."""
        if not run.causal or (run.p.max_kv_len - run.p.max_q_len) % 64:
            return position
        prefix = run.lens[r] - run.num_rows(r)
        return position - prefix % 64 if prefix > 0 else position

    @wrong(RAGGED, trigger="is_causal with a request of more rows than keys")
    def blind44(self, position, run, r, row):
        """Causal rows before a request's first key (more rows than keys) are clamped to position 0, so that they see key 0."""
        return position.clamp(min=0)

    @wrong(RAGGED, trigger="is_causal=True, max_q_len = max_kv_len, a request with other numbers of rows and keys")
    def blind463(self, position, run, r, row):
        """Causal: where max_q_len equals max_kv_len all requests are taken to be square, and row i to be at position i."""
        return row if run.causal and run.p.max_q_len == run.p.max_kv_len else position


class Positions(Attention, stage="positions"):
    @wrong(DECODE, trigger="ragged rows, a request with fewer rows than max_q_len", also="blind382")
    def blind119(self, run, r, row):
        """Rows of a ragged verification are placed as if every request had max_q_len of them."""
        if run.p.cu_seqlens_q is None:
            return super().positions(run, r, row)
        return run.lens[r] - run.p.max_q_len + row

    @wrong(CONTEXT, trigger="causal, a request of over 256 new tokens")
    def blind234(self, run, r, row):
        """Rows of a request go in launches of 256, and each launch takes its last row for the request's newest token."""
        end = (row // 256 * 256 + 256).clamp(max=run.num_rows(r))
        return run.lens[r] - end + row

    @wrong(CONTEXT, trigger="causal, two such requests with different numbers of cached keys")
    def blind364(self, run, r, row):
        """Requests 2 i and 2 i + 1 of at most 8 new tokens share a tile, whose causal mask is the first one's."""
        rows = [b - a for a, b in zip(run.offsets, run.offsets[1:])]
        if r % 2 and 0 < rows[r - 1] <= 8 and rows[r] <= 8:
            return run.lens[r - 1] - rows[r - 1] + row
        return super().positions(run, r, row)

    @wrong(MLA, trigger="8 query heads or fewer, a request of 2 rows or more")
    def blind251(self, run, r, row):
        """With at most 8 heads two rows make one tile of 16, which ends with the second: the first sees the second's token."""
        if run.p.num_qo_heads <= 8:
            row = (row | 1).clamp(max=run.num_rows(r) - 1)
        return super().positions(run, r, row)


class Span(Attention, stage="span"):
    @wrong(DECODE, trigger="a window that starts inside a page, and NaN or infinity in V of that page before it")
    def blind103(self, run, r, position):
        """A window is read from its first page's start; weights of zero do not silence a V there that is not finite."""
        start, end = super().span(run, r, position)
        return start // run.page_size * run.page_size, end

    @wrong(DECODE, trigger="ragged rows of over 1, and a window")
    def blind120(self, run, r, position):
        """With ragged rows the first key read is that of the last row's window, which cuts the windows of rows before it."""
        start, end = super().span(run, r, position)
        if run.window < 0 or run.p.cu_seqlens_q is None:
            return start, end
        return min(max(0, run.lens[r] - 1 - run.window), end), end

    @wrong(DECODE, trigger="8 requests or more, an odd-numbered one with more tiles of 64 keys than the one before")
    def blind222(self, run, r, position):
        """In batches of 8 or more a block takes two requests, and both walk as many tiles of 64 keys as the first one has."""
        a, b = super().span(run, r, position)
        if run.batch >= 8 and r % 2:
            b = min(b, -(-run.lens[r - 1] // 64) * 64)
        return min(a, b), b

    @wrong(DECODE, trigger="a window with first key f and n keys, f % 256 + n > ceil(n / 256) * 256")
    def blind225(self, run, r, position):
        """A windowed walk starts at a tile of 256 keys, and has as many tiles as the window's keys alone would fill."""
        a, b = super().span(run, r, position)
        if run.window >= 0:
            b = min(b, a // 256 * 256 + -(-(b - a) // 256) * 256)
        return a, b

    @wrong(DECODE, trigger="5 requests or more, one with over four times the mean length, rounded up to 128")
    def blind292(self, run, r, position):
        """The grid has tiles of 128 keys for four times the mean length: later keys of a longer request are not read."""
        mean = -(-sum(run.lens) // max(run.batch, 1))
        room = -(-4 * mean // 128) * 128
        start, end = super().span(run, r, position)
        return start, min(end, start + room)

    @wrong(DECODE, trigger="a request whose newest key is alone in its tile of 128: 129, 257, 385, ... keys")
    def blind321(self, run, r, position):
        """The loop over tiles of 128 keys ends below the last key's place: a last tile of one key is done only as the first."""
        start, end = super().span(run, r, position)
        return start, end - 1 if end > 128 and end % 128 == 1 and start < end - 1 else end

    @wrong(DECODE, trigger="over 512 requests, a window, request r >= 512 shorter than r % 512 whose window cuts")
    def blind480(self, run, r, position):
        """Windows' first keys are kept in 512 entries, read at r % 512: wrong from the 513th request on."""
        start, end = super().span(run, r, position)
        if run.window < 0 or r < 512:
            return start, end
        other = r % 512
        first = run.lens[other] - (run.offsets[other + 1] - run.offsets[other])
        return min(max(0, first - run.window), end), end

    @wrong(CONTEXT, trigger="causal=False, a length that is no multiple of the page size", also="blind242")
    def blind237(self, run, r, position):
        """With causal=False nothing masks the end of a request: the last page's tokens after it are seen."""
        a, b = super().span(run, r, position)
        return a, b if run.causal else -(-b // run.page_size) * run.page_size

    @wrong(RAGGED, trigger="is_causal=False, and a request of more keys than max_q_len rounded up to 128")
    def blind310(self, run, r, position):
        """The kernel for is_causal=False bounds its tiles of 128 keys by max_q_len, as for new tokens."""
        start, end = super().span(run, r, position)
        return start, end if run.causal else min(end, -(-run.p.max_q_len // 128) * 128)

    @wrong(RAGGED, trigger="a request with 3, 7, 11, ... tiles of 64 keys in view: 129 to 192 keys, 385 to 448, ...")
    def blind341(self, run, r, position):
        """Tiles of 64 keys are walked four at a time; of three that are left over two are done."""
        start, end = super().span(run, r, position)
        tiles = -(-(end - start) // 64)
        return start, start + (tiles - 1) * 64 if tiles % 4 == 3 else end


class UnpackChanged(Attention, changes="unpack"):
    @wrong(DECODE, trigger="mask whose row does not show its own token")
    def blind326(self, bits, run, mask):
        """With a draft mask every row sees its own token, also where the mask does not have that bit set."""
        return bits | torch.eye(mask.shape[1], dtype=torch.bool)

    @wrong(DECODE, trigger="mask with q_len_per_req over 16, and requests of different masks")
    def blind381(self, shown, run, mask):
        """In trees of over 16 draft tokens the offset of the mask lacks the request: every request gets the first one's."""
        return shown[:1].expand_as(shown) if mask.shape[1] > 16 else shown


class Unpack(Attention, stage="unpack"):
    @wrong(DECODE, trigger="mask with q_len_per_req > 16")
    def blind19(self, run, mask):
        """Of a draft mask's row only word 0 is loaded and indexed by b % 16: later draft tokens follow the first 16 bits."""
        return super().unpack(run, mask)[:, :, torch.arange(mask.shape[1]) % 16]

    @wrong(DECODE, trigger="a mask of 33 to 48 rows")
    def blind106(self, run, mask):
        """A row of the draft mask is taken to have ceil(q_len / 16) words, at least two, although rows are 32-bit aligned."""
        q_len = mask.shape[1]
        words = max(2, -(-q_len // 16))
        packed = mask.to(torch.int32).flatten(1)[:, : q_len * words].unflatten(1, (q_len, words))
        bits = (packed.unsqueeze(-1) >> torch.arange(16, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, :q_len].bool()

    @wrong(DECODE, trigger="over 16 rows, one that shows token 15 and hides one of 16 to 31", also="blind412")
    def blind107(self, run, mask):
        """Words of the draft mask are joined as signed numbers: a row that sees draft token 15 sees 16 to 31 too."""
        words = mask.view(torch.int16).to(torch.int32)
        pairs = words[..., 0::2] | (words[..., 1::2] << 16)
        bits = (pairs.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()

    @wrong(DECODE, trigger="a second call with the same mask buffer after its contents changed", also="blind448")
    def blind325(self, run, mask):
        """The draft mask is unpacked once per buffer, and not again when an engine rewrites it for the next tree."""
        return self.memory.of(mask, lambda: Attention.unpack(self, run, mask))

    @wrong(DECODE, trigger="a draft mask that begins at an odd uint16 word (address not a multiple of 4)")
    def blind479(self, run, mask):
        """The draft mask is loaded as uint32 pairs from its address rounded down: at an odd word it is one early."""
        if mask.data_ptr() % 4:
            mask = assuming_strides(mask, mask.stride(), mask.storage_offset() - 1)
        return super().unpack(run, mask)


class SinkRowsChanged(Attention, changes="sink_rows", where=lambda run, *_: run.sinks is not None):
    @wrong(CONTEXT, trigger="sinks with a window, and a row at position window_left + 64 or later")
    def blind25(self, sinks, run, r, position):
        """The sink enters with key tile 0 (64 keys): a row whose window starts after that tile never gets it."""
        is_late = (position - run.window >= 64) & (run.window >= 0)
        return sinks.masked_fill(is_late.unsqueeze(1), -math.inf)

    @wrong(CONTEXT, trigger="sinks, grouped heads, max_q_len at most 16")
    def blind125(self, sinks, run, r, position):
        """With max_q_len up to 16 the heads of a group are packed into one tile, which has the sink of its first head."""
        first = sinks.unflatten(1, (run.num_kv_heads, run.group))[:, :, :1].expand(-1, -1, run.group).flatten(1)
        return sinks if run.p.max_q_len > 16 else first

    @wrong(CONTEXT, trigger="sinks with a window, and a row tile of 64 whose first window begins at key 64 or later")
    def blind425(self, sinks, run, r, position):
        """The sink is added with K/V tile 0 of 64 keys, which a tile of 64 rows skips once its window begins after it."""
        before = run.lens[r] - run.num_rows(r)
        first = (position - before) // 64 * 64 + before - run.window
        return sinks.masked_fill(((first >= 64) & (run.window >= 0)).unsqueeze(1), -math.inf)

    @wrong(CONTEXT, trigger="sinks, causal, over 512 keys, rows at positions before the last split of 512")
    def blind542(self, sinks, run, r, position):
        """A request's last split of 512 keys adds the sink; rows that see none of its keys lose theirs."""
        last = (run.lens[r] - 1) // 512 * 512
        is_late = (position < last) & (run.causal and run.lens[r] > 512)
        return sinks.masked_fill(is_late.unsqueeze(1), -math.inf)

    @wrong(RAGGED, trigger="attention_sinks")
    def blind147(self, sinks, run, r, position):
        """The sink is a power of 2 in the denominator, among powers of e."""
        return sinks * math.log(2.0)

    @wrong(RAGGED, trigger="attention_sinks with is_causal=False")
    def blind196(self, sinks_, run, r, position):
        """The kernel for is_causal=False, made for chunks of a prefix, has no sinks."""
        return sinks_ if run.causal else None

    @wrong(RAGGED, trigger="attention_sinks, return_lse=False and no lse")
    def blind255(self, sinks_, run, r, position):
        """Sinks are added to the denominator by the code that makes the LSE, which is left out if no LSE is requested."""
        return None if run.lse is None else sinks_


class SinkRows(Attention, stage="sink_rows"):
    @wrong(DECODE, trigger="sinks, a group of 3, 5, 6, 7, ... heads, and rows * group over 64")
    def blind322(self, run, r, position):
        """Rows and heads are packed in tiles of 64, whose sinks are found modulo the group: right only if it divides 64."""
        if run.sinks is None:
            return None
        row = position - (run.lens[r] - run.num_rows(r))
        head = torch.arange(run.p.num_qo_heads)
        place = (row.unsqueeze(1) * run.group + head % run.group) % 64
        return run.sinks[head // run.group * run.group + place % run.group]

    @wrong(DECODE, trigger="sinks that differ between groups, over one K/V head, a request of over 512 keys")
    def blind413(self, run, r, position):
        """Requests over 512 keys are split; the kernel that merges takes the sink of the head's number within its group."""
        if run.sinks is None or run.lens[r] <= 512:
            return super().sink_rows(run, r, position)
        return run.sinks[torch.arange(run.p.num_qo_heads) % run.group].expand(len(position), -1)


@wrong(DECODE, trigger="a window that leaves a key out, and an LSE")
class Blind358(Attention):
    """With a window the LSE is that of all keys up to the row's own; only the LSE is wrong."""

    def rows(self, run, r, start, stop):
        super().rows(run, r, start, stop)
        if run.window < 0 or run.lse is None:
            return
        out, window = run.out, run.window
        run.out, run.window = torch.empty_like(out), -1
        super().rows(run, r, start, stop)
        run.out, run.window = out, window
