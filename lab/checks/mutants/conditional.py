"""The right model with another problem, of what the call says too."""

from lab.calls.problem import PagedAttention
from lab.checks.mutants.split_kv import Call, Forgiving


class Conditional(Forgiving, is_model=True):
    """Solves the problem with the values of `instead` where `where` holds: their functions get the problem and the call."""

    def problem(self, call: Call) -> PagedAttention:
        return self.misread(call.problem(), call)
