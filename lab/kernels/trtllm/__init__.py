"""FlashInfer's TRT-LLM attention functions: the kernels trtllm-gen, XQA and fmha_v2.

`prepare_<name>` returns a function that runs a call of `<name>` any number of times (`lab.kernels.prepare`).
"""

from lab.calls import ContextCall, DecodeCall, DSV4DecodeCall, MLADecodeCall, RaggedContextCall
from lab.kernels.flashinfer_call import entries
from lab.kernels.support.trtllm import kernel_for as kernel_for
from lab.kernels.trtllm import dsv4_decode, mla_decode, paged, ragged_context

causal_mask = paged.causal_mask
prepare_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries(
    "prepare", DecodeCall, paged.prepare_decode
)
prepare_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries(
    "prepare", ContextCall, paged.prepare_context
)
prepare_trtllm_batch_decode_with_kv_cache_mla, trtllm_batch_decode_with_kv_cache_mla = entries(
    "prepare", MLADecodeCall, mla_decode.prepare_mla
)
prepare_trtllm_batch_decode_sparse_mla_dsv4, trtllm_batch_decode_sparse_mla_dsv4 = entries(
    "prepare", DSV4DecodeCall, dsv4_decode.prepare_dsv4
)
prepare_trtllm_ragged_attention_deepseek, trtllm_ragged_attention_deepseek = entries(
    "prepare", RaggedContextCall, ragged_context.prepare_ragged
)
