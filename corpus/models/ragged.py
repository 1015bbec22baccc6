"""The ragged context call by the reference: right, with the problem and the results in the hands of a wrong kernel."""

from typing import Any

from torch import Tensor

from corpus.wrong import RAGGED, Model
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
