"""FlashInfer's TRT-LLM attention functions in Triton, for any GPU that Triton compiles for and for Triton's CPU interpreter.

On a GPU, `<name>` does not check arguments that differ from an earlier call's only in addresses and tensor contents
(`lab.kernels.portable.kept_calls`).
"""

from lab.extras import require

require("lab.kernels.portable", "triton")

from lab.kernels.portable.dsv4_decode import (
    prepare_trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_sparse_mla_dsv4,
)
from lab.kernels.portable.mla_decode import (
    prepare_trtllm_batch_decode_with_kv_cache_mla,
    trtllm_batch_decode_with_kv_cache_mla,
)
from lab.kernels.portable.paged import (
    prepare_trtllm_batch_context_with_kv_cache,
    prepare_trtllm_batch_decode_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from lab.kernels.portable.ragged_context import (
    prepare_trtllm_ragged_attention_deepseek,
    trtllm_ragged_attention_deepseek,
)

__all__ = [
    "prepare_trtllm_batch_context_with_kv_cache",
    "prepare_trtllm_batch_decode_sparse_mla_dsv4",
    "prepare_trtllm_batch_decode_with_kv_cache",
    "prepare_trtllm_batch_decode_with_kv_cache_mla",
    "prepare_trtllm_ragged_attention_deepseek",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_sparse_mla_dsv4",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
]
