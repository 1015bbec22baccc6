"""The same numbers as views of larger storage: with gaps, at other addresses, with strides that mean nothing."""

from collections.abc import Sequence

import torch
from torch import Tensor

FILLING = (
    0x7B  # of each byte around the numbers: a large finite value of every float dtype, far outside any pool as an id
)
FAR = 2**31  # elements
ODD = 7  # elements: the stride of an axis of size 1


def apart(tensor: Tensor, axis: int, gap: int) -> Tensor:
    """Return the tensor as a view with so many elements of large values after each step along an axis."""
    axis %= tensor.dim()
    strides = [1] * tensor.dim()
    for each in reversed(range(tensor.dim() - 1)):
        strides[each] = strides[each + 1] * tensor.shape[each + 1] + (gap if each == axis else 0)
    return _as_view(tensor, strides, 0)


def at_bytes(tensor: Tensor, offset_bytes: int) -> Tensor:
    """Return the tensor, contiguous, so many bytes after the start of its storage."""
    return _as_view(tensor, tensor.contiguous().stride(), offset_bytes // tensor.element_size())


def far_apart(tensor: Tensor) -> Tensor:
    """Return the tensor as a view whose last row begins beyond 2**31 elements; memory between rows is never touched."""
    row = tensor[:1].numel()
    stride = max(row, -(-FAR // max(len(tensor) - 1, 1)))
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    storage = torch.empty((len(raw) - 1) * stride + row if len(raw) else 0, dtype=raw.dtype, device=raw.device)
    return storage.as_strided(raw.shape, (stride, *raw[:1].contiguous().stride()[1:])).copy_(raw).view(tensor.dtype)


def with_odd_strides(tensor: Tensor) -> Tensor:
    """Return the tensor with a stride of no meaning on each axis of size 1."""
    strides = [ODD if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def _as_view(tensor: Tensor, strides: Sequence[int], first: int) -> Tensor:
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    reach = sum((size - 1) * stride for size, stride in zip(raw.shape, strides, strict=True)) + 1
    size_bytes = (first + max(reach, 0) + max(strides, default=1)) * raw.element_size()
    storage = torch.full((size_bytes,), FILLING, dtype=torch.uint8, device=raw.device).view(raw.dtype)
    view = storage.as_strided(raw.shape, tuple(strides), first)
    return view.copy_(raw).view(tensor.dtype)
