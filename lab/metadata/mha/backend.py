"""SGLang's TRT-LLM MHA backend in the shape of `lab.metadata.engine.backend.Backend`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from lab.calls.problem import E4M3, HALF_DTYPES, NVFP4, AttentionCall
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.buffers import MetadataBuilder, MHAGraphMetadata
from lab.metadata.mha.calls import AttentionLayer, attention_call, plan_calls, prepare_attention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.metadata.mha.quantised import CallDtypes, call_dtypes
from lab.metadata.mha.settings import CallSettings, splits_mixed_tail


@dataclass(frozen=True, eq=False)
class TRTLLMMHABackend:
    """Metadata and calls of SGLang's TRT-LLM MHA backend, on any implementation of the calls.

    Its metadata live in buffers that keep their addresses, and its lengths, tables and offsets are read on the device: a graph
    of it may be replayed for any batch of its width. So it declares the draft extend's graph.

    Attributes:
        implementation: any object with the two functions, such as `lab.kernels.trtllm`; None for metadata alone.
        draft_extend: the call of the draft extends, if not the engine's choice.
        prefills_with_fmha_v2: the engine's kernels are fmha_v2 and XQA, else trtllm-gen. That decides what a half-precision
            query is cast to over a quantised cache, and with the dtypes if a mixed batch's tail is split off.
        settings: arguments that all calls have alike.
        builder: what writes the metadata of graphs.
        expand_encoder_only_verify: the model has encoder-only layers; see `build_mha_metadata`.
    """

    supports_draft_extend_graph: ClassVar[bool] = True

    implementation: Any = None
    draft_extend: AttentionCall | None = None
    builder: MetadataBuilder = MetadataBuilder.FUSED
    prefills_with_fmha_v2: bool = True
    settings: CallSettings = field(default_factory=CallSettings)
    expand_encoder_only_verify: bool = False

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
    ) -> Callable[[], Tensor]:
        dtypes, kv_dtype = CallDtypes(query.dtype, out.dtype), cache.storage.dtype
        if query.dtype in HALF_DTYPES and kv_dtype in (E4M3, NVFP4):
            call = attention_call(batch.forward_mode, self.draft_extend)
            dtypes = call_dtypes(call, query.dtype, kv_dtype, trtllm_gen=not self.prefills_with_fmha_v2)
        split = splits_mixed_tail(
            dtypes.query, kv_dtype, prefills_with_fmha_v2=self.prefills_with_fmha_v2, is_decoder=not layer.encoder_only
        )
        return prepare_attention(
            self.implementation,
            batch,
            metadata,
            layer,
            query,
            cache,
            max_context_len=max_context_len,
            out=out,
            plan=plan_calls(batch, self.draft_extend, split),
            settings=self.settings,
            dtypes=dtypes,
        )
