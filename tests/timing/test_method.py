"""A method says what it does, and what no clock can do is refused."""

import pytest

from lab.timing import L2, Clock, Method, method_named
from lab.timing.method import METHODS


@pytest.mark.parametrize(
    ("clock", "l2", "expected"),
    [
        ("graph", "cold", Method(Clock.GRAPH, L2.COLD_ROTATION)),
        ("graph", "warm", Method(Clock.GRAPH, L2.WARM)),
        ("cupti", "cold", Method(Clock.CUPTI, L2.COLD_FLUSH)),
        ("cupti", "warm", Method(Clock.CUPTI, L2.WARM)),
        ("events", "cold", Method(Clock.EVENTS, L2.COLD_FLUSH)),
    ],
)
def test_two_words_name_a_method(clock: str, l2: str, expected: Method) -> None:
    assert method_named(clock, l2) == expected


@pytest.mark.parametrize(
    ("clock", "l2", "message"),
    [("wall", "cold", "no clock is called 'wall'; there are graph, cupti, events"), ("graph", "hot", "not 'hot'")],
)
def test_an_unknown_word_is_refused(clock: str, l2: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_named(clock, l2)


def test_a_flush_inside_a_timed_graph_is_refused() -> None:
    with pytest.raises(ValueError, match="a flush between them would be timed too"):
        Method(Clock.GRAPH, L2.COLD_FLUSH)


def test_buffers_that_would_not_take_turns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"take L2\.COLD_FLUSH"):
        Method(Clock.EVENTS, L2.COLD_ROTATION)


def test_every_method_has_a_sentence_of_its_own() -> None:
    sentences = {str(method) for method in METHODS}
    assert len(sentences) == len(METHODS)
    assert all(("L2 warm" in str(method)) == (method.l2 is L2.WARM) for method in METHODS)
