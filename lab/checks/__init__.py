"""Judges: is an implementation right?"""

from lab.checks.forward import Outcome, Verdict, judge_forward
from lab.workloads.forward_case import ForwardCase, Inputs

__all__ = ["ForwardCase", "Inputs", "Outcome", "Verdict", "judge_forward"]
