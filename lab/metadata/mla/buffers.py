"""The MLA backend's metadata in CUDA graphs: one block table for all modes and sizes, and lengths of each mode and size.

SGLang keeps a captured size's metadata under the size alone, so that a second mode captured at the same size on one backend
takes the first one's place, or its tensors (0.5.23). Here the key is the mode and the size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers
from lab.metadata.engine.backend import prepare_passes
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, num_pages, uncounted_tokens, uniform_boundaries
from lab.metadata.mla.metadata import (
    DEAD_PAGE,
    SINK_PAGE,
    QueryLayout,
    TRTLLMMLADecodeMetadata,
    check_mla,
    mla_block_table_width,
)


class MLAGraphState:
    """One backend's buffers for its captured modes and sizes, as `init_cuda_graph_state` makes them.

    The block table starts as -1 once; a replay writes its live pages, and what longer requests or other modes left after them
    stays.

    Args:
        pool: whose tables are read, with pages of 32 or 64 tokens.
        max_batch_size: the largest captured size.
        modes: to be captured.
        attention: decides the keys that a draft step counts.
        draft_extend: layout of the first draft extend's rows. PADDED is right for any accepted lengths. VIEW is what SGLang
            0.5.12 captures: d rows per request as they lie end to end, and lengths as if every request had d, which is right
            only if all accept d tokens.

    Attributes:
        block_kv_indices: ``[max_batch_size, width]`` int32, of all modes and sizes.
        metadata: of each mode and size asked for, by both.

    Raises:
        ValueError: a pool, attention or size that the backend does not have.
    """

    def __init__(
        self,
        pool: KVPool,
        max_batch_size: int,
        modes: Sequence[GraphMode],
        *,
        attention: DraftAttention = DraftAttention.MLA,
        draft_extend: QueryLayout = QueryLayout.PADDED,
    ) -> None:
        check_mla(pool, attention)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        self.pool = pool
        self.max_batch_size = max_batch_size
        self.modes = tuple(modes)
        self.attention = attention
        self.draft_extend = draft_extend
        padded_rows = max((mode.num_tokens_per_req for mode in self.modes if self._pads(mode)), default=0)
        width = mla_block_table_width(pool.max_context_len + padded_rows, pool.page_size)
        self.block_kv_indices = self._int32(max_batch_size, width).fill_(DEAD_PAGE)
        self.metadata: dict[tuple[GraphMode, int], TRTLLMMLADecodeMetadata] = {}

    def of(self, mode: GraphMode) -> "MLAGraphMetadata":
        """Return one mode's share, for a `GraphRunner`.

        Raises:
            ValueError: the state was made for other modes.
        """
        if mode not in self.modes:
            raise ValueError(f"{mode} is none of {self.modes}: name it when the state is made")
        return MLAGraphMetadata(mode, self)

    def slices(self, mode: GraphMode, batch_size: int) -> TRTLLMMLADecodeMetadata:
        """Return the metadata of a captured mode and size: leading rows of the table, and lengths of its own."""
        key = (mode, batch_size)
        if key not in self.metadata:
            self.metadata[key] = self._new_metadata(mode, batch_size)
        return self.metadata[key]

    def _new_metadata(self, mode: GraphMode, batch_size: int) -> TRTLLMMLADecodeMetadata:
        if not 1 <= batch_size <= self.max_batch_size:
            raise ValueError(f"batch_size={batch_size} is not 1 to max_batch_size={self.max_batch_size}")
        width = mode.num_tokens_per_req
        return TRTLLMMLADecodeMetadata(
            block_kv_indices=self.block_kv_indices[:batch_size],
            seq_lens_k=self._int32(batch_size),
            max_seq_len_k=self.pool.max_context_len,
            max_seq_len_q=width,
            query_layout=QueryLayout.PADDED if self._pads(mode) else QueryLayout.VIEW,
            sum_seq_lens_q=batch_size * width if mode.extends else None,
            cu_seqlens_q=uniform_boundaries(batch_size, width, self.pool.device) if mode.extends else None,
            seq_lens_q=self._int32(batch_size).fill_(width) if mode.extends else None,
        )

    def _pads(self, mode: GraphMode) -> bool:
        return mode.forward_mode.query_rows is QueryRows.ACCEPTED and self.draft_extend is QueryLayout.PADDED

    def _int32(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.pool.device)


class MLAGraphMetadata:
    """One mode's metadata of a `MLAGraphState`, as `GraphRunner` asks for it."""

    def __init__(self, mode: GraphMode, state: MLAGraphState) -> None:
        self.mode = mode
        self.state = state

    def slices(self, batch_size: int) -> TRTLLMMLADecodeMetadata:
        return self.state.slices(self.mode, batch_size)

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a call that rebuilds a captured size's metadata in place: no host read, capturable.

        Boundaries and numbers of rows are preset, and written again only where they vary.

        Args:
            view: of the runner's inputs.
        """
        metadata, pool = self.slices(view.batch_size), self.state.pool
        pads = metadata.query_layout is QueryLayout.PADDED
        written = mla_pass(
            metadata, uncounted_tokens(view, self.state.attention), view.extend_seq_lens if pads else None
        )
        write = prepare_passes([written], view, pool)
        if not pads:
            return write
        assert view.extend_seq_lens is not None
        rows: Tensor = view.extend_seq_lens

        def write_padded() -> None:
            write()
            _make_room_for_padding(metadata, rows, pool.page_size)

        return write_padded


def mla_pass(metadata: TRTLLMMLADecodeMetadata, seq_len_offset: int, query_rows: Tensor | None = None) -> PassBuffers:
    """Return the part of a launch that writes a pass's metadata.

    Args:
        metadata: written in place.
        seq_len_offset: tokens per request that ``seq_lens`` does not count.
        query_rows: of each request, ``[batch_size]``; None leaves ``cu_seqlens_q`` as it is.
    """
    return PassBuffers(
        cache_seqlens=metadata.seq_lens_k,
        cu_seqlens_q=None if query_rows is None else metadata.cu_seqlens_q,
        page_table=metadata.block_kv_indices,
        seq_len_offset=seq_len_offset,
        query_rows=query_rows,
    )


def _make_room_for_padding(metadata: TRTLLMMLADecodeMetadata, rows: Tensor, page_size: int) -> None:
    """Add padded queries to the lengths and pages of the requests' own tokens; their pages are the sink's."""
    assert metadata.seq_lens_q is not None
    keys, table = metadata.seq_lens_k, metadata.block_kv_indices
    metadata.seq_lens_q.copy_(rows)
    own_pages = num_pages(keys, page_size)
    keys.sub_(metadata.seq_lens_q).add_(metadata.max_seq_len_q)
    columns = torch.arange(table.shape[1], device=table.device)
    padding = (columns >= own_pages[:, None]) & (columns < num_pages(keys, page_size)[:, None])
    table.masked_fill_(padding, SINK_PAGE)
