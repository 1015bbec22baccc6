"""Metadata of MHA's forward passes by one kernel launch, as SGLang does since PR 29843: fresh, or into buffers that stay.

The builder in `lab.metadata.mha.metadata` says the same in torch operations, which run anywhere; this one needs Triton.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, max_query_rows, query_rows, uncounted_tokens
from lab.metadata.mha.metadata import TRTLLMMHAMetadata


def fused_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """`build_mha_metadata` in one launch. Cells of a table that are not live are undefined.

    Raises:
        ValueError: as `build_mha_metadata`.
        NotImplementedError: Triton does not run on the batch's device.
    """
    metadata = allocate_mha_metadata(batch, pool)
    prepare_mha_metadata(batch, pool, metadata)()
    return metadata


def allocate_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Uninitialised tensors of the pass's shapes.

    Raises:
        ValueError: as `build_mha_metadata`.
    """
    check_attends(batch, pool)
    bs, device = batch.batch_size, pool.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    cu_seqlens_k = empty(bs + 1)
    has_swa = pool.full_to_swa is not None
    return TRTLLMMHAMetadata(
        cache_seqlens_int32=empty(bs),
        max_seq_len_q=max_query_rows(batch),
        cu_seqlens_q=cu_seqlens_k if query_rows(batch) is None else empty(bs + 1),
        cu_seqlens_k=cu_seqlens_k,
        page_table=empty(bs, pool.block_table_width),
        swa_page_table=empty(bs, pool.block_table_width) if has_swa else None,
        swa_out_cache_loc=empty(batch.num_tokens, dtype=torch.int64) if has_swa else None,
    )


def prepare_mha_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> Callable[[], None]:
    """A call that writes the pass's metadata in place, each time from what the batch's and pool's tensors then hold.

    Raises:
        ValueError: as `build_mha_metadata`, or a tensor of `metadata` has the wrong shape.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_attends(batch, pool)
    return prepare_write_forward_metadata(
        [_pass_buffers(batch, metadata)],
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        req_to_token=pool.req_to_token,
        page_size=pool.page_size,
        full_to_swa=pool.full_to_swa,
    )


def _pass_buffers(batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> PassBuffers:
    has_swa = metadata.swa_out_cache_loc is not None
    return PassBuffers(
        cache_seqlens=metadata.cache_seqlens_int32,
        cu_seqlens_k=metadata.cu_seqlens_k,
        cu_seqlens_q=metadata.cu_seqlens_q,
        page_table=metadata.page_table,
        swa_page_table=metadata.swa_page_table,
        out_cache_loc=batch.out_cache_loc if has_swa else None,
        swa_out_cache_loc=metadata.swa_out_cache_loc,
        seq_len_offset=uncounted_tokens(batch),
        query_rows=query_rows(batch),
    )
