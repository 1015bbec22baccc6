"""The model of each judged function: the parameters (axes) of its call, their values and rules. A configuration is one point of
it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Model
from lab.checks.parameters.dsv4 import DSV4_FORMS, dsv4_inputs, dsv4_model
from lab.checks.parameters.lists import LISTS
from lab.checks.parameters.metadata_axes import METADATA
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.paged_calls import PAGED_FORMS, paged_inputs, redrawn_paged
from lab.checks.parameters.ragged import RAGGED_FORMS, ragged_inputs, ragged_model, redrawn_ragged, replayed_cases
from lab.checks.parameters.values import Chosen, DtypePair, HeadDims
from lab.ranges import Ranges
from lab.workloads.inputs.call import BuiltCall
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction


@dataclass(frozen=True)
class CallFamily:
    """What the judge needs of one attention function: a model of its parameters, and functions that build its calls."""

    model: Callable[[Ranges], Model]  # returns the model with the values in the ranges
    inputs: Callable[..., Any]  # returns the tensors of a configuration, one of `lab.workloads.inputs.call.CallInputs`
    forms: tuple[Callable[[BuiltCall], None], ...]  # give this function's own arguments the form of a configuration
    redrawn: Callable[..., Any]  # returns the tensors of a case with other lengths and another seed, for a graph replay
    # Yields the cases of check K9 (graph replays) of the ragged call. The other functions have random cases or configurations.
    replayed_cases: Callable[..., Iterator[Any]] | None = None


_cached = functools.lru_cache(maxsize=8)
FAMILIES: Mapping[AttentionCall, CallFamily] = {
    **{
        each: CallFamily(_cached(functools.partial(paged_model, each)), paged_inputs, PAGED_FORMS, redrawn_paged)
        for each in PAGED_CALLS
    },
    AttentionCall.RAGGED_CONTEXT: CallFamily(
        _cached(ragged_model), ragged_inputs, RAGGED_FORMS, redrawn_ragged, replayed_cases
    ),
    AttentionCall.DSV4_DECODE: CallFamily(_cached(dsv4_model), dsv4_inputs, DSV4_FORMS, dsv4_inputs),
}
FIXED = {MetadataFunction.DRAFT_KV_INDICES: LISTS, **METADATA}  # models that do not depend on ranges
MODELS: Mapping[Interface, Callable[[Ranges], Model]] = MappingProxyType(
    {
        **{each: family.model for each, family in FAMILIES.items()},
        **{each: functools.partial(lambda model, _: model, model) for each, model in FIXED.items()},
    }
)


@dataclass(frozen=True)
class Configuration(Chosen):
    """One call, as a value for each axis (parameter) of the function's model. Its `repr`, without defaults, builds an equal
    one. Raise ValueError if `values` names an axis that the function's model does not have.
    """

    def __post_init__(self) -> None:
        default, declared = _declared(self.interface)
        if missing := sorted(set(self.values) - set(default)):
            raise ValueError(f"{self.interface.value} has no axis {missing[0]!r}: it has {', '.join(default)}")
        given = {name: _read(value, declared[name]) for name, value in self.values.items()}
        object.__setattr__(self, "values", {**default, **given})

    @property
    def non_default(self) -> dict[str, Any]:
        default, _ = _declared(self.interface)
        return {name: value for name, value in self.values.items() if value != default[name]}

    def __repr__(self) -> str:
        seed = f", seed={self.seed}" if self.seed else ""
        return f"Configuration({self.interface!r}, {self.non_default!r}{seed})"


@functools.cache
def _declared(interface: Interface) -> tuple[Mapping[str, Any], Mapping[str, Mapping[Any, Any]]]:
    model = MODELS[interface](Ranges())
    return model.default, {name: {value: value for value in values} for name, values in model.axes.items()}


def _read(value: Any, declared: Mapping[Any, Any]) -> Any:
    first = next(iter(declared))
    if value in declared or not isinstance(value, str):
        return declared.get(value, value)
    return type(first)(value) if isinstance(first, DtypePair | HeadDims) else value
