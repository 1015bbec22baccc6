"""Wrong kernels of the decode call, written without a look at the checks: numbers 118 to 173."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import Kernel, assuming_strides, decode_of


@wrong(
    decode_of,
    trigger=("a cache whose heads and tokens lie in memory in the order of the other layout; several K/V heads"),
)
class Blind118(Kernel):
    """The strides of heads and tokens are computed from kv_layout and the shape; only that of pages is the tensor's
    own.
    """

    def start(self, run):
        super().start(run)
        run.k_cache, run.v_cache = (self.by_layout(run, cache) for cache in (run.k_cache, run.v_cache))

    def by_layout(self, run, cache):
        _, heads, tokens, last = cache.shape
        inner = (tokens * last, last) if run.call.kv_layout == "HND" else (last, heads * last)
        return assuming_strides(cache, (cache.stride(0), *inner, 1))


@wrong(decode_of, trigger="ragged rows, a request with fewer rows than max_q_len")
class Blind119(Kernel):
    """Rows of a ragged verification are placed as if every request had max_q_len of them."""

    def positions(self, run, r, row):
        if run.p.cu_seqlens_q is None:
            return super().positions(run, r, row)
        return run.lens[r] - run.p.max_q_len + row


@wrong(decode_of, trigger="ragged rows of over 1, and a window")
class Blind120(Kernel):
    """With ragged rows the first key that is read is that of the last row's window, which cuts the windows of the rows
    before it.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.window < 0 or run.p.cu_seqlens_q is None:
            return start, end
        return min(max(0, run.lens[r] - 1 - run.window), end), end


@wrong(
    decode_of,
    trigger=("a request whose length is a multiple of the page size (with pages of 1 token every request)"),
)
class Blind161(Kernel):
    """The tokens of a request's last page are counted as seq_len % page_size, so that a full last page has none."""

    def visible(self, run, r, row, position, keys):
        length, ps = run.lens[r], run.page_size
        pages = -(-length // ps)
        return super().visible(run, r, row, position, keys) & (keys < (pages - 1) * ps + length % ps)


@wrong(decode_of, trigger="a 16-bit cache with head_dim of 128 or more, and over 4 keys")
class Blind162(Kernel):
    """K's tile is swizzled by the key's number in eight; from column 64 on the swizzle is undone by its number in
    four, so that half of the keys have their 16-byte chunks in another order.
    """

    def load(self, run, r, a, b):
        keys, values = super().load(run, r, a, b)
        if run.k_cache.dtype.itemsize != 2:
            return keys, values
        keys = keys.clone()
        wrong = torch.arange(a, b) % 8 >= 4
        for first in range(64, keys.shape[2] - 63, 64):
            chunks = keys[wrong, :, first : first + 64].unflatten(2, (8, 8))
            keys[wrong, :, first : first + 64] = chunks[:, :, torch.arange(8) ^ 4].flatten(2)
        return keys, values


@wrong(
    decode_of,
    trigger=(
        "a request that does not fill its last page, and anything but zeros there: the cache has changed; the "
        "output is wrong too where a longer request shares that page"
    ),
)
class Blind163(Kernel):
    """So that no NaN comes through, K and V after a request's last token are set to zero in its last page, in the
    caller's cache.
    """

    def start(self, run):
        super().start(run)
        for r, length in enumerate(run.lens):
            used = length % run.page_size
            for cache, table in ((run.k_cache, run.k_table), (run.v_cache, run.v_table)):
                if used:
                    cache.view(torch.uint8)[int(table[r, length // run.page_size]), :, used:] = 0


@wrong(decode_of, trigger="a bfloat16 query and an LSE; only the LSE is wrong, by up to 0.03")
class Blind164(Kernel):
    """The LSE is staged in shared memory beside the output's tile, in its 16 bits: of a bfloat16 query it keeps eight
    significant bits.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.query.dtype == torch.bfloat16:
            lse = lse.to(torch.bfloat16).to(lse.dtype)
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="sinks and over 32 query heads, of different sinks")
class Blind165(Kernel):
    """The sinks are loaded by one warp, a head by each thread: heads from the 32nd on get the sink of head h % 32."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 32]


@wrong(decode_of, trigger="backend='xqa' with q_len_per_req over 1 and no mask")
class Blind166(Kernel):
    """The XQA path takes causality from the draft mask alone: without one every row sees all keys of its request."""

    def start(self, run):
        super().start(run)
        if run.call.backend == "xqa" and run.p.cu_seqlens_q is None:
            run.causal = False


@wrong(decode_of, trigger="several rows and over 512 keys (in the windows); the first row is right")
class Blind167(Kernel):
    """The LSE of a part of 512 keys is kept for a request, not for each of its rows: the merge weighs the parts of all
    rows as the first row's.
    """

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        if len(keys) <= 512:
            return super().attend(run, r, query, keys, values, seen, sinks, position, first_key)
        partials = []
        for at in range(0, len(keys), 512):
            part = slice(at, at + 512)
            acc, largest, total = self.partial(run, r, query, keys[part], values[part], seen[:, part], first_key + at)
            normal = acc / torch.where(total > 0, total, 1.0).unsqueeze(2)
            lse = (largest + torch.log(total))[:1].expand_as(total)
            partials.append((normal, lse, torch.ones_like(total)))
        return self.finish(run, self.merge(partials), sinks)


@wrong(decode_of, trigger="sinks with bmm1_scale (other than 1) or bmm1_scale_log2 as a tensor")
class Blind168(Kernel):
    """A scale that is a tensor is applied to the tile of logits when the sink has joined it: the sink is scaled too."""

    def start(self, run):
        super().start(run)
        if run.sinks is not None and isinstance(run.p.bmm1_scale, torch.Tensor):
            run.sinks = run.sinks * run.scale1


@wrong(
    decode_of,
    trigger=("batch_size * num_kv_heads > 132: the pairs from the 133rd on are too small, and their LSE is too large"),
)
class Blind169(Kernel):
    """132 persistent blocks take the pairs of a request and a K/V head one after another; for its next pair a block
    clears its sums over V, but not its maximum and denominator.
    """

    BLOCKS = 132

    def solve(self, run):
        run.registers = {}
        super().solve(run)

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        largest, total = largest.clone(), total.clone()
        for h in range(run.num_kv_heads):
            block, heads = (r * run.num_kv_heads + h) % self.BLOCKS, slice(h * run.group, (h + 1) * run.group)
            if block in run.registers:
                before, left = (x[torch.arange(len(acc)).clamp(max=len(x) - 1)] for x in run.registers[block])
                pair = (
                    (acc[:, heads], largest[:, heads], total[:, heads]),
                    (torch.zeros_like(acc[:, heads]), before, left),
                )
                acc[:, heads], largest[:, heads], total[:, heads] = self.merge(pair)
            run.registers[block] = largest[:, heads].clone(), total[:, heads].clone()
        return acc, largest, total


@wrong(decode_of, trigger="a request of seq_lens 0 before one with keys: the later ones are zero")
class Blind170(Kernel):
    """The persistent loop over requests ends at one without keys, where it should go on with the next."""

    def solve(self, run):
        self.start(run)
        run.out.zero_()
        if run.lse is not None:
            run.lse.fill_(-math.inf)
        for r in range(run.batch):
            self.request(run, r)
            if run.lens[r] == 0:
                break


@wrong(
    decode_of,
    trigger=(
        "mask with a row i that shows another number of draft tokens than i + 1 (a tree), and a window that leaves"
        " a key out"
    ),
)
class Blind171(Kernel):
    """With a draft mask the window of a row is counted from its depth in the tree, the number of draft tokens that it
    sees, not from its row.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is None or run.window < 0:
            return seen
        window, run.window = run.window, -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        depth = (run.shown[r][row].sum(1) - 1).clamp(min=0)
        return seen & (keys >= (run.lens[r] - run.shown.shape[1] + depth - window).unsqueeze(1))


@wrong(decode_of, trigger="out given that holds NaN or infinity before the call")
class Blind172(Kernel):
    """The epilogue is a GEMM's, alpha * sums + beta * out with beta = 0: NaN and infinity that a given out holds
    before the call stay.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.call.out is not None:
            out = out + 0.0 * run.out[start:stop].to(out.dtype)
        super().store(run, r, start, stop, out, lse)


@wrong(
    decode_of,
    trigger=(
        "two calls with queries of one shape and dtype and different workspaces, the later one with over 256 keys "
        "(in the window): it writes in the scratch of the first one's workspace; results are right while nobody "
        "else writes there"
    ),
)
class Blind173(Kernel):
    """The parameters of a launch are kept by the query's shape and dtype, the first workspace among them: later calls
    put the sums of requests of over 256 keys in its scratch, whichever workspace they are given.
    """

    def __init__(self):
        self.workspaces = {}

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.call.workspace_buffer is None:
            return acc, largest, total
        workspace = self.workspaces.setdefault((run.query.shape, run.query.dtype), run.call.workspace_buffer)
        scratch = workspace.view(-1).view(torch.uint8)[2**23 :]
        size = acc.numel() * acc.element_size()
        if len(keys) > 256 and len(scratch) >= size:
            sums = scratch[:size].view(acc.dtype).view(acc.shape)
            sums.copy_(acc)
            acc = sums.clone()
        return acc, largest, total
