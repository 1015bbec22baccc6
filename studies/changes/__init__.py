"""Compare the claims of five changes (pull requests) of SGLang's TRT-LLM attention backends with recorded measurements."""

from studies.changes import pr_24566, pr_25002, pr_25925, pr_26241, pr_26824
from studies.changes.change import Change, Recordings

CHANGES = tuple(module.CHANGE for module in (pr_24566, pr_25002, pr_25925, pr_26241, pr_26824))

__all__ = ["CHANGES", "Change", "Recordings"]
