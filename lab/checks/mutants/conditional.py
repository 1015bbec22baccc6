"""The right model with another problem where a condition holds, of the call or of its problem."""

from lab.calls.problem import PagedAttention
from lab.checks.mutants.split_kv import Call, Forgiving


class Conditional(Forgiving, is_model=True):
    """Solves the problem with the values of `instead`, whose functions get the problem and the call, where `where` holds."""

    def problem(self, call: Call) -> PagedAttention:
        problem = call.problem()
        return self.misread(problem, call) if self.where(problem, call) else problem

    def where(self, problem: PagedAttention, call: Call) -> bool:
        """Tell whether the defect shows."""
        return True
