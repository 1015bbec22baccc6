"""Call sites of attention in the forms in which SGLang and vLLM import FlashInfer's functions."""

from types import SimpleNamespace
from typing import Any

import flashinfer.decode
import flashinfer.mla
import flashinfer.prefill
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache as context


class SGLang:
    """`import flashinfer`, and the function's whole name at each call; the layer is an argument, as RadixAttention is."""

    def forward_decode(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        return flashinfer.decode.trtllm_batch_decode_with_kv_cache(**arguments)

    def forward_mla(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        return flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    def forward_ragged(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        return flashinfer.prefill.trtllm_ragged_attention_deepseek(**arguments)


class VLLM:
    """The functions themselves, at the head of a module, under another name, or in a function at the first call."""

    def forward_decode(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        return trtllm_batch_decode_with_kv_cache(**arguments)

    def forward_prefill(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        return context(**arguments)

    def forward_mla(self, layer: SimpleNamespace, **arguments: Any) -> Any:
        from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla

        return trtllm_batch_decode_with_kv_cache_mla(**arguments)
