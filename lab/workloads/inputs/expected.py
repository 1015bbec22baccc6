"""Expected results that are computed at their first use and stored as bytes, so that no kernel can find them as a tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lab.integrity import ChangedBindingsError, in_words
from lab.references import truth
from lab.references.errors import Truth
from lab.references.softmax_attention import Rules
from lab.references.truth import truth_of_heads, truth_of_selected
from lab.workloads.inputs.guards import copied_together

# Expected outputs with more elements are not stored but computed at each use.
MOST_KEPT_ELEMENTS = 2**20
SMALL_BYTES = 2**20  # the checksum of smaller tensors is computed in one sum


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as bytes. Code that searches memory for tensors does not find it, and unpickling it runs no foreign code."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> "SavedTensor":
        elements = tensor.detach().cpu().contiguous().view(-1)
        return cls(tensor.dtype, tuple(tensor.shape), elements.view(torch.uint8).numpy().tobytes())

    def tensor(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the tensor. Raise RuntimeError if `data` has not the size of `shape`. A kernel that makes a `SavedTensor` with
        too little data could otherwise read memory that is not initialised, in which expected results may remain.
        """
        nothing = torch.empty(0, dtype=self.dtype)  # `frombuffer` takes no empty buffer
        elements = torch.frombuffer(bytearray(self.data), dtype=self.dtype) if self.data else nothing
        return elements.view(self.shape).to(device)


class LateTruth:
    """Expected results that the function `make` computes when an attribute is first read, and that are then kept as bytes."""

    def __init__(self, make: Callable[[], Truth], made_from: list[Tensor]) -> None:
        self._make, self._made_from, self._sums = make, made_from, _sums(made_from)
        self._kept: dict[str, Any] | None = None  # the fields of the `Truth`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    def made(self) -> Truth:
        """Return the expected results. Raise ChangedBindingsError if a tensor from which they are computed has changed."""
        if _sums(self._made_from) != self._sums:
            raise ChangedBindingsError(in_words(["the tensors that the expected result is made from"]))
        if self._kept is not None:
            device, fields = self._made_from[0].device, dict(self._kept)
            saved = {name: each for name, each in fields.items() if isinstance(each, SavedTensor)}
            return Truth(**fields | {name: each.tensor(device) for name, each in saved.items()})
        truth = self._make()
        if truth.expected.numel() <= MOST_KEPT_ELEMENTS:
            tensors = {name: value for name, value in vars(truth).items() if isinstance(value, Tensor)}
            copies = copied_together(tensors) if truth.expected.is_cuda else tensors
            self._kept = vars(truth) | {name: SavedTensor.of(value) for name, value in copies.items()}
        return truth


def made(truth: Truth) -> Truth:
    return truth.made() if isinstance(truth, LateTruth) else truth


def truth_of_requests(
    query: Tensor,
    histories: list[tuple[Tensor, Tensor]],
    q_lens: list[int],
    rules: Rules,
    selected: Sequence[Tensor] | None = None,
    seen: Sequence[Tensor] | None = None,
) -> Truth:
    """Return expected results, which are computed when they are first read. `seen` has for each request the keys that K/V heads
    see, bool [kv_len, num_kv_heads]. `selected` has for each request the keys that rows select, [q_len, top_k], -1 for none.
    """
    own = query.clone()  # the kernel gets the original

    def make() -> Truth:
        if seen is not None:
            return truth_of_heads(own, histories, seen, q_lens, rules)
        if selected is not None:
            return truth_of_selected(own, histories, selected, rules)
        return truth.truth_of_requests(own, histories, q_lens, rules)

    made_from = [own, *(side for each in histories for side in each), *(selected or ()), *(seen or ())]
    return cast(Truth, LateTruth(make, made_from))


def _sums(tensors: list[Tensor]) -> list[int]:
    all_bytes = [each.contiguous().view(-1).view(torch.uint8) for each in tensors if each.numel()]
    parts = [each for each in all_bytes if len(each) > SMALL_BYTES]
    if small := [each for each in all_bytes if len(each) <= SMALL_BYTES]:  # may be thousands in a batch
        parts.append(torch.cat(small))
    in_words = (len(each) % 8 == 0 and each.storage_offset() % 8 == 0 for each in parts)
    integers = [each.view(torch.int64) if words else each for each, words in zip(parts, in_words, strict=True)]
    return torch.stack([each.sum(dtype=torch.int64) for each in integers]).tolist() if parts else []
