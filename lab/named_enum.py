"""Define the base classes of the lab's enums. This module imports only the standard library."""

from enum import Enum
from typing import Any


class NamedEnum(Enum):
    """An enum whose repr, such as ``QueryRows.ONE``, can be pasted into a test."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class TextEnum(str, Enum):
    """An enum whose members are strings. Values after the string in a member's declaration are passed to `__init__`."""

    def __new__(cls, text: str, *_: Any) -> "TextEnum":
        member = str.__new__(cls, text)
        member._value_ = text
        return member

    __str__ = str.__str__
    __repr__ = str.__repr__
    __hash__ = str.__hash__
