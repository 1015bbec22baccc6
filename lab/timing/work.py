"""Timed work: a call with every tensor it touches as an argument, so that copies of them can take turns."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from lab.workloads.inputs.redraw import Seeds

Call = Callable[[], object]


class Redraw(Protocol):
    """Draws the inputs of works anew in place, from seeds, and judges what the works made of them."""

    def inputs(self, number: int) -> dict[str, Any]:
        """Return the arguments but `out` over the set of tensors with this number, which all works share."""

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        """Draw K and V anew, in other pages."""

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        """Draw queries, lengths and some tokens anew, which changes every result, and wipe the output."""

    def results(self, arguments: Mapping[str, Any], seeds: Seeds, *, whole: bool) -> Any:
        """Return a copy of the results, or of the part of them that the seeds choose."""

    def check_of(self, seeds: Seeds, *, whole: bool) -> Callable[[Any], None]:
        """Return what raises AssertionError for wrong results of calls with the contents of these seeds."""


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
        redraw: in place of `check`, gives each sample other contents. `out` is then an argument, and works that have the same
            redraw share all other tensors.
    """

    prepare: Callable[..., Call]
    arguments: Mapping[str, Any]
    bytes_moved: int
    operations: int = 0
    check: Callable[[Mapping[str, Any]], None] | None = None
    redraw: Redraw | None = None

    @classmethod
    def of(cls, function: Callable[..., object], bytes_moved: int, operations: int = 0, **arguments: Any) -> "GpuWork":
        """Return the work of a plain function, which has nothing to prepare."""
        return cls(partial(partial, function), arguments, bytes_moved, operations)

    def copies(self, count: int) -> list["GpuWork"]:
        """Return this work and `count` - 1 copies of it, tensors included. Views of one memory stay views of one memory."""
        return [self, *map(self.copy, range(1, count))]

    def copy(self, number: int) -> "GpuWork":
        """Return the copy with this number, from 1."""
        if self.redraw is None:
            return replace(self, arguments=copy.deepcopy(dict(self.arguments)))
        others = self.redraw.inputs(number) | {"out": self.arguments["out"].clone()}
        return replace(self, arguments={**self.arguments, **others})

    def call(self) -> Call:
        return self.prepare(**self.arguments)
