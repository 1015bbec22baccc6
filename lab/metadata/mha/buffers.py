"""Write MHA's metadata in place with one Triton launch, as SGLang does since PR 29843, and keep it in buffers for CUDA graphs.

`lab.metadata.mha.metadata.build_mha_metadata` computes the same values by torch operations.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from lab.metadata.engine.backend import GraphMetadata, prepare_passes, seq_len_offset
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, max_query_rows, query_rows, uniform_boundaries
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.named_enum import NamedEnum


class MetadataBuilder(NamedEnum):
    """How the metadata of a captured batch size is written: in one launch or many. Kernels read equal values after both."""

    TORCH_OPERATIONS = "torch operations"  # many small launches, as in SGLang 0.5.13
    FUSED = "fused"  # one launch, as in 0.5.23


def allocate_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Allocate the metadata of a batch's pass as uninitialised tensors on the pool's device. Raises the ValueErrors of
    `build_mha_metadata`.
    """
    check_attends(batch, pool)
    metadata = TRTLLMMHAMetadata.allocate(
        pool, batch.batch_size, max_query_rows(batch), batch.num_tokens, new=torch.empty
    )
    return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k) if query_rows(batch) is None else metadata


def prepare_mha_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> Callable[[], None]:
    """Return a function that writes the values of `build_mha_metadata` for a batch and its pool to `metadata` in one launch.

    Each call reads the batch's tensors again. Cells of a page table after a request's last page are not written.

    Raises:
        ValueError: `build_mha_metadata` refuses the batch, or a tensor of `metadata` has the wrong shape.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_attends(batch, pool)
    written = metadata.pass_buffers(seq_len_offset(batch), query_rows(batch), batch.out_cache_loc)
    return prepare_passes([written], batch, pool)


class MHAGraphMetadata(GraphMetadata[TRTLLMMHAMetadata]):
    """The metadata buffers of one mode for all captured batch sizes, as SGLang's `init_cuda_graph_state` makes them.

    Tables and running sums start as 0. ``cu_seqlens_q`` of decode and verification is written only when the buffers are made.

    Args:
        builder: how a replay writes the metadata, in one launch or many.
        expand_encoder_only_verify: as in `build_mha_metadata`.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        max_batch_size: int,
        builder: MetadataBuilder = MetadataBuilder.FUSED,
        expand_encoder_only_verify: bool = False,
    ) -> None:
        self.builder = builder
        width = mode.num_tokens_per_req
        preset = None if mode.in_extend_seq_lens else uniform_boundaries(max_batch_size, width, pool.device)
        buffers = TRTLLMMHAMetadata.allocate(
            pool,
            max_batch_size,
            width,
            max_batch_size * width,
            cu_seqlens_q=preset,
            expand_encoder_only_verify=expand_encoder_only_verify and mode.forward_mode is ForwardMode.TARGET_VERIFY,
        )
        super().__init__(mode, pool, buffers)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of a captured batch size, that of the batch `view`, in place; see
        `MetadataBuffers.prepare`.

        Raises:
            NotImplementedError: `builder` is `MetadataBuilder.FUSED`, and Triton does not run on the pool's device.
        """
        metadata = self.slices(view.batch_size)
        if self.builder is MetadataBuilder.TORCH_OPERATIONS:
            return partial(_copy_built, metadata, view, self.pool)
        rows: int | Tensor | None = None
        if self.mode.in_extend_seq_lens:
            uniform = self.mode.forward_mode.query_rows.are_uniform
            rows = self.mode.num_tokens_per_req if uniform else view.extend_seq_lens
        write = self.prepare_launch(view, rows, seq_len_offset(view))
        return write if metadata.encoder_page_table is None else partial(_write_expanded, write, metadata)


def _write_expanded(write: Callable[[], None], metadata: TRTLLMMHAMetadata) -> None:
    """Call `write`, which writes the metadata of requests. Then copy each request's length and page-table row to the
    `encoder_*` tensors, once per query row.
    """
    write()
    lens, table, width = metadata.encoder_cache_seqlens, metadata.encoder_page_table, metadata.max_seq_len_q
    assert lens is not None
    assert table is not None
    lens.unflatten(0, (-1, width)).copy_(metadata.cache_seqlens_int32.unsqueeze(1))
    table.unflatten(0, (-1, width)).copy_(metadata.page_table.unsqueeze(1))


def _copy_built(metadata: TRTLLMMHAMetadata, view: ForwardBatch, pool: KVPool) -> None:
    """Build the metadata of `view`, a batch of requests of `pool`, in new tensors, and copy them to `metadata`, except the
    constant `cu_seqlens_q` of decode and verification.
    """
    built = build_mha_metadata(view, pool, expand_encoder_only_verify=metadata.encoder_page_table is not None)
    presets = () if view.forward_mode.query_rows.in_extend_seq_lens else ("cu_seqlens_q",)
    for each in fields(TRTLLMMHAMetadata):
        written, fresh = getattr(metadata, each.name), getattr(built, each.name)
        if isinstance(written, Tensor) and each.name not in presets:
            written.copy_(fresh)
