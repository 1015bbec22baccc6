"""The judge's progress: a bar on a terminal, one line per minute elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

if TYPE_CHECKING:
    from lab.checks.run.judge_run import Progress as ProgressOfJudge
    from lab.checks.run.verdicts import CaseVerdict

LINE_INTERVAL_S = 60.0


@contextmanager
def shown_progress(console: Console) -> "Iterator[Callable[[ProgressOfJudge], None]]":
    """Yield a function that is called after each verdict, and shows the number of judged cases and the estimated time left."""
    if not console.is_terminal:
        yield _line_printer(console)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, left="")

        def update(progress: "ProgressOfJudge") -> None:
            verdict = progress.verdict
            description = f"{verdict.check} of {verdict.interface.name.lower()}"
            bar.update(
                task, completed=progress.done, total=progress.total, description=description, left=_time_left(progress)
            )
            if _is_fault(verdict) and not verdict.drawn:
                bar.console.print(
                    f"[red]{verdict.check} of {verdict.interface.value} is {verdict.outcome.value}[/red]",
                    highlight=False,
                )

        yield update


def _line_printer(console: Console) -> "Callable[[ProgressOfJudge], None]":
    """Return a function that prints the number of judged cases, at most once in `LINE_INTERVAL_S`."""
    last, faults = time.monotonic(), 0

    def print_line(progress: "ProgressOfJudge") -> None:
        nonlocal last, faults
        faults += _is_fault(progress.verdict)
        if time.monotonic() >= last + LINE_INTERVAL_S:
            last = time.monotonic()
            found = f", {faults} wrong or failed" if faults else ""
            left = f", {_time_left(progress)}" if _time_left(progress) else ""
            console.print(f"{progress.done} of {progress.total} cases judged{found}{left}", highlight=False)

    return print_line


def _time_left(progress: "ProgressOfJudge") -> str:
    """Return the estimated time left in words; "" while it is unknown."""
    if progress.seconds_left is None:
        return ""
    minutes = progress.seconds_left / 60
    return f"about {minutes:.0f} minutes left" if minutes >= 2 else f"about {progress.seconds_left:.0f} seconds left"


def _is_fault(verdict: "CaseVerdict") -> bool:
    """Return True for a wrong or failed case. The import is inside the function, because it loads torch."""
    from lab.checks.run.verdicts import BROKEN

    return verdict.outcome in BROKEN
