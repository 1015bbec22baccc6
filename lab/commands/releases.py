"""`lab releases`: compare reports of the judge by release of a package."""

from pathlib import Path
from typing import Annotated

import typer

from lab.commands.options import Json, Markdown, refusing_recordings


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
    """Show for each finding and release whether it is present, absent or not reachable, and the changes between consecutive
    releases.

    Exit status: 125 if the reports have different settings.
    """
    from lab.reports.releases import releases_report

    with refusing_recordings("not compared"):
        report = releases_report(reports, package, findings)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)
