"""Draw random points of a model (a value for each parameter), and make a point simpler while its case stays wrong."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lab.checks.parameters.covering import Model, Point
from lab.shrinking import halvings, smallest

CASE_SEEDS = 2**30


@dataclass(frozen=True)
class DrawnPoint:
    """A random point of a model (a value for each parameter of a call), and the function that makes a case of the point."""

    model: Model
    point: Mapping[str, Any]
    seed: int  # the seed of the case
    make: Callable[[Point, int], Any]  # returns the case of a point and a seed

    @property
    def case(self) -> Any:
        return self.make(dict(self.point), self.seed)

    def smaller(self, axis: str) -> Iterator["DrawnPoint"]:
        """Yield points that differ only in the value of `axis`: first its default, then smaller numbers, the smallest first."""
        value, default = self.point[axis], self.model.default[axis]
        if value == default:
            return
        # Of whole numbers; a bool is none.
        sizes = sorted(each for each in self.model.axes[axis] if type(each) is type(value) is int and each < value)
        for each in dict.fromkeys((default, *(sizes[-step] for step in halvings(len(sizes))))):
            point = {**self.point, axis: each}
            if self.model.fits(point):
                yield replace(self, point=point)


def samples(
    model: Model, seed: str, make: Callable[[Point, int], Any], *, fewest: int | None = None
) -> Iterator[DrawnPoint]:
    """Yield random points without end. At least `fewest` axes (None: all) are random; the other axes have their default."""
    rng, names = random.Random(seed), list(model.axes)
    while True:
        point: Point = {}
        for name in rng.sample(names, rng.randint(fewest or len(names), len(names))):
            value = rng.choice(model.axes[name])
            if (name, value) not in model.vacuous and model.fits({**point, name: value}, name):
                point[name] = value
        if (whole := model.completed(point)) is not None:
            yield DrawnPoint(model, whole, rng.randrange(CASE_SEEDS), make)


def shrunk(sample: DrawnPoint, stays_wrong: Callable[[Any], bool]) -> DrawnPoint:
    """Simplify a random point while `stays_wrong` returns True for its case: try defaults, smaller numbers, then seed 0."""
    steps = [partial(DrawnPoint.smaller, axis=axis) for axis in sample.point]
    sample = smallest(sample, steps, lambda each: stays_wrong(each.case))
    plain = replace(sample, seed=0)
    return plain if sample.seed and stays_wrong(plain.case) else sample
