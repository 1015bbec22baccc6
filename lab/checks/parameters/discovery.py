"""Find out which values of the ranges a function accepts, by single calls of tiny cases, if it declines most cases."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lab.checks.parameters.attention import case_within, fields_of, values_of
from lab.checks.parameters.covering import Point
from lab.checks.run.verdicts import Judged, Outcome
from lab.ranges import OPTIONS, Ranges
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface

if TYPE_CHECKING:
    from lab.checks.run.verdicts import CaseVerdict

DISCOVERY = "discovery"  # the key of the check that calls once
MOST_TRIES = 400  # calls in search of one that is taken
AT_ONCE = 16  # of them

Submit = Callable[[str, Any], Callable[[], Judged]]


def is_mostly_declined(verdicts: Sequence["CaseVerdict"]) -> bool:
    """Return True if more than half of a function's cases were declined."""
    return 2 * sum(verdict.outcome is Outcome.DECLINED for verdict in verdicts) > len(verdicts)


def discover(submit: Submit, interface: Interface, ranges: Ranges, taken: Sequence[Any] = ()) -> Ranges | None:
    """Return the ranges that a function accepts. Each value is tried in a case that the function accepts with another value of
    the same field. A value with which the call fails is not refused: it stays, so that the failure is judged.

    Args:
        submit: submits one case of a check for judging, such as `lab.checks.run.workers.Workers.submit`.
        interface, ranges: the function, and the ranges to narrow.
        taken: cases that the function accepted earlier.

    Returns:
        The narrowed ranges; None if no case is accepted, or if all values of all fields are accepted.
    """
    outcomes_of = partial(_outcomes, submit, interface, ranges)
    base = _first_taken(outcomes_of, interface, ranges, taken)
    if base is None:
        return None
    tried = [(name, value) for name in base for value in getattr(ranges, name) if value != base[name]]
    outcomes = outcomes_of([{**base, name: value} for name, value in tried])
    # What fails is not refused: it is judged, so that it shows.
    takes = {each for each, outcome in zip(tried, outcomes, strict=True) if outcome is not Outcome.DECLINED}
    takes |= set(base.items())
    narrowed: Point = {name: tuple(value for value in getattr(ranges, name) if (name, value) in takes) for name in base}
    found = replace(ranges, **narrowed)
    return None if found == ranges else found


def _first_taken(
    outcomes_of: Callable[[Sequence[Point]], list[Outcome]], interface: Interface, ranges: Ranges, taken: Sequence[Any]
) -> Point | None:
    """Return the values of a call that is accepted: of a case in `taken`, or the most usual ones; None if none is."""
    names = fields_of(interface)
    known = (values_of(case) for case in taken if isinstance(case, AttentionCase))
    within = (each for each in known if all(each[name] in getattr(ranges, name) for name in names))
    ordered = [sorted(getattr(ranges, name), key=partial(_place, OPTIONS[name].likely)) for name in names]
    # The likely values of all fields first, then those with one less likely, two, and so on.
    places = sorted(itertools.product(*(range(len(values)) for values in ordered)), key=sum)
    likely = (
        {name: values[place] for name, values, place in zip(names, ordered, each, strict=True)}
        for each in places[:MOST_TRIES]
    )
    tries = itertools.chain(itertools.islice(within, 1), likely)
    while several := list(itertools.islice(tries, AT_ONCE)):
        for values, outcome in zip(several, outcomes_of(several), strict=True):
            if outcome is Outcome.RIGHT:
                return values
    return None


def _place(likely: tuple[Any, ...], value: Any) -> int:
    return likely.index(value) if value in likely else len(likely)


def _outcomes(submit: Submit, interface: Interface, ranges: Ranges, several: Sequence[Point]) -> list[Outcome]:
    """Judge a call with two short requests for each point (a value for each field), and return the outcomes."""
    waiting = []
    for values in several:
        q_len, window_left = values["q_lens"], 16 if values.get("windows") else -1
        kv_lens = (max(q_len, 40), max(q_len, 9))
        case = case_within(ranges, interface, values, kv_lens, (q_len, q_len), window_left=window_left)
        waiting.append(submit(DISCOVERY, case))
    return [wait().outcome for wait in waiting]
