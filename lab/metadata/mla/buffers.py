"""The MLA backend's metadata in CUDA graphs: one block table for all modes and sizes, and lengths per mode and size.

SGLang 0.5.23 keeps metadata by the captured size only: if a backend captures two modes at the same size, the second replaces
the first or its tensors. Here the key is the mode and the size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lab.metadata.engine.backend import prepare_passes, seq_len_offset
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, num_pages, uniform_boundaries
from lab.metadata.mla.metadata import (
    DEAD_PAGE,
    SINK_PAGE,
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    check_mla,
    mla_block_table_width,
)


def new_block_table(
    modes: Sequence[GraphMode],
    pool: KVPool,
    max_batch_size: int,
    attention: DraftAttention,
    draft_extend: QueryLayout,
) -> Tensor:
    """Allocate the block table that a backend's captured modes and sizes share, as SGLang's `init_cuda_graph_state` does.

    The table is filled with -1 once. A replay writes only its live pages. The cells after them keep the values of earlier
    replays.

    Args:
        modes: the modes to be captured.
        pool: the pool whose tables are read, with pages of 32 or 64 tokens.
        max_batch_size: the largest captured size.
        attention, draft_extend: as in `MLAGraphMetadata`.

    Returns:
        ``[max_batch_size, width]`` int32, wide enough for the longest context and, in a mode that pads query rows, for its
        padding.

    Raises:
        ValueError: the backend does not support the pool, the attention or the size.
    """
    check_mla(pool, attention)
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
    padded_rows = max((mode.num_tokens_per_req for mode in modes if _pads(mode, draft_extend)), default=0)
    width = mla_block_table_width(pool.max_context_len + padded_rows, pool.page_size)
    return torch.full((max_batch_size, width), DEAD_PAGE, dtype=torch.int32, device=pool.device)


def _pads(mode: GraphMode, draft_extend: QueryLayout) -> bool:
    rows = mode.forward_mode.query_rows
    return rows.are_bounded or (rows is QueryRows.ACCEPTED and draft_extend is QueryLayout.PADDED)


class MLAGraphMetadata:
    """The metadata of one mode for all captured sizes: leading rows of the backend's block table, and lengths per size.

    Args:
        mode: the runner's mode.
        pool: the pool whose tables are read.
        block_kv_indices: the result of `new_block_table`.
        attention: decides which keys a draft step counts.
        draft_extend: layout of the first draft extend's rows. PADDED is right for any numbers of accepted tokens. VIEW is
            SGLang 0.5.12's layout: all rows without gaps, viewed as ``num_tokens_per_req`` rows per request. It is right only
            if every request accepts ``num_tokens_per_req`` tokens.

    Attributes:
        metadata: the metadata of each captured size, made at the first access.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        block_kv_indices: Tensor,
        attention: DraftAttention = DraftAttention.MLA,
        draft_extend: QueryLayout = QueryLayout.PADDED,
    ) -> None:
        self.mode, self.pool, self.block_kv_indices, self.attention = mode, pool, block_kv_indices, attention
        self.layout = QueryLayout.PADDED if _pads(mode, draft_extend) else QueryLayout.VIEW
        self.metadata: dict[int, TRTLLMMLADecodeMetadata] = {}

    def slices(self, batch_size: int) -> TRTLLMMLADecodeMetadata:
        """Return the metadata of a captured batch size; raises ValueError if the block table has too few rows."""
        if batch_size not in self.metadata:
            self.metadata[batch_size] = self._new_metadata(batch_size)
        return self.metadata[batch_size]

    def _new_metadata(self, batch_size: int) -> TRTLLMMLADecodeMetadata:
        if not 1 <= batch_size <= len(self.block_kv_indices):
            raise ValueError(f"batch_size={batch_size} is not 1 to max_batch_size={len(self.block_kv_indices)}")
        extends, width = self.mode.in_extend_seq_lens, self.mode.num_tokens_per_req
        table = self.block_kv_indices[:batch_size]
        return TRTLLMMLADecodeMetadata(
            block_kv_indices=table,
            seq_lens_k=table.new_zeros(batch_size),
            max_seq_len_k=self.pool.max_context_len,
            max_seq_len_q=width,
            query_layout=self.layout,
            sum_seq_lens_q=batch_size * width if extends else None,
            cu_seqlens_q=uniform_boundaries(batch_size, width, self.pool.device) if extends else None,
            seq_lens_q=table.new_full((batch_size,), width) if extends else None,
        )

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of a captured batch size in place; see `MetadataBuffers.prepare`.

        The offsets and numbers of query rows are preset. The call writes them only if they vary from replay to replay.
        """
        metadata, pads = self.slices(view.batch_size), self.layout is QueryLayout.PADDED
        rows = view.extend_seq_lens if pads else None
        written = metadata.pass_buffers(seq_len_offset(view, self.attention), rows)
        write = prepare_passes([written], view, self.pool)
        return write if rows is None else partial(_write_padded, write, metadata, rows, self.pool.page_size)


def _write_padded(write: Callable[[], None], metadata: TRTLLMMLADecodeMetadata, rows: Tensor, page_size: int) -> None:
    """Write the requests' lengths and pages. Then add padding rows to the lengths, and the sink's page 0 for these rows."""
    write()
    assert metadata.seq_lens_q is not None
    keys, table = metadata.seq_lens_k, metadata.block_kv_indices
    metadata.seq_lens_q.copy_(rows)
    own_pages = num_pages(keys, page_size)
    keys.sub_(metadata.seq_lens_q).add_(metadata.max_seq_len_q)
    columns = torch.arange(table.shape[1], device=table.device)
    padding = (columns >= own_pages[:, None]) & (columns < num_pages(keys, page_size)[:, None])
    table.masked_fill_(padding, SINK_PAGE)
