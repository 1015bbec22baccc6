"""Right models of the ragged context call, and of calls that read a tensor once."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from corpus.models.split_kv import Forgiving
from corpus.wrong import RAGGED, Model, Problem
from lab.calls import takes
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.ragged_attention import ragged_attention


class Ragged(Model, interface=(RAGGED,)):
    """FlashInfer's ragged context call; every other method is a stage."""

    def __init__(self) -> None:
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self.launch)

    def launch(self, call: RaggedContextCall) -> Any:
        problem = self.changed(self.posed(call))
        out, lse_log2 = ragged_attention(problem)
        self.finish(problem, out, lse_log2)
        self.finish_call(call, out)
        return problem.returned(out, lse_log2)

    def posed(self, call: RaggedContextCall) -> RaggedAttention:
        """Return the problem that a call poses."""
        return call.problem()

    def changed(self, problem: RaggedAttention) -> RaggedAttention:
        """Return the problem that is solved in place of the call's."""
        return self.misread(problem)

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        """Change the results in place."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        """Change the output in place, by what the call says."""


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
