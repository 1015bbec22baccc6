"""Find the shortest rules over features (named properties) that separate wrong results from right ones.

A rule is a conjunction of at most three literals, such as `has_window and q_len >= 2`. The best rule needs the fewest bits: the
bits of its literals, plus the bits that say which results are wrong where the rule holds and where it does not. Rules are added
while they save bits, so that several bugs get several rules. A unit is one request of a result, or a whole result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.checks.explain.feature import OPERATORS, Bits, Cost, Features, Value
from lab.checks.explain.features import FEATURES, feature_named

MOST_LITERALS = 3
MOST_RULES = 4
MOST_PAIRS = 150  # that a third literal is tried with
# A result is worth less than its bits, since results of one case are not independent; more where few are wrong, until a rule
# is found.
WORTHS = tuple(2.0**power for power in range(-1, 5))
MOST_WORTH_OF_LATER = 4  # of what the first rule leaves
EVERYWHERE = 0.9  # of the results: where as many are wrong, exceptions are no rule
MOSTLY = 0.8  # of the results: where as many are wrong, a rule must leave out a tenth of them
PURE = 0.9  # share of wrong results in a region that is called so
PURE_ALONE = 0.75  # as PURE, where one condition takes the place of several rules
# Where nearly all is wrong, the right results without a condition must be as unlikely by chance as 10 to the minus this.
SURE_DIGITS = 6.0
FEATURE_BITS = 6.0
MOST_UNITS = 4000  # wrong ones, and right ones, among which rules are searched; of more, one in every few


@dataclass(frozen=True)
class Literal:
    """One test in a rule: a feature's name, one of `lab.checks.explain.feature.OPERATORS`, and a value."""

    feature: str
    operator: str
    value: Value = True

    def __str__(self) -> str:
        if self.operator in ("is", "is not"):
            return self.feature if self.operator == "is" else f"not {self.feature}"
        return f"{self.feature} {self.operator} {self.value!r}"

    @property
    def phrase(self) -> str:
        """Return the literal in words that can follow "wherever"."""
        return feature_named(self.feature).phrase(self.operator, self.value)

    def holds(self, units: Sequence[Features]) -> Bits:
        """Return, for each unit (request or whole result), whether the literal is true of its features: bool [units]."""
        column = feature_named(self.feature).column([features.get(self.feature) for features in units])
        return OPERATORS[self.operator](column, self.value)


Rule = tuple[Literal, ...]
Chosen = tuple[int, ...]  # the literals of a rule, by their numbers


def find_rules(units: Sequence[Features], wrong: Bits, cases: Sequence[int]) -> list[Rule]:
    """Return rules that separate wrong units (requests or whole results) from right ones, the most informative rule first.

    Args:
        units: the features of each unit (one request of a result, or a whole result).
        wrong: bool [len(units)], at least one true.
        cases: the number of the case to which each unit belongs.

    Returns:
        At most `MOST_RULES` rules. A single rule without literals means that results are wrong everywhere.

    Raises:
        UnknownFeatureError: a unit has a feature that the table does not have.
    """
    chosen, weights = sampled(wrong, cases)
    search = _Search([dict(units[number]) for number in chosen], wrong[chosen], weights)
    rules = [sorted(rule, key=search.alone.__getitem__) for rule in search.rules()]
    return [tuple(search.literals[number] for number in rule) for rule in rules] or [()]


def sampled(wrong: Bits, cases: Sequence[int]) -> tuple[Bits, Bits]:
    """Return the indices of a sample of the units (requests or whole results) for the search of rules, and each one's weight.

    If there are many wrong or many right units, the sample has only every second, third and so on. The n units of a case weigh
    sqrt(n + 8) together, because they depend on each other.
    """
    sizes = np.bincount(np.array(cases, dtype=int))[np.array(cases, dtype=int)]
    weights = np.sqrt(sizes + 8) / sizes
    chosen = []
    for side in (np.flatnonzero(wrong), np.flatnonzero(~wrong)):
        step = max(1, -(-len(side) // MOST_UNITS))
        weights[side] *= step
        chosen.append(side[::step])
    numbers = np.sort(np.concatenate(chosen))
    return numbers, weights[numbers]


class _Search:
    """A search for rules. Units (requests or whole results) with the same literals (tests of a feature) true form a group.
    `bad` and `good` are the weights of wrong and of right units in each group.
    """

    def __init__(self, units: Sequence[Features], wrong: Bits, weights: Bits) -> None:
        self.literals, holds, self.costs = _table(units)
        _, first, where = np.unique(np.packbits(holds, axis=0), axis=1, return_index=True, return_inverse=True)
        self.holds = holds[:, first]
        self.bad = np.bincount(where.ravel(), weights=weights * wrong, minlength=len(first))
        self.good = np.bincount(where.ravel(), weights=weights * ~wrong, minlength=len(first))
        # By a literal, the bits that a rule of it alone would need: the literal that separates best is the first of a rule.
        inside_bad, inside_good = self.holds @ self.bad, self.holds @ self.good
        outside = _bits(self.bad.sum() - inside_bad, self.good.sum() - inside_good)
        self.alone = _bits(inside_bad, inside_good) + outside + self.costs

    def rules(self) -> list[Chosen]:
        """Return the rules as indices of literals, the most informative first; none, or an empty one: wrong everywhere."""
        sure, all_bad, total = self._sure(), self.bad.sum(), (self.bad + self.good).sum()
        if all_bad > EVERYWHERE * total:
            return [sure]
        found = self._several()
        worth = WORTHS[-1]
        only = _best(self.holds, worth * self.bad, worth * self.good, self.costs)
        is_plain = len(only) <= 2 and all(self.costs[number] < FEATURE_BITS + Cost.SETTING for number in only)
        if is_plain and only and not any(self._errors([only])):
            found = [only]
        right_inside, wrong_outside = self._errors(found)
        alone = self._covering(self.costs)
        if alone and (wrong_outside or (right_inside and len(found) > 1)):
            found = [alone]  # what further rules add says only where the bug shows
        if found and found != [sure] and all_bad > MOSTLY * total:
            outside = ~self._inside(found)
            if (self.bad + self.good)[outside].sum() < (1 - EVERYWHERE) * total:
                found = [sure]
        return found

    def _inside(self, rules: Sequence[Chosen]) -> Bits:
        """Return, for each group of units (requests or whole results), whether at least one of the rules holds in it."""
        inside = np.zeros(len(self.bad), dtype=bool)
        for chosen in rules:
            inside |= self.holds[list(chosen)].all(axis=0)
        return inside

    def _errors(self, rules: Sequence[Chosen]) -> tuple[float, float]:
        """Return two weights: of right units in which a rule holds, and of wrong units in which none holds."""
        inside = self._inside(rules)
        return float(self.good[inside].sum()), float(self.bad[~inside].sum())

    def _several(self) -> list[Chosen]:
        """Find rules one after another while they save bits. Each is searched among units in which no earlier rule holds."""
        rules: list[Chosen] = []
        left = np.ones(len(self.bad), dtype=bool)
        for worth in WORTHS:
            while len(rules) < MOST_RULES and self.bad[left].sum() > 0 and (not rules or worth <= MOST_WORTH_OF_LATER):
                chosen = _best(self.holds[:, left], worth * self.bad[left], worth * self.good[left], self.costs)
                # The first rule may be less pure, where none is purer.
                least = PURE if rules and len(chosen) > 1 else 0.5 if rules or worth < MOST_WORTH_OF_LATER else 0.0
                if not chosen or self._purity(chosen, left) < least:
                    break
                rules.append(self._pruned(chosen, left))
                left &= ~self._inside(rules[-1:])
        return rules

    def _purity(self, chosen: Chosen, left: Bits) -> float:
        """Return the fraction of wrong units (requests or results), by weight, among those of `left` in which a rule holds."""
        inside = left & self._inside([chosen])
        return float(self.bad[inside].sum() / max((self.bad + self.good)[inside].sum(), 1e-9))

    def _pruned(self, chosen: Chosen, left: Bits) -> Chosen:
        """Return a rule without its negations if it stays pure: they may exclude only results that are right by chance."""
        for number in chosen:
            rest = tuple(each for each in chosen if each != number)
            if rest and self.literals[number].operator in ("is not", "!=") and self._purity(rest, left) >= PURE:
                return self._pruned(rest, left)
        return chosen

    def _sure(self) -> Chosen:
        """Return the condition that holds for all wrong results and fails for more right ones than chance explains; or ()."""
        is_condition = np.array([literal.operator == "is" for literal in self.literals], dtype=bool)
        sure = self._covering(np.where(is_condition, self.costs, np.inf))
        if not sure:
            return ()
        digits = self.good[~self.holds[sure[0]]].sum() * math.log10((self.bad + self.good).sum() / self.good.sum())
        return sure if digits >= SURE_DIGITS else ()

    def _covering(self, costs: Bits) -> Chosen:
        """Return the cheapest rule of one literal that holds for all wrong and few right results; () if there is none."""
        inside_bad, inside_good = self.holds @ self.bad, self.holds @ self.good
        fits = (inside_bad >= self.bad.sum() * (1 - 1e-9)) & (inside_bad >= PURE_ALONE * (inside_bad + inside_good))
        fits &= np.isfinite(costs)
        return (int(np.where(fits, costs, np.inf).argmin()),) if fits.any() else ()


def _best(holds: Bits, bad: Bits, good: Bits, costs: Bits) -> Chosen:
    """Return the rule of at most three literals that saves the most bits; () if no rule saves bits."""
    all_bad, all_good = bad.sum(), good.sum()
    whole = _bits(all_bad, all_good)
    if not len(holds):
        return ()
    table = holds.astype(np.float32)

    def saved(inside_bad: Bits, inside_good: Bits, cost: Bits) -> Bits:
        """Return the bits that each rule saves; -inf for a rule if wrong results are not more frequent inside than outside."""
        inside = _bits(inside_bad, inside_good) + _bits(all_bad - inside_bad, all_good - inside_good)
        worse = inside_bad * (all_good - inside_good) <= inside_good * (all_bad - inside_bad)
        return np.where(worse, -np.inf, whole - inside - cost)

    one = saved(table @ bad, table @ good, costs)
    best: Chosen = (int(one.argmax()),)
    gain = float(one.max())
    two = saved((table * bad) @ table.T, (table * good) @ table.T, costs[:, None] + costs)
    two[np.tril_indices(len(two))] = -np.inf
    order = np.argsort(two, axis=None)[::-1][:MOST_PAIRS]
    pairs = [divmod(int(at), len(two)) for at in order if np.isfinite(two.flat[at])]
    if pairs and two[pairs[0]] > gain:
        best, gain = pairs[0], float(two[pairs[0]])
    if pairs:
        firsts, seconds = (np.array(side) for side in zip(*pairs, strict=True))
        both = table[firsts] * table[seconds]
        three = saved(
            (both * bad) @ table.T, (both * good) @ table.T, (costs[firsts] + costs[seconds])[:, None] + costs
        )
        at = np.unravel_index(int(three.argmax()), three.shape)
        if three[at] > gain:
            best, gain = (*pairs[int(at[0])], int(at[1])), float(three[at])
    return best if gain > 0 else ()


def _bits(bad: Any, good: Any) -> Any:
    """Return the bits that tell `bad` wrong requests or results from `good` right ones: the sum of n log2(total / n)."""
    total = np.maximum(bad + good, 1e-9)
    return sum(side * np.log2(total / np.maximum(side, 1e-9)) for side in (bad, good))


def _table(units: Sequence[Features]) -> tuple[list[Literal], Bits, Bits]:
    """Return the literals that hold for some but not all units (requests or whole results); a bool array [literals, units] of
    where they hold; and their costs in bits.

    If several literals hold for the same units, only the cheapest is kept; of equally cheap ones, the first of `FEATURES`.
    """
    found: dict[bytes, tuple[float, Literal, Bits]] = {}
    names = {name for features in units for name in features}
    for name in [*filter(names.__contains__, FEATURES), *sorted(names - FEATURES.keys())]:
        feature = feature_named(name)
        column = feature.column([features.get(name) for features in units])
        for operator, value, bits in feature.tests(column):
            holds, cost = OPERATORS[operator](column, value), FEATURE_BITS + feature.cost + bits
            key = np.packbits(holds).tobytes()
            if holds.any() and not holds.all() and (key not in found or cost < found[key][0]):
                found[key] = (cost, Literal(name, operator, value), holds)
    if not found:
        return [], np.zeros((0, len(units)), dtype=bool), np.zeros(0)
    costs, literals, columns = zip(*sorted(found.values(), key=lambda each: each[0]), strict=True)
    return list(literals), np.stack(columns), np.array(costs)
