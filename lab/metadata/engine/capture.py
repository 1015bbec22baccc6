"""Capture functions in CUDA graphs."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture a `with` block in `graph`, without garbage collection: if it freed another CUDA graph, the capture would fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if was_enabled:
            gc.enable()


def capture(call: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Call `call` once to warm up, and capture it in a CUDA graph. Return (function that replays the graph, result of the
    captured `call`). On a CPU, each replay calls `call`, which must return the same object every time.
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

    def replay(kept: Callable[[], Any] = call) -> None:  # keeps tensors that the call owns alive; a graph does not
        graph.replay()

    return replay, output
