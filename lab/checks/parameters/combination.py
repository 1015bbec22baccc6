"""A point of a call's domain as a case of the judge."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class Combination:
    """One call by its values on the axes of its domain; its `repr` makes it again, values of the plain point left out.

    Attributes:
        interface: the function.
        values: of every axis, by its name; those that are not given are those of the plain point of all axes.
        seed: of everything drawn.

    Raises:
        ValueError: an axis that the function's domain does not have.
    """

    interface: Interface
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    seed: int = 0

    def __post_init__(self) -> None:
        plain = plain_of(self.interface)
        if missing := sorted(set(self.values) - set(plain)):
            raise ValueError(f"{self.interface.value} has no axis {missing[0]!r}: it has {', '.join(plain)}")
        object.__setattr__(self, "values", {**plain, **self.values})

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        """Return the value of an axis that not all functions have."""
        return self.values.get(axis, default)

    @property
    def departures(self) -> dict[str, Any]:
        """Return the values that are not those of the plain point of all axes."""
        plain = plain_of(self.interface)
        return {name: value for name, value in self.values.items() if value != plain[name]}

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Combination({self.interface!r}, {self.departures!r}{seed})"


@functools.cache
def plain_of(interface: Interface) -> Mapping[str, Any]:
    """Return the plain point of a function's domain when no axis is narrowed."""
    from lab.checks.parameters.subjects import SUBJECTS
    from lab.checks.space import Space

    return SUBJECTS[interface].domain(Space()).plain
