"""The interface of an attention backend: it builds metadata (the arguments of its kernels), makes buffers for metadata in CUDA
graphs, and prepares attention calls.

A backend object holds only configuration. Requests are in a `KVPool`, and tensors that keep their addresses for CUDA graphs in
`MetadataBuffers`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, device_lengths, uncounted_tokens

MetadataT = TypeVar("MetadataT")
PassT = TypeVar("PassT", bound="PassMetadata")
MetadataT_co = TypeVar("MetadataT_co", covariant=True)


class PassMetadata(Protocol):
    """A protocol: the metadata of one forward pass over paged K/V, in any backend. `seq_lens` and `block_tables` are named like
    the kernel's arguments.
    """

    @property
    def seq_lens(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    def leading(self: PassT, batch_size: int) -> PassT:
        """Return the metadata of the first `batch_size` requests, as slices of the same storage."""
        ...

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        """Return the `PassBuffers` of this metadata: the arguments with which a launch writes it in place.

        Args:
            seq_len_offset: tokens per request that ``seq_lens`` does not count.
            query_rows: one number for all requests, or a tensor with a number per request; None leaves ``cu_seqlens_q`` as it
                is.
            out_cache_loc: slots of the query rows, for metadata with sliding-window tensors.
        """
        ...


class MetadataBuffers(Protocol[MetadataT_co]):
    """The metadata of one `GraphMode` for all captured batch sizes, in buffers whose addresses never change."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """Return the metadata of a captured batch size, always at the same addresses."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of a captured batch size in place. A CUDA graph can capture the
        function: the host reads nothing.

        Args:
            view: the batch of that size, whose tensors are the runner's input buffers (`StaticInputs.view`).
        """
        ...


class GraphMetadata(Generic[PassT]):
    """The metadata of one mode in buffers for the largest captured size. Every size has leading slices of the same storage.

    `buffers` is the metadata of the largest size.
    """

    def __init__(self, mode: GraphMode, pool: KVPool, buffers: PassT) -> None:
        self.mode, self.pool, self.buffers = mode, pool, buffers

    def slices(self, batch_size: int) -> PassT:
        """Return the metadata of a captured batch size. Raises ValueError if the buffers have too few requests."""
        most = len(self.buffers.seq_lens)
        if not 1 <= batch_size <= most:
            raise ValueError(f"batch_size={batch_size} is not 1 to max_batch_size={most}")
        return self.buffers.leading(batch_size)

    def prepare_launch(self, view: ForwardBatch, rows: int | Tensor | None, offset: int) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of a captured batch size in one launch. The arguments are those of
        `MetadataBuffers.prepare` and `PassMetadata.pass_buffers`.
        """
        written = self.slices(view.batch_size).pass_buffers(offset, rows, view.out_cache_loc)
        return prepare_passes([written], view, self.pool)


class RebuiltMetadata(Generic[MetadataT]):
    """Buffers for the metadata of one mode, which a replay builds anew and copies into them. Cells that no kernel reads are
    copied too.

    The metadata of a captured size is made at the first access, from a batch of padding requests. `build` makes metadata in new
    tensors, without a read of the host.
    """

    def __init__(self, mode: GraphMode, pool: KVPool, build: Callable[[ForwardBatch, KVPool], MetadataT]) -> None:
        self.mode, self.pool, self.build = mode, pool, build
        self.metadata: dict[int, MetadataT] = {}

    def slices(self, batch_size: int) -> MetadataT:
        if batch_size not in self.metadata:
            padding = StaticInputs(self.mode, batch_size, self.pool.device).view(batch_size)
            self.metadata[batch_size] = self.build(padding, self.pool)
        return self.metadata[batch_size]

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        buffers = vars(self.slices(view.batch_size))

        def rebuild() -> None:
            for name, fresh in vars(self.build(view, self.pool)).items():
                if isinstance(fresh, Tensor):
                    buffers[name].copy_(fresh)

        return rebuild


class RebuildingBackend(Generic[MetadataT]):
    """A backend whose graphs build their metadata anew in each replay."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        """Build the metadata of a pass in new tensors, without a read of the host."""
        raise NotImplementedError

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> dict[GraphMode, RebuiltMetadata[MetadataT]]:
        return {mode: RebuiltMetadata(mode, pool, self.build_metadata) for mode in modes}


class Backend(Protocol[MetadataT]):
    """An attention backend of the engine, such as `lab.metadata.mha.backend.TRTLLMMHABackend`."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        """Build the metadata of an eager pass (a pass outside CUDA graphs) in new tensors."""
        ...

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[MetadataT]]:
        """Make the metadata buffers of each mode, with room for `max_batch_size` requests, the largest captured size."""
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
        """Prepare one layer's attention over the paged cache. Return a function that fills and returns `out`; a CUDA graph can
        capture it.

        Contents of the tensors may change between two calls of the function, as in `lab.kernels.prepare`.

        Args:
            batch, metadata: the forward pass.
            layer: a layer in the backend's own class, such as `AttentionLayer` or `MLALayer`.
            query: ``[num_tokens, num_qo_heads, head_dim]``.
            cache: the layer's cache in the backend's own class. It must hold the pass's own tokens when the call is made.
            max_context_len: the engine's largest length of a request, for backends whose metadata has no bound of the lengths.
            out: ``[num_tokens, num_qo_heads, v_head_dim]``.
        """
        ...


def prepare_passes(passes: Sequence[PassBuffers], batch: ForwardBatch, pool: KVPool) -> Callable[[], None]:
    """Prepare one launch that writes the metadata of one or several passes over a batch's requests.

    The launch adds one number, ``seq_len_offset``, to all lengths. In a ragged verification the requests have different numbers
    of query rows: the number is 0, and each request's rows are added to its length before the launch.

    Raises:
        TypeError, ValueError, NotImplementedError: what `lab.kernels.serving.forward_metadata.write_forward_metadata` raises.
    """
    seq_lens = batch.seq_lens
    if is_ragged := batch.forward_mode.query_rows.are_bounded:
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
    """Return the number of tokens that a launch adds to all of ``seq_lens``: the result of `uncounted_tokens`, but 0 in a
    ragged verification (see `prepare_passes`).
    """
    if batch.forward_mode.query_rows.are_bounded:
        return 0
    return uncounted_tokens(batch, attention)
