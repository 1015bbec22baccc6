"""The shortest rules over facts that tell wrong results from right ones.

A rule is a conjunction of at most three literals, such as `window_left >= 0 and q_len >= 2`. The best one describes the results
in the fewest bits: those of its literals, and those that say which results are wrong, inside and outside it. A literal costs
more where a reader can do less with it. Rules are added while they save bits, so that several bugs have several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.checks.facts import Fact, Facts
from lab.checks.phrases import PHRASES, phrase

MOST_LITERALS = 3
MOST_RULES = 4
MOST_THRESHOLDS = 12  # of a number
MOST_PAIRS = 150  # that a third literal is tried with
# A result is worth less than its bits, since results of one case are not independent; more where few are wrong, until a rule
# is found.
WORTHS = (0.5, 1, 2, 4, 8, 16)
MOST_WORTH_OF_OTHERS = 4  # of what the first rule leaves
EVERYWHERE = 0.9  # of the results: where as many are wrong, exceptions are no rule
MOSTLY = 0.8  # of the results: where as many are wrong, a rule must leave out a tenth of them
PURE = 0.9  # share of wrong results in a region that is called so
PURE_ALONE = 0.75  # the same of one condition that takes the place of several rules
# Where nearly all is wrong, the right results without a condition must be as unlikely by chance as 10 to the minus this.
SURE_DIGITS = 6.0
FACT_BITS, NEGATION_BITS, UNPHRASED_BITS = 6.0, 2.5, 4.0
THRESHOLD_BITS = 2.5  # at most
UNNEGATED = ("result",)  # "wherever the result is not ..." tells a reader nothing

Bits = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Literal:
    """One condition of a rule: a fact, "is", "is not", "==", "!=", ">=" or "<=", and a value."""

    fact: str
    operator: str
    value: Fact = True

    def __str__(self) -> str:
        if self.operator == "is":
            return self.fact
        if self.operator == "is not":
            return f"not ({self.fact})" if " " in self.fact else f"not {self.fact}"
        return f"{self.fact} {self.operator} {self.value!r}"

    @property
    def phrase(self) -> str:
        """Return the condition in words, to follow "wherever"."""
        return phrase(self.fact, self.operator, self.value)

    def holds(self, facts: Facts) -> bool:
        """Tell whether facts meet the condition; a number that they do not have meets none."""
        value = facts.get(self.fact)
        if self.operator in ("is", "is not"):
            return bool(value) == (self.operator == "is")
        if self.operator in ("==", "!="):
            return (value == self.value) == (self.operator == "==") and value is not None
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return value >= self.value if self.operator == ">=" else value <= self.value  # type: ignore[operator]


Rule = tuple[Literal, ...]


def find_rules(units: Sequence[Facts], wrong: Bits, weights: Bits) -> list[Rule]:
    """Return the rules that tell the wrong units from the right ones, the one that says most first.

    Args:
        units: facts of each.
        wrong: bool [len(units)], at least one true.
        weights: float [len(units)], of the units.

    Returns:
        At most `MOST_RULES`; a rule without literals, alone, holds everywhere.
    """
    literals, holds, costs = _table(units)
    patterns, where = np.unique(np.packbits(holds, axis=0), axis=1, return_inverse=True)
    first = np.zeros(patterns.shape[1], dtype=int)
    first[where.ravel()] = np.arange(len(units))
    holds = holds[:, first]
    bad = np.bincount(where.ravel(), weights=weights * wrong, minlength=len(first))
    good = np.bincount(where.ravel(), weights=weights * ~wrong, minlength=len(first))
    sure = _sure(literals, holds, bad, good, costs)
    if bad.sum() > EVERYWHERE * (bad + good).sum():
        return [tuple(literals[number] for number in sure)]
    found = _several(literals, holds, bad, good, costs)
    only = _best(holds, WORTHS[-1] * bad, WORTHS[-1] * good, costs)
    is_plain = len(only) <= 2 and all(costs[number] < FACT_BITS + UNPHRASED_BITS for number in only)
    if is_plain and found != [only] and _separates(holds, only, bad, good):
        found = [only]
    alone = _covering(holds, bad, good, costs)
    if alone and not _is_whole(holds, found, bad, good):
        found = [alone]  # what the others add tells only where the bug shows
    if found and found != [sure] and bad.sum() > MOSTLY * (bad + good).sum():
        outside = ~np.any([holds[list(chosen)].all(axis=0) for chosen in found], axis=0)
        if (bad + good)[outside].sum() < (1 - EVERYWHERE) * (bad + good).sum():
            found = [sure]
    return [
        tuple(literals[number] for number in sorted(chosen, key=lambda number: costs[number])) for chosen in found
    ] or [()]


def _several(literals: list[Literal], holds: Bits, bad: Bits, good: Bits, costs: Bits) -> list[tuple[int, ...]]:
    """Return rules one after the other, each among what those before it leave, while they save bits."""
    rules: list[tuple[int, ...]] = []
    left = np.ones(len(bad), dtype=bool)
    for worth in WORTHS:
        while len(rules) < MOST_RULES and bad[left].sum() > 0 and (not rules or worth <= MOST_WORTH_OF_OTHERS):
            chosen = _best(holds[:, left], worth * bad[left], worth * good[left], costs)
            if not chosen or not _is_worth_telling(holds[:, left], chosen, bad[left], good[left], rules, worth):
                break
            rules.append(_pruned(chosen, literals, holds[:, left], bad[left], good[left]))
            left &= ~holds[list(rules[-1])].all(axis=0)
    return rules


def _is_worth_telling(
    holds: Bits, chosen: tuple[int, ...], bad: Bits, good: Bits, rules: Sequence[tuple[int, ...]], worth: float
) -> bool:
    """Tell whether a rule says enough: half of its results are wrong, or nearly all of those of a long rule after others.

    The first rule may be less pure, where none is purer.
    """
    inside = holds[list(chosen)].all(axis=0)
    least = PURE if rules and len(chosen) > 1 else 0.5 if rules or worth < MOST_WORTH_OF_OTHERS else 0.0
    return bool(bad[inside].sum() >= least * (bad + good)[inside].sum())


def _separates(holds: Bits, chosen: tuple[int, ...], bad: Bits, good: Bits) -> bool:
    inside = holds[list(chosen)].all(axis=0)
    return bool(chosen) and not good[inside].sum() and not bad[~inside].sum()


def _is_whole(holds: Bits, found: list[tuple[int, ...]], bad: Bits, good: Bits) -> bool:
    """Tell whether rules hold wherever results are wrong: one rule, or several that hold nowhere else."""
    inside = np.any([holds[list(chosen)].all(axis=0) for chosen in found], axis=0)
    return not bad[~inside].sum() and (len(found) == 1 or not good[inside].sum())


def _sure(literals: list[Literal], holds: Bits, bad: Bits, good: Bits, costs: Bits) -> tuple[int, ...]:
    """Return a condition that all wrong results share and that right ones lack by more than chance; none if there is none."""
    is_condition = np.array([literal.operator == "is" for literal in literals], dtype=bool)
    sure = _covering(holds, bad, good, np.where(is_condition, costs, np.inf))
    if not sure:
        return ()
    digits = good[~holds[sure[0]]].sum() * math.log10((bad + good).sum() / good.sum())
    return sure if digits >= SURE_DIGITS else ()


def _covering(holds: Bits, bad: Bits, good: Bits, costs: Bits) -> tuple[int, ...]:
    """Return the cheapest single literal that holds wherever results are wrong, and seldom where they are right, if any."""
    inside_bad, inside_good = holds @ bad, holds @ good
    fits = (
        np.isfinite(costs)
        & (inside_bad >= bad.sum() * (1 - 1e-9))
        & (inside_bad >= PURE_ALONE * (inside_bad + inside_good))
    )
    return (int(np.where(fits, costs, np.inf).argmin()),) if fits.any() else ()


def _best(holds: Bits, bad: Bits, good: Bits, costs: Bits) -> tuple[int, ...]:
    """Return the literals of the rule that saves most bits; none where no rule saves any."""
    all_bad, all_good = bad.sum(), good.sum()
    whole = _bits(all_bad, all_good)
    if all_good == 0 or not len(holds):
        return ()
    table = holds.astype(np.float32)

    def saved(inside_bad: Bits, inside_good: Bits, cost: Bits) -> Bits:
        """Return the saved bits of rules with so many wrong and right units inside; -inf where a rule holds right ones."""
        inside = _bits(inside_bad, inside_good) + _bits(all_bad - inside_bad, all_good - inside_good)
        worse = inside_bad * (all_good - inside_good) <= inside_good * (all_bad - inside_bad)
        return np.where(worse, -np.inf, whole - inside - cost)

    one = saved(table @ bad, table @ good, costs)
    best: tuple[int, ...] = (int(one.argmax()),)
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


def _pruned(chosen: tuple[int, ...], literals: list[Literal], holds: Bits, bad: Bits, good: Bits) -> tuple[int, ...]:
    """Leave out what a rule excludes, where it is nearly as pure without: not every result where a bug is shows it."""
    for number in chosen:
        others = tuple(other for other in chosen if other != number)
        if others and literals[number].operator in ("is not", "!="):
            inside = holds[list(others)].all(axis=0)
            if bad[inside].sum() >= PURE * (bad + good)[inside].sum():
                return _pruned(others, literals, holds, bad, good)
    return chosen


def _bits(bad: Any, good: Any) -> Any:
    """Return the bits that say which of so many wrong and right units are wrong, one after the other."""
    total = np.maximum(bad + good, 1e-9)
    return sum(side * np.log2(total / np.maximum(side, 1e-9)) for side in (bad, good))


def _table(units: Sequence[Facts]) -> tuple[list[Literal], Bits, Bits]:
    """Return the literals that hold for some units and not for others, where each holds, and its bits.

    Of literals that hold for the same units the one that is cheapest stays.
    """
    names = dict.fromkeys(name for facts in units for name in facts)
    found: dict[bytes, tuple[float, Literal, Bits]] = {}
    for name in names:
        for literal, column, cost in _literals(name, [facts.get(name) for facts in units]):
            if column.any() and not column.all():
                key = np.packbits(column).tobytes()
                if key not in found or cost < found[key][0]:
                    found[key] = (cost, literal, column)
    if not found:
        return [], np.zeros((0, len(units)), dtype=bool), np.zeros(0)
    costs, literals, columns = zip(*sorted(found.values(), key=lambda each: each[0]), strict=True)
    return list(literals), np.stack(columns), np.array(costs)


def _literals(name: str, values: list[Fact | None]) -> list[tuple[Literal, Bits, float]]:
    cost = FACT_BITS + (PHRASES[name].rank if name in PHRASES else UNPHRASED_BITS)
    different = {value for value in values if value is not None}
    if all(isinstance(value, bool) for value in different):  # not the numbers 0 and 1
        column = np.array([bool(value) for value in values])
        return [(Literal(name, "is"), column, cost), (Literal(name, "is not"), ~column, cost + NEGATION_BITS)]
    found = []
    if any(isinstance(value, str) for value in different):
        has = np.array([value is not None for value in values])
        for value in sorted(map(str, different)):
            column = np.array([str(each) == value for each in values])
            found.append((Literal(name, "==", value), column, cost + math.log2(len(different))))
            if len(different) > 2 and name not in UNNEGATED:
                more = cost + math.log2(len(different)) + NEGATION_BITS
                found.append((Literal(name, "!=", value), has & ~column, more))
        return found
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    steps = sorted(int(value) for value in different)
    cost += min(math.log2(len(steps)), THRESHOLD_BITS)
    for step in _spread(steps):
        found.append((Literal(name, "==", step), numbers == step, cost + NEGATION_BITS / 2))
        found.append((Literal(name, ">=", step), numbers >= step, cost))
        found.append((Literal(name, "<=", step), numbers <= step, cost + NEGATION_BITS / 2))
    return found


def _spread(steps: list[int]) -> list[int]:
    """Return some of many thresholds: those in the data next after a power of two, where kernels change, and the ends."""
    if len(steps) <= MOST_THRESHOLDS:
        return steps
    edges = [0, 1, 2, *(2**power + 1 for power in range(1, 40))]
    near = {next((step for step in steps if step >= edge), steps[-1]) for edge in edges}
    return sorted(near)


def weights_of(groups: Sequence[int]) -> Bits:
    """Return weights of units by the number of their group, a case: a group of n weighs sqrt(n + 8), since its units depend."""
    sizes = np.bincount(np.array(groups, dtype=int))[np.array(groups, dtype=int)]
    return np.asarray(np.sqrt(sizes + 8) / sizes)
