"""A method says what it does, and what no clock can do is refused."""

from collections.abc import Callable

import pytest

from lab.timing import L2, Clock, Method, method_named
from lab.timing.method import METHODS


@pytest.mark.parametrize("clock", Clock)
def test_two_words_name_a_method(clock: Clock) -> None:
    assert method_named(clock.value, "warm") == Method(clock, L2.WARM)
    cold = L2.COLD_ROTATION if clock is Clock.GRAPH else L2.COLD_FLUSH
    assert method_named(clock.value, "cold") == Method(clock, cold)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: method_named("wall", "cold"), "no clock is called 'wall'; there are graph, cupti, events"),
        (lambda: method_named("graph", "hot"), "not 'hot'"),
        (lambda: Method(Clock.GRAPH, L2.COLD_FLUSH), "a flush between them would be timed too"),
        (lambda: Method(Clock.EVENTS, L2.COLD_ROTATION), r"take L2\.COLD_FLUSH"),
    ],
)
def test_what_no_clock_can_do_is_refused(refused: Callable[[], Method], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()


def test_every_method_has_a_sentence_of_its_own() -> None:
    sentences = {str(method) for method in METHODS}
    assert len(sentences) == len(METHODS)
    assert all(("L2 warm" in str(method)) == (method.l2 is L2.WARM) for method in METHODS)
