"""Values, forms of arguments and pairs of them that no other check has: whatever the calls document, in covering arrays.

A kernel branches on its arguments, and a defect lies where two of them meet: a window over split tables, a mask beside sinks, a
group of 12 in a batch of 257. Here the domain of each call is declared once (`lab.checks.parameters`). The smoke level judges each
value by itself, all else plain; the full level judges every pair of values too, and stated triples. A call without rows or
without keys counts for the value that makes it so, and not for what else it was given.

A kernel that declines one value or pair of a case has declined all others in it. So the full level begins with each value by
itself. What is declined there is tried beside every other value, and then the values that the kernel takes come together. Pairs
that no judged case has are tried again in smaller cases, and then each by itself.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from lab.checks.check import Check, Level, first_line
from lab.checks.parameters.combination import Combination
from lab.checks.parameters.coverage import retried, tuples_by_outcome
from lab.checks.parameters.covering import Point
from lab.checks.parameters.drawing import made_small, random_points
from lab.checks.parameters.subjects import SUBJECTS
from lab.checks.report import CaseVerdict
from lab.checks.space import SEEDS, Space
from lab.checks.trial import Trial
from lab.workloads.interfaces import Interface

# Axes of a point that are not plain, in turn; None: all. The fewer, the more likely the kernel takes it.
CHOSEN = (None, None, 6, 4)


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[Combination]:
    domain = SUBJECTS[interface].domain(space)
    points = list(domain.alone())
    yield from _numbered(interface, space, points)
    if level is Level.FULL:
        covered = {each for point in points for each in domain.tuples_of(point)}
        goals = (goal for goal in domain.tuples() if goal not in covered)
        yield from _numbered(interface, space, domain.covering(space.seed, goals))


def _numbered(interface: Interface, space: Space, points: Iterable[Point]) -> Iterator[Combination]:
    """Yield points as cases, each with a seed of its own."""
    for seed, point in enumerate(points, SEEDS * space.seed):
        yield Combination(interface, point, seed)


def _beside(interface: Interface, space: Space, verdicts: Sequence[CaseVerdict]) -> Iterator[Combination]:
    """Yield an array of the pairs of each value that was declined by itself with all that were judged.

    Where nothing was judged of some axis, yield one of all values.
    """
    domain = SUBJECTS[interface].domain(space)
    judged, declined = tuples_by_outcome(domain, verdicts)
    if (taken := domain.only(judged)) is None:
        yield from _unlike(interface, space, domain.covering(space.seed), verdicts)
        return
    for axis, values in domain.axes.items():
        for value in values:
            if ((axis, value),) in declined - judged:
                wider = replace(taken, axes={**taken.axes, axis: (*taken.axes[axis], value)})
                pairs = (goal for goal in wider.tuples() if len(goal) == 2 and (axis, value) in goal)
                yield from _unlike(interface, space, wider.covering(space.seed, pairs), verdicts)


def _again(
    chosen: int | None, interface: Interface, space: Space, verdicts: Sequence[CaseVerdict]
) -> Iterator[Combination]:
    """Yield an array of the pairs and triples of judged values that no judged case has.

    Args:
        chosen: axes of a point that are not plain; None: all.
    """
    if (found := retried(SUBJECTS[interface].domain(space), verdicts)) is not None:
        taken, goals = found
        yield from _unlike(interface, space, taken.covering(space.seed, goals, chosen), verdicts)


def _alone(interface: Interface, space: Space, verdicts: Sequence[CaseVerdict]) -> Iterator[Combination]:
    """Yield each of them with all else plain; no triple of a pair that is among them, which declines alone too."""
    if (found := retried(SUBJECTS[interface].domain(space), verdicts)) is not None:
        taken, goals = found
        left = set(goals)
        least = (goal for goal in goals if len(goal) == 2 or not left & set(itertools.combinations(goal, 2)))
        points = (taken.completed(dict(goal)) for goal in least)
        yield from _unlike(interface, space, (point for point in points if point is not None), verdicts)


def _unlike(
    interface: Interface, space: Space, points: Iterable[Point], verdicts: Sequence[CaseVerdict]
) -> Iterator[Combination]:
    """Yield points as cases, each once and none that has a verdict."""
    before = {repr(replace(verdict.case, seed=0)) for verdict in verdicts}
    for case in _numbered(interface, space, points):
        if repr(replace(case, seed=0)) not in before:
            before.add(repr(replace(case, seed=0)))
            yield case


def _judge(trial: Trial) -> None:
    SUBJECTS[trial.case.interface].judge(trial)


CHECK = Check(
    "K18",
    "combinations",
    first_line(__doc__),
    _cases,
    _judge,
    interfaces=tuple(SUBJECTS),
    more=(_beside, *(partial(_again, chosen) for chosen in CHOSEN), _alone),
    draw=random_points,
    shrink=made_small,
)
