"""Make the HTML page of a folder of recorded results. The page needs no other file and no network.

The page contains the JavaScript library DataTables, which the package itables ships, so that readers can sort and filter tables
offline. Without JavaScript the tables are plain and show all rows.
"""

import io
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from lab.files import DAMAGED
from lab.reports.html import judged
from lab.reports.pictures.style import Drawing
from lab.reports.recorded import LEAST_FLOOR_US, run_of
from lab.reports.recorded_file import FileKind, RecordedFile, RecordedFileError, environment_facts
from lab.reports.tables import Table, flattened, table_of_records
from lab.reports.timing_tables import ceiling_table, fastest_sentence, fastest_table, methods, timing_tables
from lab.reports.timings import figures

OVERVIEW = "experiments.md"  # a page that `lab experiments changes` writes
# A fixed salt for ids makes the figure's bytes the same on any machine. Text drawn as paths does not depend on fonts.
SVG_SETTINGS: Any = {"svg.hashsalt": "lab", "svg.fonttype": "path"}


def html_report(folder: Path, files: Sequence[RecordedFile]) -> str:
    """Return a page that shows the recorded `files` and the Markdown files in `folder`. Raises RecordedFileError if the
    content of a file does not have the structure that the lab writes.
    """
    try:
        return _rendered(folder, files)
    except RecordedFileError:
        raise
    except (*DAMAGED, UndefinedError) as error:
        for file in files if len(files) > 1 else ():
            html_report(folder, [file])  # its error names the file
        where = files[0].path if len(files) == 1 else folder
        raise RecordedFileError(f"{where}: not in the form that the lab writes: {error!r}") from error


def _rendered(folder: Path, files: Sequence[RecordedFile]) -> str:
    environment = Environment(
        loader=PackageLoader("lab.reports.html", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    of_kind = {kind: [file for file in files if file.kind is kind] for kind in FileKind}
    judged_runs = [judged.JudgedRun(**vars(file)) for file in of_kind[FileKind.JUDGE]]
    worst_first = sorted(judged_runs, key=lambda run: judged.WORST_FIRST.index(run.verdict))
    checked = [row for run in judged_runs for row in run.rows]
    cited = {finding for row in checked for finding in row.findings}
    runs = [run_of(file) for file in of_kind[FileKind.BENCHMARKS]]
    judge_tables = [
        *(table_of(checked) for table_of in (judged.verdict_matrix, judged.verdict_table, judged.fault_table)),
        judged.decline_table(judged_runs),
    ]
    library = _text_of("itables", "html", "dt_bundle.js")  # DataTables and its extensions, as itables ships them
    overview = folder / OVERVIEW
    # Markdown files in subfolders are made from results that the page already shows.
    notes = sorted(path for path in folder.glob("*.md") if path != overview)
    return environment.get_template("page.html.j2").render(
        title=_title(files),
        folder=folder.name,
        environments=_environments([file for file in files if isinstance(file.content, Mapping)]),
        sentences=[judged.judged_sentence(worst_first), fastest_sentence(runs)],
        answered=[run for run in worst_first if run.diagnosis or run.verdict in judged.BROKEN],
        judge_runs=judged.summary_table(worst_first),
        judge_tables=[table for table in judge_tables if table.rows],
        findings=[
            (each, Markup(each.html(folder))) for each in sorted(cited, key=lambda each: (each.path, each.order))
        ],
        overview=_markdown(overview) if overview.is_file() else "",
        notes=[(path.name, _markdown(path)) for path in notes],
        least_floor_us=f"{LEAST_FLOOR_US:g}",
        runs=[
            {
                "id": f"run-{place}-",
                "name": run.path.name,
                "recorded_at": run.recorded_at,
                "methods": methods(run.gpu_rows),
                "fastest": fastest_table(run),
                "ceilings": ceiling_table(run),
                "tables": timing_tables(run),
                "pictures": [
                    picture_of(drawn, Path(name).stem.replace("-", " ")) for name, drawn in figures(run).items()
                ],
            }
            for place, run in enumerate(runs)
        ],
        experiments=[experiment_part(file) for file in of_kind[FileKind.EXPERIMENT]],
        not_shown={file.name: _outline(file.content) for file in of_kind[FileKind.OTHER]},
        style=Markup(_text_of("lab.reports.html", "page.css")),
        sorting=Markup(_text_of("lab.reports.html", "tables.js")),
        library_uri=f"data:text/javascript;charset=utf-8;base64,{b64encode(library.encode()).decode()}",
        library_style=Markup(_text_of("itables", "html", "dt_bundle.css")),
    )


def picture_of(figure: Figure, description: str) -> dict[str, str]:
    """Return {"uri": the figure as an SVG data URI, "description": the description for screen readers}."""
    drawn = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    return {"uri": f"data:image/svg+xml;base64,{b64encode(drawn.getvalue()).decode()}", "description": description}


def experiment_part(file: RecordedFile) -> dict[str, Any]:
    """Return the values with which the page's template shows one recorded experiment."""
    shown = {key: value for key, value in file.content.items() if key != "environment"}
    lists = {key: value for key, value in shown.items() if isinstance(value, list)}
    rows = {key: value for key, value in lists.items() if value and all(isinstance(row, Mapping) for row in value)}
    facts = flattened({key: value for key, value in shown.items() if key not in rows and value != []})
    question, drawings = _question_and_drawings(file.experiment)
    drawn = list(_pictures(file, drawings))
    return {
        "name": file.name,
        "question": question,
        "facts": {
            key: ", ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in facts.items()
        },
        "tables": [
            table_of_records(f"{file.name.replace('/', '-')}-{key}", f"{file.name}: {key}", value)
            for key, value in rows.items()
        ],
        "empty": [key for key, value in lists.items() if not value],
        "pictures": [each for each in drawn if not isinstance(each, str)],
        "undrawn": [each for each in drawn if isinstance(each, str)],
    }


def _question_and_drawings(experiment: str) -> tuple[str, Sequence[Drawing]]:
    for found in entry_points(group="lab.page"):
        with suppress(ModuleNotFoundError):
            return found.load()(experiment)
    return "", ()


def _pictures(file: RecordedFile, drawings: Iterable[Drawing]) -> Iterator[dict[str, str] | str]:
    """Yield for each drawing the picture, or a sentence that says why it cannot be drawn."""
    measured_on = ", ".join(str(file.fact(name)) for name in ("gpu", "commit") if file.fact(name))
    for drawing in drawings:
        title = f"{drawing.words}: {measured_on}" if measured_on else drawing.words
        if file.content.get(drawing.key) == []:
            yield f"{drawing.words}: {drawing.key} has no row"
            continue
        try:
            yield picture_of(drawing.draw(file.content[drawing.key], title), drawing.words)
        except (KeyError, ValueError) as error:
            yield f"{drawing.words}: {'the file has no ' if isinstance(error, KeyError) else ''}{error}"


def _outline(content: Any) -> str:
    if isinstance(content, Mapping):
        return ", ".join(content)
    return f"a list of {len(content)} items" if isinstance(content, list) else f"{content!r} alone"


def _markdown(path: Path) -> Markup:
    return Markup(judged.markdown_html(path.read_text(encoding="utf-8")))


def _title(files: Sequence[RecordedFile]) -> str:
    gpus = dict.fromkeys(filter(None, (file.fact("gpu") for file in files)))
    devices = {file.content.get("device") for file in files if file.kind is FileKind.JUDGE}
    machine = ", ".join(gpus) or ("CPU" if devices == {"cpu"} else "No GPU recorded")
    timed = any(file.kind in (FileKind.BENCHMARKS, FileKind.EXPERIMENT) for file in files)
    return f"{machine}: attention kernels judged{' and timed' if timed else ''}"


def _environments(files: Sequence[RecordedFile]) -> Table:
    facts = environment_facts([file.environment for file in files])
    rows = [{"file": file.name} | {name: file.fact(*keys) for name, keys in facts.items()} for file in files]
    return table_of_records("environments", "What each file was measured on", rows)


def _text_of(package: str, *path: str) -> str:
    return files(package).joinpath(*path).read_text(encoding="utf-8")
