"""Map each judged function to the model of its calls: the parameters (axes), their values, and rules between values.

A `Configuration` is one call: a value for each parameter.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Model
from lab.checks.parameters.dsv4 import dsv4_inputs, dsv4_model, set_dsv4_forms
from lab.checks.parameters.metadata_axes import LISTS, METADATA
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.paged_calls import paged_inputs, redrawn_paged, set_paged_forms
from lab.checks.parameters.ragged import ragged_inputs, ragged_model, redrawn_ragged, set_ragged_forms
from lab.checks.parameters.values import Chosen, DtypePair, HeadDims
from lab.ranges import Ranges
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction


@dataclass(frozen=True)
class CallFamily:
    inputs: Callable[..., Any]  # returns the tensors of a configuration, one of `lab.workloads.inputs.call.CallInputs`
    # changes the arguments that no other attention function has, as a configuration says
    set_forms: Callable[[BuiltCall], None]
    redrawn: Callable[..., Any]  # returns the tensors of a case with other lengths and another seed, for a graph replay


FAMILIES: Mapping[AttentionCall, CallFamily] = {
    **dict.fromkeys(PAGED_CALLS, CallFamily(paged_inputs, set_paged_forms, redrawn_paged)),
    AttentionCall.RAGGED_CONTEXT: CallFamily(ragged_inputs, set_ragged_forms, redrawn_ragged),
    AttentionCall.DSV4_DECODE: CallFamily(dsv4_inputs, set_dsv4_forms, dsv4_inputs),
}
_cached = functools.lru_cache(maxsize=8)
MODELS: Mapping[Interface, Callable[[Ranges], Model]] = MappingProxyType(
    {
        **{each: _cached(functools.partial(paged_model, each)) for each in PAGED_CALLS},
        AttentionCall.RAGGED_CONTEXT: _cached(ragged_model),
        AttentionCall.DSV4_DECODE: _cached(dsv4_model),
        MetadataFunction.DRAFT_KV_INDICES: lambda _: LISTS,
        **{each: functools.partial(lambda model, _: model, model) for each, model in METADATA.items()},
    }
)


@dataclass(frozen=True)
class Configuration(Chosen):
    """One call of a function: a value for each parameter (axis) of the function's model. The `repr` leaves out default values.
    Raises ValueError if `values` names an axis that the model does not have.
    """

    def __post_init__(self) -> None:
        default, declared = _declared(self.interface)
        if missing := sorted(self.values.keys() - default.keys()):
            raise ValueError(f"{self.interface.value} has no axis {missing[0]!r}: it has {', '.join(default)}")
        values = dict(default)
        for name, value in self.values.items():
            known = declared[name]
            values[name] = known[value] if value in known else _read(value, known)
        object.__setattr__(self, "values", values)

    @functools.cached_property
    def non_default(self) -> dict[str, Any]:
        default, _ = _declared(self.interface)
        return {name: value for name, value in self.values.items() if value != default[name]}

    @functools.cached_property
    def without_seed(self) -> str:
        return f"Configuration({self.interface!r}, {self.non_default!r})"

    def __repr__(self) -> str:
        return f"{self.without_seed[:-1]}, seed={self.seed})" if self.seed else self.without_seed


@functools.cache
def _declared(interface: Interface) -> tuple[Mapping[str, Any], Mapping[str, Mapping[Any, Any]]]:
    model = MODELS[interface](Ranges())
    return model.default, {name: {value: value for value in values} for name, values in model.axes.items()}


def _read(value: Any, declared: Mapping[Any, Any]) -> Any:
    """Convert a text that is not among the values of an axis (`declared`) to the type of these values."""
    first = next(iter(declared))
    return type(first)(value) if isinstance(value, str) and isinstance(first, DtypePair | HeadDims) else value
