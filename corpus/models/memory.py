"""What a wrong kernel remembers of the tensors of earlier calls."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from corpus.models.ragged import Ragged
from corpus.models.split_kv import Forgiving
from corpus.wrong import Model, Problem


class ReadOnce(Model):
    """A part that copies tensors of a problem when their addresses are first seen: the copies serve later calls.

    Attributes:
        fields: of the problem, whose tensors are copied.
    """

    fields: tuple[str, ...] = ()

    def changed(self, problem: Problem) -> Problem:
        """Return the problem with the copies."""
        return replace(problem, **{name: self._kept(problem, getattr(problem, name)) for name in self.fields})

    def _kept(self, problem: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.first((value.data_ptr(), value.shape, self.also_by(problem)), value.clone)

    def also_by(self, problem: Any) -> Any:
        """Return what else must be as it was for a copy to serve."""


class PagedReadOnce(ReadOnce, Forgiving):
    """Paged calls."""


class RaggedReadOnce(ReadOnce, Ragged):
    """Ragged calls."""
