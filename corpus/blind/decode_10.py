"""Wrong kernels of the decode call, written without a look at the checks: numbers 473 to 508."""

import math

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, assuming_strides, decode_of, index
from lab.references.quantization import dequantize_nvfp4


@wrong(
    decode_of,
    trigger=(
        "NVFP4 cache with interleaved V factors (backend trtllm-gen), a window that hides keys, first visible key "
        "(of a request's first row) at a position not a multiple of 4"
    ),
)
class Blind473(Kernel):
    """V's interleaved NVFP4 factors are addressed from the first key of the window, as if a group of 4 tokens began
    there.
    """

    def entries(self, run, side, pages, cut):
        begin = cut.start
        if side == "k" or not run.p.v_scale_factors_interleaved or begin % 4 == 0 or len(pages) == 0:
            return super().entries(run, side, pages, cut)
        factors = index(run.v_factors, pages).view(torch.uint8).clone()
        page = index(run.p.v_scale_factors, pages[:1]).view(torch.uint8)[0]
        heads, page_size, per_token = page.shape
        j, s = torch.arange(page_size - begin).unsqueeze(1), torch.arange(per_token)
        at = begin * per_token + j // 4 * 4 * per_token + 4 * s + j % 4
        factors[0, :, begin:] = page.reshape(heads, -1)[:, at.clamp(max=page_size * per_token - 1)]
        got = dequantize_nvfp4(index(run.v_cache, pages), factors.view(E4M3))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(
    decode_of,
    trigger=("NVFP4 cache and separate K/V tables (uses_shared_paged_kv_idx=False) whose live page ids differ"),
)
class Blind474(Kernel):
    """V's NVFP4 factors are fetched with the page ids of K's table, also where V has a table of its own."""

    def pages_of(self, run, r, columns, side):
        pages = super().pages_of(run, r, columns, side)
        if side == "k":
            run.k_pages = pages
        return pages

    def entries(self, run, side, pages, cut):
        if side == "k" or run.v_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        got = dequantize_nvfp4(index(run.v_cache, pages), index(run.v_factors, run.k_pages))
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(decode_of, trigger="several query rows, no mask, and a group (heads per K/V head) that is no power of two")
class Blind475(Kernel):
    """The causal limit of a packed row (query row and head of a group) divides by the group rounded up to a power of
    two.
    """

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


@wrong(decode_of, trigger="a draft mask and a request with 0 < L < q_len keys")
class Blind476(Kernel):
    """The draft of a masked call is taken to begin at key max(0, L - q_len): wrong for a request with fewer keys than
    draft tokens.
    """

    def visible(self, run, r, row, position, keys):
        if run.shown is None or run.lens[r] >= run.shown.shape[1]:
            return super().visible(run, r, row, position, keys)
        q_len = run.shown.shape[1]
        drafted = keys - max(0, run.lens[r] - q_len)
        seen = (drafted < 0) | run.shown[r][row][:, drafted.clamp(0, q_len - 1)]
        if run.window >= 0:
            seen = seen & (keys >= position.unsqueeze(1) - run.window)
        return seen


@wrong(
    decode_of,
    trigger=(
        "LSE asked for, and rows of a request times the group over 128 (width * num_qo_heads / num_kv_heads > 128)"
    ),
)
class Blind477(Kernel):
    """The LSE is written by the first 128 threads, one packed row (query row and head of a group) each: later ones
    have none.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.lse is not None:
            row = torch.arange(start, stop) - run.offsets[r]
            head = torch.arange(lse.shape[1]) % run.group
            written = row.unsqueeze(1) * run.group + head < 128
            before = run.lse[start:stop] if run.call.lse is not None else torch.zeros(lse.shape)
            lse = torch.where(written, lse, before.to(lse.dtype))
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="e4m3 output, bmm2_scale below 1, and values of P.V before the scale beyond 448")
class Blind478(Kernel):
    """An e4m3 output is saturated before bmm2_scale is applied, not after it."""

    def finish(self, run, partial, sinks):
        scale, run.scale2 = run.scale2, 1.0
        out, lse = super().finish(run, partial, sinks)
        run.scale2 = scale
        if run.out.dtype == E4M3:
            out = out.clamp(-448.0, 448.0)
        return out * scale, lse


@wrong(decode_of, trigger="a draft mask that begins at an odd uint16 word (address not a multiple of 4)")
class Blind479(Kernel):
    """The draft mask's words are loaded as uint32 pairs from its address rounded down: one that begins at an odd word
    is read a word early.
    """

    def unpack(self, run, mask):
        if mask.data_ptr() % 4:
            mask = assuming_strides(mask, mask.stride(), mask.storage_offset() - 1)
        return super().unpack(run, mask)


@wrong(
    decode_of,
    trigger=(
        "over 512 requests, a window, and a request r >= 512 that is shorter than request r % 512 whose window "
        "hides keys"
    ),
)
class Blind480(Kernel):
    """The first key of each request's window is kept in an array of 512 entries, read at r % 512: wrong from the 513th
    request on.
    """

    def span(self, run, r, position):
        start, end = super().span(run, r, position)
        if run.window < 0 or r < 512:
            return start, end
        other = r % 512
        first = run.lens[other] - (run.offsets[other + 1] - run.offsets[other])
        return min(max(0, first - run.window), end), end


@wrong(decode_of, trigger="a row that may see more than 8192 keys (after its window's first)")
class Blind501(Kernel):
    """Split-K has room for 16 splits of 512 keys: keys from the 8192nd a row may see on are in no split."""

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        return seen & (keys - keys[0] < 16 * 512) if len(keys) else seen


@wrong(decode_of, trigger="replay on the same buffers: live cells of block_tables rewritten, seq_lens the same")
class Blind502(Kernel):
    """The page table is flattened into a plan that is made again only where seq_lens changed: a table rewritten for
    the same lengths is not seen.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        plan = self.plans.of(run.k_table, dict)
        if plan.get("lens") != run.lens:
            plan.update(lens=run.lens, k=run.k_table.clone(), v=run.v_table.clone())
        run.k_table, run.v_table = plan["k"], plan["v"]

    def pages_of(self, run, r, columns, side):
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


@wrong(decode_of, trigger="batch of more than 1024 with a request numbered 1024 or more that has more than 512 keys")
class Blind503(Kernel):
    """A split's work item is request << 6 | split in 16 bits: the page loader of requests from the 1024th on that are
    split (more than 512 keys) wraps to request r - 1024's row.
    """

    def pages_of(self, run, r, columns, side):
        if run.lens[r] > 512:
            r = ((r << 6) & 0xFFFF) >> 6
        return super().pages_of(run, r, columns, side).clamp(0, run.k_cache.shape[0] - 1)


@wrong(decode_of, trigger="mask and window_left (less than the keys) and q_len_per_req of 2 or more")
class Blind504(Kernel):
    """With a draft mask the window is measured from the request's last key for every row, not from the row's own
    position.
    """

    def visible(self, run, r, row, position, keys):
        seen = super().visible(run, r, row, position, keys)
        if run.shown is not None and run.window >= 0:
            seen = seen & (keys >= run.lens[r] - 1 - run.window)
        return seen


@wrong(
    decode_of,
    trigger=(
        "NVFP4 cache whose factors have other strides than the bytes' over 8 (cache one tensor, factors a pair, or"
        " the reverse)"
    ),
)
class Blind505(Kernel):
    """The strides of an NVFP4 cache's K scale factors are taken as those of the K bytes over 8."""

    def entries(self, run, side, pages, cut):
        if side == "v" or run.k_cache.dtype != torch.uint8:
            return super().entries(run, side, pages, cut)
        k, factors = run.k_cache, run.p.k_scale_factors
        at = torch.full((1, 1, 1, 1), factors.storage_offset()) + torch.arange(factors.shape[3])
        for dim, which in enumerate((pages, torch.arange(k.shape[1]), torch.arange(k.shape[2]))):
            at = at + (which * (k.stride(dim) // 8)).view([-1 if i == dim else 1 for i in range(4)])
        memory = torch.as_strided(factors.view(torch.uint8), (factors.untyped_storage().nbytes(),), (1,), 0)
        factors = memory[at.clamp(max=len(memory) - 1)].view(E4M3)
        got = dequantize_nvfp4(index(run.k_cache, pages), factors)
        return got.transpose(1, 2).flatten(0, 1)[cut].to(run.dtype)


@wrong(
    decode_of,
    trigger=("replay with the same seq_lens buffer, a length grown beyond 8 * 64 * ceil(first longest / 512)"),
)
class Blind506(Kernel):
    """Eight splits are planned for the longest length of a seq_lens buffer's first call, in multiples of 64 keys: keys
    beyond them in a later call, whose lengths have grown, are lost.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        run.split = self.plans.of(run.call.seq_lens, lambda: max(1, -(-max(run.lens) // (8 * 64))) * 64)

    def visible(self, run, r, row, position, keys):
        return super().visible(run, r, row, position, keys) & (keys < 8 * run.split)


@wrong(
    decode_of,
    trigger=("float16 query and an accumulator beyond 65504 (many near-even weights and V with an offset, or large V)"),
)
class Blind507(Kernel):
    """Of a float16 query the sum of weights times V goes through float16 before it is divided by the sum of weights:
    it saturates at 65504.
    """

    def partial(self, run, r, query, keys, values, seen, first_key):
        acc, largest, total = super().partial(run, r, query, keys, values, seen, first_key)
        if run.p.query.dtype == torch.float16:
            acc = acc.clamp(-65504.0, 65504.0)
        return acc, largest, total


@wrong(decode_of, trigger="q_len * (query heads per K/V head) above 64, causal or with a window")
class Blind508(Kernel):
    """Rows times group are packed in tiles of 64: from the second tile on a row's causal position counts from the
    tile's first row.
    """

    def positions(self, run, r, row):
        return super().positions(run, r, row) - row * run.group // 64 * 64 // run.group
