"""The page: one HTML file that needs nothing else, and that its own policy keeps from asking for anything.

Tables are DataTables', which the package itables ships in one file; it goes into the page, so that they are sorted and filtered
offline. Without scripts they are plain tables, all rows there.
"""

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lab.reports.html import judged, timings
from lab.reports.html.experiments import experiment_of
from lab.reports.html.folder import Folder, Record
from lab.reports.html.markdown import finding_html, markdown_html
from lab.reports.html.pictures import Picture, picture_of
from lab.reports.html.tables import Cell, Table, make_table, words
from lab.reports.pictures.judging import verdict_figure
from lab.reports.recorded import RecordedRun
from lab.reports.timings import FACTS, figures

OVERVIEW = "experiments.md"  # of `python -m lab.reports.changes`


@dataclass(frozen=True)
class Run:
    """A benchmark run's part of the page; `methods` says what each label of "timed by" stands for."""

    name: str
    recorded_at: str | None
    methods: dict[str, str]
    ceilings: Table
    tables: list[Table]
    pictures: list[Picture]


def html_report(folder: Folder) -> str:
    """The page of a folder, as HTML."""
    environment = Environment(
        loader=PackageLoader("lab.reports.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cited = judged.cited_findings(folder.judged)
    return environment.get_template("page.html.j2").render(
        title=_title(folder),
        folder=folder.path.name,
        environments=_environments(folder),
        judge_tables=[
            table
            for table in (
                judged.summary_table(folder.judged),
                judged.verdict_table(folder.judged),
                judged.fault_table(folder.judged),
                judged.decline_table(folder.judged),
                judged.survey_table(folder.surveys),
            )
            if table.rows
        ],
        verdicts=_verdicts(folder.judged),
        findings=[(finding, Markup(finding_html(finding, folder.path))) for finding in cited],
        overview=_overview(folder),
        notes=[(path.name, Markup(markdown_html(path.read_text(encoding="utf-8")))) for path in _notes(folder)],
        runs=[_run(run, f"run-{place}") for place, run in enumerate(folder.runs)],
        experiments=[experiment_of(record) for record in folder.experiments],
        unread=folder.unread,
        style=Markup(_own("page.css")),
        sorting=Markup(_own("tables.js")),
        library_uri=f"data:text/javascript;charset=utf-8;base64,{b64encode(_library('dt_bundle.js').encode()).decode()}",
        library_style=Markup(_library("dt_bundle.css")),
    )


def _notes(folder: Folder) -> list[Path]:
    """The folder's own texts, in which its numbers are read; those beneath it are made from what the page shows already."""
    return sorted(path for path in folder.path.glob("*.md") if path.name != OVERVIEW)


def _overview(folder: Folder) -> Markup:
    """The experiments' own summary; "" if there is none."""
    path = folder.path / OVERVIEW
    return Markup(markdown_html(path.read_text(encoding="utf-8")) if path.is_file() else "")


def _title(folder: Folder) -> str:
    gpus = dict.fromkeys(environment["gpu"] for _, environment in _measured(folder) if environment.get("gpu"))
    return f"{', '.join(gpus) or 'No GPU recorded'}: attention kernels judged and timed"


def _measured(folder: Folder) -> Iterator[tuple[str, Any]]:
    """Every file's name and environment."""
    for run in folder.runs:
        yield _name(folder, run), run.environment
    records: tuple[Record, ...] = (*folder.judged, *folder.surveys, *folder.experiments)
    for record in records:
        yield record.name, record.environment


def _name(folder: Folder, run: RecordedRun) -> str:
    return run.path.relative_to(folder.path).with_suffix("").as_posix()


def _environments(folder: Folder) -> Table:
    """One row per file: what it was measured on."""
    measured = list(_measured(folder))
    packages = dict.fromkeys(name for _, environment in measured for name in environment.get("packages") or ())
    facts = {**dict(FACTS), **{name: ("packages", name) for name in packages}}

    def column(where: Sequence[str]) -> Callable[[Any], Cell]:
        return lambda file: words(_at(file[1], where))

    columns: dict[str, Callable[[Any], Cell]] = {"file": lambda file: words(file[0])}
    columns |= {heading: column(where) for heading, where in facts.items()}
    return make_table("environments", "What each file was measured on", columns, measured)


def _at(environment: Any, where: Sequence[str]) -> Any:
    """A value by its keys from the outside in; None where it is not recorded."""
    found = environment
    for key in where:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _verdicts(records: Sequence[Record]) -> Picture | None:
    cells = list(judged.verdict_cells(records))
    if not cells:
        return None
    title = "Verdicts by run, function and check; numbers: worst right error in % of its bound; blank: not judged"
    return picture_of(verdict_figure(cells, title), title)


def _run(run: RecordedRun, name: str) -> Run:
    return Run(
        name=run.path.name,
        recorded_at=run.recorded_at,
        methods=timings.methods(run),
        ceilings=timings.ceiling_table(run, name),
        tables=timings.timing_tables(run, name),
        pictures=[picture_of(figure, Path(file).stem.replace("-", " ")) for file, figure in figures(run).items()],
    )


def _own(name: str) -> str:
    return files("lab.reports.html").joinpath(name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    """A file of DataTables, with its extensions, as itables ships it."""
    return files("itables").joinpath("html", name).read_text(encoding="utf-8")
