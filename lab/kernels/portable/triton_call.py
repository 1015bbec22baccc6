"""Calls of Triton kernels that can be made again: checked, chosen, allocated and compiled once."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lab.kernels.support import Kernel, refuse_unsupported


class TritonLaunch:
    """One launch of a Triton kernel, with all its arguments; calling it launches the kernel on the current stream.

    The first call compiles the kernel if it never was. The second and later calls launch the compiled kernel at the same
    addresses: Triton searches no compiled kernel for the arguments, and its launcher asks no tensor for its address.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs, in one to three dimensions.
        arguments: of its first parameters; tuples, named or not, may hold tensors too.
        named: its other parameters, all of them `tl.constexpr`, and Triton's options, such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        self._kernel, self._grid, self._arguments, self._named = kernel, grid, arguments, named
        self._compiled: Any = None
        self._repeat: Callable[[], object] | None = None

    def __call__(self) -> None:
        if self._repeat is not None:
            self._repeat()
        elif self._compiled is None:  # as it stays in the interpreter, which compiles nothing
            self._compiled = self._kernel[self._grid](*self._arguments, **self._named)
        else:
            self._repeat = self._repeated()
            self._repeat()

    def _repeated(self) -> Callable[[], object]:
        addressed = _addressed(self._arguments)
        constants = [self._named[name] for name in self._kernel.arg_names[len(addressed) :]]
        grid = (*self._grid, 1, 1)[:3]
        return partial(self._compiled[grid], *addressed, *constants)


def _addressed(argument: Any) -> Any:
    """Return an argument with each tensor's address in its place, in tuples too."""
    if isinstance(argument, tuple):
        return tuple(map(_addressed, argument))
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class TritonCall:
    """A call that is checked and ready: calling it launches its kernels on the current stream, and returns its results.

    It keeps the contract of `lab.kernels.prepare`. On a CPU every call checks the contents anew, as `lab.calls.check_values`
    does. Where the call gave no `out`, every call writes the same one. Call it on the stream it was prepared on, or on one that
    waits for it, and never on two at a time. The first call compiles kernels that never were, which a capture is no place for.

    Args:
        device: where the tensors are.
        check: raises for contents that are wrong; asked on a CPU alone, before the steps.
        steps: what a call does, in order: launches, and what refreshes something before them or finishes it after them.
        returned: what the call returns.
    """

    def __init__(
        self, device: torch.device, check: Callable[[], object], steps: Sequence[Callable[[], object]], returned: Any
    ) -> None:
        self._device_index = -1 if device.index is None else device.index
        self._steps = (check, *steps) if device.type == "cpu" else tuple(steps)
        self._returned = returned

    def __call__(self) -> Any:
        with torch.cuda.device(self._device_index):  # Triton launches on the current device; -1: no GPU's
            for step in self._steps:
                step()
        return self._returned


def prepared(
    kernel: Kernel,
    problem: Any,
    check: Callable[[Any], object],
    steps: Callable[[torch.Tensor, torch.Tensor | None], Sequence[Callable[[], object]]],
    returned: Callable[[torch.Tensor, torch.Tensor | None], Any] | None = None,
) -> TritonCall:
    """Return a problem's call, ready to be made; without query rows it launches nothing.

    Args:
        kernel: the rule that says what is taken.
        problem: a `PagedAttention` or `RaggedAttention`.
        check: raises for contents of the problem that are wrong.
        steps: makes the steps of a call from the output and the LSE or None.
        returned: makes what the call returns from the same; None: the problem's own.

    Raises:
        NotImplementedError: the kernel does not take the problem; the reason is `lab.kernels.support.why_not`'s.
    """
    out, lse = problem.results()
    made: Sequence[Callable[[], object]] = ()
    if not problem.has_no_rows:
        refuse_unsupported(kernel, problem)
        made = steps(out, lse)
    return TritonCall(problem.query.device, partial(check, problem), made, (returned or problem.returned)(out, lse))
