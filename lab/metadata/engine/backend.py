"""The interface of an attention backend. A backend builds metadata (the arguments of its kernels, such as page tables),
allocates the metadata buffers of CUDA graphs, and prepares attention calls. A backend keeps only settings: a `KVPool` keeps the
requests, and `MetadataBuffers` the tensors whose addresses CUDA graphs read. A *captured size* is a batch size for which a CUDA
graph was captured.
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
    """The metadata of one forward pass, such as lengths and page tables. Its properties are arguments of FlashInfer's calls."""

    @property
    def seq_lens(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    def leading(self: PassT, batch_size: int) -> PassT:
        """Return the metadata of the first `batch_size` requests, as slices of this metadata's tensors."""
        ...

    def pass_buffers(
        self, seq_len_offset: int, query_rows: int | Tensor | None = None, out_cache_loc: Tensor | None = None
    ) -> PassBuffers:
        """Return a `PassBuffers` with this metadata's tensors, which the kernel of `prepare_passes` writes. The kernel adds
        `seq_len_offset` to each of the batch's ``seq_lens``. If `query_rows`, the number per request, is None, the kernel does
        not write ``cu_seqlens_q``. Only a sliding-window pool needs `out_cache_loc`, the slots of the batch's new tokens.
        """
        ...


class MetadataBuffers(Protocol[MetadataT_co]):
    """Buffers of metadata, such as page tables, that the CUDA graphs of one forward mode read. Their addresses never change."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """Return the leading slices of the buffers, which the CUDA graph of `batch_size` requests reads."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """Return a function that writes the metadata of `view`, a batch whose tensors are a CUDA graph's input buffers."""
        ...


class GraphMetadata(Generic[PassT]):
    """Metadata buffers for all CUDA graphs of one forward mode. The graph of a smaller batch reads leading slices of them."""

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
        """Return a function that writes the metadata of the batch `view` by one kernel, and then calls `finish(metadata)` if
        `finish` is given. `rows` is the number of query rows per request. If `rows` is None, ``cu_seqlens_q`` is not written.
        """
        metadata = self.slices(view.batch_size)
        written = metadata.pass_buffers(seq_len_offset(view, self.attention), rows, view.out_cache_loc)
        write = prepare_passes([written], view, self.pool)
        return write if finish is None else in_turn([write, partial(finish, metadata)], None)


class RebuiltMetadata(Generic[MetadataT]):
    """Metadata buffers of CUDA graphs. Each replay calls `build`, which makes new tensors, and copies these to the buffers."""

    def __init__(self, mode: GraphMode, pool: KVPool, build: Callable[[ForwardBatch, KVPool], MetadataT]) -> None:
        self.mode, self.pool, self.build = mode, pool, build
        self.metadata: dict[int, MetadataT] = {}

    def slices(self, batch_size: int) -> MetadataT:
        if batch_size not in self.metadata:
            padding = StaticInputs(self.mode, batch_size, self.pool.device).view(batch_size)
            self.metadata[batch_size] = self.build(padding, self.pool)
        return self.metadata[batch_size]

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        buffers = self.slices(view.batch_size)
        return lambda: copy_tensors(self.build(view, self.pool), buffers)


def copy_tensors(built: object, buffers: object, presets: Sequence[str] = ()) -> None:
    """Copy each tensor of `built` to the tensor with the same name in `buffers`, except the tensors named in `presets`."""
    for name, fresh in vars(built).items():
        if isinstance(fresh, Tensor) and name not in presets:
            getattr(buffers, name).copy_(fresh)


class RebuildingBackend(Generic[MetadataT]):
    """A base class of backends that, in each replay of a CUDA graph, build new metadata and copy it to the graph's buffers."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        raise NotImplementedError

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> dict[GraphMode, RebuiltMetadata[MetadataT]]:
        return {mode: RebuiltMetadata(mode, pool, self.build_metadata) for mode in modes}


class Backend(Protocol[MetadataT]):
    """An attention backend of a serving engine, such as `lab.metadata.mha.backend.TRTLLMMHABackend`."""

    def build_metadata(self, batch: ForwardBatch, pool: KVPool) -> MetadataT:
        """Build the metadata of a forward pass outside CUDA graphs, in new tensors. The host does not read the device."""
        ...

    def new_buffers(
        self, modes: Sequence[GraphMode], pool: KVPool, max_batch_size: int
    ) -> Mapping[GraphMode, MetadataBuffers[MetadataT]]:
        """Allocate, for each mode, the metadata buffers of CUDA graphs of up to `max_batch_size` requests."""
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
        """Prepare one layer's attention over its paged cache. Return a function that computes the attention, writes it to
        `out`, and returns `out`. A CUDA graph can capture the function.

        The caller may change the contents of the tensors between two calls of the function.

        Args:
            layer: the layer's scales and sizes in the backend's own class, such as `AttentionLayer` or `MLALayer`.
            query: ``[num_tokens, num_qo_heads, head_dim]``.
            cache: the layer's cache in the backend's own class. It must contain K and V of the query rows before the function
                is called.
            max_context_len: largest number of tokens that a request can have. Ignored if `metadata` has such a bound.
            out: ``[num_tokens, num_qo_heads, v_head_dim]``.
        """
        ...


def cast_to(dtype: torch.dtype | None, query: Tensor) -> tuple[Tensor, list[Callable[[], object]]]:
    """Return (new tensor in `dtype`, [function that casts `query` into this tensor]), or (`query`, []) if no cast is needed."""
    if dtype in (None, query.dtype):
        return query, []
    given = torch.empty_like(query, dtype=dtype)
    return given, [partial(given.copy_, query)]


def in_turn(steps: Iterable[Callable[[], object]], result: T) -> Callable[[], T]:
    taken = tuple(steps)

    def run() -> T:
        for step in taken:
            step()
        return result

    return run


def prepare_passes(passes: Sequence[PassBuffers], batch: ForwardBatch, pool: KVPool) -> Callable[[], None]:
    """Return a function that writes, in one launch, the metadata of one or several forward passes over the requests of `batch`.

    The launch adds the ``seq_len_offset`` of each pass to the batch's ``seq_lens``. In a ragged verification this offset must
    be 0, because the function first adds each request's number of query rows (``extend_seq_lens``) to its length.
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
    """Return the `seq_len_offset` for `prepare_passes`: how many keys `seq_lens` does not count; 0 in a ragged verification."""
    return 0 if batch.forward_mode.query_rows.are_bounded else uncounted_tokens(batch, attention)
