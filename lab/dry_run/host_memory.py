"""Read host memory by address, and raise an error for an address outside the tensors of a call."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


class UnsoundLaunchError(RuntimeError):
    """A kernel launch accesses bytes outside its call's tensors, or two of its arguments contradict each other."""


@dataclass(frozen=True)
class HostMemory:
    """The address ranges of the tensors that a kernel launch may access."""

    #: (address of the first byte, address after the last byte) of each tensor, gaps between its elements included
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "HostMemory":
        """Return the address ranges of CPU tensors. The tensors must live longer than every view of their memory."""
        return cls(tuple(_span(tensor) for tensor in tensors if tensor.numel()))

    def view(
        self, what: str, address: int, shape: Sequence[int], strides_bytes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the memory at an address as a tensor, without copying. `what` names it in errors. Raises UnsoundLaunchError if
        the view is not inside one of the call's tensors, or if its address or a stride is not a whole number of elements.
        """
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        offset = sum((size - 1) * stride for size, stride in zip(shape, strides_bytes, strict=True))
        end = address + offset + dtype.itemsize
        if not any(first <= address and end <= last for first, last in self.spans):
            raise UnsoundLaunchError(
                f"{what} reaches {end - address} bytes from {address:#x} on, and no tensor of the call holds all of them"
            )
        if any(stride % dtype.itemsize for stride in strides_bytes) or address % dtype.itemsize:
            raise UnsoundLaunchError(
                f"{what} has strides of {tuple(strides_bytes)} bytes from {address:#x}: no whole {dtype}"
            )
        memory = (ctypes.c_uint8 * (end - address)).from_address(address)
        elements = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return elements.as_strided(tuple(shape), tuple(stride // dtype.itemsize for stride in strides_bytes))

    def array(self, what: str, address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory at an address as a contiguous tensor, like `view`."""
        strides_bytes: list[int] = []
        step = dtype.itemsize
        for size in reversed(shape):
            strides_bytes.insert(0, step)
            step *= size
        return self.view(what, address, shape, strides_bytes, dtype)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (steps + 1) * tensor.element_size()
