"""SGLang's TRT-LLM MHA backend: which attention calls a forward pass makes, with which arguments, dtypes and settings.

The rules are from SGLang 0.5.23, `sglang/srt/layers/attention/trtllm_mha_backend.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.calls.arguments import check_int
from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import cast_to, in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import NVFP4KVCache, PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import query_lens
from lab.metadata.mha.decode_split import DecodeSplit
from lab.metadata.mha.metadata import (
    MetadataBuilder,
    MHAGraphMetadata,
    TRTLLMMHAMetadata,
    build_mha_metadata,
    mixed_tail_split,
)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention layer of a model: the call arguments that differ from layer to layer, such as scales, window and sinks.

    Attributes:
        k_scale, v_scale: the numbers by which stored K and V were divided. Calls use them only if the cache is quantised.
    """

    softmax_scale: float  #: factor of Q·K^T, without the cache's scale
    k_scale: float = 1.0
    v_scale: float = 1.0
    window_left: int = -1  #: how many keys before its own position a row sees; -1 for all
    reads_swa_pool: bool = False  #: the layer's K/V lie in the sliding-window pool, which `swa_page_table` addresses
    sinks: Tensor | None = None  #: float32 [num_qo_heads], or None
    #: SGLang's ``AttentionType.ENCODER_ONLY``: a row sees all keys of its request, also the keys after it
    encoder_only: bool = False


@dataclass(frozen=True)
class PlannedCall:
    """One FlashInfer call of a layer: which function computes which consecutive requests and query rows of the batch."""

    call: AttentionCall
    first_request: int
    num_requests: int
    first_row: int
    num_rows: int

    @property
    def requests(self) -> slice:
        return slice(self.first_request, self.first_request + self.num_requests)

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


def attention_call(mode: ForwardMode, draft_extend: AttentionCall | None = None) -> AttentionCall:
    """Return the FlashInfer function that the MHA backend calls in a forward mode. In DRAFT_EXTEND and DRAFT_EXTEND_V2 return
    `draft_extend` if given: SGLang's PR 24566 moved DRAFT_EXTEND_V2 from the context to the decode call.
    """
    if mode.mha_call is None:
        raise ValueError(f"{mode!r} runs no attention")
    return draft_extend if mode.extends_draft and draft_extend is not None else mode.mha_call


def plan_calls(
    batch: ForwardBatch,
    draft_extend: AttentionCall | None = None,
    split_mixed_tail: bool = False,
    with_padding_rows: bool = False,
) -> list[PlannedCall]:
    """Return the attention calls of one layer: none for an empty batch, two if the one-token requests at the end of a mixed
    batch get a decode call of their own (`split_mixed_tail`), else one.

    With `with_padding_rows` the query of a context call includes the padding rows after the requests' rows. SGLang 0.5.15 does
    so; 0.5.23 does not (`padded_extend_real_tokens`). The query of a ragged verification always includes them.
    """
    whole = attention_call(batch.forward_mode, draft_extend)
    bs = batch.batch_size
    if bs == 0:
        return []
    plain_extend = batch.forward_mode.is_prefill and batch.spec_info is None
    first = mixed_tail_split(batch) if split_mixed_tail and plain_extend else bs
    if first == bs:
        is_ragged = batch.forward_mode.query_rows.are_bounded
        all_rows = is_ragged or (with_padding_rows and whole is AttentionCall.CONTEXT)
        return [PlannedCall(whole, 0, bs, 0, batch.num_tokens if all_rows else sum(query_lens(batch)))]
    first_rows = sum(query_lens(batch)[:first])
    calls = [
        PlannedCall(whole, 0, first, 0, first_rows),
        PlannedCall(AttentionCall.DECODE, first, bs - first, first_rows, bs - first),
    ]
    return [call for call in calls if call.num_requests > 0]


def call_arguments(
    planned: PlannedCall,
    batch: ForwardBatch,
    metadata: TRTLLMMHAMetadata,
    layer: AttentionLayer,
    query: Tensor,
    cache: PagedKVCache,
    max_context_len: int,
) -> dict[str, Any]:
    """Return the keyword arguments of one planned call, except `out`, `workspace_buffer` and the engine's settings
    (`CallSettings`). `query` has the rows of the whole batch, ``[num_tokens, num_qo_heads, head_dim]``.
    """
    requests = planned.requests
    table = metadata.swa_page_table if layer.reads_swa_pool else metadata.page_table
    if table is None:
        raise ValueError("the layer reads the sliding-window pool, but the metadata has no swa_page_table")
    arguments: dict[str, Any] = {
        "query": query[planned.rows],
        "kv_cache": cache.as_hnd(),
        "block_tables": table[requests],
        "seq_lens": metadata.cache_seqlens_int32[requests],
        "bmm1_scale": layer.softmax_scale * _counted_scale(layer.k_scale, cache.storage.dtype),
        "bmm2_scale": _counted_scale(layer.v_scale, cache.storage.dtype),
        "window_left": layer.window_left,
        "sinks": layer.sinks,
    }
    if isinstance(cache, NVFP4KVCache):
        # On a GPU, the default backend is the same. An implementation that runs without one does not know which it is.
        k_factors, v_factors = cache.scale_factors
        arguments |= {"kv_cache_sf": (k_factors, v_factors), "backend": "trtllm-gen" if cache.trtllm_gen else "xqa"}
    if planned.call is AttentionCall.DECODE:
        arguments["max_seq_len"] = max_context_len
        if layer.encoder_only and batch.forward_mode.query_rows is not QueryRows.ONE:
            return arguments | _rows_as_requests(planned, batch, metadata, layer)
        return arguments | _decode_width(planned, batch, metadata)
    if layer.encoder_only:
        arguments["causal"] = False
    offsets = slice(requests.start, requests.stop + 1)
    return arguments | {
        "max_q_len": max(metadata.max_seq_len_q, 1),
        "max_kv_len": max_context_len,
        "batch_size": planned.num_requests,
        "cum_seq_lens_q": metadata.cu_seqlens_q[offsets],
        "cum_seq_lens_kv": metadata.cu_seqlens_k[offsets],
    }


def _counted_scale(scale: float, kv_dtype: torch.dtype) -> float:
    if kv_dtype == E4M3:  # SGLang 0.5.23, `_get_bmm_scales`, `_get_nvfp4_bmm_scales`
        return scale if scale > 0 else 1.0
    return scale if kv_dtype == NVFP4 else 1.0


def _rows_as_requests(
    planned: PlannedCall, batch: ForwardBatch, metadata: TRTLLMMHAMetadata, layer: AttentionLayer
) -> dict[str, Any]:
    """Return call arguments that make each query row of a verification a request of its own, for encoder-only layers, which are
    not causal. Each row sees all tokens of its request. Each row's window ends at the request's last token (SGLang 0.5.23).
    """
    if metadata.encoder_cache_seqlens is None or metadata.encoder_page_table is None:
        raise ValueError(
            f"{batch.forward_mode.name} on an encoder-only layer would be causal: of the decode call's modes TARGET_VERIFY "
            "alone has its rows as requests (SGLang 0.5.23); build it with expand_encoder_only_verify=True"
        )
    if layer.reads_swa_pool:
        raise ValueError(
            f"an encoder-only layer of the sliding-window pool in {batch.forward_mode.name} would read the full pool's pages "
            "(SGLang 0.5.23 has the rows' table of that pool alone); keep the layer in the full pool"
        )
    return {
        "block_tables": metadata.encoder_page_table[planned.rows],
        "seq_lens": metadata.encoder_cache_seqlens[planned.rows],
        "q_len_per_req": 1,
    }


def _decode_width(planned: PlannedCall, batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> dict[str, Any]:
    requests = planned.requests
    offsets = metadata.cu_seqlens_q[requests.start : requests.stop + 1]
    ragged = {"q_len_per_req": None, "cum_seq_lens_q": offsets}
    if batch.forward_mode.query_rows.are_bounded:  # the numbers of rows differ from replay to replay
        return ragged | {"max_q_len": metadata.max_seq_len_q}
    widths = query_lens(batch)[requests]
    if len(set(widths)) == 1:
        return {"q_len_per_req": widths[0]}
    if batch.forward_mode.query_rows is QueryRows.FIXED:
        raise ValueError(
            f"extend_seq_lens_cpu={list(widths)}: {batch.forward_mode.name} has the same number of rows for every request "
            "on the decode call; pad the rows, or plan it with draft_extend=AttentionCall.CONTEXT"
        )
    return ragged | {"max_q_len": max(widths)}


@dataclass(frozen=True)
class CallDtypes:
    """The dtype to which the engine casts the query before a call, and the dtype of the call's output."""

    query: torch.dtype
    out: torch.dtype


def call_dtypes(call: AttentionCall, dtype: torch.dtype, kv_dtype: torch.dtype, *, trtllm_gen: bool) -> CallDtypes:
    """Return the dtypes of a call's query and output in a model of dtype `dtype` (SGLang's `forward_decode`, `forward_extend`).

    ========  ==================  =============  =========
    cache     kernel              query          output
    ========  ==================  =============  =========
    e4m3      trtllm-gen          e4m3           the model's
    e4m3      XQA                 the model's    the model's
    e4m3      fmha_v2             e4m3           the model's
    NVFP4     trtllm-gen          e4m3           e4m3, then converted to the model's
    NVFP4     XQA                 the model's    the model's
    other     any                 the model's    the model's
    ========  ==================  =============  =========

    The query is cast without a scale, so that values beyond 448 saturate. `trtllm_gen`: FlashInfer's trtllm-gen runs the call
    (SM100, SM103).
    """
    if kv_dtype == NVFP4:
        if not trtllm_gen and call is AttentionCall.CONTEXT:
            # SGLang refuses this configuration when it starts.
            raise ValueError("fmha_v2 does not read an NVFP4 cache: prefill with another backend, or on SM100 or SM103")
        return CallDtypes(E4M3, E4M3) if trtllm_gen else CallDtypes(dtype, dtype)
    is_cast = kv_dtype == E4M3 and (trtllm_gen or call is AttentionCall.CONTEXT)
    return CallDtypes(E4M3 if is_cast else dtype, dtype)


@dataclass(frozen=True, eq=False)
class CallSettings:
    """The settings of an engine that are the same in all its attention calls.

    Attributes:
        skip_softmax_decode, skip_softmax_prefill: ``skip_softmax_threshold_scale_factor`` of decode and context calls
            (``SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR``, ``SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR``):
            kernels may leave out keys whose weights are below a threshold. None: no key is left out.
    """

    #: an argument of decode calls, made by `lab.metadata.allocate_multi_ctas_kv_counters`. SGLang makes it for
    #: ``(max_running_requests + 1) * max(1, speculative_num_draft_tokens)`` requests
    multi_ctas_kv_counter_buffer: Tensor | None = None
    skip_softmax_decode: float | None = None
    skip_softmax_prefill: float | None = None
    #: largest number of calls into which a decode call is divided (`lab.metadata.mha.decode_split`)
    decode_splits: int = 1

    def __post_init__(self) -> None:
        check_int("decode_splits", self.decode_splits, 1, "1 leaves a decode call whole")

    def arguments(self, call: AttentionCall) -> dict[str, Any]:
        is_decode = call is AttentionCall.DECODE
        threshold = self.skip_softmax_decode if is_decode else self.skip_softmax_prefill
        counters = self.multi_ctas_kv_counter_buffer if is_decode else None
        given = {"skip_softmax_threshold_scale_factor": threshold, "multi_ctas_kv_counter_buffer": counters}
        return {name: value for name, value in given.items() if value is not None}


def splits_mixed_tail(
    query_dtype: torch.dtype, kv_dtype: torch.dtype, *, prefills_with_fmha_v2: bool = False, is_decoder: bool = True
) -> bool:
    """Return True if SGLang's `forward_extend` computes the one-token requests at the end of an extend batch by a decode call.

    It does so if query (after the engine's cast) and cache have the same dtype, float16, bfloat16 or e4m3, if the context call
    does not run fmha_v2, and if the layer is causal self-attention (`is_decoder`, ``AttentionType.DECODER``).
    """
    return not prefills_with_fmha_v2 and is_decoder and query_dtype == kv_dtype and kv_dtype in (*HALF_DTYPES, E4M3)


@dataclass(frozen=True, eq=False)
class TRTLLMMHABackend:
    """Builds metadata and makes calls as SGLang's TRT-LLM MHA backend does, with any implementation of FlashInfer's calls."""

    supports_draft_extend_graph: ClassVar[bool] = True

    #: any object with FlashInfer's decode and context functions, such as `lab.kernels.trtllm`; None if only metadata is built
    implementation: Any = None
    draft_extend: AttentionCall | None = None  #: as in `attention_call`
    builder: MetadataBuilder = MetadataBuilder.FUSED  #: how metadata in CUDA graphs is written
    #: True if the engine's kernels are fmha_v2 and XQA, False for trtllm-gen. It decides `dtypes` and `split_mixed_tail` where
    #: these are None
    prefills_with_fmha_v2: bool = True
    settings: CallSettings = field(default_factory=CallSettings)
    expand_encoder_only_verify: bool = False  #: as in `build_mha_metadata`
    dtypes: CallDtypes | None = None  #: None: the result of `call_dtypes`
    split_mixed_tail: bool | None = None  #: as in `plan_calls`; None: the result of `splits_mixed_tail`
    with_padding_rows: bool = False  #: as in `plan_calls`

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return build_mha_metadata(batch, pool, expand_encoder_only_verify=self.expand_encoder_only_verify)

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> dict[GraphMode, MHAGraphMetadata]:
        expand = self.expand_encoder_only_verify
        return {mode: MHAGraphMetadata(mode, pool, max_batch_size, self.builder, expand) for mode in modes}

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: TRTLLMMHAMetadata,
        layer: AttentionLayer,
        query: Tensor,
        cache: PagedKVCache,
        *,
        max_context_len: int,
        out: Tensor,
        plan: Sequence[PlannedCall] | None = None,
    ) -> Callable[[], Tensor]:
        """Return a function that makes the calls of `plan` (None: those of `plan_calls`) for one layer and writes `out`."""
        kv_dtype = cache.storage.dtype
        dtypes = self._dtypes(batch, query.dtype, out.dtype, kv_dtype)
        given, steps = cast_to(dtypes.query, query)
        result = out if dtypes.out == out.dtype else torch.empty_like(out, dtype=dtypes.out)
        implementation, splits = self.implementation, self.settings.decode_splits
        if splits > 1:
            implementation = DecodeSplit(implementation, splits)
        for planned in self.plan_calls(batch, layer, dtypes.query, kv_dtype) if plan is None else plan:
            arguments = call_arguments(planned, batch, metadata, layer, given, cache, max_context_len)
            arguments |= self.settings.arguments(planned.call)
            own = result[planned.rows]
            steps.append(
                prepare(implementation, planned.call.value, **arguments | {"out": own, "workspace_buffer": None})
            )
            if result is not out:
                steps.append(partial(out[planned.rows].copy_, own))
        return in_turn(steps, out)

    def plan_calls(
        self, batch: ForwardBatch, layer: AttentionLayer, query_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[PlannedCall]:
        split = self.split_mixed_tail
        if split is None:
            split = splits_mixed_tail(
                query_dtype,
                kv_dtype,
                prefills_with_fmha_v2=self.prefills_with_fmha_v2,
                is_decoder=not layer.encoder_only,
            )
        return plan_calls(batch, self.draft_extend, split, self.with_padding_rows)

    def _dtypes(
        self, batch: ForwardBatch, dtype: torch.dtype, out_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> CallDtypes:
        if self.dtypes is not None:
            return self.dtypes
        if dtype not in HALF_DTYPES or kv_dtype not in (E4M3, NVFP4):
            return CallDtypes(dtype, out_dtype)
        call = attention_call(batch.forward_mode, self.draft_extend)
        return call_dtypes(call, dtype, kv_dtype, trtllm_gen=not self.prefills_with_fmha_v2)
