"""The three kinds of feature: a condition, a number, a choice. Each has its text, and the tests that a rule can make of it."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Value = bool | int | str
Features = Mapping[str, Value]  # by name; a condition that is not met and what a subject does not have are left out
Bits = np.ndarray[Any, np.dtype[Any]]

NEGATION_BITS = 2.5
THRESHOLD_BITS = 2.5  # at most
MOST_THRESHOLDS = 12
_ALTERNATIVES = re.compile(r"\{([^}]*)\|([^}]*)\}")


class Test(NamedTuple):
    """A test of a feature: "is" or "is not" of a condition; "==", "!=", ">=" or "<=" and a value.

    Attributes:
        holds: bool, for each of the values that it was made from.
        cost: bits, besides those of the feature.
    """

    operator: str
    value: Value
    holds: Bits
    cost: float


@dataclass(frozen=True)
class Feature(ABC):
    """One fact about a subject.

    Attributes:
        name: an identifier, which rules show.
        text: follows "wherever".
        cost: bits that a rule pays for it, beyond those of the features that say most to a reader.
        read: reads the value; None: it is the subject's attribute of the feature's name.
    """

    name: str
    text: str
    cost: float = 0.0
    read: Callable[[Any], Any] | None = None

    @abstractmethod
    def phrase(self, operator: str, value: Value) -> str:
        """Return a test in words."""

    @abstractmethod
    def tests(self, values: Sequence[Value | None]) -> Iterator[Test]:
        """Yield the tests that can tell values apart. None stands for a subject without a value: it meets no test."""


class Condition(Feature):
    """A feature that a subject has or has not; "{yes|no}" in its text are the words where it has it, and where it has not."""

    def phrase(self, operator: str, value: Value) -> str:
        return _ALTERNATIVES.sub(lambda found: found[1 if operator == "is" else 2], self.text)

    def tests(self, values: Sequence[Value | None]) -> Iterator[Test]:
        column = np.array([bool(value) for value in values])
        yield Test("is", True, column, 0.0)
        yield Test("is not", True, ~column, NEGATION_BITS)


@dataclass(frozen=True)
class Number(Feature):
    """A feature that is a number, for which "{}" stands in its text; `several` is the text of two or more."""

    several: str = ""

    def phrase(self, operator: str, value: Value) -> str:
        if operator == ">=" and value == 2 and self.several:
            return self.several
        words = self.text.format(value) + {">=": " or more", "<=": " or less", "==": ""}[operator]
        return re.sub(r"\b1 (key|query row|page|request)s\b", r"1 \1", words)

    def tests(self, values: Sequence[Value | None]) -> Iterator[Test]:
        numbers = np.array([np.nan if value is None else float(value) for value in values])
        steps = sorted({int(value) for value in values if value is not None})
        cost = min(math.log2(len(steps)), THRESHOLD_BITS)
        for step in _spread(steps):
            yield Test("==", step, numbers == step, cost + NEGATION_BITS / 2)
            yield Test(">=", step, numbers >= step, cost)
            yield Test("<=", step, numbers <= step, cost + NEGATION_BITS / 2)


@dataclass(frozen=True)
class Choice(Feature):
    """A feature that is one of some names; its text is the noun of "wherever ... is ..."."""

    is_negated: bool = True  # "is not" says something to a reader

    def phrase(self, operator: str, value: Value) -> str:
        return f"{self.text} {'is' if operator == '==' else 'is not'} {value}"

    def tests(self, values: Sequence[Value | None]) -> Iterator[Test]:
        names = np.array(["" if value is None else str(value) for value in values])
        different = sorted(set(names.tolist()) - {""})
        cost = math.log2(len(different))
        for name in different:
            yield Test("==", name, names == name, cost)
            if len(different) > 2 and self.is_negated:
                yield Test("!=", name, (names != name) & (names != ""), cost + NEGATION_BITS)


def _spread(steps: list[int]) -> list[int]:
    """Return some of many thresholds: those in the data next after a power of two, where kernels change, and the ends."""
    if len(steps) <= MOST_THRESHOLDS:
        return steps
    edges = [0, 1, 2, *(2**power + 1 for power in range(1, 40))]
    return sorted({next((step for step in steps if step >= edge), steps[-1]) for edge in edges})
