"""Make tensors surrounded by memory that a kernel must not write, and compare tensors bit by bit."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

AROUND = 33  # elements before and after an embedded vector, so that its address is not a multiple of 16 bytes
GUARD_BYTES = 4096
GUARD_BYTE = 0xA5  # every byte of a guard; no kernel computes a number of these bytes
# The integer dtype by an element's size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def embedded(tensor: Tensor, value: float, before: float | None = None) -> Tensor:
    """Return a copy of a tensor inside a larger vector filled with `value`, at an address that is no multiple of 16 bytes. The
    elements in front of the copy are `before`, if it is given.
    """
    how: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device, "filling": value}
    whole, part = surrounded(tensor.numel(), before=AROUND, after=AROUND, **how)
    whole[:AROUND] = value if before is None else before
    return part.view(tensor.shape).copy_(tensor)


def surrounded(
    *shape: int, dtype: torch.dtype, device: torch.device | str, filling: float, before: int = 8, after: int = 8
) -> tuple[Tensor, Tensor]:
    """Return (whole, part), filled with `filling`. `part` is a view of this shape inside the larger tensor `whole`: `before`
    cells precede each row, and `after` cells follow it. A matrix also has one row before it and one row after it.
    """
    rows = (shape[0] + 2,) if len(shape) == 2 else ()
    whole = torch.full((*rows, before + shape[-1] + after), filling, dtype=dtype, device=device)
    part = whole[..., before : before + shape[-1]]
    return whole, part[1:-1] if rows else part


def guarded(tensor: Tensor, at_byte: int = 0) -> tuple[Tensor, Tensor]:
    """Return (copy of `tensor`, uint8 buffer). The buffer has the copy between two guards: bytes that no kernel may write. The
    copy's address is `at_byte` bytes after an aligned address.
    """
    size = tensor.nbytes
    room = size + 2 * GUARD_BYTES + at_byte
    whole = torch.full((room,), GUARD_BYTE, dtype=torch.uint8, device=tensor.device)[at_byte:]
    part = whole[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype).view(tensor.shape)
    part.copy_(tensor)
    return part, whole


def wrong_guards(what: str, whole: Tensor) -> Iterator[str]:
    for side, guard in (("before", whole[:GUARD_BYTES]), ("after", whole[-GUARD_BYTES:])):
        if not bool((guard == GUARD_BYTE).all()):
            yield f"it wrote {side} {what}"


def copied_together(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of one device's tensors on the host. One transfer copies all, so that the host waits for a GPU once."""
    all_bytes = [each.detach().contiguous().view(-1).view(torch.uint8) for each in tensors.values()]
    parts = torch.cat(all_bytes).cpu().split([len(each) for each in all_bytes])
    # A part may begin at any byte of the copy, and a view with another dtype may not.
    return {
        name: part.clone().view(each.dtype).view(each.shape)
        for (name, each), part in zip(tensors.items(), parts, strict=True)
    }


def as_integers(tensor: Tensor) -> Tensor:
    """View a tensor as integers, to compare bits: NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.element_size() != other.element_size():
        return False
    both = as_integers(tensor), as_integers(other)
    # Eight bytes are compared at a time if possible.
    in_words = [each.nbytes % 8 == each.storage_offset() * each.element_size() % 8 == 0 for each in both]
    if all(in_words) and all(each.is_contiguous() for each in both):
        both = both[0].view(-1).view(torch.int64), both[1].view(-1).view(torch.int64)
    return tensor.shape == other.shape and torch.equal(*both)
