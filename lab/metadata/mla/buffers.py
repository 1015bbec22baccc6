"""The MLA backend's metadata in CUDA graphs: one block table for all modes, and lengths per mode.

SGLang 0.5.23 stores metadata by captured batch size alone: if a backend captures two modes at the same size, the second mode's
metadata or tensors replace the first mode's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lab.metadata.engine.backend import GraphMetadata, seq_len_offset
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
    """Allocate the block table that all captured modes and batch sizes of a backend share, as SGLang's `init_cuda_graph_state`
    does.

    `draft_extend` is the layout of query rows in ``DRAFT_EXTEND``. The table is filled with -1 only here. A replay writes the
    cells of its requests' pages. Later cells of a row keep the values of earlier replays.

    Returns:
        ``[max_batch_size, width]`` int32, wide enough for the pages of ``max_context_len`` tokens, plus as many
        tokens as a request of a padded layout has query rows.

    Raises:
        ValueError: the backend does not support the pool, the attention or the size.
    """
    check_mla(pool, attention)
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
    padded_rows = max((mode.num_tokens_per_req for mode in modes if _pads_query_rows(mode, draft_extend)), default=0)
    width = mla_block_table_width(pool.max_context_len + padded_rows, pool.page_size)
    return torch.full((max_batch_size, width), DEAD_PAGE, dtype=torch.int32, device=pool.device)


def _pads_query_rows(mode: GraphMode, draft_extend: QueryLayout) -> bool:
    rows = mode.forward_mode.query_rows
    return rows.are_bounded or (rows is QueryRows.ACCEPTED and draft_extend is QueryLayout.PADDED)


class MLAGraphMetadata(GraphMetadata[TRTLLMMLADecodeMetadata]):
    """The metadata buffers of one mode for all captured batch sizes: the first rows of the backend's block table, and lengths.

    Args:
        block_kv_indices: the result of `new_block_table`.
        attention: how a draft step counts keys.
        draft_extend: layout of query rows in ``DRAFT_EXTEND``. PADDED is right for any numbers of accepted tokens. VIEW, SGLang
            0.5.12's layout, is right only if every request accepts ``num_tokens_per_req`` tokens.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        block_kv_indices: Tensor,
        attention: DraftAttention = DraftAttention.MLA,
        draft_extend: QueryLayout = QueryLayout.PADDED,
    ) -> None:
        self.attention = attention
        size, width, extends = len(block_kv_indices), mode.num_tokens_per_req, mode.in_extend_seq_lens
        buffers = TRTLLMMLADecodeMetadata(
            block_kv_indices=block_kv_indices,
            seq_lens_k=block_kv_indices.new_zeros(size),
            max_seq_len_k=pool.max_context_len,
            max_seq_len_q=width,
            query_layout=QueryLayout.PADDED if _pads_query_rows(mode, draft_extend) else QueryLayout.VIEW,
            sum_seq_lens_q=size * width if extends else None,
            cu_seqlens_q=uniform_boundaries(size, width, pool.device) if extends else None,
            seq_lens_q=block_kv_indices.new_full((size,), width) if extends else None,
        )
        super().__init__(mode, pool, buffers)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of a captured batch size, that of the batch `view`, in place; see
        `MetadataBuffers.prepare`.

        The function writes `cu_seqlens_q` and `seq_lens_q` only with `QueryLayout.PADDED`. Otherwise they are constant.
        """
        rows = view.extend_seq_lens if self.buffers.query_layout is QueryLayout.PADDED else None
        write = self.prepare_launch(view, rows, seq_len_offset(view, self.attention))
        metadata = self.slices(view.batch_size)
        return write if rows is None else partial(_write_padded, write, metadata, rows, self.pool.page_size)


def _write_padded(write: Callable[[], None], metadata: TRTLLMMLADecodeMetadata, rows: Tensor, page_size: int) -> None:
    """Call `write`, which writes the metadata of the pass. Then add each request's number of padding rows to `seq_lens_k`, and
    write page 0, the sink, to the columns of pages that only padding rows need. `rows` has each request's number of query
    rows, without padding, and a page has `page_size` tokens.
    """
    write()
    assert metadata.seq_lens_q is not None
    keys, table = metadata.seq_lens_k, metadata.block_kv_indices
    metadata.seq_lens_q.copy_(rows)
    own_pages = num_pages(keys, page_size)
    keys.sub_(metadata.seq_lens_q).add_(metadata.max_seq_len_q)
    columns = torch.arange(table.shape[1], device=table.device)
    padding = (columns >= own_pages[:, None]) & (columns < num_pages(keys, page_size)[:, None])
    table.masked_fill_(padding, SINK_PAGE)
