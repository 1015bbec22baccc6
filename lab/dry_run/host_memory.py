"""The memory that a launch may touch: the bytes of its call's tensors, read and written by address, and nothing else."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


class UnsoundLaunchError(RuntimeError):
    """A launch touches bytes outside its call's tensors, or contradicts itself."""


@dataclass(frozen=True)
class HostMemory:
    """The bytes that tensors in host memory span, each from its first element to its last.

    Attributes:
        spans: (first byte's address, address after the last byte) of each tensor, whose gaps count as its own.
    """

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor]) -> "HostMemory":
        """Return the memory of tensors on the CPU, which must outlive every view of it."""
        return cls(tuple(_span(tensor) for tensor in tensors if tensor.numel()))

    def view(
        self, what: str, address: int, shape: Sequence[int], strides_bytes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return what lies at an address, as a tensor that shares the memory.

        Args:
            what: for the words of an error, such as "K's descriptor".
            address: of the first element.
            shape, strides_bytes: of each dimension; strides are not negative.
            dtype: of the elements.

        Raises:
            UnsoundLaunchError: it begins nowhere, does not lie in one tensor, or its strides are no whole elements.
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
        """Return a contiguous array at an address; raises as `view`."""
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
