"""Another seed gives other cases, and the usual one those of each run."""

from dataclasses import replace
from typing import Any

import pytest

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Level, Ranges, judge
from lab.checks.properties import checks
from tests.checks.small import SMALL

NAMES = (AttentionCall.DECODE.value,)


def reprs(seed: int | None, **how: Any) -> list[str]:
    settings = {"only": "K1", "ranges": SMALL, "functions": NAMES, "device": "cpu", "drawn": 3, "seed": seed}
    return [repr(verdict.case) for verdict in judge(references, **settings | how).verdicts]


def test_a_seed_draws_other_cases_and_the_same_each_time() -> None:
    usual, other = reprs(None), reprs(5)
    assert usual == reprs(0)
    assert other == reprs(5) == reprs(None, ranges=replace(SMALL, seed=5))
    assert not set(usual[:8]) & set(other[:8])
    assert usual[-3:] != other[-3:]


@pytest.mark.parametrize("key", ["K18", "K3", "K14"])
def test_a_seed_reaches_the_fixed_cases(key: str) -> None:
    check = next(check for check in checks() if check.key == key)

    def cases(ranges: Ranges) -> list[str]:
        return [repr(case) for case in check.cases(AttentionCall.DECODE, ranges, Level.FULL)]

    usual, same, other = (cases(replace(SMALL, seed=seed)) for seed in (0, 0, 1))
    assert usual == same
    assert not {*usual} & {*other}


def test_a_seed_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="seed=-1 must be a whole number of at least 0"):
        judge(references, seed=-1)
