"""The domain of each function that can be judged, and how one of its combinations is judged."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lab.checks.parameters.covering import Domain
from lab.checks.parameters.lists import judge_lists, lists_domain
from lab.checks.parameters.metadata import judge_metadata
from lab.checks.parameters.metadata_axes import METADATA, metadata_domain
from lab.checks.parameters.paged_axes import paged_domain
from lab.checks.parameters.paged_call import judge_paged
from lab.checks.parameters.ragged import ragged_domain
from lab.checks.parameters.ragged_call import judge_ragged
from lab.checks.space import Space
from lab.checks.trial import Trial
from lab.workloads.interfaces import ATTENTION, Interface


@dataclass(frozen=True)
class Subject:
    """One function's domain.

    Attributes:
        domain: within a space.
        judge: makes the call of the trial's `Combination`, and tells the trial what is wrong.
    """

    domain: Callable[[Space], Domain]
    judge: Callable[[Trial], None]


def _cached(domain: Callable[[Space], Domain], judge: Callable[[Trial], None]) -> Subject:
    return Subject(functools.lru_cache(maxsize=8)(domain), judge)


SUBJECTS: Mapping[Interface, Subject] = MappingProxyType(
    {
        **{each: _cached(functools.partial(paged_domain, each), judge_paged) for each in ATTENTION},
        Interface.RAGGED_CONTEXT: _cached(ragged_domain, judge_ragged),
        Interface.DRAFT_KV_INDICES: _cached(lists_domain, judge_lists),
        **{each: _cached(functools.partial(metadata_domain, each), judge_metadata) for each in METADATA},
    }
)
