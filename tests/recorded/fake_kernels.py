"""Kernels and CUDA graphs on a CPU: a captured kernel does not run, and each replay runs it on the same tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lab import references
from lab.checks import Outcome
from lab.checks.run.judge import judge_calls
from lab.recorded import Recorder
from tests.cases import DECODE
from tests.recorded.record_calls import decode_arguments


class FakeGraph:
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
    if FakeGraph.captured is None:
        kernel()
    else:
        FakeGraph.captured.kernels.append(kernel)


def decode_kernel(scale: float = 1.0) -> Callable[..., Any]:
    """Return a decode kernel that is right if `scale` is 1, and that can be captured."""

    def kernel(query: torch.Tensor, **arguments: Any) -> Any:
        out = torch.zeros_like(query) if arguments.get("out") is None else arguments["out"]
        reference = references.trtllm_batch_decode_with_kv_cache
        launch(lambda: out.copy_(reference(query=query.clone(), **arguments) * scale))
        return out

    return kernel


@dataclass(frozen=True)
class Engine:
    """An engine that imported a right decode function, and the folder in which its calls are recorded."""

    module: ModuleType
    folder: Path
    log: pytest.LogCaptureFixture

    @property
    def kernel(self) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(self.module, DECODE)
        return found

    def use(self, kernel: Callable[..., Any]) -> None:
        setattr(self.module, DECODE, kernel)

    def decode(self, **changes: Any) -> Any:
        return self.kernel(**decode_arguments(**changes))

    def recorded(self, **settings: Any) -> Recorder:
        return Recorder(self.folder, functions=[self.module], **settings)


def outcomes(folder: Path) -> list[Outcome]:
    """Return the outcomes of recorded outputs, in the order of time."""
    return [verdict.outcome for verdict in judge_calls(folder, device="cpu", isolated=False).verdicts]
