"""Shared memory of the simulator of Gluon kernels, and what reads it: tiles, barriers, products in flight.

Mbarriers count arrivals, bytes and phases. A product reads shared memory both when it is launched and when it is waited for:
what was overwritten meanwhile differs, which raises.
"""

import types
from typing import Any

import torch


class Barrier:
    """An mbarrier: a phase completes with its arrivals and all bytes that were expected."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.pending = self.bytes = self.phases = 0

    def arrive(self, expected_bytes: int = 0) -> None:
        self.pending -= 1
        self.bytes += expected_bytes
        assert self.pending >= 0, "more arrivals than the barrier counts"
        self._complete()

    def land(self, landed: int) -> None:
        self.bytes -= landed
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases += 1
            self.pending = self.count

    def has_completed(self, parity: Any) -> bool:
        return self.phases & 1 != int(parity)


class Shared:
    """Slots in shared memory: columns of 128 bytes one after the other, as the swizzled layout has them."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        *slots, keys, dims = shape
        self.dtype, self.shape = dtype, shape
        column = min(dims, 128 // dtype.itemsize)
        self._memory = torch.full((*slots, dims // column, keys, column), float("nan")).to(dtype)

    def index(self, slot: Any) -> "Shared":
        view = Shared.__new__(Shared)
        view.dtype, view.shape, view._memory = self.dtype, self.shape[1:], self._memory[int(slot)]
        return view

    def slice(self, begin: int, length: int) -> "Shared":
        view = Shared.__new__(Shared)
        view.dtype, view.shape, view._memory = (
            self.dtype,
            [length, *self.shape[1:]],
            self._memory[:, begin : begin + length],
        )
        return view

    def permute(self, _order: Any) -> "Transposed":
        return Transposed(self)

    def store(self, value: torch.Tensor) -> None:
        keys = self.shape[0]
        columns, _, column = self._memory.shape
        self._memory.copy_(value.reshape(keys, columns, column).permute(1, 0, 2))

    def load(self, _layout: Any) -> torch.Tensor:
        return self._memory.float().permute(1, 0, 2).reshape(self.shape).to(self.dtype)

    def tile(self) -> torch.Tensor:
        return self._memory.float().permute(1, 0, 2).reshape(self.shape)

    def _reinterpret(self, _dtype: Any, shape: list[int], _layout: Any) -> Any:
        boxes = self._memory.view(shape)
        return types.SimpleNamespace(index=lambda box: boxes[int(box)])


class Transposed:
    def __init__(self, slot: Shared) -> None:
        self._slot = slot

    def tile(self) -> torch.Tensor:
        return self._slot.tile().T


class Vectors:
    """Vectors in shared memory, in no layout of products."""

    def __init__(self, dtype: torch.dtype, shape: list[int]) -> None:
        self._memory = torch.full(shape, float("nan"), dtype=dtype)

    def index(self, number: int) -> "Vectors":
        view = Vectors.__new__(Vectors)
        view._memory = self._memory[number]
        return view

    def store(self, value: torch.Tensor) -> None:
        self._memory.copy_(value)

    def load(self, _layout: Any) -> torch.Tensor:
        return self._memory.clone()


class Barriers:
    def __init__(self, count: int, name: str) -> None:
        self._barriers = [Barrier(name) for _ in range(count)]

    def index(self, slot: Any) -> Barrier:
        return self._barriers[int(slot)]


class Product:
    """A product in flight."""

    def __init__(self, a: Any, b: Any, sums: Any) -> None:
        self._a, self._b, self._sums = a, b, sums
        self._launched = self._operands()

    def _operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        a = self._a.tile() if isinstance(self._a, Shared) else self._a.float()
        return a, self._b.tile()

    def result(self) -> torch.Tensor:
        for launched, now in zip(self._launched, self._operands(), strict=True):
            torch.testing.assert_close(
                launched, now, rtol=0, atol=0, equal_nan=True, msg="a slot changed under a product"
            )
        a, b = self._launched
        return (self._sums.result() if isinstance(self._sums, Product) else self._sums) + a @ b
