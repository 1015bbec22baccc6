"""Define `lab dry-run`, which shows kernels, grids and bytes of forward passes for a GPU that this machine does not have."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lab.commands.options import Json, Markdown, list_option, refuse, refusing_errors, refusing_recordings
from lab.exit_status import ExitStatus


def dry_run(
    gpu: Annotated[
        Literal["b200", "b300", "rtx-pro-6000", "spark", "h200", "a100"],
        typer.Option(help="the GPU; it need not be here"),
    ],
    only: Annotated[
        list[str] | None,
        list_option(
            str, "passes whose names hold one of these texts, such as decode or M2; all if left out", "TEXT,..."
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        list_option(str, "scenarios to show instead of the default ones and of the modes of M1 and M2", "NAME,..."),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="a run of `lab bench --lab-clock cupti` on the GPU: did it run the same kernels?"),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Show which kernel a GPU would run for each forward pass, its grid, bytes and least possible time, or why no kernel runs.

    No kernel is run, and the GPU need not be here. Exit status: 1 if a forward pass ran other kernels in the run of --recorded;
    125 if no forward pass could be compared.

    The passes are the default scenarios of `lab bench`, and each forward mode of the judge's checks M1 and M2. For SM100 and
    SM103, FlashInfer's own launcher selects the kernels if FlashInfer and CUDA's nvcc are installed. The launcher is compiled
    once, in a minute.
    """
    from rich.console import Console
    from rich.progress import track

    from lab.dry_run import passes
    from lab.dry_run.report import dry_run_report, profiled_kernels
    from lab.workloads.scenarios import timed_scenario as scenario_named

    with refusing_errors():
        named = [(name, scenario_named(name)) for name in scenario] if scenario else [*passes.surveyed_passes()]
    chosen = [(name, case) for name, case in named if not only or any(text in name for text in only)]
    with refusing_recordings("not compared"):
        profiled = None if recorded is None else profiled_kernels(recorded)
    if not chosen:
        refuse(f"no pass has {' or '.join(only or ())} in its name; there are {', '.join(name for name, _ in named)}")
    errors = Console(stderr=True)
    shown = track(chosen, "passes", console=errors, transient=True, disable=not errors.is_terminal)
    run = passes.dry_run(
        gpu, shown, lambda: typer.echo("FlashInfer's launcher is compiled, which takes a minute", err=True)
    )
    if recorded is not None and run.by_rules_because is not None:
        refuse(f"not compared: no launcher names the kernels: {run.by_rules_because}", ExitStatus.NOT_JUDGED)
    report = dry_run_report(run, profiled)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)
