"""SGLang's TRT-LLM MHA backend as a `lab.metadata.engine.backend.Backend`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import PagedKVCache, buffer_in
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.buffers import MetadataBuilder, MHAGraphMetadata
from lab.metadata.mha.calls import (
    AttentionLayer,
    CallDtypes,
    CallSettings,
    PlannedCall,
    attention_call,
    call_arguments,
    call_dtypes,
    plan_calls,
    splits_mixed_tail,
)
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata


@dataclass(frozen=True, eq=False)
class TRTLLMMHABackend:
    """Builds metadata and makes calls as SGLang's TRT-LLM MHA backend does, with any implementation of FlashInfer's calls.
    `builder` says how metadata in CUDA graphs is written, and `settings` has arguments that all calls get.
    """

    supports_draft_extend_graph: ClassVar[bool] = True

    #: any object with FlashInfer's decode and context functions, such as `lab.kernels.trtllm`; None if only metadata is built
    implementation: Any = None
    draft_extend: AttentionCall | None = None  #: as in `attention_call`
    builder: MetadataBuilder = MetadataBuilder.FUSED
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
        """Prepare one layer's attention (see `Backend.prepare_attention`).

        Args:
            plan: the attention calls to make for the layer; None: the result of `plan_calls`.

        Raises:
            ValueError: `call_arguments` refuses the pass.
        """
        kv_dtype = cache.storage.dtype
        dtypes = self._dtypes(batch, query.dtype, out.dtype, kv_dtype)
        given, result = buffer_in(query, dtypes.query), buffer_in(out, dtypes.out)
        implementation, calls = self.settings.implementation(self.implementation), []
        for planned in self.plan_calls(batch, layer, dtypes.query, kv_dtype) if plan is None else plan:
            arguments = call_arguments(planned, batch, metadata, layer, given, cache, max_context_len)
            arguments |= self.settings.arguments(planned.call)
            arguments |= {"out": result[planned.rows], "workspace_buffer": None}
            calls.append((prepare(implementation, planned.call.value, **arguments), planned.rows))

        def run() -> Tensor:
            if given is not query:
                given.copy_(query)
            for call, rows in calls:
                call()
                if result is not out:
                    out[rows].copy_(result[rows])
            return out

        return run

    def plan_calls(
        self, batch: ForwardBatch, layer: AttentionLayer, query_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[PlannedCall]:
        """Return the attention calls that one layer makes in the batch's pass over a cache of `kv_dtype`. `query_dtype` is the
        dtype to which the engine casts the query.
        """
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
