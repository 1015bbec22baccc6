"""SGLang's TRT-LLM MLA backend as a `lab.metadata.engine.backend.Backend`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.buffers import MLAGraphMetadata, new_block_table
from lab.metadata.mla.calls import MLALayer, prepare_mla_attention
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.metadata import QueryLayout, TRTLLMMLADecodeMetadata, build_mla_decode_metadata
from lab.metadata.mla.quantised import mla_query_dtype


@dataclass(frozen=True, eq=False)
class TRTLLMMLABackend:
    """Build metadata and make decode calls as SGLang's TRT-LLM MLA backend does, with any implementation of FlashInfer's call.

    For a prefill see `lab.metadata.mla.metadata.build_mla_prefill_metadata` and `lab.metadata.mla.calls.prepare_mla_prefill`.

    Attributes:
        implementation: any object with FlashInfer's MLA decode function, such as `lab.references`; None if only metadata is
            built.
        attention: decides which keys a draft step counts.
        draft_extend: the layout of the first draft extend's rows in a graph; see `MLAGraphMetadata`.
        dcp: the rank of decode context parallelism (DCP) whose metadata this backend builds; None without DCP.
        query_dtype: the dtype to which each query is cast; None: the engine's choice.
    """

    supports_draft_extend_graph: ClassVar[bool] = True

    implementation: Any = None
    attention: DraftAttention = DraftAttention.MLA
    draft_extend: QueryLayout = QueryLayout.PADDED
    dcp: DecodeContextParallel | None = None
    query_dtype: torch.dtype | None = None

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if self.dcp is not None:
            return build_mla_dcp_metadata(batch, pool, self.dcp, self.attention)
        return build_mla_decode_metadata(batch, pool, self.attention)

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> dict[GraphMode, MLAGraphMetadata]:
        """Allocate the buffers of each mode; all modes share one block table."""
        table = new_block_table(modes, pool, max_batch_size, self.attention, self.draft_extend, self.dcp)
        return {
            mode: MLAGraphMetadata(mode, pool, table, self.attention, self.draft_extend, self.dcp) for mode in modes
        }

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: TRTLLMMLADecodeMetadata,
        layer: MLALayer,
        query: Tensor,
        cache: PagedLatentCache,
        *,
        max_context_len: int,
        out: Tensor,
        padded_query: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Prepare one layer's attention (see `Backend.prepare_attention`). `max_context_len` is not used, because the metadata
        bounds the lengths.

        Args:
            padded_query: as in `prepare_mla_attention`.

        Raises:
            ValueError: the backend has a `dcp`. A rank's output is only a part: `prepare_mla_dcp_attention` of
                `lab.metadata.mla.context_parallel` makes the calls of all ranks and merges them.
        """
        if self.dcp is not None:
            raise ValueError(
                "one rank's output is a part of a request's: prepare_mla_dcp_attention calls and merges all ranks"
            )
        return prepare_mla_attention(
            self.implementation,
            batch,
            metadata,
            layer,
            query,
            cache,
            out=out,
            padded_query=padded_query,
            query_dtype=self.query_dtype or mla_query_dtype(query.dtype, cache.storage.dtype),
        )
