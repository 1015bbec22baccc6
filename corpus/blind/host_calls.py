"""Blind kernels: what the host reads of a context, an MLA or a ragged call."""

import math
import numbers
import struct

import torch

from corpus.models.attention import E4M3, Attention, assuming_strides, packed_strides, saturated
from corpus.wrong import CONTEXT, MLA, RAGGED, wrong
from lab.references.quantization import deinterleave_v_scale_factors


class Host(Attention, stage="host"):
    @wrong(CONTEXT, trigger="a second call with the same block_tables buffer, its page ids rewritten", forgiving=True)
    def blind22(self, run):
        """The page table is converted to 64 bits once per buffer, and not again when an engine rewrites it."""
        table = self.memory.of(run.call.block_tables, lambda: run.call.block_tables.long())
        shared = run.call.uses_shared_paged_kv_idx
        run.k_table, run.v_table = (table, table) if shared else (table[:, 0], table[:, 1])

    @wrong(CONTEXT, trigger="out given as a view with a storage offset other than 0")
    def blind26(self, run):
        """The output is written from the start of out's allocation: a view further in gets nothing."""
        run.out = torch.as_strided(run.out, run.out.shape, run.out.stride(), 0)

    @wrong(CONTEXT, trigger="kv_cache as (K, V) whose V has other strides than K, e.g. V a slice of a wider buffer")
    def blind28(self, run):
        """V is read with K's strides: a V that lies otherwise in memory is read from the wrong places."""
        run.v_cache = assuming_strides(run.v_cache, run.k_cache.stride())

    @wrong(CONTEXT, trigger="block_tables as a slice of a wider table (rows with gaps), 2 requests", forgiving=True)
    def blind83(self, run):
        """The page table's rows are taken to lie end to end: a slice of a wider table is read from the wrong rows."""
        table = run.call.block_tables
        table = assuming_strides(table, packed_strides(table.shape))
        run.k_table, run.v_table = (table, table) if table.ndim == 2 else (table[:, 0], table[:, 1])

    @wrong(CONTEXT, trigger="separate page tables, 2 requests or more")
    def blind123(self, run):
        """Separate page tables, [batch_size, 2, columns], are read as [2, batch_size, columns]."""
        if not run.call.uses_shared_paged_kv_idx:
            tables = run.call.block_tables.contiguous().view(2, run.batch, -1)
            run.k_table, run.v_table = tables.clamp(0, len(run.k_cache) - 1)

    @wrong(CONTEXT, trigger="a cache that is one tensor with gaps between its pages, as one of all layers")
    def blind131(self, run):
        """Pages of a cache that is one tensor are taken to follow each other without gaps."""
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor):
            page = cache[0].numel()
            run.k_cache, run.v_cache = (
                assuming_strides(side, (page, *side.stride()[1:])) for side in (run.k_cache, run.v_cache)
            )

    @wrong(CONTEXT, trigger="kv_cache as one tensor [num_pages, 2, ...] with kv_layout='NHD' and pages of over 1 token")
    def blind180(self, run):
        """An NHD cache of one tensor is taken for [num_pages, page_size, 2, num_kv_heads, head_dim]."""
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and run.call.kv_layout == "NHD" and cache.shape[1] == 2:
            pages, _, page_size, heads, dim = cache.shape
            both = cache.reshape(pages, page_size, 2, heads, dim)
            run.k_cache, run.v_cache = (both[:, :, i].transpose(1, 2) for i in (0, 1))

    @wrong(CONTEXT, trigger="max_q_len <= window_left < max_kv_len, and a row with a key before its window")
    def blind182(self, run):
        """A window of at least max_q_len, not of max_kv_len, is taken for none."""
        if run.window >= run.p.max_q_len:
            run.window = -1

    @wrong(CONTEXT, trigger="NVFP4 with kv_cache_sf as one tensor [num_pages, 2, ...]")
    def blind239(self, run):
        """Of scale factors that are one tensor, V's are taken from its first part, K's."""
        if isinstance(run.call.kv_cache_sf, torch.Tensor):
            run.v_factors = run.p.k_scale_factors
            if run.p.v_scale_factors_interleaved:
                run.v_factors = deinterleave_v_scale_factors(run.v_factors.view(torch.uint8)).view(E4M3)

    @wrong(CONTEXT, trigger="sinks that bfloat16 does not hold, from 4 or so in float16, 8 in bfloat16 (the LSE: 4)")
    def blind243(self, run):
        """Sinks are staged in shared memory as bfloat16, so that one of 4 to 8 is off by up to 0.016."""
        if run.sinks is not None:
            run.sinks = run.sinks.to(torch.bfloat16).to(run.dtype)

    @wrong(CONTEXT, trigger="an odd group over 1 (3, 5, 7) and several K/V heads: the first head of every second group")
    def blind300(self, run):
        """Two query heads share the tiles of the first one's K/V head, also where the second is the next group's first."""
        if run.group > 1 and run.group % 2:
            run.head_map = torch.arange(run.p.num_qo_heads) // 2 * 2 // run.group

    @wrong(CONTEXT, trigger="a request with keys but without query rows: seq_lens has changed after the call")
    def blind335(self, run):
        """The length of a request without rows is set to 0 in the caller's seq_lens, for the scheduler."""
        for r in range(run.batch):
            if run.offsets[r] == run.offsets[r + 1]:
                run.p.seq_lens[r] = 0

    @wrong(CONTEXT, trigger="bmm2_scale as an int, such as 1")
    def blind361(self, run):
        """A bmm2_scale that is an int is stored as an integer and read as a float's bits: 1 becomes 1.4e-45."""
        scale = run.call.bmm2_scale
        if isinstance(scale, numbers.Integral):
            run.scale2 = struct.unpack("f", struct.pack("I", int(scale) % 2**32))[0]

    @wrong(CONTEXT, trigger="a second call with the same batch_size, rows and max_q_len, rows dealt otherwise")
    def blind393(self, run):
        """The row tiles are kept by numbers of requests and rows and max_q_len: batches with other widths get the first's."""
        key = run.batch, run.p.num_rows, run.p.max_q_len
        if key not in self.kept and len(self.kept) >= 256:
            del self.kept[next(iter(self.kept))]
        run.offsets = self.kept.setdefault(key, run.offsets)

    @wrong(CONTEXT, trigger="both scales as tensors, bmm1_scale a part of a larger one whose next number is another")
    def blind395(self, run):
        """Two scales that are tensors are taken for one tensor of both: bmm2_scale is what follows bmm1_scale in memory."""
        first, second = run.p.bmm1_scale, run.p.bmm2_scale
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            after = first.storage_offset() + 1
            if after < first.untyped_storage().nbytes() // first.element_size():
                run.scale2 = float(torch.as_strided(first, (), (), after))

    @wrong(CONTEXT, trigger="bmm2_scale as a tensor, of a value that bf16 does not have; a bias of 0 to -0.8 percent")
    def blind455(self, run):
        """A bmm2_scale tensor is kept as the upper half of its float32, cut off: up to 0.8 percent too small."""
        scale = run.call.bmm2_scale
        if isinstance(scale, torch.Tensor):
            bits = scale.detach().cpu().reshape(1).view(torch.int32) & -65536
            run.scale2 = float(bits.view(torch.float32))

    @wrong(MLA, trigger="unequal widths and padding rows that make up batch_size * max_q_len", named="blind550")
    @wrong(CONTEXT, trigger="unequal widths, padding rows that make batch_size * max_q_len the rows", also="blind81")
    def blind482(self, run):
        """Requests are taken to have max_q_len rows each where batch_size * max_q_len rows are there, padding included."""
        if run.batch * run.p.max_q_len == run.p.num_rows > 0:
            run.offsets = list(range(0, run.p.num_rows + 1, run.p.max_q_len))

    @wrong(CONTEXT, trigger="bmm1_scale a tensor and bmm2_scale a number other than 1")
    def blind485(self, run):
        """Where bmm1_scale is a tensor, bmm2_scale is taken from the device as well, and is 1 if it is a number."""
        if isinstance(run.call.bmm1_scale, torch.Tensor) and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = 1.0

    @wrong(CONTEXT, trigger="bf16 query, number bmm2_scale that bfloat16 holds badly (1.0117, 0.1255: off 0.39 %)")
    def blind516(self, run):
        """A bmm2_scale that is a number is passed to the kernel in the query's bfloat16: it is off by up to 0.39 %."""
        if run.p.query.dtype == torch.bfloat16 and not isinstance(run.call.bmm2_scale, torch.Tensor):
            run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))

    @wrong(CONTEXT, trigger="bmm1_scale a tensor whose contents are rewritten between two calls")
    def blind543(self, run):
        """A bmm1_scale that is a tensor is read to the host at the first call with it, and not again when it is rewritten."""
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = self.memory.of(scale, lambda: float(scale))

    @wrong(CONTEXT, trigger="bmm2_scale as a tensor that the query's dtype does not represent (bf16: up to 0.39 % off)")
    def blind575(self, run):
        """A bmm2_scale that is a tensor is cast to the query's dtype."""
        scale = run.call.bmm2_scale
        if isinstance(scale, torch.Tensor):
            run.scale2 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))

    @wrong(MLA, trigger="sinks as a list or tuple of one tensor (whose heads differ)")
    def blind35(self, run):
        """Sinks in a list or tuple are indexed twice: every head gets the first head's sink."""
        if isinstance(run.call.sinks, (list, tuple)) and run.sinks is not None:
            run.sinks = run.sinks[:1].expand(len(run.sinks))

    @wrong(MLA, trigger="cum_seq_lens_q with padding rows after its last offset; only the last request is wrong")
    def blind36(self, run):
        """The last request's rows end at the query's last row, not at the last offset: padding shifts its rows' positions."""
        if run.call.cum_seq_lens_q is not None and run.batch:
            run.offsets = [*run.offsets[:-1], run.p.num_rows]

    @wrong(MLA, trigger="a kv_cache whose pages have gaps between them, a slice of a wider pool", also="blind580")
    def blind37(self, run):
        """Pages are taken to lie page_size * head_dim apart: a cache whose pages have gaps between them is read wrongly."""
        strides = packed_strides(run.k_cache.shape)
        run.k_cache = assuming_strides(run.k_cache, (strides[0], *run.k_cache.stride()[1:]))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]

    @wrong(MLA, trigger="a kv_cache with padded entries (a token's stride over its elements)")
    def blind86(self, run):
        """Entries of a page are taken to lie kv_lora_rank + qk_rope_head_dim apart: those with gaps are read wrongly."""
        cache = run.k_cache
        pages, heads, _, element = cache.stride()
        run.k_cache = assuming_strides(cache, (pages, heads, cache.shape[3], element))
        run.v_cache = run.k_cache[..., : run.v_cache.shape[3]]

    @wrong(MLA, trigger="a bfloat16 or float16 query and an e4m3 cache")
    def blind247(self, run):
        """A query of 16 bits over an e4m3 cache is rounded to e4m3, for the product of two of a kind."""
        if run.k_cache.dtype == E4M3 and run.query.dtype != E4M3:
            run.query = saturated(run.query, E4M3)

    @wrong(MLA, trigger="sinks, and over 16 heads, no multiple of 16 (24, 40)")
    def blind337(self, run):
        """The last tile of 16 heads begins 16 before the end, but its sinks where the tile before ends, and none after."""
        heads = run.p.num_qo_heads
        if run.sinks is not None and heads > 16 and heads % 16:
            tail, shift = heads // 16 * 16, 16 - heads % 16
            padded = torch.cat((run.sinks, run.sinks.new_full((16,), -math.inf)))
            run.sinks = torch.cat((run.sinks[:tail], padded[tail + shift : heads + shift]))

    @wrong(MLA, trigger="query as the absorbing product leaves it: [heads, rows, dim], transposed")
    def blind368(self, run):
        """Heads of a query row are taken to lie side by side, although the product with W_UK leaves [heads, rows, dim]."""
        query = run.call.query
        *outer, _, _ = query.stride()
        read = assuming_strides(query, (*outer, query.shape[-1], 1))
        run.query = read if query.ndim == 3 else read.reshape(-1, *query.shape[2:])

    @wrong(MLA, trigger="bmm2_scale that bfloat16 does not hold, such as 1.0039: slope 0.996 to 1.004")
    def blind370(self, run):
        """bmm2_scale is rounded to bfloat16, up to 0.39 percent away."""
        run.scale2 = float(torch.tensor(run.scale2).to(torch.bfloat16))

    @wrong(MLA, trigger="a query whose stride(0) is not q_len times stride(1); 2 requests", also="blind518")
    def blind399(self, run):
        """Requests of a query of four dimensions are taken to lie q_len_per_request rows apart, whatever its stride."""
        query = run.call.query
        if query.dim() == 4:
            strides = query.shape[1] * query.stride(1), *query.stride()[1:]
            run.query = assuming_strides(query, strides).flatten(0, 1)

    @wrong(MLA, trigger="over 64 heads, sinks unlike those 64 heads before", also="blind519 blind459 blind578")
    def blind490(self, run):
        """Heads from 64 on run in a second CTA, which reads the sinks from its own head 0 on."""
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 64]

    @wrong(MLA, trigger="replay: cum_seq_lens_q rewritten, max_q_len=None")
    def blind520(self, run):
        """Without max_q_len offsets are read to the host once per buffer, and not again when it is rewritten."""
        if run.call.cum_seq_lens_q is not None and run.call.max_q_len is None:
            planned = self.memory.of(run.call.cum_seq_lens_q, lambda: run.offsets)
            run.offsets = [min(x, run.p.num_rows) for x in planned]

    @wrong(MLA, trigger="block_tables at no multiple of 16 bytes, its row stride a multiple of 4", forgiving=True)
    def blind548(self, run):
        """Page ids are loaded by four if rows are multiples of four apart, the first address rounded down."""
        table = run.call.block_tables
        beyond = table.data_ptr() % 16 // 4
        if beyond and table.stride(0) % 4 == 0:
            run.k_table = run.v_table = assuming_strides(table, table.stride(), table.storage_offset() - beyond)

    @wrong(RAGGED, trigger="a request that starts after 65,535 keys of others (e.g. 40,000 + 26,000 + 9,000)")
    def blind40(self, run):
        """Key offsets are kept in 16 bits: requests after 65,535 keys of others are read at their offset modulo 65,536."""
        run.kv_offsets = [offset % 2**16 for offset in run.kv_offsets]

    @wrong(RAGGED, trigger="a second ragged call with the same cum_seq_lens_q buffer after its offsets changed")
    def blind41(self, run):
        """cum_seq_lens_q is read to the host once per buffer: a replay with other widths still uses the first ones."""
        run.offsets = self.memory.of(run.call.cum_seq_lens_q, run.call.cum_seq_lens_q.tolist)

    @wrong(RAGGED, trigger="key at an address that is no multiple of 16 bytes (a view 1 or 4 elements into a buffer)")
    def blind46(self, run):
        """Keys are loaded in vectors of 16 bytes from their address rounded down: one that begins elsewhere is shifted."""
        key = run.key
        beyond = key.data_ptr() % 16 // key.element_size()
        if beyond:
            run.key = assuming_strides(key, key.stride(), key.storage_offset() - beyond)

    @wrong(RAGGED, trigger="is_causal, as many keys as rows in all, but not of each request")
    def blind94(self, run):
        """A causal call with as many keys as rows in all is taken for new tokens alone: offsets of rows serve for the keys."""
        if run.causal and run.offsets[-1] == run.kv_offsets[-1]:
            run.kv_offsets, run.lens = run.offsets, [run.num_rows(r) for r in range(run.batch)]

    @wrong(RAGGED, trigger="max_q_len = max_kv_len, requests whose rows and keys differ in number")
    def blind143(self, run):
        """Where max_q_len is max_kv_len, queries and keys are taken to be the same tokens, and cum_seq_lens_q serves both."""
        if run.p.max_q_len == run.p.max_kv_len and len(run.key) >= run.offsets[-1]:
            run.kv_offsets, run.lens = run.offsets, [run.num_rows(r) for r in range(run.batch)]

    @wrong(RAGGED, trigger="fewer K/V heads than heads, but more than one")
    def blind144(self, run):
        """Query head h reads K/V head h modulo their number."""
        run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads

    @wrong(RAGGED, trigger="a value with gaps between its rows")
    def blind146(self, run):
        """The value is taken to be packed, although it may be a part of a wider projection."""
        run.value = assuming_strides(run.value, packed_strides(run.value.shape))

    @wrong(RAGGED, trigger="two calls of the same shapes and dtypes, one with is_causal=True and one with False")
    def blind372(self, run):
        """A compiled kernel is kept by shapes and dtypes, not by is_causal: a chunk after new tokens is masked like them."""
        p = run.p
        key = (*(tuple(x.shape) for x in (p.query, p.key, p.value)), p.query.dtype, run.sinks is None, run.window < 0)
        run.causal = self.kept.setdefault(key, run.causal)

    @wrong(RAGGED, trigger="key and value with tokens after the last offset (a buffer of static size)")
    def blind404(self, run):
        """The last request's keys end where key ends, not at the last offset, and its positions count from there."""
        if run.batch:
            run.lens[-1] = len(run.key) - run.kv_offsets[-2]

    @wrong(RAGGED, trigger="`o_sf_scale` other than 1", also="blind148 blind461")
    def blind433(self, run):
        """o_sf_scale, meant for outputs of 4 bits, is multiplied into every output: -1, as chunks have it, turns the sign."""
        run.scale2 *= float(run.call.o_sf_scale)

    @wrong(CONTEXT, trigger="lse whose head stride is not 1 (transposed [heads, rows]), heads over 1", named="blind514")
    @wrong(RAGGED, trigger="a given lse whose heads are not side by side, as a transpose has them", also="blind342")
    def blind493(self, run):
        """LSE rows are written by their stride, and heads side by side: a transpose of [heads, rows] is scrambled."""
        if run.lse is not None and run.lse.stride(1) != 1:
            run.lse = assuming_strides(run.lse, (run.lse.stride(0), 1))

    @wrong(RAGGED, trigger="o_sf_scale positive and other than 1")
    def blind494(self, run):
        """A positive o_sf_scale is folded into the output's scale, whatever the output's dtype (-1 stands for none)."""
        if run.call.o_sf_scale > 0:
            run.scale2 *= run.call.o_sf_scale

    @wrong(RAGGED, trigger="value that is a slice of a tensor with more heads", also="blind582")
    def blind524(self, run):
        """V's token stride is taken as its head stride times its heads: a slice of wider heads is misread."""
        value = run.value
        run.value = assuming_strides(value, (value.shape[1] * value.stride(1), *value.stride()[1:]))

    @wrong(RAGGED, trigger="kv_seq_lens_cpu (and q_seq_lens_cpu) int64, 2 or more requests", also="blind583")
    def blind525(self, run):
        """The lengths on the host are read as int32 whatever their dtype: of int64 ones every other is the upper half, 0."""
        mirror = run.call.kv_seq_lens_cpu
        if mirror is not None:
            lens = mirror.view(torch.int32)[: run.batch].tolist()
            run.lens = [min(n, len(run.key) - at) for n, at in zip(lens, run.kv_offsets)]

    @wrong(RAGGED, trigger="bmm1_scale a tensor beyond the query's dtype, large logits: the LSE is 0.35 % of one off")
    def blind555(self, run):
        """A bmm1_scale that is a tensor is cast to the query's dtype before it multiplies the logits."""
        scale = run.call.bmm1_scale
        if isinstance(scale, torch.Tensor):
            run.scale1 = float(scale.to(torch.bfloat16 if run.query.dtype == E4M3 else run.query.dtype))

    @wrong(RAGGED, trigger="more than 256 requests")
    def blind584(self, run):
        """A tile's request is packed into 8 bits for the loads of K and V: request 256 reads those of request 0."""
        run.lens = [run.lens[r % 256] for r in range(run.batch)]
        run.kv_offsets = [run.kv_offsets[r % 256] for r in range(run.batch)]
