"""SGLang's TRT-LLM MLA backend as a `lab.metadata.engine.backend.Backend`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import MetadataBuffers, RebuiltMetadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import PagedLatentCache, buffer_in
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.buffers import MLAGraphMetadata, new_block_table
from lab.metadata.mla.calls import MLALayer, mla_call_arguments, mla_query, mla_query_dtype
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.metadata import QueryLayout, TRTLLMMLADecodeMetadata, build_mla_decode_metadata
from lab.metadata.mla.rows import dense_block, unpad_draft_extend_output


@dataclass(frozen=True, eq=False)
class TRTLLMMLABackend:
    """Builds metadata and makes decode calls as SGLang's TRT-LLM MLA backend does, with any implementation of FlashInfer's
    call. `attention` says how many keys a request has in a draft step.

    `lab.metadata.mla.calls.prepare_mla_prefill` makes the calls of a prefill.
    """

    supports_draft_extend_graph: ClassVar[bool] = True

    #: any object with FlashInfer's MLA decode function, such as `lab.references`; None if only metadata is built
    implementation: Any = None
    attention: DraftAttention = DraftAttention.MLA
    draft_extend: QueryLayout = QueryLayout.PADDED  #: as in `MLAGraphMetadata`
    #: the rank of decode context parallelism (DCP) whose metadata this backend builds; None without DCP
    dcp: DecodeContextParallel | None = None
    query_dtype: torch.dtype | None = None  #: dtype to which each query is cast; None: the result of `mla_query_dtype`

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if self.dcp is not None:
            return build_mla_dcp_metadata(batch, pool, self.dcp, self.attention)
        return build_mla_decode_metadata(batch, pool, self.attention)

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[TRTLLMMLADecodeMetadata]]:
        """Make the metadata buffers of each mode, for up to `max_batch_size` requests of the pool. Without decode context
        parallelism all modes share one block table.
        """
        if self.dcp is not None:
            return {mode: RebuiltMetadata(mode, pool, self.build_metadata) for mode in modes}
        table = new_block_table(modes, pool, max_batch_size, self.attention, self.draft_extend)
        return {mode: MLAGraphMetadata(mode, pool, table, self.attention, self.draft_extend) for mode in modes}

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: TRTLLMMLADecodeMetadata,
        layer: MLALayer,
        query: Tensor,
        cache: PagedLatentCache,
        *,
        max_context_len: int | None = None,
        out: Tensor,
        padded_query: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Prepare one layer's attention on the decode kernel (see `Backend.prepare_attention`).

        Args:
            query: ``[num_tokens, heads, kv_lora_rank + qk_rope_head_dim]``.
            max_context_len: not used, because the metadata has an upper bound of the lengths.
            out: ``[num_tokens, heads, kv_lora_rank]``; rows after ``metadata.num_rows`` are not written.
            padded_query: with `QueryLayout.PADDED`, a buffer for the padded copy of the query, in the dtype of the calls.
                Several passes may use the same buffer. None: a new tensor.

        Raises:
            ValueError: the batch has more requests than the metadata, a tensor or buffer does not fit the metadata, or the
                backend has a `dcp` (see `lab.metadata.mla.context_parallel.prepare_mla_dcp_attention`).
        """
        if self.dcp is not None:
            raise ValueError(
                "one rank's output is a part of a request's: prepare_mla_dcp_attention calls and merges all ranks"
            )
        if batch.batch_size > metadata.batch_size:
            raise ValueError(
                f"the batch has {batch.batch_size} requests and the metadata {metadata.batch_size}: padding outgrew it, build "
                "it anew (lab.metadata.mla.metadata.replan_outgrown)"
            )
        if metadata.num_rows == 0:
            return lambda: out
        given = buffer_in(query, self.query_dtype or mla_query_dtype(query.dtype, cache.storage.dtype))
        shape = (metadata.batch_size, metadata.max_seq_len_q)
        own_out, offsets = out[: metadata.num_rows], metadata.cu_seqlens_q
        is_padded = metadata.query_layout is QueryLayout.PADDED
        if is_padded:
            buffer = given.new_empty(*shape, *given.shape[1:]) if padded_query is None else padded_query
            dense_query = dense_block(buffer, *shape, *given.shape[1:])
            dense_out = out.new_empty(*shape, *out.shape[1:])
        else:
            dense_query, dense_out = mla_query(metadata, given), own_out.view(*shape, *out.shape[1:])
        arguments = mla_call_arguments(batch, metadata, layer, dense_query, cache)
        arguments |= {"out": dense_out, "workspace_buffer": None}
        call = prepare(self.implementation, AttentionCall.MLA_DECODE.value, **arguments)

        def run() -> Tensor:
            if given is not query:
                given.copy_(query)
            if is_padded:
                mla_query(metadata, given, dense_query)
            call()
            if is_padded:
                assert offsets is not None
                unpad_draft_extend_output(dense_out, offsets, own_out)
            return out

        return run
