"""Expected results that are computed only when they are compared and never stored, so that no kernel can find them."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from lab.integrity import ChangedBindingsError, in_words
from lab.references import softmax_attention
from lab.references.errors import Truth
from lab.references.selected_truth import truth_of_heads, truth_of_selected
from lab.references.softmax_attention import Rules


class LateTruth:
    """The expected results of a call, with the attributes of a `Truth`. Each use of an attribute computes the results again.

    Args:
        make: computes the results.
        made_from: the tensors from which `make` computes the results. They must not change.
    """

    def __init__(self, make: Callable[[], Truth], made_from: list[Tensor]) -> None:
        self._make, self._made_from, self._sums = make, made_from, _sums(made_from)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    def made(self) -> Truth:
        """Compute the expected results, and return them as a `Truth`.

        Raises:
            ChangedBindingsError: one of the tensors was written to.
        """
        if _sums(self._made_from) != self._sums:
            raise ChangedBindingsError(in_words(["the tensors that the expected result is made from"]))
        return self._make()


def made(truth: Truth) -> Truth:
    """Return expected results for several uses: a `LateTruth` is computed once, now; a `Truth` is returned unchanged."""
    return truth.made() if isinstance(truth, LateTruth) else truth


def truth_of_requests(
    query: Tensor,
    histories: list[tuple[Tensor, Tensor]],
    q_lens: list[int],
    rules: Rules,
    selected: Sequence[Tensor] | None = None,
    seen: Sequence[Tensor] | None = None,
) -> Truth:
    """Return a `LateTruth`: each use computes `lab.references.softmax_attention.truth_of_requests` of these arguments, or of
    `lab.references.selected_truth`, `truth_of_selected` if rows select keys (`selected`), and `truth_of_heads` if K/V heads do
    (`seen`).
    """
    own = query.clone()  # the kernel gets the original

    def make() -> Truth:
        if seen is not None:
            return truth_of_heads(own, histories, seen, q_lens, rules)
        if selected is not None:
            return truth_of_selected(own, histories, selected, rules)
        return softmax_attention.truth_of_requests(own, histories, q_lens, rules)

    made_from = [own, *(side for each in histories for side in each), *(selected or ()), *(seen or ())]
    return cast(Truth, LateTruth(make, made_from))


def _sums(tensors: list[Tensor]) -> list[int]:
    sums = [each.contiguous().view(torch.uint8).sum(dtype=torch.int64) for each in tensors if each.numel()]
    return torch.stack(sums).tolist() if sums else []
