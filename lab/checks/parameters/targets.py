"""The model of each function that can be judged, and how one of its combinations is judged."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lab.checks.case_run import CaseRun
from lab.checks.parameters.covering import Model
from lab.checks.parameters.lists import judge_lists, lists_model
from lab.checks.parameters.metadata import judge_metadata
from lab.checks.parameters.metadata_axes import METADATA, metadata_model
from lab.checks.parameters.paged_axes import paged_model
from lab.checks.parameters.paged_call import judge_paged
from lab.checks.parameters.ragged import ragged_model
from lab.checks.parameters.ragged_call import judge_ragged
from lab.ranges import Ranges
from lab.workloads.interfaces import ATTENTION, Interface


@dataclass(frozen=True)
class Target:
    """One function's model.

    Attributes:
        model: within ranges.
        judge: makes the call of the run's `Configuration`, and tells the run what is wrong.
    """

    model: Callable[[Ranges], Model]
    judge: Callable[[CaseRun], None]


def _cached(model: Callable[[Ranges], Model], judge: Callable[[CaseRun], None]) -> Target:
    return Target(functools.lru_cache(maxsize=8)(model), judge)


TARGETS: Mapping[Interface, Target] = MappingProxyType(
    {
        **{each: _cached(functools.partial(paged_model, each), judge_paged) for each in ATTENTION},
        Interface.RAGGED_CONTEXT: _cached(ragged_model, judge_ragged),
        Interface.DRAFT_KV_INDICES: _cached(lists_model, judge_lists),
        **{each: _cached(functools.partial(metadata_model, each), judge_metadata) for each in METADATA},
    }
)
