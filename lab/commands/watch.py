"""Rounds of judging, one whenever a file changes."""

import time
from collections.abc import Iterator
from pathlib import Path

LOOK_EVERY_S = 0.3


def rounds(file: Path | None) -> Iterator[int]:
    """Yield a number at once and, if a file is given, another each time that it has been written, for ever."""
    number, seen = 0, _state(file)
    yield number
    while file is not None:
        while (now := _state(file)) == seen or now is None:  # an editor may remove it for a moment
            time.sleep(LOOK_EVERY_S)
        number, seen = number + 1, now
        yield number


def _state(file: Path | None) -> tuple[int, int] | None:
    try:
        stat = file.stat() if file is not None else None
    except FileNotFoundError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size)
