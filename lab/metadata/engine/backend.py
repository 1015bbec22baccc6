"""One shape for every attention backend: its metadata, the buffers that graphs keep it in, and its calls.

A backend is configuration alone. The requests are in a `KVPool`, and what stays at its address is in `MetadataBuffers`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, device_lengths, uncounted_tokens

Metadata = TypeVar("Metadata")
MetadataT_co = TypeVar("MetadataT_co", covariant=True)


class MetadataBuffers(Protocol[MetadataT_co]):
    """One mode's metadata in buffers that keep their addresses."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """Return the metadata of a captured size, always at the same addresses."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a call that rebuilds a captured size's metadata in place: no host read, capturable.

        Args:
            view: of the runner's inputs, of that size.
        """
        ...


class Backend(Protocol[Metadata]):
    """An attention backend of the engine, such as `lab.metadata.mha.backend.TRTLLMMHABackend`."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> Metadata:
        """Build the metadata of a pass that no graph runs, in tensors of its own."""
        ...

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[Metadata]]:
        """Make the buffers of each mode, with room for the largest captured size."""
        ...

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: Metadata,
        layer: Any,
        query: Tensor,
        cache: Any,
        *,
        max_context_len: int,
        out: Tensor,
    ) -> Callable[[], Tensor]:
        """Prepare one layer's attention over the paged cache: a capturable call that fills and returns `out`.

        Contents of the tensors may change between the calls, as in `lab.kernels.prepare`.

        Args:
            batch, metadata: the forward pass.
            layer: the backend's kind of layer.
            query: ``[num_tokens, num_qo_heads, head_dim]``.
            cache: the layer's, of the backend's kind; the pass's own tokens are in it when the call is made.
            max_context_len: most tokens of one request, for backends whose metadata does not say it.
            out: ``[num_tokens, num_qo_heads, v_head_dim]``.
        """
        ...


def prepare_passes(passes: Sequence[PassBuffers], batch: ForwardBatch, pool: KVPool) -> Callable[[], None]:
    """Prepare one launch that writes the metadata of one or several passes over a batch's requests.

    A launch adds the same number to all lengths. Those of a ragged verification are added to their requests' rows before it, so
    that its passes have a ``seq_len_offset`` of 0.

    Raises:
        TypeError, ValueError, NotImplementedError: as `lab.kernels.serving.forward_metadata.write_forward_metadata`.
    """
    seq_lens = batch.seq_lens
    if is_ragged := batch.forward_mode.query_rows is QueryRows.VERIFIED:
        seq_lens = torch.empty_like(batch.seq_lens)
    write = prepare_write_forward_metadata(
        passes,
        req_pool_indices=batch.req_pool_indices,
        seq_lens=seq_lens,
        req_to_token=pool.req_to_token,
        page_size=pool.page_size,
        full_to_swa=pool.full_to_swa,
        v2p=pool.v2p,
    )
    if not is_ragged:
        return write
    rows = device_lengths(batch, "extend_seq_lens")

    def add_and_write() -> None:
        torch.add(batch.seq_lens, rows, out=seq_lens)
        write()

    return add_and_write


def seq_len_offset(batch: ForwardBatch, attention: DraftAttention = DraftAttention.MHA) -> int:
    """Return the ``seq_len_offset`` of a pass: `uncounted_tokens`, and 0 where `prepare_passes` adds each request's own."""
    if batch.forward_mode.query_rows is QueryRows.VERIFIED:
        return 0
    return uncounted_tokens(batch, attention)
