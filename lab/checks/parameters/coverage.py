"""Compute the coverage of a run: which parameter values, and which pairs and triples of values, were judged."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.checks.parameters.covering import Model, Values
from lab.checks.parameters.models import MODELS, Configuration
from lab.checks.run.verdicts import CaseVerdict, Outcome
from lab.named_enum import NamedEnum
from lab.ranges import Ranges
from lab.workloads.interfaces import Interface

MOST_BLIND_SPOTS = 100  # in a report's file


class Reach(NamedEnum):
    JUDGED = "judged"  # in a judged case
    DECLINED = "declined"  # only in cases that the kernel declined
    LEFT_OUT = "left out"  # in no case
    IMPOSSIBLE = "impossible"  # forbidden by the rules of the model


@dataclass(frozen=True)
class Coverage:
    """Which values of one function's parameters, and which pairs and triples of values, a run has judged."""

    interface: Interface
    values: Mapping[str, Mapping[Any, Reach]]  # by axis and value
    pairs: Mapping[Reach, int]  # numbers of pairs
    triples: Mapping[Reach, int]  # numbers of the triples that the model declares
    blind: tuple[tuple[Values, Reach], ...]  # pairs that no judged case has, though both values were judged
    impossible: Mapping[str, int]  # numbers of pairs and triples that a rule forbids, by the reason of the rule

    def as_record(self) -> dict[str, Any]:
        blind = self.blind[:MOST_BLIND_SPOTS]
        return {
            "values": {axis: _by_reach(values) for axis, values in self.values.items()},
            "pairs": {reach.value: self.pairs[reach] for reach in Reach},
            "triples": {reach.value: self.triples[reach] for reach in Reach},
            "impossible": dict(self.impossible),
            "num_blind_spots": len(self.blind),
            "blind_spots": [
                {"values": {name: _shown(value) for name, value in pair}, "reach": reach.value} for pair, reach in blind
            ],
        }

    @property
    def counts(self) -> str:
        # Such as "40 of 42 values and 300 of 320 pairs of decode".
        of_values = Counter(reach for values in self.values.values() for reach in values.values())
        return f"{_share(of_values, 'values')} and {_share(self.pairs, 'pairs')} of {self.interface.name.lower()}"


def coverages(verdicts: Sequence[CaseVerdict], ranges: Ranges) -> tuple[Coverage, ...]:
    of_function: dict[Interface, list[CaseVerdict]] = {}
    for verdict in verdicts:
        if verdict.check == "K18" and isinstance(verdict.case, Configuration):
            of_function.setdefault(verdict.interface, []).append(verdict)
    return tuple(coverage(each, MODELS[each](ranges), found) for each, found in of_function.items())


def coverage(interface: Interface, model: Model, verdicts: Iterable[CaseVerdict]) -> Coverage:
    judged, declined = tuples_by_outcome(model, verdicts)

    def reach_of(goal: Values, is_possible: bool) -> Reach:
        if not is_possible:
            return Reach.IMPOSSIBLE
        return Reach.JUDGED if goal in judged else Reach.DECLINED if goal in declined else Reach.LEFT_OUT

    of_values = {
        axis: {value: reach_of(((axis, value),), model.nearest[axis, value] is not None) for value in values}
        for axis, values in model.axes.items()
    }
    why: Counter[str] = Counter()
    counts: dict[int, Counter[Reach]] = {2: Counter(), 3: Counter()}
    blind: list[tuple[Values, Reach]] = []
    for goal, sentence in model.why_not.items():
        reach = reach_of(goal, not sentence)
        counts[len(goal)][reach] += 1
        why.update([sentence] if sentence else ())
        alone = (of_values[axis][value] for axis, value in goal)
        if len(goal) == 2 and reach in (Reach.DECLINED, Reach.LEFT_OUT) and all(each is Reach.JUDGED for each in alone):
            blind.append((goal, reach))
    return Coverage(interface, of_values, counts[2], counts[3], tuple(blind), dict(why.most_common()))


def tuples_by_outcome(model: Model, verdicts: Iterable[CaseVerdict]) -> tuple[set[Values], set[Values]]:
    """Return two sets of values, pairs and triples of values: those in cases that were judged, and those in cases that the
    kernel declined. Cases that failed before a result was compared do not count.
    """
    held = [each for each in verdicts if each.outcome is not Outcome.FAILED or each.judged.judged]
    of_judged, of_declined = (
        [each.case.values for each in held if (each.outcome is Outcome.DECLINED) is is_declined]
        for is_declined in (False, True)
    )
    apart = model.apart_from({value for values in of_judged for value in values.items()})
    judged, declined = set[Values](), set[Values]()
    judged.update(*(model.tuples_of(values, apart) for values in of_judged))
    declined.update(*(model.tuples_of(values, apart) for values in of_declined))
    return judged, declined


def retried(model: Model, verdicts: Sequence[CaseVerdict]) -> tuple[Model | None, list[Values]]:
    """Return (model, combinations) for further cases. The model has only values that a judged case has; it is None if a
    parameter has no such value. The combinations are the pairs and triples of the model's values that no judged case has.
    """
    judged, _ = tuples_by_outcome(model, verdicts)
    taken = model.only(judged)
    return taken, [] if taken is None else [*taken.tuples(judged)]


def _by_reach(values: Mapping[Any, Reach]) -> dict[str, list[str]]:
    return {
        reach.value: found
        for reach in Reach
        if (found := [_shown(value) for value, each in values.items() if each is reach])
    }


def _share(counts: Mapping[Reach, int], what: str) -> str:
    possible = sum(count for reach, count in counts.items() if reach is not Reach.IMPOSSIBLE)
    return f"{counts[Reach.JUDGED]:,} of {possible:,} {what}"


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)
