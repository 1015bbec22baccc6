"""Right models of the ragged context call and of DeepSeek-V4's call, and of kernels that read a tensor only once."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from corpus.models.split_kv import Forgiving
from corpus.wrong import DSV4, RAGGED, Model, Problem
from lab.calls import DSV4DecodeCall, takes
from lab.calls.dsv4_decode import TwoPools
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.references.paged_attention import paged_attention
from lab.references.ragged_attention import ragged_attention


class Ragged(Model, interface=(RAGGED,)):
    """A right model of FlashInfer's ragged context call. Every method except `launch` is a stage."""

    def __init__(self) -> None:
        self.trtllm_ragged_attention_deepseek = takes(RaggedContextCall)(self.launch)

    def launch(self, call: RaggedContextCall) -> Any:
        problem = self.applied(self.posed(call))
        out, lse_log2 = ragged_attention(problem)
        self.finish(problem, out, lse_log2)
        self.finish_call(call, out)
        return problem.returned(out, lse_log2)

    def posed(self, call: RaggedContextCall) -> RaggedAttention:
        return call.problem()

    def finish(self, problem: RaggedAttention, out: Tensor, lse_log2: Tensor | None) -> None:
        """A wrong kernel may change the results in place here."""

    def finish_call(self, call: RaggedContextCall, out: Tensor) -> None:
        """A wrong kernel may change the output in place here, depending on the call's arguments."""


class DSV4Decode(Model, interface=(DSV4,)):
    """A right model of FlashInfer's sparse MLA call of DeepSeek-V4."""

    def __init__(self) -> None:
        self.trtllm_batch_decode_sparse_mla_dsv4 = takes(DSV4DecodeCall)(self.launch)

    def launch(self, call: DSV4DecodeCall) -> Any:
        problem = self.applied(call.problem(), call)
        out, _ = paged_attention(problem)
        self.finish(problem, out)
        return call.returned(out)

    def finish(self, problem: TwoPools, out: Tensor) -> None:
        """A wrong kernel may change the rows of the output in place here."""


class ReadOnce(Model):
    """A defect: tensors of a problem are copied when their addresses are first seen, and later calls use the copies.

    Attributes:
        fields: names of the problem's fields that are copied.
    """

    fields: tuple[str, ...] = ()

    def changed(self, problem: Problem, *_: Any) -> Problem:
        return replace(problem, **{name: self._kept(problem, getattr(problem, name)) for name in self.fields})

    def _kept(self, problem: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self.first((value.data_ptr(), value.shape, self.also_by(problem)), value.clone)

    def also_by(self, problem: Any) -> Any:
        """Return facts that must be equal, besides address and shape, for a copy to be used again."""


class PagedReadOnce(ReadOnce, Forgiving):
    """The defect `ReadOnce` in paged calls."""


class RaggedReadOnce(ReadOnce, Ragged):
    """The defect `ReadOnce` in ragged calls."""
