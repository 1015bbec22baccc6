"""The three classes of features: `Condition` (true or false), `Number`, and `Choice` (one of several names).

A feature is a named property of a case, a call or a request, such as `kv_len`. Failure rules consist of tests of features,
such as `kv_len >= 64`. The text of a feature gives the words of a test: "a request has 64 keys or more".
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from lab.ranges import DTYPES, dtype_of


class Cost(float, Enum):
    """The bits that a test of a feature, such as `kv_len >= 64`, adds to a failure rule's cost. Clear features cost less."""

    ARGUMENT = 0.0  # an argument is given, or has an unusual form
    VALUE = 0.5  # a size, a length, a dtype, what tensors contain
    DERIVED = 1.0  # computed from several values, or from earlier calls
    POSITION = 3.0  # the position of a window's first key, tiles of keys and rows, unused cells
    SETTING = 4.0  # a setting of the judge that the caller of a kernel does not see


Value = bool | int | str
Read = dict[str, Any]  # from a feature's name to its value; None and False mean that there is no value
Features = Mapping[str, Value]  # from a feature's name to its value, without conditions that are false
Bits = np.ndarray[Any, np.dtype[Any]]
Test = tuple[str, Value, float]  # an operator, a value, and the cost in bits, besides that of the feature

DTYPE_NAMES = {dtype_of(name): name for name in DTYPES}
# Fields of a case that are no features. Fields with lengths become features of the batch and of each request.
NO_FEATURES = ("interface", "arithmetic", "values", "seed", "page_seed", "path", "number", "time")
LENGTHS = ("kv_lens", "q_lens", "prefix_lens", "lens", "rows")
# A right case with one of these parameter values shows no condition: the value can hide an error.
HIDING = ("bmm1_size=", "bmm2_size=", "contents=", "pages=", "sinks=some", "skip_softmax=")
SHOWING = frozenset(("None", "random", "counted"))  # contents with which right results show conditions
SMALL_SCALE = 0.001
LOADED_COLUMNS = 4  # int32 columns in the widest load of a GPU's thread, which has 16 bytes
NEGATION_BITS = 2.5
THRESHOLD_BITS = 2.5  # at most
MOST_THRESHOLDS, FEW = 12, 16
UNEVEN = 0.01  # bits of a least number that is not the first above a power of 2
DIVISORS = (4, 16, 32, 64, 128, 256)  # sizes of the blocks into which kernels divide what a number counts
RELATION_BITS = 2.5  # of a test that compares a number with another number
DIVISION_BITS = 3.0  # of a test that compares a number with the multiples of one of `DIVISORS`


def _rest(column: Bits, divisor: Any) -> Bits:
    return np.remainder(column, np.where(np.greater(divisor, 0), divisor, np.nan))


# Each operator on an array of values. A missing value meets no test except "is not".
OPERATORS: dict[str, Callable[[Bits, Any], Bits]] = {
    "is": lambda column, value: column,
    "is not": lambda column, value: ~column,
    "==": np.equal,
    "!=": lambda column, value: (column != value) & (column != ""),
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
    "differs": lambda column, value: (column < value) | (column > value),
    "multiple": lambda column, value: (column > 0) & (_rest(column, value) == 0),
    "no multiple": lambda column, value: _rest(column, value) > 0,
    "after multiple": lambda column, value: (column > value) & (_rest(column, value) == 1),
    "no power": lambda column, value: (column > value) & (np.frexp(column)[0] != 1 / value),
}
REMAINDERS = ("multiple", "no multiple", "after multiple")
RELATIONS = {  # of a number to another number, or to a divisor: the test as a formula and in words
    ">": ("{} > {}", "{} is larger than {}"),
    "<": ("{} < {}", "{} is smaller than {}"),
    "==": ("{} == {}", "{} is equal to {}"),
    "differs": ("{} != {}", "{} differs from {}"),
    "multiple": ("{} % {} == 0", "{} is a multiple of {}"),
    "no multiple": ("{} % {} > 0", "{} is no multiple of {}"),
    "after multiple": ("{} % {} == 1", "{} is 1 more than a multiple of {}"),
    "no power": ("{} is no power of {}", "{} is no power of {}"),
}
_ALTERNATIVES = re.compile(r"\{([^}]*)\|([^}]*)\}")


@dataclass(frozen=True)
class Condition:
    """A feature that is true or false. Its text has the words for both, {true|false}, in braces: `a window is {|not }set`."""

    text: str  # words that can follow "wherever"
    cost: Cost = Cost.ARGUMENT

    def phrase(self, operator: str, value: Value) -> str:
        return _ALTERNATIVES.sub(lambda found: found[1 if operator == "is" else 2], self.text)

    def column(self, values: Sequence[Value | None]) -> Bits:
        """Convert this feature's values, one for each request or result (None: it has no value), to an array [units]."""
        return np.array(values, dtype=bool)

    def tests(self, column: Bits) -> Iterator[Test]:
        """Yield (operator, value, cost in bits) of each test of this feature that a failure rule may use. Rules with cheap
        tests are preferred. `column` has the feature's values for all units (requests or results).
        """
        yield "is", True, 0.0
        yield "is not", True, NEGATION_BITS * (1 if self.cost == Cost.ARGUMENT else 2)


@dataclass(frozen=True)
class Number:
    """A feature that is a number. In its text, "{}" stands for the number. Numbers are compared with each other if what they
    count (`counts`) has a word in common. `several` is the text for the test ">= 2": by default, "{}" in "has {}" is replaced.

    If `is_divided`, kernels divide what is counted into blocks of a power of 2: 40 and 100 are separated by ">= 65", not by
    ">= 100". If `is_divisor`, other numbers are compared with its multiples.
    """

    text: str
    cost: Cost = Cost.ARGUMENT
    counts: str = ""
    several: str = ""
    is_divided: bool = False
    is_divisor: bool = False
    # In a comparison. By default "a request's number of keys" for "a request has {} keys", and "x" for "x is {}".
    noun: str = ""

    def __post_init__(self) -> None:
        owner, has, counted = self.text.partition(" has {} ")
        noun = f"{owner}'s number of {counted}" if has else re.sub(r"( is| are)? \{\}.*", "", self.text)
        object.__setattr__(self, "noun", self.noun or noun)
        object.__setattr__(self, "several", self.several or (self.text.replace("{}", "several") if has else ""))

    def phrase(self, operator: str, value: Value) -> str:
        if operator in RELATIONS and (operator != "==" or isinstance(value, str)):
            return RELATIONS[operator][1].format(self.noun, value)
        if operator == ">=" and value == 2 and self.several:
            return self.several
        words = self.text.format(value) + {">=": " or more", "<=": " or less", "==": ""}[operator]
        return re.sub(r"\b1 (key|query row|page|request)s\b", r"1 \1", words)

    def column(self, values: Sequence[Value | None]) -> Bits:
        return np.array([np.nan if value is None else value for value in values], dtype=float)

    def tests(self, column: Bits) -> Iterator[Test]:
        steps = np.unique(column[~np.isnan(column)]).astype(int).tolist()
        cost = min(math.log2(len(steps)), THRESHOLD_BITS)
        first, last = _spread(steps)
        before = {step: least for least, step in itertools.pairwise(steps)} if self.is_divided else {}
        several = next((step for step in steps if 1 < step <= FEW), 2) if self.several else -1  # from here on: several
        for step in sorted({*first, *last}):
            if step <= FEW or len(steps) <= MOST_THRESHOLDS:
                yield "==", step, cost + NEGATION_BITS / 2
            if step in first and step > steps[0]:
                number = _even(step - 1, before.get(step, step)) + 1
                bits = cost + UNEVEN * ((number - 1) & (number - 2) > 0)
                yield (">=", 2, 0.5) if step == several else (">=", number, bits)
            if step in last and step < steps[-1]:
                yield "<=", step, cost + NEGATION_BITS / 2

    def divisions(self) -> Iterator[tuple[str, int, float]]:
        """Yield (operator, divisor, cost in bits) of each test of a remainder that a failure rule may use."""
        kinds = {*self.counts.split()}
        if "heads" in kinds:
            yield "no power", 2, DIVISION_BITS + self.cost
        if (self.is_divided and self.cost < Cost.POSITION) or kinds & {"heads", "sizes"}:
            bits = DIVISION_BITS + (self.cost if self.is_divided else Cost.DERIVED)
            for operator, divisor in itertools.product(REMAINDERS[: 3 if self.is_divided else 2], DIVISORS):
                yield operator, divisor, bits

    def relations(self, other: "Number") -> Iterator[tuple[str, float]]:
        """Yield (operator, cost in bits) of each comparison with another number that a failure rule may use."""
        if {*self.counts.split()} & {*other.counts.split()}:
            for operator in (">", "<", "==", "differs", *(REMAINDERS if other.is_divisor else ())):
                bits = RELATION_BITS + NEGATION_BITS * (operator == "differs")
                yield operator, bits + max(self.cost, other.cost)


@dataclass(frozen=True)
class Choice:
    """A feature with one of several names as its value, such as a dtype. In words: "wherever <text> is <name>".

    If the names are members of an enum (`kinds`), the value is the member's name in lower case, and the words show the
    member's text up to its first colon.
    """

    text: str
    cost: Cost = Cost.ARGUMENT
    kinds: type[Enum] | None = None
    is_negated: bool = True  # whether the test "is not <name>" is used

    def phrase(self, operator: str, value: Value) -> str:
        kind = None if self.kinds is None else self.kinds.__members__.get(str(value).upper())
        words = str(value) if kind is None else str(kind.value).partition(":")[0]
        words = f"“{words}”" if kind is not None or " " in words else words
        return f"{self.text} {'is' if operator == '==' else 'is not'} {words}"

    def column(self, values: Sequence[Value | None]) -> Bits:
        return np.array(["" if value is None else str(value) for value in values])

    def tests(self, column: Bits) -> Iterator[Test]:
        names = sorted(set(column.tolist()) - {""})
        for name in names:
            yield "==", name, math.log2(len(names))
            if len(names) > 2 and self.is_negated:
                yield "!=", name, math.log2(len(names)) + NEGATION_BITS


CaseFeature = Condition | Number | Choice


def of_any_request(shared: Features, of_requests: Iterable[Features]) -> dict[str, Value]:
    """Return `shared` with the features of requests: conditions that hold for any request, each number's largest value."""
    found = dict(shared)
    for features in of_requests:
        for name, value in features.items():
            found[name] = max(int(value), int(found.get(name, 0))) if type(value) is int else value
    return found


def _even(number: int, least: int) -> int:
    """Return the largest power of 2 up to `number` if it is at least `least`, else `number`. Small numbers stay as they are."""
    power = 1 << max(number.bit_length() - 1, 0)
    return power if number > FEW and power >= least else number


def _spread(steps: list[int]) -> tuple[list[int], list[int]]:
    """Return (values for tests with ">=", values for tests with "<=") from `steps`, the sorted values of a feature. Both are
    all steps, if these are at most `MOST_THRESHOLDS`. Otherwise they are near powers of 2, at which kernels change their code:
    the first step above each power for ">=", and the last step up to each power for "<=".
    """
    if len(steps) <= MOST_THRESHOLDS:
        return steps, steps
    powers = [0, 1, *(2**power for power in range(1, 40))]
    first = {next((step for step in steps if step > power), steps[-1]) for power in powers}
    last = {next((step for step in reversed(steps) if step <= power), steps[0]) for power in powers}
    return sorted({steps[0], *first}), sorted({steps[-1], *last})
