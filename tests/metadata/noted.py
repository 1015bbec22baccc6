"""FlashInfer's functions as a test of calls needs them: they note their arguments, which are compared."""

from collections.abc import Callable
from typing import Any

import torch

from lab.workloads.inputs.guards import same_bits


class NotedCalls:
    """Functions of FlashInfer's names that note their name and arguments in `calls`, and compute with an implementation.

    With `fill`, arguments are copies of their time, and the output is filled with that number.
    """

    def __init__(self, implementation: Any = None, fill: float | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._implementation = implementation
        self._fill = fill

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("trtllm_"):
            raise AttributeError(name)
        compute = getattr(self._implementation, name, lambda **_: None)
        if self._fill is None:
            return lambda **arguments: self.calls.append((name, arguments)) or compute(**arguments)

        def fill(out: torch.Tensor, **arguments: Any) -> None:
            copies = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
            self.calls.append((name, copies))
            out.fill_(self._fill)

        return fill


def is_same(one: Any, other: Any) -> bool:
    """Compare an argument of two calls: tensors by dtype and bits, each of several, or numbers."""
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and same_bits(one, other)
    return bool(one == other)
