"""Define `lab invariance`, which shows whether a kernel's output bits depend on factors such as the batch size."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from lab.commands.judge import Functions, InProcess, MostSeconds, NumWorkers, RefusalNames, TimeLimit
from lab.commands.options import (
    Device,
    Implementation,
    Markdown,
    list_option,
    prepare_machine,
    refusing_errors,
    with_options_of_ranges,
)
from lab.commands.progress import shown_progress
from lab.loading import check_source, last_report
from lab.ranges import ranges_of


@with_options_of_ranges
def invariance(
    implementation: Annotated[str | None, Implementation] = None,
    factors: Annotated[list[str] | None, list_option(str, "factors to try; all if left out", "FACTOR,...")] = None,
    require: Annotated[
        list[str] | None,
        list_option(
            str, "factors, such as batch-size,repeated-runs, that may change no bit: else exit with 1", "FACTOR,..."
        ),
    ] = None,
    level: Annotated[
        Literal["smoke", "full"], typer.Option(help="the number of cases: full has four times as many")
    ] = "smoke",
    functions: Functions = None,
    device: Device = None,
    in_process: InProcess = False,
    time_limit_s: TimeLimit = 120.0,
    workers: NumWorkers = 2,
    most_seconds: MostSeconds = None,
    refusals: RefusalNames = None,
    out: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="the report, JSON, which lab judge --case reads; the user's cache keeps the last if left out",
        ),
    ] = None,
    markdown: Markdown = None,
    **narrowed: Any,
) -> None:
    """Show whether the bits of a kernel's outputs depend on the batch size, the position in the batch, the workspace and so on.

    Exit status: 1 if a result is wrong, or if a factor of --require changes a bit or was not tried.
    """
    if implementation is not None:
        with refusing_errors():
            check_source(implementation)
    prepare_machine(device)
    from lab.checks.run.invariance import invariance as find
    from lab.kernels import default_implementation
    from lab.reports.invariance import invariance_report

    name = implementation or default_implementation(device).__name__
    path = out or last_report(name, "invariance")
    with refusing_errors(), shown_progress(Console(stderr=True)) as progress:
        found = find(
            name,
            factors=factors or (),
            require=require or (),
            level=level,
            functions=functions or (),
            device=device,
            isolated=not in_process,
            time_limit_s=time_limit_s,
            workers=workers,
            most_seconds=most_seconds,
            refusals=refusals,
            ranges=ranges_of(narrowed),
            out=path,
            progress=progress,
        )
    report = invariance_report(found)
    report.show(None if path is None else str(path), markdown)
    raise typer.Exit(report.exit_status)
