"""Blind kernels: rows as they are stored."""

import math

import torch

from corpus.models.attention import E4M3, Attention, assuming_strides, index
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


class Store(Attention, stage="store"):
    @wrong(DECODE, trigger="an e4m3 output with elements below 1/64: many keys, or a small bmm2_scale")
    def blind7(self, run, r, start, stop, out, lse):
        """The cast to an e4m3 output flushes subnormals (magnitudes below 2^-6) to zero."""
        if run.out.dtype == E4M3:
            out = torch.where(out.abs() < 2.0**-6, 0.0, out)
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="a bfloat16 query and an LSE; only the LSE is wrong, by up to 0.03")
    def blind164(self, run, r, start, stop, out, lse):
        """The LSE is staged in the output's 16 bits: of a bfloat16 query it keeps eight significant bits."""
        if run.query.dtype == torch.bfloat16:
            lse = lse.to(torch.bfloat16).to(lse.dtype)
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="out given that holds NaN or infinity before the call")
    def blind172(self, run, r, start, stop, out, lse):
        """The epilogue is alpha * sums + beta * out with beta = 0: NaN and infinity in a given out stay."""
        if run.call.out is not None:
            out = out + 0.0 * run.out[start:stop].to(out.dtype)
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="an e4m3 output of a query of 16 bits (slope 0.957; within the bound for e4m3)")
    def blind323(self, run, r, start, stop, out, lse):
        """The cast to an e4m3 output truncates the mantissa to its three bits, where it should round."""
        if run.out.dtype == E4M3:
            size = out.abs().clamp(2.0**-6, 448.0)
            step = torch.exp2(torch.floor(torch.log2(size)) - 3)
            out = torch.trunc(out / step) * step
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="pages of 64 tokens or more: columns from head_dim / 2 on alone, slope 0.995")
    def blind386(self, run, r, start, stop, out, lse):
        """With pages of 64 tokens and more the upper half of head_dim comes out half a percent too small."""
        if run.page_size >= 64:
            out = out.clone()
            out[..., out.shape[2] // 2 :] *= 0.995
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="a bfloat16 output of 65,520 or more, or of 1e-6 and less (by bmm2_scale)")
    def blind388(self, run, r, start, stop, out, lse):
        """The output is staged in float16 before bfloat16: beyond 65,504 it is infinite, tiny results lose bits."""
        if run.out.dtype == torch.bfloat16:
            out = out.to(torch.float16).to(out.dtype)
        super().store(run, r, start, stop, out, lse)

    @wrong(
        DECODE, trigger="lse a slice of a wider buffer, heads no multiple of 4; only memory next to the output is wrong"
    )
    def blind447(self, run, r, start, stop, out, lse):
        """The LSE is written by 4 heads: with other numbers of heads it writes next to the slice of a wider buffer."""
        heads = run.p.num_qo_heads
        more = -heads % 4
        given = run.call.lse
        if given is not None and more and given.stride(1) == 1 and given.stride(0) > heads:
            room = given.untyped_storage().nbytes() // given.element_size()
            for row in range(start, stop):
                first = given.storage_offset() + row * given.stride(0) + heads
                fits = min(more, room - first)
                if fits > 0:
                    torch.as_strided(given, (fits,), (1,), first).fill_(-math.inf)
        super().store(run, r, start, stop, out, lse)

    @wrong(DECODE, trigger="an LSE, and rows of a request times the group over 128")
    def blind477(self, run, r, start, stop, out, lse):
        """The LSE is written by the first 128 threads, a packed row each: later rows have none."""
        if run.lse is not None:
            row = torch.arange(start, stop) - run.offsets[r]
            head = torch.arange(lse.shape[1]) % run.group
            written = row.unsqueeze(1) * run.group + head < 128
            before = run.lse[start:stop] if run.call.lse is not None else torch.zeros(lse.shape)
            lse = torch.where(written, lse, before.to(lse.dtype))
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="every context call: the batch's last request alone, slope 1.005")
    def blind30(self, run, r, start, stop, out, lse):
        """The last request of a batch comes out half a percent too large (its normaliser counts the tile's padding wrongly)."""
        if r == run.batch - 1:
            out = out * 1.005
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="128 query rows or more: rows 127, 255, ... of the query alone, slope 0.995")
    def blind80(self, run, r, start, stop, out, lse):
        """The last row of each tile of 128 rows of the whole query, across requests, comes out half a percent too small."""
        last = torch.arange(start, stop) % 128 == 127
        super().store(run, r, start, stop, torch.where(last[:, None, None], 0.995 * out, out), lse)

    @wrong(CONTEXT, trigger="an e4m3 output with a value over 464")
    def blind126(self, run, r, start, stop, out, lse):
        """An e4m3 output beyond 448 becomes NaN, as a conversion without saturation makes it."""
        super().store(run, r, start, stop, out, lse)
        if run.out.dtype == E4M3:
            run.out[start:stop] = torch.where(out.abs() > 464, math.nan, out).to(E4M3)

    @wrong(CONTEXT, trigger="an LSE and a bfloat16 query; of a float16 one an LSE beyond 16")
    def blind184(self, run, r, start, stop, out, lse):
        """The LSE goes through the query's 16 bits before it is stored as float32."""
        if run.query.dtype in (torch.float16, torch.bfloat16):
            lse = lse.to(run.query.dtype)
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="a request of 129 to 192, 257 to 320, ... new tokens")
    def blind245(self, run, r, start, stop, out, lse):
        """Tiles of 64 rows are taken in pairs from both ends; of an odd number over 1 the middle one is left as zero."""
        first, last = run.offsets[r : r + 2]
        tiles = -(-(last - first) // 64)
        if tiles > 1 and tiles % 2:
            middle = ((torch.arange(start, stop) - first) // 64 == tiles // 2).unsqueeze(1)
            out, lse = out.masked_fill(middle.unsqueeze(2), 0), lse.masked_fill(middle, 0)
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="over 64 rows and as many keys: slope 0.995, that of the others 1")
    def blind334(self, run, r, start, stop, out, lse):
        """Requests of new tokens alone go down a path without a page table; over 64 rows they are half a percent too small."""
        rows = run.offsets[r + 1] - run.offsets[r]
        if rows == run.lens[r] and rows > 64:
            out = out * 0.995
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="causal=False, and a request with keys but more rows than keys")
    def blind362(self, run, r, start, stop, out, lse):
        """With causal=False row tiles end at the diagonal's last key: rows from as many as keys on are zero."""
        if not run.causal:
            beyond = torch.arange(start, stop) - run.offsets[r] >= run.lens[r]
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None] & (run.lens[r] > 0), -math.inf, lse)
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="a request without keys whose query rows hold NaN or infinity (padding)")
    def blind365(self, run, r, start, stop, out, lse):
        """The results of a request without keys are its query times 0: NaN or infinity there comes through."""
        if run.lens[r] == 0:
            out = index(run.query, slice(start, stop)).to(run.dtype) * 0
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="over 4 K/V heads: query heads of K/V head 4 and on alone, slope 1.005")
    def blind396(self, run, r, start, stop, out, lse):
        """Query heads of the second cluster, of K/V head 4 and on, come out half a percent too large."""
        if run.num_kv_heads > 4:
            out = out.clone()
            out[:, 4 * run.group :] *= 1.005
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="bf16 query, NaN or infinity in padding within the last request's last tile of 64")
    def blind452(self, run, r, start, stop, out, lse):
        """bf16 queries go through fp16, a tile of 64 rows divided by its largest, padding included: its NaN spreads."""
        first = run.offsets[r]
        if run.query.dtype == torch.bfloat16 and run.lens[r]:
            for tile in range(first, run.offsets[r + 1], 64):
                a, b = max(tile, start), min(tile + 64, stop)
                if a < b and not bool(run.query[tile : tile + 64].isfinite().all()):
                    out[a - start : b - start] = math.nan
                    lse[a - start : b - start] = math.nan
        super().store(run, r, start, stop, out, lse)

    @wrong(CONTEXT, trigger="lse whose head stride is not 1 (a transposed [heads, rows] buffer), several heads")
    def blind514(self, run, r, start, stop, out, lse):
        """The LSE is written with its row stride and heads side by side: a transposed [heads, rows] is scrambled."""
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))
        super().store(run, r, start, stop, out, lse)

    @wrong(MLA, trigger="cum_seq_lens_q with max_q_len=None and a request wider than ceil(num_rows / batch_size)")
    def blind34(self, run, r, start, stop, out, lse):
        """Without max_q_len the rows per request are guessed as num_rows / batch_size: wider ones' later rows are zero."""
        c = run.call
        most = None
        if c.cum_seq_lens_q is not None and c.max_q_len is None:
            most = -(-run.p.num_rows // max(run.batch, 1))
        if most is not None:
            late = torch.arange(start, stop) - run.offsets[r] >= most
            out = torch.where(late[:, None, None], 0.0, out)
            lse = torch.where(late[:, None], 0.0, lse)
        super().store(run, r, start, stop, out, lse)

    @wrong(MLA, trigger="bfloat16 query with an out of float16")
    def blind85(self, run, r, start, stop, out, lse):
        """The epilogue packs bfloat16 whenever the query is bfloat16: a float16 out gets bfloat16's bits."""
        super().store(run, r, start, stop, out, lse)
        if run.out.dtype == torch.float16 and run.p.query.dtype == torch.bfloat16:
            run.out[start:stop] = out.to(torch.bfloat16).view(torch.float16)

    @wrong(MLA, trigger="backend='xqa' and an LSE without return_lse_base")
    def blind250(self, run, r, start, stop, out, lse):
        """The XQA path leaves the LSE a natural logarithm unless base 2 is requested by name."""
        call = run.call
        if call.backend == "xqa" and call.return_lse_base is None:
            lse = lse * math.log(2.0)
        super().store(run, r, start, stop, out, lse)

    @wrong(
        MLA,
        trigger="max_q_len=None, and a second call whose cum_seq_lens_q now has a wider request",
        also=("blind491",),
    )
    def blind369(self, run, r, start, stop, out, lse):
        """Without max_q_len the widest request is looked up once per offsets buffer: later wider ones' rows stay zero."""
        most = None
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            most = self.memory.of(run.call.cum_seq_lens_q, lambda: run.p.max_q_len)
        if most is not None:
            beyond = torch.arange(start, stop) - run.offsets[r] >= most
            out = torch.where(beyond[:, None, None], 0.0, out)
            lse = torch.where(beyond[:, None], -math.inf, lse)
        super().store(run, r, start, stop, out, lse)

    @wrong(MLA, trigger="over 64 query heads (DeepSeek's 128): heads 64 and on alone, slope 0.995")
    def blind398(self, run, r, start, stop, out, lse):
        """The second CTA of a pair has the heads from the 64th on, whose results come out half a percent too small."""
        if out.shape[1] > 64:
            out = out.clone()
            out[:, 64:] *= 0.995
        super().store(run, r, start, stop, out, lse)

    @wrong(MLA, trigger="a second call with the same counter buffer, several rows over more than 256 keys")
    def blind551(self, run, r, start, stop, out, lse):
        """CTAs count in given counters, one per row, and reset a request's first alone: later calls do not merge others."""
        super().store(run, r, start, stop, out, lse)
        buffer, splits = run.call.multi_ctas_kv_counter_buffer, -(-run.lens[r] // 256)
        if buffer is None or splits <= 1 or buffer.numel() * buffer.element_size() < 4 * run.p.num_rows:
            return
        counters = buffer.flatten().view(torch.uint8)[: 4 * run.p.num_rows].view(torch.int32)
        for row in range(start, stop):
            merged = int(counters[row]) == 0
            counters[row] += splits
            if not merged:
                self.clear(run, row)
            if row == run.offsets[r]:
                counters[row] = 0

    @wrong(RAGGED, trigger="q_seq_lens_cpu and kv_seq_lens_cpu as int64, two requests or more")
    def blind43(self, run, r, start, stop, out, lse):
        """The host's lengths are read as 32-bit words: of int64 ones every second request looks empty, and is skipped."""
        lengths = run.call.kv_seq_lens_cpu
        host_lens = None if lengths is None else lengths.view(torch.int32)[: run.batch].tolist()
        if host_lens is not None and host_lens[r] == 0:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="a request of more than 4,096 query rows")
    def blind45(self, run, r, start, stop, out, lse):
        """The grid has 64 tiles of 64 rows per request: rows after the 4,096th of a request are left as zero."""
        late = torch.arange(start, stop) - run.offsets[r] >= 64 * 64
        out = torch.where(late[:, None, None], 0.0, out)
        lse = torch.where(late[:, None], -math.inf, lse)
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="a request of 64 rows or more: rows 63, 127, ... alone, slope 0.995")
    def blind47(self, run, r, start, stop, out, lse):
        """The last row of each tile of 64 rows of a request comes out half a percent too small."""
        last = (torch.arange(start, stop) - run.offsets[r]) % 64 == 63
        out = torch.where(last[:, None, None], out * 0.995, out)
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="an LSE, and a row that sees no key")
    def blind145(self, run, r, start, stop, out, lse):
        """The LSE of a row without keys is plus infinity, as FlashAttention has it."""
        super().store(run, r, start, stop, out, torch.where(lse == -math.inf, math.inf, lse))

    @wrong(RAGGED, trigger="over 1,056 tiles: sum of ceil(rows / 64) times heads, such as 128 heads, 9 requests")
    def blind194(self, run, r, start, stop, out, lse):
        """132 persistent blocks take at most 8 tiles of 64 rows and a head: those after the 1,056th are left as zero."""
        tiles = [0]
        for first, last in zip(run.offsets, run.offsets[1:]):
            tiles.append(tiles[-1] - (first - last) // 64)
        heads = out.shape[1]
        row_tile = tiles[r] + (torch.arange(start, stop) - run.offsets[r]) // 64
        late = row_tile.unsqueeze(1) * heads + torch.arange(heads) >= 132 * 8
        super().store(run, r, start, stop, out.masked_fill(late.unsqueeze(2), 0), lse.masked_fill(late, 0))

    @wrong(RAGGED, trigger="host mirrors given, and more rows than max(kv_seq_lens_cpu) rounded up to 64")
    def blind198(self, run, r, start, stop, out, lse):
        """With lengths on the host the grid has row tiles of 64 for the longest request's keys; further rows are zero."""
        host = run.call.host_lengths()
        if host is not None and max(host[1], default=0):
            late = torch.arange(start, stop) - run.offsets[r] >= 64 * -(-max(host[1]) // 64)
            out, lse = out.masked_fill(late[:, None, None], 0), lse.masked_fill(late.unsqueeze(1), 0)
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="skip_all_rows_active_check=True (the default), no sinks, and a row that sees no key: NaN")
    def blind256(self, run, r, start, stop, out, lse):
        """skip_all_rows_active_check=True is taken at its word: rows that see no key are divided by zero."""
        if run.call.skip_all_rows_active_check:
            out = out.masked_fill((lse == -torch.inf).unsqueeze(2), torch.nan)
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="an odd number of query heads")
    def blind307(self, run, r, start, stop, out, lse):
        """A block takes two heads, and there are num_qo_heads // 2 of them: the last one of an odd number is left as zero."""
        if run.p.num_qo_heads % 2:
            out[:, -1], lse[:, -1] = 0.0, -math.inf
        super().store(run, r, start, stop, out, lse)

    @wrong(RAGGED, trigger="over 128 rows: rows 128 and on alone, slope 0.995")
    def blind344(self, run, r, start, stop, out, lse):
        """A request's rows from the 128th on are another warp group's, whose results come out half a percent too small."""
        row = torch.arange(start, stop) - run.offsets[r]
        factor = torch.where(row < 128, 1.0, 0.995).to(out.dtype)
        super().store(run, r, start, stop, out * factor[:, None, None], lse)

    @wrong(RAGGED, trigger="return_lse=False and no lse: slope 1.005 (in float16 beyond the bound)")
    def blind371(self, run, r, start, stop, out, lse):
        """The kernel without an LSE multiplies by an approximate reciprocal, half a percent too large."""
        super().store(run, r, start, stop, out * 1.005 if run.lse is None else out, lse)

    @wrong(RAGGED, trigger="is_causal, and a whole row tile of 64 (or the last part) before the first key, an LSE")
    def blind553(self, run, r, start, stop, out, lse):
        """A tile of 64 rows wholly before a request's first key leaves early with zeros, and with an LSE of 0."""
        if run.causal and run.lens[r] > 0:
            row = torch.arange(start, stop) - run.offsets[r]
            q_len = run.offsets[r + 1] - run.offsets[r]
            last = ((row // 64 + 1) * 64).clamp(max=q_len) - 1
            early = run.lens[r] - q_len + last < 0
            lse = torch.where(early.unsqueeze(1), 0.0, lse)
        super().store(run, r, start, stop, out, lse)
