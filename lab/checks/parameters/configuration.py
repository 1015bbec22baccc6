"""A case of the judge that consists of a value for each parameter (axis) of a function's model."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.checks.parameters.models import MODELS
from lab.checks.parameters.values import Chosen, DtypePair, HeadDims
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface


@dataclass(frozen=True)
class Configuration(Chosen):
    """One call as a value for each axis (parameter) of its function's model. Its `repr` is an expression that builds it again,
    and leaves out defaults.

    Raises:
        ValueError: `values` names an axis that the function's model does not have.
    """

    def __post_init__(self) -> None:
        default, declared = _declared(self.interface)
        if missing := sorted(set(self.values) - set(default)):
            raise ValueError(f"{self.interface.value} has no axis {missing[0]!r}: it has {', '.join(default)}")
        given = {name: _read(value, declared[name]) for name, value in self.values.items()}
        object.__setattr__(self, "values", {**default, **given})

    @property
    def non_default(self) -> dict[str, Any]:
        """Return the values that are not the defaults, by the names of their axes."""
        default, _ = _declared(self.interface)
        return {name: value for name, value in self.values.items() if value != default[name]}

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Configuration({self.interface!r}, {self.non_default!r}{seed})"


@functools.cache
def _declared(interface: Interface) -> tuple[Mapping[str, Any], Mapping[str, Mapping[Any, Any]]]:
    """Return two mappings by axis, for a function's model in the default ranges: the default value, and all values.

    The second maps each value to itself, so that a text finds the value that equals it.
    """
    model = MODELS[interface](Ranges())
    return model.default, {name: {value: value for value in values} for name, values in model.axes.items()}


def _read(value: Any, declared: Mapping[Any, Any]) -> Any:
    """Return the declared value that equals a text. If there is none, convert the text to a value of the same kind."""
    first = next(iter(declared))
    if value in declared or not isinstance(value, str):
        return declared.get(value, value)
    return type(first)(value) if isinstance(first, DtypePair | HeadDims) else value
