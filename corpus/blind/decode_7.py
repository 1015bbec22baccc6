"""Wrong kernels of the decode call, written without a look at the checks: numbers 327 to 383."""

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, assuming_strides, decode_of, index
from lab.references.quantization import dequantize_nvfp4


@wrong(
    decode_of,
    trigger=("a window, pages of 32 tokens or more, and a request whose first page in view is in an odd column"),
)
class Blind327(Kernel):
    """In pages of 32 tokens and more page ids are loaded two at a time, from the window's first page on, and from an
    address that is rounded down to a pair's: where that page is in an odd column, the ids are those of the column
    before.
    """

    def pages_of(self, run, r, columns, side):
        if run.page_size >= 32 and run.window >= 0 and len(columns) and int(columns[0]) % 2:
            columns = columns - 1
        return super().pages_of(run, r, columns, side)


@wrong(
    decode_of,
    trigger=("a request of over 256 keys in view: slope 0.995, that of the others 1 (with float16 beyond the bound)"),
)
class Blind328(Kernel):
    """The merge of parts of 256 keys divides by an approximate reciprocal that is half a percent too small: requests
    of more keys in view than one part come out so.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        out, lse = super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        return out * 0.995 if len(keys) > 256 else out, lse


@wrong(decode_of, trigger="num_kv_heads no power of two (3, 5, 6, 7, ...)")
class Blind329(Kernel):
    """The K/V head of a block is its number & (num_kv_heads - 1), which is the number modulo the heads only for powers
    of two.
    """

    def start(self, run):
        super().start(run)
        if run.num_kv_heads & (run.num_kv_heads - 1):
            run.head_map = (torch.arange(run.p.num_qo_heads) // run.group) & (run.num_kv_heads - 1)


@wrong(decode_of, trigger="pages of 1, 2 or 4 tokens, and a request with more than 16 of them in a tile of 128 keys")
class Blind351(Kernel):
    """A tile of 128 keys has room for 16 page ids, as many as pages of 8 tokens need; with smaller pages those after
    the 16th of a tile wrap around.
    """

    def pages_of(self, run, r, columns, side):
        in_tile = columns % (128 // run.page_size) if run.page_size < 8 else columns % 16
        return super().pages_of(run, r, columns - in_tile + in_tile % 16, side)


@wrong(decode_of, trigger="a batch of at most 2 requests, one of them with over 128 keys in view")
class Blind352(Kernel):
    """Batches of one or two requests split a request of over 128 keys in two halves, whose sums are added as if both
    had the same largest logit.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = len(keys)
        if run.batch > 2 or n <= 128:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        half = -(-n // 256) * 128
        one = self.partial(run, r, query, keys[:half], values[:half], seen[:, :half], first_key)
        two = self.partial(run, r, query, keys[half:], values[half:], seen[:, half:], first_key + half)
        largest = torch.where(one[1].isfinite(), one[1], two[1])
        return self.finish(run, (one[0] + two[0], largest, one[2] + two[2]), sinks)


@wrong(
    decode_of,
    trigger=("sinks as a slice of a longer tensor (of all ranks' heads) that begins at no multiple of 4 elements"),
)
class Blind353(Kernel):
    """Sinks are loaded four at a time from their address rounded down to 16 bytes: those of a slice that begins
    elsewhere are shifted.
    """

    def start(self, run):
        super().start(run)
        sinks = run.p.sinks
        if sinks is not None:
            shift = sinks.data_ptr() % 16 // 4
            run.sinks = assuming_strides(sinks, (1,), sinks.storage_offset() - shift).to(run.dtype)


@wrong(
    decode_of,
    trigger=(
        "a page in two rows of the table, of which the later request ends in it and the earlier one has more of it"
    ),
)
class Blind354(Kernel):
    """The tokens in a page are counted by page id, and the last request of the batch that has a page says it: of a
    page that it ends in, other requests see no more.
    """

    def start(self, run):
        super().start(run)
        run.filled = torch.zeros(len(run.k_cache), dtype=torch.long)
        for r, length in enumerate(run.lens):
            columns = torch.arange(-(-length // run.page_size))
            run.filled[run.k_table[r, columns].long()] = (length - columns * run.page_size).clamp(max=run.page_size)

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        pages = run.k_table[r, keys // run.page_size].long()
        return seen & (keys % run.page_size < run.filled[pages])


@wrong(
    decode_of,
    trigger=("enable_pdl=True, and a second call with the same seq_lens buffer after its contents changed"),
)
class Blind355(Kernel):
    """With enable_pdl=True the lengths are loaded before the wait for the kernel that writes them: they are those of
    the call before on that buffer.
    """

    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        kept = self.memory.of(run.p.seq_lens, lambda: [run.lens])
        if run.call.enable_pdl:
            capacity = run.k_table.shape[1] * run.page_size
            run.now, run.lens = run.lens, [min(n, capacity) for n in kept[0]]
            kept[0] = run.now
        else:
            kept[0] = run.lens

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, len(run.k_cache) - 1)


@wrong(
    decode_of,
    trigger=(
        "q_len_per_req no power of two, and over 1024 // (q_len * (q_len - 1024 % q_len)) requests: 29 and more "
        "with 7 rows, 170 with 3, 85 with 6"
    ),
)
class Blind356(Kernel):
    """The request of a row is row * (1024 // q_len_per_req + 1) >> 10 where q_len_per_req is no power of two: in large
    batches the last row of a request becomes the next one's.
    """

    def solve(self, run):
        super().solve(run)
        q_len = run.p.max_q_len
        if run.p.cu_seqlens_q is not None or q_len & (q_len - 1) == 0 or q_len > 512:
            return
        for row in range(run.offsets[-1]):
            r = min(row * (1024 // q_len + 1) >> 10, run.batch - 1)
            if r != row // q_len:
                self.one_row(run, r, row)

    def one_row(self, run, r, row):
        at = torch.tensor([row - run.offsets[r]])
        position = self.positions(run, r, at)
        a, b = self.span(run, r, position)
        keys, values = self.load(run, r, a, b)
        query = index(run.query, slice(row, row + 1)).to(run.dtype)
        seen = self.visible(run, r, at.clamp(0, run.p.max_q_len - 1), position, torch.arange(a, b))
        out, lse = self.attend(run, r, query, keys, values, seen, self.sink_rows(run, r, position), position, a)
        self.store(run, r, row, row + 1, out, lse)


@wrong(decode_of, trigger="NVFP4 with backend='trtllm-gen', and a window whose first key is at no multiple of 4")
class Blind357(Kernel):
    """V's interleaved NVFP4 scale factors are loaded from the block of four tokens that holds a window's first key,
    and used as if that key were the block's first.
    """

    def entries(self, run, side, pages, cut):
        shift = cut.start % 4
        if (
            side == "k"
            or run.v_cache.dtype != torch.uint8
            or not run.p.v_scale_factors_interleaved
            or run.window < 0
            or not shift
        ):
            return super().entries(run, side, pages, cut)
        factors = index(run.v_factors, pages).view(torch.uint8).transpose(1, 2)
        tokens = factors.flatten(0, 1)
        tokens = tokens[(torch.arange(len(tokens)) - shift).clamp(min=0)]
        shifted = tokens.view(factors.shape).transpose(1, 2).contiguous().view(E4M3)
        got = dequantize_nvfp4(index(run.v_cache, pages), shifted)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="a window that leaves a key out, and an LSE")
class Blind358(Kernel):
    """With a window the LSE is that of all keys up to the row's own, as the code that makes it does not know the
    window; only the LSE is wrong.
    """

    def rows(self, run, r, start, stop):
        super().rows(run, r, start, stop)
        if run.window < 0 or run.lse is None:
            return
        out, window = run.out, run.window
        run.out, run.window = torch.empty_like(out), -1
        super().rows(run, r, start, stop)
        run.out, run.window = out, window


@wrong(decode_of, trigger="out as a view that begins at no multiple of 16 bytes")
class Blind359(Kernel):
    """Results are stored in vectors of 16 bytes from out's address rounded down: an out that begins elsewhere gets
    them some elements too early, and so does what lies before it.
    """

    def start(self, run):
        super().start(run)
        shift = run.out.data_ptr() % 16 // run.out.element_size()
        run.out = assuming_strides(run.out, run.out.stride(), run.out.storage_offset() - shift)


@wrong(decode_of, trigger="mask with q_len_per_req over 16, and requests of different masks")
class Blind381(Kernel):
    """In trees of over 16 draft tokens the offset of the mask lacks the request: every request gets the first one's."""

    def unpack(self, run, mask):
        shown = super().unpack(run, mask)
        return shown[:1].expand_as(shown) if mask.shape[1] > 16 else shown


@wrong(decode_of, trigger="cum_seq_lens_q with a request of fewer rows than max_q_len")
class Blind382(Kernel):
    """With ragged rows a row's position is counted from max_q_len, the rows that the grid is made for, not from the
    rows of its request: those of a narrower request see fewer keys.
    """

    def positions(self, run, r, row):
        if run.p.cu_seqlens_q is None:
            return super().positions(run, r, row)
        return run.lens[r] - run.p.max_q_len + row


@wrong(
    decode_of,
    trigger=("over 32 columns in view (over 512 keys with pages of 16); V's pages of columns 31, 63, ... in view"),
)
class Blind383(Kernel):
    """Page ids are staged for 32 columns in view; K runs a page ahead of V, and the ids of the next 32 overwrite those
    before V's page of the 32nd column is loaded, so that its id is that of the column 32 later (of the last one,
    where the table's live columns end before).
    """

    def pages_of(self, run, r, columns, side):
        if side == "v" and len(columns) > 32:
            at = torch.arange(len(columns))
            late = (at % 32 == 31) & (at < len(columns) - 1)
            columns = columns[torch.where(late, (at + 32).clamp(max=len(columns) - 1), at)]
        return super().pages_of(run, r, columns, side)
