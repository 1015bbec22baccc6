"""Blind kernels: what the host reads of a context call."""

import numbers
import struct

import torch

from corpus.models.attention import E4M3, Attention, assuming_strides, packed_strides
from corpus.wrong import CONTEXT, MLA, wrong
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
