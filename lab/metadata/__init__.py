"""A serving batch turned into the arguments of an attention kernel, the way SGLang's backends do it."""

from lab.metadata.dispatch import (
    AttentionCall,
    AttentionLayer,
    PlannedCall,
    attention_call,
    plan_calls,
    prepare_attention,
)
from lab.metadata.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.forward_mode import ForwardMode
from lab.metadata.kv_pool import KVLayout, KVPool, PagedKVCache
from lab.metadata.mha import TRTLLMMHAMetadata, build_mha_metadata, mixed_tail_split

__all__ = [
    "AttentionCall",
    "AttentionLayer",
    "ForwardBatch",
    "ForwardMode",
    "KVLayout",
    "KVPool",
    "PagedKVCache",
    "PlannedCall",
    "SpecInfo",
    "TRTLLMMHAMetadata",
    "attention_call",
    "build_mha_metadata",
    "mixed_tail_split",
    "plan_calls",
    "prepare_attention",
]
