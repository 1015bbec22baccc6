"""FlashInfer's TRT-LLM decode and context calls as data: their parameters, and the paged attention problem that they define."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lab.calls import allowed, arguments, context_parallel
from lab.calls.problem import AttentionCall, PagedAttention, Scale, checked, mask_words

WITH_TRANSFORM_MODE: allowed.Reasons = {"backend": (("auto", "trtllm-gen"), "only trtllm-gen has these kernels")}
KVCache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class DecodeCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_decode_with_kv_cache`: same names, order and defaults.

    Rows are causal: row i of a request with q rows and L keys is at position L - q + i and sees the keys up to this position.
    If a request has fewer keys than rows, its first rows see no key. The output of a row that sees no key is zero. Its LSE is
    log2(e) * sink, or -inf without a sink.

    A block-sparse call (`enable_block_sparse_attention`) selects pages of each request for each K/V head. A head sees only the
    keys of its pages. If its pages have L keys, row i of q rows is at position L - q + i among them, and sees the keys up to
    this position (FlashInfer 0.7.2, trace/templates/attention.py 3760). The position is that of the row's own token if the head
    selects the pages of all q rows. FlashInfer does not document block-sparse calls with rows that see no key, with
    `cum_seq_lens_q`, with sinks or with an LSE. In the lab all of these mean the same as in other calls. SGLang 0.5.23 sends
    one row per request and at least one key, because FlashInfer does not write the output of a row without keys
    (kernels/ops/attention/msa_v1/flashinfer_decode.py 121).

    The following may contain any values, including NaN, and must not affect a result: the rest of a request's last page, pages
    of no request, keys before the windows of all rows, cells of `block_tables` after a request's last page, and query rows of a
    request without keys. NaN that one row sees may affect other rows of its request, but no other request.

    The last dimension of `query`, `kv_cache`, `kv_cache_sf` and `block_tables` is contiguous. Their other strides and those of
    `lse` are free as long as no elements overlap; K and V may differ in strides. Other tensors are contiguous. `query`,
    `kv_cache`, `kv_cache_sf`, `out` and `lse` begin at a multiple of 16 bytes, as vector loads and TMA need, other tensors at
    any element.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim], fp16, bf16 or e4m3 (references also take float32 and float64). The rows of a
            request are consecutive.
        kv_cache: (K, V), each [num_pages, num_kv_heads, page_size, head_dim] ("HND") or
            [num_pages, page_size, num_kv_heads, head_dim] ("NHD"); or one tensor with a second dimension of 2 (K and V)
            or 1 (K is V). The query's dtype, e4m3, or uint8 for NVFP4. Byte i of an NVFP4 vector, which has head_dim / 2 bytes,
            has element 2 i in its low four bits (FlashInfer 0.7.2, quantization/fp4_quantization.py 182).
        workspace_buffer: memory for FlashInfer's kernels; see `lab.calls.workspace`. Other implementations ignore it.
        block_tables: int32 [batch_size, max_num_pages_per_seq], or [batch_size, 2, max_num_pages_per_seq] with separate K and V
            page ids when `uses_shared_paged_kv_idx` is False. A page may occur several times in a row and in the rows of
            several requests. All cells up to a request's last page are pages of the pool, also those before a window. In a
            block-sparse call contiguous [num_kv_heads, batch_size, max_num_pages_per_seq]: the pages that each K/V head
            selects, in the order of the request's tokens, in the first columns.
        seq_lens: int32 or uint32 [batch_size]: number of keys of each request, its query tokens included. In a block-sparse
            call contiguous [num_kv_heads, batch_size]: number of keys in the selected pages. Only the last page may be partly
            filled.
        max_seq_len: int, upper bound of `seq_lens`. It may exceed the table's capacity; 0 for an empty batch.
        bmm1_scale, bmm2_scale: number, or float32 tensor of one element: factor of Q·K^T and of P·V.
        bmm1_scale_log2: float32 tensor of one element, `bmm1_scale * log2(e)`; takes precedence over `bmm1_scale`.
        window_left: number of keys before its own position that a row sees; -1 for all.
        out, out_dtype: the output tensor, or the dtype of a new output tensor, which is by default the query's dtype.
            Values beyond ±448 become ±448 in an e4m3 output (PTX ISA, `cvt` with `.satfinite`).
        sinks: float32 [num_qo_heads]: exp(sink) of each head is added to the softmax's denominator. `bmm1_scale` does not scale
            it. A sink is finite, or -inf for a head without one.
        q_len_per_req: query rows of every request; None with `cum_seq_lens_q`.
        max_q_len, cum_seq_lens_q: upper bound of the rows of a request, and int32 [batch_size + 1] offsets of the query rows,
            for requests with different numbers of rows. Rows after the last offset are padding.
        mask: packed draft mask for q_len_per_req > 1, uint16 [batch_size, q_len, 2 * ceil(q_len / 32)]. The draft is the
            request's last q_len keys: token t is the key at position L - q_len + t, if there is one. Row j sees draft token
            16 w + b if and only if bit b of its word w is set, even if this is its own token or a later one. Every row sees all
            keys before the draft. A window applies as well. Bits from q_len on have no meaning. None: rows are causal.
        kv_cache_sf: (K, V) e4m3 scale factors of an NVFP4 cache, one per 16 elements of head_dim.
        multi_ctas_kv_counter_buffer: bytes for trtllm-gen's counters, zero before a call and after it.
        lse, return_lse: where the LSE is written, float32 [num_rows, num_qo_heads], base 2 (log2 of the softmax's
            denominator, the sink included); and whether the call returns (out, lse).
        enable_block_sparse_attention: True selects pages per K/V head, see above. FlashInfer does not combine it with a
            window, skip-softmax, separate K and V page ids, context parallelism, or a backend other than trtllm-gen.
        skip_softmax_threshold_scale_factor: number t of at least 0, or None for 0. In a request with L keys, a kernel may leave
            out the keys of a row whose exp(logit - largest logit of the row) is below t / L. A kernel may leave out none.
        o_scale: number other than 0, or None for 1: XQA multiplies V by it and divides an e4m3 output by it (FlashInfer
            0.7.2, decode.py 4741 and 4788, mha.cu 2629), so that it changes no result. With an output of another dtype
            it must be 1.
        causal_seqlens_kv_global: int32 [batch_size], or None: number of keys of each request, on all ranks, before its
            first row. It makes the call one rank's part of context parallelism (`lab.calls.context_parallel`):
            `kv_cache`, `block_tables`, `seq_lens` and `max_seq_len` have the rank's keys only, and row j sees the first
            max(0, floor((causal_seqlens_kv_global + j - cp_rank) / cp_world) + 1) of them, at most `seq_lens`.
        cp_world, cp_rank: number of ranks, and this rank; 1 and 0 without `causal_seqlens_kv_global`.
        bf16q_fp8kv_transform_mode: None, "k_only" or "separate_kv": which of trtllm-gen's kernels convert e4m3 K/V for bf16
            queries. It changes no result.

    `kv_layout` is "HND" or "NHD". `backend` is "auto", "xqa" or "trtllm-gen"; it determines the order of NVFP4's scale factors.
    `lab.calls.allowed.REFUSED` has the parameters that the lab takes only at their default, with the reasons: another value
    raises NotImplementedError. Parameters that change no result (`FREE_ARGUMENTS`) may have any value.
    """

    function: ClassVar[AttentionCall] = AttentionCall.DECODE
    module: ClassVar[str] = "flashinfer.decode"

    query: torch.Tensor
    kv_cache: KVCache
    workspace_buffer: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: Scale = 1.0
    bmm2_scale: Scale = 1.0
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    sinks: torch.Tensor | None = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    backend: str = "auto"
    q_len_per_req: int | None = 1
    o_scale: float | None = 1.0
    mask: torch.Tensor | None = None
    max_q_len: int | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    kv_cache_sf: tuple[torch.Tensor, torch.Tensor] | None = None
    uses_shared_paged_kv_idx: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    bmm1_scale_log2: torch.Tensor | None = None
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    enable_block_sparse_attention: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: torch.Tensor | None = None
    bf16q_fp8kv_transform_mode: str | None = None
    request_order: torch.Tensor | None = None
    request_order_plan: Any = None

    def problem(self) -> PagedAttention:
        """Check the arguments and return the attention problem that they define.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape, device, stride or number is invalid for every implementation.
            NotImplementedError: FlashInfer takes an argument's value, and the lab does not.
        """
        if self.bf16q_fp8kv_transform_mode is not None:
            allowed.check_combination(self, "bf16q_fp8kv_transform_mode", WITH_TRANSFORM_MODE)
        if self.enable_block_sparse_attention:
            allowed.check_combination(self, "enable_block_sparse_attention=True", allowed.WITH_BLOCK_SPARSE)
        allowed.check_modelled(self, ("auto", "xqa", "trtllm-gen"))
        batch_size = arguments.batch_size_of(
            self.block_tables, self.uses_shared_paged_kv_idx, self.enable_block_sparse_attention
        )
        max_q_len = arguments.check_max_q_len(self)
        arguments.check_query(self.query)
        if self.cum_seq_lens_q is None and self.query.shape[0] != batch_size * max_q_len:
            raise ValueError(
                f"query has {self.query.shape[0]} rows, but block_tables has {batch_size} requests of q_len_per_req="
                f"{max_q_len}: expected {batch_size * max_q_len} rows"
            )
        if self.mask is not None:
            _check_mask(self.mask, self.cum_seq_lens_q, batch_size, max_q_len)
        arguments.check_o_scale(self.o_scale, arguments.output_dtype(self))
        is_of_rank = arguments.takes_rank(self)
        problem = _posed(self, "max_seq_len", max_q_len)
        if not is_of_rank:
            return problem
        argument = "" if self.causal_seqlens_kv_global is None else "causal_seqlens_kv_global"
        return context_parallel.problem_of_rank(self, problem, argument, context_parallel.WITH_RANK_DECODE, max_q_len)


@dataclass(frozen=True, eq=False)
class ContextCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_batch_context_with_kv_cache`: same names, order and defaults.

    `DecodeCall` documents which keys a row sees, which memory may contain any values, the allowed strides, and all other
    attributes.

    Attributes:
        max_q_len, max_kv_len: ints, upper bounds of the rows and keys of one request; 0 for an empty batch.
        cum_seq_lens_q: int32 [batch_size + 1] offsets of the query rows. Query rows after the last offset are padding, as in a
            CUDA graph with room for more rows. They may contain any values, including NaN, and their output is undefined.
        cum_seq_lens_kv: int32 [batch_size + 1] offsets of the keys, or of the requests' pages: FlashInfer documents keys, but
            its own paged wrapper passes pages (``prefill.py`` 4609), and so does vLLM 0.33.0 (``backends/flashinfer.py`` 1763).
            So no kernel may use them; ``seq_lens`` has the lengths. FlashInfer's fmha_v2 does use them, as offsets of keys
            (``fmha_v2/fmha/warpspec/dma.h`` 444): with offsets of pages, `lab.kernels.trtllm` is wrong on SM90 and SM120.
        causal: False: every row sees every key of its request. False cannot be combined with a window.
        use_fp16_softmax, uses_spcompress: None or False, see `lab.calls.allowed.REFUSED`.
    """

    function: ClassVar[AttentionCall] = AttentionCall.CONTEXT
    module: ClassVar[str] = "flashinfer.prefill"

    query: torch.Tensor
    kv_cache: KVCache
    workspace_buffer: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: Scale
    bmm2_scale: Scale
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    sinks: torch.Tensor | None = None
    kv_cache_sf: KVCache | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    uses_shared_paged_kv_idx: bool = True
    causal: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    use_fp16_softmax: bool | None = None
    uses_spcompress: bool | None = None
    backend: str = "trtllm-gen"

    def problem(self) -> PagedAttention:
        allowed.check_modelled(self, ("trtllm-gen",))
        arguments.check_query(self.query)
        arguments.check_int("batch_size", self.batch_size, 0, "it counts the requests")
        if arguments.batch_size_of(self.block_tables, self.uses_shared_paged_kv_idx) != self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} but block_tables has {self.block_tables.shape[0]} rows: "
                "one row per request is needed"
            )
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            arguments.check_tensor(name, getattr(self, name))
        arguments.check_bool("causal", self.causal)
        max_q_len = arguments.check_int("max_q_len", self.max_q_len, 0, "it bounds the rows of one request")
        problem = _posed(self, "max_kv_len", max_q_len)
        if not self.causal and self.window_left >= 0:
            raise NotImplementedError(
                f"causal=False with window_left={self.window_left}: FlashInfer has no such kernel; pass window_left=-1"
            )
        return problem


def _posed(call: DecodeCall | ContextCall, kv_bound: str, max_q_len: int) -> PagedAttention:
    query, mask = call.query, getattr(call, "mask", None)
    cum_seq_lens_kv = getattr(call, "cum_seq_lens_kv", None)
    by_kv_head = getattr(call, "enable_block_sparse_attention", False)
    arguments.check_bool("return_lse", call.return_lse)
    k_cache, v_cache = arguments.split_cache("kv_cache", call.kv_cache, call.kv_layout)
    arguments.check_cache(query, k_cache)
    scale_factors = arguments.check_scale_factors(call, k_cache)
    k_tables = v_tables = call.block_tables
    if not call.uses_shared_paged_kv_idx:
        k_tables, v_tables = call.block_tables[:, 0], call.block_tables[:, 1]
    batch_size, heads = k_tables.shape[-2], k_cache.shape[1]
    if by_kv_head and len(k_tables) != heads:
        raise ValueError(f"block_tables has {len(k_tables)} page tables, but kv_cache has {heads} heads: one per head")
    shape = (heads, batch_size) if by_kv_head else batch_size
    arguments.check_vector("seq_lens", call.seq_lens, shape, arguments.LENGTH_DTYPES)
    for name, offsets in (("cum_seq_lens_q", call.cum_seq_lens_q), ("cum_seq_lens_kv", cum_seq_lens_kv)):
        if offsets is not None:
            arguments.check_vector(name, offsets, batch_size + 1, (torch.int32,))
    max_kv_len = arguments.check_int(kv_bound, getattr(call, kv_bound), 0, "it bounds the keys of one request")
    window_left = arguments.check_int("window_left", call.window_left, -1, "-1 means no window")
    problem = PagedAttention(
        query=query,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale_factors=scale_factors[0],
        v_scale_factors=scale_factors[1],
        v_scale_factors_interleaved=scale_factors[0] is not None and arguments.has_interleaved_v_scales(call),
        k_block_tables=k_tables,
        v_block_tables=v_tables,
        cu_seqlens_kv=cum_seq_lens_kv,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        causal=getattr(call, "causal", True),
        # A window as wide as the longest request is none; some callers write it as a very large number.
        window_left=-1 if window_left >= max_kv_len else window_left,
        mask=mask,
        **arguments.common_fields(call, call.sinks),
        out=call.out,
        out_dtype=arguments.output_dtype(call),
        lse=arguments.check_lse(call),
        return_lse=call.return_lse,
    )
    arguments.check_devices(call)
    arguments.check_results_apart(call)
    return checked(problem)


def _check_mask(mask: object, cum_seq_lens_q: object, batch_size: int, q_len: int) -> None:
    if cum_seq_lens_q is not None:
        raise NotImplementedError(
            "mask with cum_seq_lens_q is not modelled by the lab: pass q_len_per_req rows of every request, or no mask"
        )
    tensor = arguments.check_tensor("mask", mask)
    if tensor.dtype != torch.uint16:
        raise TypeError(f"mask must be packed uint16 words, got {tensor.dtype}")
    expected = (batch_size, q_len, mask_words(q_len))
    if tensor.shape != expected or not tensor.is_contiguous():
        raise ValueError(
            f"mask must be contiguous [batch_size, q_len, 2 * ceil(q_len / 32)] = {list(expected)}, got "
            f"{list(tensor.shape)} with stride {tensor.stride()}"
        )
