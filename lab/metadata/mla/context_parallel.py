"""Decode context parallelism (DCP): each GPU holds a part of every request's tokens, and the GPUs' outputs are merged.

* group, size, rank: the GPUs that share requests, how many they are, and the number of one GPU. Each has all query heads.
* owner: the token at position p of a request belongs to rank p % size.
* widened pool: the pool from which the engine allocates. A page of it has ``size`` times as many tokens as a page of one GPU's
  cache. Slot s of the pool is slot s // size of rank s % size, so that a page has the same index on all GPUs.

The sources in SGLang 0.5.23 are `_get_dcp_local_seq_lens`, `_fill_dcp_block_kv_indices` and `_forward_decode_dcp` of
`trtllm_mla_backend.py`. SGLang's ranks run at the same time and exchange their LSEs; here one process calls each rank's kernel
in turn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.kv_cache import ShardedLatentCache, buffer_in
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, check_attends, key_lens, max_query_rows, uncounted_tokens
from lab.metadata.mla.calls import MLALayer, mla_call_arguments, mla_query
from lab.metadata.mla.metadata import (
    TRTLLMMLADecodeMetadata,
    check_mla,
    longest_request,
    mla_block_table,
    mla_block_table_width,
)
from lab.metadata.mla.rows import merge_by_lse, without_keys


@dataclass(frozen=True)
class DecodeContextParallel:
    """One GPU of decode context parallelism: `size` is the number of GPUs that share each request, `rank` this GPU's number."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} of size={self.size}: a group has 2 GPUs or more, ranks 0 to size - 1")

    def local_lens(self, lens: Tensor) -> Tensor:
        """Return how many of the first ``lens[i]`` tokens of each request i this rank owns, in a new int32 tensor."""
        return ((lens - self.rank + self.size - 1) // self.size).clamp(min=0).to(torch.int32)

    def local_bound(self, most: int) -> int:
        """Return how many of a request's first `most` tokens this rank owns, but at least 1, as the kernel requires."""
        return max((most - self.rank + self.size - 1) // self.size, 1)

    def page_size(self, pool: KVPool) -> int:
        """Return the number of tokens in one GPU's page. Raises ValueError if the pool's page size is no multiple of `size`."""
        if pool.page_size % self.size:
            raise ValueError(
                f"page_size={pool.page_size} is no multiple of the {self.size} GPUs: widen the pool's pages by their number"
            )
        return pool.page_size // self.size


def build_mla_dcp_metadata(
    batch: ForwardBatch, pool: KVPool, dcp: DecodeContextParallel, attention: DraftAttention = DraftAttention.MLA
) -> TRTLLMMLADecodeMetadata:
    """Build one rank's metadata of an eager decode, draft step or verification (SGLang 0.5.23).

    ``seq_lens_k`` counts the keys of each request that the rank owns, 0 or more; ``global_seq_lens_k`` counts the keys on all
    ranks, as `build_mla_decode_metadata` does. Column c of the block table has ``req_to_token[request, rank + c * size *
    page_size] // size // page_size`` for each page with a token of the rank, then -1.

    Args:
        batch: the forward pass, with the slots and lengths of the whole group.
        pool: the group's pool, whose page has as many tokens as one page of each GPU together: 32 or 64 per GPU.
        dcp: the rank whose metadata is built.
        attention: how a draft step counts keys.

    Raises:
        ValueError: the mode has ``extend_seq_lens``, the pool has another page size, or the batch lacks a number on the host
            that the mode needs.
    """
    page_size = dcp.page_size(pool)
    check_mla(pool, attention, page_size)
    check_attends(batch, pool)
    if batch.forward_mode.query_rows not in (QueryRows.ONE, QueryRows.DRAFT_TOKENS):
        raise ValueError(f"{batch.forward_mode!r} is not modelled with DCP: decode, draft steps and TARGET_VERIFY are")
    keys = key_lens(batch, attention)
    most = longest_request(batch, pool) + uncounted_tokens(batch, attention)
    own = dcp.local_lens(keys)
    # `live` tokens need as many pages of the widened pool as the rank's `own` tokens need of its cache.
    live = own * dcp.size
    width = mla_block_table_width(most, page_size)
    return TRTLLMMLADecodeMetadata(
        block_kv_indices=mla_block_table(batch.req_pool_indices, live, live, pool, width),
        seq_lens_k=own,
        max_seq_len_k=dcp.local_bound(most),
        max_seq_len_q=max_query_rows(batch),
        global_seq_lens_k=keys,
    )


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
    """Prepare one layer's attention for a whole group of ranks: one call per rank, and a merge of their outputs by the LSEs.

    If a rank has no keys of a request, its output for the request is 0 and its LSE -inf (`without_keys`).

    CuTe DSL's kernel also gets the number of keys of each request on all ranks, from which it computes the last key of each
    query row. So it supports several query rows per request. Its LSE is to the base e (SGLang 0.5.23,
    `cutedsl_mla_backend.py`).

    Args:
        implementation: any object with FlashInfer's MLA decode function, such as `lab.references`.
        batch, layer: the forward pass with the slots and lengths of the whole group, and the layer whose call it is.
        metadata: the metadata of each rank, in order.
        query: ``[num_tokens, heads, kv_lora_rank + qk_rope_head_dim]``.
        out: ``[num_tokens, heads, kv_lora_rank]``.
        query_dtype: the dtype to which each call casts the query; None: no cast.
        cute_dsl: True for calls of CuTe DSL's kernel.

    Returns:
        A function that fills and returns `out`, as `lab.metadata.engine.backend.Backend.prepare_attention` returns it.

    Raises:
        ValueError: a request has several query rows and `cute_dsl` is not set, or there is not one metadata per rank.
    """
    if batch.forward_mode.query_rows is not QueryRows.ONE and not cute_dsl:
        raise ValueError(
            f"{batch.forward_mode!r} with DCP has several query rows per request, whose last keys lie on several GPUs: only "
            "CuTe DSL's kernel takes global lengths (enable_dcp); pass cute_dsl=True, or decode one row"
        )
    if len(metadata) != len(cache.storage):
        raise ValueError(f"{len(metadata)} ranks' metadata for a cache of {len(cache.storage)}: pass one for each")
    given = buffer_in(query, query_dtype)
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

    def run() -> Tensor:
        if given is not query:
            given.copy_(query)
        outs, lses = [], []
        for own, call in zip(metadata, calls, strict=True):
            rank_out, lse = call()
            is_empty = (own.seq_lens_k == 0).repeat_interleave(own.max_seq_len_q)
            lse = lse / math.log(2.0) if cute_dsl else lse
            results = without_keys(rank_out.view(out.shape), lse.view(out.shape[:-1]), is_empty)
            outs.append(results[0])
            lses.append(results[1])
        return out.copy_(merge_by_lse(torch.stack(outs), torch.stack(lses)))

    return run
