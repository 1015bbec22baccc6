"""FlashInfer's functions as a test of calls needs them: they note their arguments."""

from collections.abc import Callable
from typing import Any


class NotedCalls:
    """Functions of FlashInfer's names that note their name and arguments in `calls`, and compute with an implementation."""

    def __init__(self, implementation: Any = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._implementation = implementation

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("trtllm_"):
            raise AttributeError(name)
        compute = getattr(self._implementation, name, lambda **_: None)
        return lambda **arguments: self.calls.append((name, arguments)) or compute(**arguments)
