"""Right builders of metadata: the lab's builder, followed by one stage that a wrong builder replaces."""

from collections.abc import Callable

from corpus.wrong import DSV4_METADATA, MHA_METADATA, MLA_METADATA, MLA_PREFILL, Model
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
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


def in_mode(*modes: ForwardMode) -> Callable[..., bool]:
    """Return a value of `where`: the batch has one of these modes."""
    return lambda _, batch, *__: batch.forward_mode in modes


def of_rows(rows: QueryRows) -> Callable[..., bool]:
    """Return a value of `where`: the batch's mode has such query rows."""
    return lambda _, batch, *__: batch.forward_mode.query_rows is rows


class MHABuilder(Model, interface=(MHA_METADATA,)):
    def build_mha_metadata(self, batch: ForwardBatch, pool: KVPool, **options: bool) -> TRTLLMMHAMetadata:
        return self.applied(build_mha_metadata(batch, pool, **options), batch, pool)


class MLABuilder(Model, interface=(MLA_METADATA,)):
    def build_mla_decode_metadata(
        self, batch: ForwardBatch, pool: KVPool, attention: DraftAttention = DraftAttention.MLA
    ) -> TRTLLMMLADecodeMetadata:
        self.attention = self.counted(attention)
        return self.applied(build_mla_decode_metadata(batch, pool, self.attention), batch, pool)

    def counted(self, attention: DraftAttention) -> DraftAttention:
        return attention


class MLAPrefillBuilder(Model, interface=(MLA_PREFILL,)):
    def build_mla_prefill_metadata(self, batch: ForwardBatch, pool: KVPool, **given: bool) -> TRTLLMMLAPrefillMetadata:
        return self.applied(build_mla_prefill_metadata(batch, pool, **given), batch, given)


class DSV4Builder(Model, interface=(DSV4_METADATA,)):
    def build_dsv4_metadata(self, batch: ForwardBatch, pool: KVPool) -> DSV4Metadata:
        return self.applied(build_dsv4_metadata(batch, pool), batch, pool)
