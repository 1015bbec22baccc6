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


class PreparedCall:
    """A call that is checked and ready: calling it launches its kernels on the current stream, and returns its results.

    It holds the tensors that it was prepared with, not copies. Their contents may change from call to call, as an engine's
    CUDA-graph buffers do; shapes, strides, host numbers and bounds are those of the preparation and are not looked at again.
    Where the call gave no `out`, every call writes the same one. Scratch is the call's own, and stays: one call must have ended
    before the next begins, as on one stream. A CUDA graph that captured it uses all of those: keep it as long as the graph.
    Prepared during a capture, it is good inside that graph alone.

    Args:
        device: where the tensors are.
        launches: in order; none where there is nothing to compute.
        returned: what the call returns.
        finish: run behind the launches, if anything is.
    """

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[Launch],
        returned: Any,
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._launches, self._returned, self._finish = tuple(launches), returned, finish
        self._device_index = -1 if device.index is None else device.index

    def __call__(self) -> Any:
        with torch.cuda.device(self._device_index):  # Triton launches on the current device; -1: no GPU's
            for launch in self._launches:
                launch()
        if self._finish is not None:
            self._finish()
        return self._returned
