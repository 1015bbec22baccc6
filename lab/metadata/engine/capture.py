"""CUDA graphs captured in peace.

A leaf: it needs torch alone.
"""

import contextlib
import gc
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """`torch.cuda.graph` without a garbage collection inside.

    A collection may free another graph and its memory, and a call that frees memory invalidates a capture that is under way.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    finally:
        if was_enabled:
            gc.enable()
