"""Wrong kernels of the decode call, written without a look at the checks: numbers 384 to 418."""

import torch

from corpus.blind import wrong
from corpus.blind.model import E4M3, Kernel, Memory, assuming_strides, decode_of
from lab.references.quantization import deinterleave_v_scale_factors


@wrong(
    decode_of,
    trigger=(
        "q_len_per_req of 3, 5, 6, 7, ... (no power of two) in large batches: from row 2,048 on with 3, 1,024 with"
        " 5, 685 with 7, 593 with 11; of each request but the batch's last one the last row, later more"
    ),
)
class Blind384(Kernel):
    """A row's request is found by a multiplication that stands for the division by q_len_per_req, with 12 bits after
    the point: from some row on the last row of a request is taken for one before the first of the next request.
    """

    def solve(self, run):
        super().solve(run)
        q_len = run.p.max_q_len
        if run.p.cu_seqlens_q is not None or q_len == 0:
            return
        magic = -(-4096 // q_len)
        for row in range(run.offsets[-1]):
            r = row * magic >> 12
            if r != row // q_len and r < run.batch:
                self.rows(run, r, row, row + 1)


@wrong(
    decode_of,
    trigger=(
        "a later call with the same block_tables buffer in which a row has other ids before that column (another "
        "request in its place)"
    ),
)
class Blind385(Kernel):
    """Page ids are kept for a block_tables buffer, and in a later call read only from the column on that was a
    request's last page in the call before, as a request only ever appends: another request in the same row keeps
    the pages of the one before it.
    """

    def __init__(self):
        self.memory = Memory()

    def start(self, run):
        super().start(run)
        shared = run.v_table is run.k_table
        run.k_table = self.appended(run, run.k_table, run.k_cache)
        run.v_table = run.k_table if shared else self.appended(run, run.v_table, run.v_cache)

    def appended(self, run, table, cache):
        kept = self.memory.of(table, lambda: {"ids": table.clone(), "pages": [0] * len(table)})
        for r, length in enumerate(run.lens):
            first = max(kept["pages"][r] - 1, 0)
            kept["ids"][r, first:] = table[r, first:]
            kept["pages"][r] = -(-length // run.page_size)
        return kept["ids"].clamp(0, max(len(cache) - 1, 0))


@wrong(
    decode_of,
    trigger=(
        "pages of 64 tokens or more: columns from head_dim / 2 on alone, slope 0.995 (with float16 beyond the bound)"
    ),
)
class Blind386(Kernel):
    """With pages of 64 tokens and more, whose loads are made of two boxes, the columns of the upper half of head_dim
    come out half a percent too small.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.page_size >= 64:
            out = out.clone()
            out[..., out.shape[2] // 2 :] *= 0.995
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="separate page tables as a slice of wider ones (stride(1) over the number of columns)")
class Blind387(Kernel):
    """Of separate page tables V's ids are taken to lie as many cells after K's as the table has columns, whatever its
    strides are.
    """

    def start(self, run):
        super().start(run)
        if run.v_table is not run.k_table:
            offset = run.k_table.storage_offset() + run.k_table.shape[1]
            table = assuming_strides(run.v_table, run.v_table.stride(), offset)
            run.v_table = table.clamp(0, max(len(run.v_cache) - 1, 0))


@wrong(decode_of, trigger="a bfloat16 output of 65,520 or more, or of 1e-6 and less (by bmm2_scale)")
class Blind388(Kernel):
    """The output's tile is staged in float16 before it is stored as bfloat16: results beyond 65,504 become infinite,
    tiny ones lose their bits.
    """

    def store(self, run, r, start, stop, out, lse):
        if run.out.dtype == torch.bfloat16:
            out = out.to(torch.float16).to(out.dtype)
        super().store(run, r, start, stop, out, lse)


@wrong(decode_of, trigger="NVFP4 with backend='xqa' and pages of 4 tokens or more")
class Blind389(Kernel):
    """V's NVFP4 scale factors are read as interleaved over four tokens, as trtllm-gen has them, also where the XQA
    path has them in plain order.
    """

    def start(self, run):
        super().start(run)
        factors = run.p.v_scale_factors
        if factors is not None and not run.p.v_scale_factors_interleaved and run.page_size % 4 == 0:
            run.v_factors = deinterleave_v_scale_factors(factors.contiguous().view(torch.uint8)).view(E4M3)


@wrong(
    decode_of,
    trigger=(
        "`window_left` >= 0, more than one row of a request, and the windows of its first and a later row begin in"
        " different 64-key tiles, the later one by at least one key (`L - q + i - window_left > (max(0, L - q - "
        "window_left) // 64 + 1) * 64`)"
    ),
)
class Blind411(Kernel):
    """Rows of a request share K/V tiles of 64: the window's left edge is masked in the first tile alone, rows whose
    window begins later see too much.
    """

    def visible(self, run, r, row, position, keys):
        window, seen = run.window, super().visible(run, r, row, position, keys)
        if window < 0:
            return seen
        run.window = -1
        seen = super().visible(run, r, row, position, keys)
        run.window = window
        first = max(0, run.lens[r] - (run.offsets[r + 1] - run.offsets[r]) - window)
        return seen & ((keys >= position.unsqueeze(1) - window) | (keys >= first // 64 * 64 + 64))


@wrong(
    decode_of,
    trigger=(
        "a `mask` of more than 16 draft tokens with a row that sees draft token 15 (or 47, ...) and not all of 16 "
        "to 31 (48 to 63)"
    ),
)
class Blind412(Kernel):
    """The mask's words are loaded as signed 16 bits and joined in pairs: a row that sees draft token 15 sees tokens 16
    to 31 too.
    """

    def unpack(self, run, mask):
        words = mask.to(torch.int64)
        low, high = words[..., 0::2], words[..., 1::2]
        low = torch.where(low >= 2**15, low - 2**16, low)
        joined = low | (high << 16)
        bits = (joined.unsqueeze(-1) >> torch.arange(32)) & 1
        return bits.flatten(2)[:, :, : mask.shape[1]].bool()


@wrong(
    decode_of,
    trigger=("`sinks` that differ between groups, more than one K/V head, a request of more than 512 keys"),
)
class Blind413(Kernel):
    """Requests over 512 keys are split; the kernel that merges takes the sink of the head's number within its group."""

    def sink_rows(self, run, r, position):
        if run.sinks is None or run.lens[r] <= 512:
            return super().sink_rows(run, r, position)
        return run.sinks[torch.arange(run.p.num_qo_heads) % run.group].expand(len(position), -1)


@wrong(
    decode_of,
    trigger=(
        "a second call with the same `seq_lens` memory, in which a request has grown past the next multiple of 128"
        " of its first length. A second call only"
    ),
)
class Blind414(Kernel):
    """The plan, tiles of 128 keys of each request, is made at the first call with a seq_lens buffer; keys that come
    after them later are left out.
    """

    def __init__(self):
        self.plans = Memory()

    def start(self, run):
        super().start(run)
        lengths = run.p.seq_lens
        run.tiles = self.plans.of(lengths, lambda: [-(-n // 128) for n in lengths.tolist()])

    def attend(self, run, r, query, keys, values, seen, sinks, position, first_key):
        n = max(0, min(len(keys), run.tiles[r] * 128 - first_key))
        return super().attend(run, r, query, keys[:n], values[:n], seen[:, :n], sinks, position, first_key)


@wrong(
    decode_of,
    trigger=(
        "output e4m3, `bmm2_scale` < 1 and a sum of P·V above 448, as NVFP4 with a global scale of amax / 2688 "
        "has, or loud V"
    ),
)
class Blind415(Kernel):
    """An e4m3 output is clamped to 448 before bmm2_scale is applied: sums that only the scale brings into range are
    cut.
    """

    def finish(self, run, partial, sinks):
        if run.out.dtype != E4M3:
            return super().finish(run, partial, sinks)
        scale, run.scale2 = run.scale2, 1.0
        out, lse = super().finish(run, partial, sinks)
        run.scale2 = scale
        return out.clamp(-448.0, 448.0) * scale, lse


@wrong(
    decode_of,
    trigger=(
        "e4m3 cache, `bmm2_scale` a tensor whose value is no bfloat16: a uniform bias up to 0.39 %, 0.33 to 0.39 %"
        " in the checks"
    ),
)
class Blind416(Kernel):
    """With an e4m3 cache a bmm2_scale that is a tensor is converted to bfloat16 first: up to 0.4 percent on all
    outputs.
    """

    def start(self, run):
        super().start(run)
        if run.v_cache.dtype == E4M3 and isinstance(run.p.bmm2_scale, torch.Tensor):
            run.scale2 = float(run.p.bmm2_scale.to(torch.bfloat16))


@wrong(
    decode_of,
    trigger=(
        "heads not a multiple of 4, and `lse` a slice of a larger buffer (first columns, or first rows): cells "
        "beside it become 0. Memory beside the output only"
    ),
)
class Blind417(Kernel):
    """The LSE is stored four heads at a time: with 6 heads, say, two floats after each row's are overwritten."""

    def solve(self, run):
        super().solve(run)
        lse = run.lse
        if lse is None or run.p.lse is None or lse.stride(1) != 1 or lse.shape[1] % 4 == 0:
            return
        rows, heads = run.offsets[-1], lse.shape[1]
        cells = torch.as_strided(lse, (lse.untyped_storage().nbytes() // 4,), (1,), 0)
        own = torch.zeros(len(cells), dtype=torch.bool)
        torch.as_strided(own, lse.shape, lse.stride(), lse.storage_offset())[:] = True
        first = lse.storage_offset() + torch.arange(rows) * lse.stride(0)
        beside = (first[:, None] + torch.arange(heads, -(-heads // 4) * 4)).flatten()
        beside = beside[beside < len(cells)]
        cells[beside[~own[beside]]] = 0.0


@wrong(
    decode_of,
    trigger=(
        "batch > 1 and that number is not the table's row stride: a loose `max_seq_len`, or a slice of a wider table"
    ),
)
class Blind418(Kernel):
    """Rows of the page table are taken to be ceil(max_seq_len / page_size) columns apart: right only where the bound
    is as tight as the table.
    """

    def pages_of(self, run, r, columns, side):
        table = run.k_table if side == "k" else run.v_table
        width = -(-run.p.max_kv_len // run.page_size)
        sides = 1 if run.k_table is run.v_table else 2
        cells = torch.as_strided(table, (table.untyped_storage().nbytes() // 4,), (1,), 0)
        at = run.k_table.storage_offset() + (r * sides + (sides == 2 and side == "v")) * width + columns
        return cells[at.clamp(max=len(cells) - 1)].long().clamp(0, run.k_cache.shape[0] - 1)
