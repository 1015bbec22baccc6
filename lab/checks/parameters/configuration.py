"""A point of a call's model as a case of the judge."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.checks.parameters.models import MODELS
from lab.checks.parameters.values import DtypePair, HeadDims
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class Configuration:
    """One call, given by its values on the axes of its model. Its `repr` makes it again; default values are left out.

    Raises:
        ValueError: the function's model does not have an axis.
    """

    interface: Interface
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of every axis; default values may be left out
    seed: int = 0

    def __post_init__(self) -> None:
        default, declared = _declared(self.interface)
        if missing := sorted(set(self.values) - set(default)):
            raise ValueError(f"{self.interface.value} has no axis {missing[0]!r}: it has {', '.join(default)}")
        given = {name: _read(value, declared[name]) for name, value in self.values.items()}
        object.__setattr__(self, "values", {**default, **given})

    def __getitem__(self, axis: str) -> Any:
        return self.values[axis]

    def get(self, axis: str, default: Any = None) -> Any:
        """Return the value of an axis, or the default if the function does not have the axis."""
        return self.values.get(axis, default)

    @property
    def non_default(self) -> dict[str, Any]:
        """Return the values that differ from the default point."""
        default, _ = _declared(self.interface)
        return {name: value for name, value in self.values.items() if value != default[name]}

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Configuration({self.interface!r}, {self.non_default!r}{seed})"


@functools.cache
def _declared(interface: Interface) -> tuple[Mapping[str, Any], Mapping[str, Mapping[Any, Any]]]:
    """Return the default point of a function's model in the default ranges, and a map of each axis from its values to
    themselves.
    """
    model = MODELS[interface](Ranges())
    return model.default, {name: {value: value for value in values} for name, values in model.axes.items()}


def _read(value: Any, declared: Mapping[Any, Any]) -> Any:
    """Return the declared value that equals a text. If there is none, convert the text to a value of the same kind."""
    first = next(iter(declared))
    if value in declared or not isinstance(value, str):
        return declared.get(value, value)
    return type(first)(value) if isinstance(first, DtypePair | HeadDims) else value
