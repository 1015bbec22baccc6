"""Prepared calls of Triton kernels, which can run any number of times. Checks, allocations and compilation happen once."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch

from lab.kernels.support import Kernel, refuse_unsupported

SCRATCH_ALIGNMENT = 512  # bytes, the alignment of torch's allocations
Addresses = Sequence[int]


class TritonLaunch:
    """One launch of a Triton kernel on the current stream. The first call compiles the kernel if needed; later calls launch the
    compiled kernel directly.

    Args:
        arguments: the kernel's first arguments: tensors, numbers, and tuples of them.
        scratch: the tensors among the arguments that need not be initialised (`new_scratch`).
        counters: the tensors among the arguments that must be zero before each call, and are zero after it. Each is a separate
            torch allocation.
        named: the kernel's other arguments, all of them `tl.constexpr`, and Triton's options, such as `num_warps`.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        scratch: Sequence[torch.Tensor] = (),
        counters: Sequence[torch.Tensor] = (),
        **named: Any,
    ) -> None:
        self._kernel, self._grid, self._arguments, self._named = kernel, grid, arguments, named
        self.scratch, self.counters = scratch, counters
        self.compiled: Any = None
        self._repeat: Callable[[], object] | None = None

    def __call__(self) -> None:
        if self._repeat is not None:
            self._repeat()
        elif self.compiled is None:  # always in the interpreter, which compiles nothing
            self.compiled = self._kernel[self._grid](*self._arguments, **self._named)
        else:
            self._repeat = partial(self._bare_launch(), *_addressed(self._arguments), *self._constants())
            self._repeat()

    def _bare_launch(self) -> Callable[..., object]:
        return self.compiled[(*self._grid, 1, 1)[:3]]

    def _constants(self) -> list[Any]:
        return [self._named[name] for name in self._kernel.arg_names[len(self._arguments) :]]

    def elsewhere(self, index_of: Callable[[torch.Tensor], int]) -> Callable[[Addresses], None]:
        """Return a function of `addresses` that launches the compiled kernel with `addresses[index_of(t)]` in place of each
        tensor t. The function keeps no tensor alive.
        """
        bare, places = self._bare_launch(), [_with_addresses(argument, index_of) for argument in self._arguments]
        filled = [(place, at) for place, at in enumerate(places) if at is not None]
        known = [argument if at is None else None for argument, at in zip(self._arguments, places, strict=True)]
        known += self._constants()

        def launch(addresses: Addresses) -> None:
            arguments = known.copy()
            for place, at in filled:
                arguments[place] = at(addresses)
            bare(*arguments)

        return launch


def _addressed(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(_addressed, argument))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


def _with_addresses(argument: Any, index_of: Callable[[torch.Tensor], int]) -> Callable[[Addresses], Any] | None:
    """Return f(addresses) = `argument` with `addresses[index_of(t)]` in place of each tensor t. None if it has no tensor."""
    if isinstance(argument, torch.Tensor):
        return itemgetter(index_of(argument))
    if hasattr(argument, "block_shape"):  # a tensor descriptor, Triton's or Gluon's
        address = itemgetter(index_of(argument.base))
        terms = {name: term for name, term in vars(argument).items() if name != "base"}
        return lambda addresses: SimpleNamespace(base=_Address(address(addresses)), **terms)
    if not isinstance(argument, tuple):
        return None
    parts = [_with_addresses(part, index_of) for part in argument]
    if not any(parts):
        return None
    known = [(part if at is None else None, at) for part, at in zip(argument, parts, strict=True)]  # and no tensor
    return lambda addresses: tuple([part if at is None else at(addresses) for part, at in known])


class _Address(int):
    """An address, passed to Triton's launcher in place of the base tensor of a TMA descriptor."""

    def data_ptr(self) -> int:
        return self


def new_scratch(device: torch.device, *parts: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Allocate an uninitialised tensor for each (shape, dtype) in `parts`. All of them share one torch allocation."""
    used = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
    sizes = [-(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for size in used]
    blocks = torch.empty((sum(sizes),), dtype=torch.uint8, device=device).split(sizes)
    cut = [block[:size] for block, size in zip(blocks, used, strict=True)]
    return [block.view(dtype).view(shape) for block, (shape, dtype) in zip(cut, parts, strict=True)]


class TritonCall:
    """A prepared call (`lab.kernels.prepare`): calling it launches its kernels on the current stream, and returns the results.

    Args:
        check: raises an error if lengths or page ids are wrong. On a CPU each run calls it first; on a GPU it is not called.
        steps: the functions that a run calls in order: kernel launches, and torch operations before and after them.
        reads_contents: True if the preparation has read contents of GPU tensors on which the launches depend.
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[], object],
        steps: Sequence[Callable[[], object]],
        returned: Any,
        reads_contents: bool = False,
    ) -> None:
        self.device, self.returned, self.reads_contents = device, returned, reads_contents
        self._device_index = -1 if device.index is None else device.index
        self._steps = (check, *steps) if device.type == "cpu" else tuple(steps)

    @property
    def launches(self) -> list[TritonLaunch] | None:
        """Return the launches of the call if a run consists of launches of compiled kernels only, else None."""
        launches = [step for step in self._steps if isinstance(step, TritonLaunch) and step.compiled is not None]
        return launches if len(launches) == len(self._steps) else None

    def __call__(self) -> Any:
        with torch.cuda.device(self._device_index):  # Triton launches on the current device; -1 leaves it
            for step in self._steps:
                step()
        return self.returned


def prepared(
    kernel: Kernel,
    problem: Any,
    steps: Callable[[torch.Tensor, torch.Tensor | None], Sequence[Callable[[], object]]],
    returned: Callable[[torch.Tensor, torch.Tensor | None], Any] | None = None,
    reads_contents: bool = False,
) -> TritonCall:
    """Return a prepared call after checking that `kernel` supports it. A call without query rows launches nothing.

    `steps` takes the output and the LSE (or None), and returns the `steps` of `TritonCall`. `returned` takes the output and the
    LSE, and returns the result of the call; None: `problem.returned`.
    """
    out, lse = problem.results()
    made: Sequence[Callable[[], object]] = ()
    if not problem.has_no_rows:
        refuse_unsupported(kernel, problem)
        made = steps(out, lse)
    results = (returned or problem.returned)(out, lse)
    return TritonCall(problem.query.device, problem.check_values, made, results, reads_contents)
