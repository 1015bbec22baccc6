"""Judges: is an implementation right?"""

from lab.checks.forward import ForwardCase
from lab.checks.forward import Inputs
from lab.checks.forward import Outcome
from lab.checks.forward import Verdict
from lab.checks.forward import judge_forward

__all__ = ["ForwardCase", "Inputs", "Outcome", "Verdict", "judge_forward"]
