"""CUDA graphs of one forward mode for several batch sizes.

A graph replays with the addresses of its capture, so it reads buffers, which have room for the largest batch. A *captured size*
is a batch size for which a graph was captured; its graph uses leading slices of the buffers. A batch is padded to the next
captured size.
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
    """The input buffers `view` and the metadata that one CUDA graph reads. `rebuild` writes the metadata again, in place."""

    view: ForwardBatch
    metadata: MetadataT
    rebuild: Callable[[], None]


@dataclass(frozen=True, eq=False)
class CapturedSize(SizedPass[MetadataT]):
    replay: Callable[[], None]
    output: Any


def sized_passes(
    inputs: StaticInputs, buffers: MetadataBuffers[MetadataT], batch_sizes: Sequence[int]
) -> dict[int, SizedPass[MetadataT]]:
    passes = {}
    for size in sorted(set(batch_sizes)):
        view = inputs.view(size)
        passes[size] = SizedPass(view, buffers.slices(size), buffers.prepare(view))
    return passes


def check_sizes(batch_sizes: Sequence[int]) -> None:
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes={list(batch_sizes)} must be one size or more, each at least 1")


def size_for(batch_size: int, sizes: Sequence[int]) -> int:
    fitting = [size for size in sizes if size >= batch_size]
    if not fitting:
        raise ValueError(f"{batch_size} requests exceed every captured size {sorted(sizes)}: run them eagerly")
    return min(fitting)


class GraphRunner(Generic[MetadataT]):
    """The CUDA graphs of one forward mode, one per batch size. A batch runs in the graph of the smallest size that is large
    enough. On a CPU nothing is captured: a replay calls the same functions again.

    Args:
        body: called once per batch size with a batch and its metadata, whose tensors each replay updates. Returns the function
            that the graph captures.
        metadata: metadata buffers with room for the largest size; None: the backend allocates them.
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
        """Run a batch in the graph of the smallest size that is large enough. Return the graph's output, padding rows included.
        The next replay overwrites this output.
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
