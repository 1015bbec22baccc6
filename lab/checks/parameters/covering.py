"""Build covering arrays: few points that together contain all values, all pairs of values, and declared triples.

An axis is a parameter of a call. A point has one value for each axis. A goal is a value, a pair or a triple of values that at
least one point must contain.
"""

import functools
import inspect
import itertools
import math
import operator
import random
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Point = dict[str, Any]  # from the name of each axis to its value
Values = tuple[tuple[str, Any], ...]  # a combination of values: (axis, value) pairs, in the order of the model's axes
Group = frozenset[tuple[str, Any]]  # (axis, value) pairs


@dataclass(frozen=True)
class Shard:
    """One part of a run that several machines share, such as part 3 of 8."""

    number: int = 1  # from 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Return the shard that a text such as "3/8" names; for "", the whole run. Raise ValueError for another text."""
        found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text or "1/1")
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ValueError(f"{text!r} is not a shard: give its number and the number of shards, such as 3/8")
        return cls(int(found[1]), int(found[2]))

    def has(self, goal: Values) -> bool:
        """Return True if this part of the run must judge a combination of values. Each combination belongs to one part."""
        return self.count == 1 or zlib.crc32(repr(goal).encode()) % self.count == self.number - 1

    def part(self, items: Iterable[Any], first: int = 0) -> Iterator[Any]:
        return itertools.islice(items, (self.number - 1 - first) % self.count, None, self.count)


@dataclass(frozen=True)
class Constraint:
    """A condition that the values of some parameters (axes) of a call must fulfil, and the reason for it."""

    fits: Callable[..., bool]  # the condition; the names of its parameters are the names of the axes
    why: str  # the reason, a sentence

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.fits).parameters)

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        return frozenset(self.axes)


def constraints(reasons: Mapping[str, Callable[..., bool] | Sequence[Callable[..., bool]]]) -> tuple[Constraint, ...]:
    return tuple(
        Constraint(fits, why)
        for why, each in reasons.items()
        for fits in (each if isinstance(each, Sequence) else (each,))
    )


@dataclass(frozen=True)
class Model:
    """The parameters (axes) of a call with their values, and rules that forbid combinations of values.

    Raises ValueError if an axis has no values, if a rule or `triples` names an unknown axis, or if the rules forbid all points
    (combinations of one value for each axis).
    """

    axes: Mapping[str, Sequence[Any]]  # the values of each axis, the default first
    rules: tuple[Constraint, ...] = ()
    triples: tuple[tuple[str, str, str], ...] = ()  # three axes whose values are covered in triples, not only in pairs
    # With such a value a call computes nothing, and a point covers only the combinations with the value.
    vacuous: Group = frozenset()
    # Values that kernels decline or compute by separate code, such as an NVFP4 cache. A point with one covers only combinations
    # with a value of the same group. A group is ignored if it has all values of an axis.
    apart: tuple[Group, ...] = ()
    shard: Shard = Shard()  # only its values, pairs and triples must be covered
    default: Point = field(init=False)  # the default value of each axis where the rules permit it

    def __post_init__(self) -> None:
        if empty := [name for name, values in self.axes.items() if not values]:
            raise ValueError(f"axis {empty[0]!r} has no value")
        named = {name for names in (*self.triples, *(rule.axes for rule in self.rules)) for name in names}
        if missing := sorted(named - set(self.axes)):
            raise ValueError(f"there is no axis {missing[0]!r}: there are {', '.join(self.axes)}")
        default = self.completed({})
        if default is None:
            raise ValueError("no point of these axes fits all rules")
        object.__setattr__(self, "default", default)

    @classmethod
    def of(
        cls,
        axes: Mapping[str, Iterable[Any]],
        rules: Iterable[Constraint],
        triples: Iterable[tuple[str, str, str]],
        vacuous: Group = frozenset(),
        apart: tuple[Group, ...] = (),
    ) -> "Model":
        """Make a model without duplicate values of an axis, and without rules and triples that name an axis not in `axes`. All
        arguments are fields of the model.
        """
        return cls(
            {name: tuple(dict.fromkeys(values)) for name, values in axes.items()},
            tuple(rule for rule in rules if set(rule.axes) <= set(axes)),
            tuple(triple for triple in triples if set(triple) <= set(axes)),
            vacuous,
            apart,
        )

    def only(self, taken: Collection[Values]) -> "Model | None":
        """Return the model with only the values in `taken`; None if an axis would have no value."""
        left = {name: tuple(each for each in values if ((name, each),) in taken) for name, values in self.axes.items()}
        return replace(self, axes=left) if all(left.values()) else None

    def fits(self, point: Mapping[str, Any], added: str = "") -> bool:
        """Return True if the values in `point` break no rule. A rule about an axis that `point` lacks is not tested. If `added`
        names an axis, only the rules about this axis are tested.
        """
        return next(self._broken(point, self._rules_of[added] if added else self.rules), None) is None

    def _broken(self, point: Mapping[str, Any], rules: Iterable[Constraint]) -> Iterator[Constraint]:
        has = point.keys()
        for rule in rules:
            if has >= rule.needs and not rule.fits(*[point[name] for name in rule.axes]):
                yield rule

    def _fitting(self, name: str, point: Point) -> list[Any]:
        has, own = {*point, name}, dict(point)
        rules = [rule for rule in self._rules_of[name] if has >= rule.needs]

        def fits(value: Any) -> bool:
            own[name] = value
            return next(self._broken(own, rules), None) is None

        return [*filter(fits, self.axes[name])] if rules else [*self.axes[name]]

    @functools.cached_property
    def _rules_of(self) -> Mapping[str, tuple[Constraint, ...]]:
        return {name: tuple(rule for rule in self.rules if name in rule.axes) for name in self.axes}

    @functools.cached_property
    def _neighbours(self) -> Mapping[str, tuple[str, ...]]:
        return {
            name: tuple(dict.fromkeys(other for rule in rules for other in rule.axes if other != name))
            for name, rules in self._rules_of.items()
        }

    @functools.cached_property
    def _largest_triples(self) -> Mapping[str, int]:
        sizes = {triple: math.prod(len(self.axes[name]) for name in triple) for triple in self.triples}
        return {name: max((sizes[each] for each in sizes if name in each), default=0) for name in self.axes}

    def completed(self, values: Mapping[str, Any]) -> Point | None:
        """Return a point (one value for each axis) that contains `values`; None if the rules forbid all such points. The other
        axes have their default values if the rules permit them.
        """
        if not self.fits(values):
            return None
        point = dict(values)
        if self._complete(point, self._nearest_first(values)) is not None:
            return None
        return {name: point[name] for name in self.axes}

    def _nearest_first(self, names: Iterable[str]) -> list[str]:
        # Axes that share a rule come first, so that a search finds conflicts early.
        reached = list(names)
        found = set(reached)
        for name in reached:
            near = [other for other in self._neighbours[name] if other not in found]
            found.update(near)
            reached += near
        return [name for name in (*reached, *self.axes) if name not in names]

    def _complete(self, point: Point, names: Sequence[str]) -> set[str] | None:
        # Add values for the axes `names`, and return None; or return the axes that conflict if no values break no rule. The
        # search backjumps: if an axis is not among the conflicting ones, its other values are not tried.
        if not names:
            return None
        name, *others = names
        in_the_way: set[str] = set()
        for value in self.axes[name]:
            point[name] = value
            broken = next(self._broken(point, self._rules_of[name]), None)
            found = set(broken.axes) if broken else self._complete(point, others)
            if found is None:
                return None
            if name not in found:
                in_the_way = found
                break
            in_the_way |= found
        del point[name]
        return in_the_way - {name}

    def alone(self, of_all: Collection[str] = ()) -> Iterator[Point]:
        """Yield the default point (one value for each axis). Then yield for each other value a point with this value and, where
        the rules permit, default values. Skip values that another part of the run judges, except those of the axes in `of_all`.
        """
        yield self.default
        for name, values in self.axes.items():
            for value in values:
                is_goal = name in of_all or self.shard.has(((name, value),))
                if value != self.default[name] and is_goal and (point := self.nearest[name, value]) is not None:
                    yield point

    def values(self) -> Iterator[Values]:
        return (((name, value),) for name, values in self.axes.items() for value in values)

    def tuples(self, met: Collection[Values] = ()) -> Iterator[Values]:
        """Yield the pairs and declared triples of values that this part of the run must cover, without those in `met`."""
        left = (goal for goal in self._goals() if goal not in met)
        return (goal for goal in left if self.shard.has(goal) and self.fits(dict(goal)))

    def _goals(self) -> Iterator[Values]:
        for names in (*itertools.combinations(self.axes, 2), *self.triples):
            for values in itertools.product(*(self.axes[name] for name in names)):
                yield tuple(zip(names, values, strict=True))

    @functools.cached_property
    def why_not(self) -> Mapping[Values, str]:
        """Map each pair and each declared triple of values to the reason why the rules forbid it; to "" if they allow it."""
        without_one = [
            (rule, replace(self, rules=tuple(each for each in self.rules if each is not rule))) for rule in self.rules
        ]

        def reason(values: Point) -> str:
            near = (self.default, *filter(None, map(self.nearest.get, values.items())))  # where most values fit
            is_near = any(all(self.fits(point | values, name) for name in values) for point in near)
            if is_near or self.completed(values) is not None:
                return ""
            direct = self._broken(values, self.rules)
            alone = (rule for rule, others in without_one if others.completed(values) is not None)
            return next((rule.why for rule in itertools.chain(direct, alone)), "several rules forbid it")

        return {goal: reason(dict(goal)) for goal in self._goals()}

    @functools.cached_property
    def nearest(self) -> Mapping[tuple[str, Any], Point | None]:
        """Map each (axis, value) pair to a point with this value, and defaults if possible; None if rules forbid the value."""
        return {each: self.completed(dict([each])) for (each,) in self.values()}

    def tuples_of(self, point: Point, apart: Iterable[Group] | None = None) -> Iterator[Values]:
        """Yield the values, pairs and declared triples of values of a point that its call tests. Usually these are all. But a
        call with a value in `vacuous` computes nothing, and for a value of a group in `apart` (None: the model's groups), such
        as an NVFP4 cache, kernels run separate code. If the point has values of such groups, only combinations that contain a
        value of each of these groups are tested.
        """
        values = {name: (name, point[name]) for name in self.axes}
        has = {*point.items()}
        groups = (self.vacuous, *(self._apart if apart is None else apart))
        present = [names for group in groups if (names := frozenset(name for name, _ in group & has))]
        singles = ((each,) for name, each in values.items() if all(name in names for names in present))
        return itertools.chain(singles, (chosen(values) for chosen in self._choosers(frozenset(present))))

    @functools.cached_property
    def _choosers(self) -> Callable[[frozenset[frozenset[str]]], list[Callable[[Mapping[str, Any]], Values]]]:
        # From sets of axes: getters that read from a point each pair or declared triple with an axis of every set.
        several = (*itertools.combinations(self.axes, 2), *self.triples)

        @functools.cache
        def choosers(present: frozenset[frozenset[str]]) -> list[Callable[[Mapping[str, Any]], Values]]:
            return [operator.itemgetter(*each) for each in several if not any(map(frozenset(each).isdisjoint, present))]

        return choosers

    def apart_from(self, values: Collection[tuple[str, Any]]) -> tuple[Group, ...]:
        # A group counts if `values` also has values of its axes outside the group.
        return tuple(
            group for group in self.apart if {name for name, _ in group} <= {name for name, _ in set(values) - group}
        )

    @functools.cached_property
    def _apart(self) -> tuple[Group, ...]:
        return self.apart_from({value for (value,) in self.values()})

    def covering(
        self, seed: int = 0, goals: Iterable[Values] | None = None, chosen: int | None = None
    ) -> Iterator[Point]:
        """Yield points that together contain all combinations of values in `goals` (None: all pairs and declared triples) that
        the rules permit. At most `chosen` axes of a point have a value that is not their default (None: any number of axes).
        """
        # Each point is built greedily around a goal that no earlier point contains, triples first, as their points contain most
        # pairs.
        rng = random.Random(seed)
        left = _Left(self.tuples() if goals is None else goals)
        order = list(left.goals)
        rng.shuffle(order)
        order.sort(key=len, reverse=True)
        for goal in order:
            if goal not in left.goals:
                continue
            point = self._around(goal, left, rng, chosen)
            left.remove(goal)
            if point is not None:
                for each in self.tuples_of(point):
                    left.remove(each)
                yield point

    def _around(self, goal: Values, left: "_Left", rng: random.Random, chosen: int | None) -> Point | None:
        whole = self.completed(dict(goal))
        if whole is None:
            return None
        point = {name: values[0] for name, values in self.axes.items() if len(values) == 1} | dict(goal)
        groups = [group for group in (self.vacuous, *self._apart) if not group.isdisjoint(goal)]
        others = self.vacuous.union(*(group for group in self._apart if group.isdisjoint(goal)))
        names = [name for name in self.axes if name not in point]
        rng.shuffle(names)
        # Axes of the largest triples get their values first, while the other axes of these triples are free.
        names.sort(key=self._largest_triples.__getitem__, reverse=True)
        most = len(names) if chosen is None else chosen - len(goal)
        for name in names:
            if most <= 0:
                break
            values = [value for value in self._fitting(name, point) if (name, value) not in others]
            rng.shuffle(values)
            if not values:
                return whole
            gains = [left.gain(name, value, point, groups) for value in values]
            if chosen is None or any(gains):
                point[name] = values[gains.index(max(gains))]
                most -= 1
        return self.completed(point) or whole


class _Left:
    def __init__(self, goals: Iterable[Values]) -> None:
        self.goals = dict.fromkeys(goals)
        # From an (axis, value) pair to the goals that contain it, by the remaining pairs of the goal: one pair, or several.
        self._by_pair: dict[tuple[str, Any], dict[Any, Values]] = {}
        self._by_others: dict[tuple[str, Any], dict[Any, Values]] = {}
        for goal in self.goals:
            for index, each, others in self._places(goal):
                index.setdefault(each, {})[others] = goal

    def remove(self, goal: Values) -> None:
        if goal in self.goals:
            del self.goals[goal]
            for index, each, others in self._places(goal):
                del index[each][others]

    def _places(self, goal: Values) -> Iterator[tuple[dict[Any, dict[Any, Values]], Any, Any]]:
        for each in goal:
            others = tuple(other for other in goal if other != each)
            yield (self._by_pair, each, others[0]) if len(others) == 1 else (self._by_others, each, others)

    def gain(self, axis: str, value: Any, point: Point, groups: Sequence[Group]) -> int:
        has = point.items()
        pairs = self._by_pair.get((axis, value), {})
        found = [pairs[each] for each in has if each in pairs] if pairs else []
        larger = self._by_others.get((axis, value), {})
        found += [goal for others, goal in larger.items() if all(each in has for each in others)]
        return sum(not any(group.isdisjoint(goal) for group in groups) for goal in found) if groups else len(found)
