"""Convert a serving batch to the arguments of attention kernels (metadata: lengths, page tables) as SGLang does."""

from lab.calls.problem import AttentionCall
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows, UncountedTokens
from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache, PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata, mixed_tail_split
from lab.metadata.mla.dsv4 import DSV4Metadata, build_dsv4_metadata
from lab.metadata.mla.metadata import (
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    TRTLLMMLAPrefillMetadata,
    allocate_multi_ctas_kv_counters,
    build_mla_decode_metadata,
    build_mla_metadata,
    build_mla_prefill_metadata,
)

__all__ = [
    "AttentionCall",
    "DSV4Metadata",
    "DraftAttention",
    "ForwardBatch",
    "ForwardMode",
    "KVLayout",
    "KVPool",
    "PagedKVCache",
    "PagedLatentCache",
    "QueryLayout",
    "QueryRows",
    "SpecInfo",
    "TRTLLMMHAMetadata",
    "TRTLLMMLADecodeMetadata",
    "TRTLLMMLAPrefillMetadata",
    "UncountedTokens",
    "allocate_multi_ctas_kv_counters",
    "build_dsv4_metadata",
    "build_mha_metadata",
    "build_mla_decode_metadata",
    "build_mla_metadata",
    "build_mla_prefill_metadata",
    "mixed_tail_split",
]
