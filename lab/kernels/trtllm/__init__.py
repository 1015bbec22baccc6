"""FlashInfer's TRT-LLM attention functions: the kernels trtllm-gen, XQA and fmha_v2.

`prepare_<name>` returns a function that runs a call of `<name>` any number of times (`lab.kernels.prepare`).
"""

from lab.kernels.support.trtllm import kernel_for
from lab.kernels.trtllm.dsv4_decode import (
    prepare_trtllm_batch_decode_sparse_mla_dsv4,
    trtllm_batch_decode_sparse_mla_dsv4,
)
from lab.kernels.trtllm.mla_decode import (
    prepare_trtllm_batch_decode_with_kv_cache_mla,
    trtllm_batch_decode_with_kv_cache_mla,
)
from lab.kernels.trtllm.paged import (
    causal_mask,
    prepare_trtllm_batch_context_with_kv_cache,
    prepare_trtllm_batch_decode_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from lab.kernels.trtllm.ragged_context import prepare_trtllm_ragged_attention_deepseek, trtllm_ragged_attention_deepseek

__all__ = [
    "causal_mask",
    "kernel_for",
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
