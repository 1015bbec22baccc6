"""Define `lab report` and `lab html`, which show recorded results as tables, plots and an HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import refuse, refuse_unreadable, refusing_recordings


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a JSON file that `lab bench` recorded")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="the folder to write into; that of RUN if left out")
    ] = None,
) -> None:
    """Write tables and plots of a recorded run."""
    refuse_unreadable("no report", run)
    from lab.reports.recorded import read_run
    from lab.reports.timings import NO_PLOTS, can_plot, write_report

    with refusing_recordings("no report"):
        paths = write_report(read_run(run), out or run.parent)
    for path in paths:
        print(path)
    if not can_plot():
        typer.echo(NO_PLOTS, err=True)


def html(
    folder: Annotated[Path, typer.Argument(help="a folder of recorded results, such as results/nvidia-h200")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="the file to write")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page of a folder of recorded results."""
    from lab.extras import require

    if not folder.is_dir():
        refuse(
            f"no report: {folder} is no folder: name the folder of the recorded results, such as results/nvidia-h200"
        )
    require("lab html", "itables", "jinja2", "markdown_it", "matplotlib")
    from lab.files import write_text
    from lab.reports.html.page import html_report
    from lab.reports.recorded_file import read_folder

    with refusing_recordings("no report"):
        page = html_report(folder, read_folder(folder))
    write_text(out, page)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
