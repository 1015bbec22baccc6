"""The model of each function that can be judged, within ranges."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from lab.checks.parameters.covering import Model
from lab.checks.parameters.lists import lists_model
from lab.checks.parameters.metadata_axes import METADATA, metadata_model
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.ragged import ragged_model
from lab.ranges import Ranges
from lab.workloads.interfaces import ATTENTION, Interface

_cached = functools.lru_cache(maxsize=8)
MODELS: Mapping[Interface, Callable[[Ranges], Model]] = MappingProxyType(
    {
        **{each: _cached(functools.partial(paged_model, each)) for each in ATTENTION},
        Interface.RAGGED_CONTEXT: _cached(ragged_model),
        Interface.DRAFT_KV_INDICES: _cached(lists_model),
        **{each: _cached(functools.partial(metadata_model, each)) for each in METADATA},
    }
)
