"""The interface of an attention backend: it builds metadata (the arguments of its kernels), makes buffers for metadata in CUDA
graphs, and prepares attention calls. It holds only configuration: a `KVPool` holds the requests, and `MetadataBuffers` the
tensors that keep their addresses for CUDA graphs. A *captured size* is a batch size for which a CUDA graph was captured.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, device_lengths, uncounted_tokens

T = TypeVar("T")
MetadataT = TypeVar("MetadataT")
PassT = TypeVar("PassT", bound="PassMetadata")
MetadataT_co = TypeVar("MetadataT_co", covariant=True)


class PassMetadata(Protocol):
    """The metadata of a forward pass over paged K/V (lengths, page tables). Its properties are kernel arguments."""

    @property
    def seq_lens(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    def leading(self: PassT, batch_size: int) -> PassT:
        """Return the metadata of the first `batch_size` requests, ``max_seq_len_q`` rows each, as slices of the tensors."""
        ...

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        """Return this metadata's tensors as the output buffers of a launch, which adds `seq_len_offset` to the batch's
        ``seq_lens``. `query_rows` None: ``cu_seqlens_q`` is not written. `out_cache_loc` is the batch's, for a sliding window.
        """
        ...


class MetadataBuffers(Protocol[MetadataT_co]):
    """Buffers for the metadata of one forward mode (`GraphMode`), at fixed addresses for CUDA graphs."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """Return the metadata of the captured size `batch_size`, always at the same addresses."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of one captured size in place, and that a CUDA graph can capture. `view`
        is the result of `StaticInputs.view`.
        """
        ...


class GraphMetadata(Generic[PassT]):
    """Metadata buffers (`buffers`) of one mode for the largest captured size. Smaller sizes use leading slices."""

    def __init__(
        self, mode: GraphMode, pool: KVPool, buffers: PassT, attention: DraftAttention = DraftAttention.MHA
    ) -> None:
        self.mode, self.pool, self.buffers, self.attention = mode, pool, buffers, attention

    def slices(self, batch_size: int) -> PassT:
        most = len(self.buffers.seq_lens)
        if not 1 <= batch_size <= most:
            raise ValueError(f"batch_size={batch_size} is not 1 to max_batch_size={most}")
        return self.buffers.leading(batch_size)

    def prepare_launch(
        self, view: ForwardBatch, rows: int | Tensor | None, finish: Callable[[PassT], None] | None = None
    ) -> Callable[[], None]:
        """Return a function that rebuilds the metadata of one captured size in one launch, and then calls `finish` with it.
        `rows` is the `query_rows` of `PassMetadata.pass_buffers`.
        """
        metadata = self.slices(view.batch_size)
        written = metadata.pass_buffers(seq_len_offset(view, self.attention), rows, view.out_cache_loc)
        write = prepare_passes([written], view, self.pool)
        return write if finish is None else in_turn([write, partial(finish, metadata)], None)


class RebuiltMetadata(Generic[MetadataT]):
    """Metadata buffers of one mode. In each replay `build` makes the metadata in new tensors, which are then copied to the
    buffers.

    The buffers of a captured size are made at the first access, from a batch of padding requests.
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
    """A base class of backends that build metadata in new tensors, also in each replay of a CUDA graph (`RebuiltMetadata`)."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        raise NotImplementedError

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> dict[GraphMode, RebuiltMetadata[MetadataT]]:
        return {mode: RebuiltMetadata(mode, pool, self.build_metadata) for mode in modes}


class Backend(Protocol[MetadataT]):
    """An attention backend of the engine, such as `lab.metadata.mha.backend.TRTLLMMHABackend`."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        """Build the metadata of an eager pass (a pass outside CUDA graphs) in new tensors, without reading the device on the
        host.
        """
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

        The caller may change the contents of the tensors between two calls of the function.

        Args:
            layer: the layer's scales and sizes in the backend's own class, such as `AttentionLayer` or `MLALayer`.
            query: ``[num_tokens, num_qo_heads, head_dim]``.
            cache: the layer's cache in the backend's own class. It must have K and V of the query rows when the function is
                called.
            max_context_len: upper bound of the tokens of a request. Backends whose metadata has such a bound ignore it.
            out: ``[num_tokens, num_qo_heads, v_head_dim]``.
        """
        ...


def cast_to(dtype: torch.dtype | None, query: Tensor) -> tuple[Tensor, list[Callable[[], object]]]:
    """Return a tensor for a copy of the query in `dtype`, and the steps that fill it: the query and no step if it has this
    dtype or `dtype` is None.
    """
    if dtype in (None, query.dtype):
        return query, []
    given = torch.empty_like(query, dtype=dtype)
    return given, [partial(given.copy_, query)]


def in_turn(steps: Iterable[Callable[[], object]], result: T) -> Callable[[], T]:
    """Return a function that takes the steps in order and returns `result`."""
    taken = tuple(steps)

    def run() -> T:
        for step in taken:
            step()
        return result

    return run


def prepare_passes(passes: Sequence[PassBuffers], batch: ForwardBatch, pool: KVPool) -> Callable[[], None]:
    """Return a function that writes, in one launch, the metadata of one or several passes over a batch of the pool's requests.

    Each of `passes` has a ``seq_len_offset``, which the launch adds to the batch's lengths. In a ragged verification requests
    have different numbers of query rows: ``seq_len_offset`` must be 0, and a torch operation before the launch adds them.
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
    return in_turn([partial(torch.add, batch.seq_lens, rows, out=seq_lens), write], None)


def seq_len_offset(batch: ForwardBatch, attention: DraftAttention = DraftAttention.MHA) -> int:
    """Return the ``seq_len_offset`` for `prepare_passes`. Only draft steps depend on `attention`."""
    return 0 if batch.forward_mode.query_rows.are_bounded else uncounted_tokens(batch, attention)
