"""Timed work: a call with every tensor it touches as an argument, so that copies of them can take turns."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

Call = Callable[[], object]
Check = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, eq=False)
class GpuWork:
    """A call to be timed, and the least it has to do.

    Attributes:
        prepare: given the arguments, does what is done once and returns the call that is timed.
        arguments: every tensor that the call reads or writes, anywhere inside. A tensor hidden in a closure would stay in L2
            when the others take turns.
        bytes_moved: bytes of device memory that must move at least once.
        operations: floating-point operations that it must do; 0 for none worth counting.
        check: given the arguments after a call, raises if its results are wrong, and wipes them, so that the next check tells
            what later calls wrote. It is called on every set of buffers, before and after they are timed.
    """

    prepare: Callable[..., Call]
    arguments: Mapping[str, Any]
    bytes_moved: int
    operations: int = 0
    check: Check | None = None

    @classmethod
    def of(cls, function: Callable[..., object], bytes_moved: int, operations: int = 0, **arguments: Any) -> "GpuWork":
        """Return the work of a plain function, which has nothing to prepare."""
        return cls(partial(partial, function), arguments, bytes_moved, operations)

    def copies(self, count: int) -> list["GpuWork"]:
        """Return this work and `count` - 1 copies of it, tensors included. Views of one memory stay views of one memory."""
        return [self] + [replace(self, arguments=copy.deepcopy(dict(self.arguments))) for _ in range(count - 1)]

    def call(self) -> Call:
        return self.prepare(**self.arguments)
