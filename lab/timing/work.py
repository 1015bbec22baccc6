"""Timed calls (`GpuWork`). Their tensors are explicit arguments, so that a measurement can repeat a call on copies of them."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab.workloads.inputs.redraw import SeededRedraw

Call = Callable[[], object]


@dataclass(frozen=True, eq=False)
class GpuWork:
    """A call to be timed, with its tensors and lower bounds of the bytes that it moves and the operations that it does."""

    #: takes the arguments, does the preparation that is not timed, and returns the timed call
    prepare: Callable[..., Call]
    #: all tensors that the call reads or writes, also nested ones. One in a closure would stay in L2 during rotation
    arguments: Mapping[str, Any]
    bytes_moved: int  #: bytes of device memory that must move at least once
    operations: int = 0  #: floating-point operations that the call must do; 0 for a negligible number
    #: takes the arguments after a call, raises an error if the results are wrong, and overwrites the results; called on every
    #: set of buffers, before and after the samples
    check: Callable[[Mapping[str, Any]], None] | None = None
    #: draws other inputs for each sample and checks results, instead of `check`. `out` is then an argument, and calls with the
    #: same object share all other tensors
    redraw: SeededRedraw | None = None

    @classmethod
    def of(cls, function: Callable[..., object], bytes_moved: int, operations: int = 0, **arguments: Any) -> "GpuWork":
        return cls(partial(partial, function), arguments, bytes_moved, operations)

    def copy(self, number: int) -> "GpuWork":
        """Return this call with the tensors `self.redraw.inputs(number)`, or if `redraw` is None, copies of its own tensors."""
        if self.redraw is None:
            return replace(self, arguments=copy.deepcopy(dict(self.arguments)))
        others = self.redraw.inputs(number) | {"out": self.arguments["out"].clone()}
        return replace(self, arguments={**self.arguments, **others})

    def call(self) -> Call:
        return self.prepare(**self.arguments)
