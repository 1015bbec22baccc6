"""References, which define right results: slow attention in float64, and plain loops for metadata. They import only torch."""

from lab.references.assertion import assert_close_to_reference
from lab.references.draft_decode_kv_indices import generate_draft_decode_kv_indices
from lab.references.errors import Comparison, compare, relative_l2
from lab.references.paged_attention import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
)
from lab.references.plain_attention import attention, eager_attention
from lab.references.ragged_attention import trtllm_ragged_attention_deepseek
from lab.references.softmax_attention import visible_keys

__all__ = [
    "Comparison",
    "assert_close_to_reference",
    "attention",
    "compare",
    "eager_attention",
    "generate_draft_decode_kv_indices",
    "relative_l2",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "visible_keys",
]
