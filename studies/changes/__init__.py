"""Five changes of SGLang's TRT-LLM attention backends: the claim of each change, and the verdict of recorded studies on it.

All numbers and verdicts are computed from the recordings. The modules here contain only the claims with their sources, the
questions, and the statements that recorded points confirm or contradict.
"""

from studies.changes import pr_24566, pr_25002, pr_25925, pr_26241, pr_26824
from studies.changes.change import Change, Recordings

CHANGES = tuple(module.CHANGE for module in (pr_24566, pr_25002, pr_25925, pr_26241, pr_26824))

__all__ = ["CHANGES", "Change", "Recordings"]
