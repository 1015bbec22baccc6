"""Blind kernels: what the host reads of a decode call."""

import math

import torch

from corpus.models.attention import E4M3, Attention, assuming_strides, packed_strides
from corpus.wrong import CONTEXT, DECODE, wrong
from lab.references.quantization import deinterleave_v_scale_factors


class Host(Attention, stage="host"):
    @wrong(DECODE, trigger="a second call with the same seq_lens buffer, its lengths grown", forgiving=True)
    def blind4(self, run):
        """The lengths are read to the host once for a seq_lens buffer (a plan), and not again when the buffer is rewritten."""
        run.lens = self.memory.of(run.call.seq_lens, run.call.seq_lens.tolist)

    @wrong(DECODE, trigger="a second call with the same tensor of bmm1_scale, its log2 or bmm2_scale, rewritten")
    def blind5(self, run):
        """A scale that is a tensor is read to the host once per buffer: later contents are ignored."""
        c = run.call
        if c.bmm1_scale_log2 is not None:
            run.scale1 = self.memory.of(c.bmm1_scale_log2, lambda: float(c.bmm1_scale_log2) * math.log(2.0))
        elif isinstance(c.bmm1_scale, torch.Tensor):
            run.scale1 = self.memory.of(c.bmm1_scale, lambda: float(c.bmm1_scale))
        if isinstance(c.bmm2_scale, torch.Tensor):
            run.scale2 = self.memory.of(c.bmm2_scale, lambda: float(c.bmm2_scale))

    @wrong(DECODE, trigger="batch over 128, num_kv_heads > 1 and a group > 1")
    def blind9(self, run):
        """The variant for batches over 128 takes K/V head h % num_kv_heads for query head h, not h // group."""
        if run.batch > 128 and run.group > 1 and run.num_kv_heads > 1:
            run.head_map = torch.arange(run.p.num_qo_heads) % run.num_kv_heads

    @wrong(DECODE, trigger="bmm1_scale_log2 together with a tensor bmm1_scale of another value", also="blind510")
    def blind10(self, run):
        """bmm1_scale wins over bmm1_scale_log2 when both are tensors."""
        if isinstance(run.call.bmm1_scale, torch.Tensor):
            run.scale1 = float(run.call.bmm1_scale)

    @wrong(DECODE, trigger="mask, sinks and 0 <= window_left < max_seq_len in one call (any two are right)")
    def blind11(self, run):
        """The template for mask and sinks together was made without a window: with all three, the window is not applied."""
        if run.shown is not None and run.sinks is not None:
            run.window = -1

    @wrong(DECODE, trigger="bmm2_scale a float32 tensor of 0 dimensions (or of two or more: not touched), other than 1")
    def blind14(self, run):
        """A bmm2_scale tensor is passed by pointer only with one dimension: one without dimensions leaves the default, 1."""
        if isinstance(run.call.bmm2_scale, torch.Tensor) and run.call.bmm2_scale.ndim == 0:
            run.scale2 = 1.0

    @wrong(DECODE, trigger="query whose rows or heads are strided, e.g. a slice of a fused QKV tensor")
    def blind17(self, run):
        """Rows of the query are taken to lie end to end: a strided query (of a fused QKV) is read from the wrong places."""
        run.query = assuming_strides(run.query, packed_strides(run.query.shape))

    @wrong(DECODE, trigger="a group that is no power of two (3, 5, 6, 7) with num_kv_heads > 1")
    def blind18(self, run):
        """The K/V head of a query head is h >> log2(group), rounded up: groups that are no power of two read other heads."""
        if run.group & (run.group - 1):
            shift = (run.group - 1).bit_length()
            run.head_map = torch.arange(run.p.num_qo_heads) >> shift

    @wrong(DECODE, trigger="a query of 16 bits or more and a bmm1_scale other than 1: the query has changed")
    def blind63(self, run):
        """The query is multiplied by bmm1_scale in the caller's memory: the call is right, a second one on it is not."""
        if run.query.dtype != E4M3:
            run.query.mul_(run.scale1)
            run.scale1 = 1.0

    @wrong(DECODE, trigger="a given lse that is not contiguous (columns of a wider buffer, or transposed)")
    def blind65(self, run):
        """A given lse is written as if its rows lay end to end: of a strided one the values go to the wrong places."""
        if run.lse is not None:
            run.lse = assuming_strides(run.lse, packed_strides(run.lse.shape))

    @wrong(DECODE, trigger="NVFP4 kv_cache with kv_layout='NHD', and more than one K/V head and token of a page")
    def blind68(self, run):
        """V's NVFP4 scale factors are always addressed as HND: with NHD the factors of other tokens and heads are taken."""
        factors = run.p.v_scale_factors
        if factors is not None and run.call.kv_layout == "NHD":
            as_stored = factors.view(torch.uint8).transpose(1, 2)  # [pages, page_size, heads, factors]
            taken = as_stored.reshape(factors.shape)
            if run.p.v_scale_factors_interleaved:
                taken = deinterleave_v_scale_factors(taken)
            run.v_factors = taken.view(E4M3)

    @wrong(DECODE, trigger="kv_layout='NHD' with a page_size equal to num_kv_heads")
    def blind69(self, run):
        """The layout follows from the cache's shape, not from kv_layout: if page_size is num_kv_heads, NHD is read as HND."""
        alike = run.page_size == run.num_kv_heads and run.p.k_scale_factors is None
        if run.call.kv_layout == "NHD" and alike:
            run.k_cache, run.v_cache = run.k_cache.transpose(1, 2), run.v_cache.transpose(1, 2)

    @wrong(DECODE, trigger="bmm1_scale the number 0 (without bmm1_scale_log2): all visible keys have the same weight")
    def blind72(self, run):
        """The wrapper writes `bmm1_scale or head_dim ** -0.5`: a scale of 0 becomes the default one."""
        if run.scale1 == 0 and not isinstance(run.p.bmm1_scale, torch.Tensor):
            run.scale1 = run.p.head_dim**-0.5

    @wrong(DECODE, trigger="window_left=0")
    def blind73(self, run):
        """The window is on if window_left > 0: with 0, the row's own key alone, every key is seen."""
        if run.window == 0:
            run.window = -1

    @wrong(DECODE, trigger="a last page that is not full and holds anything but zeros after the end: it changes")
    def blind163(self, run):
        """K and V after a request's last token are set to zero in its last page, in the caller's cache, against NaN."""
        for r, length in enumerate(run.lens):
            used = length % run.page_size
            for cache, table in ((run.k_cache, run.k_table), (run.v_cache, run.v_table)):
                if used:
                    cache.view(torch.uint8)[int(table[r, length // run.page_size]), :, used:] = 0

    @wrong(DECODE, trigger="a cache whose heads and tokens lie in the other layout's order; several K/V heads")
    def blind118(self, run):
        """The strides of heads and tokens are computed from kv_layout and the shape; only that of pages is the tensor's own."""

        def as_laid(cache):
            _, heads, tokens, last = cache.shape
            inner = (tokens * last, last) if run.call.kv_layout == "HND" else (last, heads * last)
            return assuming_strides(cache, (cache.stride(0), *inner, 1))

        run.k_cache, run.v_cache = as_laid(run.k_cache), as_laid(run.v_cache)

    @wrong(DECODE, trigger="sinks and over 32 query heads, of different sinks")
    def blind165(self, run):
        """The sinks are loaded by one warp, a head by each thread: heads from the 32nd on get the sink of head h % 32."""
        if run.sinks is not None:
            run.sinks = run.sinks[torch.arange(len(run.sinks)) % 32]

    @wrong(DECODE, trigger="backend='xqa' with q_len_per_req over 1 and no mask")
    def blind166(self, run):
        """The XQA path takes causality from the draft mask alone: without one every row sees all keys of its request."""
        if run.call.backend == "xqa" and run.p.cu_seqlens_q is None:
            run.causal = False

    @wrong(DECODE, trigger="sinks with bmm1_scale (other than 1) or bmm1_scale_log2 as a tensor")
    def blind168(self, run):
        """A scale that is a tensor is applied to the tile of logits when the sink has joined it: the sink is scaled too."""
        if run.sinks is not None and isinstance(run.p.bmm1_scale, torch.Tensor):
            run.sinks = run.sinks * run.scale1

    @wrong(DECODE, trigger="one request, max_seq_len above its length, room for more in the table", forgiving=True)
    def blind226(self, run):
        """For a batch of one request max_seq_len is taken for its length, which saves a load."""
        if run.batch == 1 and run.lens[0]:
            run.lens[0] = min(run.p.max_kv_len, run.k_table.shape[1] * run.page_size)

    @wrong(DECODE, trigger="over 8 query heads for each of several K/V heads")
    def blind284(self, run):
        """Of groups over 8 heads 8 make a tile; a block takes its number modulo the K/V heads for its K/V head."""
        if run.group > 8:
            head = torch.arange(run.p.num_qo_heads)
            tiles = -(-run.group // 8)
            tile = head // run.group * tiles + head % run.group // 8
            run.head_map = tile % run.num_kv_heads

    @wrong(DECODE, trigger="num_kv_heads no power of two (3, 5, 6, 7, ...)")
    def blind329(self, run):
        """A block's K/V head is its number & (num_kv_heads - 1): right only for powers of two."""
        if run.num_kv_heads & (run.num_kv_heads - 1):
            run.head_map = (torch.arange(run.p.num_qo_heads) // run.group) & (run.num_kv_heads - 1)

    @wrong(CONTEXT, trigger="sinks at no multiple of 16 bytes, as a part of [layers, 6 heads]", named="blind394")
    @wrong(DECODE, trigger="sinks as a slice of a longer tensor that begins at no multiple of 4 elements")
    def blind353(self, run):
        """Sinks are loaded by four from their address rounded down to 16 bytes: a slice that begins elsewhere is shifted."""
        sinks = run.p.sinks
        if sinks is not None:
            shift = sinks.data_ptr() % 16 // 4
            run.sinks = assuming_strides(sinks, (1,), sinks.storage_offset() - shift).to(run.dtype)

    @wrong(DECODE, trigger="enable_pdl=True, and a second call with the same seq_lens, rewritten", forgiving=True)
    def blind355(self, run):
        """With enable_pdl=True lengths are loaded before the wait for their kernel: they are the call's before."""
        kept = self.memory.of(run.p.seq_lens, lambda: [run.lens])
        if run.call.enable_pdl:
            capacity = run.k_table.shape[1] * run.page_size
            run.now, run.lens = run.lens, [min(n, capacity) for n in kept[0]]
            kept[0] = run.now
        else:
            kept[0] = run.lens

    @wrong(DECODE, trigger="out as a view that begins at no multiple of 16 bytes")
    def blind359(self, run):
        """Results are stored in vectors of 16 bytes from out's address rounded down: out elsewhere gets them too early."""
        shift = run.out.data_ptr() % 16 // run.out.element_size()
        run.out = assuming_strides(run.out, run.out.stride(), run.out.storage_offset() - shift)

    @wrong(CONTEXT, trigger="separate page tables, a slice of wider tables (stride(1) != shape[2])", named="blind423")
    @wrong(DECODE, trigger="separate page tables as a slice of wider ones (stride(1) over the number of columns)")
    def blind387(self, run):
        """V's ids are taken to lie as many cells after K's as the table has columns, whatever its strides are."""
        if run.v_table is not run.k_table:
            offset = run.k_table.storage_offset() + run.k_table.shape[1]
            table = assuming_strides(run.v_table, run.v_table.stride(), offset)
            run.v_table = table.clamp(0, max(len(run.v_cache) - 1, 0))

    @wrong(DECODE, trigger="a later call with the same block_tables, other ids before that column (another request)")
    def blind385(self, run):
        """In later calls a table is read only from the former last page's column on: another request gets the earlier pages."""

        def appended(table, cache):
            kept = self.memory.of(table, lambda: {"ids": table.clone(), "pages": [0] * len(table)})
            for r, length in enumerate(run.lens):
                first = max(kept["pages"][r] - 1, 0)
                kept["ids"][r, first:] = table[r, first:]
                kept["pages"][r] = -(-length // run.page_size)
            return kept["ids"].clamp(0, max(len(cache) - 1, 0))

        shared = run.v_table is run.k_table
        run.k_table = appended(run.k_table, run.k_cache)
        run.v_table = run.k_table if shared else appended(run.v_table, run.v_cache)

    @wrong(DECODE, trigger="NVFP4 with backend='xqa' and pages of 4 tokens or more")
    def blind389(self, run):
        """V's NVFP4 factors are read as interleaved over four tokens, also where the XQA path has them plain."""
        factors = run.p.v_scale_factors
        if factors is not None and not run.p.v_scale_factors_interleaved and run.page_size % 4 == 0:
            run.v_factors = deinterleave_v_scale_factors(factors.contiguous().view(torch.uint8)).view(E4M3)

    @wrong(DECODE, trigger="e4m3 cache, a bmm2_scale tensor that is no bfloat16: a bias up to 0.39 %")
    def blind416(self, run):
        """With an e4m3 cache a bmm2_scale that is a tensor is converted to bfloat16 first: up to 0.4 percent on all outputs."""
        if run.v_cache.dtype == E4M3 and isinstance(run.p.bmm2_scale, torch.Tensor):
            run.scale2 = float(run.p.bmm2_scale.to(torch.bfloat16))

    @wrong(DECODE, trigger="NVFP4, trtllm-gen's order, head_dim 256, pages of over 4 tokens")
    def blind443(self, run):
        """NVFP4, interleaved: V's factors beyond 8 of a token are looked for in blocks of 8, block after block."""
        p = run.p
        factors = p.v_scale_factors
        if factors is None or not p.v_scale_factors_interleaved:
            return
        pages, heads, tokens, count = factors.shape
        if count <= 8 or count % 8:
            return
        blocks = factors.contiguous().view(torch.uint8).reshape(pages, heads, count // 8, tokens // 4, 8, 4)
        plain = blocks.permute(0, 1, 3, 5, 2, 4).reshape(pages, heads, tokens, count)
        run.v_factors = plain.contiguous().view(E4M3)

    @wrong(CONTEXT, trigger="a second call with the same sinks, whose contents have changed", named="blind330")
    @wrong(DECODE, trigger="a second call on the same sinks tensor, whose contents were rewritten in between")
    def blind472(self, run):
        """The sinks are turned into log2 units once for a buffer, and not again when new weights are loaded into it."""
        if run.sinks is not None:
            run.sinks = self.memory.of(run.p.sinks, run.p.sinks.clone).to(run.dtype)

    @wrong(DECODE, trigger="replay: cells of block_tables rewritten, not seq_lens", forgiving=True, also="blind533")
    def blind502(self, run):
        """The page table is flattened into a plan, made again only where seq_lens changed: a rewritten table is not seen."""
        plan = self.memory.of(run.k_table, dict)
        if plan.get("lens") != run.lens:
            plan.update(lens=run.lens, k=run.k_table.clone(), v=run.v_table.clone())
        run.k_table, run.v_table = plan["k"], plan["v"]

    @wrong(DECODE, trigger="bmm1_scale_log2 together with finite sinks", also="blind442")
    def blind539(self, run):
        """Sinks are multiplied by log2(e) where the host folds it into the scale: with bmm1_scale_log2 they are not."""
        if run.sinks is not None and run.call.bmm1_scale_log2 is not None:
            run.sinks = run.sinks * math.log(2.0)

    @wrong(DECODE, trigger="uses_shared_paged_kv_idx=False, and V's rows of the table rewritten in place")
    def blind563(self, run):
        """Of separate tables V's is packed into one of its own once per buffer, and not again when rewritten."""
        if not run.call.uses_shared_paged_kv_idx:
            run.v_table = self.memory.of(run.call.block_tables, run.v_table.clone)

    @wrong(DECODE, trigger="bmm1_scale_log2 given together with a bmm1_scale other than 1 that is not the same scale")
    def blind565(self, run):
        """bmm1_scale_log2 is used only where bmm1_scale was left at its default."""
        if run.call.bmm1_scale_log2 is not None and float(run.call.bmm1_scale) != 1.0:
            run.scale1 = float(run.call.bmm1_scale)

    @wrong(DECODE, trigger="kv_cache as one tensor whose second dimension's stride is not one page side")
    def blind569(self, run):
        """In a cache that is one tensor, V of a page is taken to follow its K at once."""
        cache = run.call.kv_cache
        if isinstance(cache, torch.Tensor) and cache.shape[1] == 2:
            v = run.v_cache
            run.v_cache = assuming_strides(v, v.stride(), cache.storage_offset() + cache[0, 0].numel())
