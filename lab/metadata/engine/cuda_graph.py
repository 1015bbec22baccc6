"""Metadata in CUDA graphs: static buffers for the largest batch, a captured size's slices of them, and the padding of others.

A graph replays with the addresses that it was captured with. So the engine keeps one set of input and metadata buffers for its
largest batch; every captured batch size uses leading slices of them, and all sizes share their storage. A batch is copied into
the inputs, padded to the next captured size, and its metadata is rebuilt in place: before the replay, or by the graph itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lab.kernels.serving.forward_metadata import PassBuffers, prepare_write_forward_metadata
from lab.metadata.engine.capture import capture
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import PADDED_SEQ_LEN, GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import uncounted_tokens
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata


class MetadataPlace(Enum):
    """When a replay's metadata is rebuilt."""

    BEFORE_REPLAY = "before the replay"  # SGLang 0.5.11 to 0.5.14
    IN_GRAPH = "in the graph"  # SGLang 0.5.23: each replay reads lengths, rows and slots as they are then

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


Metadata = TypeVar("Metadata")
MetadataT_co = TypeVar("MetadataT_co", covariant=True)


class MetadataBuffers(Protocol[MetadataT_co]):
    """A backend's metadata in buffers that stay, for one mode, as a `GraphRunner` needs it."""

    def slices(self, batch_size: int) -> MetadataT_co:
        """The metadata of a captured size, always at the same addresses."""
        ...

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """A call that rebuilds a captured size's metadata in place: no host read, capturable."""
        ...

    def eager(self, batch: ForwardBatch) -> MetadataT_co:
        """Metadata of a pass that no graph runs, in tensors of its own."""
        ...


class GraphMetadata:
    """One backend's metadata buffers for all captured sizes, as `init_cuda_graph_state` makes them.

    Tables and running sums start as 0. Boundaries of decode and verify rows are preset once and never written again.

    Args:
        mode: of the runner.
        pool: whose tables are read; with or without sliding-window pages.
        max_batch_size: the largest captured size.
    """

    def __init__(self, mode: GraphMode, pool: KVPool, max_batch_size: int) -> None:
        self.mode = mode
        self.pool = pool
        width, device = mode.num_tokens_per_req, pool.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        has_swa = pool.full_to_swa is not None
        self.buffers = TRTLLMMHAMetadata(
            cache_seqlens_int32=zeros(max_batch_size),
            max_seq_len_q=width,
            cu_seqlens_q=zeros(max_batch_size + 1)
            if mode.extends
            else torch.arange(0, max_batch_size * width + 1, width, dtype=torch.int32, device=device),
            cu_seqlens_k=zeros(max_batch_size + 1),
            page_table=zeros(max_batch_size, pool.block_table_width),
            swa_page_table=zeros(max_batch_size, pool.block_table_width) if has_swa else None,
            swa_out_cache_loc=zeros(max_batch_size * width, dtype=torch.int64) if has_swa else None,
        )

    def slices(self, batch_size: int) -> TRTLLMMHAMetadata:
        """The metadata of a captured size: leading slices, which share their storage with every other size's."""
        whole, rows = self.buffers, batch_size * self.mode.num_tokens_per_req
        return TRTLLMMHAMetadata(
            cache_seqlens_int32=whole.cache_seqlens_int32[:batch_size],
            max_seq_len_q=whole.max_seq_len_q,
            cu_seqlens_q=whole.cu_seqlens_q[: batch_size + 1],
            cu_seqlens_k=whole.cu_seqlens_k[: batch_size + 1],
            page_table=whole.page_table[:batch_size],
            swa_page_table=None if whole.swa_page_table is None else whole.swa_page_table[:batch_size],
            swa_out_cache_loc=None if whole.swa_out_cache_loc is None else whole.swa_out_cache_loc[:rows],
        )

    def prepare(self, view: ForwardBatch) -> Callable[[], None]:
        """A call that rebuilds a captured size's metadata in place: one launch, no host read, capturable.

        Args:
            view: of the runner's inputs.
        """
        metadata = self.slices(view.batch_size)
        rows: int | Tensor | None = None
        if self.mode.extends:
            uniform = self.mode.forward_mode.query_rows.are_uniform
            rows = self.mode.num_tokens_per_req if uniform else view.extend_seq_lens
        buffers = PassBuffers(
            cache_seqlens=metadata.cache_seqlens_int32,
            cu_seqlens_k=metadata.cu_seqlens_k,
            cu_seqlens_q=metadata.cu_seqlens_q,
            page_table=metadata.page_table,
            swa_page_table=metadata.swa_page_table,
            out_cache_loc=None if metadata.swa_out_cache_loc is None else view.out_cache_loc,
            swa_out_cache_loc=metadata.swa_out_cache_loc,
            seq_len_offset=uncounted_tokens(view),
            query_rows=rows,
        )
        return prepare_write_forward_metadata(
            [buffers],
            req_pool_indices=view.req_pool_indices,
            seq_lens=view.seq_lens,
            req_to_token=self.pool.req_to_token,
            page_size=self.pool.page_size,
            full_to_swa=self.pool.full_to_swa,
        )

    def eager(self, batch: ForwardBatch) -> TRTLLMMHAMetadata:
        """Metadata of a pass that no graph runs, in tensors of its own."""
        return build_mha_metadata(batch, self.pool)


# Given a captured size's batch and metadata, prepares what the graph runs; the call returns the graph's output.
Body = Callable[[ForwardBatch, Metadata], Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class CapturedSize(Generic[Metadata]):
    """One captured batch size: `rebuild` writes its metadata, `replay` runs the graph, `output` is where it writes."""

    view: ForwardBatch
    metadata: Metadata
    rebuild: Callable[[], None]
    replay: Callable[[], None]
    output: Any


class GraphRunner(Generic[Metadata]):
    """Captured graphs of one mode for several batch sizes, replayed for any batch that fits.

    Args:
        mode: what the graphs run.
        pool: of the requests.
        batch_sizes: to capture, in any order.
        body: prepares what runs behind the metadata. It is called once per size, and its call twice: to warm up, and captured.
        place: where the metadata is rebuilt.
        padded_seq_len: see `StaticInputs`.
        metadata: of the mode and pool, with room for the largest size; those of TRT-LLM MHA if left out.

    On a CPU nothing is captured: a replay makes the same calls on the same buffers again.
    """

    def __init__(
        self,
        mode: GraphMode,
        pool: KVPool,
        batch_sizes: Sequence[int],
        body: Body[Metadata],
        place: MetadataPlace = MetadataPlace.IN_GRAPH,
        padded_seq_len: int = PADDED_SEQ_LEN,
        metadata: MetadataBuffers[Metadata] | None = None,
    ) -> None:
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes={list(batch_sizes)} must be one size or more, each at least 1")
        self.mode = mode
        self.pool = pool
        self.place = place
        self.inputs = StaticInputs(mode, max(batch_sizes), pool.device, padded_seq_len)
        self.metadata: Any = GraphMetadata(mode, pool, max(batch_sizes)) if metadata is None else metadata
        # The largest first, as the engine does: the others' scratch then fits into its memory.
        self.captured = {size: self._capture(size, body) for size in sorted(set(batch_sizes), reverse=True)}

    def size_for(self, batch_size: int) -> int:
        """The smallest captured size that holds so many requests.

        Raises:
            ValueError: none does.
        """
        fitting = [size for size in self.captured if size >= batch_size]
        if not fitting:
            raise ValueError(
                f"{batch_size} requests exceed every captured size {sorted(self.captured)}: run them eagerly"
            )
        return min(fitting)

    def eager(self, batch: ForwardBatch) -> Metadata:
        """Metadata of a pass that no graph runs, in tensors of its own."""
        metadata: Metadata = self.metadata.eager(batch)
        return metadata

    def replay(self, batch: ForwardBatch) -> Any:
        """Load a batch, rebuild its metadata, replay. Returns the graph's own output with its padding, valid until the next."""
        captured = self.captured[self.size_for(batch.batch_size)]
        self.inputs.load(batch, captured.view.batch_size)
        if self.place is MetadataPlace.BEFORE_REPLAY:
            captured.rebuild()
        captured.replay()
        return captured.output

    def _capture(self, batch_size: int, body: Body[Metadata]) -> CapturedSize[Metadata]:
        view, metadata = self.inputs.view(batch_size), self.metadata.slices(batch_size)
        rebuild, run = self.metadata.prepare(view), body(view, metadata)
        rebuild()  # a warm-up on lengths that are not there yet would divide 0 by 0, as SGLang 0.5.12's did

        def whole() -> Any:
            if self.place is MetadataPlace.IN_GRAPH:
                rebuild()
            return run()

        replay, output = capture(whole, view.seq_lens.device)
        return CapturedSize(view, metadata, rebuild, replay, output)
