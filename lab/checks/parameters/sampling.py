"""Random points of a model without an end, and a wrong one made small."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lab.checks.parameters.configuration import Configuration
from lab.checks.parameters.coverage import retried
from lab.checks.parameters.targets import TARGETS
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from lab.checks.report import CaseVerdict

SEEDS = 2**30


def random_points(interface: Interface, ranges: Ranges, verdicts: Sequence["CaseVerdict"]) -> Iterator[Configuration]:
    """Yield random points of the values that some case judged, without an end; two axes or more are drawn, as rules allow."""
    if (found := retried(TARGETS[interface].model(ranges), verdicts)) is None:
        return
    taken, _ = found
    rng = random.Random(f"{interface.name} {ranges.seed}")
    names = list(taken.axes)
    while True:
        point: dict[str, Any] = {}
        for name in rng.sample(names, rng.randint(2, len(names))):
            value = rng.choice(taken.axes[name])
            if (name, value) not in taken.vacuous and taken.fits({**point, name: value}, name):
                point[name] = value
        if (whole := taken.completed(point)) is not None:
            yield Configuration(interface, whole, rng.randrange(SEEDS))


def made_small(ranges: Ranges, case: Configuration, stays_wrong: Callable[[Configuration], bool]) -> Configuration:
    """Return a wrong case with as few non_default from the plain point as it stays wrong with, and with smaller sizes."""
    model = TARGETS[case.interface].model(ranges)
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for axis, value in case.values.items():
            plain, values = model.default[axis], model.axes[axis]
            less = sorted(each for each in values if _is_size(value) and _is_size(each) and each < value)
            for each in dict.fromkeys((plain, *less) if value != plain else ()):
                tried = {**case.values, axis: each}
                if model.fits(tried) and stays_wrong(replace(case, values=tried)):
                    case, is_smaller = replace(case, values=tried), True
                    break
    return replace(case, seed=0) if case.seed and stays_wrong(replace(case, seed=0)) else case


def _is_size(value: Any) -> bool:
    return type(value) is int
