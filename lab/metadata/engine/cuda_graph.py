"""CUDA graphs of one `GraphMode` for several batch sizes.

A graph replays with the addresses that it was captured with. So a runner keeps one set of input and metadata buffers for its
largest batch, and every captured batch size uses leading slices of them. A batch is copied into the inputs and padded to the
next captured size. Its metadata is rebuilt in place: before the replay, or by the graph itself. A *captured size* is a batch
size with a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from lab.metadata.engine.backend import Backend, MetadataBuffers, MetadataT
from lab.metadata.engine.capture import capture
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.graph_inputs import PADDED_SEQ_LEN, GraphMode, MetadataPlace, StaticInputs
from lab.metadata.engine.kv_pool import KVPool

# Prepares the call that a graph runs, from the captured size's batch and metadata. The call returns the graph's output.
Body = Callable[[ForwardBatch, MetadataT], Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class SizedPass(Generic[MetadataT]):
    """The forward pass of one captured batch size: the batch `view` that its graph reads, the metadata, and `rebuild`, which
    rewrites the metadata in place.
    """

    view: ForwardBatch
    metadata: MetadataT
    rebuild: Callable[[], None]


@dataclass(frozen=True, eq=False)
class CapturedSize(SizedPass[MetadataT]):
    """The forward pass of one captured batch size, with its CUDA graph. `replay` runs the graph, which writes to `output`."""

    replay: Callable[[], None]
    output: Any


def sized_passes(
    inputs: StaticInputs, buffers: MetadataBuffers[MetadataT], batch_sizes: Sequence[int]
) -> dict[int, SizedPass[MetadataT]]:
    """Return a `SizedPass` for each batch size that will be captured, by size in ascending order. Its batch and metadata are
    slices of `inputs` and `buffers`.
    """
    passes = {}
    for size in sorted(set(batch_sizes)):
        view = inputs.view(size)
        passes[size] = SizedPass(view, buffers.slices(size), buffers.prepare(view))
    return passes


def check_sizes(batch_sizes: Sequence[int]) -> None:
    """Raise ValueError if the list of batch sizes to capture is empty or has a size below 1."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes={list(batch_sizes)} must be one size or more, each at least 1")


def size_for(batch_size: int, sizes: Sequence[int]) -> int:
    """Return the smallest captured size of at least `batch_size` requests; raises ValueError if all are smaller."""
    fitting = [size for size in sizes if size >= batch_size]
    if not fitting:
        raise ValueError(f"{batch_size} requests exceed every captured size {sorted(sizes)}: run them eagerly")
    return min(fitting)


class GraphRunner(Generic[MetadataT]):
    """The CUDA graphs of one mode for several batch sizes. A batch runs in the graph of the smallest size that holds it.

    On a CPU nothing is captured: a replay makes the same calls on the same buffers again.

    Args:
        backend: makes the metadata's buffers and fills them.
        mode: the forward mode and the rows per request of all graphs.
        batch_sizes: the sizes to capture, in any order.
        body: called once per size. It returns the function that the graph runs after its metadata is rebuilt. This function
            is called twice: once to warm up, and once in the capture.
        place: where the metadata is rebuilt: before the replay or inside the graph.
        padded_seq_len: length of the requests that pad a batch to a captured size.
        metadata: the mode's metadata buffers, with room for the largest size; None: the backend makes them.

    Raises:
        ValueError: there is no size, or a size is below 1.
    """

    def __init__(
        self,
        backend: Backend[MetadataT],
        mode: GraphMode,
        pool: KVPool,
        batch_sizes: Sequence[int],
        body: Body[MetadataT],
        place: MetadataPlace = MetadataPlace.IN_GRAPH,
        padded_seq_len: int = PADDED_SEQ_LEN,
        metadata: MetadataBuffers[MetadataT] | None = None,
    ) -> None:
        check_sizes(batch_sizes)
        self.backend = backend
        self.mode = mode
        self.pool = pool
        self.place = place
        self.inputs = StaticInputs(mode, max(batch_sizes), pool.device, padded_seq_len)
        self.metadata: Any = metadata or backend.new_buffers([mode], pool, max(batch_sizes))[mode]
        passes = sized_passes(self.inputs, self.metadata, batch_sizes)
        # The largest first, as the engine does: the scratch memory of smaller sizes then fits into that of the largest.
        self.captured = {size: self._capture(passes[size], body) for size in reversed(passes)}

    def size_for(self, batch_size: int) -> int:
        return size_for(batch_size, list(self.captured))

    def eager(self, batch: ForwardBatch) -> MetadataT:
        return self.backend.build_metadata(batch, self.pool)

    def replay(self, batch: ForwardBatch) -> Any:
        """Copy a batch into the input buffers, rebuild its metadata, and replay the graph of the smallest size that holds it.

        Return the graph's output, padding included. The next replay overwrites it.
        """
        captured = self.captured[self.size_for(batch.batch_size)]
        self.inputs.load(batch, captured.view.batch_size)
        if self.place is MetadataPlace.BEFORE_REPLAY:
            captured.rebuild()
        captured.replay()
        return captured.output

    def _capture(self, sized: SizedPass[MetadataT], body: Body[MetadataT]) -> CapturedSize[MetadataT]:
        run = body(sized.view, sized.metadata)
        sized.rebuild()  # without lengths the warm-up would divide 0 by 0, as SGLang 0.5.12's did

        def whole() -> Any:
            if self.place is MetadataPlace.IN_GRAPH:
                sized.rebuild()
            return run()

        replay, output = capture(whole, self.pool.device)
        return CapturedSize(sized.view, sized.metadata, sized.rebuild, replay, output)
