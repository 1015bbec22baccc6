"""SGLang's TRT-LLM MLA backend: which calls of the decode kernel a forward pass makes, with which arguments, and how query rows
are padded.

The rules are from SGLang 0.5.23, `sglang/srt/layers/attention/trtllm_mla_backend.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.calls.problem import E4M3, AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import MetadataBuffers, RebuiltMetadata, cast_to, in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_cache import PagedLatentCache, ShardedLatentCache
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.metadata import (
    MLAGraphMetadata,
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    build_mla_decode_metadata,
    new_block_table,
)


@dataclass(frozen=True)
class MLALayer:
    """One MLA layer of a model: the call arguments that differ from layer to layer. Default sizes are DeepSeek-V3's.

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


@dataclass(frozen=True, eq=False)
class TRTLLMMLABackend:
    """Builds metadata and makes decode calls as SGLang's TRT-LLM MLA backend does. For prefills see `prepare_mla_prefill`."""

    supports_draft_extend_graph: ClassVar[bool] = True

    #: any object with FlashInfer's MLA decode function, such as `lab.references`; None if only metadata is built
    implementation: Any = None
    attention: DraftAttention = DraftAttention.MLA  #: how many keys a request has in a draft step
    draft_extend: QueryLayout = QueryLayout.PADDED  #: as in `MLAGraphMetadata`
    #: the rank of decode context parallelism (DCP) whose metadata this backend builds; None without DCP
    dcp: DecodeContextParallel | None = None
    query_dtype: torch.dtype | None = None  #: dtype to which each query is cast; None: the result of `mla_query_dtype`

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> TRTLLMMLADecodeMetadata:
        if self.dcp is not None:
            return build_mla_dcp_metadata(batch, pool, self.dcp, self.attention)
        return build_mla_decode_metadata(batch, pool, self.attention)

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[TRTLLMMLADecodeMetadata]]:
        if self.dcp is not None:
            return {mode: RebuiltMetadata(mode, pool, self.build_metadata) for mode in modes}
        # Without decode context parallelism all modes share one block table.
        table = new_block_table(modes, pool, max_batch_size, self.attention, self.draft_extend)
        return {mode: MLAGraphMetadata(mode, pool, table, self.attention, self.draft_extend) for mode in modes}

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: TRTLLMMLADecodeMetadata,
        layer: MLALayer,
        query: Tensor,
        cache: PagedLatentCache,
        *,
        max_context_len: int | None = None,
        out: Tensor,
        padded_query: Tensor | None = None,
    ) -> Callable[[], Tensor]:
        """Return a function that computes one layer's attention on the decode kernel and writes `out`.

        Args:
            query: ``[num_tokens, heads, kv_lora_rank + qk_rope_head_dim]``.
            out: ``[num_tokens, heads, kv_lora_rank]``; rows after ``metadata.num_rows`` are not written.
            padded_query: with `QueryLayout.PADDED`, a buffer for the padded copy of the query, in the dtype of the calls.
                Several passes may use the same buffer. None: a new tensor.
        """
        if self.dcp is not None:
            raise ValueError(
                "one rank's output is a part of a request's: prepare_mla_dcp_attention calls and merges all ranks"
            )
        if batch.batch_size > metadata.batch_size:
            raise ValueError(
                f"the batch has {batch.batch_size} requests and the metadata {metadata.batch_size}: padding outgrew it, build "
                "it anew (lab.metadata.mla.metadata.replan_outgrown)"
            )
        if metadata.num_rows == 0:
            return lambda: out
        given, steps = cast_to(self.query_dtype or mla_query_dtype(query.dtype, cache.storage.dtype), query)
        shape = (metadata.batch_size, metadata.max_seq_len_q)
        own_out, offsets = out[: metadata.num_rows], metadata.cu_seqlens_q
        is_padded = metadata.query_layout is QueryLayout.PADDED
        if is_padded:
            buffer = given.new_empty(*shape, *given.shape[1:]) if padded_query is None else padded_query
            dense_query = dense_block(buffer, *shape, *given.shape[1:])
            dense_out = out.new_empty(*shape, *out.shape[1:])
            steps.append(partial(mla_query, metadata, given, dense_query))
        else:
            dense_query, dense_out = mla_query(metadata, given), own_out.view(*shape, *out.shape[1:])
        arguments = mla_call_arguments(batch, metadata, layer, dense_query, cache)
        arguments |= {"out": dense_out, "workspace_buffer": None}
        steps.append(prepare(self.implementation, AttentionCall.MLA_DECODE.value, **arguments))
        if is_padded:
            assert offsets is not None
            steps.append(partial(unpad_draft_extend_output, dense_out, offsets, own_out))
        return in_turn(steps, out)


def mla_call_arguments(
    batch: ForwardBatch, metadata: TRTLLMMLADecodeMetadata, layer: MLALayer, query: Tensor, cache: PagedLatentCache
) -> dict[str, Any]:
    return layer_arguments(layer, query, cache) | {
        "block_tables": metadata.block_kv_indices,
        "seq_lens": metadata.seq_lens_k,
        "max_seq_len": mla_max_seq_len(batch.forward_mode, metadata),
    }


def layer_arguments(layer: MLALayer, query: Tensor, cache: PagedLatentCache) -> dict[str, Any]:
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
    """Return the decode call's ``max_seq_len``, in modes of several rows per request ``max_seq_len_k + max_seq_len_q``, as in
    SGLang: in an eager verification, whose ``max_seq_len_k`` counts the draft tokens, they count twice.
    """
    return metadata.max_seq_len_k + (0 if mode.query_rows is QueryRows.ONE else metadata.max_seq_len_q)


def mla_query(metadata: TRTLLMMLADecodeMetadata, query: Tensor, padded: Tensor | None = None) -> Tensor:
    """Return the query rows of a pass, ``[num_tokens, heads, head_dim]``, in the kernel's shape ``[batch_size, max_seq_len_q,
    heads, head_dim]``: as a view or, if `metadata.query_layout` is PADDED, as a copy with padding rows. The copy is written to
    `padded` if given.

    Rows after ``metadata.num_rows`` are left out. Raises ValueError for too few rows, or if `padded` has another shape.
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


def mla_query_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which a decode call's query is cast, without a scale: e4m3 with an e4m3 cache, else `dtype`, the
    model's (SGLang's `forward_decode`). Raises ValueError for a cache of 4-bit values (uint8), which SGLang converts to the
    model's dtype before each layer's call (`MLATokenToKVPoolFP4.get_key_buffer`).
    """
    if kv_dtype == torch.uint8:
        raise ValueError("no MLA kernel reads a cache of 4 bits: convert it to the model's dtype first, as SGLang does")
    return E4M3 if kv_dtype == E4M3 else dtype


def pad_draft_extend_query(query: Tensor, seq_lens_q: Tensor, cu_seqlens_q: Tensor, padded: Tensor) -> Tensor:
    """Copy the query rows of each request i, which begin at ``cu_seqlens_q[i]``, to the front of ``padded[i]``,
    ``[max_seq_len_q, heads, head_dim]``. Later rows of ``padded[i]`` become zero. Return `padded`. The host does not read the
    device.
    """
    _check_block(padded, seq_lens_q.shape[0], query)
    if query.shape[0] == 0:
        return padded.zero_()
    position = torch.arange(padded.shape[1], device=query.device)
    row = (cu_seqlens_q[:-1, None] + position).clamp(max=query.shape[0] - 1)
    rows = _bytes(query)[row.long()]
    is_padding = position >= seq_lens_q[:, None]
    padded.view(torch.uint8).copy_(rows.masked_fill(is_padding[:, :, None, None], 0))
    return padded


def unpad_draft_extend_output(padded: Tensor, cu_seqlens_q: Tensor, out: Tensor) -> Tensor:
    """Copy the rows of each request i from the front of ``padded[i]`` to `out`, ``[num_rows, heads, kv_lora_rank]``, request
    after request. The remaining rows of `out` become zero. Return `out`. The host does not read the device.
    """
    batch_size, max_seq_len_q = padded.shape[:2]
    _check_block(padded, cu_seqlens_q.shape[0] - 1, out)
    if batch_size == 0 or max_seq_len_q == 0:
        return out.zero_()
    row = torch.arange(out.shape[0], dtype=torch.int32, device=out.device)
    request = torch.searchsorted(cu_seqlens_q[1:], row, right=True)
    is_padding = request >= batch_size
    request = request.clamp(max=batch_size - 1)
    position = (row - cu_seqlens_q[request]).clamp(max=max_seq_len_q - 1)
    rows = _bytes(padded)[request, position.long()]
    out.view(torch.uint8).copy_(rows.masked_fill(is_padding[:, None, None], 0))
    return out


def without_keys(out: Tensor, lse: Tensor, is_empty: Tensor) -> tuple[Tensor, Tensor]:
    """Return (`out`, `lse`) with 0 and -inf in the rows that see no key. `is_empty`, bool ``[num_rows]``, marks these rows."""
    return out.masked_fill(is_empty[:, None, None], 0.0), lse.masked_fill(is_empty[:, None], -math.inf)


def merge_by_lse(outs: Tensor, lses: Tensor) -> Tensor:
    """Merge the outputs of attention over several parts of the keys, ``[num_parts, num_rows, heads, head_dim]``, by the parts'
    LSEs, float32 ``[num_parts, num_rows, heads]``, base 2, -inf for a part without keys. Return float32, 0 in rows that see no
    key in any part.
    """
    weights = torch.softmax(lses * math.log(2.0), dim=0).nan_to_num(0.0)
    return (weights.unsqueeze(-1) * outs.float()).sum(dim=0)


def dense_block(buffer: Tensor, *shape: int) -> Tensor:
    """Return the first elements of a buffer as a contiguous tensor of the given shape. The kernel ignores strides, so it would
    read wrong rows from SGLang 0.5.12's slice ``buffer[:batch_size, :max_seq_len_q]`` of a wider buffer.
    """
    needed = torch.Size(shape).numel()
    if needed > buffer.numel():
        raise ValueError(f"the buffer {list(buffer.shape)} holds less than {list(shape)}: allocate a larger one")
    return buffer.flatten()[:needed].view(shape)


def _check_block(padded: Tensor, batch_size: int, rows: Tensor) -> None:
    if padded.dtype != rows.dtype:
        raise TypeError(f"padded has dtype {padded.dtype}, the rows {rows.dtype}: give both the same")
    if padded.dim() != 4 or padded.shape[0] != batch_size or padded.shape[2:] != rows.shape[1:]:
        raise ValueError(
            f"padded has shape {list(padded.shape)}, expected [{batch_size}, max_seq_len_q, *{list(rows.shape[1:])}] for rows "
            f"of shape {list(rows.shape)}"
        )


def _bytes(tensor: Tensor) -> Tensor:  # torch cannot gather every 8-bit float dtype
    return tensor.contiguous().view(torch.uint8)


def prepare_mla_dcp_attention(
    implementation: Any,
    batch: ForwardBatch,
    metadata: Sequence[TRTLLMMLADecodeMetadata],
    layer: MLALayer,
    query: Tensor,
    cache: ShardedLatentCache,
    *,
    out: Tensor,
    query_dtype: torch.dtype | None = None,
    cute_dsl: bool = False,
) -> Callable[[], Tensor]:
    """Return a function that computes one layer's attention with decode context parallelism: one call per rank, with the rank's
    element of `metadata`, and a merge of the ranks' outputs by their LSEs. `out` is ``[num_tokens, heads, kv_lora_rank]``.

    SGLang's ranks run at the same time and exchange their LSEs; here one process calls each rank's kernel in turn. `cute_dsl`
    says that the kernel is CuTe DSL's. This kernel also reads the number of keys that each request has on all ranks, so that it
    supports several query rows per request. Its LSE is to the base e (SGLang 0.5.23, `cutedsl_mla_backend.py`).
    """
    if batch.forward_mode.query_rows is not QueryRows.ONE and not cute_dsl:
        raise ValueError(
            f"{batch.forward_mode!r} with DCP has several query rows per request, whose last keys lie on several GPUs: only "
            "CuTe DSL's kernel takes global lengths (enable_dcp); pass cute_dsl=True, or decode one row"
        )
    if len(metadata) != len(cache.storage):
        raise ValueError(f"{len(metadata)} ranks' metadata for a cache of {len(cache.storage)}: pass one for each")
    given, steps = cast_to(query_dtype, query)
    calls = []
    for rank, own in enumerate(metadata):
        dense = mla_query(own, given)
        arguments = mla_call_arguments(batch, own, layer, dense, cache.of_rank(rank)) | {
            "out": out.new_empty(*dense.shape[:-1], out.shape[-1]),
            "workspace_buffer": None,
            "max_seq_len": own.max_seq_len_k,
            "return_lse": True,
        }
        if cute_dsl:
            arguments |= {
                "backend": "cute-dsl",
                "enable_dcp": True,
                "cp_world": len(metadata),
                "cp_rank": rank,
                "causal_seqlens_kv_global": own.global_seq_lens_k,
            }
        calls.append(prepare(implementation, AttentionCall.MLA_DECODE.value, **arguments))
    lens = [own.seq_lens_k for own in metadata]
    return in_turn([*steps, partial(merge_ranks, calls, lens, out, lse_is_base_e=cute_dsl)], out)


def merge_ranks(
    calls: Sequence[Callable[[], tuple[Tensor, Tensor]]],
    lens: Sequence[Tensor],
    out: Tensor,
    lse_is_base_e: bool = False,
) -> None:
    """Call each rank's function in `calls`, which returns (output, LSE), merge the outputs by the LSEs, and write the result to
    `out`. `lens` has, for each rank, the number of keys of each request. All requests have equally many rows in `out`.
    """
    outs, lses = [], []
    for own_lens, call in zip(lens, calls, strict=True):
        rank_out, lse = call()
        is_empty = (own_lens == 0).repeat_interleave(len(out) // max(len(own_lens), 1))
        lse = lse / math.log(2.0) if lse_is_base_e else lse
        results = without_keys(rank_out.view(out.shape), lse.view(out.shape[:-1]), is_empty)
        outs.append(results[0])
        lses.append(results[1])
    out.copy_(merge_by_lse(torch.stack(outs), torch.stack(lses)))
