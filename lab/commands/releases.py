"""`lab releases`: line reports of the judge up by release of a package."""

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import Json, Markdown, refuse
from lab.exit_status import ExitStatus


def releases(
    reports: Annotated[
        list[Path], typer.Argument(help="reports of the judge, the oldest release first; a release may have several")
    ],
    package: Annotated[str, typer.Option(help="the package whose version is the release")] = "flashinfer-python",
    findings: Annotated[
        Path | None,
        typer.Option(help="a page of numbered findings, each of which gets a row", exists=True, dir_okay=False),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Show which finding is present, absent or not reachable in which release, and what changed from each to the next.

    Exit status: 125 if the reports were not judged alike.
    """
    from lab.checks.recording import ReportError
    from lab.reports.comparison import NotComparableError
    from lab.reports.recorded import RecordedFileError
    from lab.reports.releases import releases_report

    try:
        report = releases_report(reports, package, findings)
    except (RecordedFileError, ReportError, NotComparableError) as error:
        is_comparison = isinstance(error, NotComparableError)
        refuse(f"not compared: {error}", ExitStatus.NOT_JUDGED if is_comparison else ExitStatus.MISUSED)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)
