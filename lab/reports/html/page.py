"""The page: one HTML file that needs nothing else, and that its own policy keeps from asking for anything.

Tables are DataTables', which the package itables ships in one file; it goes into the page, so that they are sorted and filtered
offline. Without scripts they are plain tables, all rows there.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lab.reports.html import judged
from lab.reports.html.answer import fastest, faulty_runs, lead
from lab.reports.html.experiments import experiment_of
from lab.reports.html.markdown import finding_html, markdown_html
from lab.reports.html.pictures import Picture, picture_of
from lab.reports.pictures.judging import verdict_figure
from lab.reports.recorded import Kind, RecordedFile, RecordedRun, environment_facts, run_of
from lab.reports.tables import Cell, Columns, Table, make_table, words
from lab.reports.timing_tables import ceiling_table, fastest_table, methods, timing_tables
from lab.reports.timings import figures

OVERVIEW = "experiments.md"  # of `lab experiments changes`


@dataclass(frozen=True)
class TimedPart:
    """A benchmark run's part of the page; `methods` are the labels of "timed by" and what each stands for."""

    name: str
    recorded_at: str | None
    methods: list[tuple[str, str]]
    fastest: Table
    ceilings: Table
    tables: list[Table]
    pictures: list[Picture]


def html_report(folder: Path, files: Sequence[RecordedFile]) -> str:
    """Return the page of a folder's recorded files, as HTML."""
    environment = Environment(
        loader=PackageLoader("lab.reports.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_kind = {kind: [file for file in files if file.kind is kind] for kind in Kind}
    reports = of_kind[Kind.JUDGE]
    runs = [run_of(file) for file in of_kind[Kind.BENCHMARKS]]
    return environment.get_template("page.html.j2").render(
        title=_title(files),
        folder=folder.name,
        environments=_environments([file for file in files if isinstance(file.content, Mapping)]),
        leads=[lead(reports), fastest(runs)],
        faulty=faulty_runs(reports),
        judge_runs=judged.summary_table(reports),
        judge_tables=[
            table
            for table in (
                judged.verdict_table(reports),
                judged.fault_table(reports),
                judged.decline_table(reports),
                judged.survey_table(of_kind[Kind.SURVEY]),
            )
            if table.rows
        ],
        verdicts=_verdicts(reports),
        findings=[(each, Markup(finding_html(each, folder))) for each in judged.cited_findings(reports)],
        overview=_overview(folder),
        notes=[(path.name, Markup(markdown_html(path.read_text(encoding="utf-8")))) for path in _notes(folder)],
        runs=[_timed(run, f"run-{place}") for place, run in enumerate(runs)],
        experiments=[experiment_of(file) for file in of_kind[Kind.EXPERIMENT]],
        unread={file.name: _outline(file.content) for file in (*of_kind[Kind.MUTANTS], *of_kind[Kind.OTHER])},
        style=Markup(_own("page.css")),
        sorting=Markup(_own("tables.js")),
        library_uri=f"data:text/javascript;charset=utf-8;base64,{b64encode(_library('dt_bundle.js').encode()).decode()}",
        library_style=Markup(_library("dt_bundle.css")),
    )


def _outline(content: Any) -> str:
    return f"a {type(content).__name__} of {len(content)} items" if isinstance(content, list) else f"{content!r} alone"


def _notes(folder: Path) -> list[Path]:
    """Return the folder's own texts, in which its numbers are read; not those of folders in it, made of what the page shows."""
    return sorted(path for path in folder.glob("*.md") if path.name != OVERVIEW)


def _overview(folder: Path) -> Markup:
    """Return the experiments' own summary; "" if there is none."""
    path = folder / OVERVIEW
    return Markup(markdown_html(path.read_text(encoding="utf-8")) if path.is_file() else "")


def _title(files: Sequence[RecordedFile]) -> str:
    gpus = dict.fromkeys(file.fact("gpu") for file in files if file.fact("gpu"))
    machine = ", ".join(gpus) or ("CPU" if _devices(files) == {"cpu"} else "No GPU recorded")
    timed = any(file.kind in (Kind.BENCHMARKS, Kind.EXPERIMENT) for file in files)
    return f"{machine}: attention kernels judged{' and timed' if timed else ''}"


def _devices(files: Sequence[RecordedFile]) -> set[str]:
    return {str(file.content.get("device")) for file in files if file.kind is Kind.JUDGE}


def _environments(files: Sequence[RecordedFile]) -> Table:
    """Make a table of one row per file: what it was measured on."""
    facts = environment_facts([file.environment for file in files])
    columns: Columns = {
        "file": lambda file: words(file.name),
        **{name: partial(_fact_cell, where) for name, where in facts.items()},
    }
    return make_table(columns, files, name="environments", caption="What each file was measured on")


def _fact_cell(where: Sequence[str], file: RecordedFile) -> Cell:
    return words(file.fact(*where))


def _verdicts(files: Sequence[RecordedFile]) -> Picture | None:
    cells = list(judged.verdict_cells(files))
    if not cells:
        return None
    title = "Verdicts by run, function and check; numbers: worst right error, % of its bound"
    return picture_of(verdict_figure(cells, title), title)


def _timed(run: RecordedRun, name: str) -> TimedPart:
    return TimedPart(
        name=run.path.name,
        recorded_at=run.recorded_at,
        methods=methods(run.gpu_rows),
        fastest=fastest_table(run, name),
        ceilings=ceiling_table(run, name),
        tables=timing_tables(run, name),
        pictures=[picture_of(figure, Path(file).stem.replace("-", " ")) for file, figure in figures(run).items()],
    )


def _own(name: str) -> str:
    return files("lab.reports.html").joinpath(name).read_text(encoding="utf-8")


def _library(name: str) -> str:
    """Return a file of DataTables, with its extensions, as itables ships it."""
    return files("itables").joinpath("html", name).read_text(encoding="utf-8")
