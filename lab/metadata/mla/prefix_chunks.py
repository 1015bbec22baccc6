"""Attend to the cached prefixes of an MLA prefill in chunks: one call per chunk over dense keys and values, merged by the LSE.

A prefill's new tokens attend to each other in one causal call. For cached prefixes, every layer projects keys and values from
the cache's entries, chunk by chunk to save memory. Chunk i has the i-th run of ``chunk_len`` tokens of every prefix, or what is
left of it.

The sources in SGLang 0.5.23 are `prepare_chunked_prefix_cache_info` of `forward_batch_deepseek_mha_mixin.py` in
`sglang/srt/model_executor/`, the call in `TRTLLMMLABackend.forward_extend`, the merge in `_chunked_prefix_attn_mha` of
`forward_mha.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, device_lengths, exclusive_cumsum, host_lengths
from lab.metadata.mla.calls import MLALayer, prepare_ragged, ragged_context_arguments
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata
from lab.metadata.mla.rows import without_keys

CHUNK_CAPACITY = 128 * 1024  # largest number of tokens in a chunk: default of SGLANG_MAX_KV_CHUNK_CAPACITY in 0.5.23


@dataclass(frozen=True, eq=False)
class PrefixChunk:
    """One chunk of the cached prefixes of a batch: the tokens that one call reads, their number per request, and slots."""

    seq_lens: Tensor  #: ``[batch_size]`` int32, tokens of each request, 0 or more
    cum_seq_lens: Tensor  #: ``[batch_size + 1]`` int32, 0, then the running sum of ``seq_lens``
    max_seq_len: int  #: largest number of tokens of a request
    kv_indices: Tensor  #: ``[num_tokens]`` int32, slots of the tokens, request after request
    has_empty: bool  #: True if a request has no token in the chunk


def plan_prefix_chunks(batch: ForwardBatch, pool: KVPool, capacity: int = CHUNK_CAPACITY) -> list[PrefixChunk]:
    """Return the chunks of the cached prefixes of a prefill over requests of the pool, without reading the device on the host;
    [] if no request has a prefix.

    A chunk has at most `capacity` tokens, and at most ``capacity // batch_size`` tokens of each request.

    Raises:
        ValueError: the mode is no prefill, a length is missing, or `capacity` is below the number of requests.
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
    return [
        _chunk(
            batch, pool, on_device, [min(max(prefix - start, 0), chunk_len) for prefix in prefixes], start, chunk_len
        )
        for start in range(0, max(prefixes), chunk_len)
    ]


def _chunk(
    batch: ForwardBatch, pool: KVPool, prefixes: Tensor, lens: list[int], start: int, chunk_len: int
) -> PrefixChunk:
    seq_lens = (prefixes - start).clamp(min=0, max=chunk_len).to(torch.int32)
    cum_seq_lens = exclusive_cumsum(seq_lens)
    token = torch.arange(sum(lens), dtype=torch.int32, device=pool.device)
    request = torch.searchsorted(cum_seq_lens[1:], token, right=True)
    position = start + token - cum_seq_lens[request]
    slots = pool.req_to_token[batch.req_pool_indices[request].long(), position.long()]
    return PrefixChunk(seq_lens, cum_seq_lens, max(lens), slots, min(lens) == 0)


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
    """Prepare one layer's attention of all new tokens to the tokens of a chunk. A row sees all tokens of its request in the
    chunk. If there are none, its output is 0 and its LSE -inf (`without_keys`).

    Args:
        implementation: any object with FlashInfer's ragged context function, such as `lab.references`.
        batch, metadata, layer, query: as in `lab.metadata.mla.calls.ragged_context_arguments`.
        key, value: ``[at least num_tokens of the chunk, heads, head_dim]``, without absorption, in the order of ``kv_indices``.
        workspace_buffer: as in `lab.metadata.mla.calls.prepare_mla_prefill`.

    Returns:
        A function that returns the output without padding rows, and the LSE: float32 ``[num_rows, heads]``, base 2.

    Raises:
        ValueError: `ragged_context_arguments` refuses the pass.
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
    call = prepare_ragged(implementation, **arguments)

    def run() -> tuple[Tensor, Tensor]:
        out, lse = call()
        if chunk.has_empty:
            row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
            request = torch.searchsorted(metadata.cum_seq_lens[1:], row, right=True)
            out, lse = without_keys(out, lse, (chunk.seq_lens == 0)[request])
        return out, lse

    return run
