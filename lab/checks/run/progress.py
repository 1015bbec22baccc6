"""How far a run of the judge is, and the time that it will still take."""

import time
from dataclasses import dataclass

from lab.checks.run.verdicts import CaseVerdict

LEAST_DONE = 5  # cases before the time left is estimated


@dataclass(frozen=True)
class Progress:
    """A verdict, and how far the run is with it.

    Attributes:
        verdict: the last one.
        done: cases judged; those that a wrong drawn case was made smaller by do not count.
        total: cases planned, the drawn ones too.
        seconds_left: about; None while nothing is known of it.
        is_new: the verdict is this run's, and not an earlier one's.
    """

    verdict: CaseVerdict
    done: int
    total: int
    seconds_left: float | None
    is_new: bool = True


class Stopwatch:
    """Estimates the time left from the rate of the verdicts that took any: those of an earlier run took none."""

    def __init__(self) -> None:
        self._start, self._new = time.monotonic(), 0

    def progress(self, verdict: CaseVerdict, done: int, total: int, is_new: bool) -> Progress:
        """Return the progress with one verdict more, of this run or an earlier one."""
        self._new += is_new
        elapsed = time.monotonic() - self._start
        left = elapsed / self._new * (total - done) if self._new >= LEAST_DONE else None
        return Progress(verdict, done, total, left, is_new)
