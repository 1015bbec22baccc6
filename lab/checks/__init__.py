"""Judges: is an implementation right?"""

from lab.checks.forward import ForwardCase, Inputs, Outcome, Verdict, judge_forward

__all__ = ["ForwardCase", "Inputs", "Outcome", "Verdict", "judge_forward"]
