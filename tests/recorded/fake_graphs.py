"""CUDA graphs on a CPU: a captured kernel does not run, and each replay runs it on the same tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


class FakeGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    captured: "FakeGraph | None" = None  # the graph that is captured

    def __init__(self) -> None:
        self.kernels: list[Callable[[], object]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        FakeGraph.captured = self

    def capture_end(self) -> None:
        FakeGraph.captured = None

    def replay(self) -> None:
        for kernel in self.kernels:
            kernel()

    def reset(self) -> None:
        self.kernels = []


def launch(kernel: Callable[[], object]) -> None:
    """Run a kernel, or add it to the graph that is captured."""
    if FakeGraph.captured is None:
        kernel()
    else:
        FakeGraph.captured.kernels.append(kernel)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """`FakeGraph` in the place of torch's class."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: FakeGraph.captured is not None)
    return FakeGraph
