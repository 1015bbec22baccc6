"""Values, forms of arguments and pairs of them that no other check has: whatever the calls document, in covering arrays.

A kernel branches on its arguments, and a defect lies where two of them meet: a window over split tables, a mask beside sinks, a
group of 12 in a batch of 257. Here the domain of each call is declared once (`lab.checks.domain`). The smoke level judges each
value by itself, all else plain; the full level judges every pair of values too, and stated triples.
"""

from collections.abc import Iterator

from lab.checks.check import Check, Level, first_line
from lab.checks.domain.combination import Combination
from lab.checks.domain.subjects import SUBJECTS
from lab.checks.space import Space
from lab.checks.trial import Trial
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[Combination]:
    domain = SUBJECTS[interface].domain(space)
    for seed, point in enumerate(domain.alone()):
        yield Combination(interface, point, seed)
    if level is Level.FULL:
        for seed, point in enumerate(domain.covering()):
            yield Combination(interface, point, seed)


def _judge(trial: Trial) -> None:
    SUBJECTS[trial.case.interface].judge(trial)


CHECK = Check("K18", "combinations", first_line(__doc__), _cases, _judge, interfaces=tuple(SUBJECTS))
