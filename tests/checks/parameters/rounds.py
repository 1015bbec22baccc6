"""The rounds of check K18 for a kernel whose outcomes are known, so that no call is computed."""

from collections.abc import Callable, Iterable

from lab.calls.problem import AttentionCall
from lab.checks import CaseVerdict, Configuration, Level, Outcome, Ranges
from lab.checks.parameters.covering import Shard
from lab.checks.properties.check import NEARBY_ROUNDS, Scope
from lab.checks.properties.k18_combinations import CHECK
from lab.checks.run.verdicts import Judged
from lab.workloads.interfaces import Interface
from tests.checks.small import SMALL


def verdicts_in_rounds(
    outcome_of: Callable[[Configuration], Outcome],
    level: Level = Level.FULL,
    function: Interface = AttentionCall.DECODE,
    shard: Shard = Shard(),  # noqa: B008 - it is frozen
    ranges: Ranges = SMALL,
) -> list[CaseVerdict]:
    """Return the verdicts that the judge collects on a function: on the first cases, then on those of each round."""
    verdicts = list[CaseVerdict]()

    def add(cases: Iterable[Configuration]) -> None:
        for case in cases:
            outcome = outcome_of(case)
            judged = Judged(outcome, judged=int(outcome is not Outcome.DECLINED))
            verdicts.append(CaseVerdict("a kernel", "K18", function, case, "cpu", judged))

    first = Level.SMOKE if level is Level.FULL else level
    add(CHECK.cases(function, ranges, first, shard if level is first else Shard()))
    for following in (*CHECK.more[level], *([CHECK.nearby] * NEARBY_ROUNDS if level is not Level.QUICK else ())):
        add(list(following(Scope(function, ranges, level, shard), verdicts)))
    return verdicts


def declined_if(condition: Callable[[Configuration], bool]) -> Callable[[Configuration], Outcome]:
    """Return the outcomes of a right kernel that declines some cases."""
    return lambda case: Outcome.DECLINED if condition(case) else Outcome.RIGHT
