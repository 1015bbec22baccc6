"""Five changes of SGLang's TRT-LLM attention backends: what each claims, and what recorded studies say of it.

Every number and every verdict is computed from the recordings. What is written here is the claim, its source, the question, and
the statements that recorded points confirm or contradict.
"""

from studies.changes import pr_24566, pr_25002, pr_25925, pr_26241, pr_26824
from studies.changes.change import Change, Recordings

CHANGES = tuple(module.CHANGE for module in (pr_24566, pr_25002, pr_25925, pr_26241, pr_26824))

__all__ = ["CHANGES", "Change", "Recordings"]
