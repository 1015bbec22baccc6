"""The model (parameters with their values, and rules between them) of each function that can be judged, limited to ranges."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from lab.calls.problem import AttentionCall
from lab.checks.parameters.covering import Model
from lab.checks.parameters.lists import LISTS
from lab.checks.parameters.metadata_axes import METADATA
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.ragged import ragged_model
from lab.ranges import Ranges
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction


def _whole(model: Model) -> Callable[[Ranges], Model]:
    """Return a function that takes any ranges and returns this model unchanged."""
    return lambda _: model


_cached = functools.lru_cache(maxsize=8)
MODELS: Mapping[Interface, Callable[[Ranges], Model]] = MappingProxyType(
    {
        **{each: _cached(functools.partial(paged_model, each)) for each in PAGED_CALLS},
        AttentionCall.RAGGED_CONTEXT: _cached(ragged_model),
        MetadataFunction.DRAFT_KV_INDICES: _whole(LISTS),
        **{each: _whole(model) for each, model in METADATA.items()},
    }
)
