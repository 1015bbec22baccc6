"""Rounds of judging: one at once, and another one whenever a file changes."""

import time
from collections.abc import Iterator
from pathlib import Path

POLL_INTERVAL_S = 0.3


def rounds(file: Path | None) -> Iterator[int]:
    """Yield the number of each round: 0 at once, then, if a file is given, the next number each time the file was written."""
    number, seen = 0, _state(file)
    yield number
    while file is not None:
        while (now := _state(file)) == seen or now is None:  # None: an editor may remove the file for a moment
            time.sleep(POLL_INTERVAL_S)
        number, seen = number + 1, now
        yield number


def _state(file: Path | None) -> tuple[int, int] | None:
    """Return the modification time (ns) and size (bytes) of a file; None for no file, or one that is not there."""
    try:
        stat = file.stat() if file is not None else None
    except FileNotFoundError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size)
