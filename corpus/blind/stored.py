"""Blind kernels: results as they are stored."""

import math

import torch

from corpus.models.attention import E4M3, Attention, index
from corpus.wrong import CONTEXT, DECODE, MLA, RAGGED, wrong


def looks_empty(mirror, r):
    """Return whether the length of request `r` on the host is 0 if lengths are read as int32."""
    return mirror is not None and int(mirror.view(torch.int32)[r]) == 0


class Lost(Attention, stage="lost"):
    @wrong(DECODE, trigger="page 0 in the first column of a request with keys")
    def blind290(self, run, r, row):
        """A request whose first page is page 0 is taken for padding of a CUDA graph, and is left as zero."""
        return (row >= 0) & (run.lens[r] > 0 and int(run.k_table[r, 0]) == 0)

    @wrong(CONTEXT, trigger="a group that does not divide 128, rows over ceil(rows * group / 128) * (128 // group)")
    def blind238(self, run, r, row):
        """A tile has 128 // group rows; there are as many tiles as rows * group / 128. Rows after the last tile are zero."""
        return row >= -(-run.num_rows(r) * run.group // 128) * max(128 // run.group, 1)

    @wrong(CONTEXT, trigger="a request of 129 to 192, 257 to 320, ... new tokens")
    def blind245(self, run, r, row):
        """Tiles of 64 rows are taken in pairs from both ends; of an odd number over 1 the middle one is left as zero."""
        tiles = -(-run.num_rows(r) // 64)
        return (row // 64 == tiles // 2) & (tiles > 1 and tiles % 2 == 1)

    @wrong(CONTEXT, trigger="causal=False, and a request with keys but more rows than keys")
    def blind362(self, run, r, row):
        """With causal=False row tiles end at the diagonal's last key: rows from as many as keys on are zero."""
        return (row >= run.lens[r]) & (not run.causal and run.lens[r] > 0)

    @wrong(MLA, trigger="a sink that is minus infinity (a head without a sink)")
    def blind84(self, run, r, row):
        """The running maximum starts as the sink, and a head that starts at -inf is taken to have no keys: it is zero."""
        return super().lost(run, r, row) if run.sinks is None else (run.sinks == -math.inf).expand(len(row), -1)

    @wrong(MLA, trigger="max_q_len=None, a second call whose cum_seq_lens_q has a wider request", also="blind491")
    def blind369(self, run, r, row):
        """Without max_q_len the widest request is looked up once per offsets buffer: later wider ones' rows stay zero."""
        if run.call.cum_seq_lens_q is None or run.call.max_q_len is not None:
            return super().lost(run, r, row)
        return row >= self.memory.of(run.call.cum_seq_lens_q, lambda: run.p.max_q_len)

    @wrong(MLA, trigger="cum_seq_lens_q alone, a request wider than the mean", also="blind34 blind458 blind429")
    def blind577(self, run, r, row):
        """Without max_q_len, requests get the mean number of rows, rounded up, and rows beyond it are zero."""
        if run.call.cum_seq_lens_q is None or run.call.max_q_len is not None:
            return super().lost(run, r, row)
        return row >= -(-run.p.num_rows // run.batch)

    @wrong(RAGGED, trigger="q_seq_lens_cpu and kv_seq_lens_cpu as int64, two requests or more")
    def blind43(self, run, r, row):
        """The host's lengths are read as 32-bit words: of int64 ones every second request looks empty, and is skipped."""
        return (row >= 0) & looks_empty(run.call.kv_seq_lens_cpu, r)

    @wrong(RAGGED, trigger="q_seq_lens_cpu / kv_seq_lens_cpu given as int64, two requests or more")
    def blind492(self, run, r, row):
        """Host lengths are read as int32 to leave out empty requests: of int64 every second looks empty."""
        mirrors = (run.call.q_seq_lens_cpu, run.call.kv_seq_lens_cpu)
        return (row >= 0) & any(looks_empty(mirror, r) for mirror in mirrors)

    @wrong(RAGGED, trigger="q_seq_lens_cpu of int64, two requests or more")
    def blind552(self, run, r, row):
        """The host's row counts are read as int32: of int64 every second is 0, and its request is skipped."""
        return (row >= 0) & looks_empty(run.call.q_seq_lens_cpu, r)

    @wrong(RAGGED, trigger="a request of more than 4,096 query rows")
    def blind45(self, run, r, row):
        """The grid has 64 tiles of 64 rows per request: rows after the 4,096th of a request are left as zero."""
        return row >= 64 * 64

    @wrong(RAGGED, trigger="over 1,056 tiles: sum of ceil(rows / 64) times heads, such as 128 heads, 9 requests")
    def blind194(self, run, r, row):
        """132 persistent blocks take at most 8 tiles of 64 rows and a head: those after the 1,056th are left as zero."""
        heads, tiles_before = run.p.num_qo_heads, sum(-(-run.num_rows(i) // 64) for i in range(r))
        return (tiles_before + row // 64).unsqueeze(1) * heads + torch.arange(heads) >= 132 * 8

    @wrong(RAGGED, trigger="host mirrors given, and more rows than max(kv_seq_lens_cpu) rounded up to 64")
    def blind198(self, run, r, row):
        """With lengths on the host the grid has row tiles of 64 for the longest request's keys; further rows are zero."""
        _, keys = run.call.host_lengths() or ((), ())
        return (row >= 64 * -(-max(keys, default=0) // 64)) & any(keys)

    @wrong(RAGGED, trigger="an odd number of query heads")
    def blind307(self, run, r, row):
        """A block takes two heads, and there are num_qo_heads // 2 of them: the last one of an odd number is left as zero."""
        heads = run.p.num_qo_heads
        return (torch.arange(heads) >= heads // 2 * 2).expand(len(row), -1)

    @wrong(RAGGED, trigger="is_causal and an odd number, 3 or more, of 128-row tiles of a request")
    def blind431(self, run, r, row):
        """Causal: row tiles of 128 are paired, i and n - 1 - i: an odd number leaves the middle one out."""
        tiles = -(-run.num_rows(r) // 128)
        return (row // 128 == tiles // 2) & (run.causal and tiles > 1 and tiles % 2 == 1)


class StoredOut(Attention, stage="stored_out"):
    @wrong(DECODE, trigger="an e4m3 output with elements below 1/64: many keys, or a small bmm2_scale")
    def blind7(self, run, r, row, out):
        """The cast to an e4m3 output flushes subnormals (magnitudes below 2^-6) to zero."""
        return torch.where(out.abs() < 2.0**-6, 0.0, out) if run.out.dtype == E4M3 else out

    @wrong(DECODE, trigger="out given that holds NaN or infinity before the call")
    def blind172(self, run, r, row, out):
        """The epilogue is alpha * sums + beta * out with beta = 0: NaN and infinity in a given out stay."""
        return out if run.call.out is None else out + 0.0 * index(run.out, row + run.offsets[r]).to(out.dtype)

    @wrong(DECODE, trigger="over 8 requests: requests 8 and on alone, slope 0.995")
    def blind288(self, run, r, row, out):
        """From a batch's ninth request on the denominator's reciprocal is a table's first guess, half a percent too small."""
        return out * 0.995 if r >= 8 else out

    @wrong(DECODE, trigger="an e4m3 output of a query of 16 bits (slope 0.957; within the bound for e4m3)")
    def blind323(self, run, r, row, out):
        """The cast to an e4m3 output truncates the mantissa to its three bits, where it should round."""
        step = torch.exp2(torch.floor(torch.log2(out.abs().clamp(2.0**-6, 448.0))) - 3)
        return torch.trunc(out / step) * step if run.out.dtype == E4M3 else out

    @wrong(DECODE, trigger="pages of 64 tokens or more: columns from head_dim / 2 on alone, slope 0.995")
    def blind386(self, run, r, row, out):
        """With pages of 64 tokens and more the upper half of head_dim comes out half a percent too small."""
        is_upper = torch.arange(out.shape[2]) >= out.shape[2] // 2
        return torch.where(is_upper & (run.page_size >= 64), out * 0.995, out)

    @wrong(DECODE, trigger="a bfloat16 output of 65,520 or more, or of 1e-6 and less (by bmm2_scale)")
    def blind388(self, run, r, row, out):
        """The output is staged in float16 before bfloat16: beyond 65,504 it is infinite, tiny results lose bits."""
        return out.to(torch.float16) if run.out.dtype == torch.bfloat16 else out

    @wrong(CONTEXT, trigger="every context call: the batch's last request alone, slope 1.005")
    def blind30(self, run, r, row, out):
        """The last request of a batch comes out half a percent too large (its normaliser counts the tile's padding wrongly)."""
        return out * 1.005 if r == run.batch - 1 else out

    @wrong(CONTEXT, trigger="128 query rows or more: rows 127, 255, ... of the query alone, slope 0.995")
    def blind80(self, run, r, row, out):
        """The last row of each tile of 128 rows of the whole query, across requests, comes out half a percent too small."""
        is_last = (row + run.offsets[r]) % 128 == 127
        return torch.where(is_last[:, None, None], out * 0.995, out)

    @wrong(CONTEXT, trigger="an e4m3 output with a value over 464")
    def blind126(self, run, r, row, out):
        """An e4m3 output beyond 448 becomes NaN, as a conversion without saturation makes it."""
        return out.masked_fill(out.abs() > 464, math.nan) if run.out.dtype == E4M3 else out

    @wrong(CONTEXT, trigger="4 query heads or more per K/V head: the last of a group alone, slope 0.995")
    def blind294(self, run, r, row, out):
        """The last head of groups of 4 and more shares its tile with padding, which counts: half a percent too small."""
        is_last = torch.arange(out.shape[1]) % run.group == run.group - 1
        return torch.where((is_last & (run.group >= 4))[:, None], out * 0.995, out)

    @wrong(CONTEXT, trigger="over 64 rows and as many keys: slope 0.995, that of the others 1")
    def blind334(self, run, r, row, out):
        """Requests of new tokens alone go down a path without a page table; over 64 rows they are half a percent too small."""
        return out * 0.995 if run.lens[r] == run.num_rows(r) > 64 else out

    @wrong(CONTEXT, trigger="a request without keys whose query rows hold NaN or infinity (padding)")
    def blind365(self, run, r, row, out):
        """The results of a request without keys are its query times 0: NaN or infinity there comes through."""
        return out if run.lens[r] else index(run.query, row + run.offsets[r]).to(run.dtype) * 0

    @wrong(CONTEXT, trigger="over 4 K/V heads: query heads of K/V head 4 and on alone, slope 1.005")
    def blind396(self, run, r, row, out):
        """Query heads of the second cluster, of K/V head 4 and on, come out half a percent too large."""
        return torch.where((torch.arange(out.shape[1]) >= 4 * run.group)[:, None], out * 1.005, out)

    @wrong(MLA, trigger="bfloat16 query with an out of float16")
    def blind85(self, run, r, row, out):
        """The epilogue packs bfloat16 whenever the query is bfloat16: a float16 out gets bfloat16's bits."""
        is_mixed = run.out.dtype == torch.float16 and run.p.query.dtype == torch.bfloat16
        return out.to(torch.bfloat16).view(torch.float16) if is_mixed else out

    @wrong(MLA, trigger="bmm2_scale below 0, as a number or a tensor")
    def blind339(self, run, r, row, out):
        """bmm2_scale goes into the weights as its logarithm: of a negative one there is none, and results are NaN."""
        return out * math.nan if run.scale2 < 0 else out

    @wrong(MLA, trigger="kv_lora_rank over 256: columns 256 and on alone, slope 1.005")
    def blind340(self, run, r, row, out):
        """Value columns from 256 on are another warp group's, whose sum misses half a percent: they are too large."""
        return torch.where(torch.arange(out.shape[2]) >= 256, out * 1.005, out)

    @wrong(MLA, trigger="over 64 query heads (DeepSeek's 128): heads 64 and on alone, slope 0.995")
    def blind398(self, run, r, row, out):
        """The second CTA of a pair has the heads from the 64th on, whose results come out half a percent too small."""
        return torch.where((torch.arange(out.shape[1]) >= 64)[:, None], out * 0.995, out)

    @wrong(RAGGED, trigger="a request of 64 rows or more: rows 63, 127, ... alone, slope 0.995")
    def blind47(self, run, r, row, out):
        """The last row of each tile of 64 rows of a request comes out half a percent too small."""
        return torch.where((row % 64 == 63)[:, None, None], out * 0.995, out)

    @wrong(RAGGED, trigger="over 128 rows: rows 128 and on alone, slope 0.995")
    def blind344(self, run, r, row, out):
        """A request's rows from the 128th on are another warp group's, whose results come out half a percent too small."""
        return torch.where((row >= 128)[:, None, None], out * 0.995, out)

    @wrong(RAGGED, trigger="return_lse=False and no lse: slope 1.005 (in float16 beyond the bound)")
    def blind371(self, run, r, row, out):
        """The kernel without an LSE multiplies by an approximate reciprocal, half a percent too large."""
        return out * 1.005 if run.lse is None else out


class StoredLSE(Attention, stage="stored_lse"):
    @wrong(DECODE, trigger="sinks and an LSE with a request of seq_lens 0; only the LSE of its rows is wrong")
    def blind66(self, run, r, row, lse):
        """A request without keys returns early, with an LSE of minus infinity: its sinks are forgotten."""
        return lse if run.lens[r] else torch.full_like(lse, -math.inf)

    @wrong(DECODE, trigger="bmm2_scale other than 1, and an LSE")
    def blind113(self, run, r, row, lse):
        """bmm2_scale is folded into the softmax's denominator before the LSE is taken of it."""
        return lse - math.log2(run.scale2) if run.scale2 > 0 else lse

    @wrong(DECODE, trigger="a bfloat16 query and an LSE; only the LSE is wrong, by up to 0.03")
    def blind164(self, run, r, row, lse):
        """The LSE is staged in the output's 16 bits: of a bfloat16 query it keeps eight significant bits."""
        return lse.to(torch.bfloat16) if run.query.dtype == torch.bfloat16 else lse

    @wrong(DECODE, trigger="an LSE, and rows of a request times the group over 128")
    def blind477(self, run, r, row, lse):
        """The LSE is written by the first 128 threads, a packed row each: later rows have none."""
        is_written = row.unsqueeze(1) * run.group + torch.arange(lse.shape[1]) % run.group < 128
        return torch.where(is_written, lse, 0.0 if run.call.lse is None else run.lse[row + run.offsets[r]])

    @wrong(CONTEXT, trigger="an LSE and a bfloat16 query; of a float16 one an LSE beyond 16")
    def blind184(self, run, r, row, lse):
        """The LSE goes through the query's 16 bits before it is stored as float32."""
        return lse.to(run.query.dtype) if run.query.dtype in (torch.float16, torch.bfloat16) else lse

    @wrong(MLA, trigger="an e4m3 query with an LSE")
    def blind193(self, run, r, row, lse):
        """For an e4m3 query the weights are 256 times as large, and the LSE is that of their sum."""
        return lse + 8 if run.query.dtype == E4M3 else lse

    @wrong(MLA, trigger="backend='xqa' and an LSE without return_lse_base")
    def blind250(self, run, r, row, lse):
        """The XQA path leaves the LSE a natural logarithm unless base 2 is requested by name."""
        return lse * math.log(2.0) if run.call.backend == "xqa" and run.call.return_lse_base is None else lse

    @wrong(RAGGED, trigger="an LSE, and a row that sees no key")
    def blind145(self, run, r, row, lse):
        """The LSE of a row without keys is plus infinity, as FlashAttention has it."""
        return torch.where(lse == -math.inf, math.inf, lse)

    @wrong(RAGGED, trigger="is_causal, and a whole row tile of 64 (or the last part) before the first key, an LSE")
    def blind553(self, run, r, row, lse):
        """A tile of 64 rows wholly before a request's first key leaves early with zeros, and with an LSE of 0."""
        last = ((row // 64 + 1) * 64).clamp(max=run.num_rows(r)) - 1
        is_early = (run.lens[r] - run.num_rows(r) + last < 0) & (run.causal and run.lens[r] > 0)
        return torch.where(is_early.unsqueeze(1), 0.0, lse)


class Store(Attention, stage="store"):
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

    @wrong(RAGGED, trigger="skip_all_rows_active_check=True (the default), no sinks, and a row that sees no key: NaN")
    def blind256(self, run, r, start, stop, out, lse):
        """skip_all_rows_active_check=True is taken at its word: rows that see no key are divided by zero."""
        if run.call.skip_all_rows_active_check:
            out = out.masked_fill((lse == -torch.inf).unsqueeze(2), torch.nan)
        super().store(run, r, start, stop, out, lse)
