"""A base for the lab's enums.

A leaf: it needs Python alone.
"""

from enum import Enum


class NamedEnum(Enum):
    """An enum whose repr, such as ``QueryRows.ONE``, can be pasted into a test."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"
