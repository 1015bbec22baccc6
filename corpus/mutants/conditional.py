"""The right model with another problem, of what the call says too."""

from corpus.mutants.split_kv import Call, Forgiving
from lab.calls.problem import PagedAttention


class Conditional(Forgiving, is_model=True):
    """Solves the problem with the values of `instead` where `where` holds: their functions get the problem and the call."""

    def problem(self, call: Call) -> PagedAttention:
        return self.misread(call.problem(), call)
