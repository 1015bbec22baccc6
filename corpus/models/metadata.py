"""Right builders of metadata: the lab's builder, followed by one stage that a wrong builder replaces."""

from typing import Any

from corpus.wrong import DSV4_METADATA, MHA_METADATA, MLA_METADATA, MLA_PREFILL, Model
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.metadata.mla.dsv4 import DSV4Metadata, build_dsv4_metadata
from lab.metadata.mla.metadata import (
    DraftAttention,
    TRTLLMMLADecodeMetadata,
    TRTLLMMLAPrefillMetadata,
    build_mla_decode_metadata,
    build_mla_prefill_metadata,
)


class MHABuilder(Model, interface=(MHA_METADATA,)):
    def build_mha_metadata(self, batch: ForwardBatch, pool: KVPool, **options: bool) -> TRTLLMMHAMetadata:
        return self.changed(build_mha_metadata(batch, pool, **options), batch, pool)

    def changed(self, metadata: TRTLLMMHAMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        return self.misread(metadata, batch, pool)


class MLABuilder(Model, interface=(MLA_METADATA,)):
    def build_mla_decode_metadata(
        self, batch: ForwardBatch, pool: KVPool, attention: DraftAttention = DraftAttention.MLA
    ) -> TRTLLMMLADecodeMetadata:
        self.attention = self.counted(attention)
        return self.changed(build_mla_decode_metadata(batch, pool, self.attention), batch, pool)

    def counted(self, attention: DraftAttention) -> DraftAttention:
        return attention

    def changed(self, metadata: TRTLLMMLADecodeMetadata, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        return self.misread(metadata, batch, pool)


class MLAPrefillBuilder(Model, interface=(MLA_PREFILL,)):
    def build_mla_prefill_metadata(
        self, batch: ForwardBatch, pool: KVPool, **settings: bool
    ) -> TRTLLMMLAPrefillMetadata:
        return self.changed(build_mla_prefill_metadata(batch, pool, **settings), batch, settings)

    def changed(
        self, metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, settings: dict[str, Any]
    ) -> TRTLLMMLAPrefillMetadata:
        return self.misread(metadata, batch, settings)


class DSV4Builder(Model, interface=(DSV4_METADATA,)):
    def build_dsv4_metadata(self, batch: ForwardBatch, pool: KVPool) -> DSV4Metadata:
        return self.changed(build_dsv4_metadata(batch, pool), batch, pool)

    def changed(self, metadata: DSV4Metadata, batch: ForwardBatch, pool: KVPool) -> DSV4Metadata:
        return self.misread(metadata, batch, pool)
