"""The interface of every attention backend: its metadata, which are its kernels' arguments, their buffers, and its calls.

A backend object holds configuration alone. Requests are in a `KVPool`, and tensors that keep their addresses for CUDA graphs in
`MetadataBuffers`.
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

MetadataT = TypeVar("MetadataT")
MetadataT_co = TypeVar("MetadataT_co", covariant=True)


class PassMetadata(Protocol):
    """The metadata of one pass on a paged kernel, of any backend. The two tensors have the kernel's names."""

    @property
    def seq_lens(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    def leading(self, batch_size: int) -> "PassMetadata":
        """Return the slices of the first requests, which share the storage."""
        ...

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        """Return the part of a launch that writes this metadata in place.

        Args:
            seq_len_offset: tokens per request that ``seq_lens`` does not count.
            query_rows: of every request, or of each; None leaves ``cu_seqlens_q`` as it is.
            out_cache_loc: slots of the query rows, for metadata with sliding-window tensors.
        """
        ...


class MetadataBuffers(Protocol[MetadataT_co]):
    """The metadata of one `GraphMode`, in buffers that keep their addresses."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """Return the metadata of a captured size, always at the same addresses."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a call that rebuilds a captured size's metadata in place. It can be captured: the host reads nothing.

        Args:
            view: the batch of that size, over the runner's input buffers (`StaticInputs.view`).
        """
        ...


class Backend(Protocol[MetadataT]):
    """An attention backend of the engine, such as `lab.metadata.mha.backend.TRTLLMMHABackend`."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        """Build the metadata of an eager pass, which no graph runs, in new tensors."""
        ...

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[MetadataT]]:
        """Make the buffers of each mode, with room for the largest captured size."""
        ...

    def prepare_attention(
        self,
        batch: ForwardBatch,
        metadata: MetadataT,
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
            cache: the layer's cache, of the backend's kind. It holds the pass's own tokens when the call is made.
            max_context_len: most tokens of one request, for backends whose metadata has no such bound.
            out: ``[num_tokens, num_qo_heads, v_head_dim]``.
        """
        ...


def buffer_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the tensor if `dtype` is None or its own; else an unwritten tensor of the same shape in `dtype`."""
    return tensor if dtype in (None, tensor.dtype) else torch.empty_like(tensor, dtype=dtype)


def prepare_passes(passes: Sequence[PassBuffers], batch: ForwardBatch, pool: KVPool) -> Callable[[], None]:
    """Prepare one launch that writes the metadata of one or several passes over a batch's requests.

    The launch adds one number, ``seq_len_offset``, to all lengths. It is 0 in a ragged verification, whose requests differ in
    query rows: there each request's rows are added to its length before the launch.

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
    """Return the ``seq_len_offset`` of a pass: `uncounted_tokens`, or 0 in a ragged verification (`prepare_passes`)."""
    if batch.forward_mode.query_rows is QueryRows.VERIFIED:
        return 0
    return uncounted_tokens(batch, attention)
