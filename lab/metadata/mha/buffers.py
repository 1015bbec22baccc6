"""Metadata of MHA's forward passes written in place by one launch, as SGLang does since PR 29843, and its buffers for graphs.

The builder in `lab.metadata.mha.metadata` says the same in torch operations, which run anywhere; a launch needs Triton.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
from torch import Tensor

from lab.metadata.engine.backend import prepare_passes, seq_len_offset
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends, max_query_rows, query_rows, uniform_boundaries
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata
from lab.named_enum import NamedEnum


class MetadataBuilder(NamedEnum):
    """The work that writes a captured size's metadata. Both write the same live cells."""

    TORCH_OPERATIONS = "torch operations"  # many small launches, as in SGLang 0.5.13
    FUSED = "fused"  # one launch, as in 0.5.23


def fused_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Build what `build_mha_metadata` builds, in one launch. Cells of a table that are not live are undefined.

    Raises:
        ValueError: as `build_mha_metadata`.
        NotImplementedError: Triton does not run on the batch's device.
    """
    metadata = allocate_mha_metadata(batch, pool)
    prepare_mha_metadata(batch, pool, metadata)()
    return metadata


def allocate_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """Allocate uninitialised tensors of the pass's shapes.

    Raises:
        ValueError: as `build_mha_metadata`.
    """
    check_attends(batch, pool)
    metadata = TRTLLMMHAMetadata.allocate(
        pool, batch.batch_size, max_query_rows(batch), batch.num_tokens, new=torch.empty
    )
    return replace(metadata, cu_seqlens_q=metadata.cu_seqlens_k) if query_rows(batch) is None else metadata


def prepare_mha_metadata(batch: ForwardBatch, pool: KVPool, metadata: TRTLLMMHAMetadata) -> Callable[[], None]:
    """Prepare a call that writes the pass's metadata in place, from the batch's and pool's contents at the time of each call.

    Raises:
        ValueError: as `build_mha_metadata`, or a tensor of `metadata` has the wrong shape.
        NotImplementedError: Triton does not run on the batch's device.
    """
    check_attends(batch, pool)
    written = metadata.pass_buffers(seq_len_offset(batch), query_rows(batch), batch.out_cache_loc)
    return prepare_passes([written], batch, pool)


class MHAGraphMetadata:
    """One mode's metadata buffers for all captured sizes, as `init_cuda_graph_state` makes them.

    Tables and running sums start as 0. Boundaries of decode and verify rows are preset once and never written again.

    Args:
        mode: of the runner.
        pool: whose tables are read; with or without sliding-window pages.
        max_batch_size: the largest captured size.
        builder: what writes them.
        expand_encoder_only_verify: as in `build_mha_metadata`.

    Attributes:
        buffers: of the largest size.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        max_batch_size: int,
        builder: MetadataBuilder = MetadataBuilder.FUSED,
        expand_encoder_only_verify: bool = False,
    ) -> None:
        self.mode = mode
        self.pool = pool
        self.builder = builder
        width = mode.num_tokens_per_req
        preset = None if mode.in_extend_seq_lens else uniform_boundaries(max_batch_size, width, pool.device)
        self.buffers = TRTLLMMHAMetadata.allocate(
            pool,
            max_batch_size,
            width,
            max_batch_size * width,
            cu_seqlens_q=preset,
            expand_encoder_only_verify=expand_encoder_only_verify and mode.forward_mode is ForwardMode.TARGET_VERIFY,
        )

    def slices(self, batch_size: int) -> TRTLLMMHAMetadata:
        """Return the metadata of a captured size. All sizes share the storage."""
        return self.buffers.leading(batch_size)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a call that rebuilds a captured size's metadata in place: no host read, capturable, and one launch if fused.

        Args:
            view: of the runner's inputs.

        Raises:
            NotImplementedError: the fused builder, where Triton does not run.
        """
        metadata = self.slices(view.batch_size)
        if self.builder is MetadataBuilder.TORCH_OPERATIONS:
            return partial(_copy_built, metadata, view, self.pool)
        rows: int | Tensor | None = None
        if self.mode.in_extend_seq_lens:
            uniform = self.mode.forward_mode.query_rows.are_uniform
            rows = self.mode.num_tokens_per_req if uniform else view.extend_seq_lens
        written = metadata.pass_buffers(seq_len_offset(view), rows, view.out_cache_loc)
        write = prepare_passes([written], view, self.pool)
        return write if metadata.encoder_page_table is None else partial(_write_expanded, write, metadata)


def _write_expanded(write: Callable[[], None], metadata: TRTLLMMHAMetadata) -> None:
    """Write the metadata, then the rows of encoder-only layers from their requests' cells."""
    write()
    lens, table, width = metadata.encoder_cache_seqlens, metadata.encoder_page_table, metadata.max_seq_len_q
    assert lens is not None
    assert table is not None
    lens.unflatten(0, (-1, width)).copy_(metadata.cache_seqlens_int32.unsqueeze(1))
    table.unflatten(0, (-1, width)).copy_(metadata.page_table.unsqueeze(1))


def _copy_built(metadata: TRTLLMMHAMetadata, view: ForwardBatch, pool: KVPool) -> None:
    """Build new metadata and copy every tensor into its buffer; preset row boundaries are left."""
    built = build_mha_metadata(view, pool, expand_encoder_only_verify=metadata.encoder_page_table is not None)
    presets = () if view.forward_mode.query_rows.in_extend_seq_lens else ("cu_seqlens_q",)
    for each in fields(TRTLLMMHAMetadata):
        written, fresh = getattr(metadata, each.name), getattr(built, each.name)
        if isinstance(written, Tensor) and each.name not in presets:
            written.copy_(fresh)
