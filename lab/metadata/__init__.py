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
from lab.metadata.host_mirrors import LengthMirror, decide_needs_cpu_seq_lens
from lab.metadata.kv_pool import KVLayout, KVPool, PagedKVCache
from lab.metadata.mha import TRTLLMMHAMetadata, build_mha_metadata, mixed_tail_split
from lab.metadata.verify_mask import (
    VerifyMask,
    VerifyMaskForm,
    get_verify_buffers_to_fill_after_draft,
    preallocate_verify_mask,
)

__all__ = [
    "AttentionCall",
    "AttentionLayer",
    "ForwardBatch",
    "ForwardMode",
    "KVLayout",
    "KVPool",
    "LengthMirror",
    "PagedKVCache",
    "PlannedCall",
    "SpecInfo",
    "TRTLLMMHAMetadata",
    "VerifyMask",
    "VerifyMaskForm",
    "attention_call",
    "build_mha_metadata",
    "decide_needs_cpu_seq_lens",
    "get_verify_buffers_to_fill_after_draft",
    "mixed_tail_split",
    "plan_calls",
    "preallocate_verify_mask",
    "prepare_attention",
]
