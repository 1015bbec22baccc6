"""Where a Triton kernel is tested: compiled where there is a GPU, in the interpreter where there is none."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.metadata.engine.capture import capturing

ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU that Triton compiles for"),
)
IN_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton compiles for this machine's GPU, and interprets nothing beside it"
)
# Parameters of a test that runs in both places.
DEVICES = [pytest.param("cpu", marks=IN_INTERPRETER), pytest.param("cuda", marks=ON_GPU)]


@contextlib.contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    """Any call that waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call, captured after one run of it on a side stream, as torch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        call()
    return graph


class Operations(TorchDispatchMode):
    """Notes every operation of torch, views included: on a GPU most of them launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **kwargs or {})
