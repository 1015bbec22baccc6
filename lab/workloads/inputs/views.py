"""The same numbers as views of larger storage: with gaps, at other addresses, with strides that mean nothing."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Of each byte around the numbers: a large finite value of every float dtype, far outside any pool as an id.
FILLING = 0x7B
FAR = 2**31  # elements
GAP = 16  # elements: strides stay whole loads of 16 bytes
LEAST_ALIGNMENT_BYTES = 16
E4M3_NAN = 0x7F  # its bits
ODD = 7  # elements: the stride of an axis of size 1


def raw(tensor: Tensor) -> Tensor:
    """Return the tensor, as bytes if an element is one: a CPU can do little with e4m3."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def with_nan(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of [..., heads, elements] with NaN in those of its rows that are True in `rows`, bool [num_rows]."""
    copied = raw(tensor).clone()
    copied.view(-1, *copied.shape[-2:])[rows.to(copied.device)] = E4M3_NAN if copied.dtype == torch.uint8 else math.nan
    return copied.view(tensor.dtype)


def apart(tensor: Tensor, axis: int, gap: int) -> Tensor:
    """Return the tensor as a view with `gap` elements of large values after each step along an axis."""
    axis %= tensor.dim()
    strides = [1] * tensor.dim()
    for each in reversed(range(tensor.dim() - 1)):
        strides[each] = strides[each + 1] * tensor.shape[each + 1] + (gap if each == axis else 0)
    return _as_view(tensor, strides, 0)


def at_bytes(tensor: Tensor, offset_bytes: int) -> Tensor:
    """Return the tensor, contiguous, at this offset in its storage."""
    return _as_view(tensor, tensor.contiguous().stride(), offset_bytes // tensor.element_size())


def heads_first(tensor: Tensor) -> Tensor:
    """Return [..., rows, heads, elements] with the rows of a head side by side, as a product for each head leaves them."""
    heads = tensor.dim() - 2
    return tensor.movedim(heads, 0).contiguous().movedim(0, heads)


def in_halves(tensor: Tensor) -> Tensor:
    """Return [pages, 2, ...] with all of its first sides before all of its second ones in memory."""
    return raw(tensor).transpose(0, 1).contiguous().transpose(0, 1).view(tensor.dtype)


def laid(tensor: Tensor, form: str) -> Tensor:
    """Return [..., rows or tokens, heads, elements] as a form of a configuration names it."""
    layouts: dict[str, Callable[[], Tensor]] = {
        "contiguous": lambda: tensor,
        "rows apart": lambda: apart(tensor, -3, GAP),
        "tokens apart": lambda: apart(tensor, -3, GAP),
        "heads apart": lambda: apart(tensor, -2, GAP),
        "at 16 bytes": lambda: at_bytes(tensor, LEAST_ALIGNMENT_BYTES),
        "at an element": lambda: at_bytes(tensor, tensor.element_size()),
        "heads first": lambda: heads_first(tensor),
        "far apart": lambda: far_apart(tensor),
    }
    return layouts[form]()


def far_apart(tensor: Tensor) -> Tensor:
    """Return the tensor as a view whose last row begins beyond 2**31 elements; memory between rows is never touched."""
    row = tensor[:1].numel()
    stride = max(row, -(-FAR // max(len(tensor) - 1, 1)))
    elements = raw(tensor)
    size = (len(tensor) - 1) * stride + row if len(tensor) else 0
    storage = torch.empty(size, dtype=elements.dtype, device=tensor.device)
    strides = (stride, *elements[:1].contiguous().stride()[1:])
    return storage.as_strided(tensor.shape, strides).copy_(elements).view(tensor.dtype)


def with_strides_of(tensor: Tensor, other: Tensor) -> Tensor:
    """Return the tensor with the strides of another of its shape and dtype, in memory of its own if they differ."""
    if tensor.stride() == other.stride():
        return tensor
    elements = raw(tensor)
    like = torch.empty_strided(tensor.shape, other.stride(), dtype=elements.dtype, device=tensor.device)
    return like.copy_(elements).view(other.dtype)


def with_odd_strides(tensor: Tensor) -> Tensor:
    """Return the tensor with a stride of no meaning on each axis of size 1."""
    strides = [ODD if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


def _as_view(tensor: Tensor, strides: Sequence[int], first: int) -> Tensor:
    elements = raw(tensor)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    size_bytes = (first + max(reach, 0) + max(strides, default=1)) * tensor.element_size()
    storage = torch.full((size_bytes,), FILLING, dtype=torch.uint8, device=tensor.device).view(elements.dtype)
    return storage.as_strided(tensor.shape, tuple(strides), first).copy_(elements).view(tensor.dtype)
