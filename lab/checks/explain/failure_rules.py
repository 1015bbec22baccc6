"""Find the shortest rules over features that separate wrong results from right ones, by minimum description length.

A literal is a test of a feature (a named property), such as `q_len >= 2` (`lab.checks.explain.literal`). A rule is a
conjunction of at most three literals; right results inside can add two more. A unit is one request of a compared result, or a
whole result; it is wrong or right.

A literal costs fewer bits if a reader understands its feature easily. The cost of a rule is the cost of its literals plus the
entropy of wrong and right units, inside the rule (where it holds) and outside. Rules are added while each reduces the total
number of bits, so that several bugs get several rules.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from lab.checks.explain.feature import HIDING, REMAINDERS, SHOWING, Bits, Cost, Features
from lab.checks.explain.literal import FEATURE_BITS, Rule, all_hold, literals_of

MOST_RULES = 4
FEW = 4  # wrong results: a rule for fewer has only literals that they support
MOST_PAIRS = 150  # pairs of literals, the best ones, to which a third literal is added
# Factors for the weight of wrong units, tried in turn until a rule is found. The first is below 1, because units of one case
# depend on each other. The last is above 1, so that a rule is found for few wrong units.
WORTHS = tuple(2.0**power for power in range(-1, 5))
MOST_WORTH_OF_LATER = 4  # the largest of these factors with which rules after the first are searched
EVERYWHERE = 0.9  # if a larger share of the units is wrong, the only rule is that of `_sure`, or none
MOSTLY = 0.8  # if a larger share of the units is wrong, the rules must leave out a tenth of all units
PURE = 0.9  # least share of wrong units inside a rule
SOFT = 0.05  # least share of wrong units above a limit that is not sharp
PURE_ALONE = 0.75  # least share of wrong units inside one literal that replaces several rules
FAR_BETTER = 1 / 3  # most entropy of a rule that one literal does not replace, relative to that of this literal
# If nearly all units are wrong, a rule counts only if the probability that as many units outside of it are right by
# chance is below 10 ** -SURE_DIGITS.
SURE_DIGITS = 6.0
SHOWN_RIGHT = 0.05  # a literal stays if it excludes this number of right results per wrong result inside the rule
MOST_LITERALS = 5  # of a rule to which right cases inside add conditions
VARIANT_BITS = 6.0  # evidence of a right variant of a wrong case for a condition that excludes it
SURE_BITS = 3.0  # by which the evidence for such a condition must exceed its cost
HIDDEN = 0.2  # factor for the weight of right units with contents or parameter values that can hide an error
MOST_UNITS = 4000  # of wrong units, and of right units, in the sample in which rules are searched


Chosen = tuple[int, ...]  # a rule as indices into `_Search.literals`


def find_rules(units: Sequence[Features], wrong: Bits, cases: Sequence[int]) -> list[Rule]:
    """Return at most `MOST_RULES` rules that separate wrong units (requests or results) from right ones, the best rule first. A
    single rule without literals means that results are wrong everywhere. `cases` has the case number of each unit.
    """
    chosen, weights = sampled(wrong, cases)
    sample = [dict(units[number]) for number in chosen]
    weights[~wrong[chosen] & ~_shows(sample, wrong[chosen])] *= HIDDEN
    search = _Search(sample, wrong[chosen], weights)
    rules = [sorted(rule, key=search.alone.__getitem__) for rule in search.rules()]
    return [tuple(search.literals[number] for number in rule) for rule in rules] or [()]


def _shows(units: Sequence[Features], wrong: Bits) -> Bits:
    """Return bool [units]: False for a unit (request or result) that has an input value by which errors may stay hidden.

    Values under suspicion are contents not in `SHOWING`, and the parameter values in `HIDING`. A suspected value hides errors
    if, of the units with this value, a smaller fraction is wrong than of the units without any suspected value.
    """
    tags = [
        {str(each.get("contents")), *(name for name in each if name.startswith(HIDING))} - SHOWING for each in units
    ]
    plain = wrong[[not each for each in tags]]
    every, bad = (Counter(itertools.chain(*some)) for some in (tags, itertools.compress(tags, wrong)))
    hiding = {tag for tag, count in every.items() if bad[tag] * len(plain) < plain.sum() * count}
    return np.array([hiding.isdisjoint(each) for each in tags], dtype=bool)


def supported(rule: Rule, units: Sequence[Features], wrong: Bits, result_of: Bits) -> Rule:
    """Return a rule without the literals (tests of one feature) for which there is little evidence.

    Let n be the number of wrong results that meet the rule. A literal is proved by two cases: a wrong one that meets the rule,
    and a right one that violates only this literal and has one non-default parameter value less. A literal that is not proved
    is removed if it excludes too few results (fewer than `FEW` if n is below `FEW`, else fewer than `SHOWN_RIGHT * n` right
    ones), or if n or more literals precede it. `result_of`, int [units], has the result of each unit (request or result).
    """
    holds = {literal: literal.holds(units) for literal in rule}
    every = np.ones_like(wrong)

    def meets(literals: Rule) -> Bits:
        return np.all([every, *(holds[each] for each in literals)], axis=0)

    def results(literals: Rule, among: Bits) -> int:
        return len(np.unique(result_of[among & meets(literals)]))

    def parameters(among: Bits) -> set[frozenset[str]]:
        return {frozenset(name for name in units[number] if "=" in name) for number in np.flatnonzero(among).tolist()}

    num_wrong = results(rule, wrong)
    shorter = {values - {value} for values in parameters(wrong & meets(rule)) for value in values} - {frozenset()}
    rests = {literal: tuple(each for each in rule if each != literal) for literal in rule}
    paired = {literal for literal in rule if shorter & parameters(~wrong & meets(rests[literal]) & ~holds[literal])}
    for literal in reversed(rule):
        rest = tuple(each for each in rule if each != literal)
        if not rest or literal in paired:
            continue
        if num_wrong < FEW:
            is_uncertain = results(rest, every) - results(rule, every) < FEW
        else:
            excluded = meets(rest) & ~holds[literal]
            right = np.setdiff1d(result_of[excluded], result_of[excluded & wrong])
            is_uncertain = len(right) < SHOWN_RIGHT * num_wrong
        if is_uncertain:
            rule = rest
    return tuple(each for number, each in enumerate(rule) if number < num_wrong or each in paired)


def sharpened(rule: Rule, units: Sequence[Features], wrong: Bits, result_of: Bits, cases: Sequence[int]) -> Rule:
    """Return a rule with further literals (tests of one feature) that exclude right results, at most `MOST_LITERALS` in all.

    A literal is added if it holds for all wrong units that meet the rule, and if the right cases that it excludes are more bits
    of evidence than it costs. Right cases that differ little from a wrong case (`_variants`) are the most evidence. A literal
    with another operator than "is" and ">=" must exclude such a case, or test the remainder of a number that the rule names.
    `result_of`, int [units], has the result of each unit (request or result).
    """
    inside = np.flatnonzero(all_hold(rule, units))
    right_results = np.setdiff1d(result_of[inside], result_of[inside][wrong[inside]])
    if not rule or len(rule) >= MOST_LITERALS or not len(right_results):
        return rule
    all_wrong = [units[at] for at in inside[wrong[inside]].tolist()]
    inside = inside[sampled(wrong[inside], np.array(cases)[inside].tolist())[0]]
    chosen, case, is_wrong = [dict(units[at]) for at in inside.tolist()], np.array(cases)[inside], wrong[inside]
    values = [frozenset(name for name in features if "=" in name) for features in chosen]
    right = np.isin(result_of[inside], right_results) & _shows(chosen, is_wrong)
    varied = _variants({*values}, {values[at] for at in np.flatnonzero(is_wrong)})
    rights, variants = {*case[right]}, {case[at] for at in np.flatnonzero(right) if values[at] in varied}
    total, best, most = len({*case[is_wrong | right]}), rule, SURE_BITS
    for literal, held, cost in zip(*literals_of(chosen), strict=True):
        excluded = rights - {*case[right & held]}
        is_named = literal.feature in {each.feature for each in rule}
        is_telling = literal.operator in (REMAINDERS if is_named else ("is", ">=")) or (
            excluded & variants and not is_named
        )
        if "=" not in literal.feature and is_telling and held[is_wrong].all():
            gain = sum(math.log2((total - n) / (len(rights) - n)) for n in range(len(excluded))) - cost
            gain += VARIANT_BITS * len(excluded & variants)
            if gain > most and literal.holds(all_wrong).all():
                best, most = (*rule, literal), gain
    return rule if best is rule else sharpened(best, units, wrong, result_of, cases)


def _variants(cases: Set[frozenset[str]], of_wrong: Set[frozenset[str]]) -> set[frozenset[str]]:
    """Return sets of non-default parameter values that differ little from a set in `of_wrong`: these sets without one value,
    and the sets in `cases` with one or two values more than one of these. The values that differ cannot hide an error.
    """
    plain = {case: [value for value in case if not value.startswith(HIDING)] for case in cases | of_wrong}
    found = {case - {value} for case in of_wrong for value in plain[case]}
    for number in (1, 2):  # two, as one value may need the other
        found |= {
            case for case in cases for more in itertools.combinations(plain[case], number) if case - {*more} in of_wrong
        }
    return {case for case in found if case}


def sampled(wrong: Bits, cases: Sequence[int]) -> tuple[Bits, Bits]:
    """Choose units (requests or results) in which rules are searched. Return (indices of the chosen units, their weights).

    If there are more than `MOST_UNITS` wrong units, every k-th wrong unit is chosen, and its weight is multiplied by k; right
    units are chosen likewise. Before that, each of the n units of a case weighs sqrt(n + 8) / n, as they are not independent.
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
    """A search for failure rules. Units (requests or results) with the same true literals form a group. `holds` is bool
    [literals, groups]. `bad` and `good` are each group's weights of wrong and right units. `costs` has the bits that
    each literal adds to the description of a rule.
    """

    def __init__(self, units: Sequence[Features], wrong: Bits, weights: Bits) -> None:
        self.literals, holds, self.costs = literals_of(units)
        _, first, where = np.unique(np.packbits(holds, axis=0), axis=1, return_index=True, return_inverse=True)
        self.holds = holds[:, first]
        self.bad = np.bincount(where.ravel(), weights=weights * wrong, minlength=len(first))
        self.good = np.bincount(where.ravel(), weights=weights * ~wrong, minlength=len(first))
        # The total bits of a rule that consists of one literal. The literals of a rule are printed in this order.
        inside_bad, inside_good = self.holds @ self.bad, self.holds @ self.good
        outside = _bits(self.bad.sum() - inside_bad, self.good.sum() - inside_good)
        self.alone = _bits(inside_bad, inside_good) + outside + self.costs

    def rules(self) -> list[Chosen]:
        sure, all_bad, total = self._sure(), self.bad.sum(), (self.bad + self.good).sum()
        if all_bad > EVERYWHERE * total:
            return [sure]
        found = self._several()
        worth = WORTHS[-1]
        only = _best(self.holds, worth * self.bad, worth * self.good, self.costs)
        is_plain = len(only) <= 2 and all(self.costs[number] < FEATURE_BITS + Cost.SETTING for number in only)
        if is_plain and only and not any(self._errors([only])):
            found = [self._pruned(only, np.ones(len(self.bad), dtype=bool), ("<=",))]
        right_inside, wrong_outside = self._errors(found)
        alone = self._covering(self.costs)
        # Several rules may only describe in which cases the bug is visible. But if most units are wrong, any literal holds for
        # few right ones: it replaces no rule that separates wrong units from right ones far better.
        is_better = bool(alone and found) and self._entropy(found[0]) < FAR_BETTER * self._entropy(alone)
        if alone and not is_better and (wrong_outside or (right_inside and len(found) > 1)):
            found = [alone]
        if found and found != [sure] and all_bad > MOSTLY * total:
            outside = ~self._inside(found)
            if (self.bad + self.good)[outside].sum() < (1 - EVERYWHERE) * total:
                found = [sure]
        return found

    def _inside(self, rules: Sequence[Chosen]) -> Bits:
        inside = np.zeros(len(self.bad), dtype=bool)
        for chosen in rules:
            inside |= self.holds[list(chosen)].all(axis=0)
        return inside

    def _errors(self, rules: Sequence[Chosen]) -> tuple[float, float]:
        inside = self._inside(rules)
        return float(self.good[inside].sum()), float(self.bad[~inside].sum())

    def _entropy(self, rule: Chosen) -> float:
        right_inside, wrong_outside = self._errors([rule])
        inside = _bits(self.bad.sum() - wrong_outside, right_inside)
        return float(inside + _bits(wrong_outside, self.good.sum() - right_inside))

    def _several(self) -> list[Chosen]:
        rules: list[Chosen] = []
        left = np.ones(len(self.bad), dtype=bool)
        for worth in WORTHS:
            while len(rules) < MOST_RULES and self.bad[left].sum() > 0 and (not rules or worth <= MOST_WORTH_OF_LATER):
                chosen = _best(self.holds[:, left], worth * self.bad[left], worth * self.good[left], self.costs)
                # Only the first rule may have a low share of wrong units, and only after smaller weights found no rule.
                least = PURE if rules and len(chosen) > 1 else 0.5 if rules or worth < MOST_WORTH_OF_LATER else 0.0
                if not chosen or self._purity(chosen, left) < least:
                    break
                rules.append(self._pruned(chosen, left))
                left &= ~self._inside(rules[-1:])
        return rules

    def _purity(self, chosen: Chosen, left: Bits) -> float:
        inside = left & self._inside([chosen])
        return float(self.bad[inside].sum() / max((self.bad + self.good)[inside].sum(), 1e-9))

    def _pruned(self, chosen: Chosen, left: Bits, operators: Sequence[str] = ("is not", "!=", "<=")) -> Chosen:
        """Remove each literal with one of `operators` if nearly all units in `left` that meet the other literals are wrong. For
        a limit such as "kv_len <= 64", most of them suffice if some above the limit are wrong: the kernel may be wrong for all
        numbers of keys, with errors too small to be seen.
        """
        for number in chosen:
            rest = tuple(each for each in chosen if each != number)
            operator = self.literals[number].operator
            if rest and operator in operators:
                is_soft = operator == "<=" and self._purity(rest, left & ~self.holds[number]) >= SOFT
                if self._purity(rest, left) >= (PURE_ALONE if is_soft else PURE):
                    return self._pruned(rest, left, operators)
        return chosen

    def _sure(self) -> Chosen:
        """Return a rule of one literal with the operator "is": the cheapest that holds for all wrong units and few right ones.
        Return () if there is none, or if so few right units are outside that all may be right by chance.
        """
        is_condition = np.array([literal.operator == "is" for literal in self.literals], dtype=bool)
        sure = self._covering(np.where(is_condition, self.costs, np.inf))
        if not sure:
            return ()
        digits = self.good[~self.holds[sure[0]]].sum() * math.log10((self.bad + self.good).sum() / self.good.sum())
        return sure if digits >= SURE_DIGITS else ()

    def _covering(self, costs: Bits) -> Chosen:
        """Return a rule of one literal: the cheapest that holds for all wrong units, and for so few right units that the wrong
        ones have at least `PURE_ALONE` of the weight of both. Return () if there is none.
        """
        inside_bad, inside_good = self.holds @ self.bad, self.holds @ self.good
        fits = (inside_bad >= self.bad.sum() * (1 - 1e-9)) & (inside_bad >= PURE_ALONE * (inside_bad + inside_good))
        fits &= np.isfinite(costs)
        return (int(np.where(fits, costs, np.inf).argmin()),) if fits.any() else ()


def _best(holds: Bits, bad: Bits, good: Bits, costs: Bits) -> Chosen:
    """Return the rule of at most three literals that saves the most bits of description length, or () if none saves any."""
    all_bad, all_good = bad.sum(), good.sum()
    whole = _bits(all_bad, all_good)
    if not len(holds):
        return ()
    table = holds.astype(np.float32)

    def saved(inside_bad: Bits, inside_good: Bits, cost: Bits) -> Bits:
        inside = _bits(inside_bad, inside_good) + _bits(all_bad - inside_bad, all_good - inside_good)
        worse = inside_bad * (all_good - inside_good) <= inside_good * (all_bad - inside_bad)
        # Rounded: rules that hold for the same units save equal bits, so that the first of them is taken.
        return np.where(worse, -np.inf, whole - inside - cost).round(6)

    one = saved(table @ bad, table @ good, costs)
    best: Chosen = (int(one.argmax()),)
    gain = float(one.max())
    sides = [(table[:, weights > 0], weights[weights > 0]) for weights in (bad, good)]
    inside_bad, inside_good = ((part * weights) @ part.T for part, weights in sides)
    two = saved(inside_bad, inside_good, costs[:, None] + costs)
    two[np.tril_indices(len(two))] = -np.inf
    order = np.argsort(-two, axis=None, kind="stable")[:MOST_PAIRS]
    pairs = [divmod(int(at), len(two)) for at in order if np.isfinite(two.flat[at])]
    if pairs and two[pairs[0]] > gain:
        best, gain = pairs[0], float(two[pairs[0]])
    if pairs:
        firsts, seconds = (np.array(side) for side in zip(*pairs, strict=True))
        inside_bad, inside_good = ((part[firsts] * part[seconds] * weights) @ part.T for part, weights in sides)
        three = saved(inside_bad, inside_good, (costs[firsts] + costs[seconds])[:, None] + costs)
        at = np.unravel_index(int(three.argmax()), three.shape)
        if three[at] > gain:
            best, gain = (*pairs[int(at[0])], int(at[1])), float(three[at])
    return best if gain > 0 else ()


def _bits(bad: Any, good: Any) -> Any:
    total = np.maximum(bad + good, 1e-9)  # entropy of two counts: the sum of n log2(total / n)
    return sum(side * np.log2(total / np.maximum(side, 1e-9)) for side in (bad, good))
