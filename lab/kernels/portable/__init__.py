"""FlashInfer's TRT-LLM attention functions in Triton, for any GPU that Triton compiles for and for Triton's CPU interpreter.

On a GPU, `<name>` does not check arguments that differ from an earlier call's only in addresses and tensor contents
(`lab.kernels.portable.kept_calls`).
"""

from lab.extras import require

require("lab.kernels.portable", "triton")

from lab.kernels.portable import dsv4_decode, mla_decode, paged, ragged_context
from lab.kernels.portable.kept_calls import kept_at_once

prepare_trtllm_batch_context_with_kv_cache = paged.prepare_trtllm_batch_context_with_kv_cache
prepare_trtllm_batch_decode_sparse_mla_dsv4 = dsv4_decode.prepare_trtllm_batch_decode_sparse_mla_dsv4
prepare_trtllm_batch_decode_with_kv_cache = paged.prepare_trtllm_batch_decode_with_kv_cache
prepare_trtllm_batch_decode_with_kv_cache_mla = mla_decode.prepare_trtllm_batch_decode_with_kv_cache_mla
prepare_trtllm_ragged_attention_deepseek = ragged_context.prepare_trtllm_ragged_attention_deepseek
trtllm_batch_context_with_kv_cache = kept_at_once(prepare_trtllm_batch_context_with_kv_cache)
trtllm_batch_decode_sparse_mla_dsv4 = kept_at_once(prepare_trtllm_batch_decode_sparse_mla_dsv4)
trtllm_batch_decode_with_kv_cache = kept_at_once(prepare_trtllm_batch_decode_with_kv_cache)
trtllm_batch_decode_with_kv_cache_mla = kept_at_once(prepare_trtllm_batch_decode_with_kv_cache_mla)
trtllm_ragged_attention_deepseek = kept_at_once(prepare_trtllm_ragged_attention_deepseek)
