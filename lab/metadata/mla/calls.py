"""The attention calls of a forward pass on TRT-LLM MLA, and their arguments.

The rules are from SGLang 0.5.23, `sglang/srt/layers/attention/trtllm_mla_backend.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.kv_cache import PagedLatentCache, saturated_e4m3
from lab.metadata.engine.lengths import host_lengths
from lab.metadata.mla.metadata import QueryLayout, TRTLLMMLADecodeMetadata, TRTLLMMLAPrefillMetadata
from lab.metadata.mla.rows import pad_draft_extend_query


@dataclass(frozen=True)
class MLALayer:
    """One MLA layer of a model: the call arguments that differ from layer to layer, such as sizes and scales. Default sizes are
    DeepSeek-V3's.

    Absorption multiplies queries by the key projection, so that queries attend to the cache's latent entries directly. A decode
    uses absorption, a prefill does not.

    Attributes:
        kv_lora_rank, qk_rope_head_dim: elements of a cache entry's latent vector and of its rotary part.
        qk_nope_head_dim, v_head_dim: elements of a key without its rotary part, and of a value, without absorption.
    """

    softmax_scale: float  #: factor of Q·K^T, without the cache's scale
    #: the number by which the entries of an e4m3 cache (keys and values at once) and a prefill's e4m3 keys are divided. Calls
    #: over other caches do not use it. SGLang 0.5.23 applies it to keys only and does not divide when it writes the cache,
    #: which is right only for a scale of 1
    k_scale: float = 1.0
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    v_scale: float = 1.0  #: the number by which a prefill's e4m3 values are divided

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def mla_call_arguments(
    batch: ForwardBatch,
    metadata: TRTLLMMLADecodeMetadata,
    layer: MLALayer,
    query: Tensor,
    cache: PagedLatentCache,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of the MLA decode call, except `out` and `workspace_buffer`.

    Args:
        batch, metadata, layer: the forward pass, and the layer whose call it is.
        query: ``[batch_size, max_seq_len_q, heads, kv_lora_rank + qk_rope_head_dim]``, as `mla_query` returns it.
        multi_ctas_kv_counter_buffer: the result of `allocate_multi_ctas_kv_counters`; None: the implementation's own buffer.
    """
    return layer_arguments(layer, query, cache) | {
        "block_tables": metadata.block_kv_indices,
        "seq_lens": metadata.seq_lens_k,
        "max_seq_len": mla_max_seq_len(batch.forward_mode, metadata),
        "multi_ctas_kv_counter_buffer": multi_ctas_kv_counter_buffer,
    }


def layer_arguments(layer: MLALayer, query: Tensor, cache: PagedLatentCache) -> dict[str, Any]:
    """Return those keyword arguments of the MLA decode call that depend only on the layer, the query and the cache."""
    k_scale = layer.k_scale if cache.storage.dtype == E4M3 else 1.0
    return {
        "query": query,
        "kv_cache": cache.with_head_axis(),
        "qk_nope_head_dim": layer.qk_nope_head_dim,
        "kv_lora_rank": layer.kv_lora_rank,
        "qk_rope_head_dim": layer.qk_rope_head_dim,
        "bmm1_scale": layer.softmax_scale * k_scale,
        "bmm2_scale": k_scale,
    }


def mla_max_seq_len(mode: ForwardMode, metadata: TRTLLMMLADecodeMetadata) -> int:
    """Return the decode call's ``max_seq_len`` for a pass with this mode and metadata: ``max_seq_len_k``, plus the query rows
    per request in verification and draft extend.

    ``max_seq_len_k`` of an eager verification counts the draft tokens too, so that they count twice, as in SGLang.
    """
    return metadata.max_seq_len_k + (0 if mode.query_rows is QueryRows.ONE else metadata.max_seq_len_q)


def mla_query(metadata: TRTLLMMLADecodeMetadata, query: Tensor, padded: Tensor | None = None) -> Tensor:
    """Return the query rows of a pass in the kernel's shape ``[batch_size, max_seq_len_q, heads, head_dim]``: a view or, if
    `metadata.query_layout` is PADDED, a copy with padding rows.

    Args:
        query: ``[num_tokens, heads, head_dim]``. Rows after ``metadata.num_rows`` are padding and are left out.
        padded: the tensor to which the copy is written; None: a new tensor.

    Raises:
        ValueError: the query has fewer rows than ``metadata.num_rows``, or `padded` has another shape.
    """
    shape = (metadata.batch_size, metadata.max_seq_len_q, *query.shape[1:])
    num_rows = metadata.num_rows
    if query.shape[0] < num_rows:
        raise ValueError(f"query has {query.shape[0]} rows, the metadata's requests have {num_rows}: pass them all")
    if metadata.query_layout is QueryLayout.VIEW:
        return query[:num_rows].view(shape)
    assert metadata.seq_lens_q is not None
    assert metadata.cu_seqlens_q is not None
    padded = query.new_empty(shape) if padded is None else padded
    return pad_draft_extend_query(query[:num_rows], metadata.seq_lens_q, metadata.cu_seqlens_q, padded)


def ragged_context_arguments(
    batch: ForwardBatch,
    metadata: TRTLLMMLAPrefillMetadata,
    layer: MLALayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_keys: int | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of a prefill's call over its new tokens (`lab.calls.RaggedContextCall`).

    ``return_lse`` is True if a request has a cached prefix, because results over prefixes (`lab.metadata.mla.prefix_chunks`)
    are merged by the LSE, the log-sum-exp of the logits.

    Args:
        batch, metadata, layer: the prefill, and the layer whose call it is.
        query, key: ``[num_tokens, heads, qk_nope_head_dim + qk_rope_head_dim]``, without absorption. Padding rows after the
            requests' rows are left out.
        value: ``[num_tokens, heads, v_head_dim]``. With an e4m3 cache, query, key and value are e4m3 (`quantised_prefill`).
        num_keys: number of keys of a call over a chunk of prefixes; None: the keys are the new tokens.

    Raises:
        ValueError: ``metadata.fallback_to_flashinfer_impl`` is True, or a tensor has another shape.
    """
    if metadata.fallback_to_flashinfer_impl:
        raise ValueError("the metadata falls back to FlashInfer's own ragged kernels: this call is not made")
    num_rows = sum(host_lengths(batch, "extend_seq_lens_cpu"))
    num_keys = num_rows if num_keys is None else num_keys
    for name, tensor, count, head_dim in (
        ("query", query, num_rows, layer.qk_head_dim),
        ("key", key, num_keys, layer.qk_head_dim),
        ("value", value, num_keys, layer.v_head_dim),
    ):
        if tensor.dim() != 3 or tensor.shape[0] < count or tensor.shape[2] != head_dim:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected [at least {count}, heads, {head_dim}]: pass keys and "
                "values before absorption"
            )
    return {
        "query": query[:num_rows],
        "key": key[:num_keys],
        "value": value[:num_keys],
        "workspace_buffer": None,
        "seq_lens": metadata.seq_lens,
        "max_q_len": metadata.max_seq_len,
        "max_kv_len": metadata.max_seq_len,
        "bmm1_scale": layer.softmax_scale * (layer.k_scale if key.dtype == E4M3 else 1.0),
        "bmm2_scale": layer.v_scale if value.dtype == E4M3 else 1.0,
        "o_sf_scale": 1.0,
        "batch_size": batch.batch_size,
        "window_left": -1,
        "cum_seq_lens_q": metadata.cum_seq_lens,
        "cum_seq_lens_kv": metadata.cum_seq_lens,
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": any(host_lengths(batch, "extend_prefix_lens_cpu")),
    }


def prepare_mla_prefill(
    implementation: Any,
    batch: ForwardBatch,
    metadata: TRTLLMMLAPrefillMetadata,
    layer: MLALayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
) -> Callable[[], Any]:
    """Prepare one layer's attention over a prefill's new tokens, with FlashInfer's ragged context call.

    Args:
        implementation: any object with FlashInfer's ragged context function, such as `lab.references`.
        batch, metadata, layer, query, key, value: as in `ragged_context_arguments`.
        out: ``[num_tokens, heads, v_head_dim]``; padding rows are not written. None: a new tensor.
        workspace_buffer: the argument of FlashInfer's call; None: the implementation's own workspace.

    Returns:
        A function that returns the output without padding rows, or (output, LSE) if a request has a cached prefix. The LSE is
        float32 ``[num_rows, heads]``, base 2. The caller may change the contents of the tensors between calls.

    Raises:
        ValueError: `ragged_context_arguments` refuses the pass.
    """
    arguments = ragged_context_arguments(batch, metadata, layer, query, key, value)
    arguments |= {
        "workspace_buffer": workspace_buffer,
        "out": None if out is None else out[: arguments["query"].shape[0]],
    }
    return prepare_ragged(implementation, **arguments)


def prepare_ragged(implementation: Any, **arguments: Any) -> Callable[[], Any]:
    return prepare(implementation, AttentionCall.RAGGED_CONTEXT.value, **arguments)


def mla_query_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a decode call's query is cast: e4m3, without a scale, if the cache is e4m3, else the model's
    `dtype` (SGLang's `forward_decode`).

    Raises:
        ValueError: the cache has 4-bit values (uint8). SGLang converts such a cache to the model's dtype before each layer's
            call (`MLATokenToKVPoolFP4.get_key_buffer`).
    """
    if kv_dtype == torch.uint8:
        raise ValueError("no MLA kernel reads a cache of 4 bits: convert it to the model's dtype first, as SGLang does")
    return E4M3 if kv_dtype == E4M3 else dtype


def quantised_prefill(layer: MLALayer, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a prefill's query, key and value to e4m3, as SGLang's `_quantize_fp8_qkv` does if the cache is e4m3.

    Keys and values are divided by the layer's `k_scale` and `v_scale`. The query has no scale.
    """
    scales = (1.0, layer.k_scale, layer.v_scale)
    query, key, value = (
        saturated_e4m3(side.to(torch.float32) / scale) for side, scale in zip((query, key, value), scales, strict=True)
    )
    return query, key, value
