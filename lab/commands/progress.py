"""Show the progress of the judge: a bar on a terminal, otherwise one line per minute."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

LINE_INTERVAL_S = 60.0


@contextmanager
def shown_progress(console: Console) -> Iterator[Callable[[Any], None]]:
    from lab.checks.run.verdicts import BROKEN

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    left = TextColumn("{task.fields[left]}")
    with Progress(*columns, left, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, left="")
        last, faults = time.monotonic(), 0

        def update(progress: Any) -> None:
            nonlocal last, faults
            verdict, left = progress.verdict, ""
            if (seconds := progress.seconds_left) is not None:
                left = (
                    f"about {seconds:.0f} seconds left" if seconds < 120 else f"about {seconds / 60:.0f} minutes left"
                )
            is_fault, current = verdict.outcome in BROKEN, f"{verdict.check} of {verdict.interface.name.lower()}"
            faults += is_fault
            if console.is_terminal:
                bar.update(task, completed=progress.done, total=progress.total, description=current, left=left)
                if is_fault and not verdict.drawn:
                    fault = f"{verdict.check} of {verdict.interface.value} is {verdict.outcome.value}"
                    console.print(f"[red]{fault}[/red]", highlight=False)
            elif time.monotonic() >= last + LINE_INTERVAL_S:
                last = time.monotonic()
                found = f"{faults} wrong or failed" if faults else ""
                line = (f"{progress.done} of {progress.total} cases judged", found, left)
                console.print(", ".join(filter(None, line)), highlight=False)

        yield update
