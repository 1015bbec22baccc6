"""Calls of Triton kernels that can be made again: what is checked, chosen, allocated and compiled once is not done anew."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class Launch:
    """One launch of a Triton kernel, with all that it takes; calling it launches the kernel on the current stream.

    The first call compiles the kernel if it never was. From the second on it is the compiled kernel that is launched, at the
    same addresses: neither looks Triton for what it compiled for such arguments, nor its launcher for each tensor's address.

    Args:
        kernel: a `triton.jit` function.
        grid: its programs, in one to three dimensions.
        arguments: of its first parameters.
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
        addressed = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in self._arguments]
        constants = [self._named[name] for name in self._kernel.arg_names[len(addressed) :]]
        grid = (*self._grid, 1, 1)[:3]
        return partial(self._compiled[grid], *addressed, *constants)


class TritonCall:
    """A call that is checked and ready: calling it launches its kernels on the current stream, and returns its results.

    It holds the tensors that it was prepared with, not copies. Their contents may change from call to call, as an engine's
    CUDA-graph buffers do; addresses, shapes, strides, host numbers and bounds are those of the preparation and are not looked
    at again. On a CPU every call checks the contents anew, as `lab.calls.check_values` does.

    Where the call gave no `out`, every call writes the same one. Scratch is the call's own, and stays. What was allocated for
    it belongs to the stream it was prepared on: call it there, or on one that waits for it, and never on two at a time. A CUDA
    graph that captured it uses all of those: keep it as long as the graph. Prepared during a capture, it is good inside that
    graph alone. The first call compiles kernels that never were, which a capture is no place for.

    Args:
        device: where the tensors are.
        check: raises for contents that are wrong; asked on a CPU alone, before the steps.
        steps: what a call does, in order: launches, and what refreshes or finishes something before or behind them.
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
