"""A serving batch turned into the arguments of an attention kernel, the way SGLang's backends do it."""

from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import AttentionCall, ForwardMode, MLAAttentionCall, QueryRows, UncountedTokens
from lab.metadata.engine.host_mirrors import LengthMirror, decide_needs_cpu_seq_lens
from lab.metadata.engine.kv_cache import KVLayout, PagedKVCache, PagedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.calls import (
    AttentionLayer,
    PlannedCall,
    attention_call,
    plan_calls,
    prepare_attention,
)
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata, mixed_tail_split
from lab.metadata.mla.calls import (
    MLALayer,
    mla_call_arguments,
    prepare_mla_attention,
    prepare_mla_prefill,
    ragged_context_arguments,
)
from lab.metadata.mla.metadata import (
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    TRTLLMMLAPrefillMetadata,
    allocate_multi_ctas_kv_counters,
    build_mla_decode_metadata,
    build_mla_metadata,
    build_mla_prefill_metadata,
)
from lab.metadata.speculation.verify_mask import (
    VerifyMask,
    VerifyMaskForm,
    preallocate_verify_mask,
)

__all__ = [
    "AttentionCall",
    "AttentionLayer",
    "DraftAttention",
    "ForwardBatch",
    "ForwardMode",
    "KVLayout",
    "KVPool",
    "LengthMirror",
    "MLAAttentionCall",
    "MLALayer",
    "PagedKVCache",
    "PagedLatentCache",
    "PlannedCall",
    "QueryLayout",
    "QueryRows",
    "SpecInfo",
    "TRTLLMMHAMetadata",
    "TRTLLMMLADecodeMetadata",
    "TRTLLMMLAPrefillMetadata",
    "UncountedTokens",
    "VerifyMask",
    "VerifyMaskForm",
    "allocate_multi_ctas_kv_counters",
    "attention_call",
    "build_mha_metadata",
    "build_mla_decode_metadata",
    "build_mla_metadata",
    "build_mla_prefill_metadata",
    "decide_needs_cpu_seq_lens",
    "mixed_tail_split",
    "mla_call_arguments",
    "plan_calls",
    "preallocate_verify_mask",
    "prepare_attention",
    "prepare_mla_attention",
    "prepare_mla_prefill",
    "ragged_context_arguments",
]
