"""The sample of mutations: drawn by its seed, without annotations, and each a program that differs."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="mutations are made by cosmic-ray: pip install '.[dev]'")

from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests import mutation
from tests.equal_mutations import EQUAL
from tests.mutation import ROOMS, ROOT, SEEN, SLOW, SURVIVED, Copy, Mutation, mutable_places, sample, summary

SOURCE = '''"""A limit of 7."""


def exceeds(number: int | None, *, limit: int = 3) -> bool | None:
    return None if number is None else number > limit and not number == 4
'''


def texts(place: list[tuple[str, int]]) -> set[str]:
    return {name.removeprefix("core/").partition("_")[0] for name, _ in place}


def test_operators_and_constants_are_mutated_and_annotations_are_not() -> None:
    found = [texts(place) for place in mutable_places(SOURCE)]
    assert found[0] == {"NumberReplacer"}  # the default, after the annotation
    assert found.count({"ReplaceComparisonOperator"}) == 3
    assert {"ReplaceAndWithOr"} in found
    assert not any("ReplaceBinaryOperator" in names for names in found)


def test_a_mutation_is_made_at_its_own_place() -> None:
    """A `*` between parameters is none, but cosmic-ray counts it."""
    found = [each for place in mutable_places("def f(*, a):\n    return a * b\n") for each in place]
    changed = {mutate_code("def f(*, a):\n    return a * b\n", get_operator(name)(), number) for name, number in found}
    assert "def f(*, a):\n    return a + b\n" in changed
    assert all(text.startswith("def f(*, a):\n    return a ") for text in changed)


def test_equality_is_not_exchanged_for_identity() -> None:
    names = {name for place in mutable_places("a = b == 3\n") for name, _ in place}
    assert "core/ReplaceComparisonOperator_Eq_NotEq" in names
    assert not any("Is" in name for name in names)
    names = {name for place in mutable_places("a = b is None\n") for name, _ in place}
    assert names == {"core/ReplaceComparisonOperator_Is_IsNot"}


def test_a_seed_draws_the_same_mutations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROOMS, "one", mutation.Room(("lab/shrinking.py", "lab/files.py"), ()))
    drawn = sample("one", 5, seed=1)
    assert drawn == sample("one", 5, seed=1)
    assert drawn != sample("one", 5, seed=2)
    for each in drawn:
        original = (ROOT / each.path).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(each.text)) != ast.dump(ast.parse(original))
        assert original.splitlines()[each.line - 1].strip() == each.before != each.after


def test_every_room_has_sources_and_tests() -> None:
    for room in ROOMS.values():
        for pattern in (*room.sources, *room.tests):
            assert list(ROOT.glob(pattern)), pattern


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Copy]:
    def made(body: str) -> Copy:
        checkout, folder = tmp_path / "checkout", tmp_path / "copy"
        for each in (checkout / "room", checkout / "tests", folder):
            each.mkdir(parents=True)
        (checkout / "room" / "one.py").write_text("value = 1\n")
        (checkout / "tests" / "test_one.py").write_text(f"from room.one import value\n\n\ndef test_it():\n    {body}\n")
        (checkout / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs one\n")
        monkeypatch.setattr(mutation, "ROOT", checkout)
        monkeypatch.setattr(mutation, "COPIED", ("room", "tests", "pytest.ini"))
        monkeypatch.setitem(ROOMS, "one", mutation.Room(("room/*.py",), ("tests/test_*.py",)))
        return Copy(folder)

    return made


@pytest.mark.parametrize(
    ("body", "limit_s", "outcome"),
    [("assert value == 1", 100, SEEN), ("pass", 100, SURVIVED), ("import time; time.sleep(99)", 1, SLOW)],
)
def test_the_rooms_tests_decide(body: str, limit_s: float, outcome: str, copied: Callable[[str], Copy]) -> None:
    copy = copied(body)
    if outcome is SEEN:
        copy.check("one")  # which does not end a room whose tests pass
    (drawn,) = sample("one", 9, seed=1)
    assert copy.outcome(drawn, limit_s) == outcome
    assert (copy.folder / "room" / "one.py").read_text() == "value = 1\n"


def test_a_room_whose_tests_fail_without_a_mutation_ends_it(copied: Callable[[str], Copy]) -> None:
    with pytest.raises(SystemExit, match=r"the tests of one fail without a mutation:\n(.*\n)+.*assert 1 == 2"):
        copied("assert value == 2").check("one")


def test_what_is_equal_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [Mutation("calls", "a.py", "", 1, "was", after) for after in ("b", "c", "d", "e")]
    monkeypatch.setitem(EQUAL, made[0].key, "nothing reads it")
    known = {"a.py | was | c": SEEN, "a.py | was | d": SURVIVED}
    assert list(summary(made, known)) == [
        "calls: 1 equal, 1 seen, 1 survived, 1 not run",
        "1 of 2 mutations that change something are seen (50%)",
    ]


def test_equal_mutations_are_of_lines_that_are_there() -> None:
    gone = [
        key for key in EQUAL if key[1] not in map(str.strip, (ROOT / key[0]).read_text(encoding="utf-8").splitlines())
    ]
    assert not gone
