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
from lab.metadata.engine.capture import capturing
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.mha.metadata import TRTLLMMHAMetadata, build_mha_metadata, uncounted_tokens

# What the engine fills padded rows' lengths with (`get_cuda_graph_seq_len_fill_value` of SGLang's TRT-LLM backends).
PADDED_SEQ_LEN = 1


class MetadataPlace(Enum):
    """When a replay's metadata is rebuilt."""

    BEFORE_REPLAY = "before the replay"  # SGLang 0.5.11 to 0.5.14
    IN_GRAPH = "in the graph"  # SGLang 0.5.23: each replay reads lengths, rows and slots as they are then

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


@dataclass(frozen=True)
class GraphMode:
    """What the graphs of one runner run, for every batch: made by the functions below the attributes.

    Attributes:
        forward_mode: DECODE, TARGET_VERIFY, DRAFT_EXTEND or DRAFT_EXTEND_V2.
        num_tokens_per_req: query rows per request that the graphs have room for.
        draft_step: of a draft decode step, else None.
    """

    forward_mode: ForwardMode
    num_tokens_per_req: int = 1
    draft_step: int | None = None

    @classmethod
    def decode(cls) -> "GraphMode":
        return cls(ForwardMode.DECODE)

    @classmethod
    def draft_decode(cls, step: int) -> "GraphMode":
        return cls(ForwardMode.DECODE, draft_step=step)

    @classmethod
    def target_verify(cls, num_draft_tokens: int) -> "GraphMode":
        return cls(ForwardMode.TARGET_VERIFY, num_draft_tokens)

    @classmethod
    def draft_extend(cls, num_draft_tokens: int) -> "GraphMode":
        """The first draft extend: each request has as many rows as tokens were accepted, at most so many."""
        return cls(ForwardMode.DRAFT_EXTEND, num_draft_tokens)

    @classmethod
    def draft_extend_v2(cls, spec_info: SpecInfo) -> "GraphMode":
        """Every request has the same number of rows, fixed at capture.

        That is ``num_tokens_per_req``. If a synthetic capture input leaves it open (0 or below), SGLang 0.5.13 takes the
        largest of ``num_accept_tokens``, which a capture fills with the width; so does this, once, on the host.

        Raises:
            ValueError: neither says a width.
        """
        width = spec_info.num_tokens_per_req
        if width <= 0 and spec_info.num_accept_tokens is not None and spec_info.num_accept_tokens.numel():
            width = int(spec_info.num_accept_tokens.max())
        if width <= 0:
            raise ValueError(
                "draft extend V2 needs a width: SpecInfo.num_tokens_per_req, or num_accept_tokens at capture"
            )
        return cls(ForwardMode.DRAFT_EXTEND_V2, width)

    @property
    def extends(self) -> bool:
        return self.forward_mode.extends_draft

    def __post_init__(self) -> None:
        mode = self.forward_mode
        if not mode.in_graph:
            raise ValueError(
                f"{mode!r} is not run in CUDA graphs: use {', '.join(each.name for each in ForwardMode if each.in_graph)}"
            )
        if self.num_tokens_per_req < 1 or (mode.query_rows is QueryRows.ONE and self.num_tokens_per_req != 1):
            raise ValueError(f"num_tokens_per_req={self.num_tokens_per_req}: {mode!r} has 1 row per request or more")


class StaticInputs:
    """The runner's input buffers, and the batch as the captured graphs see it.

    Args:
        mode: of the runner.
        max_batch_size: the largest captured size.
        device: of the pool.
        padded_seq_len: what padded rows' lengths are; the engine's 1 if left out.
    """

    def __init__(
        self, mode: GraphMode, max_batch_size: int, device: torch.device, padded_seq_len: int = PADDED_SEQ_LEN
    ) -> None:
        self.mode = mode
        self.max_batch_size = max_batch_size
        self.padded_seq_len = padded_seq_len
        width = mode.num_tokens_per_req
        self.seq_lens = torch.full((max_batch_size,), padded_seq_len, dtype=torch.int64, device=device)
        self.req_pool_indices = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.out_cache_loc = torch.zeros(max_batch_size * width, dtype=torch.int64, device=device)
        self.extend_seq_lens = torch.full((max_batch_size,), width, dtype=torch.int32, device=device)

    def view(self, batch_size: int) -> ForwardBatch:
        """The batch of a captured size: leading slices of the buffers, and host facts that hold for every replay."""
        mode, width = self.mode, self.mode.num_tokens_per_req
        lens = self.extend_seq_lens[:batch_size]
        return ForwardBatch(
            forward_mode=mode.forward_mode,
            req_pool_indices=self.req_pool_indices[:batch_size],
            seq_lens=self.seq_lens[:batch_size],
            out_cache_loc=self.out_cache_loc[: batch_size * width],
            num_tokens=batch_size * width,
            extend_seq_lens=lens if mode.extends else None,
            extend_seq_lens_cpu=[width] * batch_size if mode.extends else None,
            spec_info=SpecInfo.of(mode.forward_mode, width, draft_step=mode.draft_step, num_accept_tokens=lens),
        )

    def load(self, batch: ForwardBatch, batch_size: int) -> None:
        """Copy a batch in, padded to a captured size: rows of the reserved request, length 1, new tokens into the sink.

        Nothing is read on the host. Padding is written whenever the batch is smaller, so that nothing is left of a larger one.

        Raises:
            ValueError: the batch has another mode, more requests than the size, or rows that the graph has no room for, or does
                not say how many rows each request has where that varies.
        """
        self._check(batch, batch_size)
        raw, rows = batch.batch_size, batch.out_cache_loc.shape[0]
        width = self.mode.num_tokens_per_req
        if raw < batch_size or rows < batch_size * width:
            self.seq_lens[:batch_size].fill_(self.padded_seq_len)
            self.req_pool_indices[:batch_size].zero_()
            self.out_cache_loc[: batch_size * width].zero_()
            self.extend_seq_lens[:batch_size].fill_(width)
        self.seq_lens[:raw].copy_(batch.seq_lens)
        self.req_pool_indices[:raw].copy_(batch.req_pool_indices)
        self.out_cache_loc[:rows].copy_(batch.out_cache_loc)
        if batch.extend_seq_lens is not None:
            self.extend_seq_lens[:raw].copy_(batch.extend_seq_lens)

    def _check(self, batch: ForwardBatch, batch_size: int) -> None:
        mode, width = self.mode, self.mode.num_tokens_per_req
        if batch.forward_mode is not mode.forward_mode:
            raise ValueError(f"these graphs run {mode.forward_mode!r}, not {batch.forward_mode!r}")
        step = None if batch.spec_info is None else batch.spec_info.speculative_step_id
        if mode.forward_mode.query_rows is QueryRows.ONE and step != mode.draft_step:
            raise ValueError(f"these graphs run draft step {mode.draft_step}, and the batch is of step {step}")
        if not batch.batch_size <= batch_size <= self.max_batch_size:
            raise ValueError(
                f"{batch.batch_size} requests do not fit into size {batch_size} of buffers for {self.max_batch_size}"
            )
        if mode.forward_mode.query_rows.are_uniform and batch.num_tokens != batch.batch_size * width:
            raise ValueError(
                f"the batch has {batch.num_tokens} rows for {batch.batch_size} requests, but these graphs were captured with "
                f"{width} rows for each: run it eagerly"
            )
        if mode.forward_mode.query_rows is QueryRows.ACCEPTED:
            self._check_accepted(batch)
        if max(batch.extend_seq_lens_cpu or (0,)) > width:
            raise ValueError(
                f"extend_seq_lens_cpu={list(batch.extend_seq_lens_cpu or ())} has more than the {width} rows of a request"
            )

    @staticmethod
    def _check_accepted(batch: ForwardBatch) -> None:
        """The first draft extend's rows vary: the graph reads them on the device, and whether they fit is known on the host."""
        for name in ("extend_seq_lens", "extend_seq_lens_cpu"):
            if getattr(batch, name) is None:
                raise ValueError(
                    f"{name} is None: {batch.forward_mode!r} needs the accepted tokens of each of the {batch.batch_size} "
                    "requests, on the device (extend_seq_lens) and on the host (extend_seq_lens_cpu)"
                )


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


def capture(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Run a call once to warm up and capture it; returns the replay and what the call returned.

    On a CPU the replay is the call itself, and its result must be the same object each time, as a graph's is.
    """
    if device.type != "cuda":
        output = call()

        def run_again() -> None:
            again = call()
            if again is not output:
                raise RuntimeError("a captured call must return the same tensors each time: write into buffers")

        return run_again, output
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        output = call()

    def replay(kept: Callable[[], Any] = call) -> None:  # a graph does not keep what its call owns
        graph.replay()

    return replay, output
