"""Damage to files and texts: what a disk, a hurried editor or an attacker leaves."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

# A terminal would execute it, Markdown and a page would take it for their own, and not every encoding has it.
HOSTILE = "\x1b]0;owned\x07\x1b[2J<script>alert(1)</script> | [a](javascript:1) `x\n# y \ud800\udfff\x9b31m é [red]"
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "x", HOSTILE, [], [None], {}, {"": None}, [[]],
)  # fmt: skip


def damaged_bytes(content: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield a file's content cut, overwritten, in another encoding, nested too deep, and of another kind."""
    yield from (b"", b"\0", b"\xff\xfe", b"null", b"[]", b"{}", b"NaN", b"1e999", b'"x"')
    yield from (b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000)
    yield from (content[: len(content) // 2], content + content, content.decode().encode("utf-16"))
    for _ in range(8):
        where = dice.randrange(len(content))
        yield content[:where] + bytes(dice.randrange(256) for _ in range(4)) + content[where + 4 :]


def damaged_records(record: Any, dice: random.Random, count: int) -> Iterator[bytes]:
    yield from (json.dumps(each).encode() for each in damaged_values(record, dice, count))


def damaged_values(record: Any, dice: random.Random, count: int) -> Iterator[Any]:
    """Yield `count` copies of a record, each with one value replaced, left out or renamed; half of these values are shallow."""
    places = sorted(_places(record), key=len)
    tops = [place for place in places if len(place) <= 2]
    for number in range(count):
        place = dice.choice(tops if number % 2 else places)
        yield _changed(copy.deepcopy(record), place, dice)


def _changed(value: Any, place: tuple[Any, ...], dice: random.Random) -> Any:
    """Return a value with the part at a place replaced or renamed. Its lists and dictionaries are changed in place."""
    if not place:
        return dice.choice(VALUES)
    key, *rest = place
    if isinstance(value, dict) and not rest and not dice.randrange(6):
        value[HOSTILE] = value.pop(key)
        return value
    part = _changed(value[key], tuple(rest), dice)
    if isinstance(value, tuple):
        return (*value[:key], part, *value[key + 1 :])
    value[key] = part
    return value


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list | tuple) else ()
    )
    for key, each in items:
        yield from _places(each, (*place, key))
