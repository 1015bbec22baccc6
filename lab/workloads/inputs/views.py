"""Copy tensors into another memory layout: with gaps, at another address, or with arbitrary strides of axes of size 1."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lab.named_enum import TextEnum

# Value of each byte in gaps. As a float of any dtype it is large and finite; as an id it is outside any pool.
FILLING = 0x7B
NAN_FILLING = 0xFF  # value of each byte in every second float element of gaps, which is then NaN
FAR = 2**31  # elements
GAP = 16  # elements, so that strides stay multiples of 16 bytes
LEAST_ALIGNMENT_BYTES = 16
ODD = 7  # elements; stride of an axis of size 1, which has no meaning


def with_nan(tensor: Tensor, rows: Tensor) -> Tensor:
    """Return a copy of a query, [num_rows, heads, elements] or [batch, q_len, heads, elements], with NaN in the rows for which
    `rows`, bool [num_rows], is True.
    """
    copied = tensor.clone()
    copied.view(-1, *copied.shape[-2:])[rows.nonzero().flatten().to(copied.device)] = math.nan
    return copied


def apart(tensor: Tensor, axis: int, gap: int) -> Tensor:
    """Return a copy with `gap` elements after each index of `axis`. The gaps hold large values, and in floats also NaN."""
    axis %= tensor.dim()
    strides = [1] * tensor.dim()
    for each in reversed(range(tensor.dim() - 1)):
        strides[each] = strides[each + 1] * tensor.shape[each + 1] + (gap if each == axis else 0)
    return _as_view(tensor, strides, 0)


def at_bytes(tensor: Tensor, offset_bytes: int) -> Tensor:
    return _as_view(tensor, tensor.contiguous().stride(), offset_bytes // tensor.element_size())


def _far_apart(tensor: Tensor) -> Tensor:
    """Return a copy whose last row begins at least 2**31 elements after the first row. The gaps are not initialised."""
    row = tensor[:1].numel()
    stride = max(row, -(-FAR // max(len(tensor) - 1, 1)))
    size = (len(tensor) - 1) * stride + row if len(tensor) else 0
    strides = (stride, *tensor[:1].contiguous().stride()[1:])
    return tensor.new_empty(size).as_strided(tensor.shape, strides).copy_(tensor)


def with_odd_strides(tensor: Tensor) -> Tensor:
    """Return a view with stride 7 on all axes of size 1, where a stride has no meaning."""
    strides = [ODD if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides)


class Layout(TextEnum):
    """A memory layout for a tensor [..., rows or tokens, heads, elements]. `of` returns an equal tensor in this layout."""

    CONTIGUOUS = "contiguous", lambda tensor: tensor
    ROWS_APART = "rows apart", lambda tensor: apart(tensor, -3, GAP)
    TOKENS_APART = "tokens apart", lambda tensor: apart(tensor, -3, GAP)
    HEADS_APART = "heads apart", lambda tensor: apart(tensor, -2, GAP)
    AT_16_BYTES = "at 16 bytes", lambda tensor: at_bytes(tensor, LEAST_ALIGNMENT_BYTES)
    AT_AN_ELEMENT = "at an element", lambda tensor: at_bytes(tensor, tensor.element_size())
    # [..., rows, heads, elements] is stored as [heads, ..., rows, elements].
    HEADS_FIRST = "heads first", lambda tensor: tensor.movedim(-2, 0).contiguous().movedim(0, -2)
    FAR_APART = "far apart", _far_apart
    # Gaps between requests: the first two axes of a query with four axes cannot be merged into one.
    REQUESTS_APART = "requests apart", lambda tensor: apart(tensor, 0, tensor[:1, :1].numel())

    def __init__(self, _: str, of: Callable[[Tensor], Tensor]) -> None:
        self.of = of  # returns a tensor in this layout


def _as_view(tensor: Tensor, strides: Sequence[int], first: int) -> Tensor:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    size_bytes = (first + max(reach, 0) + max(strides, default=1)) * tensor.element_size()
    storage = torch.full((size_bytes,), FILLING, dtype=torch.uint8, device=tensor.device)
    if tensor.is_floating_point():
        storage.view(-1, tensor.element_size())[::2] = NAN_FILLING
    return storage.view(tensor.dtype).as_strided(tensor.shape, tuple(strides), first).copy_(tensor)
