"""When a statement holds at a point, when it does not, and when it is undecided."""

import pytest

from lab.timing.statistics import Times
from studies.changes.verdicts import (
    Answer,
    Aspect,
    Observation,
    Standing,
    compared,
    microseconds,
    stated,
)

HOLDS, FAILS, UNDECIDED = Standing


def test_an_observation_has_the_figures_of_its_clocks() -> None:
    clocks = {"profiled": (Times(1234.5, 1.0), Times(80.0, 1.0)), "not": (Times(8.9), Times(10.0))}
    found = compared("MHA", "8 requests", clocks)
    assert found.figures == "1,234 → 80.0 µs profiled, 8.90 → 10.0 µs not"
    assert (found.saved_us, found.ratio) == (1154.5, 1234.5 / 80)
    assert compared("MHA", "8 requests", {"": clocks["not"]}).figures == "8.90 → 10.0 µs"
    assert [microseconds(value) for value in (-0.126, 0.0)] == ["-0.13", "0"]
    assert stated("MHA", "here", False, "3 launches") == Observation("MHA", "here", FAILS, "3 launches")


def test_a_clock_that_contradicts_beside_one_that_cannot_tell_is_a_contradiction() -> None:
    clocks = {name: (Times(100.0, 1.0), Times(after, 1.0)) for name, after in (("one", 100.0), ("other", 120.0))}
    assert compared("MHA", "here", clocks).standing is FAILS


def aspect(standings: str, of_claim: bool = True) -> Aspect:
    by_letter = {"h": HOLDS, "f": FAILS, "u": UNDECIDED}
    found = tuple(Observation("MHA", str(place), by_letter[each], "") for place, each in enumerate(standings))
    return Aspect("It is shorter.", found, of_claim)


@pytest.mark.parametrize(
    ("standings", "verdict"),
    [
        ("", "not recorded"),
        ("h", "holds at the one point"),
        ("hhh", "holds at all 3 points"),
        ("ff", "does not hold at any of 2 points"),
        ("uuu", "is undecided at all 3 points"),
        ("hfuh", "holds at 2 of 4 points, does not hold at 1, is undecided at 1"),
        ("fu", "does not hold at 1 of 2 points, is undecided at 1"),
    ],
)
def test_the_verdict_of_a_statement(standings: str, verdict: str) -> None:
    assert aspect(standings).verdict == verdict


@pytest.mark.parametrize(
    ("claimed", "verdict"),
    [
        (("hh", "h"), "holds"),
        (("hh", "u"), "holds in part"),
        (("f", "h"), "holds in part"),
        (("f", "u"), "does not hold"),
        (("u",), "is undecided"),
        (("", ""), "not recorded"),
    ],
)
def test_the_verdict_of_a_change_counts_what_it_claims(claimed: tuple[str, ...], verdict: str) -> None:
    aside = aspect("hfu", of_claim=False)
    assert Answer((*map(aspect, claimed), aside), "").verdict == verdict
