"""Memory that elements of one tensor share, or a call's results with its other tensors."""

from collections.abc import Sequence
from typing import Any

import torch

from lab.calls.allowed import FREE_ARGUMENTS

RESULTS = ("out", "lse")


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements of a tensor of this shape may share memory, judged by its strides."""
    span = 1  # elements of the dimensions with smaller strides, with their gaps
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += max(size - 1, 0) * stride
    return False


def check_results_apart(call: Any) -> None:
    """Raise ValueError if the call's `out` or `lse` shares memory with another of its tensors, which the call would overwrite.
    A tensor's memory is the range from its first to its last element. `FREE_ARGUMENTS` are exempt.
    """
    if call.out is None and getattr(call, "lse", None) is None:
        return
    spans = [
        (name, *span_of(tensor))
        for name, value in vars(call).items()
        if name not in FREE_ARGUMENTS
        for tensor in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta
    ]
    for result, start, end in spans:
        for name, other_start, other_end in spans if result in RESULTS else ():
            if name != result and start < other_end and other_start < end:
                raise ValueError(
                    f"{result} shares memory with {name}, which the call would overwrite, or lies between its elements; "
                    "pass another tensor"
                )


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first element, and the address after its last element."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
