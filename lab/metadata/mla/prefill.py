"""The attention calls of an MLA prefill: one over its new tokens, and one for each chunk of its cached prefixes. Their results
are merged by the LSE. Every layer projects a chunk's keys and values from the cache's entries. Chunk i has the i-th run of
``chunk_len`` tokens of every prefix, or the tokens that are left of it.

The sources in SGLang 0.5.23 are `prepare_chunked_prefix_cache_info` of `forward_batch_deepseek_mha_mixin.py` in
`sglang/srt/model_executor/`, the call in `TRTLLMMLABackend.forward_extend`, the merge in `_chunked_prefix_attn_mha` of
`forward_mha.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_cache import saturated_e4m3
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, device_lengths, exclusive_cumsum, host_lengths
from lab.metadata.mla.backend import MLALayer, without_keys
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata

CHUNK_CAPACITY = 128 * 1024  # largest number of tokens in a chunk: default of SGLANG_MAX_KV_CHUNK_CAPACITY in 0.5.23


def ragged_context_arguments(
    batch: ForwardBatch,
    metadata: TRTLLMMLAPrefillMetadata,
    layer: MLALayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_keys: int | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of the attention call of a prefill over its new tokens, or over `num_keys` cached tokens.

    Query and key are ``[num_tokens, heads, qk_nope_head_dim + qk_rope_head_dim]``, without absorption; rows after the requests'
    rows are left out. With an e4m3 cache, query, key and value are e4m3 (`quantised_prefill`). ``return_lse`` is True if a
    request has a cached prefix, because results over prefixes are merged by the LSE.
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
    """Return a function that computes one layer's attention over a prefill's new tokens, in `out` or a new tensor.

    The function returns the output without padding rows, or (output, LSE) if a request has a cached prefix. The LSE is float32
    ``[num_rows, heads]``, base 2. The caller may change the contents of the tensors between calls. Query and key are
    ``[num_tokens, heads, qk_nope_head_dim + qk_rope_head_dim]``.
    """
    arguments = ragged_context_arguments(batch, metadata, layer, query, key, value)
    own_out = None if out is None else out[: arguments["query"].shape[0]]
    arguments |= {"workspace_buffer": workspace_buffer, "out": own_out}
    return prepare(implementation, AttentionCall.RAGGED_CONTEXT.value, **arguments)


def quantised_prefill(layer: MLALayer, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert query, key, value to e4m3 (SGLang's `_quantize_fp8_qkv`): keys and values are divided by the layer's scales."""
    scales = (1.0, layer.k_scale, layer.v_scale)
    query, key, value = (
        saturated_e4m3(side.to(torch.float32) / scale) for side, scale in zip((query, key, value), scales, strict=True)
    )
    return query, key, value


@dataclass(frozen=True, eq=False)
class PrefixChunk:
    """The tokens of a batch's cached prefixes that one attention call reads; long prefixes need several calls."""

    seq_lens: Tensor  #: ``[batch_size]`` int32, tokens of each request, 0 or more
    cum_seq_lens: Tensor  #: ``[batch_size + 1]`` int32, 0, then the running sum of ``seq_lens``
    max_seq_len: int  #: largest number of tokens of a request
    kv_indices: Tensor  #: ``[num_tokens]`` int32, slots of the tokens, request after request
    has_empty: bool  #: True if a request has no token in the chunk


def plan_prefix_chunks(batch: ForwardBatch, pool: KVPool, capacity: int = CHUNK_CAPACITY) -> list[PrefixChunk]:
    """Return the chunks of the cached prefixes of a prefill, without reading the device on the host; [] if no request has a
    prefix.

    A chunk has at most `capacity` tokens, and at most ``capacity // batch_size`` tokens of each request.
    """
    check_attends(batch, pool)
    if not batch.forward_mode.is_prefill:
        raise ValueError(f"{batch.forward_mode!r} is no prefill: only prefills attend to their prefixes in chunks")
    prefixes = host_lengths(batch, "extend_prefix_lens_cpu")
    if not any(prefixes):
        return []
    chunk_len = capacity // batch.batch_size
    if chunk_len < 1:
        raise ValueError(f"capacity={capacity} has no token for each of the {batch.batch_size} requests: raise it")
    on_device = device_lengths(batch, "extend_prefix_lens")
    chunks = []
    for start in range(0, max(prefixes), chunk_len):
        lens = [min(max(prefix - start, 0), chunk_len) for prefix in prefixes]
        seq_lens = (on_device - start).clamp(min=0, max=chunk_len).to(torch.int32)
        cum_seq_lens = exclusive_cumsum(seq_lens)
        token = torch.arange(sum(lens), dtype=torch.int32, device=pool.device)
        request = torch.searchsorted(cum_seq_lens[1:], token, right=True)
        position = start + token - cum_seq_lens[request]
        slots = pool.req_to_token[batch.req_pool_indices[request].long(), position.long()]
        chunks.append(PrefixChunk(seq_lens, cum_seq_lens, max(lens), slots, min(lens) == 0))
    return chunks


def prepare_prefix_chunk(
    implementation: Any,
    batch: ForwardBatch,
    metadata: TRTLLMMLAPrefillMetadata,
    chunk: PrefixChunk,
    layer: MLALayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    workspace_buffer: Tensor | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that computes one layer's attention of all new tokens to one chunk of the cached prefixes. `key` and
    `value` have the chunk's tokens in the order of ``chunk.kv_indices``. A row sees all tokens of its request in the chunk.

    The function returns (output, LSE) without padding rows: 0 and -inf in rows without keys. The LSE is float32 ``[num_rows,
    heads]``, base 2.
    """
    num_tokens = chunk.kv_indices.shape[0]
    arguments = ragged_context_arguments(batch, metadata, layer, query, key, value, num_keys=num_tokens) | {
        "workspace_buffer": workspace_buffer,
        "seq_lens": chunk.seq_lens,
        "max_kv_len": chunk.max_seq_len,
        "cum_seq_lens_kv": chunk.cum_seq_lens,
        "o_sf_scale": -1.0,
        "is_causal": False,
        "return_lse": True,
    }
    call = prepare(implementation, AttentionCall.RAGGED_CONTEXT.value, **arguments)

    def run() -> tuple[Tensor, Tensor]:
        out, lse = call()
        if chunk.has_empty:
            row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
            request = torch.searchsorted(metadata.cum_seq_lens[1:], row, right=True)
            out, lse = without_keys(out, lse, (chunk.seq_lens == 0)[request])
        return out, lse

    return run
