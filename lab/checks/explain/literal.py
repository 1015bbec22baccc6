"""Literals, which are tests of features (named properties), and the list of all literals that failure rules may use."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.checks.explain.feature import OPERATORS, RELATIONS, Bits, Features, Number, Value
from lab.checks.explain.features import FEATURES, feature_named

FEATURE_BITS = 6.0  # cost of naming a feature


@dataclass(frozen=True)
class Literal:
    """A test of one feature, such as `q_len >= 2`: the feature's name, a key of `OPERATORS`, and a value."""

    feature: str
    operator: str
    value: Value = True

    def __str__(self) -> str:
        if self.operator in ("is", "is not"):
            return self.feature if self.operator == "is" else f"not {self.feature}"
        value = repr(self.value) if self.other is None else self.value
        return RELATIONS.get(self.operator, (f"{{}} {self.operator} {{}}",))[0].format(self.feature, value)

    @property
    def other(self) -> Number | None:
        """Return the number with which the feature is compared, or None if it is compared with a value."""
        feature = feature_named(self.feature)
        other = feature_named(self.value) if isinstance(feature, Number) and isinstance(self.value, str) else None
        return other if isinstance(other, Number) else None

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of the features that the test reads."""
        return (self.feature,) if self.other is None else (self.feature, str(self.value))

    @property
    def phrase(self) -> str:
        value = self.value if self.other is None else self.other.noun
        return feature_named(self.feature).phrase(self.operator, value)

    def holds(self, units: Sequence[Features]) -> Bits:
        """Return for which units (requests or results) the test is true, bool [units]. `units` has their features."""
        value = self.value if self.other is None else _column(str(self.value), units)
        return OPERATORS[self.operator](_column(self.feature, units), value)


def _column(name: str, units: Sequence[Features]) -> Bits:
    return feature_named(name).column([features.get(name) for features in units])


Rule = tuple[Literal, ...]


def all_hold(rule: Rule, units: Sequence[Features]) -> Bits:
    """Return for which units (requests or results) all literals of a rule are true, bool [units]."""
    return np.all([np.ones(len(units), dtype=bool), *(literal.holds(units) for literal in rule)], axis=0)


def literals_of(units: Sequence[Features]) -> tuple[list[Literal], Bits, Bits]:
    """Return (literals that hold for some but not all units, the units for which they hold as bool [literals, units], costs in
    bits). Of several literals that hold for the same units, the cheapest is kept, or of equally cheap ones the first in
    `FEATURES`.
    """
    found: dict[bytes, tuple[float, Literal, Bits]] = {}
    names = {name for features in units for name in features}

    def add(literal: Literal, holds: Bits, cost: float) -> None:
        key = np.packbits(holds).tobytes()
        if holds.any() and not holds.all() and (key not in found or cost < found[key][0]):
            found[key] = (cost, literal, holds)

    numbers = dict[str, tuple[Number, Bits]]()
    for name in [*filter(names.__contains__, FEATURES), *sorted(names - FEATURES.keys())]:
        feature, column = feature_named(name), _column(name, units)
        for operator, value, bits in feature.tests(column):
            add(Literal(name, operator, value), OPERATORS[operator](column, value), FEATURE_BITS + feature.cost + bits)
        if isinstance(feature, Number):
            numbers[name] = feature, column
            for operator, divisor, bits in feature.divisions():
                add(Literal(name, operator, divisor), OPERATORS[operator](column, divisor), FEATURE_BITS + bits)
    for (name, (number, column)), (other_name, (other, others)) in itertools.permutations(numbers.items(), 2):
        for operator, bits in number.relations(other):
            add(Literal(name, operator, other_name), OPERATORS[operator](column, others), FEATURE_BITS + bits)
    if not found:
        return [], np.zeros((0, len(units)), dtype=bool), np.zeros(0)
    costs, literals, columns = zip(*sorted(found.values(), key=lambda each: each[0]), strict=True)
    return list(literals), np.stack(columns), np.array(costs)
