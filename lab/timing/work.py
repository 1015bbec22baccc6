"""Timed work: a call that receives every tensor as an argument, so that copies of the tensors can be used in rotation."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from lab.workloads.inputs.redraw import Seeds

Call = Callable[[], object]


class Redraw(Protocol):
    """Redraws the inputs of works in place, from seeds, and checks the works' results."""

    def inputs(self, number: int) -> dict[str, Any]:
        """Return all arguments but `out` for the tensor set with this number, which all works share."""

    def write_tokens(self, arguments: Mapping[str, Any], seed: int) -> None:
        """Redraw K and V, and place them in other pages."""

    def write_call(self, arguments: Mapping[str, Any], seeds: Seeds) -> None:
        """Redraw queries, lengths and some tokens, which changes every result, and wipe the output."""

    def results(self, arguments: Mapping[str, Any], seeds: Seeds, *, whole: bool) -> Any:
        """Return a copy of all results with `whole`, else of the part that the seeds choose."""

    def check_of(self, seeds: Seeds, *, whole: bool) -> Callable[[Any], None]:
        """Return a function that raises AssertionError for wrong results of the contents that these seeds draw."""


@dataclass(frozen=True, eq=False)
class GpuWork:
    """A call to be timed, with its least bytes and operations.

    Attributes:
        prepare: does the preparation that is not timed, given the arguments, and returns the timed call.
        arguments: every tensor that the call reads or writes, at any depth. A tensor hidden in a closure would stay in L2
            during rotation.
        bytes_moved: bytes of device memory that must move at least once.
        operations: floating-point operations that the call must do; 0 for a negligible number.
        check: raises, given the arguments after a call, if the results are wrong; then wipes them, so that the next check sees
            only results of later calls. It is called on every set of buffers, before and after the samples.
        redraw: replaces `check` and gives each sample other contents. `out` is then an argument, and works with the same redraw
            share all other tensors.
    """

    prepare: Callable[..., Call]
    arguments: Mapping[str, Any]
    bytes_moved: int
    operations: int = 0
    check: Callable[[Mapping[str, Any]], None] | None = None
    redraw: Redraw | None = None

    @classmethod
    def of(cls, function: Callable[..., object], bytes_moved: int, operations: int = 0, **arguments: Any) -> "GpuWork":
        """Return the work of a plain function, which needs no preparation."""
        return cls(partial(partial, function), arguments, bytes_moved, operations)

    def copies(self, count: int) -> list["GpuWork"]:
        """Return this work and `count` - 1 copies of it with their own tensors. Tensors that share memory still share it."""
        return [self, *map(self.copy, range(1, count))]

    def copy(self, number: int) -> "GpuWork":
        """Return a copy of this work with copied tensors; copies are numbered from 1."""
        if self.redraw is None:
            return replace(self, arguments=copy.deepcopy(dict(self.arguments)))
        others = self.redraw.inputs(number) | {"out": self.arguments["out"].clone()}
        return replace(self, arguments={**self.arguments, **others})

    def call(self) -> Call:
        return self.prepare(**self.arguments)
