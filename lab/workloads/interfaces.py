"""The functions that can be judged."""

from typing import Any

from lab.named_enum import NamedEnum


class Interface(NamedEnum):
    """A function of an implementation. The value is the function's name."""

    DECODE = "trtllm_batch_decode_with_kv_cache"
    CONTEXT = "trtllm_batch_context_with_kv_cache"
    MLA_DECODE = "trtllm_batch_decode_with_kv_cache_mla"
    RAGGED_CONTEXT = "trtllm_ragged_attention_deepseek"
    DRAFT_KV_INDICES = "generate_draft_decode_kv_indices"
    MHA_METADATA = "build_mha_metadata"
    MLA_METADATA = "build_mla_decode_metadata"
    MLA_PREFILL = "build_mla_prefill_metadata"


ATTENTION = (Interface.DECODE, Interface.CONTEXT, Interface.MLA_DECODE)


def interfaces_of(implementation: Any) -> list[Interface]:
    """Return the judged functions that an implementation has."""
    return [interface for interface in Interface if callable(getattr(implementation, interface.value, None))]
